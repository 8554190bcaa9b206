"""The report: one file, nothing from outside, right numbers, and no markup from settings or events."""

import base64
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

from unfog.errors import RequestError
from unfog.reporting.image_grids import grid
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.reporting.report import write_report
from unfog.reporting.report_charts import finite_column, metric_charts, smoothed

VOID = {"meta", "img", "br"}
CONFIG = """
seed = 7
out = "<script>alert(1)</script>"
betas = [0.9, 0.999]
[diffusion]
conditioning = "timestep"
[diffusion.schedule]
kind = "cosine"
"""


class Page(HTMLParser):
    """Checks that tags are balanced, and gathers attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.images = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


def page(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    text = path.read_text()
    parsed = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[\w+/=]+", "", text))
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert "link" not in {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert "href" not in attributes
    return parsed


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "my <b>photos"
    pictures = np.random.default_rng(0).integers(0, 255, (40, 9, 16, 16), np.uint8)
    with Recorder(path, Log(every=1), total=400) as run:
        run.event("started", 0, device="cpu")
        run.event("data", 0, used=123, refused=4)
        run.event("choice", 0, name="precision", value="bf16", reason="the <i>hardware</i> has it")
        for i in range(40):
            step = 10 * (i + 1)
            loss = float("nan") if i == 20 else 1 / (i + 1)
            run.log(step, step * 8, loss=loss, gradient_norm=2.0, lr=1e-4, images_per_second=100.0 + i)
            run.log_image(step, "samples", grid(pictures[i], gap=0))
        run.log(400, 3200, loss_by_level=[0.5] * 10, held_out_by_level=[0.6] * 10, held_out_loss=0.625)
        run.event("step_refused", 210, gradient_norm=float("inf"))
    (path / "config.toml").write_text(CONFIG)
    for step, manifest in ((200, True), (400, False)):
        folder = path / "checkpoints" / f"{step:08d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(2_000_000))
        if manifest:
            (folder / "manifest.json").write_text("{}")
    return path


def test_report_says_what_the_run_folder_says(run_dir):
    parsed = page(run_dir)
    text = "\n".join(parsed.texts)
    assert "my <b>photos" in parsed.texts  # as text, not as markup
    assert "<script>alert(1)</script>" in parsed.texts
    assert "the <i>hardware</i> has it" in parsed.texts
    assert {"diffusion.schedule", "cosine", "0.9, 0.999", "3,200", "400 steps", "0.625", "123"} <= set(parsed.texts)
    assert "120" in parsed.texts  # median images a second
    assert "newest at step 200, 2.0 MB" in parsed.texts  # a checkpoint without manifest is none
    assert "gradient_norm inf" in parsed.texts
    assert "not ended" in parsed.texts
    titles = ["Loss", "Loss by noise level", "Gradient norm", "Learning rate", "Speed"]
    assert [t for t in parsed.texts if t in titles and text.count(t)][:5] == titles
    assert sum(tag == "svg" for tag, _ in parsed.tags) == 5


def test_what_a_run_went_through_needs_attention(tmp_path):
    troubles = ("rolled_back", "disk_full", "not_removed", "averages_left_out")
    with Recorder(tmp_path, Log(every=1), total=400) as run:
        for kind in (*troubles, "rolled_back"):
            run.event(kind, 7, reason="why it was")
    text = "\n".join(page(tmp_path).texts)
    assert "roll-backs\n2\n" in text
    listed = text.partition("Needs attention")[2].partition("Events")[0]
    assert all(kind in listed for kind in troubles)


def test_refused_steps_that_a_resume_trained_again_are_not_counted(tmp_path):
    with Recorder(tmp_path, Log(), total=100) as run:
        run.event("started", 0)
        run.event("step_refused", 5)
        run.event("step_refused", 30)
        run.event("resumed", 20)
    assert "steps skipped\n1\n" in "\n".join(page(tmp_path).texts)


def test_samples_are_the_last_grid_and_twelve_over_time(run_dir):
    parsed = page(run_dir)
    assert len(parsed.images) == 13
    data = base64.b64decode(parsed.images[0]["src"].split(",")[1])
    assert data == (run_dir / "samples" / "00000400.png").read_bytes()
    steps = [int(re.search(r"step (\d+)", image["alt"])[1]) for image in parsed.images[1:]]
    assert steps[0] == 10
    assert steps[-1] == 400
    assert {b - a for a, b in pairwise(steps)} <= {30, 40}


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        (["finished"], "finished"),
        (["stopped", "resumed"], "not ended"),
        (["stopped", "resumed", "failed"], "failed"),
        (["stopped"], "stopped"),
    ],
)
def test_state_is_that_of_the_last_start(run_dir, kinds, word):
    with Recorder(run_dir, Log(), total=400, start=400) as run:
        for kind in kinds:
            run.event(kind, 400, reason="signal 15")
    texts = page(run_dir).texts
    assert word in texts
    if word != "not ended":
        assert "at step 400 · signal 15" in texts


def test_the_report_is_there_from_the_first_step_and_follows_the_run(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Recorder(tmp_path, Log(every=1), total=150) as run:
        run.event("started", 0)
        run.begin_report()
        path = tmp_path / "report.html"
        assert "0/150" in path.read_text()
        for step in range(1, 61):
            now[0] += 0.5
            run.update_progress(step)
            run.log(step, step * 8, loss=1 / step)
        text = path.read_text()
        assert "running" in text
        assert re.search(r"(5\d|60)/150, 4\d s left", text)
        assert 'http-equiv="refresh"' in text
        run.event("finished", 60)
    write_report(tmp_path)
    assert 'http-equiv="refresh"' not in path.read_text()


def test_a_report_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    def failing(*_):
        raise ValueError("a chart of nothing")

    monkeypatch.setattr("unfog.reporting.recorder.write_report", failing)
    with Recorder(tmp_path, Log(every=1), total=150) as run:
        run.begin_report()
        run.log(1, 8, loss=1.0)
    assert "a chart of nothing" in (tmp_path / "events.jsonl").read_text()


def test_empty_and_broken_records_still_make_a_page(tmp_path):
    (tmp_path / "config.toml").write_text("not = [toml")
    assert "Nothing has been logged yet." in page(tmp_path).texts
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "images": 40, "seconds": null, "loss": null}\n{"st')
    (tmp_path / "events.jsonl").write_text('{"kind": "choice"}\n{"kind": 3, "x": {"a": [1, null]}}\n')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "00000005.png").write_bytes(b"\x89PNG cut short")
    (tmp_path / "samples" / "notes.png").write_bytes(b"")
    parsed = page(tmp_path)
    assert parsed.images == []
    assert "40" in parsed.texts


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match="is not a run"):
        write_report(tmp_path)


def test_columns_skip_lines_without_the_value():
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "held_out_loss": 1.0}, {"step": 3, "loss": float("nan")}]
    steps, values = finite_column(rows, "loss")
    assert (steps.tolist(), values.tolist()) == ([1.0], [2.0])
    assert metric_charts([]) == []


def test_smoothing_keeps_a_constant_and_halves_the_noise():
    np.testing.assert_allclose(smoothed(np.full(500, 3.0)), 3.0)
    noise = np.random.default_rng(0).normal(size=4000)
    assert smoothed(noise)[1000:].std() < 0.2 * noise.std()
    ramp = np.linspace(1, 0, 4000)
    assert np.abs(smoothed(ramp) - ramp).max() < 0.03
