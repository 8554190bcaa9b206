"""The kinds of sources: where the images of each are, and how one is opened."""
