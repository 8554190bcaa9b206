"""Networks: (image, noise condition, conditions) -> output of the image's shape. Independent of noise levels and data."""
