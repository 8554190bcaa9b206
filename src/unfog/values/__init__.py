"""Values that all layers share: the formats of images and conditions. Imports torch only where tensors come in."""
