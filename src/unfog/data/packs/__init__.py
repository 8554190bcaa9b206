"""Decoded images on disk, memory-mapped: what `unfog pack` writes and the cache consists of."""
