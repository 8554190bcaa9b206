"""A run from the outside: the command line and Python, from images to pictures and back."""

import math
import os
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import forked
import unfog
from conftest import NETWORK, few_images
from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.diffusion.noise import VP, Cosine, LogitNormal, NoiseSource
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.models.settings import SIZES
from unfog.pipeline.denoising_pictures import DenoisingStrip
from unfog.pipeline.generate import sample_grid
from unfog.pipeline.sample_folder import SampleFolder
from unfog.planning.auto_settings import AutoSettings, parse_duration
from unfog.planning.intervals import choose_intervals, round_down_to_125
from unfog.process.device import resident_bytes
from unfog.reporting.records import read_events, read_metrics
from unfog.runs.sample import write_grid
from unfog.training.checkpoints import format as checkpoint
from unfog.training.settings import EmaSnapshots
from unfog.values.condition_format import ConditionFormat
from unfog.values.image_format import ImageFormat

pytestmark = pytest.mark.slow

SETTINGS = {
    "network": NETWORK,
    "device": "cpu",
    "precision": "fp32",
    "batch": 16,
    "log": {"every": 10},
    "preview": {"images": 12},
    "evaluate": {"images": 16, "levels": 4},
    "sampler": {"steps": 4},
}

AT_THE_END = {
    "preview": {"images": 12, "every": -1},
    "evaluate": {"images": 16, "levels": 4, "every": -1},
    "checkpoint": {"every": -1},
}
"""In place of settings by which so short a run draws and evaluates after every step."""


def unfog_command(*words: object, status: int = 0) -> subprocess.CompletedProcess:
    done = forked.run(words)
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "fashion"
    return unfog.train(few_images(), out=out, steps=60, lr=6e-3, size=16, **SETTINGS)


def test_folder_holds_what_the_contract_says(run):
    names = {path.name for path in run.path.iterdir()}
    folders = {"samples", "denoising", "checkpoints"}
    files = ("config.toml", "metrics.jsonl", "events.jsonl", "report.html", "heartbeat.json", "data.json")
    assert names == {*files, "console.log", "contact-sheet.png"} | folders
    newest = run.path / "checkpoints" / "00000060"
    assert {p.name for p in newest.iterdir()} == {checkpoint.MANIFEST, *checkpoint.FILES}
    kinds = [event["kind"] for event in read_events(run.path / "events.jsonl")]
    assert kinds[-1] == "finished"
    assert {"started", "choice", "data", "preview", "checkpoint"} <= set(kinds)


def test_messages_are_kept_in_the_run_and_progress_is_not(run):
    lines = (run.path / "console.log").read_text().splitlines()
    assert re.fullmatch(rf"-- \d{{4}}-\d\d-\d\d [\d:]+ UTC, process {os.getpid()} on .+", lines[0])
    assert any(re.match(r"training [\d.]+M parameters in .*steps 0 to 60 of", line) for line in lines)
    assert lines[-1].startswith("finished at step 60")
    assert not any(line.startswith("step ") for line in lines)


def test_loss_falls_and_is_recorded_by_noise_level(run):
    rows = read_metrics(run.path / "metrics.jsonl")
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    assert len(held_out) == 7  # before the first step, and every 10, as each takes as long as two steps
    assert held_out[-1] < 0.7 * held_out[0]
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [10, 20, 30, 40, 50, 60]
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert len(logged[0]["loss_by_level"]) == 10
    assert all(math.isfinite(row["gradient_norm"]) and row["images_per_second"] > 0 for row in logged)
    assert 0 <= logged[-1]["data_wait"] < 0.5
    # Of this process: torch alone takes 100 MiB. A CPU has no memory of its own.
    assert 50 < logged[-1]["memory_mib"] < resident_bytes() / 2**20 + 2**12
    assert logged[-1]["disk_free_mib"] == pytest.approx(shutil.disk_usage(run.path).free / 2**20, rel=0.2)
    assert "memory_device_mib" not in logged[-1]
    assert len(rows[0]["held_out_by_level"]) == 4


def test_same_seed_gives_the_same_pictures_whatever_the_count_and_batch(run):
    twelve = run.sample(12, seed=3)
    assert twelve.shape == (12, 16, 16, 1)
    assert twelve.dtype == np.uint8
    assert np.array_equal(twelve, run.sample(12, seed=3))
    for n, batch in ((5, 64), (12, 5), (1, 1)):
        other = run.sample(n, seed=3, batch=batch)
        # Sums may differ in their last bit with the batch size: a grey level here and there, never a picture.
        assert np.abs(other.astype(int) - twelve[:n]).max() <= 1
        assert (other != twelve[:n]).mean() < 0.01
    assert not np.array_equal(twelve, run.sample(12, seed=4))


def test_preview_is_what_sample_draws_without_flags(run):
    pictures = unfog.load(run.path).sample(12)
    preview = np.asarray(Image.open(run.path / "samples/00000060.png"))
    assert np.array_equal(preview, sample_grid(pictures, run.classes))


def test_weights_are_ema_unless_raw(run):
    raw = unfog.inference.run.Run(run.path, weights="raw")
    assert not np.array_equal(raw.sample(2), run.sample(2))
    early = unfog.inference.run.Run(run.path, step=55)
    assert early.checkpoint.step == 55
    with pytest.raises(RequestError, match="no checkpoint of step 7"):
        unfog.inference.run.Run(run.path, step=7)
    measured = {
        row["step"]: row["held_out_loss"] for row in read_metrics(run.path / "metrics.jsonl") if "held_out_loss" in row
    }
    best = unfog.inference.run.Run(run.path, best=True)
    assert best.checkpoint.step == min(measured, key=measured.__getitem__)


def test_labels_by_name_and_number_choose_the_class(run):
    bags = run.sample(3, label="bag")
    assert np.array_equal(bags, run.sample(3, label=[run.classes.index("bag")]))
    assert not np.array_equal(bags, run.sample(3, label="sandal"))
    mixed = run.sample(4, label=["bag", "sandal"])
    assert np.abs(mixed[0].astype(int) - bags[0]).max() <= 1
    for wrong in ("bagg", 10, -1):
        with pytest.raises(RequestError, match="not a class of this run"):
            run.sample(1, label=wrong)


def test_a_class_whose_name_is_a_number_is_not_another_ones_number():
    classes = ("1", "2", "3")
    assert ConditionFormat(classes).parse({"class": [0, np.int64(1), 2]}) == (("class", (0, 1, 2)),)
    assert ConditionFormat(classes).parse({"class": ["1", "2", "3"]}) == (("class", (0, 1, 2)),)
    assert ConditionFormat(("a", "b")).parse({"class": ["1", "b"]}) == (("class", (1, 1)),)
    for wrong in ("0", 3, -1):
        with pytest.raises(RequestError, match="not a class of this run; give one of 1, 2, 3"):
            ConditionFormat(classes).parse({"class": wrong})


def test_guidance(run):
    plain = run.sample(4, label="trouser", guidance=1.0)
    assert np.array_equal(run.sample(4, label="trouser"), run.sample(4, label="trouser", guidance=1.5))
    guided = run.sample(4, label="trouser", guidance=3.0)
    assert not np.array_equal(plain, guided)
    assert np.abs(run.sample(4, label="trouser", guidance=1.0 + 1e-7).astype(int) - plain).max() <= 1


@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "heun", "edm", "dpmpp", "dpmpp-sde", "unipc", "adaptive"])
def test_every_sampler_draws(run, sampler):
    pictures = run.sample(10, sampler=sampler, steps=12)
    # Even a network of 60 steps knows that the corners of these pictures are darker than their middle.
    assert pictures[:, :2, :2].mean() + 40 < pictures[:, 10:18, 10:18].mean()


def test_sampling_leaves_the_global_generator_alone(run):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    unfog.load(run.path).sample(1, sampler="ddpm")
    assert torch.equal(torch.rand(3), expected)


def test_training_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    unfog.train(few_images(), out=tmp_path / "run", steps=2, **SETTINGS)
    assert torch.equal(torch.rand(3), expected)


def test_sample_command(run, tmp_path):
    done = unfog_command("sample", run.path, "-n", 3, "--out", tmp_path / "p", "--label", "bag", "--strip")
    assert done.stdout.strip() == str(tmp_path / "p")
    assert {p.name for p in (tmp_path / "p").iterdir()} == {
        *("000000-bag.png", "000001-bag.png", "000002-bag.png", "grid.png", "strip.png"),
    }
    assert np.array_equal(np.asarray(Image.open(tmp_path / "p/000001-bag.png")), run.sample(3, label="bag")[1, :, :, 0])
    assert str(unfog_command("sample", run.path).stdout.strip()).endswith("pictures")
    assert str(unfog_command("sample", run.path).stdout.strip()).endswith("pictures-2")


def test_a_grid_of_very_many_pictures_shows_the_first(tmp_path, capsys):
    pictures = np.random.default_rng(0).integers(0, 256, (1001, 1, 1, 1), np.uint8)
    folder = SampleFolder(tmp_path, "digest", len(pictures))
    folder.write(range(len(pictures)), pictures)
    write_grid(folder, Config())
    assert len(list(tmp_path.glob("0*.png"))) == 1001
    assert np.array_equal(np.asarray(Image.open(tmp_path / "grid.png")), sample_grid(pictures[:1000], []))
    assert "grid.png shows the first 1,000 of 1,001 samples" in capsys.readouterr().err


def test_strip_shows_the_noise_levels_that_it_names():
    sampler = Sampler(kind="ddim", steps=1000)
    strip = DenoisingStrip(Cosine(steps=1000), ImageFormat(1, 4, 4).to_view)
    seen = []
    draw = NoiseSource(0, [0], (1, 4, 4)).draw
    x0 = torch.full((1, 1, 4, 4), 0.5)
    sampler(lambda x, logsnr: x0, VP(), Cosine(steps=1000), draw, lambda step: (seen.append(step), strip(step)))
    assert [column.caption for column in strip.columns()] == [f"t = {t}" for t in (999, 750, 500, 250, 100, 50, 0)]
    assert [999 - column.step for column in strip.columns()] == [999, 750, 500, 250, 100, 50, 0]
    assert seen[0].x_t.std() > 0.8  # the first column is noise: the state before the step, not after it
    for kind, columns in (("ddim", 3), ("adaptive", 4)):
        few = DenoisingStrip(LogitNormal(), ImageFormat(1, 4, 4).to_view)
        Sampler(kind, 3)(lambda x, logsnr: x0, VP(), LogitNormal(), draw, few)
        assert len(few.columns()) == columns


def test_report_command(run):
    done = unfog_command("report", run.path)
    text = (run.path / "report.html").read_text()
    assert done.stdout.strip() == str(run.path / "report.html")
    assert "data:image/png;base64" in text


def test_pictures_of_two_drawings_do_not_mix(run, tmp_path):
    (tmp_path / "mine.png").write_bytes(b"mine")
    assert "not empty" in unfog_command("sample", run.path, "--out", tmp_path, status=2).stderr
    assert "must be at least 1" in unfog_command("sample", run.path, "-n", 0, status=2).stderr


@pytest.mark.parametrize(
    ("kind", "size", "name"), [("cuda", 28, "small"), ("cuda", 32, "cifar10"), ("mps", 64, "base")]
)
def test_automatic_network_fits_the_images(kind, size, name):
    base = preset("default")
    config = replace(base, data=replace(base.data, size=size, channels=3))
    auto = AutoSettings(config, None, torch.device(kind), lambda: False)
    auto.resolve_network()
    assert auto.config.network == SIZES[name]


def test_a_run_is_never_overwritten(run, tmp_path):
    said = unfog_command("train", "fashion", "--steps", 1, "--out", run.path, status=2).stderr
    assert f"unfog resume {run.path}" in said
    (tmp_path / "mine.txt").write_text("mine")
    assert "it is not empty" in unfog_command("train", "fashion", "--out", tmp_path, status=2).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "no/such/folder", "--steps", "1"], "no/such/folder"),
        (["train", "fashion", "--steps", "1", "--budget", "1m"], "give one of --steps, --images, --budget"),
        (["train", "fashion", "--budget", "soon"], "write 90s, 10m, 2h, 1d"),
        (["train", "fashion", "--steps", "1", "--device", "cuda:7"], "not available"),
        (["train", "fashion", "--steps", "1", "--device", "toaster"], "toaster"),
        (["train", "fashion", "--steps", "1", "--size", "30"], "size = 30 must be a multiple of 4"),
        (["train", "fashion", "--preset", "dpm"], "did you mean 'ddpm'"),
        (["train", "fashion", "--config", "no.toml"], "no.toml cannot be read: No such file"),
        (["train", "fashion", "--optimizer.warmpu", "3"], "--optimizer.warmup"),
        (
            ["train", "fashion", "--steps", "1", "--precision", "fp32", "--network", "cifar10"],
            "must be a multiple of 8",
        ),
        (["train", "fashion", "--steps", "1", "--label-dropout", "2"], "label_dropout = 2.0"),
        (["train", "fashion", "--steps", "1", "--sampler.steps", "2000", "--schedule", "cosine"], "at most 1000"),
        (["train", "fashion", "--steps", "1", "--lr", "-1"], "lr = -1.0 must be at least 0"),
        (["sample", "/tmp"], "is not a run"),
        (["resume", "/tmp"], "is not a run"),
        (["train"], "SOURCE"),
    ],
)
def test_wrong_requests_end_with_status_2_and_say_what_is_wrong(tmp_path, words, said):
    extra = ["--out", str(tmp_path / "run")] if words[0] == "train" and len(words) > 1 else []
    done = unfog_command(*words, *extra, status=2)
    plain = re.sub(r"[\s│]+", " ", done.stderr + done.stdout)
    assert said in plain
    assert "Traceback" not in plain
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(tmp_path):
    assert "Traceback" in unfog_command("sample", tmp_path, "--debug", status=1).stderr


def test_budget_fixes_the_images(tmp_path):
    run = unfog.train(few_images(), out=tmp_path / "run", budget="1s", **SETTINGS | AT_THE_END)
    training = run.config.training
    assert training.budget == ""
    assert training.images > 0
    choices = [e for e in read_events(run.path / "events.jsonl") if e["kind"] == "choice"]
    assert any(e["name"] == "images" and "1s" in e["reason"] for e in choices)


def test_choices_are_settled_in_the_config(tmp_path):
    settings = {k: v for k, v in SETTINGS.items() if k not in ("precision", "device", "network")}
    run = unfog.train(few_images(), out=tmp_path / "run", steps=4, **settings | AT_THE_END)
    config = run.config
    assert config.training.precision in ("fp32", "bf16")
    assert config.training.device in ("cpu", "cuda", "mps")
    assert config.network is not None
    assert (config.data.size, config.data.channels) == (28, 1)
    assert config.optimizer.warmup == 1
    # 0.99M parameters, and batches of 16: half of what 64 would get
    assert config.optimizer.lr == pytest.approx(3e-3, rel=0.02)


def test_ddpm_preset_trains_the_textbook_recipe(tmp_path):
    run = unfog.train(few_images(), out=tmp_path / "run", preset="ddpm", steps=2, **SETTINGS | AT_THE_END)
    config = run.config
    assert (config.diffusion.schedule.kind, config.diffusion.schedule.steps) == ("cosine", 1000)
    assert (config.diffusion.target.kind, config.diffusion.weighting.kind) == ("eps", "plain")
    assert (config.optimizer.lr, config.optimizer.betas, config.training.clip) == (2e-4, (0.9, 0.999), 1.0)
    assert config.ema.decay_max == 0.9999


def test_small_folder_of_ordinary_pictures(tmp_path):
    photos = tmp_path / "photos"
    (photos / "cats").mkdir(parents=True)
    (photos / "dogs" / "deep").mkdir(parents=True)
    for i in range(4):
        Image.new("RGB", (40, 30), (60 * i, 90, 30)).save(photos / "cats" / f"{i}.jpg")
        Image.new("RGBA", (20, 50), (60 * i, 90, 30, 128)).save(photos / "dogs" / "deep" / f"{i}.png")
    (photos / "cats" / "broken.png").write_bytes(b"no picture")
    run = unfog.train(photos, out=tmp_path / "run", size=16, steps=3, **SETTINGS | AT_THE_END)
    assert run.classes == ("cats", "dogs")
    assert run.sample(2).shape == (2, 16, 16, 3)
    data = next(e for e in read_events(run.path / "events.jsonl") if e["kind"] == "data")
    assert "1 skipped" in data["summary"]
    assert "broken.png" in data["summary"]


def test_time_spans_and_round_numbers():
    assert [parse_duration(t) for t in ("90s", "10m", "1.5h", "1d")] == [90, 600, 5400, 86400]
    assert [parse_duration(t) for t in ("1h30m", "1:30:00", "2d4h", "1m30s", "0:00:10")] == [5400, 5400, 187200, 90, 10]
    assert [round_down_to_125(x) for x in (0.3, 1, 3, 7, 19, 99, 100, 260)] == [1, 1, 2, 5, 10, 50, 100, 200]


@pytest.mark.parametrize(
    "text", ["90", "1:30", "1:60:00", "1h30", "30m1h", "", "0s", "0:00:00", "1.5", "h", "-5m", "1w"]
)
def test_an_ambiguous_time_is_refused(text):
    with pytest.raises(RequestError, match="is not a time; write 90s"):
        parse_duration(text)


def test_an_automatic_warm_up_is_a_twentieth_of_the_run_and_5000_steps_at_most():
    base = replace(preset("default"), ema_snapshots=EmaSnapshots(every=-1))
    for steps, warmup in ((10, 1), (2000, 100), (100_000, 5000), (200_000, 5000)):
        config = replace(base, training=replace(base.training, images=steps * base.training.batch))
        assert choose_intervals(config)[0]["optimizer"] == {"warmup": warmup}


GOLDEN = {"adamw": [1.63589, 1.59736, 1.48495, 1.46728], "muon": [1.63706, 1.61400, 1.51503, 1.50666]}


@pytest.mark.parametrize("method", GOLDEN)
def test_golden_losses(tmp_path, method):
    """The first losses, so that no change of the arithmetic goes unnoticed; rounding differs by machine."""
    settings = SETTINGS | AT_THE_END | {"log": {"every": 3}, "optimizer": {"method": method, "lr": 1e-3}}
    run = unfog.train("fashion", out=tmp_path / "run", steps=12, **settings)
    losses = [row["loss"] for row in read_metrics(run.path / "metrics.jsonl") if "loss" in row]
    assert losses == pytest.approx(GOLDEN[method], rel=2e-3)


def test_the_denoising_is_animated(run, tmp_path):
    unfog_command("sample", run.path, "-n", 3, "--steps", 5, "--animate", tmp_path / "a.gif", "--out", tmp_path / "out")
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 6
