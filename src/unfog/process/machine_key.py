"""Key of a person on a machine, and seals by it, which show that a file of a run was written here and not changed.

A run may come from a stranger, with results and pictures that Unfog would otherwise take for its own work.
"""

from __future__ import annotations

import hmac
import os
import secrets
from functools import cache
from pathlib import Path

from unfog.reporting.progress import warn
from unfog.safe_files import read_file, write_once

_DIGITS = 64


@cache
def machine_key() -> bytes:
    """Return the key in ~/.config/unfog/machine-key, which is made if it is missing.

    Another one for each process, with a warning, if it cannot be stored, or others may read it.
    """
    key, reason = stored_key("machine-key")
    if key is None:
        warn(f"what this process measures and draws will be done again by the next one, as {reason}")
    return key or secrets.token_hex(_DIGITS // 2).encode()


def stored_key(name: str) -> tuple[bytes | None, str]:
    """Return 64 hexadecimal digits from a private file in ~/.config/unfog, and "".

    All processes get the same ones, also if several make the file at a time. Without such a file, return None and the
    reason.
    """
    file = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "unfog" / name
    try:
        file = file.expanduser()
        if not os.path.lexists(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_once(file, secrets.token_hex(_DIGITS // 2).encode(), file.parent)
        key = read_file(file, file.parent, _DIGITS)
        if os.name != "nt" and os.lstat(file).st_mode & 0o077:  # Windows has no such permissions
            return None, f"others may read the key {file}: chmod 600 it"
    except (OSError, RuntimeError, ValueError) as error:
        return None, f"the key {file} cannot be kept ({getattr(error, 'strerror', None) or error})"
    return (key, "") if len(key) == _DIGITS else (None, f"the key {file} is no key of ours: remove it")


def seal_of(key: bytes, name: str, content: bytes) -> bytes:
    """Return the 32 bytes that only the owner of the key can make for this content under this name."""
    head = name.encode("utf-8", "surrogateescape")
    return hmac.digest(key, len(head).to_bytes(8, "little") + head + content, "sha256")
