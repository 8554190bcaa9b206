"""Image files looked at before they are decoded: limits on their heads, and pictures that Unfog has written."""
