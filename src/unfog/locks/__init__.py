"""Locks on folders, among processes of one machine or of several that share a disk; and folders written as a whole.

A lock has two signs, because a file system may refuse flock, grant it to everybody, or never answer. The first sign is
flock, believed only if it refuses a second lock, and given up after a minute. The second is a mark in the locked file:
the host, process and a random number of its owner, refreshed every few seconds. A process that is gone owns nothing.
"""
