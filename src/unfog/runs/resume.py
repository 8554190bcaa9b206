"""`unfog resume`: continue a run from its newest whole checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unfog.config.resume_rules import SAMPLING, TUNED_EVENT, check_changes
from unfog.config.schema import LENGTH, Config
from unfog.config.toml import read_toml
from unfog.config.validate import check_request, check_source, report_dropped_levels
from unfog.data.dataset import Dataset
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError, RunError
from unfog.files.safe_files import make_folder
from unfog.pipeline.build import building_for
from unfog.pipeline.latents import copy_autoencoder_into_run
from unfog.pipeline.load_data import load_images
from unfog.pipeline.skipped_images import DATA_FILE, describe_changes
from unfog.planning.auto_settings import AutoSettings
from unfog.process import command_clock
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.progress import say
from unfog.reporting.records import Events, finite_number, read_events, read_metrics
from unfog.runs.evaluation_hook import resolve_metrics
from unfog.runs.previews import Previews
from unfog.runs.ranks import RunContext, broadcast_config
from unfog.runs.time_budget import TimeBudget, resume_length
from unfog.runs.train import check_custom_parts, open_session, train_session, with_mirror
from unfog.runs.weights.init_weights import load_initial_weights
from unfog.settings import is_auto
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation
from unfog.training.checkpoints.format import CheckpointInfo
from unfog.training.checkpoints.load import read_state
from unfog.training.checkpoints.posthoc_ema import remove_after
from unfog.training.length import Length


@caller_flags_kept()
def resume(
    folder: RunFolder, config: Config | None = None, force: bool = False, callbacks: Sequence[object] = ()
) -> tuple[RunFolder, bool]:
    """Continue a run from its newest whole checkpoint, or from its beginning if it saved none.

    Args:
        folder: the run.
        config: its stored configuration with changes, applied from here on.
        force: also apply changes that turn it into another run, such as its seed or its images.
        callbacks: objects with methods of `unfog.callbacks.Callback`.

    Returns the same as `train`. RequestError if the run cannot make the change, has other images than it began with, or
    is trained by another process; RunError if no checkpoint is whole, or training failed.
    """
    began, stored = command_clock.began(), folder.read_config()
    config = config or stored
    _check_resume_request(stored, config)
    folder.check_own_files()
    config = with_mirror(config, folder)
    with RunContext.open(folder, config, callbacks=callbacks) as run, ExitStack() as stack:
        point = find_resume_point(folder, stored)
        # An edited config.toml must not make it build a network that the weights do not fit, however large.
        stack.enter_context(building_for(point.weights, folder.path))
        run.heartbeat.step = point.step  # for monitoring, while the images are read
        check_changes(point.config, config, force)
        dataset, facts = load_images(config, run.stop, lost=point.failed_shards)
        config = _disable_impossible_snapshots(config.adopt(facts), point)
        # Once more, as reading the images has completed the settings.
        check_changes(point.config, config, force, partial(describe_changes, folder, dataset))
        auto = _resolve_open_settings(run, config, dataset, point, began)
        if point.is_end_of(auto, folder, dataset):
            broadcast_config(run.world, folder.checkpoints, None)
            _finish_without_training(folder, stored, config, point.step)
            return folder, True
        resumed = copy_autoencoder_into_run(folder, auto.config)
        restart = bool(config.init.folder) and point.saved is None
        session = open_session(run, resumed, dataset, load_initial_weights(resumed).state if restart else None)
        session.keep_budget(auto)
        changes = omit_tuned_settings(check_changes(point.config, resumed, force), folder.events, resumed.sampler)
        if any(line.startswith("evaluate.") for line in changes):
            session.evaluation.dry_run()  # an error of the next evaluation surfaces now
        # Only now, as all that can be refused is refused above.
        folder.write_config(resumed)
        point.discard_later_files(folder)
        # Other images, or a start that was killed before it wrote them.
        if config.fingerprint != point.config.fingerprint or not (folder.path / DATA_FILE).exists():
            session.write_data_files()
        broadcast_config(run.world, folder.checkpoints, resumed, point.failed_shards)
        done = train_session(session, auto.choices, session.settings_findings(), point.saved, changes)
        Previews.of(resumed).export(folder, resumed)
        return folder, done


@dataclass(frozen=True)
class _ResumePoint:
    """The state from which a run continues."""

    saved: CheckpointInfo | None  # the newest whole checkpoint; None before the first
    broken: list[checkpoint.BrokenCheckpoint]  # newer checkpoints that are damaged, and skipped
    config: Config  # the settings that trained the run so far, whatever was written into RUN/config.toml since

    @property
    def step(self) -> int:
        return self.saved.step if self.saved else 0

    @property
    def weights(self) -> Path | None:
        return None if self.saved is None else self.saved.folder / "model.safetensors"

    @property
    def failed_shards(self) -> Mapping[str, str] | None:
        """Name -> reason of the shards that the run continued without; None before the first checkpoint."""
        return None if self.saved is None else read_state(self.saved.folder).get("lost_shards", {})

    def is_end_of(self, auto: AutoSettings, folder: RunFolder, dataset: Dataset) -> bool:
        """Return True if nothing is left to train, log, evaluate or save."""
        if self.saved is None:
            return False
        state, length, training = read_state(self.saved.folder), Length(), auto.config.training
        if state.get("length"):
            length.load_state_dict(state["length"])
        first = training.images // training.batch
        resume_length(length, first, self.step, read_events(folder.events), auto.new_length)
        if self.saved.images < (length.steps * training.batch if length.plans else training.images):
            return False
        window = state["window"]  # of losses that are not logged
        if state["due"] or any((*window["count"], window["refused"], window["overflows"])):
            return False
        # A step that was not to be the last, and was logged without an evaluation.
        evaluates = auto.config.evaluate.every > 0 and length.at(self.step).stretch > 0 and len(dataset.held_out) > 0
        return not evaluates or any(
            row.get("step") == self.step and "held_out_loss" in row for row in read_metrics(folder.metrics)
        )

    def discard_later_files(self, folder: RunFolder) -> None:
        """Set broken checkpoints aside, and delete EMA snapshots of steps that will be trained again."""
        if self.broken:
            with closing(Events(folder.events)) as events:
                for one in self.broken:
                    say(str(one))
                    events.write("passed_over", self.step, {"checkpoint": one.folder.name, "reason": one.reason})
        rotation.remove_leftovers(folder.checkpoints, self.broken)
        remove_after(folder.averages, self.saved.step if self.saved else -1)


def find_resume_point(folder: RunFolder, stored: Config) -> _ResumePoint:
    """Return the newest whole checkpoint with its settings; before the first checkpoint, the `stored` settings.

    RunError if steps were trained, and no checkpoint of them is left.
    """
    make_folder(folder.checkpoints, folder.path)  # a start that was killed may not have come so far
    rotation.restore_replaced(folder.checkpoints)
    saved, broken = checkpoint.newest(folder.checkpoints)
    if saved is not None and saved.is_weights_only:
        raise RequestError(
            f"{folder.path} is an export, which holds no state of training to resume from; begin a run with its "
            f"weights: unfog train SOURCE --init {folder.path}"
        )
    if saved is None and any(finite_number(row.get("step")) > 0 for row in read_metrics(folder.metrics)):
        raise RunError(
            f"{folder.metrics} has steps, but {folder.checkpoints} has no checkpoint to resume from; restore "
            "the checkpoints, or start a new run with another --out"
        )
    config = stored if saved is None else read_toml(saved.folder / checkpoint.CONFIG, Config())
    return _ResumePoint(saved, broken, config)


def omit_tuned_settings(lines: list[str], events: Path, sampler: Sampler) -> list[str]:
    """Return the lines of `check_changes`, without those on sampler settings that `unfog tune` set last."""
    rows = [row for row in read_events(events) if row.get("kind") == TUNED_EVENT]
    found: object = rows[-1].get("sampler") if rows else None
    now: dict[str, Any] = json.loads(json.dumps(asdict(sampler)))  # turns tuples into lists, as in the event
    # `tune` wrote them into config.toml after the checkpoint, and recorded that: the resume has changed none of them.
    theirs = [name for name, value in now.items() if isinstance(found, Mapping) and found.get(name) == value]
    return [line for line in lines if not line.startswith(tuple(f"sampler.{name}: " for name in theirs))]


def _check_resume_request(stored: Config, config: Config) -> None:
    check_request(config)
    check_custom_parts(config)
    report_dropped_levels(stored.sampler, config.sampler)
    if not Path(config.source).is_absolute():  # the name of a data set, or a URL
        return
    try:
        check_source(config.source)
    except RequestError:
        raise RequestError(
            f"the images of this run were in {config.source}, which no longer exists; restore it, or give "
            "its new place: --source FOLDER"
        ) from None


def _disable_impossible_snapshots(config: Config, point: _ResumePoint) -> Config:
    """Resolve an open interval of EMA snapshots to none if the run has not kept a second EMA from its beginning."""
    if point.saved is None or point.saved.holds(checkpoint.EMA2) or not is_auto(config.ema_snapshots, "every"):
        return config
    return replace(config, ema_snapshots=replace(config.ema_snapshots, every=-1))


def _resolve_open_settings(
    run: RunContext, config: Config, dataset: Dataset, point: _ResumePoint, began: float
) -> AutoSettings:
    """Resolve what a change may have left open, such as the length. The network and weight decay stay as they were."""
    one_size = dataset.of_one_size
    auto = AutoSettings(config, one_size.as_network_input.train, run.device, run.stop, run.world.size)
    auto.began = began
    # A run with a time budget may be beyond the length in its settings, which then says nothing.
    same = config.training.images == point.config.training.images > 0
    seen = 0 if same or point.saved is None else point.saved.images
    auto.resolve_resumed(seen, before=point.config.training.device)
    if auto.budget:
        costs = TimeBudget.estimated_costs(auto.config, len(dataset.held_out))
        TimeBudget.check_left(auto.budget, began, auto.seconds_per_step(), costs)
    resolve_metrics(auto, one_size.train, run.device)
    run.stop.leave_if_requested()
    return auto


def _finish_without_training(folder: RunFolder, stored: Config, config: Config, step: int) -> None:
    """Apply what a run at its end can still use: the settings of sampling, and an autoencoder not yet exported."""
    _apply_sampling_settings(folder, stored, config, step)
    say(f"  {folder.path} is finished at step {step:,}; give --steps or --budget to train longer")
    if not (folder.path / AUTOENCODER_FOLDER).is_dir():  # the process was killed after its last checkpoint
        Previews.of(config).export(folder, config)


def _apply_sampling_settings(folder: RunFolder, stored: Config, config: Config, step: int) -> None:
    """Store and record changed settings of sampling; say which other changes are not applied."""
    changed = replace(stored, **{name: getattr(config, name) for name in SAMPLING})
    if lines := check_changes(stored, changed):
        folder.write_config(changed)
        with closing(Events(folder.events)) as events:
            for line in lines:
                say(f"  changed: {line}")
                events.write("changed", step, {"setting": line})
    # The caller reports a length that is reached already; the snapshots were changed here, not by the user.
    silent = (*(f"training.{name}: " for name in LENGTH), "ema_snapshots.every: 0 -> -1")
    for line in check_changes(changed, config, force=True):
        if not line.startswith(silent):
            say(f"  not applied, because the run is finished: {line}")
