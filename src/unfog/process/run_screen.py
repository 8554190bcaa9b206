"""Screen of `unfog watch`: state, progress and charts of a run as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unfog.process.run_status import RunStatus
from unfog.reporting.progress import format_duration, format_number
from unfog.reporting.records import SMOOTHED_FROM, Row, finite_column, read_metrics, smoothed
from unfog.reporting.terminal_charts import ChartSpace, text_chart
from unfog.text import sanitize

_LAST = 2**22  # bytes of metrics.jsonl that the charts show: several thousand lines
_CHARTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4g}"),
    ("held-out loss", "held_out_loss", lambda value: f"{value:.4g}"),
    ("images/s", "images_per_second", format_number),
    ("learning rate", "lr", lambda value: f"{value:.3g}"),
)
_FROM_ZERO = ("images_per_second", "lr")
_SIDE_BY_SIDE = 100  # columns from which two charts stand beside each other


def screen_lines(run: Path, width: int, height: int, unicode: bool = True, note: str = "") -> list[str]:
    """Return the lines of the screen: state and progress, then the charts in the space that is left."""
    try:
        metrics = read_metrics(run / "metrics.jsonl", _LAST)
    except OSError:
        metrics = []
    status = RunStatus.read(run, metrics)
    head = ", ".join(filter(None, [sanitize(run.resolve().name), status.state_text, f"step {status.step_text}", note]))
    seen = f"last written {format_duration(status.age)} ago"
    lines = [head[:width], "  ".join(filter(None, [_bar(status, unicode), seen]))[:width], ""]
    across = 2 if width >= _SIDE_BY_SIDE else 1
    rows = len(_CHARTS) // across
    each = max(4, min(16, (height - len(lines)) // rows - 1))
    wide = (width - 2 * (across - 1)) // across
    charts = [_chart(metrics, *chart, ChartSpace(wide, each, unicode)) for chart in _CHARTS]
    for i in range(0, len(charts), across):
        lines += ["  ".join(line.ljust(wide) for line in parts).rstrip() for parts in zip(*charts[i : i + across])]
    return lines


def _chart(
    metrics: Sequence[Row], title: str, name: str, shown: Callable[[float], str], space: ChartSpace
) -> list[str]:
    steps, values = finite_column(metrics, name)
    smooth = name == "loss" and len(values) >= SMOOTHED_FROM
    values = smoothed(values) if smooth else values
    latest = f" {shown(float(values[-1]))}{' (smoothed)' if smooth else ''}" if len(values) else ""
    return [f"{title}{latest}"[: space.width], *text_chart(steps, values, space, name in _FROM_ZERO)]


def _bar(status: RunStatus, unicode: bool) -> str:
    if not status.steps:
        return ""
    share = min(1.0, status.step / status.steps)
    full = round(24 * share)
    return ("█" if unicode else "#") * full + ("░" if unicode else "-") * (24 - full) + f" {share:.0%}"
