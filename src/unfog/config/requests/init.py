"""Request of `unfog init`: the answers that are given as flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unfog.settings import argument
from unfog.values.image_format import Size


@dataclass(frozen=True)
class InitRequest:
    """Ask five questions, and write FILE: settings with comments, for `unfog train --config`.

      unfog init
      unfog init photos.toml --yes --source photos/ --budget 2h     without questions

    A flag answers its question.
    """

    file: Path | None = field(default=None, metadata=argument("FILE"))
    """New TOML file. Default: the name of the images with .toml."""
    yes: bool = False
    """Ask nothing: take the default of every question that no flag answers."""
    source: str | None = None
    """Images, as for train. Default: a folder of images here, or fashion."""
    size: Size | None = None
    """Pixels: 64, or width x height: 96x64. Default: 0, which is chosen to suit the images."""
    budget: str | None = None
    """Time for training. Default: 1h."""
    classes: str | None = None
    """auto, folders, none, or a .csv or .jsonl file. Default: auto."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1 or mps. Default: auto."""
