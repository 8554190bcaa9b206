"""Well-signed checkpoints of strangers, with values in state.json that Unfog never wrote."""

import json
import math
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import unfog
from hostile import VALUES, peak_memory, places, plant, put, snapshot
from test_hostile_text import TINY
from test_resume_settings import sealed, trained
from unfog.cli.read_request import read_request
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.errors import RequestError, RunError, UnfogError
from unfog.inference.evaluation_files import Evaluation
from unfog.pipeline.build import build_state
from unfog.process.run_folder import RunFolder
from unfog.reporting.image_grids import save_png
from unfog.runs.resume import resume
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import load_checkpoint
from unfog.training.checkpoints.posthoc_ema import METADATA_KEY, EmaSnapshotFile
from unfog.training.checkpoints.state_schema import check_state
from unfog.training.settings import Checkpoint
from unfog.training.state import TrainState

SNAPSHOT = {"step": 2, "updates": 2, "widths": [0.05]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("forged") / "run", checkpoint=Checkpoint(every=2, keep=9), steps=4)


def mutations(state: dict) -> list[tuple[tuple, object]]:
    """Every place with every value; of lists of numbers, only the first two."""
    kept = [at for at in places(state) if not any(isinstance(key, int) and key > 1 for key in at)]
    return [(at, value) for at in kept for value in VALUES]


def holds(state: TrainState, value: object) -> bool:
    """The schema refuses a state, or the state loads and is written again."""
    try:
        check_state(value)  # type: ignore[arg-type]
    except ValueError:
        return True
    assert isinstance(value, dict)
    state.load_progress(value)
    state.roll_back_to(value)
    json.dumps(state.progress())
    return True


@pytest.mark.parametrize("some", [slice(3, None, 7), pytest.param(slice(None), marks=pytest.mark.exhaustive)])
def test_a_mutated_state_is_refused_or_loads(some: slice) -> None:
    state = build_state(TINY, torch.device("cpu"))
    state.guard.recent, state.last, state.due = [0.5, 0.6], {"lr": 0.1, "gradient_norm": math.nan}, ["log"]
    good = json.loads(json.dumps(state.progress()))
    check_state(good)
    every = mutations(good)
    assert len(every) > 400
    for at, value in every[some]:
        assert holds(state, put(good, at, value)), (at, value)


def forge(folder: Path, **values: object) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, **values}))
    sealed(folder)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("seen", 10**30, "seen is 1000000000000000000000000000000, and should be a whole number from 0"),
        ("seen", 8, "of another number of images"),
        ("due", ["format the disk"], r"due\[0\] is 'format the disk', and should be the name of a hook"),
        ("guard", {}, "guard has no anchor"),
        ("window", {"loss": [1.0]}, "window has no count"),
        ("keys", {"training": 5}, "keys.training is 5, and should be a text"),
    ],
)
def test_an_older_checkpoint_takes_the_place_of_a_forged_one(
    run: Path, tmp_path: Path, key: str, value: object, reason: str
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    forge(copy / "checkpoints/00000004", **{key: value})
    saved, broken = checkpoint.newest(copy / "checkpoints")
    assert saved is not None
    assert saved.step == 2
    assert re.search(reason, str(broken[0]))


@pytest.mark.parametrize("value", [{"/9/momentum": 1.0}, {"/0/params": 5}, {"step/of.nothing": 1.0}])
def test_numbers_of_another_optimizer_do_not_fit(run: Path, tmp_path: Path, value: dict[str, float]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    forge(copy / "checkpoints/00000004", optimizer=value)
    state = build_state(RunFolder(copy).read_config(), torch.device("cpu"))
    with pytest.raises(RunError, match="do not fit"):
        load_checkpoint(copy / "checkpoints/00000004", state)


@pytest.mark.parametrize("name", ["checkpoints", "averages", "samples", "events.jsonl"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_run_whose_folders_or_records_are_none_is_not_trained_into(
    run: Path, tmp_path: Path, name: str, kind: str
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.copytree(run / "checkpoints", tmp_path / "else/folder")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    plant(copy / name, kind, tmp_path / "else/folder")
    for begin in (
        lambda: read_request("resume", [str(copy), "--steps", "8"]),
        lambda: unfog.resume(copy, steps=8),
        lambda: resume(RunFolder(copy)),
    ):
        with pytest.raises(RequestError, match=rf"run/{name} .*a (link|pipe).*move"):
            begin()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == {path: content for path, content in before.items() if copy / name not in (path, *path.parents)}


def test_a_linked_folder_of_checkpoints_or_averages_is_not_read(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert checkpoint.newest(copy / "checkpoints")[0] is not None
    (copy / "checkpoints").rename(tmp_path / "outside")
    (copy / "checkpoints").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match="a link"):
        checkpoint.newest(copy / "checkpoints")
    with pytest.raises(UnfogError, match="a link"):
        unfog.load(copy)
    (copy / "checkpoints").unlink()
    (copy / "checkpoints").mkdir()
    (copy / "checkpoints/00000004").symlink_to(tmp_path / "outside/00000004")
    with pytest.raises(UnfogError, match="a link"):
        unfog.load(copy)
    averages = tmp_path / "run/averages"
    averages.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, averages / "00000002.safetensors", {METADATA_KEY: json.dumps(SNAPSHOT)})
    assert len(EmaSnapshotFile.read_all(averages)) == 1
    averages.rename(tmp_path / "averages")
    averages.symlink_to(tmp_path / "averages")
    assert not EmaSnapshotFile.read_all(averages)


def test_a_linked_picture_is_not_shown_in_a_notebook(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    save_png(copy / "samples/00000004.png", copy, np.zeros((4, 4, 3), np.uint8))
    assert "data:image/png" in unfog.load(copy)._repr_html_()
    (copy / "samples").rename(tmp_path / "outside")
    (copy / "samples").symlink_to(tmp_path / "outside")
    assert "data:image/png" not in unfog.load(copy)._repr_html_()


@pytest.mark.slow
def test_a_backup_by_hard_links_is_not_written_to(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run", copy_function=os.link))
    before = snapshot(run)
    unfog.resume(copy, steps=6)
    assert snapshot(run) == before
    assert (copy / "metrics.jsonl").read_bytes().startswith((run / "metrics.jsonl").read_bytes())


@pytest.mark.exhaustive
def test_a_run_with_a_mutated_state_goes_on_or_says_why_not(run: Path, tmp_path: Path) -> None:
    good = json.loads((run / "checkpoints/00000004/state.json").read_text())
    for number, (at, value) in enumerate(mutations(good)):
        copy = Path(shutil.copytree(run, tmp_path / str(number)))
        (copy / "checkpoints/00000004/state.json").write_text(json.dumps(put(good, at, value)))
        sealed(copy / "checkpoints/00000004")
        folder = RunFolder(copy)
        with suppress(UnfogError):  # anything else is a defect
            resume(folder, replace(folder.read_config(), training=replace(folder.read_config().training, steps=5)))
        shutil.rmtree(copy)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"width": 8192}, {"depth": 90}])
def test_a_network_larger_than_its_weights_is_not_allocated(run: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = RunFolder(copy).read_config()
    forged = to_toml(replace(config, network=replace(config.network, **change)))
    for file in (copy / "config.toml", copy / "checkpoints/00000004/config.toml"):
        file.write_text(forged)
    sealed(copy / "checkpoints/00000004")
    before = peak_memory()
    for use in (unfog.load, unfog.resume):
        with pytest.raises(RunError, match=r"do not fit the network that config\.toml describes"):
            use(copy)
    assert peak_memory() - before < 100e6


def test_an_evaluation_holds_no_credentials_and_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "run/evaluations/one.json"
    path.parent.parent.mkdir()
    Evaluation(4, {"reference": "https://me:secret@host/set.zip?signature=abc"}, ()).write(path, b"key")
    assert "https://host/set.zip" in path.read_text()
    assert not re.search("secret|abc", path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("harm", ["cut", "no source", "no latents", "no copy"])
def test_a_damaged_config_names_the_copy_in_a_checkpoint_that_restores_it(tmp_path: Path, harm: str) -> None:
    run = RunFolder(tmp_path / "a run")
    copies = [run.checkpoints / f"{step:08d}" / "config.toml" for step in (2, 4)]
    sound = to_toml(Config(source="fashion"))
    for copy, text in zip(copies, (sound, sound[:100] + "=")):  # the newest is damaged as well
        copy.parent.mkdir(parents=True)
        copy.write_text(text if harm != "no copy" else "")
    harmed = {"no source": 'source = ""\n', "no latents": 'source = "fashion"\nautoencoder_folder = "/nowhere"\n'}
    run.config_file.write_text(harmed.get(harm, sound[:100] + "="))
    with pytest.raises(RequestError) as refused:
        run.read_config()
    if harm == "no copy":
        assert "cp " not in str(refused.value)
        return
    subprocess.run(str(refused.value).partition("has a copy: ")[2], shell=True, check=True)
    assert run.read_config().source == "fashion"
