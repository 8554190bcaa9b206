"""What `unfog tune` made of a run's sampler, in its record, so that a resume does not take it for a person's wish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

from unfog.diffusion.sampler import Sampler
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import plural, say
from unfog.reporting.records import Events, read_events

EVENT = "tuned"


def record_tuned_sampler(folder: RunFolder, step: int, sampler: Sampler) -> None:
    """Write down what was found with the weights of this step, and is the run's from now on."""
    with closing(Events(folder.events)) as events:
        events.write(EVENT, step, {"sampler": asdict(sampler)})


def report_dropped_levels(before: Sampler, now: Sampler) -> None:
    """Say so where levels that were tuned give way to the schedule's, as they were for another sampler."""
    if (before.grid, now.grid) == ("tuned", "schedule"):
        say(f"  the levels were tuned for {plural(before.steps, 'step')} of {before.kind}; taking the schedule's")


def omit_tuned_settings(lines: list[str], folder: RunFolder, sampler: Sampler) -> list[str]:
    """Lines on changed settings, without those on settings of the sampler that are as `unfog tune` left them last."""
    events = [row for row in read_events(folder.events) if row.get("kind") == EVENT]
    found: object = events[-1].get("sampler") if events else None
    now: dict[str, Any] = json.loads(json.dumps(asdict(sampler)))  # lists for tuples, as it was written
    theirs = [name for name, value in now.items() if isinstance(found, Mapping) and found.get(name) == value]
    return [line for line in lines if not line.startswith(tuple(f"sampler.{name}: " for name in theirs))]
