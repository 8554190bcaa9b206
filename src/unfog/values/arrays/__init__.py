"""Images in arrays: the axis of their channels, the names of dimensions, and slices of volumes."""
