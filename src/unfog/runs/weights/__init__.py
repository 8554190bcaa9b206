"""Weights that a run starts from, or that are sampled without one: of a run, of diffusers, or of another program."""
