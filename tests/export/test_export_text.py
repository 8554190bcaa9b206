"""Exports of runs on captions: they read a prompt without Unfog, and draw what the run draws of it."""

import ast
import json
from dataclasses import replace
from runpy import run_path

import numpy as np
import pytest
import torch

from test_export import COUNT, CPU, DIT, MPUNET, UNET, inputs, run_card_code, run_of, shown
from unfog.data.columns.captions import caption_column
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.noise import NoiseSource
from unfog.inference.exports.conditions import describe_columns
from unfog.models.settings import TextEncoderSettings
from unfog.pipeline.generate import GenerationSettings, conditional_denoiser
from unfog.values.condition_format import ConditionFormat, facts_of
from unfog.values.condition_kinds import ColumnFacts

CAPTIONS = ["a red heart", "a dark heart", "a red star \U0001f389", "ein grüner Stern"] * 3
NAMES = [f"{i}.png" for i in range(12)]
FACTS = facts_of([caption_column("says", CAPTIONS, NAMES, lambda: np.arange(12))])
AGE = ColumnFacts("age", "number", statistics=(50.0, 20.0, 20.0, 89.0))
PROMPTS = ["A red  STAR", "", "a Dark he\u200bart"]
NEGATIVE = "dark"


def with_text(network=DIT, classes=3, columns=(AGE, *FACTS), **changes):
    encoder = TextEncoderSettings(1, 32)
    return run_of(network=network, classes=classes, columns=columns, text_encoder=encoder, guidance=2.0, **changes)


@torch.inference_mode()
def drawn(run, negative: str = "") -> torch.Tensor:
    """Samples of a run as `unfog sample` draws them of `PROMPTS`, about [-1, 1]."""
    config = run.config
    format, others = config.conditions, {"class": [0, 1, 2]} if config.classes else {}
    given = format.parse(
        {"says": PROMPTS, **others, **({"age": [20.0, 30.0, 40.0]} if len(config.columns) > 1 else {})}
    )
    settings = replace(GenerationSettings.default(config, COUNT, COUNT), given=given)
    settings = replace(settings, negative=format.read_negative(negative))
    conditions = settings.conditions(config, range(COUNT), CPU)
    denoise = conditional_denoiser(Denoiser(run.network, config.diffusion), config, settings, conditions)
    draw = NoiseSource(0, range(COUNT), config.input_shape).draw
    sampler = config.representation.sampler(config.sampler)
    return run.decode(sampler(denoise, config.diffusion.path, config.diffusion.schedule, draw))


def close(found, expected) -> bool:
    return float((torch.as_tensor(found) - expected).abs().max()) < 1e-3


def has_no_unfog(folder) -> None:
    for file in folder.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        assert not any("unfog" in ast.unparse(one) for one in nodes if isinstance(one, ast.Import | ast.ImportFrom))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((UNET, "safetensors"), id="safetensors"),
        pytest.param((DIT, "onnx"), id="onnx"),
        pytest.param((MPUNET, "onnx"), id="mpunet", marks=pytest.mark.exhaustive),
        pytest.param((DIT, "pt2"), id="pt2", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_a_prompt_is_read_and_drawn_without_unfog(tmp_path, case):
    network, format = case
    run = with_text(network)
    run.export(tmp_path / "out", format=format)
    has_no_unfog(tmp_path / "out")
    code = shown("onnx" if format == "onnx" else "safetensors")
    model, loaded = code.load(tmp_path / "out")
    read = run_path(str(tmp_path / "out/given.py"))["read"]
    columns = read(model["conditions"], {"says": PROMPTS, "age": [20, 30, 40]}, COUNT)
    away = read(model["conditions"], {"says": NEGATIVE}, COUNT)
    noise, label = inputs(run)
    if format == "onnx":
        noise, label = noise.numpy(), label.numpy()
        typed = {one.name: (one.type, one.shape[1:]) for one in loaded["model"].get_inputs()}
        assert typed["says"] == ("tensor(int64)", [16])
    assert close(code.sample(model, loaded, noise, label, columns), drawn(run))
    assert close(code.sample(model, loaded, noise, label, columns, away), drawn(run, NEGATIVE))
    assert not close(code.sample(model, loaded, noise, label, columns, away), drawn(run))
    run_card_code(tmp_path / "out", (8, 8))
    card = (tmp_path / "out/README.md").read_text()
    assert "captions of up to 16 tokens" in card
    assert '{"age": 50.0, "says": "' in card


@pytest.mark.slow
def test_a_pipeline_takes_a_prompt(tmp_path):
    from diffusers import DiffusionPipeline

    run = with_text(UNET, classes=0, columns=FACTS)
    run.export(tmp_path / "out", format="diffusers")
    has_no_unfog(tmp_path / "out")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True, low_cpu_mem_usage=False)
    pipe.set_progress_bar_config(disable=True)

    def images(*prompts, **named):
        noise = NoiseSource(0, range(COUNT), run.config.input_shape)
        of = {"num_inference_steps": run.config.sampler.steps, "output_type": "np", "generator": noise.generators}
        return 2 * torch.from_numpy(pipe(*prompts, **of, **named).images).permute(0, 3, 1, 2) - 1

    plain, led = drawn(run).clamp(-1, 1), drawn(run, NEGATIVE).clamp(-1, 1)
    assert close(images(PROMPTS), plain)
    assert close(images(prompt=PROMPTS, negative_prompt=NEGATIVE), led)
    assert close(images(COUNT, given={"says": PROMPTS}), plain)
    assert len(pipe("a red heart", num_inference_steps=2).images) == 1
    for wrong, message in (
        (lambda: pipe("a", prompt="b"), "give one of them"),
        (lambda: pipe("a", says="b"), "the same"),
        (lambda: pipe(prompt=3), "is not a text"),
        (lambda: pipe("heart " * 99), "longer than 16"),
        (lambda: pipe("a", negative_prompt="b", guidance_scale=1), "no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert 'prompt="' in (tmp_path / "out/README.md").read_text()
    run_card_code(tmp_path / "out", (8, 8))


@pytest.mark.slow
def test_a_denoiser_takes_a_prompt_and_its_file_defines_each_name_once(tmp_path):
    for network in (UNET, MPUNET, DIT):
        run = with_text(network, classes=0, columns=FACTS)
        run.export(tmp_path / network.kind, format="denoiser")
        body = ast.parse((tmp_path / network.kind / "denoiser.py").read_text()).body
        names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        names += [ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)]
        assert len({*names}) == len(names)
    denoiser = run_path(str(tmp_path / "dit/denoiser.py"))["load"](tmp_path / "dit/denoiser.safetensors")
    x = torch.randn(2, *denoiser.shape)
    one, other = (denoiser(x, 0.5, given={"says": text}) for text in ("a red heart", None))
    assert not torch.equal(one, other)
    assert torch.equal(other, denoiser(x, 0.5))


def test_prompts_become_the_tokens_of_unfog(tmp_path):
    format, run = ConditionFormat(columns=FACTS), with_text(classes=0, columns=FACTS)
    run.export(tmp_path / "out")
    read = run_path(str(tmp_path / "out/given.py"))["read"]
    described = json.loads((tmp_path / "out/model.json").read_text())["conditions"]
    texts = [*CAPTIONS, *PROMPTS, "x\0y\n\tz", "日本語 \u202egnp", "\ud800", "É e\u0301"]
    expected = format.conditions(format.parse({"says": texts}), range(len(texts))).tokens
    with pytest.warns(UserWarning, match="seldom"):
        assert torch.equal(torch.tensor(read(described, {"says": texts}, len(texts))[0]), expected)
    assert (
        described == describe_columns(run.config) or json.loads(json.dumps(describe_columns(run.config))) == described
    )
    with pytest.raises(ValueError, match="longer than 16"):
        read(described, {"says": "word " * 99}, 1)
