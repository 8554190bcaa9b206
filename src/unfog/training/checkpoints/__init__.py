"""Checkpoints on disk: format, snapshot, background writer, rotation, sharded files, and EMA snapshots."""
