"""Checkpoints that a disk, a power cut or a person has damaged: named, passed over, and the run ends the same."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import assert_same, events, long_form, lost_steps, resume, snapshot, steps_saved
from unfog.training.checkpoints import format as checkpoint

FILES = ["manifest.json", "model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "config.toml"]

Damage = Callable[[Path, random.Random], object]


def cut_short(name: str) -> Damage:
    return lambda folder, chance: os.truncate(folder / name, chance.randrange((folder / name).stat().st_size))


def flip_a_bit(name: str) -> Damage:
    def damage(folder: Path, chance: random.Random) -> None:
        content = bytearray((folder / name).read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (folder / name).write_bytes(content)

    return damage


def delete(name: str) -> Damage:
    return lambda folder, chance: (folder / name).unlink()


def delete_half(folder: Path, chance: random.Random) -> None:
    for path in chance.sample(sorted(folder.iterdir()), 3):
        path.unlink()


def empty_all(folder: Path, chance: random.Random) -> None:
    """What delayed allocation leaves of files that were renamed and never synchronised."""
    for path in folder.iterdir():
        os.truncate(path, 0)


def fill_with_zeros(folder: Path, chance: random.Random) -> None:
    """What some file systems give back for blocks that never came to the disk."""
    for path in folder.iterdir():
        path.write_bytes(bytes(path.stat().st_size))


def empty_folder(folder: Path, chance: random.Random) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def dangling_link(folder: Path, chance: random.Random) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "on-a-disk-that-is-gone")


def file_in_its_place(folder: Path, chance: random.Random) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGES: dict[str, Damage] = {
    **{f"checkpoint's {name} cut short": cut_short(name) for name in FILES},
    **{f"bit flipped in a checkpoint's {name}": flip_a_bit(name) for name in FILES[1:]},
    **{f"checkpoint's {name} deleted": delete(name) for name in FILES},
    "checkpoint's manifest emptied": lambda folder, chance: os.truncate(folder / "manifest.json", 0),
    "checkpoint half deleted": delete_half,
    "all files of a checkpoint empty": empty_all,
    "all files of a checkpoint zeros": fill_with_zeros,
    "empty folder named like a checkpoint": empty_folder,
    "dangling link named like a checkpoint": dangling_link,
    "file named like a checkpoint": file_in_its_place,
}


@long_form
@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_checkpoint_is_damaged(whole, tmp_path, faults, name):
    with faults.tried(name) as attempt:
        assert damaged_and_resumed(whole, tmp_path / "run", [name], attempt) == 44


def test_several_checkpoints_are_damaged_each_in_its_way(whole, tmp_path, faults):
    names = list(DAMAGES)[::6]
    with faults.tried("several checkpoints damaged at once") as attempt:
        assert damaged_and_resumed(whole, tmp_path / "run", names, attempt) == 48 - 4 * len(names)


def damaged_and_resumed(whole: Path, run: Path, names: list[str], attempt) -> int:
    """Damage as many of the newest checkpoints of a copy, resume, compare; gives the step it went on from."""
    shutil.copytree(whole, run)
    for step, name in zip(reversed(steps_saved(run)), names):
        DAMAGES[name](run / f"checkpoints/{step:08d}", random.Random(name))
    said = resume(run).ends()
    for i in range(len(names)):
        assert f"checkpoint {48 - 4 * i:08d} is broken and is passed over" in said
    assert_same(run, whole)
    resumed = events(run, "resumed")[-1]["step"]
    attempt.lost.append(48 - resumed)
    return resumed


@pytest.mark.parametrize("apart", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_no_bit_of_a_manifest_can_be_wrong_unnoticed(whole, tmp_path, apart):
    """Either it is passed over, or what is read from it is what was written."""
    folder = tmp_path / "checkpoints/00000048"
    shutil.copytree(whole / "checkpoints/00000048", folder)
    manifest = folder / "manifest.json"
    content = manifest.read_bytes()
    (good,), _ = checkpoint.list_checkpoints(tmp_path / "checkpoints")
    wrong = []
    for bit in range(0, 8 * len(content), apart):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        found, _ = checkpoint.list_checkpoints(tmp_path / "checkpoints")
        if any((saved.step, saved.images) != (good.step, good.images) for saved in found):
            wrong.append(flipped[max(0, bit // 8 - 12) : bit // 8 + 4])
    assert not wrong


def test_the_rest_of_an_interrupted_save_and_rotation_is_cleared_away(whole, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("power cut in a save and in a rotation") as attempt:
        shutil.copytree(whole, run)
        checkpoints = run / "checkpoints"
        (checkpoints / "00000048").rename(checkpoints / ".partial-00000048")
        (checkpoints / ".partial-00000048/manifest.json").unlink()
        (checkpoints / "00000008").rename(checkpoints / ".old-00000008")
        for name in ("metrics.jsonl", "events.jsonl"):  # what the last blocks of an appended file may come back as
            with (run / name).open("ab") as file:
                file.write(b'{"step": 49, "ima' + bytes(700))
        attempt.lost.append(lost_steps(run))
        resume(run).ends()
        assert not [path.name for path in checkpoints.iterdir() if path.name.startswith(".")]
        assert_same(run, whole)


@long_form
def test_settings_that_were_lost_are_named_and_nothing_is_touched(whole, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("config.toml empty"):
        shutil.copytree(whole, run)
        os.truncate(run / "config.toml", 0)
        before = snapshot(run)
        job = resume(run)
        assert "config.toml" in job.ends(status=2)
        assert snapshot(run) == before


@long_form
def test_checkpoints_that_are_links_are_named_and_what_they_point_to_is_left_alone(whole, tmp_path, faults):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with faults.tried("checkpoints moved to another disk, linked") as attempt:
        shutil.copytree(whole, run)
        for step in (44, 48):
            folder = run / f"checkpoints/{step:08d}"
            shutil.move(folder, elsewhere / folder.name)
            folder.symlink_to(elsewhere / folder.name)
        before = snapshot(elsewhere)
        said = resume(run).ends()
        assert said.count("is a link") == 2
        assert snapshot(elsewhere) == before
        assert_same(run, whole)
        attempt.lost.append(48 - events(run, "resumed")[-1]["step"])
