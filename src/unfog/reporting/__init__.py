"""Output of a run: record on disk, trackers, terminal, image grids, charts and the report.

Takes numpy arrays, plain numbers and paths. Does not import torch, models, noise or training.
"""
