"""Networks: (image, noise condition, label) -> output of the image's shape. Independent of noise levels and data."""
