"""Exports: descriptions of models, conditions by name, and the folder that diffusers reads."""
