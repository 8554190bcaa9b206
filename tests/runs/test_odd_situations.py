"""What people do to a program: odd places, missing things, closed terminals, silly numbers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import forked
import unfog
from conftest import FEW_PICTURES, TRANSFORMER
from unfog.errors import RequestError, RunError

pytestmark = pytest.mark.slow

FLAGS = [
    *(
        "--network",
        TRANSFORMER,
        "--precision",
        "fp32",
        "--device",
        "cpu",
        "--batch",
        "4",
        "--size",
        "16",
        "--steps",
        "4",
    ),
    *("--sampler.steps", "2", "--preview.images", "2", "--preview.every", "-1", "--evaluate.every", "-1"),
]


def unfog_command(*words: object, status: int = 0, **options) -> str:
    done = forked.run(words, **options)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def photos(tmp_path) -> Path:
    """A folder of six pictures."""
    folder = tmp_path / "photos"
    make_pictures(folder, 6)
    return folder


def make_pictures(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i}.png")


def test_a_run_inside_the_folder_of_its_images(photos):
    unfog_command("train", ".", *FLAGS, cwd=photos)
    assert (photos / "runs/photos/config.toml").is_file()
    unfog_command("resume", "runs/photos", "--steps", 6, cwd=photos)
    said = unfog_command("train", ".", *FLAGS, cwd=photos)
    assert "6 images; 6 used" in said
    assert (photos / "runs/photos-2").is_dir()


def test_images_that_moved_are_looked_for_and_named(photos, tmp_path):
    unfog_command("train", photos, *FLAGS, "--out", tmp_path / "run")
    photos.rename(tmp_path / "elsewhere")
    said = unfog_command("resume", tmp_path / "run", "--steps", 6, status=2)
    assert "--source FOLDER" in said
    unfog_command("resume", tmp_path / "run", "--steps", 6, "--source", tmp_path / "elsewhere")
    unfog_command("resume", tmp_path / "run", "--steps", 8)


def test_lost_checkpoints_do_not_lose_the_log_too(photos, tmp_path):
    run = tmp_path / "run"
    unfog_command("train", photos, *FLAGS, "--log.every", 1, "--out", run)
    log = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoint" in unfog_command("resume", run, status=1)
    assert (run / "metrics.jsonl").read_bytes() == log


def test_edited_config_is_told_from_a_defect(photos, tmp_path):
    run = tmp_path / "run"
    unfog_command("train", photos, *FLAGS, "--out", run)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("width = 16", "width = 24"))
    with pytest.raises(RunError, match="do not fit the network"):
        unfog.load(run)


def test_a_loaded_run_draws_though_its_checkpoint_is_rotated_away(photos, tmp_path):
    unfog_command("train", photos, *FLAGS, "--out", tmp_path / "run")
    run = unfog.load(tmp_path / "run")
    shutil.rmtree(run.checkpoint.folder)
    assert run.sample(1).shape == (1, 16, 16, 3)


def test_a_broken_newest_checkpoint_is_named_where_an_older_one_is_loaded(photos, tmp_path, capsys):
    run = tmp_path / "run"
    unfog_command("train", photos, *FLAGS, "--checkpoint.every", 2, "--out", run)
    weights = run / "checkpoints/00000004/ema.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert unfog.load(run).checkpoint.step == 2
    assert "00000004 is broken and is passed over: ema.safetensors" in capsys.readouterr().err
    unfog.inference.run.Run(run, step=2)
    assert "broken" not in capsys.readouterr().err


def test_closed_streams_stop_nothing(photos, tmp_path):
    words = [sys.executable, "-m", "unfog", "train", photos, *FLAGS, "--out", tmp_path / "run"]
    line = " ".join(f"'{word}'" for word in words)
    assert subprocess.run(f"{line} 1>&- 2>&-", shell=True, timeout=300, capture_output=True).returncode == 0
    assert (tmp_path / "run/checkpoints/00000004").is_dir()


CLOSED = """
import os, sys
from unfog.cli.main import main
number, *words = sys.argv[1:]
os.close(int(number))
name = "stdout" if number == "1" else "stderr"
setattr(sys, name, None)  # as an interpreter does that begins so
setattr(sys, f"__{name}__", None)
try:
    main(words)
except SystemExit as left:
    os._exit(left.code or 0)
"""


@pytest.mark.parametrize("number", [1, 2])
def test_one_closed_stream_stops_nothing(photos, tmp_path, number):
    done = forked.run([number, "train", photos, *FLAGS, "--out", tmp_path / "run"], CLOSED)
    assert done.returncode == 0
    assert (tmp_path / "run/checkpoints/00000004").is_dir()


def test_help_on_a_terminal_that_knows_only_ascii():
    assert "usage: unfog" in unfog_command("--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--lr", "inf", "optimizer.lr = inf must be a finite number"),
        ("--optimizer.eps", "nan", "eps = nan"),
        ("--optimizer.weight-decay", "nan", "weight_decay = nan"),
        ("--training.clip", "nan", "training.clip = nan"),
        ("--guidance", "nan", "guidance = nan"),
        ("--checkpoint.every", "-5", "checkpoint.every = -5"),
        ("--budget", "9" * 400 + "d", "over ten years"),
        ("--diffusion.sigma-data", "inf", "sigma_data = inf"),
        ("--schedule", "logitnormal:std=inf", "std = inf"),
    ],
)
def test_silly_numbers_are_refused(photos, tmp_path, flag, value, said):
    at = FLAGS.index("--steps")
    flags = FLAGS[:at] + FLAGS[at + 2 :] if flag == "--budget" else FLAGS
    output = unfog_command("train", photos, *flags, flag, value, "--out", tmp_path / "run", status=2)
    assert said in output
    assert output.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_bad_places_are_refused_before_any_work(photos, tmp_path):
    (tmp_path / "file").write_text("")
    said = unfog_command("train", photos, *FLAGS, "--out", tmp_path / "file" / "run", status=2)
    assert "cannot be a run folder" in said
    assert "images" not in said.split("cannot be")[0]
    assert "SOURCE is empty" in unfog_command("train", "", *FLAGS, status=2, cwd=tmp_path)


def test_a_class_without_usable_images_is_none(tmp_path):
    for name in ("cats", "dogs"):
        make_pictures(tmp_path / "pets" / name, 5)
    (tmp_path / "pets/broken").mkdir()
    for i in range(5):
        (tmp_path / f"pets/broken/{i}.png").write_bytes(b"nothing")
    settings = {"network": TRANSFORMER, "precision": "fp32", "batch": 4, "size": 16, "device": "cpu"}
    run = unfog.train(tmp_path / "pets", out=tmp_path / "run", steps=2, **FEW_PICTURES, **settings)
    assert run.classes == ("cats", "dogs")


def test_classes_below_a_split_are_found_and_the_split_is_named(tmp_path):
    for split in ("train", "val"):
        for name in ("cats", "dogs"):
            make_pictures(tmp_path / "pets" / split / name, 4)
    said = unfog_command("train", tmp_path / "pets", *FLAGS, "--out", tmp_path / "run")
    assert "all of train, val is used" in said
    assert unfog.load(tmp_path / "run").classes == ("cats", "dogs")


def test_python_mistakes_are_explained(photos, tmp_path):
    with pytest.raises(RequestError, match="optimizer"):
        unfog.train(photos, out=tmp_path / "run", optimizer=5, lr=1e-3)
    with pytest.raises(RequestError, match="did you mean 'training'"):
        unfog.train(photos, out=tmp_path / "run", trainin={})
    assert not (tmp_path / "run").exists()
