"""Values that all layers share: the format of the images of a run. Imports torch only where tensors come in."""
