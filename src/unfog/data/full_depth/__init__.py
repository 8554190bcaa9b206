"""Images that keep their values: arrays of many channels, floating point, and 16 bits, which never become 8 bits."""
