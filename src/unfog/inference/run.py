"""A run as Python sees it: `unfog.load("runs/photos").sample(16)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from unfog.config.paths import path_text
from unfog.config.schema import Config
from unfog.config.toml import of_type, update
from unfog.config.validate import override_sampler
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.sampler import Kind, Observe, Sampler
from unfog.errors import RequestError
from unfog.inference.autoguidance import open_guide
from unfog.inference.ema_weights import load_default_ema_weights, load_ema_weights
from unfog.pipeline.autoencoder_folder import Decode, latent_decoder
from unfog.pipeline.build import build_network
from unfog.pipeline.edit import ImageInput, build_edit
from unfog.pipeline.generate import GenerationSettings, generate_images, parse_labels
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder
from unfog.reporting.image_grids import Pixels
from unfog.reporting.progress import warn
from unfog.training.checkpoints import format as checkpoint
from unfog.training.precision import DTYPES
from unfog.training.settings import SamplingPrecision

if TYPE_CHECKING:
    from unfog.inference.results import Evaluation


class Run:
    """A run folder, and the network in one of its checkpoints, on the device and in evaluation mode.

    Args:
        path: the run folder.
        weights: "ema", the average that pictures are best drawn from, or "raw", the weights as trained.
        step: which checkpoint; None is the newest whole one.
        device: auto, cpu, cuda, cuda:1 or mps.
        best: the best checkpoint of those that were kept, by held-out loss or `evaluate.best`, rather than a step.
        ema: width of the average, 0.01 to 0.28, rebuilt from the run's snapshots of two others; `step` may then be any
            up to the last. None is what `ema_sweep` chose, or else the width of the run's settings.

    Raises:
        RequestError: `path` is not a run, or has no such checkpoint, or its snapshots do not allow that average.
        RunError: its checkpoints are broken, or there is none yet.
    """

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
            raise RequestError(f"weights = {weights!r} is neither 'ema' nor 'raw'")
        self.weights, self.device = weights, choose_device(device)
        if self.config.trains_autoencoder:
            raise RequestError(
                f"{self.folder.path} is a codec, which draws nothing by itself; train a network on its latents: unfog "
                f"train SOURCE --autoencoder {self.folder.path}"
            )
        step = of_type(int | None, step, "step")
        ema = of_type(float | None, ema, "ema")
        if ema is not None and weights == "raw":
            raise RequestError(f"ema = {ema:g} is of the average, and weights = 'raw' wants none; give one of them")
        self.ema = ema
        which: int | Literal["best"] | None = "best" if best else step if ema is None else None
        self.checkpoint = checkpoint.find(self.folder.checkpoints, which, warn)
        # At once, because a run that goes on may remove this checkpoint later.
        self.network: nn.Module = self.load_network(self.checkpoint, self.checkpoint.step if best else step)
        self.calls = 0
        """How often the last `sample` asked for E[x0 | x_t] for a picture; that is two passes with guidance."""

    def load_network(self, saved: checkpoint.Saved, step: int | None) -> nn.Module:
        """The network of a checkpoint, with the kind of weights that this was opened with.

        Args:
            saved: the checkpoint.
            step: of an average of a given width, which needs no checkpoint; None is the last.
        """
        network = build_network(self.config)
        if self.ema is not None:
            load_ema_weights(network, self.folder, self.ema, step)
        elif self.weights == "ema":
            load_default_ema_weights(network, self.folder, self.config, saved)
        else:
            checkpoint.load_weights(saved.folder, "model", network)
        return network.to(self.device).eval()

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; () without."""
        return self.config.classes

    @property
    def decode(self) -> Decode:
        """What turns what the network sees, pixels or latents, into images [B, C, H, W] about [-1, 1]."""
        return latent_decoder(self.config, self.device)

    def sampler(self, kind: str | None = None, steps: int | None = None) -> Sampler:
        """The run's own sampler, with another kind or number of steps where given."""
        return override_sampler(self.config.sampler, kind, steps)

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
        guide: Run | str | PathLike[str] | int | None = None,
        image: ImageInput | None = None,
        mask: ImageInput | None = None,
        strength: float | None = None,
        repeats: int | None = None,
        precision: SamplingPrecision = "fp32",
    ) -> Pixels:
        """Draw n pictures, uint8 [n, H, W, C]; with an image, of that image.

        Picture i is the same whatever n and batch are, to within the last bit of floating-point sums.

        Args:
            n: how many.
            steps: of the sampler; None as the run is set.
            seed: another one gives other pictures.
            label: class names (text) or numbers (integers, from 0) that the pictures cycle through; () is all classes.
            guidance: strength of guidance; 1 is none, None as the run is set. It leads away from pictures of no class
                (classifier-free), or from what `guide` would draw.
            sampler: None as the run is set.
            batch: pictures drawn at once.
            progress: called with the number of pictures done.
            observe: called before each sampling step of the first batch.
            guidance_interval: the lowest and highest share of noise, sigma / (alpha + sigma), with guidance; None as
                the run is set.
            guide: a weaker network, told the same class: the step of another checkpoint of this run, or another run,
                or the folder of one, with ":" and a step where it is not the newest.
            image: file, or uint8 [H, W] or [H, W, C], brought to the run's size as training images are; pictures like
                it are drawn.
            mask: file, or uint8 or bool of the image's height and width: only what is white is drawn, in keeping with
                the rest, which stays as it is to the bit.
            strength: share of the sampler's steps that the image is noised by, 0 to 1; None is 0.6, and 1 with a mask.
            repeats: times that each stretch of steps is walked with a mask; None is 10.
            precision: of the network. Pictures in bf16 are slightly other ones: `evaluate` says whether worse.

        Raises:
            RequestError: a setting, an image or a mask that will not do; a guide that does not fit, or is not there.
        """
        words = list(label) if isinstance(label, Iterable) and not isinstance(label, str) else [label]
        labels = parse_labels(words, self.classes)
        given = self.config.guidance_interval if guidance_interval is None else guidance_interval
        interval = of_type(tuple[float, float], given, "guidance_interval")
        weaker, scale = self._guided(guide, guidance)
        if guidance_interval is not None and scale == 1:
            raise RequestError("guidance_interval needs guidance, and 1 is none; give --guidance 2, or leave it away")
        precision = of_type(SamplingPrecision, precision, "precision")
        weaker = weaker and replace(weaker, dtype=DTYPES.get(precision))
        n, seed, batch = (of_type(int, v, name) for name, v in (("n", n), ("seed", seed), ("batch", batch)))
        drawing = GenerationSettings(
            n, self.sampler(sampler, steps), labels, seed, scale, batch, interval, 0, precision
        )
        edit = build_edit(self.config, image, mask, strength, repeats)
        if edit and observe:
            raise RequestError("observe watches pictures come out of noise; leave it away, or the image")
        calls: list[int] = []
        pictures = generate_images(
            self.network, self.config, drawing, progress, observe, guide=weaker, calls=calls.append, edit=edit
        )
        self.calls = max(calls)
        return pictures

    def _guided(
        self, guide: Run | str | PathLike[str] | int | None, guidance: float | None
    ) -> tuple[Denoiser | None, float]:
        """The network that leads pictures astray, if another does, and how strongly they are led away from there."""
        weaker = None if guide is None else open_guide(self, guide)
        usual = self.config.usual_guidance if weaker is None else self.config.guidance
        scale = usual if guidance is None else of_type(float, guidance, "guidance")
        if weaker is not None and scale == 1:
            raise RequestError("guidance = 1 makes no use of a guide; give --guidance 2, or leave the guide away")
        return weaker, scale

    def evaluate(self, metrics: Sequence[str] | str = (), n: int = 0, **asked: Any) -> Evaluation:
        """Measure this run, as `unfog evaluate` does; what was measured before is read from the run folder.

        Args:
            metrics: of fid, kid, precision, recall, density, coverage, sliced, held_out, bits; () is all that can be.
            n: pictures to draw; 0 is 1,000 on a CPU, and 10,000 elsewhere.
            asked: features, reference, sampler, steps, seed, guidance, batch, against: see `runs.evaluation.Asked`.

        Raises:
            RequestError: there is no such metric, file or reference.
            RunError: the run folder or the cache cannot be written.
        """
        from unfog.inference.evaluate import evaluate  # which loads a run by what trains one
        from unfog.inference.results import EvaluationRequest

        names = (metrics,) if isinstance(metrics, str) else metrics
        return evaluate(self, update(EvaluationRequest(), {"metrics": names, "n": n, **asked}, ""))
