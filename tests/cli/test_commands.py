"""doctor, plan, find-lr and pack as they are typed, and as Python calls them."""

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import unfog
from command import exit_status
from conftest import TRANSFORMER, few_images
from forked import Forked

pytestmark = pytest.mark.slow

SMALL = ("--network", TRANSFORMER, "--precision", "fp32", "--batch", "8", "--size", "16")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """120 pictures of noise over a gradient, in two classes."""
    folder, rng = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    slope = np.linspace(0, 160, 16, dtype=np.float64)
    for i in range(120):
        (folder / "xy"[i % 2]).mkdir(parents=True, exist_ok=True)
        pixels = slope[None, :, None] + rng.integers(0, 96, (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "xy"[i % 2] / f"{i:03}.png")
    return folder


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory) -> Path:
    """A short run on them."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert exit_status("train", photos, "--out", out, "--steps", 12, "--sampler.steps", 2, *SMALL) == 0
    return out


def test_doctor_writes_a_page_and_says_what_needs_a_thought(photos, tmp_path, capsys):
    out = tmp_path / "page"
    assert exit_status("doctor", photos, "--out", out, "--quick", "--steps", 20, *SMALL) == 0
    said, written = capsys.readouterr(), json.loads((out / "findings.json").read_text())
    assert said.out == f"{out / 'report.html'}\n"
    codes = {finding["code"]: finding for finding in written["findings"]}
    assert {"data.count", "data.duplicates", "settings.lr", "settings.length"} <= set(codes)
    assert codes["data.duplicates"]["severity"] == "fine"
    for finding in written["findings"]:
        assert (finding["evidence"] in said.err) == (finding["severity"] != "fine"), finding["code"]
    assert said.err.splitlines()[-1].startswith("  causes and remedies: ")
    page = (out / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_doctor_ends_with_2_where_training_makes_no_sense(tmp_path, capsys):
    for i in range(30):
        Image.new("RGB", (16, 16), "teal").save(tmp_path / f"{i}.png")
    assert exit_status("doctor", tmp_path, "--out", tmp_path / "page", "--quick", "--steps", 20, *SMALL) == 2
    assert "fatal" in capsys.readouterr().err


def test_doctor_reads_a_run_which_has_its_own_settings(trained, tmp_path, capsys):
    before = sorted((path, path.stat().st_mtime_ns) for path in trained.rglob("*"))
    assert exit_status("doctor", trained, "--out", tmp_path / "page", "--quick", "--device", "cpu") in (0, 2)
    findings = json.loads((tmp_path / "page" / "findings.json").read_text())["findings"]
    assert {"run.state", "run.checkpoints"} <= {finding["code"] for finding in findings}
    assert sorted((path, path.stat().st_mtime_ns) for path in trained.rglob("*")) == before
    assert exit_status("doctor", trained, "--lr", "1e-3") == 2
    assert "has its own settings, so --lr" in capsys.readouterr().err


def test_plan_of_another_machine_is_json(photos, capsys):
    assert exit_status("plan", photos, "--for", "t4", "--json", "--steps", 100, *SMALL) == 0
    plan = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "T4" in plan["machine"]
    assert exit_status("plan", photos, "--for", "abacus", "--steps", 100, *SMALL) == 2
    assert "abacus" in capsys.readouterr().err


def test_a_pack_is_made_and_trained_on_like_its_folder(photos, trained, tmp_path):
    out = tmp_path / "photos.pack"
    assert exit_status("pack", photos, out, "--size", 16) == 0
    assert exit_status("pack", photos, out, "--size", 16) == 0  # which is whole already
    assert exit_status("train", out, "--out", tmp_path / "run", "--steps", 12, "--sampler.steps", 2, *SMALL) == 0
    for name in ("model", "ema"):
        ours, theirs = (f / "checkpoints" / "00000012" / f"{name}.safetensors" for f in (tmp_path / "run", trained))
        assert ours.read_bytes() == theirs.read_bytes()


def test_doctor_takes_no_run_with_a_damaged_name_for_a_folder_of_images(tmp_path, capsys):
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    assert exit_status("doctor", tmp_path, "--out", tmp_path / "page", "--quick") == 2
    assert "its config.toml is not a file" in capsys.readouterr().err


def test_a_flipped_bit_in_a_pack_is_found_by_the_doctor(photos, tmp_path):
    out = tmp_path / "photos.pack"
    assert exit_status("pack", photos, out, "--size", 16) == 0
    assert exit_status("doctor", out, "--out", tmp_path / "whole", "--quick", "--steps", 20, *SMALL) == 0
    with (out / "pixels.u8").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 4]))
    assert exit_status("doctor", out, "--out", tmp_path / "damaged", "--quick", "--steps", 20, *SMALL) == 2
    found = json.loads((tmp_path / "damaged" / "findings.json").read_text())["findings"]
    assert [finding["code"] for finding in found if finding["severity"] == "fatal"] == ["data.pack"]


def test_an_unfinished_pack_is_no_source(photos, tmp_path, capsys):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "journal.jsonl").write_text("")
    assert exit_status("train", tmp_path / "p", "--steps", 1) == 2
    assert "unfinished pack" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "find-lr", "plan", "pack"])
def test_what_is_asked_for_twice_or_wrongly_is_said(command, photos, tmp_path, capsys):
    words = [photos, tmp_path / "out"] if command == "pack" else [photos]
    assert exit_status(command, *words, "--sizes", "16") == 2
    assert "did you mean" in capsys.readouterr().err
    assert exit_status(command, *words[:-1], tmp_path / "nowhere", *(["x"] if command == "pack" else [])) == 2
    assert exit_status(command) == 2
    assert "is missing" in capsys.readouterr().err


def test_a_search_that_is_stopped_leaves_nothing(tmp_path):
    words = ["find-lr", few_images(), "--out", tmp_path / "lr", "--seconds", "60", "--network", TRANSFORMER]
    process = Forked(words, stderr=subprocess.PIPE)
    assert any("learning-rate ramp" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "SIGTERM: stopping" in said
    assert "saving" not in said
    assert not (tmp_path / "lr").exists()


def test_python_does_the_same(photos, trained, tmp_path):
    settings = {"network": TRANSFORMER, "precision": "fp32", "batch": 8, "size": 16, "steps": 20}
    findings = unfog.doctor(photos, out=tmp_path / "page", quick=True, **settings)
    assert {finding.code for finding in findings} >= {"data.count", "settings.lr"}
    assert unfog.doctor(trained, out=tmp_path / "other", quick=True, device="cpu")
    with pytest.raises(unfog.RequestError, match="its own settings"):
        unfog.doctor(trained, lr=1e-3)
    plan = unfog.plan(photos, device="h200", **settings)
    assert plan.memory.peak > 4 * 4 * plan.parameters
    assert unfog.pack(photos, tmp_path / "p.pack", size=16).name == "p.pack"


def test_what_belongs_to_another_command_is_named(capsys):
    assert exit_status("inpaint", "runs/photos") == 2
    assert "did you mean 'sample'?" in capsys.readouterr().err
    assert exit_status("resume", "runs/photos", "--config", "mine.toml") == 2
    assert "give each setting to change as a flag" in capsys.readouterr().err
