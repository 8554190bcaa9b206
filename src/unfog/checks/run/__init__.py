"""Checks of a run: its record, its losses, its weights and its generated images."""
