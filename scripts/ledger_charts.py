"""Bar charts of figures as SVG, without another package: labels, bars, intervals and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ledger_rows import Figure

WIDTH, LEFT, RIGHT, ROW, TOP = 760, 250, 150, 26, 48
_OURS, _OTHERS, _INK = "#1f6f8b", "#b9b9b9", "#222222"


def bar_chart(title: str, bars: Sequence[tuple[str, Figure]], log: bool = False) -> str:
    """Return an SVG picture of one bar a figure, on white so that it can be read on dark pages too.

    A bar ends at the mean of the values of its figure. A line shows two errors on either side, the interval, or the
    range of values. With `log`, the scale is logarithmic, and bars begin at half of the smallest value.
    """
    ends = [_interval(figure) for _, figure in bars]
    least = min(low for low, _, _ in ends) / 2 if log else min(0.0, *(low for low, _, _ in ends))
    most = max(high for _, _, high in ends)

    def place(number: float) -> float:
        share = math.log(number / least) / math.log(most / least) if log else (number - least) / (most - least)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    title += ", logarithmic scale" * log
    height = TOP + ROW * len(bars) + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{_INK}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    zero = place(least if log else 0.0)
    for i, ((label, figure), (low, middle, high)) in enumerate(zip(bars, ends, strict=True)):
        y = TOP + ROW * i
        start, end = sorted((zero, place(middle)))
        length = max(1.0, end - start)
        colour = _OURS if label.startswith("Unfog") else _OTHERS
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{start:.1f}" y="{y + 3}" width="{length:.1f}" height="{ROW - 9}" fill="{colour}"/>',
        ]
        if high > low:
            line = f"M{place(low):.1f} {y + 11}H{place(high):.1f}"
            lines.append(f'<path d="{line}" stroke="{_INK}" stroke-width="1.5" fill="none"/>')
        lines.append(f'<text x="{max(place(high), zero) + 8:.1f}" y="{y + 15}">{escape(_value(figure, middle))}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _interval(figure: Figure) -> tuple[float, float, float]:
    """Return the ends of the line of a bar, and its value between them."""
    middle = sum(figure.values) / len(figure.values)
    if figure.low is not None and figure.high is not None:
        return figure.low, middle, figure.high
    error = 2 * (figure.error or 0.0)
    return min(*figure.values, middle - error), middle, max(*figure.values, middle + error)


def _value(figure: Figure, middle: float) -> str:
    text = f"{middle:,.0f}" if abs(middle) >= 1000 else f"{middle:.3g}"
    return text + (f" ± {figure.error:.2g}" if figure.error is not None else "") + figure.suffix
