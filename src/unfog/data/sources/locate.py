"""What a SOURCE text means: which kind of source, and where its parts are. Nothing is opened, nothing parsed."""

from __future__ import annotations

import difflib
import glob
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from unfog.data.packs.pack_files import is_begun, is_pack
from unfog.data.sources.image_files import SUFFIXES, os_error_reason
from unfog.errors import RequestError
from unfog.text import sanitize, without_secrets

Kind = Literal["fashion", "folder", "zip", "tar", "pack", "arrays", "hub"]

PROTOCOLS = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs"), "adlfs"),
}
"""What a URL may begin with, and the package that reads it."""

_SUFFIXES: dict[str, Kind] = {".zip": "zip", ".tar": "tar", ".npy": "arrays", ".npz": "arrays", ".parquet": "hub"}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".gz", ".7z", ".rar")
_MOST_SHARDS = 1_000_000
_GIVE = "give a folder of images, a .zip, .tar shards, or fashion"


@dataclass(frozen=True)
class SourceLocation:
    """A source that is there, as far as looking can tell without reading it."""

    kind: Kind
    name: str
    """As the user wrote it; a URL less what is secret in it."""

    resolved: str
    """How to find it again from anywhere: an absolute path or pattern, or a URL."""

    paths: tuple[str, ...] = ()
    """Of a source of files: their absolute paths or URLs, sorted. A remote pattern with a * is left to be looked up."""

    base: str = ""
    """What all of `paths` begin with; the rest of each is its name."""


def locate(text: str) -> SourceLocation:
    """The source that a user means by a text.

    A built-in name, or hf:NAME; else a URL; else the path of a folder or file ("./fashion" is a folder in any case);
    else a pattern of paths of tar shards, with {000..099}, {a,b}, * or ?.

    Raises:
        RequestError: there is no such thing.
    """
    if not text:
        raise RequestError(f"SOURCE is empty; {_GIVE}")
    if text == "fashion":
        return SourceLocation("fashion", text, text)
    if text.startswith("hf:"):
        return SourceLocation("hub", text, text)
    if text.startswith("file://"):
        return locate(text.removeprefix("file://"))
    if "://" in text:
        return _remote(text)
    # These functions of os.path, unlike Path's, do not fail on whatever text.
    path = os.path.expanduser(text)
    try:
        if os.path.isdir(path):
            return _folder(text, path)
        if os.path.exists(path):
            return _file(text, path)
    except OSError as error:
        raise RequestError(f"{sanitize(text)} is a source {os_error_reason(error)}; check its permissions") from None
    with suppress(OSError, ValueError):  # a pattern with a character that no path may have
        if shards := _matching(path):
            return _shards(text, os.path.abspath(path), shards)
    raise _nothing(text, Path(path))


def _folder(text: str, path: str) -> SourceLocation:
    resolved = str(Path(path).resolve())
    try:
        resolved.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"the path of {sanitize(text)} has a byte that is no text (UTF-8), which no run could store; rename "
            "the folder"
        ) from None
    if is_begun(Path(path)) and not is_pack(Path(path)):
        raise RequestError(f"{sanitize(text)} is an unfinished pack; finish it with the same `unfog pack` as before")
    for marker, kind in _MARKERS.items():
        if os.path.isfile(os.path.join(path, marker)):
            return SourceLocation(kind, text, resolved)
    if shards := _only(".tar", path):
        return SourceLocation("tar", text, resolved, tuple(f"{resolved}/{name}" for name in shards), f"{resolved}/")
    if _only(".parquet", path):
        return SourceLocation("hub", text, resolved)
    return SourceLocation("folder", text, resolved)


_MARKERS: dict[str, Kind] = {"pack.json": "pack", "dataset_info.json": "hub", "dataset_dict.json": "hub"}


def _only(wanted: str, path: str) -> list[str]:
    """The files of this suffix in a folder that holds no folders and no images; [] of any other, found at the first."""
    shards = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            suffix = os.path.splitext(entry.name)[1].lower()
            if suffix in SUFFIXES or entry.is_dir():
                return []
            if suffix == wanted:
                shards.append(entry.name)
    return sorted(shards)


def _file(text: str, path: str) -> SourceLocation:
    kind = _SUFFIXES.get(os.path.splitext(path)[1].lower())
    resolved = str(Path(path).resolve())
    if path.lower().endswith(_COMPRESSED):
        raise RequestError(
            f"{sanitize(text)} is compressed as a whole, so no image in it can be reached; {_unpack(path)}"
        )
    if kind is None or not os.path.isfile(path):
        raise RequestError(
            f"{sanitize(text)} is a file; give the folder that holds the images, or a .zip, .tar, .npy or .parquet file"
        )
    return SourceLocation(kind, text, resolved, (resolved,), f"{os.path.dirname(resolved).rstrip('/')}/")


def _unpack(path: str) -> str:
    if path.lower().endswith((".7z", ".rar")):
        return "unpack it, or make it a .zip"
    return f"unpack it to a plain .tar first: {'zstd -d' if path.endswith('zst') else 'gunzip, bunzip2 or unxz'}"


def _shards(text: str, pattern: str, paths: list[str]) -> SourceLocation:
    """Shards that a pattern stands for, here or far away."""
    path = re.split(r"[?#]", paths[0])[0] if "://" in pattern else paths[0]
    kind = _SUFFIXES.get(os.path.splitext(path)[1].lower())
    if path.lower().endswith(_COMPRESSED):
        raise RequestError(
            f"{sanitize(path)} is compressed as a whole, so no image in it can be reached; {_unpack(path)}"
        )
    if kind not in ("tar", "zip") or (kind == "zip" and len(paths) > 1):
        raise RequestError(
            f"{sanitize(text)} stands for {sanitize(path)}, and not for .tar shards or one .zip; {_GIVE}"
        )
    base = re.split(r"[*?{\[]", pattern)[0].rpartition("/")[0] + "/"
    return SourceLocation(kind, without_secrets(text), pattern, tuple(sorted(set(paths))), base)


def _matching(pattern: str) -> list[str]:
    """Absolute paths of the files that a pattern stands for; [] if it is no pattern.

    Raises:
        RequestError: one that it spells out is not there.
    """
    if not re.search(r"[{*?\[]", pattern):
        return []
    found: list[str] = []
    missing: list[str] = []
    for path in map(os.path.abspath, expand_braces(pattern)):
        if re.search(r"[*?\[]", path) and not os.path.exists(path):
            found += (match for match in glob.iglob(path) if os.path.isfile(match))
        else:
            (found if os.path.isfile(path) else missing).append(path)
    if missing and found:
        named = ", ".join(sanitize(os.path.basename(path)) for path in missing[:3])
        raise RequestError(
            f"{len(missing):,} of the {len(missing) + len(found):,} files that {sanitize(pattern)} spells out are not "
            f"there: {named}{', ...' * (len(missing) > 3)}; bring them, or use * in place of the braces"
        )
    return found


def expand_braces(pattern: str) -> list[str]:
    """A pattern with its braces expanded as a shell does: "a-{00..02}" -> a-00, a-01, a-02; "{a,b}" -> a, b.

    Raises:
        RequestError: over a million.
    """
    braces = re.compile(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}")
    if math.prod(sum(1 for _ in _alternatives(match)) for match in braces.finditer(pattern)) > _MOST_SHARDS:
        raise RequestError(f"{sanitize(pattern[:80])} stands for over {_MOST_SHARDS:,} files; give a narrower pattern")
    done: list[str] = []
    pending = [pattern]
    while pending:
        text = pending.pop()
        if match := braces.search(text):
            head, tail = text[: match.start()], text[match.end() :]
            pending += [head + middle + tail for middle in reversed(list(_alternatives(match)))]
        else:
            done.append(text)
    return done


def _alternatives(match: re.Match[str]) -> Iterator[str]:
    if match[3] is not None:
        yield from match[3].split(",")
        return
    first, last = int(match[1]), int(match[2])
    if abs(last - first) >= _MOST_SHARDS:
        raise RequestError(f"{match[0]} stands for over {_MOST_SHARDS:,} files; give a narrower pattern")
    padded = any(len(number) > 1 and number[0] == "0" for number in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if padded else 0
    for number in range(first, last + 1) if first <= last else range(first, last - 1, -1):
        yield f"{number:0{width}}"


def _remote(text: str) -> SourceLocation:
    protocol = text.partition("://")[0]
    package = PROTOCOLS.get(protocol)
    if package is None:
        known = ", ".join(f"{name}://" for name in PROTOCOLS)
        raise RequestError(f"{sanitize(text)} begins with none of {known}; give one of those, or a folder")
    if find_spec(package) is None:
        extra = {"s3fs": "unfog[s3]", "aiohttp": "unfog[http]"}.get(package, package)
        raise RequestError(f"{protocol}:// needs {package}, which is not installed: pip install '{extra}'")
    if text.endswith("/"):
        return SourceLocation("tar", without_secrets(text), text, (f"{text}*.tar",), text)
    return _shards(text, text, expand_braces(text))


def _nothing(text: str, path: Path) -> RequestError:
    siblings: dict[str, str] = {}
    with suppress(OSError, ValueError):
        near = path.parent if path.parent.is_dir() else Path()
        siblings = {
            one.name: str(path.parent / one.name) for one in near.iterdir() if one.is_dir() or one.suffix in _SUFFIXES
        }
    close = difflib.get_close_matches(path.name, ["fashion", *siblings], n=1)
    hint = f"did you mean {siblings.get(close[0], close[0])}?" if close else _GIVE
    return RequestError(f"{sanitize(text)} is neither a folder nor a built-in set; {sanitize(hint)}")
