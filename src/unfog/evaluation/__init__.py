"""Metrics of generated images and held-out loss. Works on arrays and callables; knows no runs and no samplers."""
