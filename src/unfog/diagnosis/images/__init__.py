"""What can be said of images before they are trained on."""
