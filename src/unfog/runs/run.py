"""A run as Python sees it: `unfog.load("runs/photos").sample(16)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from unfog.config.places import path_text
from unfog.config.toml import of_type, update
from unfog.config.tree import Config
from unfog.diffusion.sampler import Observe, Sampler
from unfog.errors import RequestError
from unfog.reporting.figures import Pixels
from unfog.runs.build import build_network
from unfog.runs.choices import choose_device
from unfog.runs.folder import RunFolder
from unfog.runs.sampling import Drawing, draw, find_labels
from unfog.training import checkpoint


class Run:
    """A run folder, and the network in one of its checkpoints, on the device and in evaluation mode.

    Args:
        path: the run folder.
        weights: "ema", the average that pictures are best drawn from, or "raw", the weights as trained.
        step: which checkpoint; None is the newest whole one.
        device: auto, cpu, cuda, cuda:1 or mps.
        best: the checkpoint with the lowest held-out loss, of those that were kept, rather than that of a step.

    Raises:
        RequestError: `path` is not a run, or has no such checkpoint.
        RunError: its checkpoints are broken, or there is none yet.
    """

    def __init__(
        self,
        path: str | Path,
        weights: Literal["ema", "raw"] = "ema",
        step: int | None = None,
        device: str = "auto",
        best: bool = False,
    ):
        self.folder = RunFolder(Path(path_text(path, "path")))
        self.config: Config = self.folder.read_config()
        if weights not in ("ema", "raw"):
            raise RequestError(f"weights = {weights!r} is neither 'ema' nor 'raw'")
        self.device = choose_device(device)
        step = of_type(int | None, step, "step")
        self.checkpoint = checkpoint.find(self.folder.checkpoints, "best" if best else step)
        network = build_network(self.config)
        # At once, because a run that goes on may remove this checkpoint later.
        checkpoint.load_weights(self.checkpoint.folder, "ema" if weights == "ema" else "model", network)
        self.network: nn.Module = network.to(self.device).eval()

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; () without."""
        return self.config.classes

    def sampler(self, kind: str | None = None, steps: int | None = None) -> Sampler:
        """The run's own sampler, with another kind or number of steps where given."""
        changes = {k: v for k, v in {"kind": kind, "steps": steps}.items() if v is not None}
        return update(self.config.sampler, changes, "sampler")

    def sample(
        self,
        n: int = 16,
        steps: int | None = None,
        seed: int = 0,
        label: Sequence[str | int] | str | int = (),
        guidance: float | None = None,
        sampler: Literal["ddpm", "ddim", "heun", "dpmpp"] | None = None,
        batch: int = 64,
        progress: Callable[[int], None] = lambda done: None,
        observe: Observe | None = None,
    ) -> Pixels:
        """Draw n pictures, uint8 [n, H, W, C].

        Picture i is the same whatever n and batch are, to within the last bit of floating-point sums.

        Args:
            n: how many.
            steps: of the sampler; None as the run is set.
            seed: another one gives other pictures.
            label: class names or numbers that the pictures cycle through; () is all classes.
            guidance: strength of classifier-free guidance; 1 is none, None as the run is set.
            sampler: None as the run is set.
            batch: pictures drawn at once.
            progress: called with the number of pictures done.
            observe: called before each sampling step of the first batch.
        """
        words = list(label) if isinstance(label, list | tuple) else [label]
        labels = find_labels([str(word) for word in words], self.classes)
        strength = self.config.usual_guidance if guidance is None else of_type(float, guidance, "guidance")
        n, seed, batch = (of_type(int, v, name) for name, v in (("n", n), ("seed", seed), ("batch", batch)))
        drawing = Drawing(n, self.sampler(sampler, steps), labels, seed, strength, batch)
        return draw(self.network, self.config, drawing, progress, observe)
