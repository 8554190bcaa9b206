"""kill -9 and Ctrl-C in runs with captions: each way to read and train on them ends as if nothing had happened."""

import numpy as np
import pytest
from PIL import Image

from faults.harness import (
    Recipe,
    assert_same,
    long_form,
    lost_steps,
    resume,
    step_reached,
    steps_saved,
    train,
)
from random_weights import random_autoencoder

STEPS, EVERY = 16, 2
NAMES = [
    "a red heart",
    "a dark heart\nheart in the dark",
    "a red star",
    "a dark star\n\nstar\na star",
    "ein roter Stern",
]


def captioned(folder, sides=((12, 12),)):
    """24 pictures with text files beside them: some have several captions, and some none."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for i in range(24):
        pixels = generator.integers(0, 255, (*sides[i % len(sides)], 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
        if i % 7:
            (folder / f"{i:02}.txt").write_text(NAMES[i % len(NAMES)])
    return folder


def encoder(folder):
    """A frozen encoder of texts with random weights."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'unfog[text]'")
    from test_pretrained_text import save_encoder

    return save_encoder(folder)


def recipe(way, folder) -> Recipe:
    """A run of 16 steps in micro-batches of 3, which reads its captions in some way."""
    flags: dict[str, object] = {"--condition": "text", "--size": 8}
    source = folder / "images"
    if way == "aspect":
        captioned(source, ((12, 12), (8, 18)))
        flags |= {"--aspect": "keep", "--size": 16}
    else:
        captioned(source)
    if way in ("pretrained", "latents"):
        flags |= {"--text-encoder.pretrained": encoder(folder / "encoder"), "--text-encoder.layers": 1}
    if way == "latents":
        flags |= {"--autoencoder": random_autoencoder(folder / "autoencoder").folder, "--size": 32, "--data.jitter": 0}
    if way == "bf16":
        flags |= {"--precision": "bf16"}
    return Recipe(f"captions-{way}", STEPS, EVERY, flags, str(source))


@pytest.mark.parametrize(
    ("way", "end"),
    [
        ("own", "SIGKILL"),
        ("pretrained", "SIGKILL"),
        pytest.param("own", "SIGINT", marks=long_form),
        *(pytest.param(way, "SIGKILL", marks=long_form) for way in ("bf16", "aspect", "latents")),
    ],
)
def test_a_run_with_captions_goes_on_to_the_bit(tmp_path, faults, monkeypatch, way, end):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    one, run, reference = recipe(way, tmp_path), tmp_path / "run", tmp_path / "reference"
    train(one, reference).ends()
    with faults.tried(f"{end} in a run with captions ({way})") as attempt:
        job = train(one, run)
        assert job.until(lambda: step_reached(run) >= 5), job.said
        if end == "SIGKILL":
            job.kill()
            attempt.lost.append(lost_steps(run))
        else:
            job.ask(end, run)
            job.ends(3)
        assert 0 < max(steps_saved(run)) < STEPS, "it was ended on its way"
        resume(run).ends()
        assert_same(run, reference)
