"""Losses: how far the network's output is from its target."""
