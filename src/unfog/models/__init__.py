"""Networks: (image, noise condition, label) -> output of the image's shape. They know no noise, no data."""
