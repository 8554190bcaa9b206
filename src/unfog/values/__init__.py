"""Values that every layer knows: images and conditions."""
