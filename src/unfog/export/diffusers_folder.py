"""Folders that diffusers wrote: a model, or a pipeline with one in it. Only JSON and safetensors are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from unfog.errors import RequestError

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
LARGEST_JSON = 2**20


class Folder(NamedTuple):
    """What is in it."""

    config: dict[str, Any]
    """Of the UNet2DModel."""
    weights: Path
    """The file of its weights."""
    scheduler: dict[str, Any] | None
    """Settings of the scheduler beside it; None if there are none."""


def read_folder(folder: Path) -> Folder:
    """Read the settings of a `UNet2DModel` that `save_pretrained` wrote, alone or within a pipeline.

    Raises:
        RequestError: it is none, has weights that only a pickle holds, or in several files.
    """
    model = folder / "unet" if (folder / "unet" / CONFIG).is_file() else folder
    if not (model / CONFIG).is_file():
        raise RequestError(
            f"{folder} is no run and no folder of diffusers, as it has neither config.toml nor {CONFIG} nor "
            f"unet/{CONFIG}; give one of those"
        )
    config = _json(model / CONFIG)
    kind = config.get("_class_name", "UNet2DModel")
    if kind != "UNet2DModel":
        raise RequestError(f"{model} holds a {kind!r}; only a UNet2DModel can be started from")
    weights = model / WEIGHTS
    if not weights.is_file():
        there = sorted(
            path.name for path in model.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".json")
        )
        raise RequestError(
            f"{model} has no {WEIGHTS} ({', '.join(there)}); load it with diffusers in an environment of its own, and "
            "write it by save_pretrained(FOLDER, safe_serialization=True, max_shard_size='100GB'): pickles can run code"
        )
    beside = (folder / "scheduler", folder.parent / "scheduler", folder)
    settings = next((path for at in beside if (path := at / "scheduler_config.json").is_file()), None)
    return Folder(config, weights, _json(settings) if settings else None)


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
        if len(data) > LARGEST_JSON:
            raise ValueError(f"over {LARGEST_JSON:,} bytes")
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read: {error}; write it anew with diffusers") from None
    return value
