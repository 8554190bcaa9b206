"""Representations of images for the network: pixels, or latents of an autoencoder. No torch until tensors come in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unfog.data.settings import Data
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import AutoencoderFolder, Latents, check_multiple
from unfog.settings import is_auto
from unfog.values.image_format import sides_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    # From stored values to (network input, augmentation condition or None).
    from unfog.data.augmentation import Moving as Transform
    from unfog.data.packs.latent_cache import Normalise


def _probable_sides(data: Data) -> tuple[int, int]:
    return (64, 64) if is_auto(data, "size") else sides_of(data.size)


@dataclass(frozen=True)
class Representation(ABC):
    """The form in which images are stored for training and reach the network: `PixelSpace` or `LatentSpace`."""

    data: Data

    name: ClassVar[str]
    """In messages."""
    channels_from: ClassVar[str]
    """Beginning of a sentence about the number of channels, which follows."""
    augmentable: ClassVar[bool]
    """True if `data.augment` has an effect."""
    no_bits: ClassVar[str]
    """Why bits per pixel cannot be measured; "" if they can."""
    one_size: ClassVar[str]
    """Reason why images of several sizes cannot be trained on, and what to do; "" if they can."""
    pictures_only: ClassVar[str]
    """Reason why only pictures of 8 bits can be trained on; "" if other values can."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the network's input."""

    @abstractmethod
    def probable_shape(self) -> tuple[int, int, int]:
        """Return (C, H, W) of the network's input as far as it is known before images are read, else usual sizes."""

    @property
    @abstractmethod
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of an image in the data stream."""

    @property
    @abstractmethod
    def factor(self) -> int:
        """Pixels across one position of the network's input."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """Missing part of the stored settings, as a sentence; "" if they are complete."""

    @property
    @abstractmethod
    def folders(self) -> tuple[Path, ...]:
        """Folders beside the images and the run that every rank reads."""

    @abstractmethod
    def check(self) -> int:
        """Return `factor` before images are read, when the stored settings may be incomplete.

        RequestError if there is no such autoencoder, or it does not suit the images or their augmentation.
        """

    @abstractmethod
    def autoencoder(self) -> AutoencoderFolder | None:
        """Open the description of the autoencoder; None for pixels. RequestError if it cannot be used."""

    @abstractmethod
    def folder_in(self, own: Path) -> str:
        """Return the `autoencoder_folder` of a run whose copy of the autoencoder, if any, is at `own`."""

    @abstractmethod
    def cache_bytes(self, images: int) -> int:
        """Return the bytes that so many images take in the cache beside the decoded ones."""

    @abstractmethod
    def scaling(self) -> dict[str, Any] | None:
        """Return the map from network output to the autoencoder's latents, "mean" and "scale" by channel, if any."""

    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """Return the facts that map network inputs to images; equal for runs that can guide each other."""

    @abstractmethod
    def scale_note(self) -> str:
        """Return how the input gets the deviation that the objective assumes; "" if it has that of the images."""

    @abstractmethod
    def summary(self) -> str:
        """Return a short description for a model card; "" for pixels."""

    @abstractmethod
    def sampler(self, sampler: Sampler) -> Sampler:
        """Return the sampler as it can be used: without clipping where values are not limited to [-1, 1]."""

    @abstractmethod
    def random(self, count: int, rng: np.random.Generator) -> NDArray[Any]:
        """Return `count` random images in the format of the data stream."""

    @abstractmethod
    def zeros(self, images: int) -> Tensor:
        """Return zeros in the format of the data stream."""

    @abstractmethod
    def to_model(self, stored: Tensor) -> Tensor:
        """Convert a batch of the data stream to network input float32 [B, C, H, W], without random augmentation."""

    @abstractmethod
    def augmentation(self) -> Transform:
        """Return the random transform of training, from a batch of the data stream to network input."""


@dataclass(frozen=True)
class PixelSpace(Representation):
    """The network sees pixels: the stream holds stored values [B, C, H, W]."""

    name = "pixels"
    channels_from = "data.channels ="
    augmentable = True
    one_size = pictures_only = ""
    factor = 1
    problem = ""
    folders = ()

    @property
    def no_bits(self) -> str:  # type: ignore[override]
        if self.data.image_format.is_picture:
            return ""
        return f"bits are of values of 8 bits, and these images are {self.data.image_format}; held_out compares losses"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.data.image_format.shape

    def probable_shape(self) -> tuple[int, int, int]:
        return self.data.channels or 3, *_probable_sides(self.data)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape

    def check(self) -> int:
        return self.factor

    def autoencoder(self) -> None:
        return None

    def folder_in(self, own: Path) -> str:
        return ""

    def cache_bytes(self, images: int) -> int:
        return 0

    def scaling(self) -> None:
        return None

    def identity(self) -> tuple[object, ...]:
        return ()

    def scale_note(self) -> str:
        return ""

    def summary(self) -> str:
        return ""

    def sampler(self, sampler: Sampler) -> Sampler:
        return sampler if self.data.image_format.values.bounded else replace(sampler, clip=False)

    def random(self, count: int, rng: np.random.Generator) -> NDArray[Any]:
        format, dtype = self.data.image_format, self.data.image_format.dtype
        if not format.values.bounded:
            import torch

            x0 = rng.standard_normal((count, *self.stored_shape), dtype="float32") / 2
            stored: NDArray[Any] = format.to_stored(torch.from_numpy(x0)).numpy()
            return stored
        return rng.integers(0, 256, (count, *self.stored_shape), dtype="uint8").astype(dtype, copy=False)

    def zeros(self, images: int) -> Tensor:
        import torch

        return torch.zeros((images, *self.stored_shape), dtype=self.data.image_format.values.torch_type)

    def to_model(self, stored: Tensor) -> Tensor:
        return self.data.image_format.to_model(stored)

    def augmentation(self) -> Transform:
        from unfog.data.augmentation import Augment

        return Augment.from_settings(self.data)


@dataclass(frozen=True)
class LatentSpace(Representation):
    """The network sees latents: the stream holds float16 [B, K, C, H, W], with K = 2 if images are mirrored."""

    folder: str
    """Of the autoencoder."""
    latents: Latents
    """Its format, and the statistics of the training images."""
    sigma_data: float
    """Standard deviation of the network's input."""

    name = "latents"
    channels_from = "the autoencoder's latents have"
    augmentable = False
    # A bound on latents says nothing about pixels: the autoencoder gives no density of them.
    no_bits = "bits are of pixels, and the network was trained on latents; held_out compares losses"
    one_size = "latents need images of one size; omit --aspect, or train on pixels: omit --autoencoder"
    pictures_only = "autoencoders take pictures"

    @property
    def shape(self) -> tuple[int, int, int]:
        _, height, width = self.data.image_format.shape
        return self.latents.channels, height // self.latents.factor, width // self.latents.factor

    def probable_shape(self) -> tuple[int, int, int]:
        height, width = (max(1, side // (self.latents.factor or 8)) for side in _probable_sides(self.data))
        return self.latents.channels or 4, height, width

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (1 + self.data.flip, *self.shape)

    @property
    def factor(self) -> int:
        return self.latents.factor

    @property
    def problem(self) -> str:
        complete = self.latents.factor and self.latents.channels
        return "" if complete else "it names an autoencoder_folder, and has no [latents], which training writes"

    @property
    def folders(self) -> tuple[Path, ...]:
        return (Path(self.folder),)

    def check(self) -> int:
        described, data = self.autoencoder(), self.data
        for name in ("jitter", "crop", "augment"):
            if getattr(data, name):
                raise RequestError(
                    f"data.{name} = {getattr(data, name)} changes pixels, but latents are encoded once, from "
                    "unchanged images; omit it, or train without --autoencoder (--flip is possible)"
                )
        if data.wrapped:
            raise RequestError(
                f"wrap = {data.wrap} joins the edges of pixels, and the autoencoder in {self.folder} pads with zeros, "
                "so that its images would have a seam; omit --wrap, or train without --autoencoder"
            )
        if not is_auto(data, "channels") and data.channels != described.image_channels:
            raise RequestError(
                f"data.channels = {data.channels}, but the autoencoder in {self.folder} is for "
                f"images of {described.image_channels}; omit --data.channels, or use another autoencoder"
            )
        if not is_auto(data, "size"):
            check_multiple(data.size, described.factor)
        return described.factor

    def autoencoder(self) -> AutoencoderFolder:
        return AutoencoderFolder.open(self.folder)

    def folder_in(self, own: Path) -> str:
        # The copy in the run, as the run may have been moved, and the folder that was named be gone or trained further.
        there = not own.is_symlink() and (own / "config.json").is_file()
        return str(own.absolute()) if there else self.folder

    def cache_bytes(self, images: int) -> int:
        return 2 * images * math.prod(self.stored_shape)  # float16

    def scaling(self) -> dict[str, Any]:
        scale = [deviation / self.sigma_data for deviation in self.latents.deviation]
        return {"mean": list(self.latents.mean), "scale": scale}

    def identity(self) -> tuple[object, ...]:
        return self.latents.sha256, self.latents.mean, self.latents.deviation, self.sigma_data

    def scale_note(self) -> str:
        return f"the network sees latents, which are scaled to the configured {self.sigma_data:g}"

    def summary(self) -> str:
        return f"latents of {self.factor} pixels a side"

    def sampler(self, sampler: Sampler) -> Sampler:
        return replace(sampler, clip=False)

    def random(self, count: int, rng: np.random.Generator) -> NDArray[Any]:
        return rng.standard_normal((count, *self.stored_shape), dtype="float32").astype("float16")

    def zeros(self, images: int) -> Tensor:
        import torch

        return torch.zeros((images, *self.stored_shape), dtype=torch.float16)

    def to_model(self, stored: Tensor) -> Tensor:
        return self.normalise.forward(stored[:, 0])

    def augmentation(self) -> Transform:
        return self.normalise

    @cached_property
    def normalise(self) -> Normalise:
        """The map between the autoencoder's latents and the network's input."""
        from unfog.data.packs.latent_cache import Normalise

        return Normalise(self.latents.mean, self.latents.deviation, self.sigma_data, self.data.flip)
