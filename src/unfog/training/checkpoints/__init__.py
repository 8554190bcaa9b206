"""Checkpoints on disk: format, snapshots, background writer, loading, rotation, and post-hoc EMA."""
