"""Predict a run and choose its open settings: memory, time, disk, micro-batch and learning rate."""
