"""The settings of all layers as one tree, in and out of TOML, and the presets.

A setting lives beside what it configures (`unfog/*/settings.py`); this layer only puts them together.
"""
