"""Checks of the state of a run and of its checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

from unfog.checks.run.run_record import RunRecord
from unfog.reporting.findings import Figure, Finding
from unfog.reporting.progress import format_duration, plural
from unfog.reporting.records import UNBEGUN, run_state

# Words of errors about a full disk; "disk" alone could be part of a path.
_FULL = ("disk is full", "No space left", "uota exceeded", "has no room")


def check_progress(record: RunRecord, usual_lr: float | None) -> list[Finding]:
    """Check state and checkpoints; `usual_lr` is the automatic learning rate, None if it is not known."""
    return [_check_state(record, usual_lr), _check_checkpoints(record)]


def _check_state(record: RunRecord, usual_lr: float | None = None) -> Finding:
    """run.state: progress of the run, and the command to continue."""
    state, word = run_state(record.events, record.heartbeat)
    place = f"step {record.step:,} of {record.steps:,}" if record.steps else f"step {record.step:,}"
    facts: dict[str, Any] = {"state": state, "step": record.step, "steps": record.steps, "reason": word}
    finding, resume = partial(Finding, "run.state", facts=facts), f"go on: {record.command('resume')}"
    if state == "finished":
        took = f" in {format_duration(record.seconds)}" if record.seconds else ""
        return finding("fine", f"finished at {place}{took}")
    if state == "running" and word == "waiting for disk space":
        remedy = "free some space; training then continues by itself, and nothing is lost"
        return finding("warning", f"at {place}, waiting for disk space", remedy)
    if state == "standing still":
        return finding("warning", f"at {place}, standing still: {word}", _after_standstill(record, word))
    if state == "running":
        return finding("fine", f"running, at {place}: {word or 'at work'}")
    if state == "stopped":
        return finding("hint", f"stopped on request at {place}, and saved", resume)
    if state == "not begun":
        return finding("warning", "training has not started, and no process is running", resume)
    if state == "failed":
        evidence = f"failed at {place}: {_shorten(word) or 'no reason was recorded'}"
        return finding("fatal" if "diverged" in word else "warning", evidence, _after_failure(record, word, usual_lr))
    return _killed(record, place, word, facts)


def _after_standstill(record: RunRecord, word: str) -> str:
    pid = int((record.heartbeat or {})["pid"])
    if "suspended" in word:
        return f"kill -CONT {pid} continues it"
    return (
        f"it may wait for a disk, a network or a device; if it stays so, kill -9 {pid}, and {record.command('resume')}"
    )


def _after_failure(record: RunRecord, word: str, usual_lr: float | None) -> str:
    if "diverged" in word:
        return record.stability_remedy(usual_lr)
    if any(full in word for full in _FULL):
        return f"free some space, then {record.command('resume')}"
    if "one image at a time" in word:  # with gradient checkpointing, so that nothing is left to do without
        return "train again with a smaller --size or --network, or on a machine with more memory"
    if "memory" in word.lower():
        now = record.config.training.microbatch or record.batch
        less = f"--microbatch {now // 2}" if now > 1 else "--training.checkpointing"
        return f"use less memory: {record.command('resume', less)}"
    return f"fix that, then {record.command('resume')}; with --debug it shows where it failed"


def _shorten(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= 160 else f"{words[:160].rsplit(' ', 1)[0]} …"


def _killed(record: RunRecord, place: str, word: str, facts: dict[str, Any]) -> Finding:
    newest = record.saved[-1].step if record.saved else 0
    lost = max(0, record.step - newest)
    seconds = lost * record.seconds / record.step if record.step else 0.0
    age = float((record.heartbeat or {}).get("age", float("nan")))
    silent = f"its last heartbeat is {format_duration(age)} old" if record.heartbeat else "it has no heartbeat"
    if str((record.heartbeat or {}).get("doing")) in UNBEGUN:
        silent = "a later resume did not start training"
    doing = f", while {word}" if word else ""
    evidence = (
        f"the process was killed at about {place}{doing}: {silent}; "
        f"{plural(lost, 'step')} since the checkpoint of step {newest:,} will be trained again"
    )
    if seconds >= 1:
        evidence += f" ({format_duration(seconds)})"
    remedy = f"continue: {record.command('resume')}; if it is killed again, look for the out-of-memory killer (dmesg)"
    if lost > 2 * max(record.config.checkpoint.every, 1) and record.config.checkpoint.every != 1:
        every = record.config.checkpoint.every
        often = every // 2 if every > 0 else lost // 4
        remedy += f", and save more often: --checkpoint.every {max(1, often)}"
    facts |= {"lost_steps": lost, "heartbeat_age": age if record.heartbeat else None}
    return Finding("run.state", "warning", evidence, remedy, facts)


def _check_checkpoints(record: RunRecord) -> Finding:
    """run.checkpoints: list the checkpoints, and those that cannot be used."""
    kept = [f"{one.step:,}" for one in record.saved]
    facts = {"steps": [one.step for one in record.saved], "broken": [one.folder.name for one in record.broken]}
    rows = [("step", "held-out loss", "kept for")]
    for one in record.saved:
        loss = "" if one.held_out_loss is None else f"{one.held_out_loss:.4g}"
        rows.append((f"{one.step:,}", loss, "its held-out loss" if one.for_best else ""))
    figures = (Figure("Checkpoints", table=rows),) if kept else ()
    if record.broken:
        evidence = f"{plural(len(record.broken), 'checkpoint')} cannot be used ({record.broken[0].reason})"
        remedy = f"a resume ignores them and continues from step {kept[-1]}" if kept else "train again"
        return Finding("run.checkpoints", "warning", evidence, remedy, facts, figures)
    if not kept:
        return Finding("run.checkpoints", "hint", "nothing has been saved yet, so only the record is checked")
    return Finding("run.checkpoints", "fine", f"checkpoints of steps {', '.join(kept)}", "", facts, figures)
