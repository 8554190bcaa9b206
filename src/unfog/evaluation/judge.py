"""A judge: a small network that reads the conditions of images from them, trained on training images alone.

It is trained on the CPU by one thread from a fixed seed, in seconds to a minute, whatever device a run uses. So it is a
function of the images and their columns alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.evaluation.judged_kinds import JUDGED, grid_of
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.image_format import ImageFormat

VERSION = 1
"""Of the network and its training; judges of another version are trained again."""
_VALUES = 2**25  # of all training images in memory
_IMAGES = 20_000  # training images, at most
_BATCH, _EPOCHS, _STEPS = 64, 30, (200, 600)  # steps at least and at most
_RATE, _DECAY, _WARM = 3e-3, 0.02, 0.1
_WIDTH = 32
_PIXEL_WIDTH, _APART = 24, (1, 2, 4)  # of the layers that read masks: they see 32 pixels a side
_LARGEST = 10.0  # deviations of a channel, beyond which values of broken images are cut off


Batch: TypeAlias = tuple[NDArray[Any], Sequence[NDArray[Any]]]
"""Stored images [n, C, H, W], and the values [n, …] of each column of a judge."""


class _Network(nn.Module):
    """Images [B, C, H, W], scaled to a grid and standardised -> outputs [B, K] of all columns."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int, grid: tuple[int, int], facts: Sequence[ColumnFacts]):
        super().__init__()
        outputs = sum(JUDGED[one.kind].outputs(one) for one in facts if not JUDGED[one.kind].of_pixels)
        labels = sum(len(one.categories) for one in facts if JUDGED[one.kind].of_pixels)
        self.grid = grid
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("deviation", torch.ones(channels, 1, 1))
        widths = (channels, _WIDTH, 2 * _WIDTH, 3 * _WIDTH)
        layers = list[nn.Module]()
        for before, after in pairwise(widths):
            # Of a batch and not of an image, as the brightness of an image may be what is asked.
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        # A grid of places, as the position in an image may be what is asked.
        places = [min(4, -(-side // 4)) for side in grid]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d((places[0], places[1])), nn.Flatten(), nn.Dropout(0.1))
        self.hidden = nn.Linear(widths[-1] * places[0] * places[1], 4 * _WIDTH)
        self.last = nn.Linear(4 * _WIDTH, max(1, outputs))
        # By number, as the name of a column may not be allowed for a module.
        readers = {f"{i}": JUDGED[one.kind].reader(one) for i, one in enumerate(facts)}
        self.readers = nn.ModuleDict({name: one for name, one in readers.items() if one is not None})
        self.outputs = outputs
        self.pixels = _PixelReader(channels, labels) if labels else None

    def scale(self, x0: Tensor) -> Tensor:
        """Return model values of any size, scaled to the grid by means of those that are known; NaN without any."""
        known = x0.isfinite()
        if x0.shape[2:] == self.grid:
            return x0.masked_fill(~known, math.nan)
        share = F.adaptive_avg_pool2d(known.float(), self.grid)
        return F.adaptive_avg_pool2d(x0.masked_fill(~known, 0), self.grid) / share  # 0 / 0 is NaN

    def standardise(self, scaled: Tensor) -> Tensor:
        """Return values with a mean of 0 and a deviation of 1 in each channel; unknown ones have the mean."""
        return ((scaled - self.mean) / self.deviation).clamp(-_LARGEST, _LARGEST).nan_to_num(0.0)

    def forward(self, standard: Tensor) -> Tensor:
        pixels = [] if self.pixels is None else [self.pixels(standard).flatten(1)]
        if pixels and not self.outputs:  # masks alone
            alone: Tensor = pixels[0]
            return alone
        return torch.cat([self.last(F.relu(self.hidden(self.body(standard)))), *pixels], 1)


class _PixelReader(nn.Module):
    """Images [B, C, h, w] -> numbers of `labels` labels for each pixel, [B, labels, h, w]."""

    def __init__(self, channels: int, labels: int):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, _PIXEL_WIDTH, 4, 2, 1), nn.BatchNorm2d(_PIXEL_WIDTH), nn.ReLU()]
        for apart in _APART:  # at half the size, which takes a quarter of the time
            layers += [nn.Conv2d(_PIXEL_WIDTH, _PIXEL_WIDTH, 3, padding=apart, dilation=apart)]
            layers += [nn.BatchNorm2d(_PIXEL_WIDTH), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(_PIXEL_WIDTH, 4 * labels, 1), nn.PixelShuffle(2))

    def forward(self, standard: Tensor) -> Tensor:
        height, width = standard.shape[2:]
        found: Tensor = self.layers(F.pad(standard, (0, width % 2, 0, height % 2)))
        return found[:, :, :height, :width]


@dataclass(frozen=True, eq=False)
class Judge:
    """A trained judge of some columns of images of a format."""

    facts: tuple[ColumnFacts, ...]
    """Masks come last."""
    format: ImageFormat
    network: _Network

    @classmethod
    def untrained(cls, facts: Sequence[ColumnFacts], format: ImageFormat) -> Judge:
        """Return a judge with fresh weights of a fixed seed. Every column is of a kind in `JUDGED`."""
        grid = grid_of(format.height, format.width)
        # Those of pixels come last, as the network has them.
        ordered = sorted(facts, key=lambda one: JUDGED[one.kind].of_pixels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = _Network(format.channels, grid, ordered)
        return cls(tuple(ordered), format, network.eval())

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width at which it sees images."""
        return self.network.grid

    @property
    def most_images(self) -> int:
        """Number of training images that it is trained on, at most."""
        return min(_IMAGES, max(1000, _VALUES // (self.format.channels * math.prod(self.grid))))

    def images_seen(self, count: int) -> int:
        """Return how many images its training on `count` ones passes through the network."""
        return _steps(count) * min(_BATCH, count)

    def reader(self, column: int) -> nn.Module | None:
        """Return the network that reads the values of a column, if its kind has one: see `JudgedKind.reader`."""
        return dict(self.network.readers.items()).get(f"{column}")

    def weights(self) -> dict[str, Tensor]:
        """Return its tensors by name, to store."""
        return {name: each.contiguous() for name, each in self.network.state_dict().items()}

    def load(self, weights: dict[str, Tensor]) -> bool:
        """Take stored tensors; return False, with fresh weights, if they are not of such a judge."""
        own = self.network.state_dict()
        fits = weights.keys() == own.keys() and all(
            each.shape == own[name].shape and each.dtype == own[name].dtype and bool(each.isfinite().all())
            for name, each in weights.items()
        )
        if fits:
            self.network.load_state_dict(weights)
        return fits

    def train(
        self, batches: Iterable[Batch], flip: bool = False, progress: Callable[[int, int], None] = lambda i, n: None
    ) -> None:
        """Train on images and their values. With `flip`, mirror images have the same values.

        `progress` is called with the number of finished steps, and of all.
        """
        scaled, values = list[Tensor](), list[Sequence[NDArray[Any]]]()
        for stored, own in batches:
            scaled.append(self._scale(stored))
            values.append(own)
        x = torch.cat(scaled)
        self._set_statistics(x)
        x = self.network.standardise(x)
        targets = [
            JUDGED[one.kind].target(one, np.concatenate(each))
            for one, each in zip(self.facts, zip(*values), strict=True)
        ]
        count, batch = len(x), min(_BATCH, len(x))
        steps = _steps(count)
        # Dropout draws from the global generator, which is the caller's.
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), _one_thread():
            torch.manual_seed(0)
            order = torch.cat([torch.randperm(count) for _ in range(-(-steps * batch // count))])
            optimizer = torch.optim.AdamW(self.network.parameters(), _RATE, weight_decay=_DECAY)
            self.network.train()
            for step in range(steps):
                rows = order[step * batch : (step + 1) * batch]
                images, asked = x[rows], [each[rows] for each in targets]
                if flip:
                    other = torch.rand(batch, 1, 1, 1) < 0.5
                    images = torch.where(other, images.flip(3), images)
                    mirrored = [JUDGED[one.kind].mirrored(one, each) for one, each in zip(self.facts, asked)]
                    asked = [torch.where(other[:, 0, 0], new, old) for new, old in zip(mirrored, asked)]
                for group in optimizer.param_groups:
                    group["lr"] = _RATE * _schedule(step / steps)
                optimizer.zero_grad()
                self._loss(self.network(images), asked).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                progress(step + 1, steps)
        self.network.eval()

    def _scale(self, stored: NDArray[Any]) -> Tensor:
        return self.network.scale(self.format.to_model(torch.from_numpy(np.ascontiguousarray(stored))))

    def _set_statistics(self, scaled: Tensor) -> None:
        """Set mean and deviation of each channel over all known values."""
        for i in range(self.format.channels):
            known = scaled[:, i][scaled[:, i].isfinite()].double()
            if len(known):
                deviation = float(known.std(unbiased=False))
                self.network.mean[i] = float(known.mean())
                self.network.deviation[i] = deviation if deviation > 1e-6 else 1.0

    def _loss(self, outputs: Tensor, targets: Sequence[Tensor]) -> Tensor:
        total = outputs.sum() * 0.0
        for i, (one, output, target) in enumerate(zip(self.facts, self._split(outputs), targets, strict=True)):
            known = target.isfinite().all(1)
            if known.any():
                reader = self.reader(i)
                read = target[known] if reader is None else reader(target[known])
                total = total + JUDGED[one.kind].loss(output[known], read)
        return total

    def _split(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return torch.split(outputs, [JUDGED[one.kind].outputs(one) for one in self.facts], 1)

    @torch.inference_mode()
    def read(self, images: Iterable[NDArray[Any]]) -> list[Tensor]:
        """Return its readings of each column, [N, …], of parts [n, C, H, W] of stored images of any size."""
        found = list[list[Tensor]]()
        with _one_thread():
            for part in images:
                outputs = self._split(self.network(self.network.standardise(self._scale(part))))
                found.append([JUDGED[one.kind].read(one, each).clone() for one, each in zip(self.facts, outputs)])
        return [torch.cat(each) for each in zip(*found)]


def _steps(count: int) -> int:
    return min(max(_STEPS[0], _EPOCHS * count // _BATCH), _STEPS[1])


@contextmanager
def _one_thread() -> Iterator[None]:
    # The network is too small for several: beside other programs, waiting for each other took them seven times as long.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _schedule(share: float) -> float:
    """Return the factor on the learning rate at a share of the training: up along a line, then down along a cosine."""
    if share < _WARM:
        return (share + 0.01) / (_WARM + 0.01)
    return 0.5 + 0.5 * math.cos(math.pi * (share - _WARM) / (1 - _WARM))
