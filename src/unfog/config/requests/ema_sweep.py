"""Request of `unfog ema-sweep`: the EMA widths of a run to compare, and the metric."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unfog.settings import argument, setting


@dataclass(frozen=True)
class EmaSweepRequest:
    """Find the best EMA length of RUN after training: rebuild EMAs of several widths from snapshots, and measure each.

    The best becomes the run's EMA: `unfog sample RUN` uses it. Prints a table and writes ema-sweep.html.

      unfog ema-sweep runs/photos                       by held-out loss, in a minute
      unfog ema-sweep runs/photos --metric kid -n 1000  by samples, which says more
    """

    run: Path = field(metadata=argument("RUN"))
    """Folder of the run."""
    metric: Literal["held_out_loss", "kid", "fid", "fd", "sliced"] = "held_out_loss"
    """Metric to minimise. All but held_out_loss compare samples with the run's images."""
    n: int = setting(0, auto=0)
    """Held-out images, or samples for each width. 0: 512 images, 1000 samples, or 10000 for fid."""
    widths: tuple[float, ...] = setting((), auto=())
    """EMA widths: standard deviations of the window, as shares of the run. Default: ten from 0.02 to 0.25."""
    checkpoint: int | None = None
    """Step to rebuild at. Default: the last snapshot."""
    features: str = setting("", auto="")
    """inception, texture, pixels or a TorchScript file. Default: inception for fid, else texture."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
