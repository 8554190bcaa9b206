"""CLIP and SigLIP from a local folder: images and texts as vectors whose cosine says how well they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.device.copies import to_device
from unfog.models.pretrained.folder import PretrainedFolder

_CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
_TOWERS = {f"{kind}_{part}_model": part for kind in _CLASSES for part in ("text", "vision")}
_LARGEST_SIDE = 1024  # pixels that a model reads
_LARGEST_NUMBER = 1e6  # of a mean or a deviation of values from 0 to 1
_AT_ONCE = 32  # images or texts
# Mean and deviation of each channel of 0 to 1, as published, if the folder does not have them.
_USUAL = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


class ImageTextModel:
    """A frozen CLIP or SigLIP.

    Args:
        path: its folder.
        device: on which it computes.
        setting: the setting that names the folder, for errors.

    Raises:
        RequestError: transformers is not installed, or the folder has no such model, or one half of it.
    """

    def __init__(self, path: str, device: torch.device, setting: str):
        folder = PretrainedFolder(setting, Path(path).expanduser().resolve(), "a CLIP or SigLIP model")
        folder.check_installed()
        self._kind, config = folder.config((*_CLASSES, *_TOWERS))
        if self._kind in _TOWERS:
            other = {"text": "images", "vision": "texts"}[_TOWERS[self._kind]]
            raise folder.refused(f"it is the encoder of {_TOWERS[self._kind]} alone, without that of {other}")
        for part, said in (("vision_config", "images"), ("text_config", "texts")):
            if not isinstance(config.get(part), dict):
                raise folder.refused(f"its config.json has no {part}, so it has no encoder of {said}")
        self.digest = folder.digest()
        """sha256 of its files."""
        self.name = folder.path.name
        model, self._tokenizer = folder.load(_CLASSES[self._kind])
        self._model = cast(Any, model.to(device))  # as transformers gives its models no types
        self._device = device
        sizes = self._model.config
        self._side, self._length = sizes.vision_config.image_size, sizes.text_config.max_position_embeddings
        if not 1 <= self._side <= _LARGEST_SIDE:
            raise folder.refused(f"its images are of {self._side} pixels, and we read up to {_LARGEST_SIDE}")
        self._mean, self._deviation, self._crops = self._preprocessing(folder)

    def _preprocessing(self, folder: PretrainedFolder) -> tuple[Tensor, Tensor, bool]:
        """Return mean and deviation [3, 1, 1] of channels, and whether images are cropped to a square."""
        stored = folder.read_json("preprocessor_config.json", optional=True)
        mean, deviation = (
            _three(stored.get(name), usual) for name, usual in zip(("image_mean", "image_std"), _USUAL[self._kind])
        )
        if mean is None or deviation is None or min(deviation) <= 0:
            raise folder.refused("image_mean and image_std in its preprocessor_config.json are not three numbers each")
        crops = bool(stored.get("do_center_crop", self._kind == "clip"))
        moved = [torch.tensor(each, device=self._device).view(3, 1, 1) for each in (mean, deviation)]
        return moved[0], moved[1], crops

    @torch.inference_mode()
    def images(self, pixels: Tensor) -> Tensor:
        """Return the vectors of images, uint8 [N, C, H, W] of one or three channels: float32 [N, D] of length 1."""
        return torch.cat([*self._images(pixels)])

    def _images(self, pixels: Tensor) -> Iterator[Tensor]:
        for part in torch.split(pixels, _AT_ONCE):
            x = to_device(part, self._device).float().expand(-1, 3, -1, -1)
            x = (self._fitted(x) / 255 - self._mean) / self._deviation
            yield _unit(self._model.get_image_features(pixel_values=x))

    def _fitted(self, x: Tensor) -> Tensor:
        """Return float images of 0 to 255 at the size that the model reads, as its image processor does."""
        side, (height, width) = self._side, x.shape[2:]
        size = (side, side)
        if self._crops:
            short = min(height, width)
            size = (int(side * height / short), int(side * width / short))
        if x.shape[2:] != size:
            x = F.interpolate(x, size=size, mode="bicubic", antialias=True).round().clamp(0, 255)
        top, left = (x.shape[2] - side) // 2, (x.shape[3] - side) // 2
        return x[:, :, top : top + side, left : left + side]

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of texts, float32 [N, D] of length 1. A text longer than the model reads is cut."""
        found = list[Tensor]()
        # SigLIP was trained on texts that all have the same length, and without a mask.
        padded = self._kind == "siglip"
        for first in range(0, len(texts), _AT_ONCE):
            how = {"padding": "max_length" if padded else True, "truncation": True, "return_tensors": "pt"}
            inputs = self._tokenizer(list(texts[first : first + _AT_ONCE]), max_length=self._length, **how)
            given = {} if padded else {"attention_mask": inputs["attention_mask"].to(self._device)}
            found.append(_unit(self._model.get_text_features(input_ids=inputs["input_ids"].to(self._device), **given)))
        return torch.cat(found)


def _three(value: Any, usual: tuple[float, ...]) -> tuple[float, ...] | None:
    """Return three finite numbers, `usual` if there is no value; None if it is something else."""
    if value is None:
        return usual
    if not isinstance(value, list) or len(value) != 3:
        return None
    fits = all(isinstance(one, (int, float)) and -_LARGEST_NUMBER < one < _LARGEST_NUMBER for one in value)
    return tuple(map(float, value)) if fits else None


def _unit(output: Any) -> Tensor:
    """Return the vectors of an output, on the CPU. transformers 5 returns them among others."""
    return F.normalize(getattr(output, "pooler_output", output).float()).cpu()
