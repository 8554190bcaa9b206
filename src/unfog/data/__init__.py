"""Images by position: sources, decoding, caching, the endless shuffled stream, augmentation.

Everything here deals in uint8 pixels and whole-number labels; it knows nothing of noise, networks or
terminals.
"""
