"""What can be said of settings before a run, against the images, the length and the machine."""
