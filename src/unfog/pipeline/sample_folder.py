"""Folder of samples that are written as they come, and from which the same command goes on after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.scans.write import SampleFormat
from unfog.errors import RequestError, RunError
from unfog.files.locks import LOCK, lock_of
from unfog.files.safe_files import LARGEST_TEXT, read_file, regular_file, remove, write_atomic
from unfog.process.run_folder import new_folder
from unfog.reporting.image_grids import Pixels, padded, read_png, save_png
from unfog.reporting.progress import say
from unfog.text import sanitize
from unfog.values.condition_format import LONGEST_FILE_NAME

# File in a folder of samples until its grid is written: what the samples are of.
UNFINISHED = "unfinished.json"
_LONGEST_TEXT = 2000  # characters of the conditions of all samples in grid.png
_LONGEST_NEGATIVE = 20  # characters of a negative text in the name of a file
_MOST_BYTES = 160  # of the name in the name of a file, of which file systems take 255


@dataclass
class SampleFolder:
    """Samples 0 to count - 1 as numbered PNGs: 000000-NAME.png, 000001-NAME.png, …"""

    path: Path
    """The folder, of `reserve`."""
    digest: str
    """Of all that the samples depend on."""
    count: int
    names: Sequence[str] = ()
    """Class or conditions of each sample, which the samples cycle through; () without conditions."""
    settings: Sequence[str] = ()
    """How the samples are generated, stored in each file."""
    told: str = "Class"
    """Title of the name in each file."""
    view: Callable[[Pixels], Pixels] | None = None
    """Returns pictures uint8 [n, H, W, 3] of samples of other values. The samples themselves are written too, to
    000000-NAME.npy, …; None if the samples are pictures."""
    format: SampleFormat | None = None
    """Format of these, in place of .npy."""
    files: Sequence[str] = ()
    """Name of each sample's file in place of its conditions; "" or () for these."""
    negative: str = ""
    """Text that the samples were led away from, for their files; "" without such a text."""
    short_names: Sequence[str] = ()
    """`names` for the names of files; () takes `names`."""
    captions: Sequence[str] = ()
    """`names` for the picture of all samples; () takes `names`."""

    def __post_init__(self) -> None:
        self.names = [sanitize(name) for name in self.names]
        self.captions = [sanitize(caption) for caption in self.captions]

    def file(self, number: int) -> Path:
        """Return the path of a sample."""
        # A table of samples has names with this number.
        named = self.files[number].removeprefix(f"{number:06d}-") if self.files else ""
        if not named and self.short_names:
            named = self.short_names[number % len(self.short_names)]
        named = named or self._name(number)[:LONGEST_FILE_NAME]
        away = _in_file_name(f"not {self.negative}"[:_LONGEST_NEGATIVE]) if self.negative else ""
        return self.path / f"{number:06d}{_in_file_name(named)}{away}.png"

    @property
    def suffix(self) -> str:
        """Suffix of the files of the samples themselves."""
        if self.view is None:
            return ".png"
        return self.format.suffix if self.format else ".npy"

    @property
    def text(self) -> dict[str, str]:
        """Text of a picture of all samples, by title: their conditions, each once, and how they are generated."""
        told = list(dict.fromkeys(self._name(number) for number in range(min(self.count, len(self.names)))))
        found = {self.told: ", ".join(filter(None, told))[:_LONGEST_TEXT], "Negative": sanitize(self.negative)}
        if self.settings:
            found["Settings"] = sanitize(", ".join(self.settings))
        return {title: said for title, said in found.items() if said}

    def holds(self, numbers: Sequence[int]) -> bool:
        """Return True if all these samples are written. A file is whole or absent."""
        return all(self.file(number).is_file() for number in numbers)

    def write(self, numbers: Sequence[int], samples: Pixels) -> None:
        """Write samples [n, H, W, C]; those that are there stay."""
        # With the first samples, as an error before them should leave nothing behind.
        if _digest_of(self.path) != self.digest:
            begun = json.dumps({"digest": self.digest, "count": self.count})
            write_atomic(self.path / UNFINISHED, begun.encode(), self.path)
        for number, sample in zip(numbers, samples, strict=True):
            if self.file(number).is_file():
                continue
            name = self._name(number)
            text = {self.told: name} if name else {}
            if self.negative:
                text["Negative"] = sanitize(self.negative)
            if self.settings:
                text["Settings"] = sanitize(", ".join([*self.settings, f"sample {number}"]))
            if self.view is not None:
                encode = self.format.encode if self.format else _npy
                write_atomic(self.file(number).with_suffix(self.suffix), encode(sample), self.path)
                sample = self.view(sample[None])[0]
            save_png(self.file(number), self.path, sample, text=text)

    def first(self, count: int) -> Pixels:
        """Read the first samples back, uint8 [n, H, W, C]; smaller ones than others are in the middle of white."""
        return padded([_read(self.file(number)) for number in range(min(count, self.count))])

    def values(self, number: int) -> NDArray[Any]:
        """Read a sample [H, W, C] back from its .npy file. RunError if it cannot be read."""
        path = self.file(number).with_suffix(".npy")
        try:
            return np.load(regular_file(path, self.path), allow_pickle=False)  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}); remove it and its PNG, and repeat the command") from error

    def save(self, name: str, values: NDArray[Any], picture: Pixels) -> None:
        """Write values [H, W, C] of all samples together, and a picture uint8 [H, W, C] of them."""
        write_atomic(self.path / f"{name}.npy", _npy(values), self.path)
        save_png(self.path / f"{name}.png", self.path, picture)

    def finish(self) -> None:
        """Say that all is written: from now on the folder is like any other."""
        remove(self.path / UNFINISHED, self.path)

    @staticmethod
    def is_unfinished(path: Path) -> bool:
        """Return True for a folder in which samples are being written, or were when their process was killed."""
        with suppress(OSError):  # such as a name that is too long
            return (path / UNFINISHED).is_file()
        return False

    @staticmethod
    @contextmanager
    def reserve(out: Path | None, usual: Path, digest: str) -> Iterator[Path]:
        """Lock and yield the folder to write to: one that was begun with this digest, else a new one.

        Args:
            out: the folder of the request; None looks at `usual`, `usual`-2, … .
            usual: where samples go without one.
            digest: of all that the samples depend on.

        Raises:
            RequestError: `out` holds other unfinished samples, or another process is writing them.
        """
        if out is not None and SampleFolder.is_unfinished(out) and _digest_of(out) != digest:
            raise RequestError(
                f"{out} holds unfinished samples of other settings; give those settings again, another --out, or "
                "remove it"
            )
        begun = [out] if out is not None else [p for p in _numbered(usual) if _digest_of(p) == digest]
        with ExitStack() as stack:
            folder = next((one for one in begun if _enter(one, stack)), None)
            if folder is None and out is not None:
                raise RequestError(f"another process is writing samples to {out}; wait for it, or give another --out")
            # Again, as another process may have begun and finished between the first look and the lock.
            if folder is not None and not _is_free(folder, digest):
                raise RequestError(
                    f"another process has written to {folder}; repeat the command, or give another --out"
                )
            if folder is None:
                _enter(folder := new_folder(usual), stack)
            if SampleFolder.is_unfinished(folder):
                say(f"  going on in {folder}")
            try:
                yield folder
            except KeyboardInterrupt:
                if SampleFolder.is_unfinished(folder):
                    say(f"the samples so far are in {folder}; the same command continues")
                raise

    def _name(self, number: int) -> str:
        return self.names[number % len(self.names)] if self.names else ""


def _npy(values: NDArray[Any]) -> bytes:
    """Return the content of a .npy file."""
    file = BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(values), (1, 0), allow_pickle=False)
    return file.getvalue()


def _enter(folder: Path, stack: ExitStack) -> bool:
    """Make and lock a folder until the end of the stack, which removes it if it is empty. False if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(BlockingIOError):  # two processes of one command would write the same files at a time
        stack.callback(_remove_empty, folder)
        stack.enter_context(lock_of(folder))
        return True
    return False


def _is_free(folder: Path, digest: str) -> bool:
    """Return True if a folder was begun with this digest, or holds no file but its lock."""
    return _digest_of(folder) == digest or all(one.name == LOCK for one in folder.iterdir())


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _numbered(path: Path) -> list[Path]:
    """Return `path`, `path`-2, … as far as there are any without a gap."""
    found, number = list[Path](), 1
    while (one := path if number == 1 else path.with_name(f"{path.name}-{number}")).is_dir():
        found.append(one)
        number += 1
    return found


def _digest_of(folder: Path) -> str | None:
    """Return the digest that a folder was begun with; None for a folder that is finished or was not begun."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(read_file(folder / UNFINISHED, folder, LARGEST_TEXT))["digest"])
    return None


def _read(path: Path) -> Pixels:
    try:
        pixels = np.asarray(read_png(path, path.parent))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); remove it, and repeat the command") from error
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _in_file_name(name: str) -> str:
    """Return the name of a sample as part of a file name: "-T_shirt"; letters and digits of any language stay."""
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    plain = plain.encode()[:_MOST_BYTES].decode(errors="ignore")
    return f"-{plain}" if plain else ""
