"""`unfog train` and `unfog resume`: from a request to a run that has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unfog.config.tree import Config
from unfog.data.images import Prepared
from unfog.data.prepare import prepare
from unfog.data.sources import FolderSource, open_source
from unfog.errors import RequestError
from unfog.reporting.progress import Progress, say
from unfog.runs.changes import check_changes
from unfog.runs.choices import Settling, check_length, choose_device
from unfog.runs.folder import RunFolder, next_folder
from unfog.runs.session import Session
from unfog.runs.signals import StopSignals
from unfog.training import checkpoint


def start(config: Config, out: Path | None = None) -> tuple[RunFolder, bool]:
    """Train a new run. Returns its folder, and whether it ran to its end (False: stopped by a signal, and saved).

    Raises:
        RequestError: the settings, the source or the folder will not do; found before training.
        RunError: training could not go on.
    """
    check_length(config)
    folder = RunFolder(out or next_folder(config.source))
    folder.check_free()
    device = choose_device(config.training.device)
    with StopSignals() as stop:
        prepared, config = load_images(config, stop)
        settling = Settling(config, prepared.train, device, stop)
        settling.network()
        settling.learning_rate()
        settling.precision()
        settling.length()
        settling.intervals()
        stop.leave_if_requested()  # nothing has begun, so there is nothing to save
        session = Session(folder, settling.config, prepared, device, stop)
        folder.create(settling.config)
        with folder.locked():
            return folder, session.run(settling.choices)


def resume(folder: RunFolder, config: Config | None = None) -> tuple[RunFolder, bool]:
    """Go on with a run from its newest whole checkpoint, or from its beginning where none was saved yet.

    Args:
        folder: the run.
        config: its stored configuration with changes, applied from here on.

    Raises:
        RequestError: a change that a run cannot make, other images than it began with, or another process at work.
        RunError: no checkpoint is whole, or training could not go on.
    """
    stored = folder.read_config()
    config = config or stored
    check_length(config)
    check_changes(stored, config)
    device = choose_device(config.training.device)
    with folder.locked(), StopSignals() as stop:
        saved, broken = checkpoint.newest(folder.checkpoints)
        prepared, config = load_images(config, stop)
        if config.fingerprint != stored.fingerprint:
            raise RequestError(
                f"the images in {stored.source} are not those that {folder.path} was trained on; "
                "bring them back, or start a new run"
            )
        settling = Settling(config, prepared.train, device, stop)
        settling.learning_rate()
        settling.precision()
        settling.length(seen=saved.images if saved else 0)
        settling.intervals()
        stop.leave_if_requested()
        for change in check_changes(stored, settling.config):
            say(f"  changed: {change}")
        session = Session(folder, settling.config, prepared, device, stop)
        folder.write_config(settling.config)
        checkpoint.clear_away(folder.checkpoints, broken)
        for folder_and_reason in broken:
            say(str(folder_and_reason))
        return folder, session.run(settling.choices, saved)


def load_images(config: Config, stop: StopSignals) -> tuple[Prepared, Config]:
    """Scan and decode the source, with progress, and say in one line what became of every file.

    Returns the images, and the configuration with what they settle: size, channels, classes, fingerprint.
    """
    source = open_source(config.source)
    with Progress("decoding", None) as progress:

        def update(done: int, total: int) -> None:
            stop.leave_if_requested()
            progress.total = total
            progress.update(done)

        prepared = prepare(source, config.data, update)
    say(prepared.ledger.line())
    return prepared, replace(
        config,
        # A folder by its full path, so that a resume finds it from anywhere.
        source=str(source.folder.resolve()) if isinstance(source, FolderSource) else config.source,
        data=prepared.settings,
        classes=tuple(printable(name) for name in prepared.train.classes),
        fingerprint=prepared.train.fingerprint,
    )


def printable(name: str) -> str:
    """A file name without the bytes that are no text, which a TOML file could not hold."""
    return name.encode("utf-8", "replace").decode()
