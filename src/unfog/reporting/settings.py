"""Settings of the record and its trackers (standard library only, so that `--help` stays fast)."""

from __future__ import annotations

from dataclasses import dataclass

from unfog.errors import RequestError

_SINKS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class Log:
    """Settings of logging: its interval, and the trackers that get a copy."""

    every: int = 0
    """Steps between two lines of metrics.jsonl. 0: twenty lines or more in the run, at most 50 steps apart."""

    sinks: tuple[str, ...] = ()
    """Trackers to copy to: tensorboard, wandb (offline unless WANDB_MODE says otherwise)."""

    def __post_init__(self) -> None:
        """RequestError for a negative interval and for a sink of another name."""
        if self.every < 0:
            raise RequestError(f"log.every = {self.every} must be at least 1 step, or 0 to choose it; try 50")
        for name in self.sinks:
            if name not in _SINKS:
                raise RequestError(f"log.sinks names {name!r}, which is not one of {', '.join(_SINKS)}")
