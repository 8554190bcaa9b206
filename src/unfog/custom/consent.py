"""Consent to code that settings name: given in this process, by UNFOG_TRUST, or stored with the file and its SHA-256.

A file of settings may be somebody else's, so a part or source that it names is imported only with consent. A person
gives it by the value of a flag or keyword that names the part, and by a SOURCE that begins with `python:`. No other
text gives consent: names of runs, folders and files may be somebody else's too. It is stored for one content of one
file, so that a file that changes, or another file of that name, is asked about again. What is imported is exactly the
bytes whose SHA-256 was compared.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from unfog.errors import RequestError
from unfog.files.safe_files import open_file, read_file
from unfog.text import sanitize

PART = "custom:path="
"""Beginning of a spec string that names code: custom:path=MODULE.NAME,argument=value."""
SOURCE = "python:"
"""Beginning of a SOURCE that names code: python:MODULE:CLASS, or python:MODULE:CLASS:ARGUMENT."""
TRUST = "UNFOG_TRUST"
STARTED_BY = "UNFOG_STARTED_BY"
"""Environment variable of commands that the page starts. Their words are not a person's, and give no consent."""

_LARGEST = 2**24  # bytes of the file of consents
_LARGEST_MODULE = 2**28  # bytes of a module; compiled ones are large
_from_files: set[str] = set()
_given: set[str] = set()
_imported: set[str] = set()
_words_of_others: ContextVar[bool] = ContextVar("words_of_others", default=False)


def part_path(text: object) -> str:
    """Return MODULE.NAME of a spec string `custom:path=MODULE.NAME,…`; "" for everything else."""
    return text.removeprefix(PART).partition(",")[0] if isinstance(text, str) and text.startswith(PART) else ""


def source_path(text: object) -> str:
    """Return MODULE:CLASS of a SOURCE `python:MODULE:CLASS:…`; "" for everything else."""
    if not isinstance(text, str) or not text.startswith(SOURCE):
        return ""
    return ":".join(text.removeprefix(SOURCE).split(":")[:2])


def by_a_person() -> bool:
    """Return True if the words of this command are a person's, and not those of the page."""
    return STARTED_BY not in os.environ and not _words_of_others.get()


def give(path: str) -> None:
    """Consent to the import of a path in this process: MODULE.NAME of a part, or MODULE:CLASS of a source.

    Call it only with the value of a flag or keyword that names code. Without effect for words of the page.
    """
    if split_path(path) and by_a_person():
        _given.add(path)


def give_to_source(text: object) -> None:
    """Consent to a SOURCE that a person names, if it begins with `python:`."""
    # A folder of that name may be a stranger's: `locate` refuses it.
    if (path := source_path(text)) and not os.path.lexists(str(text)):
        give(path)


@contextmanager
def words_of_others() -> Iterator[None]:
    """Return a context in which nothing gives consent, for checks of requests that a page sends."""
    token = _words_of_others.set(True)
    try:
        yield
    finally:
        _words_of_others.reset(token)


def require(settings: Any) -> None:
    """Import what these settings, read from a file, name only with consent."""
    _from_files.update(code_paths(settings))


def code_paths(settings: Any) -> Iterator[str]:
    """Yield every path that a tree of settings names: of parts, samplers, trackers and sources."""
    if isinstance(settings, str):
        yield from filter(None, (part_path(settings), source_path(settings)))
    elif isinstance(settings, tuple | list):
        for item in settings:
            yield from code_paths(item)
    elif isinstance(settings, Mapping):
        yield from code_paths(list(settings.values()))
    elif is_dataclass(settings):
        if getattr(settings, "kind", "") == "custom":
            yield str(getattr(settings, "path", ""))
        for field in fields(settings):
            yield from code_paths(getattr(settings, field.name))


def is_from_file(path: str) -> bool:
    """Return True if a file of settings has named this path."""
    return path in _from_files


def given_paths() -> list[str]:
    """Return the paths that were consented to in this process, or imported by it: worker ranks may import them too."""
    return sorted(_given | _imported)


def split_path(path: str) -> tuple[str, str] | None:
    """Return module and name of MODULE.NAME or MODULE:CLASS; None if these are not names of Python."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    return (module, name) if all(part.isidentifier() for part in (*module.split("."), name)) else None


def check(path: str, noun: str) -> ModuleCode:
    """Return the code that a path names. Raise RequestError if a file names it, and nobody has consented to it.

    Consent that a person gave is stored with the file of the module, so that a later command on the same run has it.
    """
    code = ModuleCode.find((split_path(path) or ("", ""))[0])
    line, stored = f"{path}\t{code.file}\t{code.digest}", _stored()
    given = path in os.environ.get(TRUST, "").split(",") or path in _given
    known = bool(code.digest) and line in stored.split("\n")
    # What was imported already is not asked about again, which would protect nothing.
    if not (given or known or path in _imported) and (path in _from_files or STARTED_BY in os.environ):
        raise RequestError(_refusal(path, noun, code, stored))
    # A file whose name holds a line break could make a line of its own.
    if given and code.digest and not known and line.replace("\t", "").isprintable():
        _store(line, stored)
    return code


def check_all(settings: Any) -> None:
    """Raise RequestError, as `check` does, for the first path of these settings without consent. Imports nothing."""
    for path in code_paths(settings):
        check(path, "a part")


def was_imported(path: str) -> bool:
    """Return True if this process has imported the path."""
    return path in _imported


def note_import(path: str) -> None:
    """Note that this process has imported the path."""
    _imported.add(path)


def _refusal(path: str, noun: str, code: ModuleCode, stored: str) -> str:
    where = f" in {sanitize(code.file)}" if code.file else ""
    lines = [line.split("\t") for line in stored.split("\n")]
    changed = any(len(line) == 3 and line[:2] == [path, code.file] for line in lines)
    news = ", and has changed since you trusted it" if changed else ""
    once = "" if by_a_person() else " and run the command once in a terminal"
    return (
        f"{noun} of these settings is Python code, {path}{where}, which would run with your rights{news}; if you trust "
        f"it, set {TRUST}={path}{once}"
    )


def _file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "unfog" / "trusted-code"


def _stored() -> str:
    with suppress(OSError, RuntimeError, ValueError):
        return read_file(_file(), _file().parent, _LARGEST, follow=True).decode()
    return ""


def _store(line: str, stored: str) -> None:
    with suppress(OSError, RuntimeError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        # Appended in one write, as another process may store a consent at this moment. The file may be a link to
        # where a person keeps all settings, and an editor may have left its last line without an end.
        with open_file(_file(), "ab", _file().parent, follow=True, buffering=0) as file:
            file.write(b"\n" * (stored[-1:] not in ("", "\n")) + f"{line}\n".encode())


class _PinnedLoader(SourceFileLoader):
    """Loader that compiles the given bytes. It reads no bytecode: a `.pyc` beside a file may hold other code."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_data(self, path: str) -> bytes:
        """Return the given bytes for the module itself, and the content of other files."""
        return self._content if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> dict[str, float]:
        """Raise OSError, after which Python neither reads nor writes bytecode."""
        raise OSError(f"{path} is compiled anew")


class _PinnedFinder:
    """Finder of the modules that were found before, which comes before all others."""

    def __init__(self, specs: dict[str, ModuleSpec]) -> None:
        self._specs = specs

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> object:
        """Return the spec of a module that was found before; None for every other one."""
        return self._specs.get(name)


@dataclass(frozen=True)
class ModuleCode:
    """The code that the import of a module runs: its file, and the `__init__.py` of the packages around it."""

    name: str
    file: str = ""
    """File of the module itself; "" if it has none that can be read."""
    digest: str = ""
    """SHA-256 of each file, the outermost package first, with + between them; "" if one cannot be read."""
    specs: tuple[tuple[str, ModuleSpec], ...] = ()
    """Modules that are not imported yet, the outermost package first."""
    folder: str = ""
    """The current folder, if the module is found there and nowhere on the import path."""

    @classmethod
    def find(cls, name: str) -> ModuleCode:
        """Find a module on the import path, or else in the current folder, without running any code."""
        namespaces: list[str] = []
        # A finder for whatever is installed may raise anything.
        try:
            return cls._find(name, namespaces)
        except Exception:
            return cls(name)
        finally:
            for one in namespaces:
                sys.modules.pop(one, None)

    @classmethod
    def _find(cls, name: str, namespaces: list[str]) -> ModuleCode:
        digests, specs, file, folder = list[str](), list[tuple[str, ModuleSpec]](), "", ""
        places: Iterable[str] | None = None
        for part in _prefixes(name):
            module = sys.modules.get(part)
            if module is not None:
                file, places = str(getattr(module, "__file__", None) or ""), getattr(module, "__path__", None)
                content = _read(file)
            else:
                spec = _find_spec(part, places)
                if spec is None and "." not in part and (spec := PathFinder.find_spec(part, [os.getcwd()])):
                    folder = os.getcwd()
                if spec is None:
                    return cls(name)
                file = str(spec.origin) if spec.has_location else ""
                content, places = _read(file), spec.submodule_search_locations
                if spec.origin is None and places is not None:
                    # Python finds what is inside a folder without `__init__.py` only through its module.
                    sys.modules[part] = module_from_spec(spec)
                    namespaces.append(part)
                specs.append((part, spec if content is None else _pinned(spec, content)))
            if content is not None:
                digests.append(hashlib.sha256(content).hexdigest())
            elif part == name or file:
                return cls(name, specs=tuple(specs), folder=folder)
        return cls(name, str(Path(file).resolve()), "+".join(digests), tuple(specs), folder)

    def load(self) -> ModuleType:
        """Import the module from the bytes that were read when it was found. Raises what its code raises."""
        # Last, so that it shadows nothing; and only for what is there, as optional packages are looked for as well.
        if self.folder and self.folder not in sys.path:
            sys.path.append(self.folder)
        finder = _PinnedFinder(dict(self.specs))
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
        try:
            return import_module(self.name)
        finally:
            sys.meta_path.remove(finder)  # type: ignore[arg-type]


def _prefixes(name: str) -> Iterator[str]:
    """Yield "a", "a.b" and "a.b.c" of "a.b.c"."""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def place_of(error: BaseException) -> str:
    """Return the last place of an error in modules with consent, "mynet.py, line 18, in Net.forward"; "" elsewhere."""
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        if isinstance(frame.f_globals.get("__loader__"), _PinnedLoader):
            code = frame.f_code
            found = f"{sanitize(Path(code.co_filename).name)}, line {line}, in {code.co_qualname}"
    return found


def _find_spec(name: str, places: Iterable[str] | None) -> ModuleSpec | None:
    """Find a module as an import does, but without importing the packages around it."""
    for finder in sys.meta_path:
        with suppress(AttributeError):  # a finder of before Python 3.4
            spec = finder.find_spec(name, places if places is None else list(places))
            if spec is not None:
                return spec
    return None


def _read(file: str) -> bytes | None:
    if not file:
        return None
    with suppress(OSError, ValueError):
        return read_file(Path(file), Path(file).parent, _LARGEST_MODULE, follow=True)
    return None


def _pinned(spec: ModuleSpec, content: bytes) -> ModuleSpec:
    """Return a spec that loads these bytes; for a module without source code, the spec unchanged."""
    if not isinstance(spec.loader, SourceFileLoader):
        return spec
    loader = _PinnedLoader(spec.name, str(spec.origin), content)
    found = spec_from_file_location(
        spec.name, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
    )
    return spec if found is None else found
