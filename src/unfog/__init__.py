"""Unfog trains image diffusion models on your own images.

    run = unfog.train("photos/", size=64, steps=2000)
    images = unfog.load("runs/photos").sample(16, seed=0)        # uint8 [16, 64, 64, 3]
    findings = unfog.doctor("photos/", size=64, steps=2000)      # before training: problems and remedies

Each function is a command of the same name, and takes its flags as keywords; `unfog COMMAND --help` explains them. A
`source` is what the command line takes as SOURCE, or images as objects, with `labels=` where they have none themselves:
an array or tensor [N, H, W], [N, H, W, C] or [N, C, H, W]; or a list, torch `Dataset`, Hugging Face `Dataset` or
generator of PIL images, arrays, tensors or paths, alone or as (image, label) or {"image": …, "label": …}. `settings`
are those of `unfog train`, by short name (`size=64, lr=1e-4`), by a usual one (`learning_rate=1e-4`), or as a table of
a section (`optimizer={"warmup": 100}`), and may name a part by a spec string (`schedule="cosine:steps=500"`). All raise
`RequestError` before work begins if a request cannot be met, and `RunError` if a run fails.

The parts are usable on their own: `unfog.diffusion` (schedules, targets, weightings, samplers), `unfog.models`,
`unfog.data`, `unfog.training`. Importing `unfog` does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import unfog.device.cores  # noqa: F401  # first, as it must come before torch
from unfog._version import __version__
from unfog.errors import RequestError, RunError, UnfogError
from unfog.from_python import (
    PathLikeText,
    Source,
    adopt_network,
    autoencoder_request,
    check_one_process,
    folder_of,
    out_path,
    path_of,
    stored_source,
    training_settings,
)

# cuBLAS adds in one order only with this, and torch reads it at the first matrix product on a GPU, in any caller.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if TYPE_CHECKING:
    from unfog.inference.ema_sweep import EmaSweepResult
    from unfog.inference.evaluation_files import Evaluation
    from unfog.inference.run import Run
    from unfog.inference.tune import TuneResult
    from unfog.planning.plan import Plan
    from unfog.process.run_folder import RunFolder
    from unfog.reporting.findings import Finding
    from unfog.runs.find_lr import FindLrResult

__all__ = [
    "RequestError",
    "RunError",
    "UnfogError",
    "__version__",
    "doctor",
    "ema_sweep",
    "evaluate",
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


def train(
    source: Source,
    *,
    out: PathLikeText | None = None,
    preset: str = "default",
    callbacks: Sequence[object] = (),
    **settings: Any,
) -> Run:
    """Train a new run. Return it, with the network of its last checkpoint.

    `callbacks` are objects with any of the methods on_log, on_sample, on_checkpoint and on_end, each called with an
    event: see `unfog.callbacks`. One that raises ends the run, which is saved, with a RunError that names it.
    A signal raises KeyboardInterrupt after saving; `resume` continues.
    """
    from unfog.callbacks import check_callbacks
    from unfog.config.requests.train import TrainRequest
    from unfog.inference.run import Run
    from unfog.runs.start import start_run

    check_one_process("train", "SOURCE")
    callbacks = check_callbacks(callbacks)
    folder = out_path(out, settings)
    config = training_settings(source, preset, settings)
    return Run(_finished(*start_run(TrainRequest(config.source, config, preset, out=folder), callbacks)))


def train_autoencoder(
    source: Source, *, out: PathLikeText | None = None, callbacks: Sequence[object] = (), **settings: Any
) -> Path:
    """Train an autoencoder. Return its folder, which `train(source, autoencoder=folder)` takes.

    `settings` are `factor`, `channels`, `width`, `kl`, `pyramid`, and those of `train`.
    """
    from unfog.callbacks import check_callbacks
    from unfog.runs.start import start_autoencoder

    check_one_process("train-autoencoder", "SOURCE")
    callbacks = check_callbacks(callbacks)
    return _finished(*start_autoencoder(autoencoder_request(source, out, settings), callbacks))


def train_codec(source: Source, *, out: PathLikeText | None = None, **settings: Any) -> Path:
    """Old name of `train_autoencoder`, with the default folder of that time."""
    from unfog.config.aliases import with_old_defaults
    from unfog.runs.start import start_autoencoder

    check_one_process("train-autoencoder", "SOURCE")
    return _finished(*start_autoencoder(with_old_defaults("train-codec", autoencoder_request(source, out, settings))))


def resume(path: PathLikeText, *, force: bool = False, callbacks: Sequence[object] = (), **settings: Any) -> Run:
    """Continue a run, with these settings from here on. Return it.

    `force` allows changes that make it another run, such as its seed or its images. Raises as `train`.
    """
    from unfog.callbacks import check_callbacks
    from unfog.config.named_code import consent_to_settings
    from unfog.config.requests.train import ResumeRequest
    from unfog.config.resume_rules import apply_changes
    from unfog.config.schema import nest_settings
    from unfog.inference.run import Run
    from unfog.models.given_network import GivenNetwork
    from unfog.runs.start import resume_run

    check_one_process("resume", "RUN")
    callbacks, folder = check_callbacks(callbacks), _run_folder(path)
    if "source" in settings:
        settings["source"] = stored_source(settings["source"], settings.pop("labels", None))
    if isinstance(settings.get("mirror"), os.PathLike):
        settings["mirror"] = os.fspath(settings["mirror"])
    stored = folder.read_config()
    if GivenNetwork.accepts(settings.get("network")):
        adopt_network(stored, settings.pop("network"))
    changes = nest_settings(settings)
    consent_to_settings(changes)
    config = apply_changes(stored, changes)
    return Run(_finished(*resume_run(ResumeRequest(folder.path, config, force=force), callbacks)))


def verify(path: PathLikeText) -> str:
    """Train again from the second newest checkpoint, compare with the newest one bit by bit, and say what was compared.

    Raises RunError if they differ.
    """
    from unfog.runs.replay import verify as repeat

    return repeat(_run_folder(path))


def doctor(
    source: Source | None = None,
    *,
    out: PathLikeText | None = None,
    preset: str = "default",
    quick: bool = False,
    gpu: bool = False,
    **settings: Any,
) -> list[Finding]:
    """Check images and settings before training, a run, or the GPU (without a source), and return what was found.

    Writes report.html and findings.json to `out`. `quick` skips the slow checks. A run has its own settings.
    """
    if gpu != (source is None):
        raise RequestError("give a source to check, or gpu=True to check the GPU")
    from unfog.config.requests.doctor import DoctorRequest
    from unfog.config.schema import Config, nest_settings
    from unfog.config.toml import update
    from unfog.runs.doctor import doctor as examine

    folder = out_path(out, settings)
    if isinstance(source, str | PathLike) and (Path(source) / "config.toml").is_file():
        device = settings.pop("device", "auto")
        if settings or preset != "default":
            given = ", ".join(settings) or f"preset {preset}"
            raise RequestError(f"a run has its own settings, so {given} cannot be given with it")
        place, config = path_of(source, "source"), update(Config(), nest_settings({"device": device}), "")
    else:
        config = training_settings("" if source is None else source, preset, settings)
        place = config.source
    return examine(DoctorRequest(place, config, preset, out=folder, quick=quick, gpu=gpu))[1]


def plan(source: Source, *, device: str = "", processes: int = 1, preset: str = "default", **settings: Any) -> Plan:
    """Predict memory, time and disk space of training, on this machine or on `device`: "h200", "a100", "4090", …"""
    from unfog.config.requests.plan import PlanRequest
    from unfog.planning.plan import plan as predict

    config = training_settings(source, preset, settings)
    return predict(PlanRequest(config.source, config, preset, device=device, processes=processes))


def find_lr(
    source: Source, *, out: PathLikeText | None = None, preset: str = "default", seconds: float = 90.0, **settings: Any
) -> FindLrResult:
    """Find a learning rate on a throwaway copy of the network. Writes the curve to `out`, unless it is None."""
    from unfog.config.requests.plan import FindLrRequest
    from unfog.runs.find_lr import find_lr as search

    folder = out_path(out, settings)
    config = training_settings(source, preset, settings)
    return search(FindLrRequest(config.source, config, preset, out=folder, seconds=seconds))


def pack(source: Source, out: PathLikeText, **settings: Any) -> Path:
    """Decode and resize images once into the folder `out`, which `train` takes as a source. Return it."""
    from unfog.config.requests.pack import PackRequest
    from unfog.pipeline.pack import pack as write

    config = training_settings(source, "default", settings)
    return write(PackRequest(config.source, folder_of(out, "out"), config.data))


def load(
    path: PathLikeText,
    *,
    step: int | None = None,
    weights: Literal["ema", "raw"] = "ema",
    ema: float | None = None,
    network: Any = None,
    size: int | str = 0,
) -> Run:
    """Return a run, ready to sample from the EMA weights of its newest whole checkpoint; or a model of diffusers.

    `step` chooses another checkpoint. `weights="raw"` loads the weights without EMA. `network` is an object like the
    one that the run was trained with, if it was given from Python. `ema` is the width of an EMA to rebuild from
    snapshots, such as 0.07; None is that of `ema_sweep`, or else the run's own. A folder of diffusers, a UNet2DModel or
    a DiT with its scheduler, and weights of EDM, EDM2 and denoising-diffusion-pytorch sample as a run does; `size` is
    for weights that do not state that of their images.
    """
    from unfog.config.requests.sample import is_model
    from unfog.inference.run import Run

    if (ema, network, step, weights) == (None, None, None, "ema") and is_model(Path(path_of(path))):
        from unfog.runs.weights.model import Model

        return Model(path_of(path), size=size)
    if size:
        raise RequestError(f"size = {size} is of weights without a run, and {path} has a size; leave it away")
    if network is not None:
        adopt_network(_run_folder(path).read_config(), network)
    return Run(path_of(path), weights, step, ema=ema)


def evaluate(
    images: Source,
    reference: Source,
    metrics: Sequence[str] | str = (),
    *,
    n: int = 0,
    size: int | str = 0,
    **settings: Any,
) -> Evaluation:
    """Compare images that any program generated with real ones, without a run; `load(...).evaluate()` is of a run.

    `n` images are compared, by default all; at `size` pixels, by default their own. `settings` are `features` and
    `device`.
    """
    from unfog.config.requests.evaluate import EvaluateRequest
    from unfog.config.toml import update
    from unfog.inference.evaluate import evaluate_images

    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    place, real = stored_source(images), stored_source(reference)
    base = EvaluateRequest(run=Path(place), reference=real, size=size)
    request = update(base, {"metrics": names, "n": n, **settings}, "")
    request.check_without_run()
    return evaluate_images(place, request, size, request.device)


def ema_sweep(
    path: PathLikeText,
    *,
    metric: str = "held_out_loss",
    n: int = 0,
    widths: Sequence[float] = (),
    step: int | None = None,
    features: str = "",
    device: str = "auto",
) -> EmaSweepResult:
    """Find the best EMA width of a run, and make it the run's own."""
    from unfog.config.requests.ema_sweep import EmaSweepRequest
    from unfog.inference.ema_sweep import ema_sweep as sweep

    folder: Any = Path(path_of(path))
    listed: Any = widths if isinstance(widths, float | int) else tuple(widths)  # `sweep` refuses a number
    names: Any = metric
    return sweep(EmaSweepRequest(folder, names, n, listed, step, features, device))


def tune(path: PathLikeText, *, steps: int = 10, sampler: str | None = None, **options: Any) -> TuneResult:
    """Find the best noise levels for sampling a run in few steps, and make them its default.

    `options` are `pictures` to compare, `tries`, `store=False` to only look, and `device`.
    """
    from unfog.config.requests.tune import TuneRequest
    from unfog.inference.tune import tune as search

    kind: Any = sampler
    return search(TuneRequest(Path(path_of(path)), steps, kind, **options))


def _run_folder(path: PathLikeText) -> RunFolder:
    from unfog.process.run_folder import RunFolder

    return RunFolder(Path(path_of(path)))


def _finished(folder: RunFolder, done: bool) -> Path:
    if not done:
        raise KeyboardInterrupt(f"stopped, and saved in {folder.path}")
    return folder.path
