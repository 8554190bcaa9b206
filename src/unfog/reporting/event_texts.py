"""Causes and remedies of the events of a run, in a sentence each, for the page and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unfog.reporting.progress import format_bytes
from unfog.reporting.records import finite_number

Event = Mapping[str, Any]


def explain_event(event: Event) -> tuple[str, str]:
    """Return cause and remedy of an event of events.jsonl; "" for what is not known."""
    explain = _EXPLANATIONS.get(str(event.get("kind")))
    return explain(event) if explain is not None else ("", "")


def _skipped_step(event: Event) -> tuple[str, str]:
    layer, names = event.get("layer"), event.get("images")
    where = f" in {layer}" if layer else ""
    images = f" from {', '.join(map(str, names[:3]))}" if isinstance(names, list) and names else ""
    cause = f"the gradient was not finite{where}{images}; the weights were left as they were"
    # In 16 bits the range or the rounding is the likely cause, in fp32 an image or the rate.
    if event.get("precision") in ("fp16", "bf16"):
        return cause, "one alone does no harm; if it returns, resume with --precision fp32 or a lower --lr"
    return cause, "one alone does no harm; if it returns, look at the named images, or resume with a lower --lr"


def _rolled_back(event: Event) -> tuple[str, str]:
    to, lr = event.get("to", "an earlier step"), event.get("lr", "half of it")
    return (
        f"{event.get('reason', 'training diverged')}; the weights of step {to} are back, at the learning rate {lr}",
        "training goes on by itself; if it happens again, start with a lower --lr",
    )


def _out_of_memory(event: Event) -> tuple[str, str]:
    fewer = f"{event.get('microbatch', 'fewer')} images at a time"
    return (
        f"the device had too little memory; training goes on with {fewer}, at the same batch size",
        "nothing is lost; --microbatch gives this size from the start",
    )


def _failed(event: Event) -> tuple[str, str]:
    # The reason is that of the error message, which has its own remedy.
    return str(event.get("reason", "")), "mend the cause, then resume the run: it goes on from its newest checkpoint"


def _disk_full(event: Event) -> tuple[str, str]:
    needed, free = (finite_number(event.get(name)) for name in ("needed", "free"))
    cause = str(event.get("reason") or "the disk is full")
    if needed >= 0:
        cause += f": a checkpoint needs {format_bytes(needed)}, and {format_bytes(free)} are free"
    return cause, "free some space: the run waits, and saves as soon as there is room"


def _reason(remedy: str) -> Callable[[Event], tuple[str, str]]:
    return lambda event: (str(event.get("reason", "")), remedy)


# Names of kinds as they are on disk, which older runs have as well.
_EXPLANATIONS: dict[str, Callable[[Event], tuple[str, str]]] = {
    "step_refused": _skipped_step,
    "rolled_back": _rolled_back,
    "out_of_memory": _out_of_memory,
    "failed": _failed,
    "passed_over": _reason("an older checkpoint took its place; check the disk, and run `unfog doctor` on the run"),
    "disk_full": _disk_full,
    "not_removed": _reason("old checkpoints only take up space; permit their removal, or delete them"),
    "averages_left_out": _reason("an EMA of another length is rebuilt from the other snapshots; free some space"),
    "sink_failed": _reason("the record in the run folder is whole; only the copy in the tracker ends here"),
    "quarantined": _reason("another image takes its place; mend or remove the file before the next run"),
    "warning": lambda event: (str(event.get("message", "")), ""),
    "overfitting": lambda event: (
        "the held-out loss rises while the training loss falls",
        "stop here and sample from the best checkpoint, or train with more images, --flip or --augment",
    ),
    "stopped": lambda event: ("a stop was requested; the run is saved", "resume it: it goes on where it stopped"),
    "resumed": lambda event: ("the run was continued from its newest checkpoint", ""),
    "length": _reason(""),
}
