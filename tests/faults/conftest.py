"""Fixtures of the tests of faults, and the table that they end with."""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.harness import FULL, USUAL, Job, Recipe, long_form, made_once, train

HERE = Path(__file__).parent
collect_ignore_glob = ["test_*.py"] if sys.platform == "win32" else []  # signals, mounts and locks are another world


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    left_out = [] if FULL else [item for item in ours if long_form.mark in item.own_markers]
    for item in ours:
        item.add_marker("faults")
        item.add_marker("slow")
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


class Attempt:
    """One fault that is tried, or as many as steps are noted in `lost`."""

    def __init__(self) -> None:
        self.lost: list[int] = []


class Faults:
    """Collects what was tried; the rows travel with the report of the test, so they come through xdist."""

    def __init__(self, rows: list[tuple[str, object]]) -> None:
        self._rows = rows

    def record(self, name: str, survived: bool, lost_steps: int | None) -> None:
        """Add a row: the fault, whether the run came through it whole, the steps that were done twice for it."""
        self._rows.append(("fault", [name, survived, lost_steps]))

    @contextmanager
    def tried(self, name: str) -> Iterator[Attempt]:
        """A fault that counts as survived unless what happens inside raises."""
        attempt, survived = Attempt(), False
        try:
            yield attempt
            survived = True
        finally:
            for lost in attempt.lost or [None]:
                self.record(name, survived, lost)


@pytest.fixture
def faults(request) -> Faults:
    return Faults(request.node.user_properties)


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    Job.end_all()


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder for what all tests may read; one for all processes of xdist."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"


@pytest.fixture(scope="session")
def undisturbed(shared) -> Callable[[Recipe], Path]:
    """Gives the run of a recipe that nothing happened to."""

    def run(recipe: Recipe) -> Path:
        def make(place: Path) -> None:
            train(recipe, place).ends()

        return made_once(shared / recipe.name, make)

    return run


@pytest.fixture
def whole(undisturbed) -> Path:
    """The usual run, undisturbed."""
    return undisturbed(USUAL)


def table(reports: list[pytest.TestReport]) -> list[str]:
    """Markdown: what was tried, how often it was survived, what it cost."""
    rows: dict[str, list[tuple[bool, int | None]]] = defaultdict(list)
    for report in reports:
        for kind, row in report.user_properties:
            if kind == "fault":
                name, survived, lost = row
                rows[name].append((survived, lost))
    lines = ["| fault | times tried | survived | lost work in steps (max, median) |", "|---|--:|--:|--:|"]
    for name in sorted(rows):
        lost = [steps for _, steps in rows[name] if steps is not None]
        cost = f"{max(lost)}, {statistics.median(lost):g}" if lost else "none"
        lines.append(f"| {name} | {len(rows[name])} | {sum(survived for survived, _ in rows[name])} | {cost} |")
    return lines if rows else []


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [
        report
        for kind in ("passed", "failed")
        for report in terminalreporter.getreports(kind)
        if getattr(report, "when", "") == "call"
    ]
    lines = table(reports)
    if not lines:
        return
    terminalreporter.section("faults")
    for line in lines:
        terminalreporter.write_line(line)
    if place := os.environ.get("FAULTS_TABLE"):
        Path(place).write_text("\n".join(lines) + "\n")
