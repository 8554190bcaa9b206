"""CLIP and SigLIP of a folder: vectors as transformers and Pillow give them, and folders that are refused."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'unfog[text]'")

import transformers
from PIL import Image

from test_pretrained_text import SIZES, WORDS, save_encoder
from unfog.errors import RequestError
from unfog.models.pretrained.image_text import ImageTextModel
from unfog.models.pretrained_text import KnownTexts, describe_encoder

SIDE = 16
TEXTS = ["a red heart", "dark star", "a"]
CPU = torch.device("cpu")


def save_image_text(folder, kind="clip"):
    """Save a tiny CLIP or SigLIP with random weights, and a tokenizer of words."""
    save_encoder(folder, "bert")  # for its tokenizer
    torch.manual_seed(0)
    text = {"vocab_size": len(WORDS), "pad_token_id": 0, **SIZES, "max_position_embeddings": 8}
    vision = {**SIZES, "image_size": SIDE, "patch_size": 8}
    if kind == "clip":
        text |= {"eos_token_id": 5, "bos_token_id": 2}
        model = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
        )
    else:
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
    with torch.no_grad():
        for parameter in model.parameters():  # the usual ones are so small that all images look the same
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return save_image_text(tmp_path_factory.mktemp("clip"))


def pictures(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (3, height, width, channels), np.uint8)


def by_hand(folder, kind, images, mean, deviation):
    """Vectors by transformers and Pillow, image by image and text by text."""
    model = {"clip": transformers.CLIPModel, "siglip": transformers.SiglipModel}[kind].from_pretrained(folder).eval()
    x = []
    for one in images:
        image = Image.fromarray(one.squeeze()).convert("RGB")
        short = min(image.size)
        size = (SIDE, SIDE)
        if kind == "clip":
            size = tuple(SIDE * side // short for side in image.size)
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        x.append(np.asarray(image.crop((left, top, left + SIDE, top + SIDE))) / 255)
    x = (np.stack(x) - mean) / deviation
    with torch.no_grad():
        found = [model.get_image_features(pixel_values=torch.from_numpy(x.transpose(0, 3, 1, 2)).float())]
        for text in TEXTS:
            ids = [WORDS.index(word) for word in text.split()]
            ids += [0] * (8 - len(ids)) if kind == "siglip" else []
            found.append(model.get_text_features(input_ids=torch.tensor([ids])))
    seen, *told = (getattr(one, "pooler_output", one) for one in found)
    return tuple(one / one.square().sum(1, keepdim=True).sqrt() for one in (seen, torch.cat(told)))


@pytest.mark.parametrize(
    ("kind", "shape", "stored"),
    [
        ("clip", (24, 40, 3), None),
        ("clip", (SIDE, SIDE, 1), {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}),
        ("siglip", (24, 40, 3), None),
    ],
)
def test_vectors_are_those_of_transformers_and_pillow(tmp_path, kind, shape, stored):
    folder = save_image_text(tmp_path, kind)
    mean, deviation = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    if kind == "clip":  # as published (OpenAI's CLIP)
        mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    if stored:
        mean, deviation = stored.values()
        (folder / "preprocessor_config.json").write_text(json.dumps(stored))
    images = pictures(*shape)
    model = ImageTextModel(str(folder), CPU, "clip_folder")
    seen, told = by_hand(folder, kind, images, mean, deviation)
    # Pillow rounds after each direction of a resize: differences of a step of 255 in some pixels.
    atol = 0.02 if shape[0] != SIDE else 1e-5
    torch.testing.assert_close(model.images(torch.from_numpy(images.transpose(0, 3, 1, 2))), seen, atol=atol, rtol=0)
    assert (seen @ seen.T).fill_diagonal_(0).max() < 0.98, "images that look the same test nothing"
    torch.testing.assert_close(model.texts(TEXTS), told, atol=1e-5, rtol=0)


def test_folders_with_half_a_model_are_refused(tmp_path, clip):
    def refused(folder, words):
        with pytest.raises(RequestError, match=words) as said:
            ImageTextModel(str(folder), CPU, "clip_folder")
        assert "give a local folder of Hugging Face" in str(said.value)

    refused(tmp_path / "none", "config.json cannot be read")
    refused(save_encoder(tmp_path / "text", "clip"), "of text alone, without that of images")
    refused(save_encoder(tmp_path / "bert"), "'bert', and we read clip")
    folder = tmp_path / "half"
    shutil.copytree(clip, folder)
    config = json.loads((folder / "config.json").read_text())
    for changes, words in (
        ({"vision_config": None}, "no vision_config, so it has no encoder of images"),
        ({"vision_config": {**config["vision_config"], "image_size": 10**6}}, "cannot load it|up to 1024"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        refused(folder, words)
    (folder / "config.json").write_text(json.dumps(config))
    for wrong in ("[0, 1, 1]", "[NaN, 1, 1]", f"[1{'0' * 400}, 1, 1]"):
        (folder / "preprocessor_config.json").write_text(f'{{"image_std": {wrong}}}')
        refused(folder, "image_mean and image_std")
    (folder / "preprocessor_config.json").write_text("[" * 10_000)
    refused(folder, "preprocessor_config.json cannot be read")


def test_weights_that_are_missing_are_no_random_ones(tmp_path, clip, caplog):
    from safetensors.torch import load_file, save_file

    for part in ("text", "vision"):
        shutil.copytree(clip, folder := tmp_path / part)
        kept = {name: each for name, each in load_file(folder / "model.safetensors").items() if part not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(RequestError, match="lacks weights of CLIPModel"):
            ImageTextModel(str(folder), CPU, "clip_folder")
    known = KnownTexts((), describe_encoder(str(tmp_path / "text")))
    with pytest.raises(RequestError, match="lacks weights of CLIPTextModel"):
        known(torch.tensor([[*b"a red heart"]]))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # as it does not pass its records on
    caplog.clear()
    whole = KnownTexts((), describe_encoder(str(clip)))  # of a whole CLIP, its text part
    assert whole(torch.tensor([[*b"a red heart"]]))[0].isfinite().all()
    logger.removeHandler(caplog.handler)
    assert not caplog.records, "the weights of its other part are not listed"
