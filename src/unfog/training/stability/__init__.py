"""Training that goes on: detect divergence, find what was not finite, and recover from out-of-memory errors."""
