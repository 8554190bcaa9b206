"""The registry of sources: which class reads what a SOURCE text means."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from unfog.data.sources.base import OpenOptions, RemotePolicy, Source, SourceLocation
from unfog.data.sources.image_files import os_error_reason
from unfog.data.sources.location import parse_location, unknown_file
from unfog.errors import RequestError
from unfog.text import sanitize

BUILT_IN = (
    "unfog.data.sources.builtin_fashion:FashionSource",
    "unfog.data.packs.pack:PackSource",
    "unfog.data.sources.huggingface:HuggingFaceSource",
    "unfog.data.webdataset.shard_source:ShardSource",
    "unfog.data.sources.zip_archive:ZipSource",
    "unfog.data.sources.arrays:ArraySource",
    "unfog.data.sources.folder:FolderSource",  # last, as it matches every folder
)
"""MODULE:CLASS of each source, in the order in which they are asked. They are imported at the first SOURCE, as Pillow
and NumPy would slow down commands that read no images."""

PYTHON = "python:"
"""A SOURCE that begins so names a class to import: python:MODULE:CLASS, or python:MODULE:CLASS:ARGUMENT."""

_registered: list[type[Source]] = []


def register(source: type[Source]) -> type[Source]:
    """Have a subclass of `Source` asked before the built-in ones. May be used as a decorator."""
    if source not in _registered:
        _registered.insert(0, source)
    return source


def locate(text: str) -> tuple[type[Source], SourceLocation]:
    """Return which class reads a SOURCE and where it is. Nothing is opened or asked of a network.

    Raises:
        RequestError: there is no such thing, or no source reads it.
    """
    if text.startswith(PYTHON):
        _, _, argument = text.removeprefix(PYTHON).partition(":")[2].partition(":")
        return _import_class(text), SourceLocation(text, text, "name", (argument,) if argument else ())
    text = text.removeprefix("file://")
    sources = [*_registered, *map(_import_class, BUILT_IN)]
    named = _match(sources, SourceLocation(text, text, "name"))
    if named:
        return named
    location = parse_location(text, {suffix for source in sources for suffix in source.suffixes})
    try:
        found = _match(sources, location)
    except OSError as error:
        raise RequestError(f"{sanitize(text)} is a source {os_error_reason(error)}; check its permissions") from None
    if found is None:
        raise unknown_file(location)
    return found


def open_source(
    text: str | Path, progress: Callable[[int, int], None] | None = None, policy: RemotePolicy | None = None
) -> Source:
    """Open the source that a text means.

    Args:
        text: a built-in name, hf:NAME, a URL, the path of a folder or file, a pattern of paths of tar shards with
            {000..099}, {a,b}, * or ?, or python:MODULE:CLASS.
        progress: called with (megabytes done, megabytes in all) while an index of shards is built, which may take
            minutes once. What it raises stops that; what is done by then is kept.
        policy: for remote shards.

    Raises:
        RequestError: there is no such thing, it has no image, or it cannot be read.
    """
    source, location = locate(str(text))
    return source.load(location, OpenOptions(progress, policy or RemotePolicy()))


def _match(sources: list[type[Source]], location: SourceLocation) -> tuple[type[Source], SourceLocation] | None:
    return next(((source, matched) for source in sources if (matched := source.match(location))), None)


def _import_class(text: str) -> type[Source]:
    """Return the class that [python:]MODULE:CLASS[:ARGUMENT] names. This runs the code of its module."""
    module, _, name = text.removeprefix(PYTHON).partition(":")
    name = name.partition(":")[0]
    try:
        source = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"{sanitize(text)} cannot be imported: {error}; give python:MODULE:CLASS") from None
    if not (isinstance(source, type) and issubclass(source, Source)):
        raise RequestError(f"{sanitize(text)} is no subclass of unfog.data.sources.base.Source")
    return source
