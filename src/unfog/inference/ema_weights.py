"""Which average of a run's weights is used: one of the checkpoint, or one of another length, rebuilt from snapshots."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from unfog.config.schema import Config
from unfog.errors import RequestError, RunError
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import warn
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.format import Saved
from unfog.training.checkpoints.posthoc_ema import Mixture, kept_in, mixture, rebuild
from unfog.training.ema_schedules import PowerEma

SWEEP_FILE = "ema-sweep.json"
"""What `unfog ema-sweep` found: the width in it is the run's own from then on."""


def load_ema_weights(network: nn.Module, folder: RunFolder, width: float, step: int | None) -> Mixture:
    """Put the average of this width at this step, None being the last snapshot's, into a network; how it was made.

    Raises:
        RequestError: it cannot be rebuilt: no snapshots, too few of them, or a step after the last.
        RunError: the snapshots cannot be read, or are of another network.
    """
    mix = mixture(kept_in(folder.averages), width, step)
    try:
        network.load_state_dict(rebuild(mix), strict=True)
    except RuntimeError as error:
        raise RunError(f"the averages in {folder.averages} are of another network: {str(error)[:120]} ...") from None
    return mix


def load_default_ema_weights(network: nn.Module, folder: RunFolder, config: Config, saved: Saved) -> None:
    """Put the average of a checkpoint into a network: of the width that a sweep has chosen, where one has."""
    width = swept_width(folder.path)
    if width is not None and not (isinstance(config.ema, PowerEma) and config.ema.width == width):
        kept = kept_in(folder.averages)
        try:
            # What was stopped between two snapshots is sampled as of the last one.
            load_ema_weights(network, folder, width, min(saved.step, kept[-1].step) if kept else None)
            return
        except (RequestError, RunError) as error:
            warn(f"the average that {SWEEP_FILE} chose is not used, but that of the checkpoint: {error}")
    checkpoint.load_weights(saved.folder, "ema", network)


def swept_width(run: Path) -> float | None:
    """The width that a sweep has chosen for this run; None if there was none, or its file says nothing of use."""
    try:
        width = checkpoint.read_json(run / SWEEP_FILE)["width"]
        return PowerEma(float(width)).width
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RequestError):
        return None
