"""What a run tells people: the record on disk, the trackers, the terminal, pictures, charts and the report.

Takes numpy arrays, plain numbers and paths. Knows nothing of torch, models, noise or training.
"""
