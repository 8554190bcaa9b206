"""A network of another program, without a run: `unfog.load(WEIGHTS).sample(16)` on a folder of diffusers or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfog.config.requests.evaluate import DRAWN, EvaluateRequest
from unfog.config.requests.sample import SamplingRequest
from unfog.config.schema import Config, Init
from unfog.config.toml import update
from unfog.config.validate import path_text
from unfog.data.sources.stored_images import Report, StoredImages
from unfog.diffusion.diffusion import Diffusion
from unfog.errors import RequestError
from unfog.inference.run import Run
from unfog.pipeline.build import build_network
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import say
from unfog.runs.weights.weights_source import WeightsSource
from unfog.settings import is_auto
from unfog.text import sanitize
from unfog.training.checkpoints.format import CheckpointInfo
from unfog.values.image_format import CHANNELS, Size

if TYPE_CHECKING:
    from unfog.inference.evaluation_files import Evaluation
    from unfog.pipeline.generate import GenerationSettings


class Model(Run):
    """A network that another program trained. It samples as a run does, and is evaluated against a reference.

    Args:
        path: a folder of diffusers, with its scheduler, or a file of weights of another program.
        device: auto, cpu, cuda, cuda:1 or mps.
        size: of the images, 64 or "96x64" (width x height), for weights that do not state it.

    Raises:
        RequestError: the network, its noise levels or its size have no equivalent here, or are not stated.
    """

    def __init__(self, path: str | Path, device: str = "auto", size: Size = 0):
        place = Path(path_text(path, "path"))
        source = WeightsSource.describe(Init(folder=str(place)), Diffusion(), known=False)
        self.folder, self.config = RunFolder(place), _settings(place, source, size)
        self.weights, self.ema, self.device = "ema", None, choose_device(device)
        # There is no checkpoint, so `_describe` leaves out the facts that `Run` has about one.
        self.checkpoint = CheckpointInfo(place, 0, 0, False, False, None, "", "", None, "", {})
        if source.elsewhere is not None:
            say(f"  {source.what}; objective: {source.objective_reason}")
        state, _ = source.fit(source.read(), self.config)
        self.network = build_network(self.config)
        self.network.load_state_dict(state)
        self.network = self.network.to(self.device).eval()

    def evaluate(self, metrics: Sequence[str] | str = (), n: int = 0, **settings: Any) -> Evaluation:
        """Generate n samples and compare them with `reference=`; the settings are those of `Run.evaluate`.

        Raises:
            RequestError: a setting needs a run, such as against, or there is no reference.
        """
        # Loaded only here, so that sampling starts without it.
        from unfog.inference.evaluate import evaluate_images

        names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        request = update(EvaluateRequest(run=self.path), {"metrics": names, "n": n, **settings}, "")
        request.check_without_run()
        count = request.samples_on(self.device.type)
        chosen = {name: value for name in (*DRAWN, "batch") if (value := getattr(request, name)) is not None}
        samples = self.sample(count, **chosen)
        # As a source, so that they are compared by the way that images of any program take.
        stored = str(StoredImages.store(samples, None, Report(say)))
        found = evaluate_images(stored, replace(request, n=0), 0, str(self.device))
        how = {"samples": count, "of": ", ".join(self.sampled), "reference": sanitize(request.reference)}
        return replace(found, drawn=how, asked=asdict(SamplingRequest()) | chosen)

    def _describe(self, generation: GenerationSettings, guide: str) -> tuple[str, ...]:
        name, _, _, *rest = super()._describe(generation, guide)  # there is neither a step nor a choice of weights
        return (name, *rest)

    def __repr__(self) -> str:
        return f"<model {self.path}: {'; '.join(self._facts().values())}; on {self.device}>"


def _settings(path: Path, source: WeightsSource, size: Size) -> Config:
    """Return the settings to sample with. RequestError if the weights leave open what only training could choose."""
    config, model = source.config, source.elsewhere
    # The same weights under another objective give noise, so none is guessed.
    if path.is_dir() and source.scheduler is None:
        raise RequestError(
            f"{path} has no scheduler_config.json, which says what the network predicts at which noise levels; save "
            "the whole pipeline, or train on from it: unfog train SOURCE --init"
        )
    latents = (path / "vae").is_dir() or (path / "vqvae").is_dir() or source.input[0] not in CHANNELS
    if latents and not source.names_autoencoder:
        raise RequestError(
            f"{path} generates latents, and has no AutoencoderKL or AutoencoderTiny in a folder vae that decodes them; "
            "start a run from it: unfog train SOURCE --init and --autoencoder"
        )
    if size and not is_auto(config.data, "size") and config.data.size != size:
        raise RequestError(f"size = {size}, and {path} states {config.data.size}; omit it")
    if is_auto(config.data, "size") and not size:
        state = "states no size: give --size" if model is not None else "states no sample_size: add it to config.json"
        raise RequestError(f"{path} {state}")
    config = replace(config, data=replace(config.data, size=size if is_auto(config.data, "size") else config.data.size))
    assert config.network is not None  # it is that of the weights
    _, height, width = config.input_shape
    config.network.check((height, width))
    if model is not None:
        # The class of no class is known, but of these programs only DiT was trained with it as a rule.
        dropout = config.label_dropout if model.network.kind == "diffusers-dit" else 0.0
        return replace(config, classes=tuple(map(str, range(model.classes))), label_dropout=dropout)
    rows = (source.unet2d or {}).get("num_class_embeds") or 0
    # Its class for no class, if there is one, is known to its trainer alone: there is no guidance by it.
    return replace(config, classes=tuple(map(str, range(rows))), label_dropout=0.0)
