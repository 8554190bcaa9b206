"""A run folder with the network of one of its checkpoints loaded, or an EMA that is rebuilt from snapshots."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.config.toml import of_type
from unfog.config.validate import check_sample_size, path_text, resolve_sampler
from unfog.data.dataset import Dataset
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError, RunError
from unfog.files.safe_files import tensor_file
from unfog.pipeline.build import build_network, building_for
from unfog.pipeline.latents import Decode, ImageMap, Show
from unfog.pipeline.load_data import load_images
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.progress import warn
from unfog.text import plural, sanitize
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.format import CheckpointInfo
from unfog.training.checkpoints.load import load_weights
from unfog.training.checkpoints.posthoc_ema import EmaSnapshotFile, Mixture
from unfog.training.settings import PowerEma
from unfog.values.image_format import Size, parse_size

# Result of `unfog ema-sweep`; the width in it is the default of the run from then on.
SWEEP_FILE = "ema-sweep.json"
FAR = 2.0  # factor between the pixels of an image and those of training images, beyond which a size is far


class LoadedRun:
    """A run folder, and the network of one of its checkpoints, on the device and in evaluation mode.

    Args:
        path: the run folder.
        weights: "ema", the EMA weights, which give the best samples, or "raw", the weights as trained.
        step: of the checkpoint; None is the newest complete one.
        device: auto, cpu, cuda, cuda:1 or mps.
        best: load the best checkpoint that was kept, by held-out loss or `evaluate.best`, instead of one by its step.
        ema: width of the EMA, 0.01 to 0.28, rebuilt from the snapshots of the run; `step` may then be any up to the
            last snapshot. None is the width that `ema_sweep` chose, else the width of the run's settings.

    Raises:
        RequestError: `path` is not a run, or has no such checkpoint, or its snapshots do not allow that EMA.
        RunError: its checkpoints are broken, or it has not saved one yet.
    """

    step = 0
    """Step of the weights. That of an EMA of a given width may have no checkpoint."""
    resized = False
    """True if it generates images of one given size, and not of the size or the buckets of the run: see `at_size`."""
    enlarged = 1.0
    """Pixels of an image over those of an image of the run."""
    earlier: LoadedRun | None = None
    """The run at an earlier step, once it has been loaded to guide this one."""

    def __init__(
        self,
        path: str | Path,
        weights: Literal["ema", "raw"] = "ema",
        step: int | None = None,
        device: str = "auto",
        best: bool = False,
        ema: float | None = None,
    ):
        self.folder = RunFolder(Path(path_text(path, "path")))
        self.config: Config = self.folder.read_config()
        if weights not in ("ema", "raw"):
            raise RequestError(f"weights = {weights!r} must be 'ema' or 'raw'")
        self.weights, self.device = weights, choose_device(device)
        remedy = f"train a network on its latents: unfog train SOURCE --autoencoder {self.folder.path}"
        self.config.task.check_generates(str(self.folder.path), remedy)
        step = of_type(int | None, step, "step")
        self.ema = of_type(float | None, ema, "ema")
        if self.ema is not None and weights == "raw":
            raise RequestError(f"ema = {ema:g} needs weights = 'ema', and weights = 'raw' was given; give one of them")
        which: int | Literal["best"] | None = "best" if best else step if self.ema is None else None
        self.checkpoint = checkpoint.find_checkpoint(self.folder.checkpoints, which, warn)
        if self.checkpoint.is_weights_only and weights == "raw":
            raise RequestError(f"{self.folder.path} is an export, which holds EMA weights alone; omit weights = 'raw'")
        # At once, because a run that is still training may delete this checkpoint later.
        self.network, self.step = self.load_network(self.checkpoint, self.checkpoint.step if best else step)

    def at_size(self, size: Size) -> Self:
        """Return this run with the same network, which generates images of this size; 0 is the run's own.

        Warns of a size far from those that the run was trained on. RequestError if the network does not take it.
        """
        size = parse_size(size)
        if size == 0 or (size == self.config.data.size and not self.config.size_buckets):
            return self
        config = self.config.at_size(size)
        check_sample_size(config)
        other = copy(self)
        other.config, other.resized = config, True
        other.enlarged = self.enlarged * config.image_format.pixels / self.config.image_format.pixels
        if not 1 / FAR <= other.enlarged <= FAR:
            far = f"{config.image_format.sides} has {other.enlarged:.2g} times the pixels of the images of the run"
            warn(f"size = {far}; what it generates may repeat itself or fall apart")
        return other

    def load_network(self, saved: checkpoint.CheckpointInfo, step: int | None) -> tuple[nn.Module, int]:
        """Return the network of a checkpoint, with the kind of weights that this run was loaded with, and their step.

        `step` is of the EMA where a width is given, which needs no checkpoint; None is the last snapshot.
        """
        loaded = saved.step
        with building_for(saved.folder / checkpoint.EMA, self.path):
            network = build_network(self.config)
        if self.ema is not None:
            loaded = load_ema_weights(network, self.folder, self.ema, step).step
        elif self.weights == "raw":
            load_weights(saved.folder, "model", network)
        # A width that was measured to be best replaces the default one, but never one that was asked for.
        elif not self._load_swept_ema(network, saved):
            load_weights(saved.folder, "ema", network)
        return network.to(self.device).eval(), loaded

    def _load_swept_ema(self, network: nn.Module, saved: CheckpointInfo) -> bool:
        """Load the EMA of the width that `unfog ema-sweep` chose; return False if it chose none, or its own."""
        width, own = swept_width(self.path), self.config.ema
        if width is None or (isinstance(own, PowerEma) and own.width == width):
            return False
        kept = EmaSnapshotFile.read_all(self.folder.averages)
        try:
            # A run that was stopped between two snapshots is sampled as of the last one.
            load_ema_weights(network, self.folder, width, min(saved.step, kept[-1].step) if kept else None)
        except (RequestError, RunError) as error:
            warn(f"the EMA width of {SWEEP_FILE} cannot be used, so the EMA of the checkpoint is: {error}")
            return False
        return True

    def _weights(self) -> str:
        return self.weights if self.ema is None else f"EMA of width {self.ema:g}"

    def _facts(self) -> dict[str, str]:
        """Return the main facts of the run, by name."""
        config, parameters = self.config, sum(p.numel() for p in self.network.parameters())
        kind = "" if config.network is None else config.network.kind
        return {
            "network": f"{kind}, {parameters / 1e6:.2f}M parameters",
            "images": str(config.image_format),
            "classes": plural(len(self.classes), "class") if self.classes else "no classes",
        }

    def __repr__(self) -> str:
        said = "; ".join(self._facts().values())
        return f"<run {self.path}: {said}; {self._weights()} weights of step {self.step:,} on {self.device}>"

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; () without."""
        return self.config.classes

    @property
    def decode(self) -> Decode:
        """Map what the network generates, pixels or latents, to images [B, C, H, W] in about [-1, 1]."""
        return ImageMap.of(self.config, self.device).decode

    @property
    def show(self) -> Show:
        """Map what the network generates to pictures as people see them, uint8 [B, H, W, 3]."""
        return ImageMap.of(self.config, self.device).view

    def show_channels(self, view: str) -> None:
        """Show these channels, such as "0" or "3,2,1", in pictures of samples. RequestError without such pictures."""
        self.config = self.config.with_view(view)

    def sampler(
        self,
        kind: str | None = None,
        steps: int | None = None,
        grid: str | None = None,
        levels: Sequence[float] = (),
    ) -> Sampler:
        """Return the sampler of the run, with another kind, number of steps, grid or noise levels where given.

        RequestError if it cannot sample this run.
        """
        return resolve_sampler(self.config, kind, steps, grid, levels)


def load_run_images(config: Config, stop: StopSignals) -> Dataset:
    """Load the images of a run. RequestError if they are not those that it was trained on."""
    dataset, found = load_images(config, stop)
    if found.fingerprint != config.fingerprint:
        raise RequestError(
            f"the images in {sanitize(config.source)} are not those that this run was trained on; restore them"
        )
    return dataset


def load_ema_weights(network: nn.Module, folder: RunFolder, width: float, step: int | None) -> Mixture:
    """Load the EMA of this width into a network, and return how it is composed of snapshots.

    `step` is that of the EMA; None is the last snapshot.

    Raises:
        RequestError: it cannot be rebuilt: no snapshots, too few of them, or a step after the last.
        RunError: the snapshots cannot be read, or are of another network.
    """
    mix = Mixture.solve(EmaSnapshotFile.read_all(folder.averages), width, step)
    try:
        network.load_state_dict(rebuild_ema(mix), strict=True)
    except RuntimeError as error:
        raise RunError(f"the snapshots in {folder.averages} are of another network: {str(error)[:120]} ...") from None
    return mix


def swept_width(run: Path) -> float | None:
    """Return the width that `unfog ema-sweep` chose for this run; None without a sweep, or if its file is damaged."""
    try:
        width = checkpoint.read_json(run / SWEEP_FILE, run)["width"]
        return PowerEma(float(width)).width
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RequestError):
        return None


@torch.no_grad()
def rebuild_ema(mix: Mixture) -> dict[str, Tensor]:
    """Sum a mixture to the EMA, float32 by the network's names; buffers are those of the newest snapshot.

    Raises RunError if a snapshot cannot be read.
    """
    paths = {one.path for one, _, _ in mix.terms}
    try:
        files: dict[Path, Any] = {path: safe_open(tensor_file(path, path.parents[1]), "pt") for path in paths}
        newest = max(paths, key=lambda path: path.name)
        averaged: dict[str, Tensor] = {}
        for full in files[newest].keys():  # noqa: SIM118 - it is not a dict
            kind, _, name = full.partition("/")
            if kind == "buffer":
                averaged[name] = files[newest].get_tensor(full)
            elif kind == "0":
                # In float64, as weights of the sum cancel; one tensor at a time, to spare memory.
                total = torch.zeros(files[newest].get_slice(full).get_shape(), dtype=torch.float64)
                for one, number, weight in mix.terms:
                    total.add_(files[one.path].get_tensor(f"{number}/{name}").double(), alpha=weight)
                averaged[name] = total.float()
    except (OSError, SafetensorError, RuntimeError) as error:
        raise RunError(f"an EMA snapshot cannot be read: {error}; remove it, and the others are used") from None
    return averaged


def weights_digest(network: nn.Module) -> str:
    """Return the sha256 of the weights, whichever file they were loaded from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        # As bytes: bfloat16 has no counterpart in NumPy.
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
