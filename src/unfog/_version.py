"""Version of the package, which the build and `unfog --version` read."""

__version__ = "0.2.0"  # the build reads it from this line
