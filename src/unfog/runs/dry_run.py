"""Dry run of every run: evaluate, preview and save before the first step, so that errors surface early."""

from __future__ import annotations

from contextlib import suppress

from unfog.errors import Interrupted
from unfog.reporting.progress import say
from unfog.runs.session_hooks import SessionHooks
from unfog.training.loop import run_due_hooks
from unfog.training.statistics import Stopwatch


def dry_run(hooks: SessionHooks) -> None:
    """Run the hooks of a fresh run once, with few samples, and wait for its first checkpoint.

    After a request to stop, the hooks that are left stay due, and a resume runs them.
    """
    state, budget = hooks.state, hooks.budget
    state.due = [*(["evaluate"] if hooks.config.evaluate.every > 0 else []), "preview", "save"]
    if budget is not None and (kept := budget.affordable(state.due)) != state.due:
        left_out = " and ".join(sorted({*state.due} - {*kept})).replace("evaluate", "evaluation")
        say(f"  no {left_out} before the first step, as it would take more than its share of the time budget")
        state.due = kept
    with suppress(Interrupted):
        run_due_hooks(state, hooks, Stopwatch(), hooks.config.training.batch)
        with hooks.aside("write"):
            hooks.saver.wait()  # without a checkpoint on disk, the first steps could be lost
