"""Line and bar charts as inline SVG: no script, no file beside them, colours for a light and for a dark page."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_Series = Mapping[str, tuple[Sequence[float] | Floats, Sequence[float] | Floats]]

_POINTS = 1000  # a line is thinned to about so many
_TINY = 1e-100  # what is smaller is zero, and what is larger than its inverse is a gap: axes have to be computed
_DOTTED = 24  # a line of so few points shows them
_WIDTH, _HEIGHT = 520, 290  # on a phone the text is still readable
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46
# Okabe and Ito's blue, orange, green and purple, moved to contrast with white and with black alike.
_COLOURS = ("#2f7fd0", "#d9822b", "#1f9d76", "#b565b0", "#8a8f98")


class Band(NamedTuple):
    """An area of a chart between two lines over the same x."""

    name: str
    x: Sequence[float] | Floats
    low: Sequence[float] | Floats
    high: Sequence[float] | Floats


@dataclass(frozen=True)
class _Axis:
    """Maps values in [low, high] to pixels in [start, end], through log10 when `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: Floats) -> Floats:
        """Values to pixels; nan if the axis cannot show a value."""
        if self.log:
            values = np.log10(np.where(values > 0, values, np.nan))
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        return self.start + (values - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values on the axis, some four to eight of them."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def line_chart(
    series: _Series,
    x_name: str,
    y_name: str,
    log_y: bool = False,
    zero_y: bool = False,
    title: str = "",
    faint: Collection[str] = (),
    log_x: bool = False,
    band: Band | None = None,
) -> str:
    """Draw series, name -> (x, y), as one `<svg>` element; "" if there is no point to show.

    A nan or infinite y, or one that is not positive where `log_y`, is a gap. `zero_y`: the y axis begins at
    zero. `faint` series are drawn pale, in the colour of the series after them (the raw values under their
    smoothed line). `title` is read by screen readers, and defaults to "y over x". `band` is an area behind the
    lines, in the colour of the last one.
    """
    lines = {name: _points(x, y, log_y) for name, (x, y) in series.items()}
    lines = {name: xy for name, xy in lines.items() if np.isfinite(xy[1]).any()}
    if not lines:
        return ""
    shown = [xy[:, np.isfinite(xy[1])] for xy in lines.values()]
    x_axis = _Axis(*_limits(np.concatenate([xy[0] for xy in shown]), log=log_x), _LEFT, _WIDTH - _RIGHT, log_x)
    edges = [] if band is None else [_points(band.x, y, log_y) for y in (band.low, band.high)]
    y_values = np.concatenate([xy[1][np.isfinite(xy[1])] for xy in (*shown, *edges)])
    low, high = _limits(y_values, margin=0.06, log=log_y)
    # Only where nothing would be cut off.
    if zero_y and y_values.min() >= 0:
        low = 0.0
    y_axis = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP if len(lines) > 1 else _TOP - 20, log_y)
    colours = _colours(list(lines), faint)
    body = [_frame(x_axis, y_axis, x_name, y_name)]
    if band is not None:
        body.append(_area((x_axis, y_axis), edges[0], edges[1], band.name, list(colours.values())[-1]))
    for name, points in lines.items():
        body.append(_line((x_axis, y_axis), points, name, colours[name], name in faint))
    if len(lines) > 1:
        body.append(_legend(colours, faint))
    return _svg(body, title or f"{y_name} over {x_name}")


def curve_chart(curve: Mapping[str, Any], name: str = "") -> str:
    """Return the chart of a `Curve` of `evaluation.value_metrics`, given as its fields; `name` is of the channel."""
    x, spectrum = curve["x"], curve["metric"] == "spectrum"
    series = {"generated": (x, curve["generated"]), "real, area: random halves": (x, curve["real"])}
    names = ("frequency, 1 = highest along a row", "power") if spectrum else ("value", "density")
    of = f"{names[1]} of {name or 'channel ' + str(curve['channel'])}"
    band = Band("range of random halves of the real images", x, curve["low"], curve["high"])
    return line_chart(series, names[0], of, log_y=spectrum, zero_y=not spectrum, log_x=spectrum, band=band)


def as_file(chart: str) -> bytes:
    """Return the SVG of a chart as a file, on white."""
    # Inside a page a chart needs no namespace; as a file it does.
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    head, end, rest = chart.partition("</title>")
    return (head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + end + background + rest).encode()


def bar_chart(values: Sequence[float] | Floats, names: Sequence[str], x_name: str, y_name: str) -> str:
    """Draw a bar for each value, with its name below, as one `<svg>` element; "" without values.

    Values are finite and not negative. Where names have no room, some are left out; each bar names its own when
    pointed at.
    """
    if not len(values):
        return ""
    bars, places = np.asarray(values, np.float64), np.arange(len(values), dtype=np.float64)
    x_axis, y_axis = _Axis(-0.5, len(bars) - 0.5, _LEFT, _WIDTH - _RIGHT), _axis_of_bars(bars)
    texts = [f"{name}: {_number(value)}" for name, value in zip(names, bars.tolist())]
    room = (_WIDTH - _LEFT - _RIGHT) / len(bars)  # pixels; a letter takes about seven
    aslant = max(map(len, names)) * 7 > room  # which leaves no room for what they are called together
    body = [_frame(x_axis, y_axis, "" if aslant else x_name, y_name, ())]
    body += _bars(x_axis, y_axis, np.array([places - 0.4, places + 0.4]), bars, texts)
    every = max(1, math.ceil(14 / room))
    body += [_bar_name(x, name, aslant) for x, name in list(zip(x_axis(places).tolist(), names))[::every]]
    return _svg(body, f"{y_name} of each {x_name}")


def histogram(values: Sequence[float] | Floats, x_name: str, y_name: str, bins: int = 24) -> str:
    """Draw how many of the finite values lie in each of `bins` equal parts of their range; "" without any."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return ""
    # With limits of ours: equal values would give numpy a range of no width.
    counts, edges = np.histogram(finite, bins, _limits(finite))
    edges, bars = edges.astype(np.float64), counts.astype(np.float64)
    spans = np.array([edges[:-1], edges[1:]])
    texts = [f"{_number(a)} to {_number(b)}: {n:,}" for a, b, n in zip(edges, edges[1:], counts.tolist())]
    x_axis, y_axis = _Axis(edges[0], edges[-1], _LEFT, _WIDTH - _RIGHT), _axis_of_bars(bars)
    body = [_frame(x_axis, y_axis, x_name, y_name), *_bars(x_axis, y_axis, spans, bars, texts)]
    return _svg(body, f"{y_name} over {x_name}")


def _svg(body: Sequence[str], name: str) -> str:
    name = escape(name)
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"><title>{name}</title>'
        f"{''.join(body)}</svg>"
    )


def _points(x: Sequence[float] | Floats, y: Sequence[float] | Floats, log: bool) -> Floats:
    """[2, n]: x and y, a gap wherever a value cannot be shown, thinned."""
    points = np.array([np.asarray(x, np.float64), np.asarray(y, np.float64)])
    # A denormal or a huge value, as of a diverged run, overflows where the length of an axis is computed.
    points[np.abs(points) < _TINY] = 0.0
    points = points[:, np.abs(points[0]) < 1 / _TINY]
    visible = (np.abs(points[1]) < 1 / _TINY) & ((points[1] > 0) | (not log))
    points[1, ~visible] = np.nan
    return _thinned(points)


def _thinned(points: Floats) -> Floats:
    """Keep the lowest and the highest point of each stretch, so that no spike is lost; a gap stays a gap."""
    count = points.shape[1]
    if count <= _POINTS:
        return points
    edges = np.linspace(0, count, _POINTS // 2 + 1).astype(int)
    keep: list[int] = []
    for first, last in pairwise(edges):
        y = points[1, first:last]
        if np.isnan(y).all():
            keep.append(int(first))
        else:
            # In their order along x, so that the line does not run back.
            keep += sorted({int(first + np.nanargmin(y)), int(first + np.nanargmax(y))})
    return points[:, keep]


def _limits(values: Floats, margin: float = 0.0, log: bool = False) -> tuple[float, float]:
    """Lowest and highest value with a margin (a share of their distance); never the same."""
    if log:
        low, high = _limits(np.log10(values), margin)
        return 10**low, 10**high
    low, high = float(values.min()), float(values.max())
    spread = high - low
    # Of nearly equal values only the rounding would be seen.
    if spread <= 1e-9 * max(abs(low), abs(high)):
        pad = 0.5 * abs(high) or 0.5
        return low - pad, high + pad
    return low - margin * spread, high + margin * spread


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 9)]
    return _linear_ticks(low, high)  # a small part of a decade: nearly linear


def _number(value: float) -> str:
    """A tick's text: 1.5e-4, 0.05, 1,500, 20k, 3M."""
    if abs(value) < 1e-3:
        digits, exponent = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(exponent)}" if value else "0"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):,.4g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _axis_of_bars(values: Floats) -> _Axis:
    return _Axis(0.0, 1.06 * float(values.max()) or 1.0, _HEIGHT - _BOTTOM, _TOP - 20)


def _bars(x_axis: _Axis, y_axis: _Axis, spans: Floats, values: Floats, texts: Sequence[str]) -> list[str]:
    """Bars from spans[0] to spans[1], each with a text to read when it is pointed at."""
    return [
        f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(end - start - 0.5, 0.5):.1f}" '
        f'height="{y_axis.start - top:.1f}" fill="{_COLOURS[0]}"><title>{escape(text)}</title></rect>'
        for start, end, top, text in zip(*x_axis(spans), y_axis(values), texts)
    ]


def _bar_name(x: float, name: str, aslant: bool) -> str:
    y = _HEIGHT - _BOTTOM + 16
    if not aslant:
        return f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill-opacity="0.75">{escape(name)}</text>'
    name = escape(name if len(name) <= 11 else f"{name[:10]}…")
    place = f'x="{x + 5:.1f}" y="{y - 3}" transform="rotate(-24 {x + 5:.1f} {y - 3})"'
    return f'<text {place} text-anchor="end" fill-opacity="0.75">{name}</text>'


def _frame(x_axis: _Axis, y_axis: _Axis, x_name: str, y_name: str, x_values: Sequence[float] | None = None) -> str:
    """Axes with ticks, numbers and names; `x_values` are the ticks of x if they are not those of its axis."""
    left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, y_axis.end, _HEIGHT - _BOTTOM
    y_ticks, x_ticks = np.array(y_axis.ticks()), np.array(x_axis.ticks() if x_values is None else x_values)
    rules, texts = [f'<path stroke-opacity="0.45" d="M{left} {bottom}H{right}"/>'], []
    for value, y in zip(y_ticks, y_axis(y_ticks)):
        rules.append(f'<path stroke-opacity="0.13" d="M{left} {y:.1f}H{right}"/>')
        texts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value, x in zip(x_ticks, x_axis(x_ticks)):
        rules.append(f'<path stroke-opacity="0.45" d="M{x:.1f} {bottom}v4"/>')
        anchor = "end" if x > right - 12 else "middle"  # a number centred at the edge would be cut off
        texts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{_number(value)}</text>')
    texts.append(f'<text x="{(left + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    turned = f'transform="translate(13 {(top + bottom) / 2}) rotate(-90)"'
    texts.append(f'<text {turned} text-anchor="middle">{escape(y_name)}</text>')
    return f'<g stroke="currentColor">{"".join(rules)}</g><g fill-opacity="0.75">{"".join(texts)}</g>'


def _area(axes: tuple[_Axis, _Axis], low: Floats, high: Floats, name: str, colour: str) -> str:
    """The area between the lines through points [2, n] each, where both can be shown."""
    seen = np.isfinite(low[1]) & np.isfinite(high[1])
    there, back = (axes[0](low[0, seen]), axes[1](low[1, seen])), (axes[0](high[0, seen]), axes[1](high[1, seen]))
    points = [*zip(*there), *list(zip(*back))[::-1]]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{path}" fill="{colour}" fill-opacity="0.3"><title>{escape(name)}</title></polygon>'


def _line(axes: tuple[_Axis, _Axis], points: Floats, name: str, colour: str, pale: bool) -> str:
    """The line through points [2, n], broken at gaps; dots where points are few or stand alone."""
    (x_values, y_values), (x, y) = points, (axis(values) for axis, values in zip(axes, points))
    seen = np.isfinite(y)
    begins = seen & ~np.concatenate([[False], seen[:-1]])
    ends = seen & ~np.concatenate([seen[1:], [False]])
    path = "".join(f"{'M' if begin else 'L'}{px:.1f} {py:.1f}" for px, py, begin in zip(x[seen], y[seen], begins[seen]))
    width, opacity = (1, 0.5) if pale else (2, 1)
    parts = [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}" '
        'stroke-linejoin="round"/>'
    ]
    dots = seen if seen.sum() <= _DOTTED else begins & ends
    for i in np.flatnonzero(dots):
        text = escape(f"{name}: {_number(y_values[i])} at {_number(x_values[i])}")
        parts.append(
            f'<circle cx="{x[i]:.1f}" cy="{y[i]:.1f}" r="3" fill="{colour}" fill-opacity="{opacity}">'
            f"<title>{text}</title></circle>"
        )
    return "".join(parts)


def _legend(colours: Mapping[str, str], faint: Collection[str]) -> str:
    parts, x = [], float(_LEFT)
    for name, colour in colours.items():
        opacity = 0.5 if name in faint else 1
        parts.append(
            f'<path d="M{x:.0f} 14h18" stroke="{colour}" stroke-width="3" stroke-opacity="{opacity}"/>'
            f'<text x="{x + 24:.0f}" y="18">{escape(name)}</text>'
        )
        x += 46 + 6.5 * len(name)
    return "".join(parts)


def _colours(names: Sequence[str], faint: Collection[str]) -> dict[str, str]:
    """A colour for each name; a faint one shares that of the next."""
    colours, index = {}, 0
    for name in names:
        colours[name] = _COLOURS[index % len(_COLOURS)]
        index += name not in faint
    return colours
