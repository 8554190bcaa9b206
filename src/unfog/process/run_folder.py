"""The run folder: the names of its files, its lock, its configuration, and restarts by torchrun."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from unfog.config.schema import Config
from unfog.config.toml import read_toml, to_toml, with_version
from unfog.config.validate import check_out, reason_of
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import note_run
from unfog.files.locks import LOCK, FolderLock, OwnedError, Owner, lock_of
from unfog.files.safe_files import (
    LARGEST_TEXT,
    check_folder,
    list_folder,
    read_file,
    regular_file,
    remove,
    remove_tree,
    write_atomic,
)
from unfog.process.heartbeat import Heartbeat
from unfog.reporting.channel_sheets import FOLDER as CHANNELS
from unfog.reporting.progress import say
from unfog.text import sanitize

# Folder in a run with its copy of the autoencoder, or in an autoencoder's run with the result.
AUTOENCODER_FOLDER = "codec"
_PICTURES = ("samples", "denoising", CHANNELS)  # folders of a run
_FROM_PYTHON = re.compile(r"-[0-9a-f]{32}\.(npz|images)$")  # end of the name of images that were given as objects
_LAUNCH_FILE = "launch"  # in a run: names the launch by torchrun that created it
_COPIES_TRIED = 3  # newest checkpoints in which a sound config.toml is looked for


@dataclass(frozen=True)
class RunFolder:
    """A folder that is, or will be, a run."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def averages(self) -> Path:
        return self.path / "averages"  # of EMA snapshots

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def newest_preview(self) -> Path:
        """The last sample grid, or the folder of grids before the first."""
        folder = self.path / "samples"
        with suppress(OSError):
            return max((path for path in list_folder(folder, self.path) if path.suffix == ".png"), default=folder)
        return folder

    @contextmanager
    def create_locked(self, source: str) -> Iterator[FolderLock]:
        """Create the folder and lock it for the `with`; remove it again if it is left empty.

        RequestError if it cannot be created, is not empty, holds the images, or is locked by another process.
        """
        check_out(self.path, source)
        made: list[Path] = []
        try:
            # Only folders that this call makes are removed again, so a person's empty folder stays.
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            # Raises where the name is not UTF-8, which neither config.toml nor a page could hold.
            str(self.path.resolve()).encode()
        except (OSError, ValueError) as error:
            _remove_empty_folders(made)
            raise RequestError(
                f"{printable(str(self.path))} cannot be a run folder: {error}; give another --out"
            ) from None
        locked = False
        try:
            with self.locked() as lock:
                locked = True
                yield lock
        finally:
            if locked:  # otherwise the folder belongs to the process that has locked it
                _remove_empty_folders(made)

    @contextmanager
    def locked(self) -> Iterator[FolderLock]:
        """Lock the folder for the `with`. RequestError if another process is training in it."""
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(lock_of(self.path))
            except OwnedError as error:
                raise self._in_use_error(error.owner) from None
            # Also with a lock that was granted: the other process may be on another machine that does not see it.
            beat = Heartbeat.read(self.path)
            if beat is not None and beat["alive"] and not self._is_known_gone(beat, lock):
                raise self._in_use_error()
            yield lock

    @staticmethod
    def _is_known_gone(beat: dict[str, Any], lock: FolderLock) -> bool:
        """Return True if a heartbeat that seems alive is of this process, or of the earlier owner, which is gone."""
        if (beat["pid"], beat["host"]) == (os.getpid(), socket.gethostname()):
            return True
        # A mark knows more than a heartbeat: whether the process number was given to another process since.
        return lock.before is not None and lock.before.is_named(beat["pid"], str(beat["host"]))

    def _in_use_error(self, owner: Owner | None = None) -> RequestError:
        beat = Heartbeat.read(self.path)
        who = f" ({owner.pid} on {owner.host})" if owner else ""
        if beat and beat["alive"]:
            still = f", {beat['still']}" if beat["still"] else ""
            who = f" ({beat['pid']} on {sanitize(str(beat['host']))}{still})"
        return RequestError(f"another process{who} is training in {self.path}; wait for it, or stop it")

    def check_owned(self, lock: FolderLock | None) -> None:
        """RunError if another process has taken over the folder that this one has locked."""
        if lock is not None and (other := lock.new_owner()) is not None:
            raise RunError(
                f"another process ({other.pid} on {other.host}) has taken over {self.path}, so this one stops and "
                "leaves its files alone; train a run in one process at a time"
            )

    def write_config(self, config: Config) -> None:
        """Write the configuration atomically. It is the only file with secrets of URLs, which a resume needs."""
        text = with_version(to_toml(config))
        write_atomic(self.config_file, text.encode(), self.path, private=config != config.without_secrets())
        note_run(config.source, self.path)

    def shown_settings(self, config: Config) -> tuple[str, dict[str, Any]]:
        """Return the settings without secrets, as checkpoints (TOML) and trackers (a nested dict) have them."""
        shown = config.without_secrets()
        return to_toml(shown), asdict(shown)

    def read_config(self) -> Config:
        """Return the stored configuration. RequestError if this is not a run, or its configuration is damaged."""
        self.check_is_run()
        try:
            config = read_toml(self.config_file, Config())
        except RequestError as error:
            raise RequestError(f"{error}{self._restore_command()}") from None
        problem = config.representation.problem if config.source else "it names no source"
        if problem:
            remedy = self._restore_command() or "; restore it from a copy"
            raise RequestError(f"{self.config_file} is damaged: {problem}{remedy}")
        autoencoder = config.representation.folder_in(self.path / AUTOENCODER_FOLDER)
        return replace(config, autoencoder_folder=autoencoder)

    def _restore_command(self) -> str:
        """Return the end of a message, with the command that restores config.toml from a checkpoint; "" without one."""
        with suppress(OSError):
            steps = sorted((one for one in self.checkpoints.iterdir() if one.name.isdecimal()), reverse=True)
            for copy in [one / self.config_file.name for one in steps[:_COPIES_TRIED]]:
                with suppress(RequestError):
                    stored = read_toml(copy, Config())
                    if stored.source and not stored.representation.problem:
                        words = shlex.join(["cp", str(copy), str(self.config_file)])
                        return f"; the checkpoint of step {int(copy.parent.name):,} has a copy: {words}"
        return ""

    def check_writable(self) -> None:
        """RequestError if the permissions of the run folder forbid writing."""
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RequestError(f"{self.path} is not writable, and the result is stored there; make it writable")

    def check_own_files(self) -> None:
        """RequestError if a folder or record that training writes to is a link, a pipe or the like."""
        folders = (self.checkpoints, self.averages, *(self.path / name for name in _PICTURES))
        for path in (*folders, self.metrics, self.events):
            if path == self.averages and path.is_file() and not path.is_symlink():
                continue  # somebody's file costs the snapshots, which the run can do without
            try:
                if path in folders:
                    check_folder(path, self.path)
                elif os.path.lexists(path):
                    regular_file(path, self.path)
            except OSError as error:
                raise RequestError(
                    f"{path} cannot be trained into ({reason_of(error)}): a run keeps its files in folders of its own; "
                    "put the real one there, or move the whole run, which may be behind a link"
                ) from None

    @contextmanager
    def saving_results(self, found: Callable[[], Iterable[str]]) -> Iterator[None]:
        """Turn an OSError inside the `with` into a RunError, after printing the lines of `found`."""
        try:
            yield
        except OSError as error:
            for line in found():
                say(f"  {line}")
            raise RunError(
                f"{self.path} cannot be written to: {reason_of(error)}; the result is printed above"
            ) from None

    def write_launch_file(self) -> None:
        """Note the launch by torchrun in the run, so that a later attempt finds it."""
        if (name := _launch_id()) is not None:
            write_atomic(self.path / _LAUNCH_FILE, f"{name}\n{_agent()}\n".encode(), self.path)

    @classmethod
    def find_earlier_attempt(cls, source: str, out: Path | None) -> RunFolder | None:
        """Return the run that an earlier attempt of this launch has created; None without one.

        It is looked for at `out`, or among those named after the source. Leftovers of an attempt that was killed before
        its run began are removed.
        """
        # torchrun counts restarts after failures, but not when a node joins; then the same agent marks a later attempt.
        name, failed = _launch_id(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if name is None:
            return None
        beside = next_folder(source).parent
        places = [out] if out is not None else list(beside.iterdir()) if beside.is_dir() else []
        for one in [cls(place) for place in places if (place / _LAUNCH_FILE).is_file()]:
            stored = read_file(one.path / _LAUNCH_FILE, one.path, LARGEST_TEXT)
            noted = stored.decode("utf-8", "replace").splitlines()
            if noted[:1] != [name]:
                continue
            begun, mine = one.config_file.is_file(), failed or noted[1:] == [_agent()]
            if begun and mine:
                return one
            remove(one.path / _LAUNCH_FILE, one.path)  # it is of an earlier launch with the same id
            if mine:
                remove_tree(one.path / AUTOENCODER_FOLDER, one.path)
                remove(one.path / LOCK, one.path)
                _remove_empty_folders([one.path])
        return None

    @property
    def claims_to_be_one(self) -> bool:
        """Return whether it has anything called config.toml, so that it is not taken for a folder of images."""
        return os.path.lexists(self.config_file)

    def check_is_run(self) -> None:
        if not self.config_file.is_file():
            wrong = f"its {self.config_file.name} is not a file" if self.claims_to_be_one else "it has no config.toml"
            raise RequestError(f"{self.path} is not a run: {wrong}")


def _remove_empty_folders(folders: list[Path]) -> None:
    """Remove empty folders, in the given order, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def next_folder(source: str, under: str = "runs") -> Path:
    """Return an unused folder named after the source: runs/photos, runs/photos-2, …; of a URL its last part."""
    # What is left of a name is safe in a path on any system, and in a shell without quotes or nearly.
    plain = re.sub(r"[^\w .+@]+", "-", source_name(source).removesuffix(".tar").removesuffix(".zip")).strip("-. ")
    return unused_path(Path(under) / (plain or "run"))


def source_name(source: str) -> str:
    """Return the last part of a path or URL, which does not reveal where the images are kept."""
    url = source.partition("?")[0].rstrip("/")  # the query may be a signature
    last = url.rpartition("/")[2] if "://" in source else Path(source).resolve().name
    return printable(_FROM_PYTHON.sub("", last))


def printable(name: str) -> str:
    """Return a file name without the bytes that are not text, which neither TOML nor a terminal could hold."""
    return name.encode("utf-8", "replace").decode()


def unused_path(path: Path) -> Path:
    """Return `path`, or the first of `path`-2, `path`-3, … that does not exist, also not as a link to nothing."""
    numbered = (path.with_name(f"{path.name}-{n}") for n in count(2))
    return next(candidate for candidate in chain([path], numbered) if not os.path.lexists(candidate))


def new_folder(path: Path) -> Path:
    """Make and return the `unused_path`. Of several processes that call this at once, each gets its own."""
    while True:
        folder = unused_path(path)
        # Between the look and the making another process may take the name; mkdir detects that.
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def _launch_id() -> str | None:
    """Return an id shared by all attempts of one torchrun, and by no other; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    return name if name not in ("", "none") else _agent()  # torchrun's default id is the same for all launches


def _agent() -> str:
    """Return the torchrun agent of this machine: the parent process of its workers, also after a restart."""
    return f"{socket.gethostname()}:{os.getppid()}"
