"""Updates of the weights: their verdict on the device or the host, their masks, and a step as one CUDA graph."""
