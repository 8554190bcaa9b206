"""Key of a person on a machine; see `seals`."""

from __future__ import annotations

import secrets
from functools import cache

from unfog.files.seals import DIGITS, MACHINE_KEY, stored_key
from unfog.reporting.progress import warn


@cache
def machine_key() -> bytes:
    """Return the key in ~/.config/unfog/machine-key, which is made if it is missing.

    Another one for each process, with a warning, if it cannot be stored, or others may read it.
    """
    key, reason = stored_key(MACHINE_KEY)
    if key is None:
        warn(f"what this process measures and draws will be done again by the next one, as {reason}")
    return key or secrets.token_hex(DIGITS // 2).encode()
