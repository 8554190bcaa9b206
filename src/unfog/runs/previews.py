"""Previews and held-out losses of a run in training, computed with its EMA weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.checks.run.loss_checks import LossImages, check_overfitting, loss_images, measure_losses
from unfog.checks.run.run_record import RunRecord
from unfog.config.schema import Config
from unfog.config.task import AutoencoderTask, DiffusionTask, RunTask
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced, take_with_rows
from unfog.evaluation.held_out import HeldOut, HeldOutBuckets, LossAt, midpoints, summarize_losses
from unfog.models.autoencoder import AutoencoderModel
from unfog.pipeline.build import build_held_out_set, build_loss, build_loss_at, build_network, without_augmentation
from unfog.pipeline.condition_pictures import conditions_sheet
from unfog.pipeline.denoising_pictures import DenoisingStrip
from unfog.pipeline.generate import (
    GenerationSettings,
    cost_per_sample,
    generate_images,
    view_channels,
    view_grid,
)
from unfog.pipeline.latents import ImageMap, autoencoder_batch, save_autoencoder
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.charts import Floats
from unfog.reporting.findings import Finding
from unfog.reporting.image_grids import Pixels, grid_of_pairs, stack
from unfog.reporting.progress import say, warn
from unfog.training.autoencoder_loss import AutoencoderLoss, psnr
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import load_weights
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.training.stability.out_of_memory import is_out_of_memory, microbatch_size
from unfog.training.state import TrainState
from unfog.values.buckets import share_samples
from unfog.values.condition_format import Given
from unfog.values.image_format import Size

T = TypeVar("T")
_COLUMNS = 8  # of a grid of reconstructions


class Preview(NamedTuple):
    """Pictures of a preview: the grid in the view of the run, and a PNG of all channels, b"" for pictures of 8 bits."""

    grid: Pixels
    channels: bytes = b""


class Previews:
    """Computes with the EMA weights of a run. The training state is afterwards what it was, whatever interrupts.

    Samples and held-out losses are computed by all ranks of the `world`, each a part. `shown` has the conditions that
    samples of a size cycle through, and the images beside them; nothing for a run with classes alone.
    """

    final_name = "denoising"  # of the image at the end of a run

    def __init__(
        self,
        config: Config,
        state: TrainState,
        held_out: HeldOut | HeldOutBuckets | None,
        stop: StopSignals,
        world: World = SINGLE_PROCESS,
        shown: Mapping[Size, ConditionsOfImages] = {},
    ):
        self._shown = shown
        self.config, self.state, self.held_out, self._stop, self._world = config, state, held_out, stop, world
        self._batch = config.training.batch  # images at once; shrinks where memory does not suffice

    @staticmethod
    def of(config: Config) -> type[Previews]:
        """Return the previews of what a run trains."""
        return _PREVIEWS[type(config.task)]

    @staticmethod
    def export(folder: RunFolder, config: Config) -> None:
        """Write the autoencoder of the newest checkpoint, for runs on its latents; nothing for a diffusion model."""

    @classmethod
    def build(
        cls, config: Config, dataset: Dataset, state: TrainState, stop: StopSignals, world: World = SINGLE_PROCESS
    ) -> Previews:
        """Return the previews of a run: those of its kind, with its held-out images."""
        held_out = build_held_out_set(dataset, config, state.precision.device)
        shown = dict[Size, ConditionsOfImages]()
        for part in dataset.buckets or [dataset]:
            size = part.settings.size
            if (found := conditions_of_images(config.at_size(size), part.held_out, part.train)) is not None:
                shown[size] = found
        return cls.of(config)(config, state, held_out, stop, world, shown)

    def preview(self) -> Preview:
        """Return a grid of samples from the same noise each time.

        With classes alone they are those of `unfog sample` without flags, else they have conditions of held-out images,
        and stand beside these. A run with buckets has a grid for each bucket, one below the other, with samples in
        proportion.
        """
        config, count = self.config, self.config.preview.images
        if not config.size_buckets:
            given = self._given(config.data.size)
            samples, names = self.samples(count, given), config.conditions.captions(given, count)
            return Preview(self._grid(config, samples), view_channels(config, samples, names))
        shares = zip(config.size_buckets, share_samples(config.size_buckets, count))
        drawn = {bucket.size: self.samples(n, self._given(bucket.size), bucket.size) for bucket, n in shares if n}
        return Preview(stack([self._grid(config.at_size(size), samples) for size, samples in drawn.items()]))

    def _given(self, size: Size) -> Given:
        """Return the conditions that samples of this size cycle through."""
        return self._shown[size].given if size in self._shown else self.config.conditions.usual

    def _grid(self, config: Config, samples: Pixels) -> Pixels:
        """Return one picture of samples [N, H, W, C] at the size of `config`, with their conditions."""
        size = config.data.size
        if size not in self._shown:
            return view_grid(config, samples, config.conditions.captions(self._given(size), len(samples)))
        shown = self._shown[size]
        return conditions_sheet(config, shown.given, samples, shown.images)

    def seconds_per_sample(self) -> float | None:
        """Return the time of one sample of a preview, measured on a few steps of the sampler.

        None with several processes, and where a preview holds no samples.
        """
        if self._world.size > 1:
            return None

        def measure(generate: Callable[[], object]) -> float:
            started = time.perf_counter()
            generate()
            return time.perf_counter() - started

        def compute(batch: int) -> float:
            drawing = GenerationSettings.default(self.config, batch, batch)
            return cost_per_sample(self.state.model, self.config, drawing, measure)

        return self.with_ema_weights(self.config.preview.images, compute)

    def samples(self, count: int, given: Given, size: Size = 0) -> Pixels:
        """Return samples [N, H, W, C] by the run's sampler and guidance, which cycle through these conditions.

        `size` is that of the samples; 0 is that of the run.
        """
        job = {"count": count, "given": given, "size": size or self.config.data.size}
        return np.concatenate(self._world.compute_parts(job, self.part))

    def part(self, job: dict[str, Any], rank: int, ranks: int) -> NDArray[Any]:
        """Return a rank's part of a job: some of the samples, or the losses of some of the levels."""
        return self._some_samples(job, rank, ranks) if "count" in job else self._some_losses(rank, ranks)

    def _some_samples(self, job: dict[str, Any], rank: int, ranks: int) -> Pixels:
        first, end = job["count"] * rank // ranks, job["count"] * (rank + 1) // ranks
        config = self.config.at_size(job["size"])
        if first == end:  # fewer samples than ranks
            return config.image_format.empty()
        few = end - first

        def generate(batch: int) -> Pixels:
            given = tuple((name, tuple(values)) for name, values in job["given"])
            settings = replace(GenerationSettings.default(config, few, batch), given=given, first=first)
            return generate_images(self.state.model, config, settings)

        return self.with_ema_weights(few, generate)

    def final_image(self) -> Pixels:
        """Return the denoising steps of the first sample of a preview, at the size of the run."""
        image_map = ImageMap.of(self.config, self.state.precision.device)
        strip = DenoisingStrip(self.config.diffusion.schedule, image_map.view)
        settings = replace(GenerationSettings.default(self.config, 1, 1), given=self._given(self.config.data.size))
        with self._ema_weights():
            generate_images(self.state.model, self.config, settings, observe=strip)
        return strip.image()

    def held_out_loss(self) -> dict[str, Any]:
        """Return the metrics of the held-out images; empty without such images."""
        held_out = self.held_out
        if held_out is None:
            return {}
        losses = sum(self._world.compute_parts({}, self.part))  # each part is 0 at the levels of the others
        return dict(summarize_losses(torch.as_tensor(losses), self._batch_size(held_out.images)))

    def _some_losses(self, rank: int, ranks: int) -> NDArray[np.float64]:
        held_out, levels = self.held_out, slice(rank, None, ranks)
        assert held_out is not None  # all ranks have the same data set

        def compute(loss_at: LossAt, batch: int) -> NDArray[np.float64]:
            return held_out.losses(loss_at, batch, only=levels).numpy()

        return self._with_losses(held_out.images, compute)

    def find_overfitting(self, record: RunRecord, dataset: Dataset) -> Finding | None:
        """Compare the losses of training images and of held-out ones; None without images, or without noise levels."""
        device, transform = self.state.precision.device, without_augmentation(self.config)
        images = dataset.of_one_size.as_network_input
        train, held_out = (loss_images(part, device, transform) for part in (images.train, images.held_out))
        if train is None or held_out is None:
            return None
        return check_overfitting(record, self._losses(train), self._losses(held_out))

    def _losses(self, images: LossImages) -> Floats:
        """Return the loss [L, N] of images at the noise levels of the evaluation."""
        levels = midpoints(self.config.evaluate.levels)
        return self._with_losses(len(images.x0), lambda loss_at, batch: measure_losses(loss_at, images, levels, batch))

    def _with_losses(self, count: int, compute: Callable[[LossAt, int], T]) -> T:
        model = self.state.model
        loss_at = build_loss_at(model, self.config)
        model.eval()
        try:
            return self.with_ema_weights(count, lambda batch: compute(loss_at, batch))
        finally:
            model.train()

    def with_ema_weights(self, count: int, compute: Callable[[int], T]) -> T:
        """Return `compute(batch)` of `count` images with the EMA weights, in smaller batches where memory runs out."""
        while True:
            batch = self._batch_size(count)
            try:
                with self._ema_weights():
                    return compute(batch)
            except Exception as error:
                if not is_out_of_memory(error) or batch == 1:
                    raise
            # Outside the clause, where the error's traceback no longer refers to the tensors of the attempt.
            self._batch = (batch + 1) // 2
            warn(f"out of memory with {batch} samples at once; previews and metrics continue with {self._batch}")

    def _batch_size(self, count: int) -> int:
        return min(self._batch, count, microbatch_size(self.config.training, self.state))

    @contextmanager
    def _ema_weights(self) -> Iterator[None]:
        """Put the EMA weights into the network, on the device, and afterwards the trained ones where they were."""
        # A sharded state is in host memory here.
        state, swapped, home = self.state, False, next(self.state.model.parameters()).device
        try:
            # An interrupt inside a swap would leave half of each in the network.
            with self._stop.defer_interrupts():
                state.ema.swap(state.model)
                swapped = True
                state.model.to(state.precision.device)
            # A compiled network would compile once more for this; `unfog sample` does not compile either.
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            if swapped:
                with self._stop.defer_interrupts():
                    state.model.to(home)
                    state.ema.swap(state.model)


class ConditionsOfImages(NamedTuple):
    """Conditions that samples of a preview cycle through, and the images that have them."""

    given: Given
    images: NDArray[Any]
    """[n, H, W, C], as stored."""


def conditions_of_images(config: Config, held_out: ImageSet, train: ImageSet) -> ConditionsOfImages | None:
    """Return the conditions of held-out images, or training ones, for a preview; None for a run with classes alone."""
    if not config.conditions.columns:
        return None
    images = held_out if len(held_out) else train
    # An image that cannot be decoded is replaced by another one, whose conditions are then taken.
    pixels, rows = take_with_rows(images.pixels, np.asarray(evenly_spaced(len(images), config.preview.images)))
    given = config.conditions.rows(images.columns.values(), rows)
    return ConditionsOfImages(given, pixels.transpose(0, 2, 3, 1))


class _AutoencoderPreviews(Previews):
    """Previews of an autoencoder in training: reconstructions of held-out images, from the mean of the latents."""

    final_name = "reconstructions"

    @staticmethod
    def export(folder: RunFolder, config: Config) -> None:
        """Write the EMA weights of the newest checkpoint as an autoencoder to train on."""
        network = build_network(config)
        assert isinstance(network, AutoencoderModel)
        saved = checkpoint.find_checkpoint(folder.checkpoints, None)
        load_weights(saved.folder, "ema", network)
        described = save_autoencoder(folder.path / AUTOENCODER_FOLDER, network)
        measured = "" if saved.held_out_loss is None else f", held-out error {saved.held_out_loss:.4g}"
        say(
            f"  autoencoder {described.folder} of step {saved.step:,}{measured}: "
            f"unfog train SOURCE --autoencoder {folder.path}"
        )

    def seconds_per_sample(self) -> None:
        return None

    def find_overfitting(self, record: RunRecord, dataset: Dataset) -> None:
        return None

    def preview(self) -> Preview:
        """Return held-out images, each row over the row of its reconstructions."""
        return Preview(self._reconstruction_grid(self.config.preview.images))

    def final_image(self) -> Pixels:
        return self._reconstruction_grid(4 * _COLUMNS)

    def held_out_loss(self) -> dict[str, Any]:
        """Return the reconstruction error of held-out images, as training computes it, and their mean PSNR in dB."""
        if self.held_out is None:
            return {}
        loss = build_loss(self.config)
        assert isinstance(loss, AutoencoderLoss)
        assert isinstance(self.held_out, HeldOut)  # an autoencoder is not trained in buckets
        x0 = self.held_out.x0
        y = self._reconstruct(x0)
        costs = torch.cat([loss.reconstruction(a - b) for a, b in zip(torch.split(x0, 64), torch.split(y, 64))])
        stored = map(self.config.image_format.to_stored, (x0, y))
        return {"held_out_loss": float(costs.mean()), "psnr": float(psnr(*stored).mean())}

    def _reconstruction_grid(self, count: int) -> Pixels:
        if self.held_out is None:
            return np.full((8, 8, 3), 255, np.uint8)  # a small data set holds nothing out: a blank image
        assert isinstance(self.held_out, HeldOut)  # an autoencoder is not trained in buckets
        x0 = self.held_out.x0[:count]
        originals, reconstructions = map(self.config.image_format.to_view, (x0, self._reconstruct(x0)))
        return grid_of_pairs(originals, reconstructions, _COLUMNS)

    def _reconstruct(self, x0: Tensor) -> Tensor:
        network = self.state.model
        assert isinstance(network, AutoencoderModel)

        @torch.inference_mode()
        def compute(batch: int) -> Tensor:
            parts = torch.split(x0, min(batch, autoencoder_batch(self.config.image_format.pixels)))
            return torch.cat([network.decode(network.encode(part)) for part in parts])

        return self.with_ema_weights(len(x0), compute)


_PREVIEWS: dict[type[RunTask], type[Previews]] = {DiffusionTask: Previews, AutoencoderTask: _AutoencoderPreviews}
