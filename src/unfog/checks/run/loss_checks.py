"""Checks of losses with fixed noise: EMA against raw weights, and training images against held-out images."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unfog.checks.run.run_record import RunRecord
from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.evaluation.held_out import LossAt, fixed_losses
from unfog.reporting.charts import Floats, line_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.records import finite_column, finite_number, json_values
from unfog.text import plural
from unfog.training.settings import FixedEma, PowerEma
from unfog.values.conditions import Conditions

# Images of each kind whose loss is measured.
_MEASURED = 128
_LEVELS = "noise level: clean 0 to noisy 1"
# Standard errors from which on a difference is not the luck of the draw.
_CERTAIN = 3.0
# Share by which the average may lose more than the weights as trained.
_BEHIND = 0.03
# Share by which unseen images may lose more than seen ones, and that loss may have risen since its lowest.
_GAP, ROSE = 0.10, 0.02


class LossImages(NamedTuple):
    """Images to measure losses on: float [N, C, H, W] in [-1, 1], and their conditions."""

    x0: Tensor
    conditions: Conditions


def loss_images(images: ImageSet, device: torch.device, see: Callable[[Tensor], Tensor]) -> LossImages | None:
    """Return up to 128 evenly spread images as the network sees them; None for an empty set."""
    if not len(images):
        return None
    taken = images.take(evenly_spaced(len(images), _MEASURED))
    return LossImages(see(torch.from_numpy(taken.pixels)).to(device), taken.conditions.to(device))


def measure_losses(
    loss_at: LossAt,
    looked: LossImages,
    levels: Tensor,
    batch: int,
    progress: Callable[[int], None] = lambda images: None,
) -> Floats:
    """Return the loss [L, N] of each image at each noise quantile [L].

    The noise of image i depends neither on N nor on `batch`. `progress` is called with the images of each pass.
    """
    x0, conditions = looked
    u = levels.to(x0.device)[:, None].expand(-1, len(x0))

    def noise(level: int) -> Tensor:
        return torch.stack([_noise(x0.shape[1:], level, image) for image in range(len(x0))])

    return fixed_losses(loss_at, x0, conditions, u, noise, batch, progress)[0].numpy()


def _noise(shape: torch.Size, level: int, image: int) -> Tensor:
    # Far more than there are images, so that no two pairs of level and image share their noise.
    generator = torch.Generator().manual_seed(level * 1_000_003 + image)
    return torch.randn(shape, generator=generator)


def check_ema(record: RunRecord, average: Floats, raw: Floats, updates: int, what: str) -> Finding:
    """run.ema_behind: check that the EMA weights have no higher loss than the raw weights.

    `average` and `raw` are their losses [L, N] on `what`, such as "held-out images", after so many optimiser updates.
    """
    # By image, with the same noise on both: the difference is much steadier than either loss.
    pairs = (average - raw).mean(0)
    excess = float(pairs.mean() / raw.mean())
    error = float(pairs.std(ddof=1) / np.sqrt(len(pairs)) / raw.mean()) if len(pairs) > 1 else np.inf
    horizon = _ema_window(record, updates)
    curves = {"EMA": average.mean(1), "raw": raw.mean(1)}
    figures = (_level_figure("EMA weights against raw weights", curves),)
    facts = {"excess": excess, "error": json_values(error), "updates": updates, "horizon": horizon}
    side = "higher" if excess > 0 else "lower"
    evidence = (
        f"the loss of the EMA weights is {abs(excess):.1%} {side} than that of the raw weights, on "
        f"{len(pairs)} {what}; the EMA averages over the last {horizon:,.0f} of {updates:,} updates"
    )
    if excess <= _BEHIND or excess < _CERTAIN * error:
        return Finding("run.ema_behind", "fine", evidence, "", facts, figures)
    ema = record.config.ema
    narrower = f"power:width={max(0.01, ema.width / 3):.2g}" if isinstance(ema, PowerEma) else _shorter(ema, updates)
    remedy = (
        f"for now sample with the raw weights: {record.command('sample', '--weights raw')}; the EMA catches "
        f"up as the learning rate falls, or with a shorter window: --ema {narrower}"
    )
    # Early on an average of weights always lags behind weights that improve fast.
    severity: Severity = "hint" if record.step < 0.2 * record.steps else "warning"
    return Finding("run.ema_behind", severity, evidence, remedy, facts, figures)


def _shorter(ema: FixedEma, updates: int) -> str:
    """Return a fixed EMA with a third of the present window, 1 / (1 - decay)."""
    return f"fixed:decay_max={max(0.0, 1 - 3 * (1 - ema.decay(max(updates, 1)))):.10g}"


def _ema_window(record: RunRecord, updates: int) -> float:
    """Return the window of the EMA in updates: 1 / (1 - decay)."""
    ema: PowerEma | FixedEma = record.config.ema
    return min(float(updates), 1 / max(1e-12, 1 - ema.decay(max(updates, 1))))


def check_overfitting(record: RunRecord, seen: Floats, unseen: Floats) -> Finding:
    """run.overfitting: compare EMA losses [L, N] on training images with [L, M] on held-out images."""
    a, b = seen.mean(0), unseen.mean(0)
    gap = float(b.mean() / a.mean() - 1)
    spread = [values.var(ddof=1) / len(values) if len(values) > 1 else np.inf for values in (a, b)]
    error = float(np.sqrt(sum(spread)) / a.mean())
    steps, measured, rose = held_out_history(record)
    curves = {"trained on": seen.mean(1), "held out": unseen.mean(1)}
    figures: tuple[Figure, ...] = (_level_figure("Training images against held-out images", curves),)
    if len(steps) > 1:
        history = line_chart({"held-out loss": (steps, measured)}, "step", "loss")
        figures += (Figure("Held-out loss", svg=history),)
    worst = int(np.argmax(unseen.mean(1) / np.maximum(seen.mean(1), 1e-12)))
    lowest_at = int(steps[measured.argmin()]) if len(steps) else 0
    facts = {"gap": gap, "error": json_values(error), "rose": rose, "lowest_at": lowest_at}
    sure = f" ± {error:.0%}" if np.isfinite(error) else ""
    evidence = (
        f"the loss on {plural(len(b), 'held-out image')} is {gap:+.0%}{sure} against {len(a)} training images, "
        f"most at noise level {(worst + 0.5) / len(seen):.2f}"
    )
    if len(steps) > 2:
        lowest = f"its lowest, at step {facts['lowest_at']:,}"
        evidence += f"; the held-out loss is {rose:.1%} above {lowest}" if rose > 0.001 else "; it is at its lowest"
    # Large and sure: a gap of two images may be chance, and a sure gap of a percent is harmless.
    certain = gap > max(_GAP, _CERTAIN * error)
    if certain and rose > ROSE:
        return Finding("run.overfitting", "warning", evidence, _overfitting_remedy(record), facts, figures)
    if certain or (rose > 2 * ROSE and gap > error):
        return Finding("run.overfitting", "hint", evidence, _overfitting_remedy(record), facts, figures)
    return Finding("run.overfitting", "fine", evidence, "", facts, figures)


def held_out_history(record: RunRecord) -> tuple[Floats, Floats, float]:
    """Return (steps, held-out losses, relative rise of the latest above the lowest), for the present noise levels."""
    rows = [
        row
        for row in record.metrics
        if np.isfinite([finite_number(row.get("step")), finite_number(row.get("held_out_loss"))]).all()
    ]
    steps, measured = finite_column(rows, "held_out_loss")
    counts = [len(levels) if isinstance(levels := row.get("held_out_by_level"), list) else 0 for row in rows]
    if counts:  # losses over another number of levels are not comparable
        same = np.array(counts) == counts[-1]
        steps, measured = steps[same], measured[same]
    if not len(measured):
        return steps, measured, 0.0
    # The median of the last three, unless the last is lower, so that one outlier is not a rise.
    latest = min(float(measured[-1]), float(np.median(measured[-3:])))
    return steps, measured, latest / max(float(measured.min()), 1e-12) - 1


def _overfitting_remedy(record: RunRecord) -> str:
    """Return remedies for overfitting, most helpful first."""
    config = record.config
    sided = " unless a condition depends on left and right" if config.columns else ""
    flip = "" if config.data.flip else f"--flip{sided}, "
    possible = config.representation.augmentable and config.data.can_be_augmented
    augment = "--data.augment 0.15, " if possible else ""
    by = "" if config.evaluate.best == "held_out_loss" else f", by {config.evaluate.best},"
    return (
        f"the best checkpoint{by} is kept: {record.command('sample', '--best')}; next time {flip}{augment}"
        "dropout (--network small:dropout=0.1), a smaller network or fewer steps"
    )


def _level_figure(title: str, curves: dict[str, Floats]) -> Figure:
    """Plot losses [L] over the midpoints of the levels."""
    series = {name: ((np.arange(len(y)) + 0.5) / max(1, len(y)), y) for name, y in curves.items()}
    return Figure(title, svg=line_chart(series, _LEVELS, "loss"), caption="Both are measured with the same noise.")
