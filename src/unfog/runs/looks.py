"""What a run looks like from outside: pictures of the average weights, and their held-out loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unfog.config.tree import Config
from unfog.diffusion.objective import Objective
from unfog.evaluation.held_out import HeldOut
from unfog.reporting.figures import Pixels
from unfog.runs.pictures import Strip
from unfog.runs.sampling import draw, picture_grid, usual
from unfog.runs.signals import StopSignals
from unfog.training.memory import at_once
from unfog.training.state import TrainState


class Looks:
    """Looks at the state of a run, which is what it was afterwards, whatever cuts a look short."""

    def __init__(
        self, config: Config, state: TrainState, objective: Objective, held_out: HeldOut | None, stop: StopSignals
    ):
        self.config, self.state, self.objective, self.held_out, self.stop = config, state, objective, held_out, stop

    @property
    def at_once(self) -> int:
        """Images that go through the network at once."""
        return at_once(self.config.training, self.state)

    def preview(self) -> Pixels:
        """A sample grid from the same noise each time: what `unfog sample` gives without flags."""
        config = self.config
        with self._average():
            pictures = draw(self.state.model, config, usual(config, config.preview.images, self.at_once))
        return picture_grid(pictures, config.classes)

    def denoising(self) -> Pixels:
        """How the first picture of the preview came out of the noise."""
        strip = Strip(self.config.diffusion.schedule, self.config.sampler)
        with self._average():
            draw(self.state.model, self.config, usual(self.config, 1, 1), observe=strip)
        return strip.picture()

    def held_out_loss(self) -> dict[str, Any]:
        """What is measured on the held-out images; empty if there are none."""
        if self.held_out is None:
            return {}
        model, schedule = self.state.model, self.config.diffusion.schedule

        def loss_at(x0: Tensor, label: Tensor | None, u: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            return self.objective.at(model, x0, label, schedule(u), noise)

        model.eval()
        try:
            with self._average():
                return dict(self.held_out.measure(loss_at, self.at_once))
        finally:
            model.train()

    @contextmanager
    def _average(self) -> Iterator[None]:
        """The network holds the average. A stop may end what is inside, and must not leave half of each behind."""
        state, swapped = self.state, False
        try:
            with self.stop.undivided():
                state.ema.swap(state.model)
                swapped = True
            # A compiled network would compile once more for this; `unfog sample` does not compile either.
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            if swapped:
                with self.stop.undivided():
                    state.ema.swap(state.model)
