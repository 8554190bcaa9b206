"""A network divided among processes: what one process does, to rounding, and what may befall it."""

import errno
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import _dynamo as dynamo
from torch import nn
from torch.distributed import HashStore

from launches import (
    SETTINGS,
    alone,
    cases,
    ended,  # noqa: F401  a fixture
    largest_difference,
    launched,
    launched_script,
    output,
    rows,
    wait_for_steps,
    weights,
    workers,
)
from unfog.config.schema import Config
from unfog.errors import RequestError, RunError
from unfog.models.network_settings import build_model
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.memory_recorder import fake_process_group
from unfog.runs.train import check_visible
from unfog.training.batches import local_micro_batches
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation, snapshot, writer  # a shard is awaited without a second process
from unfog.training.checkpoints.load import load_weights, read_tensors, write_merged
from unfog.training.checkpoints.writer import ShardStatusStore
from unfog.training.distributed.fsdp import build_mesh, compile_blocks, shard_network, shardable_blocks
from unfog.training.distributed.watchdog import Watchdog
from unfog.training.distributed.world import World
from unfog.training.precision import Precision
from unfog.training.settings import AdamW, Checkpoint, Custom, Muon, Optimizer, PowerEma, Training
from unfog.training.sharded_tensors import all_finite, is_sharded, total_norm
from unfog.training.state import TrainState
from unfog.values.condition_format import ConditionFormat
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ended")]

CPU = torch.device("cpu")
DIT = DiT(width=40, depth=2, head_channels=8)  # as the cases have it
DECIDED = {f"divided {name}" for name in ("refuses", "diverges", "goes back", "stops", "noise", "abandons")}


def check_equal(found):
    """Weights, averages and moments, which a step moves by up to 1e-3, and the log are those of one process."""
    for name in found.keys() - DECIDED:
        half = name == "divided fp16"
        assert found[name]["weights"] < (1e-3 if half else 1e-6), name
        assert found[name]["logged"] < (2e-3 if half else 2e-5), name
        assert found[name]["repeated"], name


def test_two_processes_that_divide_a_network_do_what_one_does_and_decide_alike(tmp_path):
    found = cases(tmp_path, 2, ["divided", "divided muon", *sorted(DECIDED)])
    check_equal(found)
    refused = found["divided refuses"]
    assert (refused["refusals"], refused["updates"]) == ([["loss", [15]]], 3)
    assert found["divided diverges"].startswith("training diverged 3 times")
    assert found["divided stops"]["seen"] == 32
    assert found["divided abandons"] == {"seen": 24, "updates": 3, "same": True}
    back = found["divided goes back"]
    assert (back["roll_backs"], back["same"]) == ([1, 1, 2], True)
    assert back["bad"].startswith("model: "), "one rank's rows are enough"
    assert back["torch"]  # whose reader finds the same in the files
    # No process has more than its rows in host memory for a checkpoint, and together they have it all once.
    assert sum(back["parts"]) == back["whole"]
    assert max(back["parts"]) < 0.55 * back["whole"]
    check_damage(tmp_path / "checkpoints")
    check_noise(found["divided noise"])


def check_noise(rows):
    """First passes are of three images at each of two processes; eleven weights, each with the gradient label + 1."""
    for step, row in enumerate(rows):
        gradients = [float((10 * step + i) % 40 % 3 + 1) for i in range(10)]
        few = torch.tensor([gradients[i] for i in (0, 1, 2, 5, 6, 7)]).mean() ** 2 * 11
        all_of_them = torch.tensor(gradients).mean() ** 2 * 11
        assert row["gradient_signal"] == pytest.approx(float((10 * all_of_them - 6 * few) / 4), rel=1e-5)
        assert row["gradient_noise"] == pytest.approx(float((few - all_of_them) / (1 / 6 - 1 / 10)), abs=1e-3)
    assert len(rows) == 2


def check_damage(checkpoints):
    """A part that is damaged, missing or one too many is named, and the checkpoint before is used."""
    newest, before = checkpoints / "00000016", checkpoints / "00000000"
    for folder in set(checkpoints.iterdir()) - {newest, before}:  # what other cases left at their ends
        shutil.rmtree(folder)
    parts = {f"{file}-0000{i}-of-00002.safetensors" for file in ("model", "ema", "ema2", "optimizer") for i in (1, 2)}
    assert {path.name for path in newest.iterdir()} == parts | {"manifest.json", "state.json", "config.toml"}
    plain, network = checkpoints.parent / "plain.safetensors", build_model(DIT, 1, ConditionFormat.numbered(3, 9))
    for file in ("model", "optimizer"):  # whose step counts have no dimensions
        write_merged(newest / f"{file}.safetensors", plain)
        assert same_tensors(load_file(plain), read_tensors(newest / f"{file}.safetensors", newest))
    load_weights(newest, "ema", network)
    assert same_tensors(network.state_dict(), read_tensors(newest / "ema.safetensors", newest))
    part = newest / "ema-00002-of-00002.safetensors"
    content = part.read_bytes()

    def refused(reason):
        saved, broken = checkpoint.newest(checkpoints)
        assert saved.folder == before
        assert [one.folder for one in broken] == [newest]
        assert reason in broken[0].reason

    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused("ema-00002-of-00002.safetensors is not what was saved")
    part.unlink()
    refused("ema-00002-of-00002.safetensors: No such file")
    with pytest.raises(RunError, match="do not fit the network"):  # the last rows
        load_weights(newest, "ema", network)
    part.write_bytes(content)
    stray = newest / "ema.safetensors"
    stray.write_bytes(content)
    refused("ema.safetensors does not belong to it")
    stray.unlink()
    assert checkpoint.newest(checkpoints)[0].folder == newest


def same_tensors(a, b):
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and a[name].equal(b[name]) for name in a)


@pytest.mark.exhaustive
def test_four_processes_that_divide_a_network_do_what_one_does(tmp_path):
    # More processes than images, and than rows of some weights; weights without rows; the scaler of fp16.
    check_equal(cases(tmp_path, 4, ["divided", "divided few", "divided mp", "divided muon", "divided fp16"]))


@pytest.mark.timeout(900)
def test_a_divided_run_that_is_killed_goes_on_with_any_number_of_processes_divided_or_not(tmp_path):
    flags = dict(zip(SETTINGS[::2], SETTINGS[1::2], strict=True)) | {
        "--network": "dit:width=40,depth=2,head_channels=8,patch=4",
        "--checkpoint.every": 1,
        "--evaluate.every": 4,
        "--ema-snapshots.every": 4,
        "--optimizer.eps": "1e-4",
    }
    settings = [word for pair in flags.items() for word in pair]
    one, several = tmp_path / "one", tmp_path / "several"
    alone("train", one, "--steps", 18, *settings)
    process = launched(3, "train", several, "--steps", 10, *settings, "--training.shard", restarts=1)
    wait_for_steps(several, 6, process)
    os.kill(workers(process)[2], signal.SIGKILL)
    assert output(process).count("resuming") == 1
    output(launched(2, "resume", several, "--steps", 12))
    output(launched(3, "resume", several, "--steps", 14, "--training.no-shard"))
    output(launched(2, "resume", several, "--steps", 16, "--training.shard"))
    alone("resume", several, "--steps", 18)
    assert largest_difference(weights(one), weights(several)) < 1e-5
    for a, b in zip(rows(one), rows(several), strict=True):
        for name in {"loss", "gradient_norm", "held_out_loss"} & a.keys():  # each end is evaluated as well
            assert a[name] == pytest.approx(b[name], rel=1e-4)
    assert len(list((several / "averages").iterdir())) == len(list((one / "averages").iterdir())) > 0


@pytest.mark.timeout(900)
@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [("--training.shard",), ()])
def test_compiled_on_two_processes_divided_or_not(tmp_path, flags):
    network = "dit:width=16,depth=2,head_channels=8,patch=7"
    settings = [*SETTINGS[2:], "--network", network, "--optimizer.eps", "1e-4", "--steps", 3]
    alone("train", tmp_path / "eager", *settings)
    output(launched(2, "train", tmp_path / "compiled", *settings, "--compile", *flags))
    assert largest_difference(weights(tmp_path / "eager"), weights(tmp_path / "compiled")) < 1e-6


@dynamo.config.patch(recompile_limit=8)  # which is put back
@pytest.mark.exhaustive
def test_each_block_of_a_network_that_is_divided_is_compiled_for_its_shape_and_once(monkeypatch):
    graphs, shapes = [], set()

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def compiled(block, **settings):
        block._compiled_call_impl = torch.compile(block._call_impl, backend=backend, fullgraph=True, **settings)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    unet = UNet(channels=(8, 16, 24), blocks=2, norm_groups=4, head_channels=8)
    for settings, least, most in ((unet, 9, 99), (DiT(width=16, depth=10, head_channels=8), 1, 1)):
        network = build_model(settings, 3, ConditionFormat.numbered(2))
        for block in shardable_blocks(network):
            weights = tuple(parameter.shape for parameter in block.parameters())
            block.register_forward_pre_hook(lambda _, inputs, of=weights: shapes.add((of, inputs[0].shape)))
        x, level, label = torch.randn(2, 3, 16, 16), torch.zeros(2), torch.tensor([0, 1])
        for parameter in network.parameters():
            nn.init.normal_(parameter, 0, 0.1)  # the last layer begins as zero
        plain = network(x, level, label)
        for block in shardable_blocks(network):
            block._forward_pre_hooks.clear()
        compile_blocks(network)
        for _ in range(2):
            assert torch.equal(network(x, level, label), plain)
        assert len(graphs) == len(shapes)
        assert least <= len(graphs) <= most  # torch would stop at eight
        graphs.clear()
        shapes.clear()


def test_a_process_that_is_killed_in_the_middle_of_a_checkpoint_leaves_the_one_before(tmp_path):
    output(launched_script(2, "ranks.py", tmp_path / "found.json", "divided killed"), status=1)
    checkpoints = tmp_path / "checkpoints"
    assert list((checkpoints / ".partial-00000008").glob("*-00002-of-00002.safetensors"))
    saved, broken = checkpoint.newest(checkpoints)
    assert (saved.images, broken) == (0, [])
    rotation.remove_leftovers(checkpoints, broken)
    assert [path.name for path in checkpoints.iterdir()] == ["00000000"]


@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_a_divided_run_is_killed_stopped_and_damaged_and_goes_on(tmp_path):
    run = tmp_path / "run"
    flags = dict(zip(SETTINGS[::2], SETTINGS[1::2], strict=True)) | {
        "--network": "dit:width=40,depth=2,head_channels=8,patch=4",
        "--checkpoint.every": 1,
    }
    settings = [word for pair in flags.items() for word in pair]
    process = launched(2, "train", run, "--steps", 5000, *settings, "--training.shard", restarts=1)
    wait_for_steps(run, 4, process)
    os.kill(workers(process)[1], signal.SIGKILL)
    wait_for_events(run, "resumed", process)
    wait_for_steps(run, len(rows(run)) + 3, process)
    (run / "STOP").touch()
    assert "stopped at step" in output(process)
    saved, broken = checkpoint.newest(run / "checkpoints")
    assert not broken
    assert saved.step >= rows(run)[-1]["step"]  # a line that is due is written after a resume
    part = saved.folder / "optimizer-00002-of-00002.safetensors"
    os.truncate(part, part.stat().st_size - 1)
    said = alone("resume", run, "--steps", saved.step + 1)
    assert f"{saved.folder.name} is broken and is passed over: {part.name}" in said
    assert f"steps {saved.step - 1:,} to {saved.step + 1:,}" in said


def wait_for_events(folder, kind, process):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if f'"{kind}"' in (folder / "events.jsonl").read_text():
            return
        time.sleep(0.05)
    raise AssertionError(output(process))


def test_what_other_processes_have_written_is_seen_or_said(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_VISIBLE_SECONDS", 0.1)
    (tmp_path / "here").write_text("four")
    post, on, off = ShardStatusStore(HashStore(), "parts/1"), threading.Event(), threading.Event()
    on.set()
    assert writer._wait_for_shard(1, tmp_path, post, on) is None  # nothing was said, and it is not waited for
    post.set(1, {"files": {"here": {"bytes": 4}}})
    assert writer._wait_for_shard(1, tmp_path, post, off) == {"here": {"bytes": 4}}
    post.set(2, {"files": {"elsewhere": {"bytes": 4}}})
    with pytest.raises(RunError, match=r"rank 2 .*elsewhere.* share"):
        writer._wait_for_shard(2, tmp_path, post, off)
    post.set(3, {"failed": "Permission denied"})
    with pytest.raises(RunError, match=r"rank 3 .*Permission denied"):
        writer._wait_for_shard(3, tmp_path, post, off)
    check_visible(tmp_path, "the checkpoints", World(3, 4))
    with pytest.raises(RunError, match=r"rank 3 .* does not see .*elsewhere.* share"):
        check_visible(tmp_path / "elsewhere", "the checkpoints", World(3, 4))


def test_room_that_another_process_waits_for_is_waited_for_by_the_first(tmp_path, monkeypatch):
    post, full, files = ShardStatusStore(HashStore(), "parts/1"), threading.Event(), ("model", "ema", "optimizer")
    full.set()
    state = TrainState(nn.Linear(2, 1), Optimizer(), PowerEma(0.1), Precision("fp32", torch.device("cpu")))
    progress = state.progress() | {"seen": 8}

    def write_files(taken, folder):
        if full.is_set() and taken.rank == 1:
            raise OSError(errno.ENOSPC, "no space left")
        return real(taken, folder)

    real = snapshot.Snapshot.write_files
    monkeypatch.setattr(snapshot.Snapshot, "write_files", write_files)
    monkeypatch.setattr(writer, "RETRY", 0.05)
    writers = [writer.CheckpointWriter(tmp_path, Checkpoint()) for _ in range(2)]
    for rank, one in enumerate(writers):
        part, rows = ({file: {"w": value} for file in files} for value in (torch.ones(2), 2 * rank))
        one.submit(snapshot.Snapshot(1, part, progress, False, False, "", "", 0.0, rows, rank, 2), post)
    wait_until(lambda: all(one.waiting for one in writers))
    assert [news.kind for news in writers[0].events()] == ["disk_full"]
    assert not (tmp_path / "00000001").exists()
    full.clear()
    assert all(one.wait(120) for one in writers)
    assert [news.kind for news in writers[0].events()] == ["disk_has_room", "checkpoint"]
    assert read_tensors(tmp_path / "00000001/model.safetensors", tmp_path)["w"].tolist() == [1, 1, 1, 1]


class Seen:
    seen, microbatch = 100, 0


@pytest.mark.parametrize(("batch", "microbatch", "size"), [(10, 3, 4), (8, 2, 2), (1, 0, 4), (7, 2, 3), (64, 16, 3)])
def test_all_take_part_in_as_many_passes(batch, microbatch, size):
    drawn, settings, seen, counts = microbatch or batch, Training(batch=batch, microbatch=microbatch), [], set()
    for rank in range(size):
        world = World(rank, size)
        world.shards = object()
        passes, own = local_micro_batches(world, settings, Seen(), drawn)
        counts.add(len(passes))
        seen += [place for one in passes[:own] for place in range(one.first, one.first + one.images)]
        idle = [one.first for one in passes[own:]]
        assert not set(idle) & set(world.batch_range(100, batch))
        assert all(100 <= place < 100 + batch for place in idle)
    assert len(counts) == 1
    assert seen == list(range(100, 100 + batch))


def test_what_a_divided_network_cannot_do_is_said(monkeypatch):
    world = World(1, 2)
    assert world.init_device(False, torch.device("cuda")) is World().init_device(True, CPU) is None
    assert World(0, 2).init_device(True, CPU) == CPU
    assert world.init_device(True, CPU) == torch.device("meta")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    with pytest.raises(RequestError, match="each needs a separate GPU"):
        world.init_device(True, torch.device("cuda"))
    world.shards = object()
    with pytest.raises(RunError, match="smaller --microbatch"), world.explain_out_of_memory(last=False):
        raise torch.OutOfMemoryError("CUDA out of memory")
    config = Config(source="fashion", training=Training(shard=True, budget="5m"))
    with pytest.raises(RequestError, match="give --steps or --images"):
        AutoSettings(config, None, CPU, lambda: False, processes=2).resolve_length()


def test_processes_begin_when_all_are_there_however_long_that_takes(monkeypatch):
    store, began = HashStore(), []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, rank, **k: began.append(rank))
    threads = []
    for rank in (1, 0):
        world = World(rank, 2, store, Watchdog(rank, 2, store, 60))
        threads.append(threading.Thread(target=world.init_process_group, args=(CPU, 60)))
        assert not began
        threads[-1].start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(120)
    assert sorted(began) == [0, 1]


@pytest.mark.parametrize("method", [AdamW(), Muon(), Custom(path="torch.optim.Adam")])
def test_the_loss_scaler_takes_a_divided_network_whose_first_weight_has_no_rows(method):
    with fake_process_group(2):
        network = build_model(MPUNet(channels=(8, 16), attention=(False, True)), 1)
        shard_network(network, build_mesh("cpu", 2), False)
        assert not is_sharded(next(network.parameters()))
        state = TrainState(network, Optimizer(method=method), PowerEma(0.1), Precision("fp16", CPU))
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(state.optimizer)


def test_what_is_not_divided_is_measured_without_other_processes():
    tensors = [torch.tensor([3.0]), torch.tensor([[4.0]]), torch.tensor([0.0, torch.inf])]
    assert total_norm(tensors[:2]) == 5
    assert all_finite(tensors) == [True, True, False]
