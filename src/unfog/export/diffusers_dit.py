"""Convert diffusers' `DiTTransformer2DModel` to the network of its kind here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unfog.errors import RequestError
from unfog.export.elsewhere import ElsewhereModel
from unfog.models.elsewhere.settings import DiffusersDiT

_KINDS = ("weight", "bias")
# Settings that our network has no choice of, and diffusers' defaults, which DiT's own weights have.
_FIXED = {
    "norm_type": "ada_norm_zero",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
}
_IN_BLOCK = {
    "norm1.linear": "modulation",
    "attn1.to_out.0": "out",
    "ff.net.0.proj": "mlp_in",
    "ff.net.2": "mlp_out",
}
_OUTSIDE = {"pos_embed.proj": "patch_in", "proj_out_1": "modulation_out", "proj_out_2": "patch_out"}
_EMBEDDINGS = ("timestep_embedder.linear_1", "timestep_embedder.linear_2", "class_embedder.embedding_table")


def from_dit(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ElsewhereModel:
    """Return a DiT of diffusers as one of ours. RequestError if its settings or weights have no equal here."""
    for name, usual in _FIXED.items():
        if config.get(name, usual) != usual:
            raise RequestError(f"this DiT has {name} = {config[name]!r}, and only {usual!r} is known")
    try:
        return _converted(config, weights)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError, ZeroDivisionError) as error:
        raise RequestError(f"this DiT's weights do not fit its config.json: {error}") from None


def _converted(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ElsewhereModel:
    depth, patch = int(config.get("num_layers", 28)), int(config.get("patch_size", 2))
    width, channels = weights["pos_embed.proj.weight"].shape[:2]
    embedded = [_embedding(weights, i) for i in range(depth)]
    # Diffusers stores the embedding once for each block, though DiT trained a single one: by its values it is one.
    shared = all(torch.equal(tensor, embedded[0][name]) for one in embedded[1:] for name, tensor in one.items())
    network = DiffusersDiT(
        int(width),
        depth,
        int(config.get("attention_head_dim", 72)),
        patch,
        "shared" if shared else "block",
        float(config.get("norm_eps", 1e-5)),
    )
    state = {f"{ours}.{kind}": weights[f"{name}.{kind}"] for name, ours in _OUTSIDE.items() for kind in _KINDS}
    for i in range(depth):
        state |= _block(weights, i)
    kept = embedded[:1] if shared else embedded
    first, second, table = _EMBEDDINGS
    for kind in _KINDS:
        state[f"time_in.{kind}"] = torch.cat([one[f"{first}.{kind}"] for one in kept])
        state |= {f"time_out.{i}.{kind}": one[f"{second}.{kind}"] for i, one in enumerate(kept)}
    state["class_embedding.weight"] = torch.cat([one[f"{table}.weight"] for one in kept], dim=1)
    classes = state["class_embedding.weight"].shape[0] - 1
    if classes != int(config.get("num_embeds_ada_norm", 1000)):
        raise ValueError(f"it has {classes} classes and one for none, and num_embeds_ada_norm says otherwise")
    out = weights["proj_out_2.weight"].shape[0] // patch**2
    # Twice as many are a learned variance.
    if out not in (channels, 2 * channels):
        raise ValueError(f"{out} channels of its output are neither {channels} nor twice that")
    size = int(config.get("sample_size", 32))
    return ElsewhereModel("DiT", network, int(channels), size, int(classes), out == 2 * channels, state, {})


def _embedding(weights: Mapping[str, Tensor], block: int) -> dict[str, Tensor]:
    """Return the weights by which a block embeds noise level and class."""
    start = f"transformer_blocks.{block}.norm1.emb."
    found = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
    if not found:
        raise KeyError(f"{start}*")
    return found


def _block(weights: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    start, state = f"transformer_blocks.{number}.", {}
    for kind in _KINDS:
        for name, ours in _IN_BLOCK.items():
            state[f"blocks.{number}.{ours}.{kind}"] = weights[f"{start}{name}.{kind}"]
        qkv = [weights[f"{start}attn1.to_{letter}.{kind}"] for letter in ("q", "k", "v")]
        state[f"blocks.{number}.qkv.{kind}"] = torch.cat(qkv)
    return state
