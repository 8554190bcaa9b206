"""Checkpoints on disk: format, snapshots, background writer, loading, and post-hoc EMA."""
