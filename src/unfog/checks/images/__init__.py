"""Checks of images before training: decoding, classes, duplicates, sizes and exposure."""
