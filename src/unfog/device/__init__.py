"""Devices: cores, copies between host and device, random numbers of shards, and compiled code."""
