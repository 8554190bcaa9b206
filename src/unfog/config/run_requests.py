"""One dataclass for each command about a run. The command line, Python and the command itself use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from unfog.config.schema import check_guidance_interval
from unfog.diffusion.noise import Grid
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.training.settings import Evaluate, SamplingPrecision, split_names
from unfog.values.image_format import Size

# Metrics of the held-out images, which need no samples.
LOSSES = ("held_out", "bits")
# Metrics that are measured only if they are named: they take thousands of samples, or many network calls.
ON_REQUEST = ("fid_infinity", "bits")
METRICS = (*Evaluate.DRAWN, "detail", "fid_infinity", *LOSSES)


_MODEL_FILES = ("config.json", "unet/config.json", "transformer/config.json", "model_index.json")
_WEIGHTS = (".safetensors", ".pt", ".pth")


def is_model(path: Path) -> bool:
    """Return True for a folder of diffusers or a file of weights, which has no run."""
    try:
        if path.suffix in _WEIGHTS and path.is_file():
            return True
        return not (path / "config.toml").is_file() and any((path / name).is_file() for name in _MODEL_FILES)
    except OSError:  # such as a name that is too long, of which opening the run says more
        return False


def _check_usual(request: SampleRequest | EvaluateRequest, names: Iterable[str]) -> None:
    """Raise RequestError if one of these settings, which need a run, is not its default."""
    usual = {f.name: f.default for f in fields(request)}
    for name in names:
        # A flag at its default cannot be told from one that was not given, and does no harm.
        if getattr(request, name) != usual[name]:
            raise RequestError(f"{name} needs a run, and {request.run} is not one: it has no config.toml; leave it out")


def _check_at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise RequestError(f"{name} = {value} must be at least 1")


@dataclass(frozen=True)
class SamplingRequest:
    """Settings of `unfog sample` and of `Run.sample`."""

    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 16
    """Number of images."""
    seed: int = 0
    """Seed of the noise. Another seed gives other images."""
    to_seed: int | None = None
    """Go from the first image of --seed to the first one of this seed, in n images."""
    steps: int | None = None
    """Sampling steps. More are slower and more accurate. Default: the run's."""
    sampler: Kind | None = None
    """Sampler. Default: the run's."""
    grid: Grid | None = None
    """Grid of noise levels. Default: the run's."""
    levels: tuple[float, ...] = ()
    """Noise levels to sample at, instead of --steps and --grid: falling shares of noise, such as 1 0.8 0.5 0.2."""
    guidance: float | None = None
    """Classifier-free guidance scale: above 1, images follow their class more closely. Default: the run's."""
    guidance_interval: tuple[float, float] | None = None
    """Guide only while the share of noise is in this interval, such as 0.2 0.75: 0 is the image, 1 pure noise."""
    guide_every: int = 1
    """Call the guide at every N-th guided call of the network only, and keep its difference in between."""
    batch: int = 64
    """Images per batch. Lower it when memory is short."""
    precision: SamplingPrecision = "auto"
    """Precision of the network. 16 bits change images slightly. auto: bf16 or fp16 on CUDA, else fp32."""
    strength: float | None = None
    """Amount of change to --image: 0 keeps it, 1 ignores it. Default: 0.6, or 1 with a mask."""
    repeats: int | None = None
    """Passes over each part of the steps with a mask. More blend better. Default: 10."""

    def __post_init__(self) -> None:
        if self.guidance_interval is not None:
            check_guidance_interval(self.guidance_interval)
        _check_at_least_one(n=self.n, batch=self.batch, guide_every=self.guide_every)


@dataclass(frozen=True)
class SampleRequest(SamplingRequest):
    """Generate images from RUN: numbered PNGs and grid.png. The run knows its network, sampler and classes.

      unfog sample runs/photos --label cat -n 8                one class
      unfog sample runs/photos --image me.png --strength 0.4   variations of me.png
      unfog sample runs/photos --image me.png --mask mask.png  repaint the white part

    Image i of a seed is the same for every -n. RUN may be a folder of diffusers: a UNet2DModel with its scheduler.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")] = field(kw_only=True)
    """Folder of the run, or of diffusers."""
    out: Path | None = None
    """New folder for the images. Default: a new one in the run folder; a folder of diffusers needs one."""
    label: tuple[str, ...] = ()
    """Classes by name, or by number where no class has that name; images cycle through them. Default: all classes."""
    guide: Annotated[str | None, tyro.conf.arg(metavar="auto|none|RUN[:STEP]")] = None
    """Weaker network to guide away from: none, or this run's EMA at 30% of its steps (auto). Default: the run's."""
    guide_checkpoint: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Earlier checkpoint of this run to guide away from."""
    weights: Literal["ema", "raw"] = "ema"
    """EMA weights, or the raw weights of the last step."""
    ema: float | None = None
    """Width of an EMA to rebuild from snapshots, such as 0.07, at any --checkpoint. Default: the run's EMA."""
    checkpoint: int | None = None
    """Step of the checkpoint. Default: the newest whole one."""
    best: bool = False
    """Use the best checkpoint that was kept, by held-out loss or the run's evaluate.best."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Start from this image instead of pure noise."""
    mask: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Mask of the same size: white areas are regenerated, the rest of --image stays as it is."""
    strip: bool = False
    """Also write strip.png: x_t and the predicted x0 of the first image at several steps."""
    animate: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write an animation of the denoising of the first 16 images: a file .gif, .webp or .mp4."""
    size: Size = 0
    """Pixels of the images, 64 or 96x64 (width x height). Default: the run's; those of its buckets, in proportion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.animate is not None and self.animate.suffix not in (".gif", ".webp", ".mp4"):
            raise RequestError(f"--animate {self.animate} must end in .gif, .webp or .mp4")
        check_one_checkpoint(self.best, self.checkpoint)
        if self.guide is not None and self.guide_checkpoint is not None:
            raise RequestError(f"--guide {self.guide} and --guide-checkpoint both name a guide; give one of them")
        if (self.checkpoint or 0) < 0:
            raise RequestError(f"checkpoint = {self.checkpoint} must be at least 0")

    def check_without_run(self) -> None:
        """Raise RequestError if a setting needs a run, or there is no folder to write to."""
        _check_usual(self, ("weights", "ema", "checkpoint", "best", "guide_checkpoint"))
        if self.out is None:
            raise RequestError(f"{self.run} is not a run, and samples are not written into it; give --out FOLDER")


# Fields of `EvaluationRequest` that change what is generated.
DRAWN = ("sampler", "steps", "seed", "guidance", "guide", "guide_every", "precision")


@dataclass(frozen=True)
class EvaluationRequest:
    """Metrics of a run, and the samples to measure them on."""

    metrics: Annotated[tuple[str, ...], tyro.conf.arg(metavar="M,M,…")] = ()
    """Any of fid, kid, precision, recall, density, coverage, sliced, detail, held_out, bits, fid_infinity.
    Default: all that are possible but the last two."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    """Number of samples. Default: 1000 on a CPU, 10000 elsewhere."""
    features: str = ""
    """Features to compare: inception, texture, pixels or a TorchScript file. Default: inception if its file exists."""
    reference: Annotated[str, tyro.conf.arg(metavar="SOURCE")] = ""
    """Images to compare with: held-out, or any SOURCE. Default: the training images."""
    sampler: str | None = None
    """Sampler. Default: the run's."""
    steps: int | None = None
    """Sampling steps. Default: the run's."""
    seed: int = 0
    """Seed of the noise. Another seed gives other samples."""
    guidance: float | None = None
    """Guidance scale. Default: the run's; 2 where its own earlier average guides."""
    guide: Annotated[str | None, tyro.conf.arg(metavar="auto|none|RUN[:STEP]")] = None
    """Weaker network to guide away from, as for `unfog sample`."""
    guide_every: int = 1
    """Call the guide at every N-th guided call of the network only, as for `unfog sample`."""
    batch: int = 64
    """Samples per batch. Lower it when memory is short."""
    precision: SamplingPrecision = "auto"
    """Precision of the network, as for `unfog sample`."""
    against: int | None = None
    """Step of another checkpoint, to compare held-out losses image by image."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, and "fid,kid" is what a person writes.
        object.__setattr__(self, "metrics", split_names(self.metrics))
        for name in self.metrics:
            if name not in METRICS:
                raise RequestError(f"metrics names {name!r}, which is not one of {', '.join(METRICS)}")
        if self.n and not 10 <= self.n <= 10_000_000:
            raise RequestError(f"n = {self.n} samples: metrics need at least 10; 1000 give a first impression")
        _check_at_least_one(batch=self.batch, guide_every=self.guide_every)
        if self.against is not None and self.metrics and "held_out" not in self.metrics:
            raise RequestError("--against compares held-out losses, so --metrics must have held_out")


@dataclass(frozen=True)
class EvaluateRequest(EvaluationRequest):
    """Evaluate RUN: compare samples with its training images, and measure the loss of the held-out images.

    RUN may also be a folder of images from any program, any other SOURCE, or a folder of diffusers, to compare with
    --reference.

      unfog evaluate runs/photos                             all metrics that apply
      unfog evaluate runs/photos --metrics kid,fid -n 10000  two metrics, more samples
      unfog evaluate runs/photos --metrics held_out --against 5000
                                   two checkpoints on the same images and noise
      unfog evaluate samples/ --reference photos/            images without a run

    Values are stored in RUN/evaluations, all but `sliced` with a confidence interval. The same command continues
    after an interruption, and reads stored results. torchrun --nproc-per-node 2 -m unfog evaluate … shares the samples.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")] = field(kw_only=True)
    """Folder of the run, or images to compare with --reference."""
    weights: Literal["ema", "raw"] = "ema"
    """EMA weights, or the raw weights of the last step."""
    checkpoint: int | None = None
    """Step of the checkpoint. Default: the newest whole one."""
    best: bool = False
    """Use the best checkpoint that was kept."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    size: Size = 0
    """Pixels, 64 or 96x64, at which images without a run are compared, or a bucket of the run. Default: the largest."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the result to this file, as JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_checkpoint(self.best, self.checkpoint)

    @property
    def is_of_images(self) -> bool:
        """True where there is no run, but images to compare with a reference."""
        return bool(self.reference) and not (self.run / "config.toml").is_file() and not is_model(self.run)

    def check_without_run(self) -> None:
        """Raise RequestError if a setting needs a run, or is of samples that are not generated here."""
        drawn = DRAWN if self.is_of_images else ()
        _check_usual(self, ("against", "weights", "checkpoint", "best", *drawn))
        wrong = [*(name for name in LOSSES if name in self.metrics), *["held-out"] * (self.reference == "held-out")]
        if wrong:
            raise RequestError(
                f"{wrong[0]} needs a run, and {self.run} is not one: it has no config.toml; leave it out"
            )
        if not self.reference:
            raise RequestError(f"{self.run} is no run, so there are no training images; give --reference SOURCE")


@dataclass(frozen=True)
class EmaSweepRequest:
    """Find the best EMA length of RUN after training: rebuild EMAs of several widths from snapshots, and measure each.

    The best becomes the run's EMA: `unfog sample RUN` uses it. Prints a table and writes ema-sweep.html.

      unfog ema-sweep runs/photos                       by held-out loss, in a minute
      unfog ema-sweep runs/photos --metric kid -n 1000  by samples, which says more
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    metric: Literal["held_out_loss", "kid", "fid", "fd", "sliced"] = "held_out_loss"
    """Metric to minimise. All but held_out_loss compare samples with the run's images."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    """Held-out images, or samples for each width. 0: 512 images, 1000 samples, or 10000 for fid."""
    widths: tuple[float, ...] = ()
    """EMA widths: standard deviations of the window, as shares of the run. Default: ten from 0.02 to 0.25."""
    checkpoint: int | None = None
    """Step to rebuild at. Default: the last snapshot."""
    features: str = ""
    """inception, texture, pixels or a TorchScript file. Default: inception for fid, else texture."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""


@dataclass(frozen=True)
class TuneRequest:
    """Find the best noise levels for sampling RUN in few steps, and make them the default of `unfog sample RUN`.

      unfog tune runs/photos --steps 10

    Moves the levels until few steps give the result of many steps from the same noise, then measures every grid on
    other noise. Takes minutes. The network does not change.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    steps: int = 10
    """Sampling steps."""
    sampler: Literal["ddim", "heun", "dpmpp", "unipc"] | None = None
    """Sampler. Default: the run's, or dpmpp."""
    pictures: int = 32
    """Samples to compare."""
    tries: int = 150
    """Grids to try. More are better and take longer."""
    store: bool = True
    """Make the best grid the run's default. --no-store only reports it."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""


def check_one_checkpoint(best: bool, checkpoint: int | None) -> None:
    if best and checkpoint is not None:
        raise RequestError(f"--best and --checkpoint {checkpoint} both name a checkpoint; give one of them")
