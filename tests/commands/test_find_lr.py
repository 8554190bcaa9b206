"""The learning-rate range test: what it measures, when it ends, what it suggests, and that it leaves all else alone."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from conftest import TRANSFORMER
from unfog.config.presets import preset
from unfog.config.requests.plan import FindLrRequest
from unfog.config.schema import Network
from unfog.config.spec_strings import parse_spec, registry_of
from unfog.data.augmentation import Augment
from unfog.data.dataset import ImageSet
from unfog.data.stream import ImageStream
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective
from unfog.diffusion.target import Eps
from unfog.errors import Interrupted, RequestError
from unfog.models.network_settings import build_model
from unfog.planning import lr_range_test as lr_range  # its parts: a whole test takes minutes
from unfog.planning.lr_range_test import (  # the ramp is given losses of known shape
    _LOWEST,
    _RAMP,
    LossProbe,
    LrRangeResult,
    LrTestSetup,
    Ramp,
    Trial,
    _smoothed,
    next_rates,
    ramp_stop_reason,
    suggest,
)
from unfog.planning.microbatch import MicrobatchChoice
from unfog.runs import find_lr as command
from unfog.runs.find_lr import find_lr, lr_chart
from unfog.training.precision import Precision
from unfog.training.settings import Optimizer, PowerEma, Training
from unfog.training.state import TrainState
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import NO_CONDITIONS, Conditions

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def pixels(count: int = 64) -> np.ndarray:
    """Light squares on dark ground, uint8 [count, 1, 8, 8]."""
    generator = np.random.default_rng(0)
    images = np.full((count, 1, 8, 8), 30, np.uint8)
    for image, (y, x) in zip(images, generator.integers(0, 5, (count, 2))):
        image[0, y : y + 4, x : x + 4] = 220
    return images


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return build_model(parse_spec(registry_of(Network), TRANSFORMER), 1, ConditionFormat())


class Mute(nn.Module):
    """A network that answers nothing whatever it learns."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, c_noise, label=None):
        return 0 * self.weight * x


def subject(network=transformer, stop=lambda: False) -> LrTestSetup:
    images = ImageSet(pixels(), tuple(map(str, range(64))))
    optimizer = Optimizer(lr=1e-3, betas=(0.9, 0.99), schedule="cosine", weight_decay=0.0)
    return LrTestSetup(
        Training(batch=8, precision="fp32", device="cpu"),
        optimizer,
        lambda: TrainState(network(), optimizer, PowerEma(), Precision("fp32", CPU)),
        ImageStream(images, 0),
        Augment(),
        Objective(preset("default").diffusion),
        LossProbe.create(torch.from_numpy(pixels()).float() / 127.5 - 1, NO_CONDITIONS),
        stop,
    )


def ramp_of(losses, start: float = 1.0, low: float = 1e-5, ended: str = "") -> Ramp:
    rates = tuple(low * 10 ** (i / 4) for i in range(len(losses)))
    return Ramp(start, rates, tuple(losses), ended)


VALLEY = [1.0] * 8 + [0.9, 0.7, 0.5, 0.4, 0.3, 0.5, 0.9, 1.1]  # lowest at 1e-2


def test_ramp_learns_and_grows_by_one_factor():
    ramp, pace = lr_range._run_ramp(subject(), seconds=1e-3)
    assert ramp.rates[0] == _LOWEST
    assert len(ramp.rates) == len(ramp.losses) <= _RAMP[0]
    growth = [b / a for a, b in zip(ramp.rates[4:], ramp.rates[5:])]
    assert max(growth) == pytest.approx(min(growth))
    assert ramp.learns
    assert 1e-4 < ramp.lowest[0] < 1
    assert ramp.lowest[1] < 0.9 * ramp.start
    assert pace > 0
    if not ramp.ended:
        assert ramp.rates[-1] == pytest.approx(1)


def test_network_that_learns_nothing_gets_no_suggestion():
    found = subject(Mute).run(seconds=1e-3)
    assert found.suggestion is None
    assert found.trials == ()
    assert "never fell by more than 0.0%" in found.reason


def test_only_a_micro_batch_goes_through_at_once_and_random_numbers_are_left_alone():
    sizes = []

    class Small(Mute):
        def forward(self, x, c_noise, label=None):
            sizes.append(len(x))
            return super().forward(x, c_noise)

    given = subject(Small)
    before = torch.get_rng_state()
    replace(given, training=replace(given.training, microbatch=3)).run(seconds=1e-3)
    assert max(sizes) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_trials_tell_a_rate_that_learns_from_one_that_does_not():
    whole = subject()
    pace = 1.0
    ramp = ramp_of(VALLEY)
    trials = lr_range._run_trials(whole, ramp, seconds=40 * 4 * pace, pace=pace)
    assert [trial.lr for trial in trials][-3:] == [0.01, 0.003, 0.001]
    assert {trial.steps for trial in trials} == {40}
    losses = [trial.loss for trial in trials]
    assert losses[-3] < losses[-2] < losses[-1]
    # So few steps are best at a high rate, which is looked for until the next one is worse.
    assert losses.index(min(losses)) == 1 or len(trials) == lr_range._MOST_TRIALS
    # A network of its own each, so the order in which they were tried says nothing.
    again = lr_range._run_trial(whole, 0.001, 40, lr_range._ProgressHooks(whole, lr_range.Progress("", None)))
    assert again == trials[-1]
    assert lr_range._run_trials(whole, ramp, seconds=39 * 4 * pace, pace=pace) == ()  # too few steps to tell anything


def test_trials_go_on_beyond_the_best_one():
    def after(*losses: float) -> list[float]:
        return next_rates([Trial(lr, 50, loss) for lr, loss in zip((0.01, 0.003, 0.001), losses)])

    assert after(0.5, 0.4, 0.6) == []
    assert after(0.4, 0.5, 0.6) == [0.03]
    assert after(0.6, 0.5, 0.4) == [0.00033]
    assert after(math.inf, math.inf, math.inf) == [0.00033]


@pytest.mark.parametrize("pace", [1e-3, 0.1, 7.0])
def test_the_time_that_is_asked_for_is_enough(pace):
    seconds = lr_range._enough(pace)
    ramp = lr_range._ramp_steps(seconds * lr_range._RAMP_SHARE, pace) * pace
    assert lr_range._trial_steps(seconds - 1.03 * ramp, 1.03 * pace) >= lr_range._TRIAL[0]
    assert seconds < 1.1 * (ramp + lr_range._TRIAL[0] * (len(lr_range._TRIED) + 1) * pace), "and not much more"


def test_the_ramp_is_shortened_where_its_time_ends():
    ramp, _ = lr_range._run_ramp(subject(), seconds=1e3, limit=1e-3)
    assert len(ramp.losses) == lr_range._SHORTEST_RAMP or ramp.ended
    if not ramp.ended:
        assert ramp.rates[-1] == pytest.approx(1)
    assert lr_range._shortened(60, done=30, fitting=100.0) == 60
    assert lr_range._shortened(60, done=30, fitting=20.5) == 50


def test_a_trial_that_outlasts_the_time_does_not_count():
    begun = time.perf_counter()
    # The pace is far too hopeful, so no trial of 200 steps is done in the time.
    assert lr_range._run_trials(subject(), ramp_of(VALLEY), seconds=0.05, pace=1e-5) == ()
    assert time.perf_counter() - begun < 60


def test_a_stop_ends_it_within_a_step():
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 9

    with pytest.raises(Interrupted):
        subject(stop=stop).run(seconds=1e-3)
    assert len(asked) < 13  # it is asked before and after each step
    with pytest.raises(Interrupted):
        lr_range._run_trials(subject(stop=lambda: True), ramp_of(VALLEY), 1e3, 1.0)


def test_probe_is_the_same_each_time_and_one_where_nothing_is_answered():
    objective = Objective(replace(Diffusion(), target=Eps()), dropout=0.5)
    x0, conditions = torch.zeros(400, 1, 8, 8), Conditions(torch.zeros(400, dtype=torch.int64))
    probe, state = LossProbe.create(x0, conditions), subject(Mute).fresh()
    before = torch.random.get_rng_state()
    loss = probe.relative_loss(state, objective, batch=400)
    assert loss == pytest.approx(1, abs=0.03)  # the mean square of 25,600 numbers of standard deviation 1
    assert probe.relative_loss(state, objective, batch=7) == pytest.approx(loss, rel=1e-5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert state.model.training


@pytest.mark.parametrize("count", [5, 16, 64, 400])
def test_levels_of_a_probe_are_spread_evenly_also_in_part(count):
    u = LossProbe.create(torch.zeros(400, 1, 1, 1), NO_CONDITIONS).first(count).u
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    gaps = torch.diff(torch.cat([torch.zeros(1), u.sort().values, torch.ones(1)]))
    assert float(gaps.max()) < 3 / count


def test_ramp_ends_where_what_was_gained_is_lost_and_not_at_a_spike():
    rates = [1e-5 * 10 ** (i / 4) for i in range(20)]

    def ends(losses) -> str:
        return ramp_stop_reason(1.0, rates[: len(losses)], losses)

    assert ends([*VALLEY[:13], math.nan]) == "not finite"
    assert ends([*VALLEY[:13], math.inf]) == "not finite"
    assert ends(VALLEY) == "diverged"
    assert ends(VALLEY[:14]) == ""
    assert ends([1.0, 1.02, 1.01]) == ""  # nothing gained, so nothing lost
    assert ends([1.0, 3.0]) == "diverged"
    fine = [1e-5 * 10 ** (i / 24) for i in range(100)]  # 24 steps a decade, so one of them is soon averaged away
    losses = [1.0] * 40 + [0.4] * 40 + [1.6]
    assert ramp_stop_reason(1.0, fine[: len(losses)], losses) == ""


def test_lowest_point_is_not_moved_by_the_smoothing():
    rates = tuple(1e-5 * 10 ** (i / 24) for i in range(97))
    bowl = tuple(0.3 + 0.7 * min(1, abs(i - 72) / 30) for i in range(97))
    assert Ramp(1.0, rates, bowl, "").lowest[0] == pytest.approx(rates[72])
    noisy = tuple(loss + 0.05 * (-1) ** i for i, loss in enumerate(bowl))
    assert Ramp(1.0, rates, noisy, "").lowest[0] == pytest.approx(rates[72], rel=0.3)
    assert Ramp(1.0, rates, (*bowl[:96], math.nan), "").lowest[0] == pytest.approx(rates[72])


def test_an_explosion_at_the_end_hides_nothing_that_was_learned_before():
    ramp = ramp_of([*VALLEY[:-1], 500.0], ended="diverged")
    assert ramp.learns
    assert ramp.lowest[0] == ramp_of(VALLEY).lowest[0]


def test_smoothing_is_without_bias_from_the_start():
    assert _smoothed([2.0] * 5, memory=4) == pytest.approx([2.0] * 5)
    assert _smoothed([1.0, 2.0, 4.0], memory=1) == [1.0, 2.0, 4.0]
    assert _smoothed([1.0, 3.0], memory=2) == pytest.approx([1.0, (0.5 * 1 + 3) / 1.5])


def test_suggestion_from_trials():
    ramp = ramp_of(VALLEY)

    def chosen(*losses: float) -> tuple[float | None, str]:
        return suggest(ramp, [Trial(lr, 50, loss) for lr, loss in zip((0.01, 0.003, 0.001, 0.0003), losses)])

    assert chosen(0.5, 0.3, 0.4, 0.8)[0] == 0.003
    assert chosen(0.300, 0.305, 0.4, 0.8)[0] == 0.003  # as good, and lower
    assert chosen(0.300, 0.320, 0.4, 0.8)[0] == 0.01
    assert "0.300 at 0.01" in chosen(0.300, 0.320, 0.4, 0.8)[1]
    assert chosen(math.inf, 0.3, 0.5, 0.8)[0] == 0.003
    rate, reason = chosen(math.inf, 0.99, 1.0, 1.0)
    assert rate is None
    assert "no trial" in reason


def test_suggestion_from_the_ramp_alone_lies_below_its_lowest_point():
    rate, reason = suggest(ramp_of(VALLEY), ())
    assert rate is not None
    assert 1e-3 <= rate < 1e-2
    assert "no time for trials" in reason
    flat = ramp_of([1.0, 0.995, 1.01, 2.0], ended="diverged")
    rate, reason = suggest(flat, ())
    assert rate is None
    assert "diverged" in reason


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    for i, image in enumerate(pixels()):
        Image.fromarray(image[0]).save(tmp_path / "pictures" / f"{i}.png")
    return tmp_path / "pictures"


def configured(source) -> object:
    config = preset("default")
    return replace(
        config,
        source=str(source),
        network=parse_spec(registry_of(Network), TRANSFORMER),
        training=replace(config.training, batch=8, precision="fp32", device="cpu"),
    )


def search(config, out, seconds):
    return find_lr(FindLrRequest(config.source, config, out=out, seconds=seconds))


def test_from_a_folder_to_a_suggestion_a_page_and_json(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lr_range, "_RAMP_LIMIT", math.inf)  # on a busy machine too
    out = tmp_path / "lr"
    found = search(configured(folder), out, seconds=3)
    assert {path.name for path in out.iterdir()} == {"lr-range.json", "lr-range.html"}
    record = json.loads((out / "lr-range.json").read_text())
    assert record["suggestion"] == found.suggestion is not None
    assert record["reason"] == found.reason
    assert record["ramp"]["rates"] == list(found.range.ramp.rates)
    assert 0 <= len(record["ramp"]["losses"]) - len(record["ramp"]["smooth"]) <= 1  # the last may not be finite
    assert record["usual"] == found.usual == 0.0018  # the rule of thumb: 0.005 for batches of 64, by square roots
    page = (out / "lr-range.html").read_text()
    assert "<svg" in page
    assert f"{found.suggestion:g}" in page
    assert "optimizer.lr = 0.0018" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr", "pictures"]


def test_what_does_not_fit_at_once_is_tried_in_parts(folder, monkeypatch, capsys):
    chosen = MicrobatchChoice(3, False, "memory is short")
    monkeypatch.setattr(MicrobatchChoice, "largest", lambda *given, **more: chosen)
    tried = []
    build = command.build_state
    monkeypatch.setattr(
        command, "build_state", lambda config, *rest: tried.append(config.training.microbatch) or build(config, *rest)
    )
    search(configured(folder), None, seconds=1e-3)
    assert "microbatch = 3: memory is short" in capsys.readouterr().err
    assert set(tried) == {3}


def test_what_cannot_be_is_refused_before_the_images_are_read(folder, tmp_path):
    for seconds in (0, -1, math.nan):
        with pytest.raises(RequestError, match="seconds"):
            search(configured(folder), None, seconds)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="is a file"):
        search(configured(folder), tmp_path / "file", 90.0)


def test_a_ramp_that_ends_in_no_number_has_a_chart(folder):
    ramp = Ramp(1.0, (1e-5, 1e-4, 1e-3), (1.0, 0.9, math.nan), "not finite")
    assert "<svg" in lr_chart(LrRangeResult(ramp, (), None, "it never learned"))


def test_finding_says_how_far_the_settings_are_from_it(folder, monkeypatch):
    monkeypatch.setattr(lr_range, "_RAMP_LIMIT", math.inf)
    found = search(configured(folder), None, seconds=1e-3)
    assert (found.json, found.page) == (None, None)
    for usual, severity in ((found.suggestion / 2, "fine"), (found.suggestion / 10, "hint")):
        finding = replace(found, usual=usual).finding()
        assert finding.severity == severity
        assert finding.code == "lr.range"
    assert "10 times lower" in finding.evidence
    assert f"--lr {found.suggestion:g}" in finding.remedy
    nothing = replace(found, range=replace(found.range, suggestion=None, reason="it never learned")).finding()
    assert nothing.severity == "warning"
    assert "it never learned" in nothing.evidence
