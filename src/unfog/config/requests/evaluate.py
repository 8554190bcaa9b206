"""Request of `unfog evaluate`, and the metrics that it can name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unfog.config.requests.sample import check_at_least_one, check_one_checkpoint, check_usual, is_model
from unfog.config.spec_strings import StepOrRun
from unfog.errors import RequestError
from unfog.settings import argument, is_auto, setting
from unfog.training.settings import Evaluate, SamplingPrecision, split_names
from unfog.values.condition_requests import GuidanceScale
from unfog.values.image_format import Size

# Metrics of runs with conditions: whether samples have what was asked, and what each condition is worth.
OBEYS, WORTH = Evaluate.OBEYS, "worth"

# Agreement of samples and their captions, by a pretrained model.
CLIP = "clip"

# Metrics of the held-out images, which need no samples.
LOSSES = ("held_out", "bits", WORTH)

# Metrics that compare no samples with real images.
NOT_COMPARED = (*LOSSES, OBEYS, CLIP)

# Metrics of images with any channels and values.
VALUES = Evaluate.VALUES

# Metrics that are measured only if they are named: they take thousands of samples, or many network calls.
ON_REQUEST = ("fid_infinity", "bits")

METRICS = (*Evaluate.DRAWN, "detail", "fid_infinity", *LOSSES, CLIP)

# Metrics of samples that are pictures, unless others are named.
USUAL = tuple(name for name in METRICS if name not in (*ON_REQUEST, *VALUES, *NOT_COMPARED))

# Fields of `EvaluationRequest` that change what is generated.
DRAWN = ("sampler", "steps", "seed", "guidance", "guide", "guide_every", "precision")


@dataclass(frozen=True)
class EvaluationRequest:
    """Metrics of a run, and the samples to measure them on."""

    metrics: tuple[str, ...] = setting((), metavar="M,M,…")
    """Any of fid, kid, precision, recall, density, coverage, sliced, detail, held_out, bits, fid_infinity; of any
    channels and values spectrum, histogram, correlation; with conditions obeys, worth; with captions clip. Default:
    those of pictures but bits and fid_infinity, or the three of any values; held_out; obeys, worth; clip with a
    folder."""
    n: int = setting(0, auto=0)
    """Number of samples. Default: 1000 on a CPU, 10000 elsewhere."""
    features: str = setting("", auto="")
    """Features to compare: inception, texture, pixels or a TorchScript file. Default: inception if its file exists."""
    reference: str = setting("", metavar="SOURCE")
    """Images to compare with: held-out, or any SOURCE. Default: the training images."""
    sampler: str | None = None
    """Sampler. Default: the run's."""
    steps: int | None = None
    """Sampling steps. Default: the run's."""
    seed: int = 0
    """Seed of the noise. Another seed gives other samples."""
    guidance: GuidanceScale | None = setting(None, metavar="NUMBER|NAME=NUMBER,…")
    """Guidance scale, or one for each condition, as for `unfog sample`. Default: the run's; 2 if its own earlier
    average guides."""
    guide: str | None = setting(None, metavar="auto|none|RUN[:STEP]")
    """Weaker network to guide away from, as for `unfog sample`."""
    guide_every: int = 1
    """Call the guide at every N-th guided call of the network only, as for `unfog sample`."""
    batch: int = 64
    """Samples per batch. Lower it when memory is short."""
    precision: SamplingPrecision = "auto"
    """Precision of the network, as for `unfog sample`."""
    clip_folder: str = setting("", metavar="FOLDER")
    """Local Hugging Face folder of CLIP or SigLIP, for the metric clip. Default: the text encoder of the run."""
    against: StepOrRun | None = setting(None, metavar="STEP|RUN")
    """Step of another checkpoint, or a run of the same images, to compare held-out losses image by image."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, and "fid,kid" is what a person writes.
        object.__setattr__(self, "metrics", split_names(self.metrics))
        for name in self.metrics:
            if name not in METRICS:
                raise RequestError(f"metrics names {name!r}, which is not one of {', '.join(METRICS)}")
        if not is_auto(self, "n") and not 10 <= self.n <= 10_000_000:
            raise RequestError(f"n = {self.n} samples: metrics need at least 10; 1000 give a first impression")
        check_at_least_one(batch=self.batch, guide_every=self.guide_every)
        if self.against is not None and self.metrics and "held_out" not in self.metrics:
            raise RequestError("--against compares held-out losses, so --metrics must have held_out")

        if self.clip_folder and self.metrics and CLIP not in self.metrics:
            raise RequestError(f"--clip-folder is for the metric {CLIP}; add it to --metrics, or omit --clip-folder")

    def samples_on(self, device: str) -> int:
        """Return the number of samples: the given one, or that which is usual on a device of this type."""
        usual = 1000 if device == "cpu" else 10_000
        return usual if is_auto(self, "n") else self.n


@dataclass(frozen=True)
class EvaluateRequest(EvaluationRequest):
    """Evaluate RUN: compare samples with its training images, and measure the loss of the held-out images.

    RUN may also be a folder of images from any program, any other SOURCE, or a folder of diffusers, to compare with
    --reference.

      unfog evaluate runs/photos                             all metrics that apply
      unfog evaluate runs/photos --metrics kid,fid -n 10000  two metrics, more samples
      unfog evaluate runs/photos --metrics held_out --against 5000
                                   two checkpoints on the same images and noise
      unfog evaluate runs/mine --metrics held_out --against runs/theirs      two runs of the same images
      unfog evaluate samples/ --reference photos/            images without a run

    Values are stored in RUN/evaluations, with a confidence interval where one is known. The same command continues
    after an interruption, and reads stored results. torchrun --nproc-per-node 2 -m unfog evaluate … shares the samples.
    """

    run: Path = field(kw_only=True, metadata=argument("RUN"))
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
    """Pixels, 64 or 96x64, at which images without a run are compared, or a bucket of the run. Default: all buckets."""
    out: Path | None = setting(None, metavar="FILE")
    """Also write the result to this file, as JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_checkpoint(self.best, self.checkpoint)

    @property
    def is_of_images(self) -> bool:
        """True if there is no run, but images to compare with a reference."""
        return bool(self.reference) and not (self.run / "config.toml").is_file() and not is_model(self.run)

    def check_without_run(self) -> None:
        """Raise RequestError if a setting needs a run, or is of samples that are not generated here."""
        drawn = DRAWN if self.is_of_images else ()
        check_usual(self, ("against", "clip_folder", "weights", "checkpoint", "best", *drawn))
        wrong = [
            *(name for name in NOT_COMPARED if name in self.metrics),
            *["held-out"] * (self.reference == "held-out"),
        ]
        if wrong:
            raise RequestError(
                f"{wrong[0]} needs a run, and {self.run} is not one: it has no config.toml; leave it out"
            )
        if not self.reference:
            raise RequestError(f"{self.run} is not a run, so there are no training images; give --reference SOURCE")
