"""Source files of a module that is not imported yet, and its import from exactly the bytes that were read."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from unfog.files.safe_files import read_file

_LARGEST = 2**28  # bytes of a module; compiled ones are large


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
        return read_file(Path(file), Path(file).parent, _LARGEST, follow=True)
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
