"""The cache folder, for files that can be made again: decoded images, features, and feature networks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return $UNFOG_CACHE, else $XDG_CACHE_HOME/unfog or ~/.cache/unfog; it may not exist yet."""
    if chosen := os.environ.get("UNFOG_CACHE"):
        return Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unfog"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "unfog-cache"
