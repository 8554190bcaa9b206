"""Checks of images, settings and runs. Each check returns findings with a remedy."""
