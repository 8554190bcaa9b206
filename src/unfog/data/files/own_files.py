"""Recognise pictures that Unfog has written, and run folders, among images to train on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

from unfog.text import MARK

_HEAD_BYTES = 2048  # with the largest palette of a GIF
# "Settings" is what samples of earlier versions hold in place of the mark.
_SIGNS = (f"tEXtSoftware\0{MARK}".encode(), b"tEXtSettings\0", b"\x21\xfe\x05%b\0" % MARK.encode())
XMP = f"<{MARK}/>".encode()
"""Metadata of a WebP file that Unfog has written."""
_MAX_ANIMATION = 2**26  # bytes
# Names that Unfog gives to pictures: samples and previews by number, grids and sheets by a word.
_NAMES = re.compile(r"(\d{6}(-[\w-]*)?|\d{8}|grid|strip|samples|contact-sheet|drawn)(-\d+)?\.png|.*\.(gif|webp)", re.I)
_PROBES = 16  # files of a folder that are read before all candidates are

Head = Callable[[str, int], bytes]
"""Function of (name, n) that returns the first n bytes of a file, or all of them; b"" if it cannot be read."""


def is_own(start: bytes) -> bool:
    """Return True if an image file that begins with these bytes was written by Unfog."""
    return any(sign in start[:_HEAD_BYTES] for sign in _SIGNS) or (_is_animation(start) and XMP in start)


def own_pictures(names: Iterable[str], read_head: Head) -> set[str]:
    """Return those of the names, paths with "/", that are pictures which Unfog has written.

    Only files with a name that Unfog gives are read, and of many in one folder a few first.
    """
    folders = defaultdict[str, list[str]](list)
    for name in names:
        folder, _, base = name.rpartition("/")
        if _NAMES.fullmatch(base):
            folders[folder].append(name)
    return {name for candidates in folders.values() for name in _own_of_folder(candidates, read_head)}


def _own_of_folder(names: list[str], read_head: Head) -> list[str]:
    probes = names[:: max(1, len(names) // _PROBES)]
    if len(probes) < len(names) and not any(_probe(name, read_head) for name in probes):
        return []  # an image set whose files are numbered, too
    return [name for name in names if _probe(name, read_head)]


def _probe(name: str, read_head: Head) -> bool:
    head = read_head(name, _HEAD_BYTES)
    return is_own(read_head(name, _MAX_ANIMATION) if _is_animation(head) else head)


def _is_animation(start: bytes) -> bool:
    """Return True for an animated WebP file, whose metadata stand at its end."""
    return start[:4] == b"RIFF" and start[8:16] == b"WEBPVP8X" and bool(start[20] & 2)


def run_folders(names: Iterable[str]) -> set[str]:
    """Return the folders in an archive that hold config.toml and checkpoints/. Each ends in "/" or is ""."""
    configs, checkpoints = set[str](), set[str]()
    for name in names:
        parts = PurePosixPath(name).parts
        if parts[-1:] == ("config.toml",):
            configs.add(name.removesuffix("config.toml"))
        if "checkpoints" in parts[:-1]:
            above = parts[: parts.index("checkpoints")]
            checkpoints.add("".join(f"{part}/" for part in above))
    return configs & checkpoints
