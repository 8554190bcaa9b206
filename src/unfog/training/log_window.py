"""Sums of the training loss, and training speed, between two lines of the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unfog.training.noise_scale import NoiseScale

BINS = 10  # of the noise quantile u


class LogWindow:
    """Sums since the last log, kept on the device, because reading them there would make the host wait."""

    def __init__(self, device: torch.device):
        self.loss = torch.zeros(BINS, device=device)
        self.count = torch.zeros(BINS, device=device)
        # A table, because making its rows anew would cost seven operations in every step.
        self.one_hot = torch.eye(BINS, device=device)
        self.skipped = self.overflows = 0
        self.noise = NoiseScale(device)

    def add(self, per_image: Tensor, u: Tensor, importance: Tensor | None = None) -> None:
        """Add detached losses [B] at noise quantiles u [B] in (0, 1).

        Args:
            per_image: losses [B].
            u: noise quantiles [B].
            importance: weights [B] that make the mean that of evenly drawn u; None where u is drawn evenly.
        """
        # A product with a one-hot matrix adds in a fixed order, unlike scatter_add, so that runs repeat to the bit.
        one_hot = self.one_hot[(u * BINS).long().clamp_(0, BINS - 1)]
        if importance is not None:
            one_hot = one_hot * importance[:, None]
        self.loss += per_image @ one_hot
        self.count += one_hot.sum(0)

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
        """Return images per second, and the share of time spent waiting for data, since the last lap."""
        now = time.perf_counter()
        seconds = max(self.busy + now - self.mark, 1e-9)
        record = {"images_per_second": self.images / seconds, "data_wait": self.data_wait / seconds}
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
