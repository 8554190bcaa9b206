"""Checks of settings before training: learning rate, length, intervals, noise levels and the machine."""
