"""Events of `unfog tune` in a run, by which a resume tells a tuned sampler from one that a person set."""

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
    """Record that the sampler was tuned with the weights of this step."""
    with closing(Events(folder.events)) as events:
        events.write(EVENT, step, {"sampler": asdict(sampler)})


def report_dropped_levels(before: Sampler, now: Sampler) -> None:
    """Say so if tuned noise levels are dropped, because they were for another sampler or number of steps."""
    if (before.grid, now.grid) == ("tuned", "schedule"):
        say(f"  the levels were tuned for {plural(before.steps, 'step')} of {before.kind}; taking the schedule's")


def omit_tuned_settings(lines: list[str], folder: RunFolder, sampler: Sampler) -> list[str]:
    """Return the lines on changed settings, without those on sampler settings that `unfog tune` set last."""
    events = [row for row in read_events(folder.events) if row.get("kind") == EVENT]
    found: object = events[-1].get("sampler") if events else None
    now: dict[str, Any] = json.loads(json.dumps(asdict(sampler)))  # turns tuples into lists, as in the event
    theirs = [name for name, value in now.items() if isinstance(found, Mapping) and found.get(name) == value]
    return [line for line in lines if not line.startswith(tuple(f"sampler.{name}: " for name in theirs))]
