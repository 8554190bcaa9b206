"""Request of `unfog sample`, and the rules that requests about a run share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from unfog.config.schema import check_guidance_interval
from unfog.config.spec_strings import SampleGrid
from unfog.diffusion.noise import Grid
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.files.safe_files import LARGEST_TEXT, read_file
from unfog.settings import argument, setting
from unfog.text import encoding_of_mark, not_utf8
from unfog.training.settings import SamplingPrecision
from unfog.values.condition_requests import ConditionGrid, GuidanceScale
from unfog.values.image_format import Size, parse_view

_MODEL_FILES = ("config.json", "unet/config.json", "transformer/config.json", "model_index.json")
_WEIGHTS = (".safetensors", ".pt", ".pth")


@dataclass(frozen=True)
class SamplingRequest:
    """Settings of `unfog sample` and of `Run.sample`."""

    n: int = 16
    """Number of images."""
    seed: int = 0
    """Seed of the noise. Another seed gives other images."""
    to_seed: int | None = None
    """Go from the first image of --seed to the first one of this seed, in n images."""
    steps: int | None = None
    """Sampling steps. More are slower and more accurate. Default: the run's."""
    sampler: Kind | None = None
    """Sampler. Default: the run's."""
    grid: SampleGrid | None = setting(None, metavar="GRID|NAME=VALUES …")
    """Grid of noise levels: schedule, karras, logsnr or tuned. Default: the run's. Or one or two conditions against
    each other, such as age=20..80 stain=all, in one picture from the same noise."""
    levels: tuple[float, ...] = ()
    """Noise levels to sample at, instead of --steps and --grid: falling shares of noise, such as 1 0.8 0.5 0.2."""
    guidance: GuidanceScale | None = setting(None, metavar="NUMBER|NAME=NUMBER,…")
    """Classifier-free guidance scale: above 1, images follow their class more closely. Or a scale for each condition,
    such as age=2,stain=1.5; others have 1. Default: the run's."""
    guidance_interval: tuple[float, float] | None = None
    """Guide only while the share of noise is in this interval, such as 0.2 0.75: 0 is the image, 1 pure noise."""
    negative: str = setting("", metavar="TEXT", see="docs/text.md")
    """Caption that images are led away from, such as "dark", where --guidance is not 1."""
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
        check_at_least_one(n=self.n, batch=self.batch, guide_every=self.guide_every)
        if self.cells is not None and self.to_seed is not None:
            raise RequestError("grid and to_seed both say how samples differ; give one of them")

    @property
    def noise_grid(self) -> Grid | None:
        """The grid of noise levels that was asked for, if any."""
        return None if isinstance(self.grid, ConditionGrid) else self.grid

    @property
    def cells(self) -> ConditionGrid | None:
        """The conditions that are drawn against each other, if any."""
        return self.grid if isinstance(self.grid, ConditionGrid) else None

    def count(self, known: int | None, what: str) -> int:
        """Return the number of samples: that of the rows or cells `what`, or n. RequestError if n is another one."""
        usual = type(self).__dataclass_fields__["n"].default
        if known is not None and self.n not in (known, usual):
            raise RequestError(f"n = {self.n}, and {what} {known:,}; omit n")
        return self.n if known is None else known


@dataclass(frozen=True)
class SampleRequest(SamplingRequest):
    """Generate images from RUN: numbered PNGs and grid.png. The run knows its network, sampler and classes.

      unfog sample runs/photos --label cat -n 8                one class
      unfog sample runs/emoji --prompt "a red heart" -n 8      what a caption says
      unfog sample runs/photos --image me.png --strength 0.4   variations of me.png
      unfog sample runs/photos --image me.png --mask mask.png  repaint the white part
      unfog sample runs/ct --measure a.py --observed y.npy     solve y = a(x) + noise
      unfog sample runs/cells --grid age=20..80 stain=all      conditions against each other

    Image i of a seed is the same for every -n. RUN may be a folder of diffusers: a UNet2DModel with its scheduler.
    """

    run: Path = field(kw_only=True, metadata=argument("RUN"))
    """Folder of the run, or of diffusers."""
    out: Path | None = None
    """New folder for the images. Default: a new one in the run folder; a folder of diffusers needs one."""
    label: tuple[str, ...] = ()
    """Classes by name, or by number where no class has that name; images cycle through them. Default: all classes."""
    given: tuple[str, ...] = setting((), metavar="NAME=VALUE …")
    """Conditions by the names of columns, such as age=60, class=cat,dog; images cycle through several values."""
    given_table: Path | None = setting(None, metavar="TABLE")
    """A .csv, .tsv or .jsonl file with conditions as columns: an image for each row. Empty cells are not told."""
    prompt: tuple[str, ...] = setting((), metavar="TEXT", see="docs/text.md")
    """Captions to draw, of a run on captions, as in --prompt "a red cat" "a blue fish"; images cycle through them."""
    prompts: Path | None = setting(None, metavar="FILE")
    """Captions to draw, one a line."""
    guide: str | None = setting(None, metavar="auto|none|RUN[:STEP]")
    """Weaker network to guide away from: none, or this run's EMA at 30% of its steps (auto). Default: the run's."""
    guide_checkpoint: int | None = setting(None, metavar="STEP")
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
    image: Path | None = setting(None, metavar="FILE")
    """Start from this image instead of pure noise."""
    mask: Path | None = setting(None, metavar="FILE")
    """Mask of the same size: white areas are regenerated, the rest of --image stays as it is."""
    measure: Path | None = setting(None, metavar="FILE.py")
    """Your code with measure(x), x in the units of the source: images are drawn that explain --observed."""
    observed: Path | None = setting(None, metavar="FILE.npy")
    """What was measured of one image, for --measure. The mean and deviation of the draws are written too."""
    strip: bool = False
    """Also write strip.png: x_t and the predicted x0 of the first image at several steps."""
    animate: Path | None = setting(None, metavar="FILE")
    """Also write an animation (.gif, .webp, .mp4) of the denoising of the first 16 images, or of the way --to-seed."""
    view: str = setting("", metavar="C[,C,C]")
    """Channels that PNGs show of arrays with other values: 0, 0:viridis or 3,2,1. Default: the run's, or the first."""
    size: Size = 0
    """Pixels of the images, 64 or 96x64 (width x height). Default: the run's; those of its buckets, in proportion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.animate is not None and self.animate.suffix not in (".gif", ".webp", ".mp4"):
            raise RequestError(f"--animate {self.animate} must end in .gif, .webp or .mp4")
        parse_view(self.view)
        if (self.measure is None) != (self.observed is None):
            raise RequestError("an inverse problem needs both --measure FILE.py and --observed FILE.npy")
        check_one_checkpoint(self.best, self.checkpoint)
        if self.prompt and self.prompts is not None:
            raise RequestError(f"--prompt and --prompts {self.prompts} both give captions; give one of them")
        if self.guide is not None and self.guide_checkpoint is not None:
            raise RequestError(f"--guide {self.guide} and --guide-checkpoint both name a guide; give one of them")
        if (self.checkpoint or 0) < 0:
            raise RequestError(f"checkpoint = {self.checkpoint} must be at least 0")

    def read_prompts(self) -> tuple[str, ...]:
        """Return the captions to draw: those of `prompt`, or the lines of the file `prompts` that are not empty.

        RequestError if the file cannot be read, or has no line.
        """
        if self.prompts is None:
            return self.prompt
        try:
            content = read_file(self.prompts, self.prompts.parent, LARGEST_TEXT, follow=True)
            text = content.decode(encoding_of_mark(content) or "utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"prompts = {self.prompts} {not_utf8(error)}") from None
        except (OSError, ValueError) as error:
            raise RequestError(f"prompts = {self.prompts} cannot be read ({error}); give a file of text") from None
        if not (lines := tuple(line.strip() for line in text.split("\n") if line.strip())):
            raise RequestError(f"prompts = {self.prompts} has no line with a caption; write one a line")
        return lines

    def check_without_run(self) -> None:
        """Raise RequestError if a setting needs a run, or there is no folder to write to."""
        check_usual(self, ("weights", "ema", "checkpoint", "best", "guide_checkpoint"))
        if self.out is None:
            raise RequestError(f"{self.run} is not a run, and samples are not written into it; give --out FOLDER")


def is_model(path: Path) -> bool:
    """Return True for a folder of diffusers or a file of weights, which has no run."""
    try:
        if path.suffix in _WEIGHTS and path.is_file():
            return True
        return not (path / "config.toml").is_file() and any((path / name).is_file() for name in _MODEL_FILES)
    except OSError:  # such as a name that is too long, of which opening the run says more
        return False


def check_one_checkpoint(best: bool, checkpoint: int | None) -> None:
    if best and checkpoint is not None:
        raise RequestError(f"--best and --checkpoint {checkpoint} both name a checkpoint; give one of them")


def check_at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise RequestError(f"{name} = {value} must be at least 1")


def check_usual(request: Any, names: Iterable[str]) -> None:
    """Raise RequestError if one of these settings, which need a run, is not its default."""
    usual = {f.name: f.default for f in fields(request)}
    for name in names:
        # A flag at its default looks like one that was not given, and does no harm.
        if getattr(request, name) != usual[name]:
            raise RequestError(f"{name} needs a run, and {request.run} is not one: it has no config.toml; leave it out")
