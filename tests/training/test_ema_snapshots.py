"""Averages rebuilt from snapshots of two, against the averages themselves."""

import json
import math
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from conftest import advance
from test_training import CPU, Diary, denoising, run
from unfog.errors import RequestError, RunError
from unfog.inference.loaded_run import rebuild_ema
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import posthoc_ema as averages
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.load import load_checkpoint
from unfog.training.checkpoints.posthoc_ema import (  # compared with the equations of Karras et al. 2024
    METADATA_KEY,
    EmaSnapshotFile,
    EmaSnapshotWriter,
    Mixture,
    _coefficients,
    _inner_product,
    _remove_surplus,
    _write_snapshot,
    remove_after,
    snapshot_interval,
    take_ema_snapshot,
)
from unfog.training.loop import Intervals
from unfog.training.precision import Precision
from unfog.training.settings import (
    MAX_EMA_SNAPSHOTS,
    EmaSnapshots,
    FixedEma,
    Optimizer,
    PowerEma,
)
from unfog.training.state import TrainState

STEPS, EVERY = 480, 20


def share(gamma: float, n: np.ndarray, end: float) -> np.ndarray:
    """What each update counts for, from the recurrence alone: its own weight times all decays after it."""
    decay = (1 - 1 / n) ** (gamma + 1)
    return (1 - decay) * np.append(np.cumprod(decay[::-1])[::-1][1:], 1.0)


def test_profiles_are_integrals_of_powers_and_their_products_are_in_closed_form():
    n = np.arange(1, 4001, dtype=np.float64)
    for width in (0.03, 0.1, 0.25):
        gamma = PowerEma(width).gamma
        weights = share(gamma, n, 4000)
        np.testing.assert_allclose(weights, (n / 4000) ** (gamma + 1) - ((n - 1) / 4000) ** (gamma + 1), atol=1e-13)
        other, end = PowerEma(0.06).gamma, 2500
        theirs = np.append(share(other, n[:end], end), np.zeros(4000 - end))
        got = _inner_product(np.array([gamma]), np.array([4000.0]), other, float(end))
        assert got[0] == pytest.approx(weights @ theirs, rel=2e-3)  # a sum over updates against an integral


@pytest.mark.slow
def test_the_average_that_is_there_is_found_exactly():
    gammas = np.repeat([PowerEma(w).gamma for w in (0.1, 0.05)], 24)
    ends = np.tile(np.arange(1, 25) * 1000.0, 2)
    for width, place in ((0.1, 23), (0.05, 47)):
        weights, error = _coefficients(gammas, ends, PowerEma(width).gamma, 24000.0)
        assert weights[place] == pytest.approx(1, abs=1e-6)
        assert np.abs(np.delete(weights, place)).max() < 1e-6
        assert error < 1e-6
    for width in (0.04, 0.07, 0.15, 0.2):
        weights, error = _coefficients(gammas, ends, PowerEma(width).gamma, 24000.0)
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        assert error < 0.012
        profile = sum(w * np.append(share(g, np.arange(1, e + 1), e), np.zeros(24000 - int(e)))
                      for w, g, e in zip(weights, gammas, ends))  # fmt: skip
        wanted = share(PowerEma(width).gamma, np.arange(1, 24001), 24000)
        assert np.linalg.norm(profile - wanted) / np.linalg.norm(wanted) == pytest.approx(error, abs=1e-3)


def of_edm2(ends: list[float], widths: list[float], end: float, width: float) -> np.ndarray:
    """Coefficients as EDM2 publishes them: equations 123 to 127 and algorithm 3 of Karras et al. 2024.

    The width fixes gamma by width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), solved here by bisection.
    """

    def gamma(width: float) -> float:
        low, high = 0.0, 1e5
        for _ in range(200):
            middle = (low + high) / 2
            above = (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > width**2
            low, high = (middle, high) if above else (low, middle)
        return low

    def product(t_a: float, a: float, t_b: float, b: float) -> float:
        ratio = (t_a / t_b) ** (b if t_a < t_b else -a)
        return (a + 1) * (b + 1) * ratio / ((a + b + 1) * max(t_a, t_b))

    stored = [(t, gamma(w)) for t, w in zip(ends, widths)]
    matrix = np.array([[product(*one, *other) for other in stored] for one in stored])
    wanted = np.array([product(*one, end, gamma(width)) for one in stored])
    solved: np.ndarray = np.linalg.solve(matrix, wanted)
    return solved / solved.sum()


@pytest.mark.parametrize("width", [0.03, 0.07, 0.15, 0.2, 0.25])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_coefficients_are_those_of_edm2(count, width):
    ends, widths = [1000.0 * n for n in range(1, count + 1)] * 2, [0.1] * count + [0.05] * count
    gammas = np.array([PowerEma(w).gamma for w in widths])
    weights, _ = _coefficients(gammas, np.array(ends), PowerEma(width).gamma, ends[-1])
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(weights, of_edm2(ends, widths, ends[-1], width), rtol=1e-4, atol=1e-6)


class Recorder(Diary):
    """Keeps every weight that there ever was, and the snapshots as the trainer does."""

    def __init__(self, state, folder, stop_at=None):
        super().__init__(stop_at)
        self.state, self.folder, self.history = state, folder, []

    def on_step_end(self, step):
        super().on_step_end(step)
        self.history.append(torch.cat([p.detach().double().flatten() for p in self.state.model.parameters()]).numpy())

    def save_ema_snapshot(self, state):
        _write_snapshot(take_ema_snapshot(state, state.seen // 8), self.folder)


SECOND = PowerEma(0.05)


def fresh(second: PowerEma | None = SECOND) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))
    return TrainState(model, Optimizer(lr=1e-2), PowerEma(0.1), Precision("fp32", CPU), second)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """480 real steps of Adam at a constant rate, with 24 snapshots."""
    folder = tmp_path_factory.mktemp("run") / "averages"
    state = fresh()
    recorder = Recorder(state, folder)
    run(state, denoising, recorder, Intervals(0, 0, 0, 0, EVERY), images=STEPS * 8)
    return folder, np.stack(recorder.history), state


def flat(tensors: dict[str, torch.Tensor], state: TrainState) -> np.ndarray:
    return torch.cat([tensors[name].double().flatten() for name, _ in state.model.named_parameters()]).numpy()


@pytest.mark.parametrize("step", [STEPS, 400])
@pytest.mark.parametrize("width", [0.04, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2])
def test_any_length_is_rebuilt_to_a_thousandth(trained, width, step):
    folder, history, state = trained
    mix = Mixture.solve(EmaSnapshotFile.read_all(folder), width, step + EVERY - 1 if step < STEPS else None)
    assert mix.step == step  # of the snapshot before: between two, the newest weights are in none
    direct = share(PowerEma(width).gamma, np.arange(1, step + 1), step) @ history[:step]
    error = np.linalg.norm(flat(rebuild_ema(mix), state) - direct) / np.linalg.norm(direct)
    assert error < (1e-3 if (width, step) != (0.2, 400) else 2e-3)  # which wants more than 20 snapshots


def test_the_solver_alone_is_exact_to_the_profiles(trained):
    """In float64, without the rounding of the files: what is left is the distance between profiles."""
    _, history, _ = trained
    ends = np.arange(EVERY, STEPS + 1, EVERY)
    gammas = np.repeat([PowerEma(w).gamma for w in (0.1, 0.05)], len(ends))
    rows = np.stack([share(g, np.arange(1, e + 1), e) @ history[:e]
                     for g, e in zip(gammas, np.tile(ends, 2))])  # fmt: skip
    for width in (0.04, 0.07, 0.13, 0.2):
        weights, distance = _coefficients(gammas, np.tile(ends, 2).astype(float), PowerEma(width).gamma, float(STEPS))
        direct = share(PowerEma(width).gamma, np.arange(1, STEPS + 1), STEPS) @ history
        error = np.linalg.norm(weights @ rows - direct) / np.linalg.norm(direct)
        assert error < min(1e-3, distance)


def test_buffers_are_those_of_the_newest_snapshot_and_what_is_rebuilt_fits(trained):
    folder, _, state = trained
    rebuilt = rebuild_ema(Mixture.solve(EmaSnapshotFile.read_all(folder), 0.08))
    assert rebuilt.keys() == state.model.state_dict().keys()
    for name, buffer in state.model.named_buffers():
        assert torch.equal(rebuilt[name], buffer)
    assert all(rebuilt[name].dtype == torch.float32 for name, _ in state.model.named_parameters())


@pytest.mark.slow
def test_interrupted_keeps_the_same_snapshots(trained, tmp_path):
    reference, _, _ = trained
    folder, first = tmp_path / "averages", fresh()
    run(first, denoising, Recorder(first, folder, stop_at=250), Intervals(0, 0, 0, 0, EVERY), images=STEPS * 8)
    place = snapshot.write_checkpoint(snapshot.take_snapshot(first, 250), tmp_path / "checkpoints")
    assert (place / checkpoint.EMA2).exists()
    save_file({"0/x": torch.ones(1)}, folder / "00000260.safetensors")  # of what the killed process still did
    (folder / ".partial-00000260").write_bytes(b"half")
    remove_after(folder, 250)
    assert [one.step for one in EmaSnapshotFile.read_all(folder)] == list(range(EVERY, 250, EVERY))
    assert not list(folder.glob(".*"))
    assert not (folder / "00000260.safetensors").exists()
    second = fresh()
    load_checkpoint(place, second)
    assert second.ema_history_known
    run(second, denoising, Recorder(second, folder), Intervals(0, 0, 0, 0, EVERY), images=STEPS * 8)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in reference.iterdir()}


def test_what_began_without_or_with_others_takes_no_snapshots(tmp_path):
    without, other = fresh(None), fresh(PowerEma(0.07))
    folder = snapshot.write_checkpoint(snapshot.take_snapshot(without, 0), tmp_path / "a")
    assert not (folder / checkpoint.EMA2).exists()
    checkpoint.CheckpointInfo.read(folder)
    for place in (folder, snapshot.write_checkpoint(snapshot.take_snapshot(other, 0), tmp_path / "b")):
        into = fresh()
        load_checkpoint(place, into)
        assert into.ema_widths == []
        again = fresh()
        load_checkpoint(snapshot.write_checkpoint(snapshot.take_snapshot(into, 1), tmp_path / "c"), again)
        assert again.ema_widths == []  # nor ever after
    back = fresh(None)
    load_checkpoint(snapshot.write_checkpoint(snapshot.take_snapshot(fresh(), 0), tmp_path / "d"), back)
    assert back.second_ema is None


def test_refused_steps_count_for_nothing(tmp_path):
    """Position goes on, updates do not: the profile is one of updates."""
    state = fresh()
    for place, accepted in enumerate([True] * 5 + [False] * 3 + [True] * 2, 1):
        with torch.no_grad():
            for p in state.model.parameters():
                p += 0.01 * accepted
        advance(state, 8, accepted, [])
        _write_snapshot(take_ema_snapshot(state, place), tmp_path / "averages")
    kept = EmaSnapshotFile.read_all(tmp_path / "averages")
    assert [one.updates for one in kept] == [1, 2, 3, 4, 5, 6, 7]
    assert [one.step for one in kept] == [1, 2, 3, 4, 8, 9, 10]


def test_spacing_doubles_so_that_no_more_than_the_most_are_kept():
    assert [snapshot_interval(10, step) for step in (10, 480, 489, 490, 960, 980, 10_000)] == [
        10,
        10,
        10,
        20,
        20,
        40,
        320,
    ]
    every, folder_of = 1, []
    for step in range(1, 1000):
        if step % snapshot_interval(every, step) == 0:
            folder_of = [one for one in [*folder_of, step] if one % snapshot_interval(every, step) == 0]
        assert len(folder_of) <= MAX_EMA_SNAPSHOTS + 1
    assert len(folder_of) > MAX_EMA_SNAPSHOTS / 2 - 1


def test_thinned_on_disk(tmp_path):
    for step in (10, 20, 30, 485, 490, 500):
        said = {METADATA_KEY: json.dumps({"step": step, "updates": step, "widths": [0.1, 0.05]})}
        save_file({"0/a": torch.ones(1)}, tmp_path / f"{step:08d}.safetensors", said)
    _remove_surplus(tmp_path, 10, 500)
    assert [one.step for one in EmaSnapshotFile.read_all(tmp_path)] == [20, 500]


def test_files_are_half_as_large_and_no_weight_overflows(tmp_path):
    state = fresh()
    with torch.no_grad():
        next(state.model.parameters())[0] = 1e6
    advance(state, 8, True, [])
    path = tmp_path / "averages"
    _write_snapshot(take_ema_snapshot(state, 1), path)
    tensors = load_file(next(path.iterdir()))
    kinds = {name: t.dtype for name, t in tensors.items()}
    assert kinds["0/0.weight"] == torch.float32  # as float16 ends at 65504
    assert kinds["0/3.weight"] == kinds["1/3.weight"] == torch.float16
    assert (next(path.iterdir()).stat().st_mode & 0o777) == (path.stat().st_mode & 0o666)


def test_what_cannot_be_written_is_told_and_stops_nothing(tmp_path):
    writer, state = EmaSnapshotWriter(EmaSnapshots(every=1)), fresh()
    advance(state, 8, True, [])
    (tmp_path / "averages").write_text("somebody's notes")
    writer.submit(take_ema_snapshot(state, 1), tmp_path / "averages")
    writer.submit(take_ema_snapshot(state, 2), tmp_path / "gone/averages")  # a run that was moved is not made anew
    writer.wait()
    assert [step for step, _ in writer.failures()] == [1, 2]
    assert writer.failures() == []
    assert not (tmp_path / "gone").exists()
    with torch.no_grad():
        state.ema.parameters[0][0] = math.nan
    writer.submit(take_ema_snapshot(state, 3), tmp_path / "real")
    writer.wait()
    assert writer.failures() == [(3, "it is not finite")]


def test_full_disk_is_not_waited_for(tmp_path):
    resource = pytest.importorskip("resource")
    state, writer = fresh(), EmaSnapshotWriter(EmaSnapshots(every=1))
    advance(state, 8, True, [])
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # no file may grow beyond: EFBIG
    try:
        (tmp_path / "averages").mkdir()
        writer.submit(take_ema_snapshot(state, 1), tmp_path / "averages")
        writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [step for step, _ in writer.failures()] == [1]
    assert list((tmp_path / "averages").iterdir()) == []


def test_what_cannot_be_rebuilt_is_refused_and_what_is_damaged_passed_over(trained, tmp_path):
    folder, _, _ = trained
    kept = EmaSnapshotFile.read_all(folder)
    with pytest.raises(RequestError, match="no EMA snapshots"):
        Mixture.solve([], 0.1)
    with pytest.raises(RequestError, match="step = 481 must be from 20 to 480"):
        Mixture.solve(kept, 0.1, 481)
    with pytest.raises(RequestError, match=r"width = 0\.5 must be from 0\.01"):
        Mixture.solve(kept, 0.5)
    with pytest.raises(RequestError, match=r"ema = 0.2 .*step 20.* 0.1 or 0.05"):
        Mixture.solve(kept, 0.2, 20)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "00000100.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    (tmp_path / "00000120.safetensors").write_bytes((folder / "00000120.safetensors").read_bytes()[:500])
    (tmp_path / "notes.txt").write_text("mine")
    save_file(
        {"0/a": torch.ones(1)},
        tmp_path / "00000140.safetensors",
        {METADATA_KEY: '{"step": 140, "updates": -1, "widths": []}'},
    )
    assert [one.step for one in EmaSnapshotFile.read_all(tmp_path)] == [
        one.step for one in kept if one.step not in (100, 120, 140)
    ]
    assert Mixture.solve(EmaSnapshotFile.read_all(tmp_path), 0.07).error < 0.05
    mix = Mixture.solve(EmaSnapshotFile.read_all(tmp_path), 0.07)
    (tmp_path / "00000080.safetensors").unlink()
    with pytest.raises(RunError, match="cannot be read"):
        rebuild_ema(mix)


def test_the_second_average_is_another_one():
    assert EmaSnapshots().second_schedule(PowerEma(0.1)) == PowerEma(0.05)
    assert EmaSnapshots().second_schedule(PowerEma(0.015)) == PowerEma(0.03)
    assert EmaSnapshots(second=0.2).second_schedule(PowerEma(0.1)) == PowerEma(0.2)
    assert EmaSnapshots(every=-1).second_schedule(PowerEma()) is None
    assert EmaSnapshots().second_schedule(FixedEma()) is None
    for wrong in ({"every": -2}, {"second": 0.5}):
        with pytest.raises(RequestError):
            EmaSnapshots(**wrong)
    assert averages.MAX_EMA_SNAPSHOTS == 48
    assert EmaSnapshotFile._fields == ("path", "step", "updates", "widths")


def test_the_newest_snapshot_stays_wherever_it_is(tmp_path):
    for step in (10, 20, 30, 490, 505):
        said = {METADATA_KEY: json.dumps({"step": step, "updates": step, "widths": [0.1, 0.05]})}
        save_file({"0/a": torch.ones(1)}, tmp_path / f"{step:08d}.safetensors", said)
    _remove_surplus(tmp_path, 10, 505)
    assert [one.step for one in EmaSnapshotFile.read_all(tmp_path)] == [20, 505]


def test_the_last_step_has_a_snapshot_of_the_averages():
    every = Intervals(0, 0, 0, 0, ema_snapshot=4)
    assert "averages" in every.due(8, last=False)
    assert "averages" not in every.due(9, last=False)
    assert "averages" in every.due(9, last=True)
    assert "averages" not in every._replace(ema_snapshot=0).due(9, last=True)
