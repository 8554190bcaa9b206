"""`unfog runs`: list runs with their state, step, best metric, disk space and age; remove broken checkpoints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from unfog.config.requests.runs import RunsRequest
from unfog.config.spec_strings import quote
from unfog.config.validate import reason_of
from unfog.errors import RequestError
from unfog.files.safe_files import disk_usage, remove_tree
from unfog.process.run_status import RunStatus, broken_checkpoints, find_runs, prometheus_text
from unfog.reporting.progress import align_columns, format_duration, print_result, say, warn
from unfog.text import format_bytes, plural, sanitize

_HEAD = ("run", "state", "step", "best", "disk", "age")

_NOT_FINISHED = 3  # as of a command that was stopped and has saved


def main(request: RunsRequest) -> int:
    """Print the runs, newest last, and return the exit status."""
    try:
        folders = find_runs(request.folder)
    except OSError as error:
        name = quote(str(request.folder))
        raise RequestError(f"{name} cannot be read: {reason_of(error)}; give the folder that holds runs") from None
    if request.remove_broken and not _remove_broken(folders):
        return 1
    # The newest last, where a terminal shows it above the prompt.
    runs = sorted((RunStatus.read(folder) for folder in folders), key=lambda run: -run.age)
    if request.json:
        print_result(json.dumps([run.as_json() for run in runs], indent=2))
    elif request.prometheus:
        print_result(prometheus_text(runs))
    elif runs:
        print_result("\n".join(align_columns([_HEAD, *map(_cells, runs)])))
    else:
        say(f"no runs in {sanitize(str(request.folder))}")
    if not (request.json or request.prometheus):
        _list_broken(runs, request.folder)
    done = bool(runs) and all(run.needs_no_training for run in runs)
    return 0 if done or not request.finished else _NOT_FINISHED


def _cells(run: RunStatus) -> tuple[str, ...]:
    size, age = format_bytes(disk_usage(run.path)), format_duration(run.age)
    return (sanitize(str(run.path)), run.state_text, run.step_text, run.best_text, size, age)


def _list_broken(runs: Sequence[RunStatus], folder: Path) -> None:
    broken = [path for run in runs for path in broken_checkpoints(run.path)]
    if broken:
        say(f"\n{plural(len(broken), 'broken checkpoint')}, set aside and never read again:")
        for path in broken:
            say(f"  {sanitize(str(path))}  {format_bytes(disk_usage(path))}")
        say(f"delete with: unfog runs {shlex.quote(str(folder))} --remove-broken")


def _remove_broken(folders: Sequence[Path]) -> bool:
    """Delete the checkpoints that were set aside, and return True if all are gone."""
    gone = True
    for path in (path for folder in folders for path in broken_checkpoints(folder)):
        try:
            remove_tree(path, path.parent.parent, ignore_errors=False)  # a link to `checkpoints` is not followed
            say(f"removed {sanitize(str(path))}")
        except OSError as error:
            gone = False
            warn(f"{sanitize(str(path))} cannot be removed: {reason_of(error)}")
    return gone
