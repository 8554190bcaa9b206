"""Line charts as SVG, without another package: axes, curves, dots and shaded areas, on white for dark pages too."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, FAINT = "#222222", "#dddddd"
BLUE, ORANGE, GREEN, GREY, RED = "#1f6f8b", "#c8571b", "#3c7a3c", "#8a8a8a", "#b3261e"
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 40, 46
Points = Sequence[tuple[float, float]]


class Chart:
    """One pair of axes. `x` and `y` are the ends of the axes, and their ticks are the numbers that are named."""

    def __init__(
        self,
        title: str,
        x: Sequence[float],
        y: Sequence[float],
        names: tuple[str, str],
        size: tuple[int, int],
        room: int = _RIGHT,
    ):
        """`x` and `y`: ticks, ascending, the first and last are the ends. `names` of the axes; `size` in pixels.

        `room` is that on the right of the axes, where the names of curves may stand.
        """
        self.x, self.y, (self.width, self.height), self.room = x, y, size, room
        right, bottom = self.width - room, self.height - _BOTTOM
        middle = (_LEFT + right) / 2
        self.lines = [f'<text x="{_LEFT}" y="22" font-weight="bold">{escape(title)}</text>']
        for tick in x:
            at = self.across(tick)
            self.lines += [_path(f"M{at:.1f} {bottom}v5", INK, 1), _text(at, bottom + 18, f"{tick:g}", "middle")]
        for tick in y:
            at = self.down(tick)
            self.lines += [_path(f"M{_LEFT} {at:.1f}H{right}", FAINT, 1), _text(_LEFT - 7, at + 4, f"{tick:g}", "end")]
        self.lines += [
            _path(f"M{_LEFT} {_TOP}V{bottom}H{right}", INK, 1),
            _text(middle, self.height - 8, names[0], "middle"),
            f'<text transform="translate(15 {(_TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(names[1])}</text>",
        ]

    def across(self, x: float) -> float:
        """Return where a number is on the axis of x, in pixels."""
        return _LEFT + (x - self.x[0]) / (self.x[-1] - self.x[0]) * (self.width - _LEFT - self.room)

    def down(self, y: float) -> float:
        """Return where a number is on the axis of y, in pixels."""
        bottom = self.height - _BOTTOM
        return bottom - (y - self.y[0]) / (self.y[-1] - self.y[0]) * (bottom - _TOP)

    def curve(self, points: Points, colour: str, dashed: bool = False, width: float = 2) -> None:
        """Draw a curve through points."""
        places = "L".join(f"{self.across(x):.1f} {self.down(y):.1f}" for x, y in points)
        self.lines.append(_path(f"M{places}", colour, width, ' stroke-dasharray="6 4"' if dashed else ""))

    def dots(self, points: Points, colour: str) -> None:
        """Draw a dot at each point."""
        for x, y in points:
            self.lines.append(f'<circle cx="{self.across(x):.1f}" cy="{self.down(y):.1f}" r="4.5" fill="{colour}"/>')

    def band(self, start: float, end: float, colour: str) -> None:
        """Shade from one number of x to another."""
        left, right = self.across(start), self.across(end)
        self.lines.append(
            f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{self.height - _TOP - _BOTTOM}" '
            f'fill="{colour}" opacity="0.15"/>'
        )

    def note(self, x: float, y: float, text: str, colour: str = INK, anchor: str = "start") -> None:
        """Write beside a point."""
        self.lines.append(_text(self.across(x), self.down(y), text, anchor, colour))


def side_by_side(title: str, charts: Sequence[Chart]) -> str:
    """Return an SVG picture of charts beside each other. `title` says what one sees."""
    width, height = sum(chart.width for chart in charts), max(chart.height for chart in charts)
    lines, x = svg_start(title, width, height), 0
    for chart in charts:
        lines += [f'<g transform="translate({x} 0)">', *chart.lines, "</g>"]
        x += chart.width
    return "\n".join([*lines, "</svg>"]) + "\n"


def svg_start(title: str, width: int, height: int) -> list[str]:
    """Return how a picture begins: its letters, its title for people who hear it, and white ground."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
    ]


def _path(way: str, colour: str, width: float, more: str = "") -> str:
    return f'<path d="{way}" stroke="{colour}" stroke-width="{width:g}" fill="none"{more}/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    halo = 'paint-order="stroke" stroke="#ffffff" stroke-width="4"'  # where a curve is behind it
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {halo}>{escape(text)}</text>'
