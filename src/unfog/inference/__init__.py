"""Use a trained run: load it, generate images, evaluate them, and compare them with training images."""
