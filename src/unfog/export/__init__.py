"""Trained networks in the formats of other programs. Knows networks; no noise, no data, no training."""
