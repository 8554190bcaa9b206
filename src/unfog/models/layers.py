"""Layers and the base class that the networks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unfog.errors import RequestError
from unfog.models.condition_embedding import ColumnEmbedding
from unfog.models.image_conditions import IMAGES, ImageInput
from unfog.models.pretrained_text import PretrainedTextEncoder, known_texts
from unfog.models.text_encoder import Text, TextEncoder
from unfog.values.conditions import Conditions, ConditionsLike

if TYPE_CHECKING:
    from unfog.values.condition_format import ConditionFormat, PretrainedText

# (module, its inputs …) -> its output, with or without gradient checkpointing.
Runner = Callable[..., Tensor]


def sinusoids(position: Tensor, width: int, freq_shift: int = 0, flip_sin_to_cos: bool = True) -> Tensor:
    """Sinusoidal embedding of `position` [B] -> [B, width], float32 even under autocast (DDPM, appendix B).

    Frequencies fall from 1 to 1/10000. An odd `width` ends with a zero.
    """
    half = width // 2
    exponent = -math.log(10_000) * torch.arange(half, dtype=torch.float32, device=position.device)
    # In float32: bfloat16 holds no odd whole number above 256, and neighbouring timesteps would be one.
    angle = position.float()[:, None] * (exponent / (half - freq_shift)).exp()
    first, second = (angle.cos(), angle.sin()) if flip_sin_to_cos else (angle.sin(), angle.cos())
    return F.pad(torch.cat([first, second], dim=1), (0, width % 2))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q, k, v of [B, heads, N, D] (Vaswani et al. 2017, eq. 1)."""
    # The CPU's fused kernel has a 16-bit backward six times slower than its float32 one.
    if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        mixed: Tensor = scores.softmax(dim=-1).to(v.dtype) @ v
    else:
        if q.device.type == "cuda":
            # The fused kernels need values that lie side by side; the fallback stores all N x N scores.
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
    return mixed


def repeat_pixels(x: Tensor) -> Tensor:
    """Repeat each pixel of [B, C, H, W] -> [B, C, 2H, 2W], as interpolation by the nearest does."""
    # Inductor takes the backward pass of an interpolation for a scatter of indices, which a GPU has to sort to add them
    # in one order. That of an expansion is a sum of four, and part of another kernel.
    compiled_for_gpu = torch.compiler.is_compiling() and x.device.type == "cuda"
    return _expand_pixels(x) if compiled_for_gpu else F.interpolate(x, scale_factor=2.0, mode="nearest")


def _expand_pixels(x: Tensor) -> Tensor:
    return x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).flatten(4, 5).flatten(2, 3)


def pad(x: Tensor, sides: tuple[int, int, int, int], wrap: str) -> Tensor:
    """Add `sides` = (left, right, top, bottom) pixels to x [B, C, H, W]: zeros, or along `wrap` the other side's."""
    left, right, top, bottom = sides
    if "x" in wrap:
        x = torch.cat([x[..., x.shape[3] - left :], x, x[..., :right]], dim=3)
        left = right = 0
    if "y" in wrap:
        x = torch.cat([x[:, :, x.shape[2] - top :], x, x[:, :, :bottom]], dim=2)
        top = bottom = 0
    return F.pad(x, (left, right, top, bottom)) if left or right or top or bottom else x


class Conv2d(nn.Conv2d):
    """A convolution whose input continues at its other side along the axes `wrap`."""

    wrap = ""
    takes_copies = True
    """`_conv_forward` computes with any weight and bias, as that of torch, so that they may be 16-bit copies."""

    # The method in which torch pads by its other modes, of which "circular" always joins both axes.
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.wrap:
            plain: Tensor = super()._conv_forward(input, weight, bias)
            return plain
        down, across = (int(side) for side in self.padding)
        return F.conv2d(pad(input, (across, across, down, down), self.wrap), weight, bias, self.stride)


def text_at(text_width: int, attention: tuple[bool, ...], level: int) -> int:
    """Return the `text_width` of the blocks of a level of a U-Net that attend to a text, and 0 of all others.

    They do where they attend to pixels, and at the lowest level.
    """
    return text_width if attention[level] or level == len(attention) - 1 else 0


class ConditionalNetwork(nn.Module):
    """Base of all networks: embeds conditions, a null class among them, and recomputes blocks for the gradient.

    A network is called as `network(x [B, C, H, W], c_noise [B], conditions) -> y`, where a tensor stands for the label
    of `Conditions`. A subclass makes its layers in `_build`, `class_embedding` among them.

    Args:
        settings: the architecture.
        image_channels: channels of the input.
        conditions: of the images; a network without a condition has no layer for it. With N classes, row N of their
            embedding is the null class of classifier-free guidance, for images whose class is not told.
        out_channels: channels of the output if not those of the input: twice as many with a learned variance.
    """

    checkpointing = False
    """Recompute each block for the gradient: less memory, more time, the same bits."""
    channels_last = False
    """Compute in torch's channels_last memory format: other bits, and faster on some machines."""
    wrap = ""
    """Axes along which images continue at their other side: "", "x", "y" or "xy"; see `wrap_edges`."""
    calls_layers_once: ClassVar[bool] = False
    """Whether a forward pass calls each linear layer and convolution once, and uses their weights nowhere else."""
    embeddings: ClassVar[tuple[str, ...]] = ("class_embedding", "augment_embedding", "column_embedding")
    """Layers that embed conditions."""
    text_parts: ClassVar[tuple[str, ...]] = ("text", "text_encoder", "text_embedding", "text_share")
    """Names of modules and parameters, in blocks too, that a network without texts does not have."""
    ends: ClassVar[tuple[str, ...]] = ("conv_in", "conv_out", *embeddings, "text_embedding")
    """Layers whose other side is not the hidden space: image channels, classes, augmentations. The first takes images.
    """
    takes_images: ClassVar[bool] = False
    """Whether the first layer takes `_with_images`, and so images that are conditions."""
    not_matrices: ClassVar[tuple[str, ...]] = ("words", "places")  # embeddings of tokens and of their positions
    """Names of parameters, or of modules around them, that are not linear maps though they have two sides or more."""
    block: ClassVar[type[nn.Module]]
    """Class of the repeated parts, which FSDP shards and gathers one after the other."""
    conditions_begin_at_zero: ClassVar[bool] = False
    """So that weights of other programs, which have no such layers, begin as they were trained."""
    conditions_have_power_1: ClassVar[bool] = False
    """Whether layers of conditions take inputs with a mean square of 1."""
    settings: Any
    class_embedding: nn.Module | None
    augment_embedding: nn.Module | None
    column_embedding: nn.Module | None
    pretrained: tuple[tuple[str, ...], PretrainedText] | None = None
    """Merges of the captions, and the frozen encoder of them; None for an encoder that is trained."""
    text_encoder: TextEncoder | None
    text_embedding: nn.Module | None

    def __init__(
        self,
        settings: Any,
        image_channels: int,
        conditions: ConditionFormat,
        out_channels: int | None = None,
    ):
        super().__init__()
        self.settings, self.image_channels, self.num_classes = settings, image_channels, len(conditions.classes)
        self.mask_channels = conditions.mask_channels
        images = [one for one in conditions.columns if one.kind in IMAGES]
        if images and not self.takes_images:
            raise RequestError(
                f"{images[0].name} is an image as a condition, which {type(self).__name__} has no input for; give "
                "--network unet, mpunet, dit or a size of them, or leave it out"
            )
        self.image_input = ImageInput(images, conditions.image_factor) if images else None
        # Not by the property of `ConditionFormat`: exported code has the fields alone.
        text = next((one for one in conditions.columns if one.kind == "text"), None)
        if text is not None and not conditions.text_width:
            raise RequestError("text_encoder = auto has to be resolved before a network can be built")
        self.text_width = 0 if text is None else conditions.text_width
        # By the name of this package, which exported code has not.
        ours = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]
        self.is_random = not ours or getattr(settings, "dropout", 1) > 0
        """Whether a pass in training may draw random numbers."""
        width = self._build(settings, out_channels or image_channels)
        # Last, so that all other weights are drawn as without it.
        inputs = conditions.augment_inputs
        self.augment_embedding = self._condition_layer(inputs, width) if inputs else None
        self.column_embedding = self.text_encoder = self.text_embedding = None
        if columns := [one for one in conditions.columns if one is not text and one.kind not in IMAGES]:
            layer = partial(self._condition_layer, width=width)
            self.column_embedding = ColumnEmbedding(columns, layer, self.conditions_have_power_1)
        if text is not None:
            vocabulary, length = map(int, text.statistics)
            # Exported code has no such field.
            if (model := getattr(conditions, "text_model", None)) is not None:
                self.pretrained = tuple(text.categories), model
            self.text_encoder = self._build_text_encoder(vocabulary, length, conditions.text_layers)
            self.text_embedding = self._build_text_embedding(width)

    def _build(self, settings: Any, out_channels: int) -> int:
        """Make all other layers. Return the width of what embeddings of conditions but the class are added to."""
        raise NotImplementedError

    def _condition_layer(self, inputs: int, width: int) -> nn.Module:
        """Return a linear layer for a condition of so many numbers."""
        layer = nn.Linear(inputs, width, bias=False)  # no bias, so that a condition of 0 adds 0
        if self.conditions_begin_at_zero:
            zero_(layer)
        return layer

    def _build_text_encoder(self, vocabulary: int, length: int, layers: int) -> TextEncoder:
        if self.pretrained:
            return PretrainedTextEncoder(known_texts(*self.pretrained), self.text_width, layers, *self._text_parts())
        return TextEncoder(vocabulary, length, self.text_width, layers, *self._text_parts())

    def _text_parts(self) -> tuple[type[nn.Module], ...]:
        """Return the linear layers and the embeddings that the encoder of texts is made of; () for the usual ones."""
        return ()

    def _build_text_embedding(self, width: int) -> nn.Module:
        """Return the layer that adds a text to the embedding of the noise level, with an output of 0 at first."""
        layer = nn.Linear(self.text_width, width, bias=False)
        zero_(layer)
        return layer

    def _class_table(self, width: int) -> nn.Embedding | None:
        """Return a vector for each class and for the null class; None for a network without classes.

        Numbers begin with deviation 1, as torch draws them: with 0.02, classes take thousands of images to come apart
        (docs/decisions/0013-networks.md).
        """
        return nn.Embedding(self.num_classes + 1, width) if self.num_classes else None

    def wrap_edges(self, axes: str) -> None:
        """Let images continue at their other side along the axes: "x", "y", "xy", or "" for none."""
        for module in self.modules():
            if hasattr(type(module), "wrap"):
                module.wrap = axes  # type: ignore[assignment]

    def _laid_out(self, h: Tensor) -> Tensor:
        """Return hidden [B, C, H, W] in the memory format that all later layers keep."""
        # Not the input, as a single channel has no definite memory format; nor the weights, which stay as they are
        # saved: putting them in order at each call takes 3 to 7% of a step (docs/decisions/0016-memory-format.md).
        return h.contiguous(memory_format=torch.channels_last) if self.channels_last else h

    @property
    def _channels_in(self) -> int:
        """Channels of an image together with its mask and the images that are conditions."""
        images = 0 if self.image_input is None else self.image_input.channels
        return self.image_channels + self.mask_channels + images

    def _with_images(self, x: Tensor, conditions: ConditionsLike) -> Tensor:
        """Return x [B, C, H, W] with its mask, if there is one, and the images that are conditions.

        `RequestError` if there are such, and the network has no such input.
        """
        told = Conditions.of(conditions)
        x = self._with_mask(x, told.known)
        if self.image_input is not None:
            channels: Tensor = self.image_input(x, told.image)
            return channels
        if told.image is not None:
            raise RequestError("an image was given as a condition to a network without one; train with data.condition")
        return x

    def _with_mask(self, x: Tensor, known: Tensor | None) -> Tensor:
        """Return x [B, C, H, W] with 0 where it is unknown, and behind it the mask, 1 where it is known."""
        if not self.mask_channels:
            if known is not None:
                raise RequestError("a mask was given to a network without that input; train with data.unknown")
            return x
        if known is None:
            return torch.cat([x, torch.ones_like(x)], dim=1)
        return torch.cat([x.masked_fill(known == 0, 0.0), known.to(x.dtype)], dim=1)

    def _read_text(self, conditions: ConditionsLike, x: Tensor) -> Text | None:
        """Return the encoded texts of images x [B, C, H, W]; None for a network without texts.

        `RequestError` if there are texts, and the network has no such input.
        """
        tokens = Conditions.of(conditions).tokens
        if self.text_encoder is None:
            if tokens is not None:
                raise RequestError("a text was given to a network without that input; train with data.condition")
            return None
        if tokens is None:  # the start token alone
            tokens = torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
        text: Text = self.text_encoder(tokens)
        return text

    def _add_text(self, hidden: Tensor, text: Text) -> Tensor:
        """Add the mean of the tokens of a text to hidden [B, width]."""
        assert self.text_embedding is not None
        embedding: Tensor = self.text_embedding(text.pooled.to(hidden.dtype))
        return hidden + embedding

    def _add_conditions(self, hidden: Tensor, conditions: ConditionsLike, text: Text | None = None) -> Tensor:
        """Add the embeddings of all conditions but the class; `RequestError` if the network has no such input."""
        told = Conditions.of(conditions)
        if text is not None:
            hidden = self._add_text(hidden, text)
        if self.column_embedding is not None:
            hidden = hidden + self.column_embedding(told, hidden.shape[0], hidden.dtype)
        elif any(each is not None for each in told._replace(known=None, image=None, tokens=None)[2:]):
            raise RequestError("columns were given to a network without them; train with data.condition")
        if told.augment is None:
            return hidden
        if self.augment_embedding is None:
            raise RequestError("an augmentation was given to a network without that input; train with data.augment")
        # The same as a linear layer on the sinusoids (EDM's map_augment), which the next layer would multiply.
        embedding: Tensor = self.augment_embedding(told.augment.to(hidden.dtype))
        return hidden + embedding

    def _class_embedding(self, conditions: ConditionsLike, c_noise: Tensor) -> Tensor | None:
        """Return the embedding [B, width] of the class, or of the null class; None for a network without classes."""
        label = Conditions.of(conditions).label_or(self.num_classes)
        if self.class_embedding is None:
            # Refused rather than ignored: a reader would believe that the samples are of that class.
            if label is not None:
                raise RequestError("a label was given to a network without classes; give none, or train with classes")
            return None
        if label is None:
            label = torch.full(c_noise.shape, self.num_classes, device=c_noise.device)
        embedding: Tensor = self.class_embedding(label)
        return embedding

    def _embed(
        self,
        mlp: nn.Sequential,
        waves: Tensor,
        c_noise: Tensor,
        conditions: ConditionsLike,
        text: Text | None = None,
    ) -> Tensor:
        """Embed sinusoids [B, C] by linear layer, activation and linear layer; add the conditions; activate."""
        first, activation, second = mlp
        hidden: Tensor = first(waves)
        embedding: Tensor = second(activation(self._add_conditions(hidden, conditions, text)))
        class_embedding = self._class_embedding(conditions, c_noise)
        return F.silu(embedding if class_embedding is None else embedding + class_embedding)

    def _run(self, part: nn.Module, *inputs: Tensor | Text | None) -> Tensor:
        """Call `part`; with `checkpointing`, keep only its inputs and compute it again for the gradient."""
        again = self.checkpointing and torch.is_grad_enabled()
        if not again:
            output: Tensor = part(*inputs)
            return output
        # Autocast is repeated too, and random numbers so that dropout is the same. Where there are none they are left
        # alone: a CUDA graph cannot hold a step that asks for their state.
        repeated: Tensor = checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=self.is_random)
        return repeated


def zero_(module: nn.Conv2d | nn.Linear) -> None:
    """Set weights and bias to zero, so that a branch that ends in this module begins as zero."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
