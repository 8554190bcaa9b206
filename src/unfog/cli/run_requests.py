"""What the commands about a run take, as dataclasses like those of `requests`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from unfog.config.schema import check_guidance_interval
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.training.settings import SamplingPrecision


@dataclass(frozen=True)
class Sample:
    """Draw pictures from RUN: numbered PNGs and grid.png. Needs no flag: the run knows its model, sampler and classes.

    Picture number i of a seed is the same picture whatever -n is.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 16
    """How many pictures."""
    out: Path | None = None
    """Folder for them. Left open: a new one in the run folder."""
    seed: int = 0
    """Another seed gives other pictures."""
    steps: int | None = None
    """Steps of the sampler; more is slower and closer to the model. Left open: as the run is set."""
    sampler: Kind | None = None
    """Left open: as the run is set."""
    label: tuple[str, ...] = ()
    """Classes by name, or by number where no name is one; pictures cycle through them. Left open: all classes."""
    guidance: float | None = None
    """Classifier-free guidance: above 1, pictures keep closer to their class. Left open: as the run is set."""
    guidance_interval: tuple[float, float] | None = None
    """Guide only where the share of noise is within this, such as 0.2 0.75: 0 is the image, 1 noise alone."""
    guide: Annotated[str | None, tyro.conf.arg(metavar="RUN[:STEP]")] = None
    """Let guidance lead away from what this weaker run draws, such as one of a smaller network (autoguidance)."""
    guide_checkpoint: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """The same with a younger checkpoint of this run."""
    weights: Literal["ema", "raw"] = "ema"
    """The average of the weights, or the last ones as they are."""
    ema: float | None = None
    """Rebuild an average of this width, such as 0.07, at any --checkpoint. Left open: as the run has it."""
    checkpoint: int | None = None
    """Step of the checkpoint. Left open: the newest whole one."""
    best: bool = False
    """The best checkpoint instead, by its held-out loss or what the run was told to choose by, of those kept."""
    batch: int = 64
    """Pictures drawn at once; lower it when memory is short."""
    precision: SamplingPrecision = "fp32"
    """Of the network: bf16 is faster where the hardware has it, and gives slightly other pictures."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    strip: bool = False
    """Also strip.png: x_t and the predicted x0 of the first picture, from noise to picture."""
    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Make the pictures of this one, rather than of noise alone."""
    mask: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Image of the same size: only what is white in it is painted anew, and the rest stays as it is."""
    strength: float | None = None
    """How far from the image: 0 leaves it as it is, 1 leaves nothing of it. Left open: 0.6, and 1 with a mask."""
    repeats: int | None = None
    """Walks through each stretch of the steps with a mask; more fit better to the rest. Left open: 10."""

    def __post_init__(self) -> None:
        if self.strip and self.image is not None:
            raise RequestError("--strip shows a picture come out of noise; leave it away, or --image")
        if self.best and self.checkpoint is not None:
            raise RequestError(f"--best and --checkpoint {self.checkpoint} both name a checkpoint; give one of them")
        if self.guide is not None and self.guide_checkpoint is not None:
            raise RequestError(f"--guide {self.guide} and --guide-checkpoint both name a guide; give one of them")
        if self.guidance_interval is not None:
            check_guidance_interval(self.guidance_interval)
        for name, value, least in (("n", self.n, 1), ("batch", self.batch, 1), ("checkpoint", self.checkpoint or 0, 0)):
            if value < least:
                raise RequestError(f"{name} = {value} must be at least {least}")


@dataclass(frozen=True)
class Evaluate:
    """Measure RUN: draw pictures, compare them with its training images, and measure the loss of those held out.

    All that can be measured, of 1,000 pictures on a CPU: unfog evaluate runs/photos

    Two metrics of 10,000: unfog evaluate runs/photos --metrics kid,fid -n 10000 --features inception

    Two checkpoints, by the same images and noise: unfog evaluate runs/photos --metrics held_out --against 5000

    Every value is printed with its interval, and stored in RUN/evaluations. Started again after an interruption, it
    goes on where it was; asked again, it is read. torchrun --nproc-per-node 2 -m unfog evaluate … shares the pictures.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    metrics: Annotated[tuple[str, ...], tyro.conf.arg(metavar="M,M,…")] = ()
    """Of fid, kid, precision, recall, density, coverage, sliced, held_out, bits. Left open: all that can be."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    """How many pictures to draw. Left open: 1000 on a CPU, 10000 elsewhere."""
    features: str = ""
    """inception, texture, pixels or a TorchScript file to compare by. Left open: inception where its file is there."""
    reference: Annotated[str, tyro.conf.arg(metavar="SOURCE")] = ""
    """Other images than those that it was trained on: any SOURCE, or held-out."""
    sampler: str | None = None
    """Left open, as the next three: as the run is set."""
    steps: int | None = None
    """Steps of the sampler."""
    guidance: float | None = None
    """Classifier-free guidance."""
    seed: int = 0
    """Another seed draws other pictures."""
    weights: Literal["ema", "raw"] = "ema"
    """The average of the weights, or the last ones as they are."""
    checkpoint: int | None = None
    """Step of the checkpoint. Left open: the newest whole one."""
    best: bool = False
    """The best checkpoint instead, of those that were kept."""
    against: int | None = None
    """Step of another checkpoint, to compare the held-out losses."""
    batch: int = 64
    """Pictures drawn at once; lower it when memory is short."""
    precision: SamplingPrecision = "fp32"
    """Of the network: bf16 is faster where the hardware has it, and gives slightly other pictures."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""

    def __post_init__(self) -> None:
        if self.best and self.checkpoint is not None:
            raise RequestError(f"--best and --checkpoint {self.checkpoint} both name a checkpoint; give one of them")


@dataclass(frozen=True)
class EmaSweep:
    """Find the best length of RUN's average of weights, after training: rebuild some from its snapshots, measure each.

    The best becomes the run's own: `unfog sample RUN` uses it. Prints a table, and writes ema-sweep.html with a chart.

    By the held-out loss, in a minute: unfog ema-sweep runs/photos

    By drawn pictures, which is what counts: unfog ema-sweep runs/photos --metric kid -n 1000
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    metric: Literal["held_out_loss", "kid", "fid", "fd", "sliced"] = "held_out_loss"
    """The lowest is best. All but the first compare drawn pictures with the run's images."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    """Held-out images, or pictures for each length. 0: 512, 1000, and 10000 for fid."""
    widths: tuple[float, ...] = ()
    """Lengths: standard deviations of the window in shares of the run. Left open: ten from 0.02 to 0.25."""
    checkpoint: int | None = None
    """Step at which. Left open: that of the last snapshot."""
    features: str = ""
    """inception, texture, pixels or a TorchScript file to compare by. Left open: inception for fid, else texture."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""


@dataclass(frozen=True)
class Tune:
    """Find the best few noise levels to sample RUN at, and make them what `unfog sample RUN` takes.

    unfog tune runs/photos --steps 10

    The levels are moved until few steps end where many steps from the same noise do; how near each grid comes is then
    measured on other noise. Takes minutes; the network is left as it is.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    steps: int = 10
    """Steps of the sampler."""
    sampler: Literal["ddim", "heun", "dpmpp", "unipc"] | None = None
    """Left open: as the run is set, or dpmpp."""
    pictures: int = 32
    """Pictures that are compared."""
    tries: int = 150
    """Grids that are tried; more are better and take longer."""
    store: bool = True
    """Make the best grid the run's default; --no-store only looks."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""


@dataclass(frozen=True)
class Report:
    """Write report.html of RUN: one file with settings, curves and pictures that opens anywhere."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
