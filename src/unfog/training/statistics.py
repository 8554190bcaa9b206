"""Statistics of training between two lines of the log: losses by noise level, speed, and the gradient noise scale."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unfog.device.compilation import compiled_with

_BINS = 10  # of the noise quantile u


class LogWindow:
    """Sums of losses since the last log, by noise level, and counts of steps that were not taken."""

    def __init__(self, device: torch.device, network: nn.Module | None = None):
        self._sums = compiled_with(network, device, _sums_by_level)
        # On the device, because reading them in every step would make the host wait.
        self.loss = torch.zeros(_BINS, device=device)
        self.count = torch.zeros(_BINS, device=device)
        # A table, because making its rows anew would cost seven operations in every step.
        self.one_hot = torch.eye(_BINS, device=device)
        self.skipped = self.overflows = 0
        self.noise = _NoiseScale(device)

    def add(self, per_image: Tensor, u: Tensor, importance: Tensor | None = None) -> None:
        """Add detached losses [B] at noise quantiles u [B] in (0, 1).

        `importance` are weights [B] that make the mean that of evenly drawn u; None if u is drawn evenly.
        """
        loss, count = self._sums(self.one_hot, per_image, u, importance)
        self.loss += loss
        self.count += count

    @property
    def empty(self) -> bool:
        """True if no step was counted since the last `close`."""
        return not any((*self.count.tolist(), self.skipped, self.overflows))

    def close(self) -> dict[str, Any]:
        """Return mean loss, loss by noise level (clean to noisy), skipped steps and overflows; then start at zero.

        Losses are NaN if all steps of the window were skipped.
        """
        loss, count = self.loss.tolist(), self.count.tolist()
        record = {
            "loss": sum(loss) / sum(count) if any(count) else float("nan"),
            "loss_by_level": [value / n if n else None for value, n in zip(loss, count)],
            "refused": self.skipped,
            "overflows": self.overflows,
            **self.noise.close(),
        }
        self.loss.zero_()
        self.count.zero_()
        self.skipped = self.overflows = 0
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; JSON keeps every bit of a float."""
        return {
            "loss": self.loss.tolist(),
            "count": self.count.tolist(),
            "refused": self.skipped,
            "overflows": self.overflows,
            "noise": self.noise.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.loss.copy_(torch.tensor(saved["loss"]))
        self.count.copy_(torch.tensor(saved["count"]))
        self.skipped, self.overflows = saved["refused"], saved["overflows"]
        self.noise.load_state_dict(saved["noise"])


class Stopwatch:
    """Measures images per second. Time spent on previews, evaluation and checkpoints is not training time."""

    def __init__(self) -> None:
        self.data_wait = self.busy = 0.0
        self.images = 0
        self.mark = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Return images per second, and the share of time spent waiting for data, since the last lap.

        Returns {} if no image was trained on since: a resume may begin with the log of the session before.
        """
        now = time.perf_counter()
        # Some clocks stand still between two calls.
        seconds = max(self.busy + now - self.mark, 1e-9)
        record = {"images_per_second": self.images / seconds, "data_wait": self.data_wait / seconds}
        record = record if self.images else {}
        self.data_wait = self.busy = 0.0
        self.images, self.mark = 0, now
        return record

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Do not count the time inside as training."""
        self.busy += time.perf_counter() - self.mark
        yield
        self.mark = time.perf_counter()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        started = time.perf_counter()
        yield
        self.data_wait += time.perf_counter() - started


def _sums_by_level(one_hot: Tensor, per_image: Tensor, u: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of losses and of weights by noise level."""
    # A product with a one-hot matrix adds in a fixed order, unlike scatter_add, so that runs repeat to the bit.
    rows = one_hot[(u * _BINS).long().clamp_(0, _BINS - 1)]
    if importance is not None:
        rows = rows * importance[:, None]
    return per_image @ rows, rows.sum(0)


class _NoiseScale:
    """Gradient noise scale since the last log: the batch size beyond which larger batches hardly help.

    A gradient of B images is G, the true one, plus noise of covariance Sigma / B. The simple noise scale
    tr(Sigma) / |G|^2 is the number of images at which the noise is as long as the gradient (McCandlish et al. 2018,
    "An Empirical Model of Large-Batch Training", eq. 2.9). Squared norms of gradients of two batch sizes give both
    parts (appendix A.1); here these are the first micro-batch and the whole batch. As a micro-batch spreads its noise
    levels evenly, Sigma is that of images in such groups, and slightly smaller for larger micro-batches.
    """

    def __init__(self, device: torch.device):
        # Averaged before their ratio is taken: each alone is unbiased, a ratio of single steps is not.
        self.sums = torch.zeros(2, device=device)  # of the estimates of |G|^2 and of tr(Sigma)
        self.count = 0

    def add(self, part_square: Tensor, part: int, whole_square: Tensor, whole: int) -> None:
        """Add one accepted step of `whole` images, by squared gradient norms, 0-d, on the device, without a loss scale.

        Args:
            part_square: after the first pass, of `part` images whose losses were summed and divided by `whole`.
            part: images of the first pass, fewer than `whole`.
            whole_square: of the whole batch, before the gradient is clipped.
            whole: images of the batch.
        """
        # |g_B|^2 is on average |G|^2 + tr(Sigma) / B, so two batch sizes give two equations of two unknowns.
        square = part_square * (whole / part) ** 2  # of the mean gradient of the first pass
        signal = (whole * whole_square - part * square) / (whole - part)
        noise = (square - whole_square) / (1 / part - 1 / whole)
        self.sums += torch.stack([signal, noise])
        self.count += 1

    def close(self) -> dict[str, Any]:
        """Return noise scale in images, squared gradient norm and trace of its covariance; then start at zero.

        The noise scale is None if noise exceeds the gradient, whose squared norm was then estimated at zero or less.
        Returns {} if no step had several micro-batches.
        """
        if not self.count:
            return {}
        signal, noise = (value / self.count for value in self.sums.tolist())
        self.sums.zero_()
        self.count = 0
        record = {"gradient_signal": signal, "gradient_noise": noise}
        return {"noise_scale": noise_scale([record]), **record}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; JSON keeps every bit of a float."""
        return {"sums": self.sums.tolist(), "count": self.count}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.sums.copy_(torch.tensor(saved["sums"]))
        self.count = saved["count"]


def noise_scale(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the noise scale in images over several windows of a log, by the ratio of their means.

    None if no window has it, or if noise exceeds the gradient even so.
    """
    known = [row for row in records if row.get("gradient_signal") is not None and row.get("gradient_noise") is not None]
    signal = sum(row["gradient_signal"] for row in known)
    noise = sum(row["gradient_noise"] for row in known)
    # A ratio of means, as in a window: a mean of ratios is dominated by windows whose signal is nearly zero.
    scale = noise / signal if signal > 0 else math.nan
    return max(scale, 0.0) if math.isfinite(scale) else None


def batch_advice(scale: float, batch: int) -> str:
    """Describe the cost of this batch size at this noise scale, and of another; a sentence without stop.

    To get equally far, batches of B need 1 + scale / B times the fewest possible steps, and 1 + B / scale times the
    fewest possible images (McCandlish et al. 2018, eq. 2.7 and 2.11).
    """
    # Derived for gradient descent, and within a small factor true of Adam, so nothing is said to more than two digits.
    scale = max(scale, 1e-3)

    def steps(size: float) -> float:
        return 1 + scale / size

    def images(size: float) -> float:
        return 1 + size / scale

    head = (
        f"at a gradient noise scale of about {_two_digits(scale)} images, an image in a batch of {batch:,} teaches "
        f"{1 / images(batch):.0%} of what it could in a tiny one"
    )
    if batch <= scale:
        fewer, more = 1 - steps(2 * batch) / steps(batch), images(2 * batch) / images(batch) - 1
        return f"{head}; batch {2 * batch:,} would need {fewer:.0%} fewer steps, and {more:.0%} more images"
    if batch == 1:
        return head
    half = batch // 2
    more, fewer = steps(half) / steps(batch) - 1, 1 - images(half) / images(batch)
    return f"{head}; batch {half:,} would need {fewer:.0%} fewer images, and {more:.0%} more steps"


def _two_digits(value: float) -> str:
    """Format a number to two digits, written out: 0.31, 1,300."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
