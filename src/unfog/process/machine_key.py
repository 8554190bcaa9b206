"""Key of a person on a machine, and seals by it, which show that a file of a run was written here and not changed.

A run may come from a stranger, with results and pictures that Unfog would otherwise take for its own work.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path

from unfog.safe_files import read_file, write_atomic

_DIGITS = 64


@cache
def machine_key() -> bytes:
    """Return the key in ~/.config/unfog/machine-key, which is made if it is missing.

    Another one for each process if it cannot be stored, or others may read it.
    """
    with suppress(OSError, RuntimeError, ValueError):
        file = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "unfog" / "machine-key"
        if not os.path.lexists(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, secrets.token_hex(_DIGITS // 2).encode(), file.parent, private=True)
        key = read_file(file, file.parent, _DIGITS)
        if len(key) == _DIGITS and not os.lstat(file).st_mode & 0o077:
            return key
    return secrets.token_hex(_DIGITS // 2).encode()


def seal_of(key: bytes, name: str, content: bytes) -> bytes:
    """Return the 32 bytes that only the owner of the key can make for this content under this name."""
    head = name.encode("utf-8", "surrogateescape")
    return hmac.digest(key, len(head).to_bytes(8, "little") + head + content, "sha256")
