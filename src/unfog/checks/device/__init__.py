"""Checks of a device: what torch sees of it, whether its arithmetic and copies are right, and what a step takes."""
