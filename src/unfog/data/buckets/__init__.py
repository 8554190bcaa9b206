"""Buckets of images of equal area, for runs that keep the aspects of their images: `data.aspect = keep`."""
