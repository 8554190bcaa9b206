"""A time budget: the run ends in time, whatever the machine does, and repeats to the bit."""

import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import forked
import unfog
from conftest import TRANSFORMER, few_images
from unfog.checks.run.run_record import RunRecord
from unfog.checks.run.trend_checks import check_trends
from unfog.config.presets import preset
from unfog.data.settings import Data
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.pace import CallTimes, Pace
from unfog.process import command_clock
from unfog.reporting.records import read_events, read_metrics
from unfog.runs.session import Session
from unfog.runs.time_budget import STRETCHES, PlanNotices, TimeBudget, recorded_plans, resume_length
from unfog.training.checkpoints import state_schema
from unfog.training.checkpoints.load import read_state, read_tensors
from unfog.training.distributed.coordination import CoordinatedHooks, _RankStatus  # the ranks are in one process
from unfog.training.distributed.world import World
from unfog.training.hooks import TrainingHooks
from unfog.training.length import Length, LengthPlan
from unfog.training.loop import Intervals
from unfog.training.settings import Optimizer, Training
from waiting import wait_until

COSTS = {"preview": 2.0, "evaluate": 3.0, "save": 0.5}


class Machine:
    """A run on a clock of its own: a step takes `pace(t)` seconds at time t, and the rest as many steps as given."""

    def __init__(
        self, pace, costs=COSTS, seconds=120.0, start=10.0, told=None, first=1000, every=100, pauses=(), noticed=False
    ):
        self.now, self.pace, self.costs = start, pace, costs
        self.pauses, self.noticed, self.suspended = sorted(pauses), noticed, 0.0  # (time, seconds); by the heartbeat
        self.positions, self.told_pauses, self.called = [], [], []
        self.every = Intervals(10, every, every, every)
        self.length, self.step, self.aside = Length(), 0, 0.0
        self.length.adopt(first)
        self.budget = TimeBudget(seconds, 0.0, told or pace(0.0), self.every, costs, lambda: self.suspended)
        self.budget._clock = lambda: self.now

    def work(self, steps):
        self.now += steps * self.pace(self.now)
        while self.pauses and self.pauses[0][0] <= self.now:
            pause = self.pauses.pop(0)[1]
            self.now += pause
            self.suspended += pause if self.noticed else 0.0

    def call(self, names):
        for name in [name for name in names if name in self.costs]:
            before = self.now
            with self.budget.aside(name):
                self.work(self.costs[name])
            self.aside += self.now - before
            self.called.append((name, self.step))

    def plan(self):
        if (plan := self.budget.plan(self.step, self.length)) is not None:
            self.length.add([plan])

    def run(self):
        self.plan()
        self.call(self.budget.affordable(["evaluate", "preview", "save"]))
        while self.step < self.length.steps:
            self.positions.append(self.length.position(self.step))
            self.work(1)
            self.step += 1
            if self.budget.due(self.step, self.step >= self.length.steps):
                self.plan()
            self.told_pauses += self.budget.pauses
            self.budget.pauses.clear()
            last = self.step >= self.length.steps
            stretch = self.length.at(self.step).stretch
            due = self.every.stretched(stretch).due(self.step, last)
            self.call([name for name in due if name != "evaluate" or self.budget.evaluates_at_end(stretch)])
        self.work(self.costs["preview"] / 2)  # the last image
        return self


@pytest.mark.parametrize(
    "pace",
    [
        lambda t: 0.1,
        lambda t: 0.1 if t < 60 else 0.2,
        lambda t: 0.1 if t < 50 else 1.0,
        lambda t: 0.1 if t < 100 else 0.4,
        lambda t: 0.4 if t < 60 else 0.04,
        lambda t: 0.1 * (1 + 0.5 * math.sin(t)),
        lambda t: 3.0,
    ],
    ids=["steady", "half", "tenth", "late", "faster", "restless", "slow"],
)
@pytest.mark.parametrize("told", [0.01, 0.1, 1.0])
def test_a_run_ends_in_time_whatever_the_pace_does(pace, told):
    ended = Machine(pace, told=told).run()
    assert abs(ended.now - 120) < 6
    assert ended.step == ended.length.steps
    assert len(ended.length.plans) < 200


@pytest.mark.parametrize("seconds", [20.0, 120.0, 3600.0])
@pytest.mark.slow
def test_previews_evaluation_and_checkpoints_take_a_tenth_at_most(seconds):
    dear = {"preview": 20.0, "evaluate": 30.0, "save": 1.0}
    ended = Machine(lambda t: 0.1, dear, seconds, every=10, first=int(seconds * 5), start=1.0).run()
    assert ended.aside <= 0.1 * seconds + 0.1 * (20 / 2 + 1)  # what must come at the end comes
    assert abs(ended.now - seconds) < max(0.05 * seconds, 1.0)


@pytest.mark.parametrize(("cost", "times"), [(5.0, 1), (100.0, 0)])
def test_the_last_step_is_evaluated_if_that_takes_little(cost, times):
    """Else the best checkpoint would be that of the untrained network."""
    ended = Machine(lambda t: 0.1, {"preview": 100.0, "evaluate": cost, "save": 1.0}, start=1.0).run()
    assert ended.length.at(ended.step).stretch == 0
    assert [step for name, step in ended.called if name == "evaluate"] == times * [ended.step]
    assert abs(ended.now - 120) < 6


@pytest.mark.slow
def test_cheap_previews_stay_as_they_are():
    ended = Machine(lambda t: 0.1).run()
    assert {plan.stretch for plan in ended.length.plans} <= {1}


@pytest.mark.slow
def test_a_slow_moment_does_not_stretch_the_intervals_for_good():
    found = Machine(lambda t: 1.0 if t < 25 else 0.1, {"preview": 2.0, "evaluate": 1.0, "save": 0.5}, every=20).run()
    most = max(plan.stretch for plan in found.length.plans)
    assert found.length.at(found.step).stretch < most


@pytest.mark.slow
@pytest.mark.parametrize("noticed", [True, False], ids=["suspended", "stalled"])
@pytest.mark.parametrize(
    ("pace", "seconds", "pauses"),
    [
        (0.1, 60.0, [(12.0, 10.0)]),
        (1.0, 150.0, [(19.0, 25.0)]),
        (1.0, 60.0, [(30.0, 8.0)]),
        (0.1, 90.0, [(33.0, 46.0)]),
        (0.1, 60.0, [(12.0, 5.0), (25.0, 5.0), (50.0, 5.0)]),
        (0.01, 600.0, [(300.0, 100.0)]),
        (5.0, 600.0, [(300.0, 100.0)]),
    ],
)
def test_a_pause_neither_ends_a_run_nor_uses_up_its_schedule(pace, seconds, pauses, noticed):
    first = int(0.9 * seconds / pace)
    ended = Machine(lambda t: pace, seconds=seconds, first=first, every=first // 10, pauses=pauses, noticed=noticed)
    ended.run()
    assert abs(ended.now - seconds) < max(0.05 * seconds, 2 * pace)
    shares = [position / first for position in ended.positions]
    assert all(later >= earlier for earlier, later in pairwise(shares))
    assert max(shares[: int(0.95 * len(shares)) - 1]) < 0.99, "the schedule ends with the run"
    assert shares[-1] > 0.9
    lost = sum(pause for _, pause in pauses)
    assert sum(ended.told_pauses) == pytest.approx(lost, abs=0.1 * lost + 2 * pace * len(pauses))


@pytest.mark.parametrize("kind", ["preview", "evaluate", "save"])
def test_a_pause_in_a_preview_or_a_save_does_not_make_it_dear(kind):
    class Paused(Machine):
        def call(self, names):
            if kind in names and self.step > 300:
                self.pauses, self.step_of_pause = [(self.now, 20.0)] * (not hasattr(self, "step_of_pause")), self.step
            super().call(names)

    ended = Paused(lambda t: 0.1, noticed=True).run()
    assert hasattr(ended, "step_of_pause")
    assert abs(ended.now - 120) < 6
    assert {plan.stretch for plan in ended.length.plans} == {1}


def test_the_end_says_how_much_of_a_budget_the_start_took(monkeypatch):
    budget = Machine(lambda t: 0.4).budget
    monkeypatch.setattr(budget, "_clock", lambda: 118.0)
    assert budget.describe_start(78.0) == "; starting up took 40 s"
    assert budget.describe_start(110.0) == ""


@pytest.mark.slow
@pytest.mark.parametrize("told", [0.1, 0.4, 1.6])
def test_samples_timed_before_training_are_believed_in_seconds(told):
    """A step was timed while the machine was idle or busy, and a preview is dear and drawn at the end only."""
    dear = {"preview": 20.0, "evaluate": 5.0, "save": 0.2}
    machine = Machine(lambda t: 0.4, dear, told=told, first=int(100 / told), every=int(10 / told))
    estimated = {"preview": 3 * dear["preview"], "evaluate": 3 * dear["evaluate"]}
    timed = {"preview": 0.4 * dear["preview"], "evaluate": 0.4 * dear["evaluate"]}
    machine.budget = TimeBudget(120.0, 0.0, told, machine.every, estimated, timed=timed)
    machine.budget._clock = lambda: machine.now
    assert abs(machine.run().now - 120) < 4


def test_one_slow_preview_is_left_out_and_a_slow_machine_is_not():
    pace = Pace(0.1, window=3.0)
    calls = CallTimes(pace, {"preview": 20.0}, {})
    assert calls.seconds("preview") == pytest.approx(2.0)
    assert calls.seconds("save") == 0
    for seconds in (1.0, 1.1, 60.0, 0.9):
        calls.add("preview", seconds)
    assert calls.seconds("preview") == pytest.approx(1.0)
    for step in range(40):
        pace.add(0.1 * step, step)
    pace.measure()
    calls.adopt_pace()
    assert calls.seconds("preview") == pytest.approx(1.0)
    for step in range(40):
        pace.add(4.0 + 0.3 * step, 40 + step)
    pace.measure()
    assert calls.seconds("preview") == pytest.approx(3.0, rel=0.05), "as much slower as a step is"


def test_a_schedule_is_never_far_ahead_of_the_time():
    slow = Machine(lambda t: 0.1, seconds=60.0, told=2.0, first=20, every=5).run()  # measured while it was suspended
    assert slow.positions[3] < 0.1 * 20
    assert slow.positions[len(slow.positions) // 2] == pytest.approx(10, abs=2)


def random_machine(seed):
    draw = random.Random(seed)
    seconds = draw.choice([20.0, 60.0, 150.0, 600.0, 3600.0])
    usual = max(0.004, seconds / draw.choice([20, 60, 300, 1000, 4000]))
    at, factor = seconds * draw.uniform(0.2, 0.8), draw.choice([2, 5, 20])
    paces = {
        "steady": lambda t: usual,
        "noisy": lambda t: usual * draw.uniform(0.5, 1.5),
        "slower": lambda t: usual * (factor if t > at else 1),
        "faster": lambda t: usual / (factor if t > at else 1),
    }
    pace = paces[draw.choice([*paces])]
    pauses = [
        (draw.uniform(0.05, 0.6) * seconds, draw.choice([0.02, 0.1]) * seconds) for _ in range(draw.choice([0, 1, 3]))
    ]
    told = usual * draw.choice([0.2, 1, 1, 5])
    first = max(1, int(0.9 * seconds / told))
    costs = {"preview": draw.choice([1.0, 5.0]), "evaluate": draw.choice([1.0, 5.0]), "save": 0.5}
    every = max(1, first // draw.choice([5, 20]))
    machine = Machine(pace, costs, seconds, 0.04 * seconds, told, first, every, pauses, draw.random() < 0.5)
    return machine, seconds, usual * max(1, factor), pauses


@pytest.mark.exhaustive
def test_whatever_happens_the_budget_is_kept_and_the_schedule_lasts():
    for seed in range(200):
        machine, seconds, slowest, _ = random_machine(seed)
        ended = machine.run()
        # What follows the last step takes as long as it takes on a machine that has become slower.
        rest = slowest * (3 + 1.5 * ended.costs["preview"] + ended.costs["evaluate"])
        assert abs(ended.now - seconds) < max(0.05 * seconds, rest, 2.0), seed
        over = sum(position >= 0.9999 * ended.length.first for position in ended.positions[:-1])
        assert over <= max(1, 0.01 * len(ended.positions)), seed
        assert len(ended.length.plans) < 220, seed


def test_one_slow_step_is_no_pace_and_two_are():
    pace, now = Pace(0.1, window=3.0), 0.0
    told = []
    for step, seconds in enumerate([9.0, *[0.1] * 50, 10.0, *[0.1] * 20, *[2.0] * 12]):
        now += seconds
        told.append(pace.add(now, step))
        pace.measure()
        if step in (51, 70):  # as it is noticed, and later
            assert pace.step_seconds == pytest.approx(0.1, rel=0.01)
    assert [seconds for seconds in told if seconds] == [pytest.approx(10.0)]
    assert pace.step_seconds == pytest.approx(2.0, rel=0.05)


def test_a_stall_that_comes_again_and_again_is_a_part_of_the_pace():
    pace, now = Pace(0.1, window=6.0), 0.0
    for step in range(200):
        now += 2.0 if step % 8 == 7 else 0.1
        pace.add(now, step)
    pace.measure()
    assert pace.step_seconds == pytest.approx((7 * 0.1 + 2.0) / 8, rel=0.4)


def test_a_resume_without_a_budget_lifts_the_limit_of_the_last_plan():
    length, plan = Length(), LengthPlan(10, 50, 2, 12.0, 15.0)
    row = {"kind": "length", "first": 40, **plan._asdict()}
    assert resume_length(length, 40, 6, [row], anew=False) == LengthPlan(10, 50, 2, 12.0)
    assert length.position(50) == 40
    length = Length()
    length.adopt(40)
    length.add([plan])
    assert resume_length(length, 40, 20, [], anew=False) == LengthPlan(20, 50, 2, 15.0)
    assert length.position(50) == 40
    assert resume_length(length, 40, 20, [], anew=False) is None


def test_a_run_that_starts_too_late_takes_one_step():
    ended = Machine(lambda t: 0.1, seconds=5.0, start=10.0).run()
    assert ended.step == 1


@pytest.mark.parametrize(
    ("spent", "pace", "said"),
    [
        (122, 0.3, "is enough for only 1 step: the start took 2 min 02 s and a step takes 0.3 s; give --budget 11m or"),
        (80, 0.03, " steps: the start took 1 min 20 s; give --budget 7m or more, or --steps"),
        (0, 20, " for only 3 steps: a step takes 20 s; give --budget 67m or more, a smaller --size, or --steps"),
        (0, 200, "give --budget 12h or more"),
        (30, 0.03, ""),
    ],
)
def test_a_budget_of_few_steps_or_a_long_start_is_warned_of(spent, pace, said, capsys, monkeypatch):
    training = Training(budget="90s", batch=64, precision="fp32", device="cpu")
    config = replace(preset("default"), data=Data(size=16), network=TRANSFORMER, training=training)
    auto = AutoSettings(config, None, torch.device("cpu"), lambda: False)
    auto.began = time.monotonic() - spent if spent else None
    monkeypatch.setattr(auto, "seconds_per_step", lambda: pace)
    auto.resolve_length()
    err = capsys.readouterr().err
    assert (said in err) if said else not err
    assert ("for only" in err) == (pace > 0.03)


@pytest.mark.slow
def test_a_budget_that_the_start_has_used_up_trains_one_step_and_says_so(tmp_path, capsys):
    run = unfog.train(few_images(), out=tmp_path / "run", budget="0.01s", **SMALL)
    said = capsys.readouterr().err
    assert f"images = {run.config.training.images}: 0.01s is used up, as the start took" in said
    assert said.count("warning: --budget 0.01s is enough for only 1 step: the start took") == 1


def test_the_schedule_ends_with_the_run_and_never_jumps():
    settings = Optimizer(lr=1.0, warmup=50, schedule="cooldown")
    length = Length()
    length.adopt(1000)
    for step, steps in ((300, 500), (450, 2000), (1900, 1950)):
        length.add([LengthPlan(step, steps, 1, length.position(step))])
    rates = [settings.learning_rate(length.position(step), 1000, length.warmed(step)) for step in range(1950)]
    assert rates[-1] < 0.15
    assert length.position(1950) == 1000
    # As fast as the schedule is run through, which is fastest at its end.
    assert max(abs(a - b) for a, b in pairwise(rates[50:-20])) < 0.1


def test_without_plans_the_position_is_the_step():
    length = Length()
    length.adopt(7)
    assert [length.position(step) for step in range(8)] == list(range(8))
    assert length.state_dict() == {}
    length.add([LengthPlan(2, 30, 1, 2.0)])
    assert length.at(1) == LengthPlan(0, 7, 1, 0.0)
    length.adopt(8)  # another length from the settings
    assert (length.steps, length.plans) == (8, [])


@pytest.mark.parametrize(
    "saved",
    [
        {"first": 5, "plans": [[1, 10**13, 1, 0.0]]},
        {"first": 5, "plans": [[1, 7, 1, math.nan]]},
        {"first": 5, "plans": [[3, 7, 1, 0.0], [2, 7, 1, 0.0]]},
        {"first": 5, "plans": [[9, 7, 1, 0.0]]},
        {"first": 5, "plans": [[1, 7]]},
        {"first": 5},
        {"first": "x", "plans": []},
    ],
)
def test_a_damaged_length_does_not_load(saved):
    length = Length()
    with pytest.raises((ValueError, TypeError, KeyError)):
        length.load_state_dict(saved)
    assert (length.first, length.plans) == (0, [])
    with pytest.raises(ValueError, match="length is not a length of a run"):
        state_schema._length("length", saved)


def test_plans_are_read_from_events():
    row = {"kind": "length", "step": 4, "first": 9, "steps": 20, "stretch": 2, "position": 4.5}
    rows = [row, row | {"step": 2}, row | {"first": 8}, row | {"steps": "x"}, {"kind": "log"}, row | {"steps": 21}]
    assert recorded_plans(rows, 9, 3) == [LengthPlan(4, 21, 2, 4.5)]
    assert recorded_plans([row, row | {"step": 2}], 9, 2) == [LengthPlan(2, 20, 2, 4.5)], "a later budget voids it"


def test_a_plan_is_kept_once():
    length, plans = Length(), [LengthPlan(5, 20, 1, 5.0), LengthPlan(9, 12, 1, 8.0)]
    length.adopt(10)
    for _ in range(3):  # resumes, each with the plans of the events
        length.add(plans[1:])
        length.load_state_dict(length.state_dict() | {"plans": [list(plan) for plan in plans]})
        length.add(plans)
    assert length.plans == plans


@pytest.mark.parametrize("schedule", ["cosine", "constant", "cooldown", "inverse-sqrt"])
@pytest.mark.parametrize(
    "changes", [[(10, 30)], [(0, 100)], [(20, 5000), (60, 100)], [(49, 70)], [(5, 400), (30, 45), (40, 3000)]]
)
def test_a_plan_in_the_warm_up_makes_no_jump(schedule, changes):
    settings, length = Optimizer(lr=1.0, warmup=50, schedule=schedule), Length()
    length.adopt(1000)
    for step, steps in changes:
        length.add([LengthPlan(step, steps, 1, length.position(step))])
    rates = [settings.learning_rate(length.position(n), 1000, length.warmed(n)) for n in range(length.steps)]
    assert max(rates) <= 1.0
    assert max(b - a for a, b in pairwise(rates)) <= 1 / 50 + 1e-9
    assert rates[0] <= 1 / 50


def test_the_command_began_with_its_process():
    code = (
        "import sys, time; time.sleep(0.3); from unfog.process import command_clock as c; c.begin(); "
        "print(time.monotonic() - c.began())"
    )
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert age > (0.3 if sys.platform == "linux" else -1)
    before = time.monotonic()
    assert before <= command_clock.began() <= time.monotonic(), "called from Python, it begins with the call"


def test_other_ranks_take_the_plan_of_rank_0():
    class Receiving(World):
        def run_on_main(self, phase, work):
            return [4, 20, 2, 4.5]  # JSON has no tuples

    hooks = CoordinatedHooks(TrainingHooks(), Receiving(1, 2))
    assert not hooks.plan_due()
    statuses = torch.zeros(2, len(_RankStatus._fields))
    statuses[0, _RankStatus._fields.index("plan")] = 1
    hooks.apply_statuses(statuses.flatten().tolist(), statuses, SimpleNamespace(microbatch=0))
    assert hooks.plan_due(), "rank 0 decides"
    assert hooks.plan_length(None) == LengthPlan(4, 20, 2, 4.5)


SMALL = {
    "network": TRANSFORMER,
    "device": "cpu",
    "precision": "fp32",
    "batch": 4,
    "log": {"every": 2},
    "optimizer": {"schedule": "cosine"},
    "preview": {"images": 2, "every": -1},
    "evaluate": {"images": 8, "levels": 2, "every": 2},
    "checkpoint": {"every": 4, "keep": 100},
    "sampler": {"steps": 2},
}


def test_a_new_length_is_said_where_it_differs_by_a_third_and_every_half_minute():
    machine, notices = Machine(lambda t: 0.1), PlanNotices()
    notices.clock = lambda: machine.now
    notices.steps, notices._said_at = 56, machine.now

    def said(seconds, steps, stretch=0):
        machine.now += seconds
        return notices.describe(LengthPlan(0, steps, stretch, 0.0), machine.budget)

    machine.budget.plan(0, machine.length)
    first = said(0, 97)
    assert len(first) == 1, "of previews, and not of steps just after the beginning"
    assert first[0].startswith("previews and evaluation at the end only, so that they")
    assert said(1, 47, STRETCHES[-1]) == [], "which is at the end only as well"
    assert said(1, 145) == []
    later = said(30, 145)
    assert [one.split(":")[0] for one in later] == ["145 steps in all from here on"]
    assert said(31, 110) == said(31, 190) == [], "less than a third"
    assert said(0, 60)[0].startswith("60 steps in all")
    assert said(29, 600) == []
    assert said(1, 600, 1)[1].startswith("previews and evaluation as often as at first")


@pytest.mark.slow
def test_the_length_of_a_budget_is_warned_of_once_it_is_known(tmp_path, monkeypatch, capsys):
    """Not that of the first guess, which may be many times too short."""
    script = Script({0: (6, 1), 2: (8, 1), 4: (10, 1)})
    monkeypatch.setattr(Session, "keep_budget", lambda self, auto: setattr(self, "budget", script))
    monkeypatch.setattr(
        Script, "due", lambda self, step, last: setattr(self, "is_settled", step > 2) or step in self.plans
    )
    run = unfog.train(few_images(), out=tmp_path / "run", steps=4, **SMALL).path
    warnings = [event for event in read_events(run / "events.jsonl") if "samples become" in event.get("message", "")]
    assert [event["message"].split(" train")[0] for event in warnings] == ["10 steps"]
    assert capsys.readouterr().err.count("samples become") == 1


class Script:
    """Plans of a time budget that are given rather than measured."""

    def __init__(self, plans):
        self.plans, self.step_seconds, self.pauses, self.is_settled = plans, 0.1, [], False

    def aside(self, kind):
        return torch.no_grad()  # a context that does nothing here

    def affordable(self, due):
        return due

    def evaluates_at_end(self, stretch):
        return True

    def due(self, step, last):
        return step in self.plans

    def plan(self, step, length):
        steps, stretch = self.plans.get(step, (0, 0))
        return LengthPlan(step, steps, stretch, length.position(step)) if steps else None

    def describe(self, plan):
        return "by script"

    def describe_start(self, recorded):
        return ""


def weights(run, step):
    folder = run / "checkpoints" / f"{step:08}"
    return read_tensors(folder / "model.safetensors", folder) | read_tensors(folder / "ema.safetensors", folder)


def steps_with(run, column):
    return [row["step"] for row in read_metrics(run / "metrics.jsonl") if column in row]


@pytest.mark.slow
def test_a_run_with_plans_repeats_to_the_bit_after_a_kill(tmp_path, monkeypatch, capsys):
    script = {0: (14, 1), 5: (20, 2), 9: (11, 2), 10: (13, 1)}
    with monkeypatch.context() as patched:
        patched.setattr(Session, "keep_budget", lambda self, auto: setattr(self, "budget", Script(script)))
        run = unfog.train(few_images(), out=tmp_path / "run", steps=12, **SMALL).path
    assert sorted(int(p.name) for p in (run / "checkpoints").iterdir()) == [0, 4, 8, 12, 13]
    assert steps_with(run, "held_out_loss") == [0, 2, 4, 8, 10, 12, 13], "stretched from step 5 to 9"
    assert read_state(run / "checkpoints/00000008")["length"]["plans"][-1][:3] == [5, 20, 2]
    assert RunRecord.read(run, unfog.load(run).config, None).steps == 13

    again = tmp_path / "again"
    shutil.copytree(run, again)
    planned = [row for row in read_events(run / "events.jsonl") if row["kind"] == "length"]
    for step in (4, 8, 8):  # the checkpoint of step 8 was made by a run that had the later plans
        for folder in (again / "checkpoints").iterdir():
            if int(folder.name) > step:
                shutil.rmtree(folder)
        unfog.resume(again)
        one, other = weights(run, 13), weights(again, 13)
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert steps_with(again, "held_out_loss") == steps_with(run, "held_out_loss")
        assert RunRecord.read(again, unfog.load(again).config, None).steps == 13
        states = [read_state(folder / "checkpoints/00000013") for folder in (run, again)]
        assert states[0]["length"] == states[1]["length"]
        assert [row for row in read_events(again / "events.jsonl") if row["kind"] == "length"] == planned
    capsys.readouterr()
    for folder in (again / "checkpoints").iterdir():
        if int(folder.name) > 8:
            shutil.rmtree(folder)
    unfog.resume(again, steps=12)  # as many as its settings had, before the budget planned 11 and then 13
    assert "12 steps in all, as given" in capsys.readouterr().err
    for _ in range(2):
        assert read_events(again / "events.jsonl")[-1]["step"] == 12
        shutil.rmtree(again / "checkpoints/00000012")
        unfog.resume(again)  # the plans stay void after a kill
    monkeypatch.setattr(AutoSettings, "seconds_per_step", lambda self: 0.1)
    with pytest.raises(unfog.RequestError, match="leaves no time to train: the start took"):
        unfog.resume(run, budget="0.01s")
    unfog.resume(run)  # it is at its end
    assert read_events(run / "events.jsonl")[-1]["kind"] == "finished"
    longer = unfog.resume(run, steps=15).path
    assert read_events(longer / "events.jsonl")[-1]["step"] == 15, "a length in steps is one"


@pytest.mark.slow
def test_the_doctor_sees_a_schedule_that_ended_before_its_run_and_its_remedy_works(tmp_path, monkeypatch):
    class Over(Script):
        def plan(self, step, length):
            return LengthPlan(6, 30, 1, float(length.first)) if step == 6 else None

    with monkeypatch.context() as patched:
        patched.setattr(Session, "keep_budget", lambda self, auto: setattr(self, "budget", Over({6: ()})))
        run = unfog.train(few_images(), out=tmp_path / "run", steps=12, **SMALL).path

    def diagnosis():
        record = RunRecord.read(run, unfog.load(run).config, None)
        return {one.code: one for one in check_trends(record, None, 0.99, 1.2, False)}

    found = diagnosis()["run.lr_zero"]
    assert found.severity == "fatal"
    assert "its time budget had not" in found.evidence
    assert found.facts["share"] == pytest.approx(24 / 30, abs=0.1)
    words = shlex.split(found.remedy.rpartition(": ")[2])
    assert words[:3] == ["unfog", "resume", str(run)]
    done = forked.run(words[1:])
    assert done.returncode == 0, done.stderr
    rates = [row["lr"] for row in read_metrics(run / "metrics.jsonl") if row["step"] > 30 and "lr" in row]
    assert len(rates) == 15
    assert min(rates[:10]) > 0.01 * max(rates)


@pytest.mark.slow
def test_verify_replays_the_plans(tmp_path, monkeypatch):
    from unfog.process.run_folder import RunFolder
    from unfog.runs.replay import verify

    script = Script({5: (20, 1), 9: (11, 1)})
    monkeypatch.setattr(Session, "keep_budget", lambda self, auto: setattr(self, "budget", script))
    run = unfog.train(few_images(), out=tmp_path / "run", steps=12, **SMALL).path
    assert "equal to the bit" in verify(RunFolder(run))


@pytest.mark.slow
@pytest.mark.may_fail("a budget of 10 s is measured by the clock beside a process that keeps a core busy")
def test_a_budget_is_kept_beside_a_busy_process(tmp_path):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        words = ["train", few_images(), "--network", TRANSFORMER, "--batch", "8"]
        more = ["--precision", "fp32", "--device", "cpu", "--sampler.steps", "3", "--budget", "10s"]
        began = time.monotonic()
        out = tmp_path / "run"
        done = forked.run([*words, *more, "--out", out])
        took = time.monotonic() - began
    finally:
        busy.kill()
        busy.wait()
    assert done.returncode == 0, done.stderr
    assert took < 10 + 15
    events = read_events(out / "events.jsonl")
    assert events[-1]["kind"] == "finished"
    assert (out / "samples" / f"{events[-1]['step']:08}.png").exists()
    assert (out / "checkpoints" / f"{events[-1]['step']:08}").exists()
    assert any(row["kind"] == "length" for row in events)


@pytest.mark.exhaustive  # a minute long
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="signals as POSIX has them")
def test_a_suspended_run_goes_on_at_its_pace_and_says_so(tmp_path):
    out = tmp_path / "run"
    words = ["train", few_images(), "--network", TRANSFORMER, "--batch", "8", "--precision", "fp32", "--device", "cpu"]
    words += ["--optimizer.schedule", "cosine", "--log.every", "1", "--sampler.steps", "3", "--budget", "60s"]
    command = [sys.executable, "-m", "unfog", *words, "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            record = out / "metrics.jsonl"
            wait_until(lambda: record.exists() and len(read_metrics(record)) >= 3, seconds=60, every=0.1)
            wait_until((out / "heartbeat.json").exists, seconds=60, every=0.1)  # its thread looks once a second
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(4)
            listed = subprocess.run([*command[:3], "runs", str(tmp_path)], capture_output=True, text=True, check=True)
            assert "standing still" in listed.stdout
            os.kill(process.pid, signal.SIGCONT)
            said = process.communicate()[1]
        finally:
            process.kill()
    assert process.returncode == 0, said
    pauses = [row for row in read_events(out / "events.jsonl") if row["kind"] == "pause"]
    assert len(pauses) == 1
    assert pauses[0]["seconds"] > 3
    assert "paused for" in said
    rates = [row["lr"] for row in read_metrics(out / "metrics.jsonl") if "lr" in row]
    assert sum(rate < 0.01 * max(rates) for rate in rates) <= 0.1 * len(rates) + 1
    started = json.loads((out / "heartbeat.json").read_text())
    assert started["doing"] == "finished"
