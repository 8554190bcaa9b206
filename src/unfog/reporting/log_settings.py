"""Settings of logging: its interval, and the trackers that a run is copied to.

Only the standard library is imported at once, so that `--help` stays fast.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from unfog.custom import PREFIX
from unfog.errors import RequestError, install_command
from unfog.settings import setting

# tracker -> the package that it needs, and the extra that brings it
_PACKAGES = {
    "tensorboard": ("tensorboard", "tb"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
    "comet": ("comet_ml", "comet"),
}


@dataclass(frozen=True)
class Log:
    """Settings of logging: its interval, and the trackers that get a copy."""

    every: int = setting(0, auto=0)
    """Steps between two lines of metrics.jsonl. 0: twenty lines or more in the run, at most 50 steps apart."""

    sinks: tuple[str, ...] = ()
    """Trackers to copy to: tensorboard, wandb, mlflow, trackio, comet, custom:path=MODULE.CLASS. Offline by default."""

    def __post_init__(self) -> None:
        """RequestError for a negative interval and for a tracker of another name."""
        if self.every < 0:
            raise RequestError(f"log.every = {self.every} must be at least 1 step, or 0 to choose it; try 50")
        for name in self.sinks:
            if name not in _PACKAGES and not name.startswith(PREFIX):
                raise RequestError(
                    f"log.sinks names {name!r}, which is not one of {', '.join(_PACKAGES)}; a tracker of your own is "
                    f"{PREFIX}MODULE.CLASS"
                )


def check_installed(sinks: Sequence[str]) -> None:
    """Check that the package of each tracker is installed; RequestError naming the extra where one is not."""
    for sink in sinks:
        package, extra = _PACKAGES.get(sink, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            raise RequestError(f"log.sinks names {sink!r}, which needs the package {package}: {install_command(extra)}")
