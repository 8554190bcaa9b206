"""Augmentation of training images, for whole batches on their device."""
