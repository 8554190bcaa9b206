"""Kinds of conditions that are images or captions, and helpers of all kinds."""
