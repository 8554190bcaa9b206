"""What a run starts from, where it does not start from random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import Suppress

from unfog.errors import RequestError
from unfog.settings import setting


@dataclass(frozen=True)
class Init:
    """Weights to start from. Network, size and objective are theirs unless given."""

    folder: str = setting("", short="init")
    """A run, or a folder that diffusers wrote: a UNet2DModel, or a pipeline with one."""
    weights: Literal["ema", "raw"] = "ema"
    """Of a run: the average of the weights, or the last ones as they are."""
    checkpoint: str = "newest"
    """Of a run: newest, best (by its evaluate.best), or a step."""
    sha256: Suppress[str] = ""
    """Of the file of weights, as found."""

    def __post_init__(self) -> None:
        if self.checkpoint not in ("newest", "best") and not self.checkpoint.isdecimal():
            raise RequestError(f"checkpoint = {self.checkpoint!r} is not newest, best or a step such as 1000")
