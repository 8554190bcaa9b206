"""Values deeper than 8 bits: their range, and images of them."""
