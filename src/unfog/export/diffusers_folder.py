"""Folders that diffusers wrote, with a network alone or a pipeline: their settings, and where their weights are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from unfog.errors import RequestError
from unfog.files.safe_files import read_file

_KINDS = ("UNet2DModel", "DiTTransformer2DModel")
_CONFIG, _WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".json")
_LARGEST_JSON = 2**20


class DiffusersFolder(NamedTuple):
    """A network of diffusers on disk, and its scheduler. Only JSON and safetensors are read; nothing is unpickled."""

    kind: str
    """One of _KINDS."""
    config: dict[str, Any]
    """Its config.json."""
    weights: Path
    """The file of its weights."""
    scheduler: dict[str, Any] | None
    """Settings of the scheduler beside it; None if there are none."""
    pipeline: Path
    """The folder of the whole pipeline, or that of the network."""

    @classmethod
    def open(cls, folder: Path) -> DiffusersFolder:
        """Read the settings of a network that `save_pretrained` wrote, alone or within a pipeline.

        RequestError if it is none that is known, or its weights are in a pickle or in several files.
        """
        places = (folder / "unet", folder / "transformer", folder)
        model = next((place for place in places if (place / _CONFIG).is_file()), None)
        if model is None:
            raise RequestError(
                f"{folder} is neither a run nor a folder of diffusers: it has no config.toml, {_CONFIG} or "
                f"unet/{_CONFIG}; give a run or such a folder"
            )
        config = _read_json(model / _CONFIG)
        kind = str(config.get("_class_name", _KINDS[0]))
        if kind not in _KINDS:
            why = ": that one is conditioned on text" if kind == "UNet2DConditionModel" else ""
            raise RequestError(f"{model} holds a {kind!r}; only a {' or '.join(_KINDS)} can be started from{why}")
        weights = model / _WEIGHTS
        if not weights.is_file():
            there = sorted(path.name for path in model.iterdir() if path.suffix in _OTHER_WEIGHTS)
            raise RequestError(
                f"{model} has no {_WEIGHTS} ({', '.join(there)}); load it with diffusers in an environment of its own, "
                "and write it by save_pretrained(FOLDER, safe_serialization=True, max_shard_size='100GB'): pickles can "
                "run code"
            )
        # A pipeline's scheduler is in a folder beside the network's; some models were saved with it in their own.
        places = (folder / "scheduler", folder.parent / "scheduler", folder)
        settings = next((path for place in places if (path := place / "scheduler_config.json").is_file()), None)
        return cls(kind, config, weights, _read_json(settings) if settings else None, folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file(path, path.parent, _LARGEST_JSON, follow=True))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read: {error}; write it again with diffusers") from None
    return value
