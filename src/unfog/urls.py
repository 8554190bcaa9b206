"""What of a URL may be shown to others."""

from __future__ import annotations

import re

_URL = re.compile(r"""([a-z][a-z0-9+]*://)(?:[^/\s?#'"]*@)?([^\s?'"]*)(?:\?[^\s'"]*)?""", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """A text with each URL in it less its query, which may be a signature, and less a user's name and password."""
    return _URL.sub(r"\1\2", text)
