"""Checkpoints as files: what is written is what was, or is not there at all."""

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from conftest import advance
from unfog.config.schema import Config
from unfog.config.toml import update
from unfog.device import copies as device_copies
from unfog.errors import RequestError, RunError
from unfog.runs.saver import Saver
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation, snapshot  # texts of errors that no disk here gives
from unfog.training.checkpoints.load import find_rollback_checkpoint, load_checkpoint, read_tensors, roll_back
from unfog.training.checkpoints.writer import CheckpointWriter
from unfog.training.precision import Precision
from unfog.training.settings import Checkpoint, Optimizer, PowerEma
from unfog.training.state import TrainState
from waiting import wait_until

KINDS = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8)


def fresh(precision: str = "fp32", width: int = 4) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return TrainState(model, Optimizer(lr=1e-2), PowerEma(), Precision(precision, torch.device("cpu")))


def step(state: TrainState) -> None:
    torch.manual_seed(state.seen)
    state.model(torch.randn(8, 3)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    advance(state, 8, True, [])


def trained(steps: int = 3) -> TrainState:
    state = fresh()
    for _ in range(steps):
        step(state)
    state.guard.update(0.25)
    state.guard.roll_backs = 2
    state.window.loss += torch.rand(10)
    state.due, state.last, state.best = ["preview"], {"lr": 0.1, "gradient_norm": 0.5}, 0.3
    return state


def everything(state: TrainState) -> tuple:
    tensors = {f"{file}/{name}": t.tolist() for file, part in state.tensors().items() for name, t in part.items()}
    return tensors, state.progress()


def write(state: TrainState, folder: Path, number: int = 3, **facts) -> Path:
    return snapshot.write_checkpoint(snapshot.take_snapshot(state, number, **facts), folder)


def test_what_is_read_is_what_was_written_and_goes_on_alike(tmp_path):
    state, other = trained(), fresh()
    folder = write(state, tmp_path)
    load_checkpoint(folder, other)
    assert everything(other) == everything(state)
    step(state), step(other)
    assert everything(other) == everything(state)
    saved, broken = checkpoint.newest(tmp_path)
    assert (saved.step, saved.images, broken) == (3, 24, [])
    assert "torch" in saved.made_on


def test_the_norm_of_a_refused_step_may_be_nan(tmp_path):
    state, other = trained(), fresh()
    state.last["gradient_norm"] = math.inf
    folder = write(state, tmp_path)
    load_checkpoint(folder, other)
    assert math.isnan(other.last["gradient_norm"])
    assert "Infinity" not in (folder / "state.json").read_text()  # which other readers of JSON refuse


def test_a_snapshot_stands_still_while_training_goes_on(tmp_path):
    state = trained()
    taken, before = snapshot.take_snapshot(state, 3), everything(state)
    step(state)
    state.due.append("save")
    state.guard.update(0.5)
    snapshot.write_checkpoint(taken, tmp_path)
    other = fresh()
    load_checkpoint(tmp_path / "00000003", other)
    assert everything(other) == before


def test_copies_in_few_blocks_lie_beside_each_other(tmp_path, monkeypatch):
    """As those of a GPU do in pinned memory, which is made in blocks of one size."""
    made, empty = [], torch.empty

    def make(*size, pin_memory=False, **how):
        made.extend(size if pin_memory else [])
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", make)
    shapes = [(3,), (), (2, 7), (0, 4), (1000,), (5, 1, 3)]
    tensors = {f"{i}/{kind}": torch.randn(shape).to(kind) for i, shape in enumerate(shapes) for kind in KINDS}
    memory = device_copies.HostCopies(sum(t.nbytes for t in tensors.values()), most_pinned=2**20)
    copies = {
        name: memory._pinned(t.nbytes).view(t.dtype).view(t.shape).copy_(t, non_blocking=True)
        for name, t in tensors.items()
    }
    assert len(made) <= 2
    assert all(torch.equal(copies[name], t) for name, t in tensors.items())
    save_file(copies, tmp_path / "file")  # which refuses tensors that overlap
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], t) for name, t in tensors.items())
    assert memory._pinned(2**20) is None  # more than may be pinned
    assert device_copies.HostCopies(2**40, most_pinned=2**50)._block_size == 2**26


def test_training_on_does_not_write_into_the_files_that_were_loaded(tmp_path):
    folder, other = write(trained(), tmp_path), fresh()
    load_checkpoint(folder, other)
    for _ in range(3):
        step(other)
    saved, _ = checkpoint.newest(tmp_path)
    assert saved.find_damage() is None


def test_a_checkpoint_is_readable_by_whom_a_new_file_is(tmp_path):
    modes = {stat.S_IMODE(path.stat().st_mode) for path in write(trained(), tmp_path).iterdir()}
    (tmp_path / "file").write_text("")
    assert modes == {stat.S_IMODE((tmp_path / "file").stat().st_mode)}


def lying(function, damage):
    """A writer of files after which the disk holds something else."""

    def write(tensors, path, *rest):
        function(tensors, path, *rest)
        damage(path)

    return write


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("unfog.training.checkpoints.writer.RETRY", 0.02)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, path.stat().st_size - 1)])
def test_a_disk_that_holds_something_else_is_found_out_before_anything_is_rotated(tmp_path, monkeypatch, damage):
    write(trained(1), tmp_path, 1)
    monkeypatch.setattr(snapshot, "save_file", lying(snapshot.save_file, damage))
    writer = CheckpointWriter(tmp_path, Checkpoint(keep=1))
    writer.submit(snapshot.take_snapshot(trained(2), 2))
    with pytest.raises(RunError, match=r"could not be written.*earlier ones are intact"):
        assert writer.wait(120)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert checkpoint.newest(tmp_path)[0].step == 1


def test_trouble_of_the_thread_is_raised_once_and_the_writer_goes_on(tmp_path):
    place = tmp_path / "checkpoints"
    place.write_text("a file where the folder should be")
    writer = CheckpointWriter(place, Checkpoint())
    writer.submit(snapshot.take_snapshot(trained(), 3))
    with pytest.raises(RunError, match="Correct that"):
        assert writer.wait(120)
    place.unlink()
    writer.submit(snapshot.take_snapshot(trained(), 3))
    assert writer.wait(120)
    (news,) = writer.events()
    assert news.kind == "checkpoint"
    assert news.fields["write_seconds"] > 0
    assert checkpoint.newest(place)[0].step == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_waited_for_said_once_and_given_up_on_request(tmp_path, monkeypatch, number):
    full, write_really = True, snapshot.write_checkpoint

    def write(taken, folder):
        if full:
            raise OSError(number, "No space left on device")
        return write_really(taken, folder)

    monkeypatch.setattr(snapshot, "write_checkpoint", write)
    writer = CheckpointWriter(tmp_path, Checkpoint())
    writer.submit(snapshot.take_snapshot(trained(), 3))
    wait_until(lambda: writer.waiting)
    assert not writer.wait(0.1)
    full = False
    assert writer.wait(120)
    assert not writer.waiting
    assert [news.kind for news in writer.events()] == ["disk_full", "disk_has_room", "checkpoint"]
    full = True
    writer.submit(snapshot.take_snapshot(trained(), 4))
    wait_until(lambda: writer.waiting)
    assert not writer.wait(0.1)
    writer.abandon()
    assert writer.wait(120)
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]


@pytest.mark.parametrize(
    "text",
    [
        "I/O error: No space left on device (os error 28)",
        "x (OS Error 28)",
        "IoError(Os { code: 28, kind: StorageFull })",
    ],
)
def test_what_the_system_said_is_found_in_what_safetensors_says(text):
    assert snapshot._errno_of(text) == errno.ENOSPC
    assert snapshot._errno_of("nothing of the kind") == 0


def test_the_newest_intact_checkpoint_is_found(tmp_path):
    for number in (1, 2, 3):
        write(trained(number), tmp_path, number)
    assert checkpoint.newest(tmp_path)[0].step == 3
    flip(tmp_path / "00000003/model.safetensors")
    saved, broken = checkpoint.newest(tmp_path)
    assert saved.step == 2
    assert [one.folder.name for one in broken] == ["00000003"]


@pytest.mark.parametrize("file", ["model", "ema", "optimizer"])
def test_a_tensor_that_is_not_finite_is_named(file):
    state = trained()
    assert state.non_finite() is None
    with torch.no_grad():
        if file == "model":
            state.model[2].bias[1] = math.nan
        elif file == "ema":
            state.ema.parameters[-1][0] = math.inf
        else:
            next(iter(state.optimizer.state.values()))["exp_avg"][0, 0] = -math.inf
    assert state.non_finite().startswith(f"{file}: ")


def test_going_back_takes_the_weights_and_leaves_the_position(tmp_path):
    state = trained()
    good = everything(state)
    write(state, tmp_path, anchor=True)
    for _ in range(4):
        step(state)
    found, _ = find_rollback_checkpoint(tmp_path, state, patience=20)
    roll_back(found.folder, state)
    assert everything(state)[0] == good[0]
    assert (state.seen, state.updates) == (56, 3)
    assert (state.guard.roll_backs, state.guard.recent) == (3, [0.25])


def test_going_back_takes_the_loss_scale_of_fp16_as_well(tmp_path):
    state = fresh("fp16")
    scaler = state.precision.scaler
    scaler.scale(torch.ones(()))
    folder, before = write(state, tmp_path, anchor=True), scaler.get_scale()
    scaler.update(before / 8)
    roll_back(folder, state)
    assert scaler.get_scale() == before


def test_shards_count_as_a_file_only_where_all_are_there():
    parts = [snapshot._shard_name("model", rank, 3) for rank in range(3)]
    assert checkpoint._merge_shard_names([*parts, "state.json"]) == {"model.safetensors", "state.json"}
    for left_out in range(3):
        rest = [name for rank, name in enumerate(parts) if rank != left_out]
        assert checkpoint._merge_shard_names(rest) == {"2 of 3 parts of model.safetensors"}


def test_what_may_be_gone_back_to(tmp_path):
    state = fresh()
    for number in range(1, 5):
        step(state)
        write(state, tmp_path, number, anchor=number != 4)

    def found(images: int) -> tuple[int | None, list[str]]:
        state.seen = images
        good, broken = find_rollback_checkpoint(tmp_path, state, patience=20)
        return good and good.step, [str(one) for one in broken]

    assert found(4 * 8) == (3, [])
    assert found(2 * 8) == (2, [])
    flip(tmp_path / "00000003/ema.safetensors")
    flip(tmp_path / "00000004/manifest.json")
    good, (without_manifest, damaged) = found(4 * 8)
    assert good == 2
    assert re.match("checkpoint 00000004 is broken and is passed over: manifest.json: ", without_manifest)
    assert re.match("checkpoint 00000003 is broken and is passed over: ema.safetensors is not what", damaged)
    assert found(0)[0] is None


def test_a_roll_back_that_did_not_help_goes_one_further_and_no_more(tmp_path):
    state = fresh()
    for number in range(1, 4):
        step(state)
        write(state, tmp_path, number, anchor=True)

    def goes_to(ordinary: int) -> int:
        state.guard.ordinary = ordinary
        return find_rollback_checkpoint(tmp_path, state, patience=20)[0].step

    assert goes_to(0) == 3, "the first"
    state.guard.roll_backs, state.guard.rollback_images = 1, 3 * 8
    assert goes_to(30) == 3
    assert goes_to(19) == 2
    state.guard.rollback_images = 1 * 8
    assert goes_to(0) == 1, "where nothing is older"


def test_another_network_is_told_apart(tmp_path):
    folder = write(trained(), tmp_path)
    with pytest.raises(RunError, match="do not fit"):
        load_checkpoint(folder, fresh(width=5))
    os.replace(folder / "optimizer.safetensors", folder / "model.safetensors")
    with pytest.raises(RunError, match="do not fit"):
        load_checkpoint(folder, fresh())


def test_the_same_step_once_more_never_leaves_none(tmp_path, monkeypatch):
    state = trained()
    write(state, tmp_path)
    move = rotation.move

    def cut_short(path, target, root):
        if path.name.startswith(".partial-"):
            raise KeyboardInterrupt  # as good as a kill between the two renames
        return move(path, target, root)

    monkeypatch.setattr(rotation, "move", cut_short)
    with pytest.raises(KeyboardInterrupt):
        write(state, tmp_path)
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path) == (None, [])
    rotation.restore_replaced(tmp_path)
    assert checkpoint.newest(tmp_path)[0].step == 3
    write(state, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]


def test_old_ones_that_cannot_be_removed_stop_nothing(tmp_path, monkeypatch):
    def refuse(checkpoints, keep):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(rotation, "remove_old_checkpoints", refuse)
    writer = CheckpointWriter(tmp_path, Checkpoint())
    writer.submit(snapshot.take_snapshot(trained(), 3))
    assert writer.wait(120)
    assert [news.kind for news in writer.events()] == ["checkpoint", "not_removed"]


def test_other_settings_forget_what_was_true_of_the_old_ones(tmp_path):
    state = trained()
    state.adopt_settings({"training": "a", "repeat": "a", "measure": "a"})
    assert (state.guard.recent, state.guard.roll_backs, state.best) == ([], 0, None)
    state.guard.recent, state.guard.roll_backs, state.best = [0.5], 3, 0.1
    folder = write(state, tmp_path, anchor=True)
    state.adopt_settings({"training": "a", "repeat": "b", "measure": "b"})
    assert (state.guard.recent, state.guard.roll_backs, state.best) == ([0.5], 3, None)
    roll_back(folder, state)
    assert state.guard.recent == [0.5]
    state.adopt_settings({"training": "b", "repeat": "b", "measure": "b"})
    assert (state.guard.recent, state.guard.roll_backs) == ([], 0)
    roll_back(folder, state)
    assert state.guard.recent == [], "what was usual before the change"


def test_best_only_ones_do_not_push_out_the_others(tmp_path):
    state = fresh()
    for number in range(1, 8):
        step(state)
        state.last = {"held_out_loss": 1 / number}
        write(state, tmp_path, number, for_best=number % 3 != 0)
        rotation.remove_old_checkpoints(tmp_path, Checkpoint(keep=2))
    state.settings_digests = {"measure": "another"}
    state.last = {"held_out_loss": 0.9}
    write(state, tmp_path, 8, for_best=True)
    assert checkpoint.best_of(checkpoint.list_checkpoints(tmp_path)[0]).step == 8, (
        "only what was measured alike compares"
    )
    rotation.remove_checkpoint(tmp_path / "00000008")
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [3, 6, 7]
    assert checkpoint.best_of(checkpoint.list_checkpoints(tmp_path)[0]).step == 7


def test_an_untrained_network_is_not_the_best(tmp_path):
    state = fresh()
    state.last = {"held_out_loss": 1.8}
    write(state, tmp_path, 0)
    state.last = {}
    step(state)
    write(state, tmp_path, 1)
    with pytest.raises(RequestError, match="untrained network"):
        checkpoint.find_checkpoint(tmp_path, "best")
    step(state)
    state.last = {"held_out_loss": 1.7}
    write(state, tmp_path, 2)
    assert checkpoint.find_checkpoint(tmp_path, "best").step == 2


def test_manifests_of_other_makers_are_refused(tmp_path):
    folder = write(trained(), tmp_path)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    for change in (
        {"format": 1},
        {"step": 4},
        {"files": {**manifest["files"], "../../evil": {"bytes": 1, "sha256": ""}}},
        {"files": {}},
    ):
        (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest | change))
        assert len(checkpoint.list_checkpoints(tmp_path)[1]) == 1
        if "files" in change:  # also when its digest is right
            forged = {k: v for k, v in (manifest | change).items() if k != "sha256"}
            (folder / checkpoint.MANIFEST).write_text(
                json.dumps(forged | {"sha256": checkpoint.manifest_digest(forged)})
            )
            assert "it lists" in checkpoint.list_checkpoints(tmp_path)[1][0].reason
    (folder / checkpoint.MANIFEST).write_bytes(b" " * (checkpoint.LARGEST_JSON + 1))
    assert "over" in checkpoint.list_checkpoints(tmp_path)[1][0].reason


def test_moments_of_another_network_are_refused(tmp_path):
    folder = write(trained(), tmp_path)
    held = read_tensors(folder / "optimizer.safetensors", folder)
    snapshot.save_file(held | {"exp_avg/nosuch": torch.ones(1)}, folder / "optimizer.safetensors")
    with pytest.raises(RunError, match=r"moments .*do not fit .*exp_avg/nosuch"):
        load_checkpoint(folder, fresh())


def test_a_roll_back_comes_back_to_a_regular_step_at_which_all_was_well():
    """Else it would come back to the beginning of the divergence, or a run that was stopped in between elsewhere."""
    config = update(Config(), {"checkpoint": {"every": 5}, "training": {"patience": 3}}, "")
    state = fresh()

    def anchor(at, ordinary, strange):
        state.guard.ordinary, state.guard.anomalous = ordinary, strange
        return Saver._is_rollback_target(SimpleNamespace(config=config), state, at)

    assert anchor(0, 0, 0), "the beginning, always"
    assert anchor(10, 3, 0)
    assert not anchor(11, 3, 0), "somebody asked for it"
    assert not anchor(10, 2, 0), "too soon after a roll-back"
    assert not anchor(10, 9, 1), "trouble has begun"


def test_a_disk_that_refuses_now_and_then_is_tried_again(tmp_path, monkeypatch):
    write_really, refusals = snapshot.write_checkpoint, [errno.EIO, errno.ESTALE]

    def write(taken, folder):
        if refusals:
            raise OSError(refusals.pop(), "a moment ago")
        return write_really(taken, folder)

    monkeypatch.setattr(snapshot, "write_checkpoint", write)
    writer = CheckpointWriter(tmp_path, Checkpoint())
    writer.submit(snapshot.take_snapshot(trained(), 3))
    assert writer.wait(120)
    assert [news.kind for news in writer.events()] == ["checkpoint"]
    refusals += [errno.EIO] * 3
    writer.submit(snapshot.take_snapshot(trained(), 4))
    with pytest.raises(RunError, match="could not be written"):
        writer.wait(120)


def test_a_roll_back_is_noted_with_where_it_went(tmp_path):
    state = trained()
    folder = write(state, tmp_path, anchor=True)
    state.seen += 80
    roll_back(folder, state)
    assert state.guard.rollback_images == 24
    assert (state.guard.anomalous, state.guard.skipped, state.guard.ordinary) == (0, 0, 0)
