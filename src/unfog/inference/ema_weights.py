"""The EMA weights of a run: those of a checkpoint, or an EMA of another width, rebuilt from snapshots."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from unfog.config.schema import Config
from unfog.errors import RequestError, RunError
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import warn
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.format import CheckpointInfo
from unfog.training.checkpoints.posthoc_ema import Mixture, list_snapshots, rebuild, solve_mixture
from unfog.training.settings import PowerEma

SWEEP_FILE = "ema-sweep.json"
"""Result of `unfog ema-sweep`; the width in it is the default of the run from then on."""


def load_ema_weights(network: nn.Module, folder: RunFolder, width: float, step: int | None) -> Mixture:
    """Load the EMA of this width into a network, and return how it is composed of snapshots.

    Args:
        network: of the run.
        folder: the run, with its snapshots.
        width: of the EMA.
        step: of the EMA; None is the last snapshot.

    Raises:
        RequestError: it cannot be rebuilt: no snapshots, too few of them, or a step after the last.
        RunError: the snapshots cannot be read, or are of another network.
    """
    mix = solve_mixture(list_snapshots(folder.averages), width, step)
    try:
        network.load_state_dict(rebuild(mix), strict=True)
    except RuntimeError as error:
        raise RunError(f"the snapshots in {folder.averages} are of another network: {str(error)[:120]} ...") from None
    return mix


def load_default_ema_weights(network: nn.Module, folder: RunFolder, config: Config, saved: CheckpointInfo) -> None:
    """Load the EMA of a checkpoint into a network; of the width that `unfog ema-sweep` chose, if it was run."""
    width = swept_width(folder.path)
    if width is not None and not (isinstance(config.ema, PowerEma) and config.ema.width == width):
        kept = list_snapshots(folder.averages)
        try:
            # A run that was stopped between two snapshots is sampled as of the last one.
            load_ema_weights(network, folder, width, min(saved.step, kept[-1].step) if kept else None)
            return
        except (RequestError, RunError) as error:
            warn(f"the EMA width of {SWEEP_FILE} is not used, but that of the checkpoint: {error}")
    checkpoint.load_weights(saved.folder, "ema", network)


def swept_width(run: Path) -> float | None:
    """Return the width that `unfog ema-sweep` chose for this run; None without a sweep, or if its file is damaged."""
    try:
        width = checkpoint.read_json(run / SWEEP_FILE)["width"]
        return PowerEma(float(width)).width
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RequestError):
        return None
