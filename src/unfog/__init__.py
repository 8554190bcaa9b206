"""Unfog trains image diffusion models on your own pictures.

    run = unfog.train("photos/", size=64, steps=2000)
    pictures = unfog.load("runs/photos").sample(16, seed=0)        # uint8 [16, 64, 64, 3]
    findings = unfog.doctor("photos/", size=64, steps=2000)        # before: what would go wrong

The parts are usable on their own: `unfog.diffusion` (schedules, targets, weightings, samplers), `unfog.models`,
`unfog.data`, `unfog.training`. Importing this module imports no torch; what needs it, imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

# Loaded before the function of the same name is defined: loading it later would put the package in its place.
import unfog.doctor as _package  # noqa: F401
from unfog.config.paths import path_text
from unfog.errors import RequestError, RunError, UnfogError
from unfog.version import __version__

if TYPE_CHECKING:
    from unfog.commands.ema_sweep import EmaSweepResult
    from unfog.commands.find_lr import FindLrResult
    from unfog.commands.plan import Plan
    from unfog.commands.tune import TuneResult
    from unfog.config.schema import Config
    from unfog.inference.run import Run
    from unfog.reporting.findings import Finding

__all__ = [
    "RequestError",
    "RunError",
    "UnfogError",
    "__version__",
    "doctor",
    "ema_sweep",
    "find_lr",
    "load",
    "pack",
    "plan",
    "resume",
    "train",
    "train_autoencoder",
    "train_codec",
    "tune",
    "verify",
]


class SupportsArray(Protocol):
    """A NumPy array, a tensor, or what NumPy makes an array of."""

    def __array__(self) -> Any:
        """As NumPy's."""


Source = str | PathLike[str] | SupportsArray


def train(source: Source, *, out: str | PathLike[str] | None = None, preset: str = "default", **settings: Any) -> Run:
    """Train on images, as `unfog train` does.

    Args:
        source: a folder or any other SOURCE of the command line; or uint8 images as an array or tensor [N, H, W],
            [N, H, W, C] or [N, C, H, W], with `labels=` one for each where there are classes.
        out: the run folder, which must be new; None is a free one under `runs/`.
        preset: the recipe that settings change: "default", "ddpm", "edm" or "demo".
        settings: any setting of the command line, by its short name (`size=64, steps=2000, lr=1e-4`) or by a table of
            its section (`optimizer={"warmup": 100}`). A part may be given by word, `schedule="cosine:steps=500"`.

    Returns:
        The run, which samples from its newest checkpoint.

    Raises:
        RequestError: the request cannot be met; found before training.
        RunError: training could not go on.
        KeyboardInterrupt: a signal stopped it; everything is saved, and `resume` goes on.
    """
    from unfog.inference.run import Run
    from unfog.runs.train import train

    folder, done = train(_asked(source, preset, settings), _path(out))
    if not done:
        raise KeyboardInterrupt(f"stopped, and saved in {folder.path}")
    return Run(folder.path)


def train_autoencoder(
    source: Source,
    *,
    out: str | PathLike[str] | None = None,
    factor: int = 4,
    channels: int = 4,
    width: str = "small",
    kl: float = 1e-3,
    pyramid: float = 1.0,
    **settings: Any,
) -> Path:
    """Train an autoencoder on images, as `unfog train-autoencoder` does; `train(source, autoencoder=folder)` takes it.

    Args:
        source: as for `train`.
        out: the folder, which must be new; None is a free one under `runs/`.
        factor: pixels across one latent: 2, 4, 8 or 16.
        channels: numbers at each place of a latent.
        width: size of the codec: "tiny", "small" or "base".
        kl: weight of the latents' divergence from a standard normal.
        pyramid: weight of the error in edges and textures.
        settings: as for `train`.

    Returns:
        The folder.

    Raises:
        As `train`.
    """
    from unfog.config.autoencoder_recipe import add_autoencoder, autoencoder_recipe
    from unfog.config.schema import clear_length, inherit_length, nest_settings
    from unfog.config.toml import update
    from unfog.process.run_folder import next_folder
    from unfog.runs.train import train

    base, place = autoencoder_recipe(), _place(source, settings)
    config = inherit_length(base, update(clear_length(base), nest_settings(settings) | {"source": place}, ""))
    config = add_autoencoder(config, factor, channels, width, kl=kl, pyramid=pyramid)
    folder, done = train(config, _path(out) or next_folder(f"{place.rstrip('/')}-autoencoder"))
    if not done:
        raise KeyboardInterrupt(f"stopped, and saved in {folder.path}")
    return folder.path


train_codec = train_autoencoder
"""The old name of `train_autoencoder`."""


def resume(path: str | PathLike[str], *, force: bool = False, **settings: Any) -> Run:
    """Go on with a run, as `unfog resume` does.

    Args:
        path: the run folder.
        force: also change what makes it another run from here on, such as its seed or its images.
        settings: as for `train`; changed from here on.

    Raises:
        As `train`, and RequestError for a setting that cannot change.
    """
    from unfog.config.resume_rules import apply_changes
    from unfog.config.schema import nest_settings
    from unfog.inference.run import Run
    from unfog.process.run_folder import RunFolder
    from unfog.runs.train import resume as go_on

    folder = RunFolder(Path(path_text(path, "path")))
    if "source" in settings:
        settings["source"] = _place(settings["source"], settings)
    _, done = go_on(folder, apply_changes(folder.read_config(), nest_settings(settings)), force)
    if not done:
        raise KeyboardInterrupt(f"stopped, and saved in {folder.path}")
    return Run(folder.path)


def doctor(
    source: Source,
    *,
    out: str | PathLike[str] | None = None,
    preset: str = "default",
    quick: bool = False,
    **settings: Any,
) -> list[Finding]:
    """Examine images and settings before training on them, or a run, as `unfog doctor` does.

    Args:
        source: the images, or the folder of a run, which has its own settings.
        out: folder for report.html and findings.json, which must be new; None is a free one under `doctor/`.
        preset: as for `train`.
        quick: leave out what takes longest.
        settings: as for `train`.

    Raises:
        RequestError: there is no such thing, or the settings will not do.
    """
    from unfog.commands.doctor import examine_run_folder, examine_source
    from unfog.process.run_folder import RunFolder

    run = RunFolder(Path(source)) if isinstance(source, str | PathLike) else None
    if run is not None and run.config_file.is_file():
        device = settings.pop("device", "auto")
        if settings or preset != "default":
            given = ", ".join(settings) or f"preset {preset}"
            raise RequestError(f"a run has its own settings, so {given} cannot be given with it")
        return examine_run_folder(run, _path(out), quick, device)[1]
    return examine_source(_asked(source, preset, settings), _path(out), quick)[1]


def plan(source: Source, *, device: str = "", processes: int = 1, preset: str = "default", **settings: Any) -> Plan:
    """Predict memory, time and disk of training, as `unfog plan` does.

    Args:
        source: the images.
        device: another machine than this one, by its device: "h200", "a100", "4090", …
        processes: train on so many, each with a device of its own; what one of them takes is told.
        preset: as for `train`.
        settings: as for `train`.

    Raises:
        RequestError: the settings or the source will not do.
    """
    from unfog.commands.plan import plan as predict

    return predict(_asked(source, preset, settings), device, processes)


def find_lr(
    source: Source,
    *,
    out: str | PathLike[str] | None = None,
    preset: str = "default",
    seconds: float = 90.0,
    **settings: Any,
) -> FindLrResult:
    """Look for a learning rate on a throwaway copy, as `unfog find-lr` does.

    Args:
        source: the images.
        out: folder for lr-range.json and lr-range.html; None writes nothing.
        preset: as for `train`.
        seconds: of training that it may take.
        settings: as for `train`.

    Raises:
        RequestError: the settings or the source will not do.
    """
    from unfog.commands.find_lr import find_lr as search

    return search(_asked(source, preset, settings), _path(out), seconds)


def pack(source: Source, out: str | PathLike[str], **settings: Any) -> Path:
    """Decode and resize images once into the folder `out`, as `unfog pack` does; `train` takes it as a source.

    Args:
        source: the images.
        out: a new folder, or an unfinished pack of the same.
        settings: of the data: `size=64`, or `data={"background": "black"}`.

    Raises:
        RequestError: the settings, the source or the folder will not do.
    """
    from unfog.commands.pack import pack as write

    return write(_asked(source, "default", settings), Path(path_text(out, "out")))


def verify(path: str | PathLike[str]) -> str:
    """Train from the checkpoint before the newest one once more, and compare with that, as `unfog resume --verify`.

    Returns:
        A line on what was compared.

    Raises:
        RequestError: there is nothing to compare.
        RunError: it came out differently.
    """
    from unfog.commands.verify import verify as repeat
    from unfog.process.run_folder import RunFolder

    return repeat(RunFolder(Path(path_text(path, "path"))))


def tune(path: str | PathLike[str], *, steps: int = 10, sampler: str | None = None, **settings: Any) -> TuneResult:
    """Find the best few noise levels to sample a run at, and make them its default, as `unfog tune` does.

    Args:
        path: the run folder.
        steps: of the sampler.
        sampler: ddim, heun, dpmpp or unipc; None as the run is set.
        settings: `pictures` that are compared, `tries`, `store=False` to only look, `device`.

    Raises:
        RequestError: a setting that will not do, or the run is being trained.
        RunError: it has no whole checkpoint.
    """
    from unfog.commands.tune import tune as search

    return search(path_text(path, "path"), steps, sampler, **settings)


def load(path: str | PathLike[str], *, ema: float | None = None) -> Run:
    """A run that was trained, ready to sample from the EMA weights of its newest whole checkpoint.

    Args:
        path: the run folder.
        ema: width of the average, such as 0.07, rebuilt from the run's snapshots; None is what `ema_sweep` chose, or
            else as the run was set.

    Raises:
        RequestError: `path` is not a run, or its snapshots do not allow that average.
        RunError: it has no whole checkpoint.
    """
    from unfog.inference.run import Run

    return Run(path_text(path, "path"), ema=ema)


def ema_sweep(
    path: str | PathLike[str],
    *,
    metric: str = "held_out_loss",
    n: int = 0,
    widths: Sequence[float] = (),
    step: int | None = None,
    features: str = "",
    device: str = "auto",
) -> EmaSweepResult:
    """Find the best length of a run's average of weights, as `unfog ema-sweep` does; it is the run's own from then on.

    Args:
        path: the run folder.
        metric: held_out_loss, or kid, fid, fd or sliced of drawn pictures; the lowest is best.
        n: held-out images, or pictures for each length; 0 is the usual number.
        widths: lengths to try; () are ten from 0.02 to 0.25.
        step: at which; None is the last snapshot.
        features: what kid, fid and fd compare by: inception, texture, pixels, or a TorchScript file, which is run.
        device: auto, cpu, cuda, cuda:1 or mps.

    Raises:
        RequestError: no run, no snapshots, no held-out images, or a width that they do not allow.
    """
    from unfog.commands.ema_sweep import ema_sweep as sweep

    listed = widths if isinstance(widths, float | int) else tuple(widths)  # a number is refused there
    return sweep(Path(path_text(path, "path")), metric, n, listed, step, features, device)  # type: ignore[arg-type]


def _asked(source: Source, preset: str, settings: dict[str, Any]) -> Config:
    """The preset, changed by settings that are given by name."""
    from unfog.config.presets import preset as recipe
    from unfog.config.schema import clear_length, inherit_length, nest_settings
    from unfog.config.toml import update

    base, place = recipe(preset), _place(source, settings)
    for name in ("init", "autoencoder", "codec"):
        if isinstance(settings.get(name), PathLike):
            settings[name] = path_text(settings[name], name)
    if "init" in settings:
        from unfog.runs.init_weights import recipe_from_weights

        base = recipe_from_weights(base, nest_settings(settings))
    config = update(clear_length(base), nest_settings(settings) | {"source": place}, "")
    return inherit_length(base, config)


def _place(source: Any, settings: dict[str, Any]) -> str:
    """Where the images are; an array, with the labels among the settings, is put into the cache first."""
    if not hasattr(source, "__array__"):
        return path_text(source, "source")
    from unfog.data.sources.arrays import store_array

    return str(store_array(source, settings.pop("labels", None)))


def _path(given: str | PathLike[str] | None) -> Path | None:
    return None if given is None else Path(path_text(given, "path"))
