"""A run as Python sees it: `unfog.load("runs/photos").sample(16)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from unfog.config.run_requests import EvaluationRequest
from unfog.config.toml import of_type, update
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.sampler import Kind, Observe
from unfog.errors import RequestError
from unfog.inference.loaded_run import LoadedRun
from unfog.pipeline.generate import GenerationSettings, generate_images, parse_labels
from unfog.pipeline.image_files import ImageInput, build_edit
from unfog.reporting.image_grids import Pixels
from unfog.training.precision import DTYPES
from unfog.training.settings import SamplingPrecision

if TYPE_CHECKING:
    from unfog.inference.evaluation_files import Evaluation
from pathlib import Path

from unfog.config.schema import Config
from unfog.config.validate import path_text


class Run(LoadedRun):
    """A loaded run that generates samples and evaluates itself; the arguments are those of `LoadedRun`."""

    calls = 0
    """Network calls that the last `sample` made for one image; with guidance, each is two forward passes."""

    def sample(
        self,
        n: int = 16,
        steps: int | None = None,
        seed: int = 0,
        label: Sequence[str | int] | str | int = (),
        guidance: float | None = None,
        sampler: Kind | None = None,
        batch: int = 64,
        progress: Callable[[int], None] = lambda done: None,
        observe: Observe | None = None,
        guidance_interval: Sequence[float] | None = None,
        guide: LoadedRun | str | PathLike[str] | int | None = None,
        image: ImageInput | None = None,
        mask: ImageInput | None = None,
        strength: float | None = None,
        repeats: int | None = None,
        precision: SamplingPrecision = "fp32",
    ) -> Pixels:
        """Generate n images, uint8 [n, H, W, C], from noise or from `image`.

        Image i is the same whatever n and batch are, to within the last bit of floating-point sums.

        Args:
            n: number of images.
            steps: of the sampler; None is the run's setting.
            seed: of the noise.
            label: class names (text) or numbers (integers, from 0) that the images cycle through; () is all classes.
            guidance: scale; 1 is none, None is the run's setting. Samples move away from what the network generates
                without a class (classifier-free guidance), or from what `guide` generates.
            sampler: None is the run's setting.
            batch: images per forward pass.
            progress: called with the number of images done.
            observe: called before each sampling step of the first batch.
            guidance_interval: the lowest and highest share of noise, sigma / (alpha + sigma), with guidance; None is
                the run's setting.
            guide: a weaker network, given the same class: the step of another checkpoint of this run, or another run,
                or the folder of one, with ":" and a step where it is not the newest.
            image: file, or uint8 [H, W] or [H, W, C], brought to the run's size as training images are; the samples
                are variations of it.
            mask: file, or uint8 or bool of the image's height and width: only what is white is generated, to match
                the rest, which stays as it is to the bit.
            strength: share of the sampler's steps by which noise is added to the image, 0 to 1; None is 0.6, and 1
                with a mask.
            repeats: times that each stretch of steps is repeated with a mask; None is 10.
            precision: of the network. Samples in bf16 differ slightly; `evaluate` measures whether they are worse.

        Raises:
            RequestError: a setting, an image or a mask is not valid, or the guide does not fit or does not exist.
        """
        words = list(label) if isinstance(label, Iterable) and not isinstance(label, str) else [label]
        labels = parse_labels(words, self.classes)
        interval = self.config.guidance_interval if guidance_interval is None else guidance_interval
        interval = of_type(tuple[float, float], interval, "guidance_interval")
        weaker, scale = self._resolve_guidance(guide, guidance)
        if guidance_interval is not None and scale == 1:
            raise RequestError("guidance_interval needs guidance, and 1 is none; give --guidance 2, or leave it away")
        precision = of_type(SamplingPrecision, precision, "precision")
        weaker = weaker and replace(weaker, dtype=DTYPES.get(precision))
        n, seed, batch = (of_type(int, v, name) for name, v in (("n", n), ("seed", seed), ("batch", batch)))
        chosen = self.sampler(sampler, steps)
        settings = GenerationSettings(n, chosen, labels, seed, scale, batch, interval, precision=precision)
        edit = build_edit(self.config, image, mask, strength, repeats)
        if edit and observe:
            raise RequestError("observe sees the steps from noise to image; leave it away, or the image")
        calls: list[int] = []
        samples = generate_images(
            self.network, self.config, settings, progress, observe, guide=weaker, calls=calls.append, edit=edit
        )
        self.calls = max(calls)
        return samples

    def _resolve_guidance(
        self, guide: LoadedRun | str | PathLike[str] | int | None, guidance: float | None
    ) -> tuple[Denoiser | None, float]:
        """Return the guide, if there is one, and the guidance scale."""
        weaker = None if guide is None else open_guide(self, guide)
        # Without a guide, a scale makes sense only for a network that was trained to go without its class.
        usual = self.config.usual_guidance if weaker is None else self.config.guidance
        scale = usual if guidance is None else of_type(float, guidance, "guidance")
        if weaker is not None and scale == 1:
            raise RequestError("guidance = 1 makes no use of a guide; give --guidance 2, or leave the guide away")
        return weaker, scale

    def evaluate(self, metrics: Sequence[str] | str = (), n: int = 0, **settings: Any) -> Evaluation:
        """Compute metrics of this run, as `unfog evaluate` does, or read those that the run folder has already.

        Args:
            metrics: of fid, kid, precision, recall, density, coverage, sliced, held_out, bits; () is all possible ones.
            n: number of samples; 0 is 1,000 on a CPU, and 10,000 elsewhere.
            settings: features, reference, sampler, steps, seed, guidance, batch, precision, against: see
                `config.run_requests.EvaluationRequest`.

        Raises:
            RequestError: there is no such metric, file or reference.
            RunError: the run folder or the cache cannot be written.
        """
        # Loaded only here, so that sampling starts without it.
        from unfog.inference.evaluate import evaluate

        names = (metrics,) if isinstance(metrics, str) else metrics
        return evaluate(self, update(EvaluationRequest(), {"metrics": names, "n": n, **settings}, ""))


def open_guide(run: LoadedRun, guide: LoadedRun | str | PathLike[str] | int) -> Denoiser:
    """Return the denoiser that guides `run`, on its device.

    Args:
        run: generates the samples.
        guide: the step of one of its checkpoints; or another run, loaded, or its folder, "RUN" or "RUN:STEP".

    Raises:
        RequestError: there is no such run or checkpoint, it generates other images, or it is `run` itself.
    """
    if isinstance(guide, LoadedRun):
        other = guide
    elif isinstance(guide, str | PathLike):
        path, step = _split_step(path_text(guide, "guide"))
        other = LoadedRun(path, run.weights, step, str(run.device))
    else:
        other = LoadedRun(run.path, run.weights, guide, str(run.device))
    same = other.checkpoint.folder.resolve() == run.checkpoint.folder.resolve() and other.weights == run.weights
    if same and other.ema is None and run.ema is None:  # an EMA of a given width may be of another step
        raise RequestError(
            f"guide = step {other.checkpoint.step} is what draws; give an earlier checkpoint, or a smaller network"
        )
    check_guide(run.config, other.config)
    return Denoiser(other.network, other.config.diffusion)


def _split_step(text: str) -> tuple[str, int | None]:
    path, colon, step = text.rpartition(":")
    # A folder may itself be called "RUN:100".
    if colon and step.isdecimal() and len(step) < 16 and not Path(text).exists():
        return path, int(step)
    return text, None


def check_guide(config: Config, other: Config) -> None:
    """Raise `RequestError` unless both networks can denoise the same noisy image."""
    for what, mine, its in (
        ("image size", config.data.size, other.data.size),
        ("channels", config.data.channels, other.data.channels),
        ("classes", config.classes, other.classes),
        ("diffusion.path", config.diffusion.path.kind, other.diffusion.path.kind),
    ):
        if mine != its:
            raise RequestError(f"the guide has another {what} than this run ({its}, not {mine}), so it cannot guide it")
    try:
        # The settings of the guide are valid with the noise levels of the run.
        replace(other.diffusion, schedule=config.diffusion.schedule, learned_variance=False)
    except RequestError as error:
        raise RequestError(f"the guide cannot be asked at the noise levels of this run: {error}") from None
    if _input_scale(config) != _input_scale(other):
        raise RequestError(
            "the guide does not see what this run sees: pixels, or latents of one autoencoder with one mean, deviation "
            "and sigma_data; give a checkpoint of this run, or a run on the same images with the same autoencoder"
        )


def _input_scale(config: Config) -> tuple[object, ...]:
    """Return what decides which image a latent stands for; () for pixels."""
    latents = config.latents
    return (latents.sha256, latents.mean, latents.deviation, config.diffusion.sigma_data) if config.uses_latents else ()
