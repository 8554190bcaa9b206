"""What a run looks like from outside: pictures of the average weights, and their held-out loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from unfog.config.schema import Config
from unfog.diffusion.objective import Objective
from unfog.doctor.run.loss_checks import LossImages, measure_losses
from unfog.evaluation.held_out import HeldOut, LossAt, midpoints
from unfog.pipeline.autoencoder_folder import latent_decoder
from unfog.pipeline.generate import default_generation, generate_images, sample_grid
from unfog.pipeline.image_files import DenoisingStrip
from unfog.process.signals import StopSignals
from unfog.reporting.charts import Floats
from unfog.reporting.image_grids import Pixels
from unfog.reporting.progress import warn
from unfog.training.stability.out_of_memory import is_out_of_memory
from unfog.training.stability.out_of_memory import microbatch_size as passes_at
from unfog.training.state import TrainState

T = TypeVar("T")


class Previews:
    """Looks at the state of a run, which is what it was afterwards, whatever cuts a look short."""

    final_name = "denoising"
    """What the picture at the end of a run is called."""

    def __init__(
        self, config: Config, state: TrainState, objective: Objective, held_out: HeldOut | None, stop: StopSignals
    ):
        self.config, self.state, self.objective, self.held_out, self.stop = config, state, objective, held_out, stop
        self.most = config.training.batch  # images at once, as far as memory is known to suffice

    def preview(self) -> Pixels:
        """A sample grid from the same noise each time: what `unfog sample` gives without flags."""
        config, count = self.config, self.config.preview.images
        pictures = self._looking(
            count, lambda at_once: generate_images(self.state.model, config, default_generation(config, count, at_once))
        )
        return sample_grid(pictures, config.classes)

    def final_image(self) -> Pixels:
        """How the first picture of the preview came out of the noise."""
        decode = latent_decoder(self.config, self.state.precision.device)
        strip = DenoisingStrip(self.config.diffusion.schedule, decode)
        with self._average():
            generate_images(self.state.model, self.config, default_generation(self.config, 1, 1), observe=strip)
        return strip.image()

    def held_out_loss(self) -> dict[str, Any]:
        """What is measured on the held-out images; empty if there are none."""
        held_out = self.held_out
        if held_out is None:
            return {}
        return self._losing(len(held_out.x0), lambda loss_at, at_once: dict(held_out.measure(loss_at, at_once)))

    def losses(self, looked: LossImages) -> Floats:
        """Loss [L, N] of images at the noise levels of the evaluation, by `diagnosis.run.losses`."""
        levels = midpoints(self.config.evaluate.levels)
        return self._losing(len(looked.x0), lambda loss_at, at_once: measure_losses(loss_at, looked, levels, at_once))

    def with_ema_weights(self, count: int, look: Callable[[int], T]) -> T:
        """What `look`, which draws as many pictures at once as it is told, gives with the average in the network."""
        return self._looking(count, look)

    def _losing(self, count: int, look: Callable[[LossAt, int], T]) -> T:
        """What a look at the losses of `count` images gives."""
        model, schedule = self.state.model, self.config.diffusion.schedule

        def loss_at(x0: Tensor, label: Tensor | None, u: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            return self.objective.at(model, x0, label, schedule(u), noise)

        model.eval()
        try:
            return self._looking(count, lambda at_once: look(loss_at, at_once))
        finally:
            model.train()

    def _looking(self, count: int, look: Callable[[int], T]) -> T:
        """What a look gives with the average, at as many of `count` images at once as memory suffices for."""
        while True:
            at_once = min(self.most, count, passes_at(self.config.training, self.state))
            try:
                with self._average():
                    return look(at_once)
            except Exception as error:
                if not is_out_of_memory(error) or at_once == 1:
                    raise
            self.most = (at_once + 1) // 2
            warn(f"memory did not suffice for {at_once} pictures at once; drawing and measuring with {self.most}")

    @contextmanager
    def _average(self) -> Iterator[None]:
        """The network holds the average. A stop may end what is inside, and must not leave half of each behind.

        It comes to the device for it where the state is kept in host memory: see `training.sharding`.
        """
        state, swapped, home = self.state, False, next(self.state.model.parameters()).device
        try:
            with self.stop.defer_interrupts():
                state.ema.swap(state.model)
                swapped = True
                state.model.to(state.precision.device)
            # A compiled network would compile once more for this; `unfog sample` does not compile either.
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            if swapped:
                with self.stop.defer_interrupts():
                    state.model.to(home)
                    state.ema.swap(state.model)
