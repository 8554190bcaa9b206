"""A network of another program, without a run: `unfog.load(FOLDER).sample(16)` on a folder of diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfog.config.run_requests import EvaluateRequest, SamplingRequest
from unfog.config.schema import Config, Init
from unfog.config.toml import update
from unfog.config.validate import path_text
from unfog.data.sources.stored_images import Report, store_images
from unfog.diffusion.diffusion import Diffusion
from unfog.errors import RequestError
from unfog.inference.run import Run
from unfog.pipeline.build import build_network, building_for
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import say
from unfog.runs.init_weights import WeightsSource
from unfog.text import sanitize
from unfog.training.checkpoints.format import CheckpointInfo
from unfog.training.checkpoints.load import read_tensors

if TYPE_CHECKING:
    from unfog.inference.evaluation_files import Evaluation
    from unfog.pipeline.generate import GenerationSettings

_DRAWN = ("sampler", "steps", "seed", "guidance", "batch", "precision")


class Model(Run):
    """A network that another program trained. It samples as a run does, and is evaluated against a reference.

    Args:
        path: a folder of diffusers, with its scheduler.
        device: auto, cpu, cuda, cuda:1 or mps.

    Raises:
        RequestError: the network, its noise levels or its size have no equivalent here, or are not stated.
    """

    def __init__(self, path: str | Path, device: str = "auto"):
        place = Path(path_text(path, "path")).expanduser()
        source = WeightsSource.describe(Init(folder=str(place)), Diffusion(), known=False)
        self.folder, self.config = RunFolder(place), _settings(place, source)
        self.weights, self.ema, self.device = "ema", None, choose_device(device)
        # There is no checkpoint: what `Run` tells of one is left out in `_describe`.
        self.checkpoint = CheckpointInfo(place, 0, 0, False, False, None, "", "", None, "", {})
        state, _ = source.fit(read_tensors(source.weights), self.config)
        with building_for(source.weights if source.unet2d is None else None):
            self.network = build_network(self.config)
        self.network.load_state_dict(state)
        self.network = self.network.to(self.device).eval()

    def evaluate(self, metrics: Sequence[str] | str = (), n: int = 0, **settings: Any) -> Evaluation:
        """Generate n samples and compare them with `reference=`; the settings are those of `Run.evaluate`.

        Raises:
            RequestError: a setting needs a run, such as against, or there is no reference.
        """
        # Loaded only here, so that sampling starts without it.
        from unfog.inference.evaluate_images import evaluate_images

        names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        request = update(EvaluateRequest(run=self.path), {"metrics": names, "n": n, **settings}, "")
        request.check_without_run()
        count = request.n or (1000 if self.device.type == "cpu" else 10_000)
        chosen = {name: value for name in _DRAWN if (value := getattr(request, name)) is not None}
        samples = self.sample(count, **chosen)
        stored = str(store_images(samples, None, Report(say)))
        found = evaluate_images(stored, replace(request, n=0), 0, str(self.device))
        how = {"samples": count, "of": ", ".join(self.sampled), "reference": sanitize(request.reference)}
        return replace(found, drawn=how, asked=asdict(SamplingRequest()) | chosen)

    def _describe(self, generation: GenerationSettings) -> tuple[str, ...]:
        name, _, _, *rest = super()._describe(generation)  # there is neither a step nor a choice of weights
        return (name, *rest)

    def __repr__(self) -> str:
        return f"<model {self.path}: {'; '.join(self._facts().values())}; on {self.device}>"


def _settings(path: Path, source: WeightsSource) -> Config:
    """Return the settings to sample with. RequestError if the folder leaves open what only training could choose."""
    if source.unet2d is not None and source.scheduler is None:
        raise RequestError(
            f"{path} has no scheduler_config.json, which says what the network predicts at which noise levels; save "
            "the whole pipeline, or train on from it: unfog train SOURCE --init"
        )
    if (path / "vae").is_dir() or (path / "vqvae").is_dir():
        raise RequestError(
            f"{path} generates latents, and the mean and deviation that Unfog scales them by are of training images; "
            "start a run from it: unfog train SOURCE --init and --autoencoder"
        )
    if not source.config.data.size:
        raise RequestError(f"{path} states no sample_size; add it to the config.json of the network")
    rows = (source.unet2d or {}).get("num_class_embeds") or 0
    # Its class for no class, if there is one, is known to its trainer alone: there is no guidance by it.
    return replace(source.config, classes=tuple(map(str, range(rows))), label_dropout=0.0)
