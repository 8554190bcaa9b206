"""Convert the U-Net to diffusers' `UNet2DModel` and back.

Configuration and weights are only renamed; settings without an equivalent raise errors. Nothing here imports diffusers:
the caller runs `UNet2DModel(**config).load_state_dict(state)`. `num_class_embeds` is our `num_classes + 1`, as the null
class has the last row; an exported network therefore always needs labels, and `num_classes` hides the class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfog.errors import RequestError
from unfog.models.settings import Architecture, UNet
from unfog.values.image_format import Size, sides_of

# Defaults of diffusers 0.42 for keys that a configuration leaves out.
_DEFAULTS: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (224, 448, 672, 896),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "add_attention": True,
    "attention_head_dim": 8,
    "attn_norm_num_groups": None,
    "dropout": 0.0,
    "norm_num_groups": 32,
    "norm_eps": 1e-5,
    "resnet_time_scale_shift": "default",
    "freq_shift": 0,
    "flip_sin_to_cos": True,
    "downsample_padding": 1,
    "num_class_embeds": None,
}
# Settings that both have, by other names: theirs -> ours.
_SETTINGS = {
    "layers_per_block": "blocks",
    "add_attention": "mid_attention",
    "dropout": "dropout",
    "norm_num_groups": "norm_groups",
    "norm_eps": "norm_eps",
    "freq_shift": "freq_shift",
    "flip_sin_to_cos": "flip_sin_to_cos",
    "downsample_padding": "downsample_padding",
}
# Settings of diffusers that our network has in one form only -> the values that are equal to it.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "center_input_sample": (False,),
    "time_embedding_type": ("positional",),
    "time_embedding_dim": (None,),
    "mid_block_type": ("UNetMidBlock2D",),
    "mid_block_scale_factor": (1,),
    "downsample_type": ("conv",),
    "upsample_type": ("conv",),
    "act_fn": ("silu", "swish"),
    "class_embed_type": (None,),
    "resnet_time_scale_shift": ("default", "scale_shift"),
}
# Settings that change no output.
_WITHOUT_EFFECT = {"sample_size", "num_train_timesteps"}

# Names of modules, ours and theirs; "#" stands for an index.
_RESIDUAL = {name: name for name in ("norm1", "conv1", "norm2", "conv2")}
_RESIDUAL |= {"condition": "time_emb_proj", "shortcut": "conv_shortcut"}
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0"}
# Before diffusers 0.11; google/ddpm-cifar10-32 and others are still saved with them.
_OLD_ATTENTION = {"q": "query", "k": "key", "v": "value", "out": "proj_attn"}
_OLD_NAMES: dict[str, str] = {}  # theirs -> ours
_NAMES = {
    "conv_in": "conv_in",
    "time_embedding.0": "time_embedding.linear_1",
    "time_embedding.2": "time_embedding.linear_2",
    "class_embedding": "class_embedding",
    "down.#.resample.conv": "down_blocks.#.downsamplers.0.conv",
    "up.#.resample.conv": "up_blocks.#.upsamplers.0.conv",
    "norm_out": "conv_norm_out",
    "conv_out": "conv_out",
}
for _ours, _theirs in {"down.#.blocks": "down_blocks.#", "up.#.blocks": "up_blocks.#", "mid": "mid_block"}.items():
    _NAMES |= {f"{_ours}.#.residual.{a}": f"{_theirs}.resnets.#.{b}" for a, b in _RESIDUAL.items()}
    _NAMES |= {f"{_ours}.#.attention.{a}": f"{_theirs}.attentions.#.{b}" for a, b in _ATTENTION.items()}
    _OLD_NAMES |= {f"{_theirs}.attentions.#.{b}": f"{_ours}.#.attention.{a}" for a, b in _OLD_ATTENTION.items()}


def sample_size(size: Size) -> int | list[int]:
    """Return diffusers' setting of this name for inputs of this size: the side, or height and width."""
    return size if isinstance(size, int) else list(sides_of(size))


class Network(NamedTuple):
    """A network to export or import: `build_model(settings, image_channels, num_classes).load_state_dict(state)`."""

    settings: Architecture
    image_channels: int
    num_classes: int
    state: dict[str, Tensor]
    out_channels: int | None = None

    def to_unet2d(self, size: Size) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return `UNet2DModel`'s configuration and state dict for `network` on images of this size.

        Raises RequestError if the network or a setting has no equivalent.
        """
        settings = self.settings
        as_is = "the weights in RUN/checkpoints are safetensors already"
        if not isinstance(settings, UNet):
            raise RequestError(f"network = {settings.kind} has no equivalent in UNet2DModel, only unet has; {as_is}")
        if settings.time_scale != 1:
            raise RequestError(
                f"time_scale = {settings.time_scale} has no equivalent in UNet2DModel, which embeds the timestep "
                f"as it is; {as_is}"
            )
        config = {
            "sample_size": sample_size(size),
            "in_channels": self.image_channels,
            "out_channels": self.out_channels or self.image_channels,
            "block_out_channels": list(settings.channels),
            "down_block_types": ["AttnDownBlock2D" if attends else "DownBlock2D" for attends in settings.attention],
            "up_block_types": ["AttnUpBlock2D" if attends else "UpBlock2D" for attends in reversed(settings.attention)],
            "attention_head_dim": settings.head_channels or None,
            # Left out, scale_shift would take the normalisation off the attention in the middle, and there only.
            "attn_norm_num_groups": settings.norm_groups if settings.scale_shift else None,
            "resnet_time_scale_shift": "scale_shift" if settings.scale_shift else "default",
            "num_class_embeds": self.num_classes + 1 if self.num_classes else None,
            **{theirs: getattr(settings, ours) for theirs, ours in _SETTINGS.items()},
        }
        return config, _to_unet2d_state(self.state)

    @classmethod
    def from_unet2d(cls, config: Mapping[str, Any], state: Mapping[str, Tensor], null_class: bool = True) -> Network:
        """Return our form of a `UNet2DModel`, from its configuration (config.json) and state dict.

        Args:
            config: keys left out have diffusers' defaults.
            state: in the names that diffusers saves, or saved before its version 0.11.
            null_class: True if the last row of a class embedding is the null class, as in exports of Unfog. False adds
                one: the mean of all rows, from which training with hidden classes then goes on.

        RequestError if the configuration or a weight has no equivalent.
        """
        settings, image_channels, rows = unet2d_settings(config)
        ours = _from_unet2d_state(state)
        if rows is not None and not null_class:
            classes = ours["class_embedding.weight"]
            ours["class_embedding.weight"] = torch.cat([classes, classes.mean(dim=0, keepdim=True)])
            rows += 1
        if rows == 1:
            raise RequestError("num_class_embeds = 1 leaves no class beside the null class; pass null_class=False")
        return cls(settings, image_channels, rows - 1 if rows else 0, ours)


def _to_unet2d_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of a `UNetModel` to `UNet2DModel`'s names; query, key and value become three.

    The augmentation embedding is left out: samples have no augmentation, and then it adds exactly 0.
    """
    split: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key.startswith("augment_embedding."):
            continue
        if ".qkv." in key:
            for letter, part in zip("qkv", tensor.chunk(3)):
                split[key.replace(".qkv.", f".{letter}.")] = part.clone()
        else:
            split[key] = tensor
    return {_rename(key, _TO_THEIRS): tensor for key, tensor in split.items()}


def _from_unet2d_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of a `UNet2DModel` to `UNetModel`'s names; query, key and value become one."""
    split = {_rename(key, _TO_OURS): tensor for key, tensor in state.items()}
    merged: dict[str, Tensor] = {}
    for key, tensor in split.items():
        if ".attention.q." in key:
            names = [key.replace(".q.", f".{letter}.") for letter in "qkv"]
            if missing := [name for name in names if name not in split]:
                raise RequestError(f"weight {missing[0]!r} is missing beside {key!r}; save it again with diffusers")
            parts = [split[name] for name in names]
            merged[key.replace(".q.", ".qkv.")] = torch.cat(parts)
        elif ".attention.k." not in key and ".attention.v." not in key:
            merged[key] = tensor
    return merged


def unet2d_settings(config: Mapping[str, Any]) -> tuple[UNet, int, int | None]:
    """Return (settings, image channels, rows of the class embedding). RequestError if `UNet` has no equivalent."""
    # diffusers notes its version and class under names that begin with an underscore.
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    for key in given.keys() - _DEFAULTS.keys() - _ACCEPTED.keys() - _WITHOUT_EFFECT:
        raise _no_equivalent(key, given[key], "nothing known by that name")
    for key, accepted in _ACCEPTED.items():
        if key in given and given[key] not in accepted:
            raise _no_equivalent(key, given[key], " or ".join(map(repr, accepted)))
    full = _DEFAULTS | given
    for key, usual in _DEFAULTS.items():
        if not _is_like(full[key], usual) and (key, full[key]) != ("attention_head_dim", None):
            raise _no_equivalent(key, full[key], f"what is like {2 if usual is None else usual}")
    if full["in_channels"] != full["out_channels"]:
        raise _no_equivalent("out_channels", full["out_channels"], f"in_channels = {full['in_channels']}")
    scale_shift = full["resnet_time_scale_shift"] == "scale_shift"
    # Left out, it means norm_num_groups, but no normalisation with scale_shift.
    middle_groups = full["attn_norm_num_groups"] or (None if scale_shift else full["norm_num_groups"])
    if full["add_attention"] and middle_groups != full["norm_num_groups"]:
        raise _no_equivalent(
            "attn_norm_num_groups", full["attn_norm_num_groups"], f"norm_num_groups = {full['norm_num_groups']}"
        )
    settings = UNet(
        channels=tuple(full["block_out_channels"]),
        attention=_attention(full),
        head_channels=full["attention_head_dim"] or 0,
        scale_shift=scale_shift,
        **{ours: full[theirs] for theirs, ours in _SETTINGS.items()},
    )
    return settings, full["in_channels"], full["num_class_embeds"]


def _is_like(value: object, usual: object) -> bool:
    """Return True if a value out of a file, which may hold anything, has the type of diffusers' default."""
    if usual is None:
        return value is None or type(value) is int
    if isinstance(usual, tuple):
        return isinstance(value, list | tuple) and {type(one) for one in value} == {type(usual[0])}
    # JSON written by others may have 0 for 0.0.
    return type(value) is type(usual) or (type(usual) is float and type(value) is int)


def _attention(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether each level has attention. The blocks up must mirror those down."""
    down, up = config["down_block_types"], config["up_block_types"]
    for kind in down:
        if kind not in ("DownBlock2D", "AttnDownBlock2D"):
            raise _no_equivalent("down_block_types", list(down), "DownBlock2D or AttnDownBlock2D")
    mirrored = [kind.replace("Down", "Up") for kind in reversed(down)]
    if list(up) != mirrored:
        raise _no_equivalent("up_block_types", list(up), f"the mirror of the way down, {mirrored}")
    return tuple(kind == "AttnDownBlock2D" for kind in down)


def _no_equivalent(key: str, value: object, rule: str) -> RequestError:
    return RequestError(f"UNet2DModel's {key} = {value!r} has no equivalent here; we can build {rule}")


def _patterns(names: Mapping[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Return a pattern of the keys under each name, and the name to give them."""
    return [
        (re.compile(re.escape(old).replace(r"\#", r"(\d+)") + r"\.(weight|bias)"), new + ".#")
        for old, new in names.items()
    ]


_TO_THEIRS = _patterns(_NAMES)
_TO_OURS = _patterns({theirs: ours for ours, theirs in _NAMES.items()} | _OLD_NAMES)


def _rename(key: str, patterns: list[tuple[re.Pattern[str], str]]) -> str:
    """Return the new name of one weight, its indices in the same order."""
    for pattern, new in patterns:
        if match := pattern.fullmatch(key):
            for part in match.groups():
                new = new.replace("#", part, 1)
            return new
    raise RequestError(
        f"weight {key!r} has no equivalent; if it comes from an old file of diffusers, load that with "
        "UNet2DModel.from_pretrained and save it again"
    )
