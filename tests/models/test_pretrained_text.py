"""Frozen encoders of texts: read from a folder, asked once for each caption, and no part of what a run stores."""

import json
import os
from copy import deepcopy

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'unfog[text]'")

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import unfog
from conftest import FEW_PICTURES
from test_text_encoder import LEVEL, NETWORKS, X
from unfog.errors import RequestError
from unfog.models import pretrained_text  # counts its calls
from unfog.models.network_settings import build_model
from unfog.models.pretrained_text import KnownTexts, describe_encoder, known_texts
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.conditions import Conditions

WORDS = ["<pad>", "<unk>", "a", "red", "heart", "dark", "star"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
FACTS = ColumnFacts("text", "text", statistics=(256.0, 16.0))
TINY = {
    "size": 8,
    "batch": 4,
    "device": "cpu",
    "precision": "fp32",
    "evaluate": {"every": -1},
    **FEW_PICTURES,
}
NETWORK = "unet:channels=8/16,norm_groups=4,attention=0/0,mid_attention=false,head_channels=8"
CAPTIONS = ["a red heart", "a dark heart", "a red star", "a dark star"] * 6


def save_encoder(folder, kind="bert", seed=0):
    torch.manual_seed(seed)
    size = {"vocab_size": len(WORDS), "pad_token_id": 0}
    if kind == "clip":
        model = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**size, **SIZES, max_position_embeddings=16, eos_token_id=1, bos_token_id=1)
        )
    elif kind == "siglip":
        model = transformers.SiglipTextModel(transformers.SiglipTextConfig(**size, **SIZES, max_position_embeddings=16))
    elif kind == "t5":
        config = transformers.T5Config(**size, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2)
        model = transformers.T5EncoderModel(config)
    else:
        model = transformers.BertModel(transformers.BertConfig(**size, **SIZES, max_position_embeddings=32))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("bert"))


def tokens_of(*texts: str) -> torch.Tensor:
    return torch.tensor([[*text.encode(), *[-1] * (16 - len(text))] for text in texts])


def network(folder, name="unet"):
    torch.manual_seed(0)
    told = ConditionFormat(columns=(FACTS,), text_layers=1, text_width=32, text_model=describe_encoder(str(folder)))
    return build_model(NETWORKS[name], 1, told).eval()


@pytest.mark.parametrize("kind", ["clip", "siglip", "t5", "bert"])
def test_texts_are_those_of_the_model_itself(tmp_path, kind):
    described = describe_encoder(str(save_encoder(tmp_path, kind)))
    assert (described.width, described.length) == (32, {"clip": 16, "siglip": 16, "t5": 64, "bert": 32}[kind])
    known = KnownTexts((), described)
    found, mask = known(tokens_of("a red heart", "", "dark"))
    model = getattr(transformers, pretrained_text._CLASSES[kind]).from_pretrained(tmp_path).eval()
    ids = torch.tensor([[2, 3, 4]])
    if kind == "siglip":  # is trained on texts that are padded
        ids = torch.tensor([[2, 3, 4, *[0] * 13]])
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state[0, :3]
    expected = expected / expected.square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(found[0, :3], expected, rtol=2e-3, atol=2e-3)
    assert mask.sum(1).tolist() == [3, 0, 1]
    assert not found[~mask].any()
    assert not known(torch.zeros(1, 16, dtype=torch.int64))[1].any()  # which costs are measured with


def save_byte_pairs(folder, joined):
    """Save the tokenizer of a CLIP in the files of its folder, `tokenizer.json` if joined, and return the tokens."""
    letters = ["a", "c", "d", "e", "r", "t"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "re", "red</w>", "ca", "cat</w>", "<start>", "<end>"]
    merges = ["#version: 0.2", "r e", "re d</w>", "c a", "ca t</w>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(merges))
    special = {"bos_token": "<start>", **dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<end>")}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "tokenizer_class": "CLIPTokenizer"}))
    if joined:
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
        (folder / "vocab.json").unlink()
        (folder / "merges.txt").unlink()
    return words


def save_word_pieces(folder, joined):
    """Save the tokenizer of a MiniLM as `save_byte_pairs` does."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "c", "##at"]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}')
    (folder / "modules.json").write_text("[]")  # of sentence-transformers
    (folder / "1_Pooling").mkdir()
    if joined:
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
        (folder / "vocab.txt").unlink()
    return words


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("clip", ["<start>", "a</w>", "red</w>", "cat</w>", "<end>"]),
        ("bert", ["[CLS]", "a", "red", "c", "##at", "[SEP]"]),
    ],
)
def test_tokenizers_are_read_from_the_files_that_folders_have(tmp_path, kind, read, joined):
    words = (save_byte_pairs if kind == "clip" else save_word_pieces)(tmp_path, joined)
    torch.manual_seed(0)
    if kind == "clip":  # a whole one, of which the encoder of texts is a part
        text = {**SIZES, "vocab_size": len(words), "max_position_embeddings": 77, "eos_token_id": len(words) - 1}
        text |= {"bos_token_id": len(words) - 2, "pad_token_id": len(words) - 1}
        vision = {**SIZES, "image_size": 16, "patch_size": 8}
        model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
        part = model.text_model
    else:
        model = part = transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=len(words)))
    model.save_pretrained(tmp_path)
    found, mask = KnownTexts((), describe_encoder(str(tmp_path)))(tokens_of("a red cat"))
    with torch.no_grad():
        hidden = part.eval()(input_ids=torch.tensor([[words.index(word) for word in read]])).last_hidden_state
    assert mask.sum() == len(read)
    torch.testing.assert_close(
        found[0, : len(read)], hidden[0] / hidden[0].square().mean(1, keepdim=True).sqrt(), rtol=2e-3, atol=2e-3
    )


@pytest.mark.slow
def test_tokenizers_of_sentencepiece_are_read(tmp_path):
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: pip install 'unfog[text]'")
    (tmp_path / "texts.txt").write_text("a red heart\na dark star\n" * 20)
    how = {"vocab_size": 12, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "model_type": "char"}
    spm.SentencePieceTrainer.train(input=str(tmp_path / "texts.txt"), model_prefix=str(tmp_path / "spiece"), **how)
    (tmp_path / "texts.txt").unlink()
    special = {**dict.fromkeys(("eos_token", "pad_token"), "</s>"), "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**special, "tokenizer_class": "SiglipTokenizer"}))
    text = {**SIZES, "vocab_size": 32, "max_position_embeddings": 16}
    vision = {**SIZES, "image_size": 16, "patch_size": 8}
    transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(
        tmp_path
    )
    _, mask = KnownTexts((), describe_encoder(str(tmp_path)))(tokens_of("a red star", ""))
    assert mask.sum(1).tolist() == [12, 0]  # a mark of each word, its letters, and the end


@pytest.mark.slow
def test_the_tokenizer_of_bytes_needs_no_files(tmp_path):
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    transformers.T5EncoderModel(transformers.T5Config(vocab_size=384, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}')
    found, mask = KnownTexts((), describe_encoder(str(tmp_path)))(tokens_of("a red", "a rec"))
    assert mask.sum(1).tolist() == [6, 6]  # letters and the end
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_reads_them_and_stores_none_of_the_model(folder, name):
    model = network(folder, name)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    told = tokens_of("a red heart", "a dark star", "")
    answers = model(X, LEVEL, Conditions(tokens=told))
    assert answers.isfinite().all()
    assert not torch.equal(model(X, LEVEL, Conditions(tokens=told.flip(0)))[0], answers[0])
    longer = torch.cat([told, torch.full((3, 5), -1)], 1)
    torch.testing.assert_close(model(X, LEVEL, Conditions(tokens=longer)), answers)
    torch.testing.assert_close(model(X, LEVEL)[2], answers[2], rtol=1e-4, atol=1e-4)  # not told
    sizes = [parameter.numel() for name, parameter in model.named_parameters() if "text_encoder" in name]
    assert sum(sizes) == 32 + 32 * 32 + 12 * 32**2  # start, projection, one layer
    assert deepcopy(model).text_encoder.known is model.text_encoder.known


def test_a_text_is_encoded_once_and_one_of_a_graph_is_never_wrong(folder, monkeypatch):
    asked, encode = [], pretrained_text._encode
    monkeypatch.setattr(pretrained_text, "_encode", lambda *args: asked.extend(args[1]) or encode(*args))
    known = KnownTexts((), describe_encoder(str(folder)))
    first = known(tokens_of("a red heart", "dark"))[0]
    again = known(tokens_of("dark", "star", "a red heart"))[0]
    assert asked == ["a red heart", "dark", "star"]
    assert torch.equal(first[0], again[2])
    assert torch.equal(first[1], again[0])
    compiled = torch.compile(lambda tokens: known(tokens)[0], backend="eager")
    assert torch.equal(compiled(tokens_of("star", "dark")), known(tokens_of("star", "dark"))[0])
    assert compiled(tokens_of("red", "star"))[0].isnan().any()
    with torch.device("meta"):
        assert known(torch.empty(3, 16, dtype=torch.int64))[0].shape == (3, 32, 32)


def test_captions_are_kept_in_the_cache(folder, monkeypatch):
    described, tokens = describe_encoder(str(folder)), tokens_of("a red heart", "a dark star", "")
    known = KnownTexts((), described)
    known.learn_captions(tokens)
    monkeypatch.setattr(pretrained_text, "_encode", lambda *args: pytest.fail("was in the cache"))
    other = KnownTexts((), described)
    other.learn_captions(tokens)
    assert torch.equal(known(tokens)[0], other(tokens)[0])


def test_what_is_no_encoder_is_refused(tmp_path, folder):
    def refused(words: str) -> None:
        with pytest.raises(RequestError, match=words):
            describe_encoder(str(tmp_path))

    refused("config.json cannot be read")
    for content, words in (
        ("[]", "model_type"),
        ('{"model_type": "gpt2"}', "'gpt2'"),
        ('{"model_type": "bert"}', "pickle"),
    ):
        (tmp_path / "config.json").write_text(content)
        refused(words)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "vocab.json").write_text("{}")
    refused("no tokenizer")  # half of one
    (tmp_path / "vocab.txt").write_text("a\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 1000000000}')
    refused("no width")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 32}')
    known = KnownTexts((), describe_encoder(str(tmp_path)))
    with pytest.raises(RequestError, match="transformers cannot load it"):
        known(tokens_of("a"))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 64}')
    with pytest.raises(RequestError, match="changed since"):
        known(tokens_of("a"))


@pytest.mark.slow
def test_a_run_keeps_a_reference_alone(tmp_path, monkeypatch):
    encoder = save_encoder(tmp_path / "encoder")
    pictures = np.random.default_rng(0).integers(0, 255, (24, 8, 8, 3), np.uint8)
    of = {
        "conditions": {"text": CAPTIONS},
        "text_encoder": {"pretrained": str(encoder), "layers": 1},
        "network": NETWORK,
    }
    run = unfog.train(pictures, out=tmp_path / "run", steps=2, **of, **TINY)
    stored = run.config.text_encoder
    assert (stored.pretrained, stored.pretrained_width) == (str(encoder), 32)
    assert len(stored.sha256) == 64
    known_texts.cache_clear()
    pretrained_text._load.cache_clear()
    os.rename(encoder, tmp_path / "elsewhere")
    short = unfog.resume(tmp_path / "run", steps=3)  # its captions are in the cache
    own = [name for name in short.network.state_dict() if name.startswith("text_encoder.")]
    assert {name.split(".")[1] for name in own} == {"words", "project", "layers"}
    loaded = unfog.load(tmp_path / "run")
    with pytest.raises(RequestError, match="which is not there"):
        loaded.sample(1, prompt="heart", steps=1)
    os.rename(tmp_path / "elsewhere", encoder)
    images = loaded.sample(2, prompt="heart", negative="dark", guidance=2, steps=1)
    assert images.shape == (2, 8, 8, 3)
    with pytest.raises(RequestError, match="pretrained encoder, which no format"):
        loaded.export(tmp_path / "export")
    with pytest.raises(RequestError, match="this run has none"):
        unfog.train(pictures, out=tmp_path / "none", steps=1, text_encoder={"pretrained": str(encoder)}, **TINY)
    assert json.loads((encoder / "config.json").read_text())["model_type"] == "bert"
