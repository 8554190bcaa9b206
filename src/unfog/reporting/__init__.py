"""Output of a run: record on disk, trackers, terminal, image grids, charts and the report.

Takes numpy arrays, plain numbers and paths. Knows nothing of torch, models, noise or training.
"""
