"""From gradients to a trained network: the loop, its state, precision, optimiser, EMA and checkpoints.

Knows the diffusion objective as a callable; knows no network, no image files and no terminal.
"""
