"""Names of what a run folder holds; the one place that knows them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from unfog.config.toml import read_toml, to_toml
from unfog.config.tree import Config
from unfog.errors import RequestError


@dataclass(frozen=True)
class RunFolder:
    """A folder that is, or will be, a run."""

    path: Path

    @property
    def config_file(self) -> Path:
        """Everything needed to rebuild the run."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, one folder each."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """A line per log."""
        return self.path / "metrics.jsonl"

    @property
    def newest_preview(self) -> Path:
        """The last sample grid; the folder of sample grids if there is none yet."""
        return max((self.path / "samples").glob("*.png"), default=self.path / "samples")

    def check_free(self) -> None:
        """RequestError if there is something in the folder already: nothing is ever overwritten."""
        if self.config_file.exists():
            raise RequestError(
                f"{self.path} is a run already; go on with `unfog resume {self.path}`, or give another --out"
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RequestError(f"{self.path} exists and is not an empty folder; give another --out")

    def create(self, config: Config) -> None:
        """Make the folder and store the configuration."""
        self.checkpoints.mkdir(parents=True)
        self.write_config(config)

    def write_config(self, config: Config) -> None:
        """Store the configuration; whole or not at all."""
        partial = self.config_file.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(to_toml(config))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.config_file)

    def read_config(self) -> Config:
        """The stored configuration. RequestError if this is no run."""
        if not self.config_file.is_file():
            raise RequestError(f"{self.path} is not a run: it has no {self.config_file.name}")
        return read_toml(self.config_file, Config())


def next_folder(source: str) -> Path:
    """A free folder under runs/ named after the source: runs/photos, runs/photos-2, …"""
    name = Path(source).resolve().name if Path(source).exists() else source
    candidates = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 10**6))
    return next(path for path in candidates if not path.exists())
