"""How good a network is, in numbers. Works on arrays and callables; knows no run, no file and no sampler."""
