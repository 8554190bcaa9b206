"""Random changes to training images, computed on the device for whole batches."""
