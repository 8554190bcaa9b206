"""Model cards of exports: front matter that huggingface_hub reads, contents, code that runs, and nothing private."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from test_export import DIT, DOCS, UNET, drawn, latent_run, run_card_code, run_of
from test_export_text import AGE, FACTS
from unfog.errors import RequestError
from unfog.evaluation.condition_worth import ConditionWorth
from unfog.evaluation.judged_kinds import ConditionScore
from unfog.evaluation.metrics import MetricResult
from unfog.inference.evaluation_files import Evaluation
from unfog.inference.exports.model_card import CardSettings, _metric_row, model_card, to_yaml
from unfog.process.machine_key import machine_key
from unfog.values.condition_kinds import ColumnFacts

HERE = "/home/somebody/secret-place/holiday"


def on_disk(tmp_path, run):
    """The run with a folder that has a report on its images and evaluations."""
    folder = tmp_path / "holiday"
    (folder / "evaluations").mkdir(parents=True)
    run.folder = SimpleNamespace(path=folder)
    data = {"source": HERE, "used": 1200, "held_out": 100, "class_counts": {"class 0": 700, "class 1": 400}}
    (folder / "data.json").write_text(json.dumps(data | {"files": [{"name": f"{HERE}/me.jpg"}]}))
    run.config = replace(run.config, source=f"https://user:secret@example.org{HERE}?signature=abc")
    return folder


def measured(folder, name, weights="ema", value=3.25, low=3.0, **more):
    one = MetricResult("fid", value, low, 3.5, 0.125, 5000, 1100, "inception", "clean", real=1.5, drawn="steps 6")
    drawn = {"weights": weights, "sampler": "dpmpp", "steps": 6, "seed": 0, "reference": HERE, **more}
    Evaluation(7, drawn, [one], verdict="Fine.").write(folder / "evaluations" / name, machine_key())


def test_a_row_of_the_card_has_the_range_of_real_images():
    one = MetricResult("spectrum", 0.5, None, None, None, 100, 200, "none", "none", real=0.3)
    assert _metric_row(one)[4] == "0.3"
    assert _metric_row(replace(one, real_low=0.1552, real_high=0.438))[4] == "0.1552 to 0.438"


@pytest.mark.slow
def test_figures_of_another_machine_are_marked_in_the_text_and_in_the_index(tmp_path, monkeypatch):
    run = run_of()
    measured(on_disk(tmp_path, run), "00000007-a.json")
    monkeypatch.setattr("unfog.inference.exports.model_card.machine_key", lambda: b"another key")
    run.export(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "has not measured" in card.text
    assert "not measured on the machine" in card.data.eval_results[0].metric_name


@pytest.mark.slow
def test_the_front_matter_is_what_the_hub_reads_with_metrics_and_their_errors(tmp_path):
    run = run_of()
    folder = on_disk(tmp_path, run)
    measured(folder, "00000007-a.json")
    measured(folder, "00000007-b.json", "raw", 99.0)  # of other weights
    measured(folder, "00000006-a.json", value=98.0)  # of another step
    measured(folder, "00000007-c.json", low="about 3")  # edited by somebody
    measured(folder, "00000007-d.json", value=1.0, guide="auto")  # of guided samples, which the export cannot draw
    os.utime(folder / "evaluations/00000007-a.json", (1, 1))
    run.export(tmp_path / "out", license="cc-by-4.0")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.license == "cc-by-4.0"
    assert (card.data.library_name, card.data.pipeline_tag) == ("pytorch", "unconditional-image-generation")
    assert card.data.tags == ["unfog", "diffusion", "class-conditional"]
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("fid", 3.25, "holiday")
    assert result.metric_name == "fid (n = 5,000, features inception, standard error 0.125, 95% 3 to 3.5)"
    assert "has not measured" not in card.text
    assert "| fid | 3.25 | 0.125 | 3 to 3.5 | 1.5 | 5,000 | 1,100 | inception, resize clean |" in card.text
    assert "1,200, of which 100 were held out of training" in card.text
    assert "class 0 (700), class 1 (400), class 2" in card.text


@pytest.mark.slow
def test_the_card_has_whether_conditions_are_obeyed_and_what_they_are_worth(tmp_path):
    run = run_of()
    folder = on_disk(tmp_path, run) / "evaluations"
    score = ConditionScore("text", "text", "R@1", 0.5, 0.4, 0.6, 100, 0.9, 0.8, 1.0, 50, 0.01, obeyed="partly")
    worth = ConditionWorth("text", 0.25, 0.125, 0.1, 0.15, None, None, None, 8)
    drawn = {"weights": "ema", "steps": 6}
    Evaluation(7, drawn, [], obeys=[score], judge="of <b>captions</b>", worth=[worth]).write(
        folder / "00000007-a.json", machine_key()
    )
    guided = replace(score, value=0.75)  # the export has no guide
    Evaluation(7, {**drawn, "guide": "auto"}, [], obeys=[guided], judge="guided").write(
        folder / "00000007-b.json", machine_key()
    )
    run.export(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "| text | R@1 | 0.5 | 0.4 to 0.6 | 0.9 (0.8 to 1) | 0.01 | 100 | partly |" in card
    assert "| text | +0.125 | +0.1 to +0.15 | not trained |  |" in card
    assert "of \\<b\\>captions" in card
    assert "guided" not in card
    edited = json.loads((folder / "00000007-a.json").read_text())
    edited["obeys"][0]["value"] = "half"
    (folder / "00000007-a.json").write_text(json.dumps(edited))
    run.export(tmp_path / "again")
    assert "R@1" not in (tmp_path / "again/README.md").read_text()


MASK = ColumnFacts("mask", "mask", ("0", "3"), (1.0, 8.0, 8.0))


@pytest.mark.parametrize(
    ("columns", "task"),
    [((AGE, *FACTS), "text-to-image"), ((AGE, MASK), "image-to-image"), ((AGE,), None)],
    ids=["captions", "a mask", "a number"],
)
def test_the_task_is_that_of_the_conditions(tmp_path, columns, task):
    run = run_of("default", DIT)
    measured(on_disk(tmp_path, run), "00000007-a.json")
    run.config = replace(run.config, columns=columns)
    (tmp_path / "README.md").write_text(model_card(run, CardSettings("torch", "", "", "a grid", "none")))
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.get("pipeline_tag") == task
    assert data.eval_results[0].task_type == (task or "other")


@pytest.mark.slow
def test_an_export_tells_neither_places_nor_credentials_nor_names_of_files(tmp_path):
    run = run_of()
    measured(on_disk(tmp_path, run), "00000007-a.json")
    run.export(tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        for secret in (b"somebody", b"secret", b"signature", b"example.org", b"me.jpg", str(tmp_path).encode()):
            assert secret not in file.read_bytes(), (file, secret)


@pytest.mark.slow
def test_a_card_without_licence_and_metrics_says_so_and_has_no_index(tmp_path):
    run_of(classes=0).export(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.license is None
    assert card.data.eval_results is None
    assert "add a line `license: …`" in card.text
    assert "Not measured." in card.text


@pytest.mark.slow
def test_names_of_classes_cannot_become_markdown_or_html(tmp_path):
    run = run_of()
    run.config = replace(run.config, classes=("[a](http://evil)", "<script>", "x|y\n# z"))
    run.export(tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert "[a](" not in text.replace("\\[a\\](", "")
    assert "<script" not in text.replace("\\<script", "")
    assert "\n# z" not in text


def test_yaml_is_read_back_as_it_was():
    parser = pytest.importorskip("yaml")
    value = {"a": ["x: y", "#", "ä😀", "- no", ""], "b": [{"c": 1.5, "d": [{"e": "yes"}]}], "f": "null"}
    assert parser.safe_load(to_yaml(value)) == value


CASES = {
    "safetensors": (lambda path: run_of(), "safetensors"),
    "no classes": (lambda path: run_of("ddpm", classes=0), "safetensors"),
    "latents": (lambda path: latent_run(path, "ours"), "safetensors"),
    "latents of diffusers": (lambda path: latent_run(path, "AutoencoderKL"), "safetensors"),
    "diffusers": (lambda path: run_of(network=DIT), "diffusers"),
    "stock diffusers": (lambda path: run_of("ddpm", UNET, 0), "diffusers"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.slow
def test_the_code_of_the_card_runs_and_draws_the_model(tmp_path, case):
    build, kind = case
    run = build(tmp_path / "autoencoder")
    run.export(tmp_path / "out", format=kind)
    assert Image.open(tmp_path / "out/samples.png").width >= 3 * run.config.data.size
    found = run_card_code(tmp_path / "out", (run.config.data.size,) * 2)
    if kind == "safetensors":  # with the noise of a run, the code gives the samples of that run
        noise = found["noise"][:3]
        x = found["code"]["sample"](found["model"], found["network"], noise, torch.arange(3) if run.classes else None)
        if found["model"]["latents"]:
            x = found["runpy"].run_path(f"{tmp_path}/out/network.py")["decode"](found["model"], tmp_path / "out", x)
        assert (x - drawn(run, lambda *_: noise)).abs().max() < 1e-3


def test_wrong_licences_and_public_without_a_repository_are_refused(tmp_path):
    with pytest.raises(RequestError, match=r"license = 'Free \(mine\)' is not an identifier"):
        run_of().export(tmp_path / "out", license="Free (mine)")
    with pytest.raises(RequestError, match="public needs a repository"):
        run_of().export(tmp_path / "out", public=True)


def test_docs_and_exports_have_the_same_code():
    for name in ("torch", "onnx"):
        source = (DOCS.parents[1] / f"src/unfog/export/sample_{name}.py").read_text()
        assert source.partition('"""\n\n')[2] in DOCS.read_text()
