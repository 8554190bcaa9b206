"""From a SOURCE text to an open source: paths, URLs and patterns of shards, and the class that reads them."""

from __future__ import annotations

import difflib
import glob
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from unfog.custom import consent, import_object
from unfog.data.sources.base import SCAN_SUFFIXES, OpenOptions, RemotePolicy, Source, SourceLocation
from unfog.data.sources.image_files import os_error_reason
from unfog.errors import RequestError, install_command
from unfog.text import sanitize, without_secrets
from unfog.values.arrays.slices import AXIAL

# MODULE:CLASS of each source, in the order in which they are asked.
BUILT_IN = (
    "unfog.data.sources.builtin_fashion:FashionSource",
    "unfog.data.packs.pack:PackSource",
    "unfog.data.sources.huggingface:HuggingFaceSource",
    "unfog.data.webdataset.shard_source:ShardSource",
    "unfog.data.containers.zarr_store:ZarrSource",  # before zip archives, some of which are Zarr stores
    "unfog.data.sources.zip_archive:ZipSource",
    "unfog.data.sources.arrays:ArraySource",
    "unfog.data.containers.hdf5:Hdf5Source",
    "unfog.data.sources.stored_images:StoredImages",
    "unfog.data.sources.array_folder:ArrayFolder",
    "unfog.data.scans.tiff:TiffSource",
    "unfog.data.scans.nifti:NiftiSource",
    "unfog.data.scans.dicom:DicomSource",
    "unfog.data.scans.fits:FitsSource",
    "unfog.data.sources.folder:FolderSource",  # last, as it matches every folder
)

PYTHON = consent.SOURCE

# URL protocol -> the package that fsspec reads it with.
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs"), "adlfs"),
}

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".gz", ".7z", ".rar")
_READ_COMPRESSED = tuple(suffix for suffix in SCAN_SUFFIXES if suffix.endswith(".gz"))
_MAX_SHARDS = 1_000_000
_REMEDY = "give a folder of images, a .zip, .tar shards, or fashion"

_registered: list[type[Source]] = []


def register(source: type[Source]) -> type[Source]:
    """Have a subclass of `Source` asked before the built-in ones. May be used as a decorator."""
    if source not in _registered:
        _registered.insert(0, source)
    return source


def locate(text: str, began: bool = False) -> tuple[type[Source], SourceLocation]:
    """Return which class reads a SOURCE and where it is, without opening it. Raises RequestError if none does.

    `began` is True for a run that has begun: see `Source.new_runs_only`.
    """
    if text.startswith(PYTHON):
        _, _, argument = text.removeprefix(PYTHON).partition(":")[2].partition(":")
        return _own_class(text), SourceLocation(text, text, "name", (argument,) if argument else ())
    text = text.removeprefix("file://")
    # Imported only now, as Pillow and NumPy would slow down commands that read no images.
    sources = [*_registered, *map(_import_class, BUILT_IN)]
    # Names come first, so that a folder called "fashion" in the working directory does not hide the built-in set.
    if named := _match(sources, SourceLocation(text, text, "name")):
        return named
    location = _parse_location(text, {suffix for source in sources for suffix in source.suffixes})
    try:
        found = _match([source for source in sources if not (began and source.new_runs_only)], location)
    except OSError as error:
        raise RequestError(f"{sanitize(text)} is a source {os_error_reason(error)}; check its permissions") from None
    if found is None:
        raise _unknown_file(location)
    return found


def open_source(
    text: str | Path,
    progress: Callable[[int, int], None] | None = None,
    policy: RemotePolicy | None = None,
    axes: str = "auto",
    began: bool = False,
    slices: str = AXIAL,
) -> Source:
    """Open the source that a text means.

    Args:
        text: a built-in name, hf:NAME, a URL, the path of a folder or file, FORMAT:PATH of tiff, nifti, dicom or fits,
            a pattern of paths of tar shards with {000..099}, {a,b}, * or ?, or python:MODULE:CLASS.
        progress: called with (megabytes done, megabytes in all) while an index of shards is built, which may take
            minutes once. It may raise to stop; what is done by then is kept.
        policy: for remote shards.
        axes: `data.axes`.
        began: as in `locate`.
        slices: `data.slices`.

    Raises:
        RequestError: there is no such thing, it has no image, or it cannot be read.
    """
    source, location = locate(str(text), began)
    if slices != AXIAL and not source.has_volumes:
        raise RequestError(
            f"data.slices = {slices} cuts NIfTI volumes, and {sanitize(location.name)} has none; omit it"
        )
    return source.load(location, OpenOptions(progress, policy or RemotePolicy(), axes, slices))


def _match(sources: list[type[Source]], location: SourceLocation) -> tuple[type[Source], SourceLocation] | None:
    return next(((source, matched) for source in sources if (matched := source.match(location))), None)


def _import_class(text: str) -> type[Source]:
    """Import the class of a built-in source, MODULE:CLASS."""
    module, _, name = text.partition(":")
    source: type[Source] = getattr(import_module(module), name)
    return source


def _own_class(text: str) -> type[Source]:
    """Import the class that python:MODULE:CLASS[:ARGUMENT] names, which runs the code of its module."""
    # It may be a stranger's folder, whose name the shell has completed.
    if os.path.lexists(text):
        raise RequestError(
            f"{sanitize(text)} is a file or folder here, and also names Python code; write ./ in front of it for the "
            "folder, or go to another folder for the code"
        )
    source = import_object(consent.source_path(text), "the source")
    if not (isinstance(source, type) and issubclass(source, Source)):
        raise RequestError(f"{sanitize(text)} is not a subclass of unfog.data.sources.base.Source")
    return source


def _parse_location(text: str, suffixes: Collection[str]) -> SourceLocation:
    """Return the place of the images: a URL (with ://), else an existing path, else a pattern of paths.

    `suffixes` are those of files that some source reads. Raises RequestError if there is no such thing.
    """
    if not text:
        raise RequestError(f"SOURCE is empty; {_REMEDY}")
    if "://" in text:
        return _parse_url(text)
    # Unlike Path's methods, these functions of os.path raise for no text, however long or odd.
    path = os.path.expanduser(text)
    try:
        if os.path.isdir(path):
            return _parse_folder(text, path)
        if os.path.exists(path):
            return _parse_file(text, path)
    except OSError as error:
        raise RequestError(f"{sanitize(text)} is a source {os_error_reason(error)}; check its permissions") from None
    with suppress(OSError, ValueError):  # a pattern with a character that no path may have
        if paths := _glob(path):
            return _parse_files(text, os.path.abspath(path), paths)
    raise _not_found(text, Path(path), suffixes)


def _unknown_file(location: SourceLocation) -> RequestError:
    """Return the error for a file, or a pattern of files, that no source reads."""
    problem = "is a file; give the folder that holds the images, or a .zip, .tar, .npy or .parquet file"
    if location.form == "files":
        problem = f"matches {sanitize(location.paths[0])}, but only .tar shards or one .zip can be given; {_REMEDY}"
    return RequestError(f"{sanitize(location.name)} {problem}")


def expand_braces(pattern: str) -> list[str]:
    """Expand braces as a shell does: "a-{00..02}" -> a-00, a-01, a-02; "{a,b}" -> a, b.

    Raises:
        RequestError: it stands for over a million texts.
    """
    braces = re.compile(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}")
    # Counted before anything is built, as three braces of six digits each would fill the memory.
    if math.prod(sum(1 for _ in _alternatives(match)) for match in braces.finditer(pattern)) > _MAX_SHARDS:
        raise RequestError(f"{sanitize(pattern[:80])} matches over {_MAX_SHARDS:,} files; give a narrower pattern")
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
    if abs(last - first) >= _MAX_SHARDS:
        raise RequestError(f"{match[0]} matches over {_MAX_SHARDS:,} files; give a narrower pattern")
    # As in a shell, {01..3} pads to the longer end, {1..10} does not pad.
    padded = any(len(number) > 1 and number[0] == "0" for number in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if padded else 0
    for number in range(first, last + 1) if first <= last else range(first, last - 1, -1):
        yield f"{number:0{width}}"


def _parse_url(text: str) -> SourceLocation:
    protocol = text.partition("://")[0]
    package = _PACKAGES.get(protocol)
    if package is None:
        known = ", ".join(f"{name}://" for name in _PACKAGES)
        raise RequestError(f"{sanitize(text)} has an unknown protocol; give {known}, or a folder")
    if find_spec(package) is None:
        extra = {"s3fs": "s3", "aiohttp": "http"}.get(package)
        command = install_command(extra) if extra else f"pip install {package}"
        raise RequestError(f"{protocol}:// needs {package}, which is not installed: {command}")
    if text.endswith("/"):
        return SourceLocation(without_secrets(text), text, "files", (f"{text}*.tar",), text)
    return _parse_files(text, text, expand_braces(text))


def _parse_folder(text: str, path: str) -> SourceLocation:
    resolved = str(Path(path).resolve())
    try:
        resolved.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"the path of {sanitize(text)} is not valid UTF-8, so a run could not store it; rename the folder"
        ) from None
    return SourceLocation(text, resolved, "folder")


def _parse_file(text: str, path: str) -> SourceLocation:
    resolved = str(Path(path).resolve())
    _refuse_compressed(text, path)
    location = SourceLocation(text, resolved, "file", (resolved,), f"{os.path.dirname(resolved).rstrip('/')}/")
    if not os.path.isfile(path):  # a pipe, which would block on opening
        raise _unknown_file(location)
    return location


def _parse_files(text: str, pattern: str, paths: list[str]) -> SourceLocation:
    first = re.split(r"[?#]", paths[0])[0] if "://" in pattern else paths[0]
    _refuse_compressed(first, first)
    base = re.split(r"[*?{\[]", pattern)[0].rpartition("/")[0] + "/"
    return SourceLocation(without_secrets(text), pattern, "files", tuple(sorted(set(paths))), base)


def _refuse_compressed(text: str, path: str) -> None:
    # A member of a compressed archive cannot be read without unpacking all before it.
    if not path.lower().endswith(_COMPRESSED) or path.lower().endswith(_READ_COMPRESSED):
        return
    remedy = f"unpack it to a plain .tar first: {'zstd -d' if path.endswith('zst') else 'gunzip, bunzip2 or unxz'}"
    if path.lower().endswith((".7z", ".rar")):
        remedy = "unpack it, or make it a .zip"
    raise RequestError(f"{sanitize(text)} is compressed as a whole, so no image in it can be reached; {remedy}")


def _glob(pattern: str) -> list[str]:
    """Return the absolute paths of the files that a pattern stands for, [] if it is not a pattern."""
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
            f"{len(missing):,} of the {len(missing) + len(found):,} files of {sanitize(pattern)} do not "
            f"exist: {named}{', ...' * (len(missing) > 3)}; restore them, or use * in place of the braces"
        )
    return found


def _not_found(text: str, path: Path, suffixes: Collection[str]) -> RequestError:
    if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'":
        return RequestError(f"{sanitize(text)} is not a path, as its quotes are a part of it; leave the quotes out")
    siblings: dict[str, str] = {}
    with suppress(OSError, ValueError):
        near = path.parent if path.parent.is_dir() else Path()
        siblings = {one.name: str(near / one.name) for one in near.iterdir() if one.is_dir() or one.suffix in suffixes}
    close = difflib.get_close_matches(path.name, ["fashion", *siblings], n=1)
    hint = f"did you mean {siblings.get(close[0], close[0])}?" if close else _REMEDY
    return RequestError(f"{sanitize(text)} is neither a folder nor a built-in set; {sanitize(hint)}")
