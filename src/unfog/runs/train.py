"""`unfog train` and `unfog resume`: from a request to a run that has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unfog.config.tree import Config
from unfog.data.images import Prepared
from unfog.data.prepare import prepare
from unfog.data.sources import open_source
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
        prepared = load_images(config, stop)
        if Path(config.source).exists():  # so that a resume finds it from any folder
            config = replace(config, source=str(Path(config.source).resolve()))
        config = replace(
            config,
            data=prepared.settings,
            classes=prepared.train.classes,
            fingerprint=prepared.train.fingerprint,
            training=replace(config.training, device=str(device)),
        )
        settling = Settling(config, prepared.train, device, stop)
        settling.network()
        settling.precision()
        settling.length()
        settling.intervals()
        stop.leave_if_requested()  # nothing has begun, so there is nothing to save
        folder.create(settling.config)
        return folder, Session(folder, settling.config, prepared, device, stop).run(settling.choices)


def resume(folder: RunFolder, config: Config | None = None) -> tuple[RunFolder, bool]:
    """Go on with a run from its newest whole checkpoint, or from its beginning where none was saved yet.

    Args:
        folder: the run.
        config: its stored configuration with changes, applied from here on.

    Raises:
        RequestError: a change that a run cannot make, or other images than it began with.
        RunError: no checkpoint is whole, or training could not go on.
    """
    stored = folder.read_config()
    config = config or stored
    check_length(config)
    check_changes(stored, config)
    device = choose_device(config.training.device)
    with StopSignals() as stop:
        prepared = load_images(config, stop)
        if prepared.train.fingerprint != stored.fingerprint:
            raise RequestError(
                f"the images in {stored.source} are not those that {folder.path} was trained on; "
                "bring them back, or start a new run"
            )
        settling = Settling(config, prepared.train, device, stop)
        settling.precision()
        saved, _ = checkpoint.newest(folder.checkpoints)
        settling.length(seen=saved.images if saved else 0)
        stop.leave_if_requested()
        for line in check_changes(stored, settling.config):
            say(f"  changed: {line}")
        session = Session(folder, settling.config, prepared, device, stop)
        folder.write_config(settling.config)
        return folder, session.run(settling.choices)


def load_images(config: Config, stop: StopSignals) -> Prepared:
    """Scan and decode the source, with progress, and say in one line what became of every file."""
    with Progress("decoding", None) as progress:

        def update(done: int, total: int) -> None:
            stop.leave_if_requested()
            progress.total = total
            progress.update(done)

        prepared = prepare(open_source(config.source), config.data, update)
    say(prepared.ledger.line())
    return prepared
