"""The length of a run: as its settings give it, and as a time budget has planned it anew. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

NO_LIMIT = 1e12  # of a plan's position


class LengthPlan(NamedTuple):
    """A decision on the rest of a run with a time budget. It holds from `step` on."""

    step: int
    """Steps done when it was taken."""
    steps: int
    """Steps of the whole run."""
    stretch: int
    """Factor on the intervals of previews, evaluations and checkpoints (of these up to 4). With 0, previews and the
    evaluation run only after the last step, and that evaluation has no metrics of samples."""
    position: float
    """Position in the schedule of the learning rate, in steps of the first length."""
    limit: float = NO_LIMIT
    """Position that it moves to at most under this plan: another one follows before, unless the pace was wrong."""

    @classmethod
    def of(cls, step: int, steps: int, stretch: int, position: float, limit: float = NO_LIMIT) -> LengthPlan:
        """Return a plan from numbers of a file. ValueError or TypeError if they are not those of a plan."""
        plan = cls(int(step), int(steps), int(stretch), float(position), float(limit))
        counts = 0 <= plan.step <= plan.steps <= 10**12 and 0 <= plan.stretch <= 10**6
        if not (counts and math.isfinite(plan.position) and plan.position <= plan.limit <= NO_LIMIT):
            raise ValueError(f"{plan} is not a plan")
        return plan


class Length:
    """Length of a run: as its settings give it, and as a time budget has planned it anew since.

    A function of the step alone. A resume has the plans from the checkpoint and from events.jsonl, and so trains every
    step under the plan that it was trained under before.
    """

    def __init__(self) -> None:
        self.first = 0
        """Steps that the settings give."""
        self.plans: list[LengthPlan] = []
        """By step; later ones than the step of the run are taken when it gets there."""

    def adopt(self, first: int) -> None:
        """Take `first` steps from the settings. Plans that were made from another length are void."""
        if first != self.first:
            self.first, self.plans = first, []

    def add(self, plans: Iterable[LengthPlan]) -> None:
        """Add plans in the order in which they were made. Each voids those at its step and later."""
        for plan in plans:
            self.plans = [*(before for before in self.plans if before.step < plan.step), plan]

    def at(self, step: int) -> LengthPlan:
        """Return the plan that holds once so many steps are done."""
        return next((plan for plan in reversed(self.plans) if plan.step <= step), LengthPlan(0, self.first, 1, 0.0))

    def position(self, step: int) -> float:
        """Return where step `step` stands in the schedule of `first` steps: at its end when the run ends as planned."""
        return min(self.unlimited_position(step), self.at(step).limit)

    def unlimited_position(self, step: int) -> float:
        """Return the `position` of a step if the plan at that step had no limit."""
        if not self.plans:
            return step  # exact, as runs without a time budget must repeat to the bit
        plan = self.at(step)
        return plan.position + (self.first - plan.position) * (step - plan.step) / max(1, plan.steps - plan.step)

    def warmed(self, step: int) -> float:
        """Return how far the warm-up has come at step `step`, in steps: as the position, but at most one for each step.

        A run that is shortened in its warm-up would otherwise jump to its peak.
        """
        if not self.plans:
            return step
        done: float = min(step, self.plans[0].step)
        for plan, after in zip_longest(self.plans, self.plans[1:]):
            pace = (self.first - plan.position) / max(1, plan.steps - plan.step)
            end = step if after is None else min(step, after.step)
            done += max(0, end - plan.step) * min(1.0, pace)
        return done

    @property
    def steps(self) -> int:
        """Steps of the whole run, as planned last."""
        return self.plans[-1].steps if self.plans else self.first

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; {} if the settings alone say how long the run is."""
        return {"first": self.first, "plans": [list(plan) for plan in self.plans]} if self.plans else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the values of `state_dict`. Raises ValueError, TypeError or KeyError for anything else."""
        first, plans = int(saved["first"]), [LengthPlan.of(*row) for row in saved["plans"]]
        if [plan.step for plan in plans] != sorted({plan.step for plan in plans}):
            raise ValueError("the plans are not in order")
        self.first, self.plans = first, plans
