"""The report: one file, nothing from outside, right numbers, and no markup from settings or events."""

import base64
import hashlib
import io
import json
import os
import re
import shlex
import struct
from contextlib import suppress
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from hostile import chunk
from unfog.errors import RequestError
from unfog.files.seals import seal_of_object
from unfog.process.machine_key import machine_key
from unfog.reporting import notebook
from unfog.reporting.channel_sheets import encode_channels
from unfog.reporting.image_grids import decode_png, encode_png, grid
from unfog.reporting.log_settings import Log
from unfog.reporting.page.run_data import read_evaluations
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import finite_column, smoothed
from unfog.reporting.report import pack_columns, thin_columns, write_report
from unfog.serve.run_files import read_webp

VOID = {"meta", "link"}
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
    """Checks that tags are balanced, and gathers attributes and the texts of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.inside = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.inside.append((self.open[-1], dict(self.tags[-1][1]).get("type"), data))


def embedded(text):
    """The run that a report holds, after what every report must be: one file, whose policy lets nothing else run."""
    parsed = Page(text)
    tags = {tag for tag, _ in parsed.tags}
    assert tags <= {"html", "head", "meta", "title", "style", "script", "body", "unfog-page", "div", "noscript", "link"}
    for _, attributes in parsed.tags:
        assert not {"src", "style"} & set(attributes)
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    hashes = set(re.findall(r"'sha256-([^']+)'", policy))
    code = [data for tag, kind, data in parsed.inside if kind != "application/json"]
    assert {base64.b64encode(hashlib.sha256(data.encode()).digest()).decode() for data in code} == hashes
    assert re.sub(r"'sha256-[^']+'", "HASH", policy) == (
        "default-src 'none'; script-src HASH; style-src HASH; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    (data,) = [json.loads(data) for _, kind, data in parsed.inside if kind == "application/json"]
    (run,) = data["runs"]
    uris = [one["picture"] if isinstance(one, dict) else one for one in run["pictures"].values()]
    assert all(uri.startswith("data:image/png;base64,") for uri in uris)
    return run


def columns_of(run):
    """Decode what `pack_columns` wrote, as the page does."""
    raw = base64.b64decode(run["metrics"])
    (length,) = struct.unpack_from("<I", raw)
    assert (4 + length) % 8 == 0
    header = json.loads(raw[4 : 4 + length])
    values = np.frombuffer(raw, "<f4", offset=4 + length).reshape(len(header["columns"]), header["rows"])
    return dict(zip(header["columns"], values))


def report(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return embedded(path.read_text())


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
    run = report(run_dir)
    assert run["name"] == "my <b>photos"
    assert run["settings"]["out"] == "<script>alert(1)</script>"
    assert run["settings"]["diffusion.schedule.kind"] == "cosine"
    assert run["settings"]["betas"] == "0.9, 0.999"
    assert run["choices"] == [{"setting": "precision", "value": "bf16", "reason": "the <i>hardware</i> has it"}]
    assert run["data"]["fields"] == {"used": "123", "refused": "4"}
    assert run["checkpoints"] == [200]  # without manifest it is none
    assert run["checkpoint_bytes"] == 2_000_002
    assert run["status"] == {"state": "not ended", "detail": run["status"]["detail"], "step": 400, "steps": None}
    columns = columns_of(run)
    assert columns["images"][-1] == 3200
    assert columns["held_out_loss"][-1] == 0.625
    assert np.isnan(columns["loss"][20])
    np.testing.assert_allclose(columns["loss"][:20], 1 / np.arange(1, 21), rtol=1e-6)
    assert columns["loss_by_level.9"][-1] == 0.5
    assert run["events"][-1]["cause"].startswith("the gradient was not finite")
    text = (run_dir / "report.html").read_text()
    assert "my &lt;b>photos · Unfog" in text  # as text, not as markup
    assert "<script>alert" not in text


def test_long_runs_are_thinned_and_keep_their_extremes():
    steps = np.arange(100_000.0)
    loss = np.sin(steps / 5000)
    loss[34_567], loss[77_777] = 9.0, -9.0
    held_out = np.where(steps % 1000 == 0, steps, np.nan)
    levels = {f"loss_by_level.{i}": loss + i for i in range(10)}
    found = thin_columns({"step": steps, "loss": loss, "held_out_loss": held_out, **levels}, 600)
    assert len(found["loss.mean"]) == 600
    assert found["loss.max"].max() == 9
    assert found["loss.min"].min() == -9
    assert found["step.last"][-1] == 99_999
    assert "loss_by_level.3.max" not in found
    np.testing.assert_array_equal(found["held_out_loss.last"][np.isfinite(found["held_out_loss.last"])], steps[::1000])
    packed = {"metrics": base64.b64encode(pack_columns(found))}
    assert len(packed["metrics"]) < 100_000
    np.testing.assert_allclose(columns_of(packed)["loss.mean"], found["loss.mean"], rtol=1e-6)


@pytest.mark.slow
def test_a_report_stays_of_a_bounded_size(tmp_path):
    levels = [0.5] * 10
    rows = [json.dumps({"step": i, "loss": 1 / (i + 1), "loss_by_level": levels, "lr": 1e-4}) for i in range(30_000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    rows = [json.dumps({"kind": "warning", "step": i, "message": "x" * 5000}) for i in range(3000)]
    (tmp_path / "events.jsonl").write_text("\n".join(rows))
    run = report(tmp_path)
    assert run["rows"] == 30_000
    assert (len(run["events"]), run["events_left_out"]) == (300, 2700)
    assert (tmp_path / "report.html").stat().st_size < 1_700_000


def test_what_a_run_went_through_needs_attention(tmp_path):
    troubles = ("rolled_back", "disk_full", "not_removed", "averages_left_out")
    with Recorder(tmp_path, Log(every=1), total=400) as run:
        for kind in (*troubles, "rolled_back"):
            run.event(kind, 7, reason="why it was")
    run = report(tmp_path)
    assert run["counts"]["rolled_back"] == 2
    assert [event["kind"] for event in run["events"] if event["trouble"]] == [*troubles, "rolled_back"]
    assert all("why it was" in event["cause"] and event["remedy"] for event in run["events"])


def test_refused_steps_that_a_resume_trained_again_are_not_counted(tmp_path):
    with Recorder(tmp_path, Log(), total=100) as run:
        run.event("started", 0)
        run.event("step_refused", 5)
        run.event("step_refused", 30)
        run.event("resumed", 20)
    assert report(tmp_path)["counts"]["step_refused"] == 1


def test_a_picture_of_a_run_is_a_png_whatever_its_name_says(run_dir, tmp_path, monkeypatch):
    """Pillow reads PostScript by starting Ghostscript on it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\necho started >> {shlex.quote(str(tmp_path / 'started'))}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with suppress(OSError), Image.open(io.BytesIO(script), formats=["EPS"]) as image:
        image.load()
    assert (tmp_path / "started").exists()  # it would
    (tmp_path / "started").unlink()
    before = report(run_dir)["pictures"]
    (run_dir / "samples/00000400.png").write_bytes(script)
    (run_dir / "contact-sheet.png").write_bytes(script)
    after = report(run_dir)["pictures"]
    assert "preview/400" in before
    assert "preview/400" not in after
    assert notebook.table({}, run_dir / "contact-sheet.png", run_dir, "") == "<table></table>"
    with pytest.raises(RequestError, match="not a PNG"):
        read_webp(run_dir / "contact-sheet.png", run_dir)
    assert not (tmp_path / "started").exists()


def test_a_picture_of_a_run_that_takes_long_is_left_out():
    png = encode_png(np.zeros((4, 4), np.uint8))
    assert decode_png(png).size == (4, 4)
    with pytest.raises(ValueError, match="over"):
        decode_png(png[:33] + chunk(b"abCd") * 10_001 + png[33:])


@pytest.mark.parametrize(
    "linked", ["samples", "evaluations", "evaluations/sub", "checkpoints", "denoising", "channels"]
)
def test_a_linked_folder_in_a_run_is_not_read(run_dir, tmp_path, linked):
    """A report is sent to others; what is elsewhere on this machine must not get into it."""
    stored = {"step": 7, "drawn": {}, "measured": [], "copies": [{"picture": "sub/q.png"}, {"picture": "q.png"}]}
    places = {"evaluations/00000007-a.json": json.dumps(stored).encode(), "checkpoints/00000007/manifest.json": b"{}"}
    for name in ("evaluations/sub/q.png", "evaluations/q.png", "samples/00000007.png", "denoising/00000007.png"):
        places[name] = encode_png(np.zeros((4, 4), np.uint8))
    places["channels/00000007.png"] = encode_channels(np.zeros((1, 1, 4, 4), np.uint8), [[0, 1, 2]])
    for name, content in places.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_bytes(content)
    (run_dir / linked).rename(tmp_path / "outside")
    (run_dir / linked).symlink_to(tmp_path / "outside")
    run = report(run_dir)
    shown = {
        "samples": run["previews"],
        "denoising": run["denoising"],
        "channels": run["channels"],
        "evaluations": run["evaluations"],
        "evaluations/sub": [one for one in run["evaluations"] if one["copies"][0]["picture"]],
        "checkpoints": run["checkpoints"],
    }
    assert not shown[linked]
    shown = {name: found for name, found in shown.items() if (linked, name) != ("samples", "channels")}
    assert all(found for name, found in shown.items() if not name.startswith(linked) and not linked.startswith(name))


def test_results_that_this_machine_has_not_sealed_are_marked(run_dir):
    one = {"metric": "fid", "value": 3.2, "n": 10, "n_reference": 10}
    stored = {"step": 7, "drawn": {}, "measured": [one], "copies": []}
    files = {
        "own": stored | {"seal": seal_of_object(machine_key(), "own.json", stored)},
        "other key": stored | {"seal": seal_of_object(b"of another machine", "other key.json", stored)},
        "without": stored,
        "changed": stored | {"step": 8, "seal": seal_of_object(machine_key(), "changed.json", stored)},
        "renamed": stored | {"seal": seal_of_object(machine_key(), "own.json", stored)},
        "no text": stored | {"seal": ["\ud800"]},
    }
    (run_dir / "evaluations").mkdir()
    for step, (name, content) in enumerate(files.items()):
        (run_dir / "evaluations" / f"{name}.json").write_text(json.dumps(content))
        os.utime(run_dir / "evaluations" / f"{name}.json", (step, step))
    shown = read_evaluations(run_dir)
    assert [one["here"] for one in shown].count(True) == 1
    assert len(shown) == len(files)
    assert [one["here"] for one in report(run_dir)["evaluations"]] == [one["here"] for one in shown]


def test_samples_are_the_last_grid_and_twelve_over_time(run_dir):
    run = report(run_dir)
    assert len(run["previews"]) == 12
    data = base64.b64decode(run["pictures"]["preview/400"].split(",")[1])
    assert data == (run_dir / "samples" / "00000400.png").read_bytes()
    assert run["previews"][0] == 10
    assert run["previews"][-1] == 400
    assert {b - a for a, b in pairwise(run["previews"])} <= {30, 40}


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
    status = report(run_dir)["status"]
    assert status["state"] == word
    if word != "not ended":
        assert status["detail"] == "at step 400 · signal 15"


def test_the_report_is_there_from_the_first_step_and_follows_the_run(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Recorder(tmp_path, Log(every=1), total=150) as run:
        run.event("started", 0)
        run.begin_report()
        path = tmp_path / "report.html"
        assert "0/150" in embedded(path.read_text())["status"]["detail"]
        for step in range(1, 61):
            now[0] += 0.5
            run.update_progress(step)
            run.log(step, step * 8, loss=1 / step)
        text = path.read_text()
        status = embedded(text)["status"]
        assert status["state"] == "running"
        assert re.fullmatch(r"(5\d|60)/150, 4\d s left", status["detail"])
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
    assert report(tmp_path)["settings"]["config.toml"].startswith("cannot be read")
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "images": 40, "seconds": null, "loss": null}\n{"st')
    (tmp_path / "events.jsonl").write_text('{"kind": "choice"}\n{"kind": 3, "x": {"a": [1, null]}}\n')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "00000005.png").write_bytes(b"\x89PNG cut short")
    (tmp_path / "samples" / "notes.png").write_bytes(b"")
    run = report(tmp_path)
    assert run["pictures"] == {}
    assert run["previews"] == []
    assert columns_of(run)["images"].tolist() == [40]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match="is not a run"):
        write_report(tmp_path)


def test_columns_skip_lines_without_the_value():
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "held_out_loss": 1.0}, {"step": 3, "loss": float("nan")}]
    steps, values = finite_column(rows, "loss")
    assert (steps.tolist(), values.tolist()) == ([1.0], [2.0])


def test_smoothing_keeps_a_constant_and_halves_the_noise():
    np.testing.assert_allclose(smoothed(np.full(500, 3.0)), 3.0)
    noise = np.random.default_rng(0).normal(size=4000)
    assert smoothed(noise)[1000:].std() < 0.2 * noise.std()
    ramp = np.linspace(1, 0, 4000)
    assert np.abs(smoothed(ramp) - ramp).max() < 0.03
