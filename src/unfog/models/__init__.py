"""Networks: (image, noise condition, conditions) -> output of the image's shape. They know no noise levels or data."""
