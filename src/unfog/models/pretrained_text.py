"""Frozen encoders of texts from a folder of Hugging Face, and the texts that they have encoded.

A text is given by its tokens of the run's own `Tokenizer`, and the encoder reads the text that these spell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder, hold, make_room, release
from unfog.files.safe_files import tensor_file, write_atomic
from unfog.models.pretrained.folder import PretrainedFolder
from unfog.models.text_encoder import Layer, TextEncoder, normal
from unfog.text import sanitize
from unfog.values.condition_format import PretrainedText
from unfog.values.tokenizer import tokenizer_of

_TOKENS = 64  # of a text that an encoder is given, at most
_AT_ONCE = 32  # texts
# Types of models, as config.json names them, and the class of transformers that encodes their texts.
_CLASSES = {
    "clip": "CLIPTextModel",
    "clip_text_model": "CLIPTextModel",
    "siglip": "SiglipTextModel",
    "siglip_text_model": "SiglipTextModel",
    **dict.fromkeys(("t5", "mt5", "umt5"), "T5EncoderModel"),
    **dict.fromkeys(("bert", "distilbert", "roberta", "xlm-roberta", "mpnet"), "AutoModel"),
}


class _Encoder(NamedTuple):
    """A model of transformers, and its tokenizer."""

    model: nn.Module
    tokenizer: Any
    padded: bool
    """Whether it was trained on texts that all have the same length."""


def describe_encoder(folder: str) -> PretrainedText:
    """Return the facts on a folder of Hugging Face that a run keeps. RequestError without a known encoder."""
    found = _folder(path := Path(folder).expanduser().resolve())
    found.check_installed()
    kind, config = found.config(_CLASSES)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    width = next((text[name] for name in ("d_model", "hidden_size", "dim") if isinstance(text.get(name), int)), None)
    # transformers leaves out what has its usual value.
    width = {"clip": 512, "siglip": 768}.get(kind.partition("_")[0]) if width is None else width
    if not width or not 1 <= width <= 16384:
        raise found.refused("its config.json has no width (hidden_size or d_model)")
    places = text.get("max_position_embeddings", {"clip": 77}.get(kind.partition("_")[0], 64))
    # RoBERTa numbers its positions from 2 on.
    length = min(_TOKENS, places - 2 * (kind in ("roberta", "xlm-roberta"))) if isinstance(places, int) else _TOKENS
    return PretrainedText(str(path), found.digest(), width, max(1, length))


def _folder(path: Path) -> PretrainedFolder:
    return PretrainedFolder("text_encoder.pretrained", path, "a CLIP, SigLIP, T5 or BERT encoder")


@lru_cache(1)
def _load(described: PretrainedText) -> _Encoder:
    """Load an encoder. RequestError if its folder is not there or has changed, or transformers is not installed."""
    path = Path(described.folder)
    if not path.is_dir():
        raise RequestError(
            f"the run reads texts with the encoder in {sanitize(described.folder)}, which is not there; put the folder "
            "back, or draw captions of the training set, which are in the cache"
        )
    folder = _folder(path)
    kind, _ = folder.config(_CLASSES)
    if folder.digest() != described.sha256:
        raise RequestError(
            f"{sanitize(described.folder)} changed since the run began (sha256 differs), and its texts would mean "
            "something else; restore the folder"
        )
    model, tokenizer = folder.load(_CLASSES[kind])
    return _Encoder(model, tokenizer, kind.startswith("siglip"))


@torch.inference_mode()
def _encode(described: PretrainedText, texts: Sequence[str], device: torch.device) -> Iterator[Tensor]:
    """Yield the tokens of each text, float16 [n, D] with a root mean square of 1, on the CPU."""
    encoder = _load(described)
    model = encoder.model.to(device)
    for first in range(0, len(texts), _AT_ONCE):
        part = list(texts[first : first + _AT_ONCE])
        how = {"padding": "max_length" if encoder.padded else True, "truncation": True, "return_tensors": "pt"}
        inputs = encoder.tokenizer(part, max_length=described.length, **how)
        ids = inputs["input_ids"].to(device)
        mask = inputs.get("attention_mask")
        mask = ids != encoder.tokenizer.pad_token_id if mask is None else mask.to(device).bool()
        given = {} if encoder.padded else {"attention_mask": mask.long()}
        hidden = model(input_ids=ids, **given).last_hidden_state
        for row, known in zip(normal(hidden.float()).half().cpu(), mask.cpu()):
            yield row[known]


class KnownTexts:
    """The texts that a frozen encoder has encoded, found by their tokens without waiting for the device.

    It is not a module, so that neither checkpoints, averages nor optimizers have its weights; copies of a network share
    it.
    """

    def __init__(self, merges: tuple[str, ...], described: PretrainedText) -> None:
        self.described, self._tokenizer = described, tokenizer_of(merges)
        self._merges = merges
        self._texts = dict[tuple[int, ...], Tensor]()
        self._tables = dict[torch.device, _Table]()
        self._retired = list[_Table]()  # which a captured graph may read

    def __deepcopy__(self, memo: dict[int, Any]) -> KnownTexts:
        return self

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoded texts of tokens [B, L], float32 [B, N, D], and bool [B, N], which tokens there are.

        A text that is not known is encoded now, unless a trace or a compiled graph calls: then it is NaN.
        """
        size = self.described
        if _is_fake(tokens):
            mask = tokens.new_ones(tokens.shape[0], size.length, dtype=torch.bool)
            return tokens.new_zeros(tokens.shape[0], size.length, size.width, dtype=torch.float32), mask
        table = self._table(tokens.device)
        if not torch.compiler.is_compiling() and not _is_captured(tokens) and not bool(table.has(tokens).all()):
            self.learn(tokens)
            table = self._table(tokens.device)
        return table.look_up(tokens, size.length)

    def learn(self, tokens: Tensor) -> None:
        """Encode the texts of tokens [B, L] that are not known. RequestError if the encoder cannot be loaded."""
        rows = {tuple(t for t in row if t >= 0) for row in tokens.tolist()} - self._texts.keys()
        new = sorted(row for row in rows if row)
        if not new:
            return
        texts = [self._tokenizer.decode(row) for row in new]
        self._texts.update(zip(new, _encode(self.described, texts, tokens.device)))
        self._renew()

    def learn_captions(self, tokens: Tensor) -> None:
        """Learn the texts of tokens [B, L], those of a set of images, with the help of the cache."""
        rows = sorted({row for each in tokens.tolist() if (row := tuple(t for t in each if t >= 0))})
        facts = (self.described.sha256, self.described.length, self._merges, rows)
        path = cache_folder() / f"texts-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.safetensors"
        hold(path)
        try:
            self._read_kept(path, rows)
            if not all(row in self._texts for row in rows):
                self.learn(tokens)
                _load(self.described).model.cpu()  # its memory is for training; a prompt brings it back
                self._keep(path, rows)
        finally:
            release(path)

    def _read_kept(self, path: Path, rows: Sequence[tuple[int, ...]]) -> None:
        with suppress(OSError, SafetensorError, KeyError):
            kept = load_file(tensor_file(path, cache_folder()))
            counts, encoded = kept["counts"].tolist(), kept["encoded"]
            if len(counts) == len(rows) and encoded.shape == (sum(counts), self.described.width):
                self._texts.update(zip(rows, encoded.split(counts)))
                self._renew()

    def _keep(self, path: Path, rows: Sequence[tuple[int, ...]]) -> None:
        with suppress(OSError):  # without room they are encoded anew
            encoded = [self._texts[row] for row in rows]
            kept = {"counts": torch.tensor([len(one) for one in encoded]), "encoded": torch.cat(encoded)}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, save(kept), cache_folder(), shared=True)
            make_room()

    def _renew(self) -> None:
        self._retired += [table for device, table in self._tables.items() if device.type == "cuda"]
        self._tables.clear()

    def _table(self, device: torch.device) -> _Table:
        if device not in self._tables:
            self._tables[device] = _Table.of(self._texts, self.described.width, device)
        return self._tables[device]


def _is_fake(tokens: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return tokens.is_meta or isinstance(tokens, FakeTensor)


def _is_captured(tokens: Tensor) -> bool:
    return tokens.is_cuda and torch.cuda.is_current_stream_capturing()


class _Table(NamedTuple):
    """Texts in the order of their hashes, on a device."""

    hashes: Tensor
    """int64 [R], rising."""
    starts: Tensor
    """int64 [R], places of the first tokens in `encoded`."""
    counts: Tensor
    """int64 [R], their numbers of tokens; never 0."""
    encoded: Tensor
    """float16 [T, D]."""
    factors: Tensor
    """int64 [512], of the hash of a text."""

    @classmethod
    def of(cls, texts: dict[tuple[int, ...], Tensor], width: int, device: torch.device) -> _Table:
        factors = torch.randint(2**62, (512,), generator=torch.Generator().manual_seed(0)) * 2 + 1
        # A row that no text has, so that there is one to point to.
        rows, encoded = [(0,) * 512, *texts], [torch.zeros(1, width, dtype=torch.float16), *texts.values()]
        hashes = torch.stack([(torch.tensor(row) + 1).mul(factors[: len(row)]).sum() for row in rows])
        counts = torch.tensor([len(one) for one in encoded])
        order = hashes.argsort()
        if bool((hashes[order].diff() == 0).any()):
            raise RequestError("two captions have the same hash of 64 bits; change one of them by a word")
        starts = counts.cumsum(0) - counts
        return cls(
            *(each.to(device) for each in (hashes[order], starts[order], counts[order], torch.cat(encoded), factors))
        )

    def _find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hashes = ((tokens + 1) * self.factors[: tokens.shape[1]]).sum(1)
        place = torch.searchsorted(self.hashes, hashes).clamp(max=len(self.hashes) - 1)
        return place, self.hashes[place] == hashes

    def has(self, tokens: Tensor) -> Tensor:
        """Return whether each text [B, L] is here, or has no tokens: bool [B]."""
        return self._find(tokens)[1] | (tokens <= 0).all(1)  # of zeros is what costs are measured with

    def look_up(self, tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
        place, found = self._find(tokens)
        column = torch.arange(length, device=tokens.device)
        mask = (column < self.counts[place][:, None]) & (tokens > 0).any(1)[:, None]
        index = (self.starts[place][:, None] + column).clamp(max=len(self.encoded) - 1)
        values = self.encoded[index].float().masked_fill(~mask[..., None], 0.0)
        # NaN marks a text that is not here, which could pass for an empty one otherwise.
        return values.masked_fill((mask[:, :1] & ~found[:, None])[..., None], float("nan")), mask


@lru_cache(4)
def known_texts(merges: tuple[str, ...], described: PretrainedText) -> KnownTexts:
    """Return the texts that are known of an encoder, the same object for all networks of a process."""
    return KnownTexts(merges, described)


class PretrainedTextEncoder(TextEncoder):
    """The tokens of a frozen encoder, projected, behind a start token, and layers that are trained with the network.

    Args:
        known: encodes texts.
        width: D of the output, and of all layers.
        layers: of self-attention and an MLP.
        linear: makes a linear layer without bias of (inputs, outputs).
        table: makes an embedding of (rows, width).
    """

    def __init__(
        self,
        known: KnownTexts,
        width: int,
        layers: int,
        linear: Callable[[int, int], nn.Module] = partial(nn.Linear, bias=False),  # noqa: B008
        table: Callable[[int, int], nn.Module] = nn.Embedding,
    ):
        nn.Module.__init__(self)
        self.known = known
        self.words = table(1, width)  # the start
        self.project = linear(known.described.width, width)
        self.layers = nn.ModuleList([Layer(width, linear) for _ in range(layers)])

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first layer's input [B, 1 + N, D], and bool [B, 1 + N]; a text is the start token if hidden."""
        encoded, mask = self.known(tokens)
        start: Tensor = self.words(tokens.new_zeros(tokens.shape[0], 1))
        projected = self.project(encoded.to(start.dtype))
        return torch.cat([start, projected.to(start.dtype)], 1), torch.cat([mask.new_ones(len(mask), 1), mask], 1)
