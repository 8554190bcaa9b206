"""Playground of `unfog serve`: a queue of drawings, and the worker process that owns model and device."""
