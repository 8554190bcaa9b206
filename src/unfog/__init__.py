"""Unfog trains image diffusion models on your own pictures.

    run = unfog.train("photos/", size=64, steps=2000)
    pictures = unfog.load("runs/photos").sample(16, seed=0)        # uint8 [16, 64, 64, 3]

The parts are usable on their own: `unfog.diffusion` (schedules, targets, weightings, samplers), `unfog.models`,
`unfog.data`, `unfog.training`. Importing this module imports no torch; what needs it, imports it.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfog.errors import RequestError, RunError, UnfogError
from unfog.version import __version__

if TYPE_CHECKING:
    from unfog.runs.run import Run

__all__ = ["RequestError", "RunError", "UnfogError", "__version__", "load", "resume", "train", "verify"]


def train(
    source: str | PathLike[str], *, out: str | PathLike[str] | None = None, preset: str = "default", **settings: Any
) -> Run:
    """Train on a folder of images, or on a built-in set, as `unfog train` does.

    Args:
        source: the folder, or `"fashion"`.
        out: the run folder, which must be new; None is a free one under `runs/`.
        preset: the recipe that settings change: "default", "ddpm" or "demo".
        settings: any setting of the command line, by its short name (`size=64, steps=2000, lr=1e-4`) or by a table of
            its section (`optimizer={"warmup": 100}`). A part may be given by word, `schedule="cosine:steps=500"`.

    Returns:
        The run, which samples from its newest checkpoint.

    Raises:
        RequestError: the request cannot be met; found before training.
        RunError: training could not go on.
        KeyboardInterrupt: a signal stopped it; everything is saved, and `resume` goes on.
    """
    from unfog.config.places import path_text
    from unfog.config.presets import preset as recipe
    from unfog.config.toml import update
    from unfog.config.tree import nested, with_length_of, without_length
    from unfog.runs.run import Run
    from unfog.runs.train import start

    base = recipe(preset)
    config = update(without_length(base), nested(settings) | {"source": path_text(source, "source")}, "")
    folder, done = start(with_length_of(base, config), None if out is None else Path(path_text(out, "out")))
    if not done:
        raise KeyboardInterrupt(f"stopped, and saved in {folder.path}")
    return Run(folder.path)


def resume(path: str | PathLike[str], *, force: bool = False, **settings: Any) -> Run:
    """Go on with a run, as `unfog resume` does.

    Args:
        path: the run folder.
        force: also change what makes it another run from here on, such as its seed or its images.
        settings: as for `train`; changed from here on.

    Raises:
        As `train`, and RequestError for a setting that cannot change.
    """
    from unfog.config.places import path_text
    from unfog.config.toml import update
    from unfog.config.tree import nested, with_length_of, without_length
    from unfog.runs.folder import RunFolder
    from unfog.runs.run import Run
    from unfog.runs.train import resume as go_on

    folder = RunFolder(Path(path_text(path, "path")))
    if "source" in settings:
        settings["source"] = path_text(settings["source"], "source")
    stored = folder.read_config()
    config = update(without_length(stored), nested(settings), "")
    _, done = go_on(folder, with_length_of(stored, config), force)
    if not done:
        raise KeyboardInterrupt(f"stopped, and saved in {folder.path}")
    return Run(folder.path)


def verify(path: str | PathLike[str]) -> str:
    """Train from the checkpoint before the newest one once more, and compare with that, as `unfog resume --verify`.

    Returns:
        A line on what was compared.

    Raises:
        RequestError: there is nothing to compare.
        RunError: it came out differently.
    """
    from unfog.config.places import path_text
    from unfog.runs.folder import RunFolder
    from unfog.runs.verify import verify as repeat

    return repeat(RunFolder(Path(path_text(path, "path"))))


def load(path: str | PathLike[str]) -> Run:
    """A run that was trained, ready to sample from the EMA weights of its newest whole checkpoint.

    Raises:
        RequestError: `path` is not a run.
        RunError: it has no whole checkpoint.
    """
    from unfog.config.places import path_text
    from unfog.runs.run import Run

    return Run(path_text(path, "path"))
