"""Seals by the key of a person on a machine, which show that a file was written here and not changed.

A run may come from a stranger, with results and pictures that Unfog would otherwise take for its own work.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfog.files.safe_files import read_file, write_once

MACHINE_KEY = "machine-key"
DIGITS = 64


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
            write_once(file, secrets.token_hex(DIGITS // 2).encode(), file.parent)
        key = read_file(file, file.parent, DIGITS)
        if hasattr(os, "getuid") and os.lstat(file).st_mode & 0o077:  # Windows has no such permissions
            return None, f"others may read the key {file}: chmod 600 it"
    except (OSError, RuntimeError, ValueError) as error:
        return None, f"the key {file} cannot be kept ({getattr(error, 'strerror', None) or error})"
    return (key, "") if len(key) == DIGITS else (None, f"the key {file} is not a key of ours: remove it")


def seal_of(key: bytes, name: str, content: bytes) -> bytes:
    """Return the 32 bytes that only the owner of the key can make for this content under this name."""
    head = name.encode("utf-8", "surrogateescape")
    return hmac.digest(key, len(head).to_bytes(8, "little") + head + content, "sha256")


def seal_of_object(key: bytes, name: str, stored: Mapping[str, Any]) -> str:
    """Return the seal, as hexadecimal digits, of an object of JSON without its own field "seal"."""
    content = {field: value for field, value in stored.items() if field != "seal"}
    return seal_of(key, name, json.dumps(content, sort_keys=True).encode()).hex()


def is_sealed(key: bytes | None, name: str, stored: Mapping[str, Any]) -> bool:
    """Return True if the field "seal" of an object of JSON is by this key."""
    seal = str(stored.get("seal", "")).encode("utf-8", "replace")
    return key is not None and hmac.compare_digest(seal, seal_of_object(key, name, stored).encode())
