"""Draw the pictures of the pages on parts of your own, and that of several processes, as SVG:

    python scripts/pages/draw_parts.py

writes docs/pictures/parts/*.svg. `plan.svg` has all parts in their order, and PAGE.svg has one of them with what it
gets and gives. Curves of a weighting, a loss, a value map and a sampler are those of the code that their pages show.
`ranks.svg` has what several processes send and keep; its dots are rows of the ledger.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from line_charts import BLUE, FAINT, GREEN, GREY, INK, ORANGE, Chart, side_by_side, svg_start

from unfog.diffusion.losses.pixel_loss import AbsoluteError, PseudoHuber, SquaredError
from unfog.diffusion.noise import VP, Cosine, NoiseSource
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.weighting import MinSnr, Plain
from unfog.values import value_maps

ROOT = Path(__file__).resolve().parents[2]
PAGES, OUT = ROOT / "docs" / "extending", ROOT / "docs" / "pictures" / "parts"
WIDTH, BOX, HIGH, GAP = 760, 163, 58, 30
# Name -> column, row, and what it does. Boxes without a page are not for extension.
BOXES = {
    "image source": (0, 0, "lists and opens images"),
    "stored type": (1, 0, "uint8, uint16, float32"),
    "value map": (2, 0, "to -1 … 1, and back"),
    "batch": (3, 0, "x0, noise, conditions"),
    "condition": (3, 1, "facts about an image"),
    "network": (2, 1, "x at a level → output"),
    "loss": (1, 1, "output, target → error"),
    "weighting": (0, 1, "how much a level counts"),
    "update": (0, 2, "gradient, optimiser, EMA"),
    "checkpoint entry": (1, 2, "state for a resume"),
    "sampler": (2, 2, "from noise to an image"),
    "tracker": (3, 2, "numbers and pictures"),
}
OWN = {"batch", "update"}
# Part -> what it gets, and what it gives.
CALLS = {
    "image source": (
        "a number i, below the number of images",
        "a Pillow image, or an array [H, W, C]; names, classes, columns",
    ),
    "stored type": ("a decoded image", "its values in memory, caches and packs, and in samples"),
    "condition": ("a column of the source: a value for each image", "features, embedded with the noise level"),
    "network": (
        "x [B, C, H, W], c_noise [B], and label [B] or conditions",
        "an image, noise or velocity, as --target says: [B, C, H, W]",
    ),
    "tracker": ("numbers by name, bars by noise level, images [H, W, 3]", "a record of its own"),
    "checkpoint entry": ("at a resume: load_state_dict(saved)", "at each checkpoint: state_dict(), kept in state.json"),
}
# From box to box; "network" to "sampler" is the way of a finished run.
ARROWS = [
    ("image source", "stored type"),
    ("stored type", "value map"),
    ("value map", "batch"),
    ("batch", "condition"),
    ("condition", "network"),
    ("network", "loss"),
    ("loss", "weighting"),
    ("weighting", "update"),
    ("update", "checkpoint entry"),
    ("network", "sampler"),
    ("sampler", "tracker"),
]


def plan(part: str | None = None) -> str:
    """Return the picture of all parts; with the name of one, it alone has colour, and its call is written below."""
    title = "Where parts of your own go" if part is None else f"Where a {part} goes, what it gets and gives"
    height = 3 * HIGH + 2 * GAP + 32 + (56 if part else 0)
    lines = svg_start(title, WIDTH, height)
    lines.append(
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
    )
    for first, second in ARROWS:
        lines.append(f'<path d="{_way(first, second)}" stroke="{GREY}" stroke-width="2" marker-end="url(#tip)"/>')
    for name, (_, _, what) in BOXES.items():
        (x, y), shown = _corner(name), name not in OWN and part in (None, name)
        fill, ink, edge = (BLUE, "#ffffff", BLUE) if shown else ("#ffffff", INK, FAINT if name in OWN else GREY)
        lines += [
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="6" fill="{fill}" stroke="{edge}"/>',
            f'<text x="{x + BOX / 2}" y="{y + 24}" text-anchor="middle" font-size="15" font-weight="bold" '
            f'fill="{ink}">{name}</text>',
            f'<text x="{x + BOX / 2}" y="{y + 44}" text-anchor="middle" fill="{ink}">{escape(what)}</text>',
        ]
    if part:
        for row, (word, what) in enumerate(zip(("gets", "gives"), CALLS[part], strict=True)):
            y = height - 44 + 24 * row
            lines.append(f'<text x="16" y="{y}" font-size="15" fill="{BLUE}" font-weight="bold">{word}</text>')
            lines.append(f'<text x="66" y="{y}" font-size="15">{escape(what)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _corner(name: str) -> tuple[int, int]:
    column, row, _ = BOXES[name]
    return 16 + column * (BOX + (WIDTH - 32 - 4 * BOX) // 3), 16 + row * (HIGH + GAP)


def _way(first: str, second: str) -> str:
    """Return the line from a box to its neighbour."""
    (x, y), (to_x, to_y) = _corner(first), _corner(second)
    if x == to_x:
        return f"M{x + BOX / 2} {y + HIGH}V{to_y - 1}"
    start, end = (x + BOX, to_x - 1) if to_x > x else (x, to_x + BOX + 1)
    return f"M{start} {y + HIGH / 2}H{end}"


def code_of(page: str) -> Any:
    """Return the module that a page shows as its file."""
    text = (PAGES / f"{page}.md").read_text("utf-8")
    name = re.search(r"`(my_\w+)\.py`", text)
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    if name is None or block is None:
        raise ValueError(f"docs/extending/{page}.md shows no file")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name[1]}.py").write_text(block[1], encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            return import_module(name[1])
        finally:
            sys.path.remove(folder)


def weighting() -> str:
    """Weights on the squared error of a network that predicts noise, by log SNR."""
    logsnr = torch.linspace(-10, 10, 101)
    own = logsnr.exp()  # of eps: SNR on x0 is 1 on the output
    band = code_of("weighting").Band
    chart = Chart(
        "Weight on the error of the noise",
        range(-10, 11, 5),
        (0, 0.5, 1),
        ("log SNR: noisy to clean", "weight"),
        (720, 300),
    )
    shown = {"band": (band(), BLUE), "band:center=1,width=3": (band(1.0, 3.0), GREEN)}
    shown |= {"plain": (Plain(), GREY), "min-snr": (MinSnr(), ORANGE)}
    for one, colour in shown.values():
        weights = one(logsnr, own, 0.5) / own
        chart.curve(list(zip(logsnr.tolist(), weights.tolist(), strict=True)), colour, dashed=colour in (GREY, ORANGE))
    chart.note(-9.8, 0.93, "plain", GREY)
    chart.note(2.3, 0.62, "min-snr", ORANGE)
    chart.note(-2.0, 0.35, "band", BLUE, "end")
    chart.note(-5.0, 0.2, "band:center=1,width=3", GREEN, "end")
    return side_by_side("Weights of a band, of plain and of min-snr, by noise level", [chart])


def loss() -> str:
    """Error of one value, by its difference from the target."""
    difference = torch.linspace(-4, 4, 161)[:, None, None, None]
    bounded = code_of("loss").Bounded
    chart = Chart("Error of one value", range(-4, 5, 2), (0, 2, 4, 6, 8), ("output - target", "error"), (720, 320), 150)
    shown = {"bounded": (bounded(), BLUE, False), "bounded:limit=2": (bounded(limit=2.0), GREEN, False)}
    shown |= {"mse": (SquaredError(), GREY, True), "l1": (AbsoluteError(), ORANGE, True)}
    shown["pseudo-huber:c=1"] = (PseudoHuber(c=1.0), INK, True)
    heights = {"bounded": 3.35, "bounded:limit=2": 1.65, "mse": 7.8, "l1": 4.1, "pseudo-huber:c=1": 2.75}
    for name, (one, colour, dashed) in shown.items():
        errors = one(difference, torch.zeros(())).flatten()
        inside = [(x, y) for x, y in zip(difference.flatten().tolist(), errors.tolist(), strict=True) if y <= 8]
        chart.curve(inside, colour, dashed)
        chart.note(2.95 if name == "mse" else 4.1, heights[name], name, colour)
    return side_by_side("Errors of five losses by the difference: the bounded ones level off", [chart])


def value_map() -> str:
    """Numbers of the network, by stored value, of the maps and of the square root of the page."""
    values = np.geomspace(1, 10_000, 4000, dtype=np.float32).reshape(1, 1, 40, 100)
    stored = torch.linspace(1, 10_000, 400)
    chart = Chart(
        "Value maps on values from 1 to 10,000",
        (0, 2500, 5000, 7500, 10_000),
        (-1, -0.5, 0, 0.5, 1),
        ("stored value", "value for the network"),
        (720, 320),
    )
    for kind, colour in (("minmax", GREY), ("log", ORANGE), ("arcsinh", GREEN)):
        x = value_maps.to_model(value_maps.fit(kind, values), stored[None, None, None])[0, 0, 0]
        chart.curve(list(zip(stored.tolist(), x.tolist(), strict=True)), colour, dashed=True)
    root = 2 * (stored.sqrt() - 1) / (100 - 1) - 1
    chart.curve(list(zip(stored.tolist(), root.tolist(), strict=True)), BLUE)
    chart.note(900, 0.68, "log", ORANGE, "end")
    chart.note(2100, 0.36, "arcsinh", GREEN)
    chart.note(3500, 0.06, "sqrt, of this page", BLUE)
    chart.note(5700, -0.02, "minmax", GREY)
    return side_by_side("Four value maps: a logarithm gives small values most room, minmax the least", [chart])


def paths(eta: float, count: int = 14, steps: int = 40) -> list[list[tuple[float, float]]]:
    """Return the way of each sample: (steps done, x), where clean images are -1 or 1 with a deviation of 0.1."""

    def denoise(x: torch.Tensor, logsnr: torch.Tensor) -> torch.Tensor:
        alpha, sigma = VP()(logsnr[:, None, None, None])
        variance = (0.1 * alpha) ** 2 + sigma**2
        side = torch.tanh(alpha * x / variance)
        return side + 0.01 * alpha * (x - alpha * side) / variance

    ways: list[list[tuple[float, float]]] = [[] for _ in range(count)]

    def observe(step: Any) -> None:
        for way, x in zip(ways, step.x_t.flatten().tolist(), strict=True):
            way.append((step.number, x))

    draw = NoiseSource(seed=1, indices=range(count), shape=(1, 1, 1)).draw
    code_of("sampler")
    sampler = Sampler(kind=f"custom:path=my_sampler.eta_ddim,eta={eta}", steps=steps, clip=False)
    ends = sampler(denoise, VP(), Cosine(), draw, observe=observe)
    for way, x in zip(ways, ends.flatten().tolist(), strict=True):
        way.append((steps, x))
    return ways


def sampler() -> str:
    """Ways from noise to two clean values, with three shares of new noise."""
    charts = []
    for eta in (0.0, 0.5, 1.0):
        chart = Chart(f"eta = {eta:g}", (0, 20, 40), range(-3, 4), ("step", "x"), (250, 300))
        for way in paths(eta):
            chart.curve(way, BLUE if way[-1][1] > 0 else ORANGE, width=1.2)
        charts.append(chart)
    return side_by_side("Fourteen samples on their way to 1 or -1: smooth without new noise, rough with it", charts)


def ranks() -> str:
    """What N processes send in a step, and keep of each weight."""
    sys.path.append(str(ROOT / "scripts"))
    from ledger_rows import figures, read

    known = figures(read())
    parameters, counts = 0.99, range(1, 9)
    sent = Chart("Sent by a rank in a step, 1M weights", counts, (0, 4, 8, 12), ("ranks", "MB"), (420, 320), 100)
    share = [(n, (n - 1) / n * parameters) for n in counts]
    for factor, colour, name in ((12, ORANGE, "sharded"), (8, BLUE, "DDP"), (4, GREEN, "DDP, bf16")):
        sent.curve([(n, factor * part) for n, part in share], colour)
        sent.note(8.2, factor * share[-1][1] - 0.15, name, colour)
    for kind, colour in (("fp32", BLUE), ("bf16", GREEN)):
        rows = [(n, known[f"scaling-check-2026-11-22.sent-{kind}-{n}-ranks-40-mbit"].values[0]) for n in (2, 4)]
        sent.dots(rows, colour)
    kept = Chart("Kept on a device, a weight", counts, range(0, 31, 10), ("ranks", "bytes"), (340, 320), 80)
    kept.curve([(n, 28 if n > 1 else 24) for n in counts], BLUE)
    kept.curve([(n, 24 / n) for n in counts], ORANGE)
    kept.note(8.2, 27.6, "DDP", BLUE)
    kept.note(8.2, 2.6, "sharded", ORANGE)
    return side_by_side(
        "What ranks send and keep: DDP keeps all on each, sharding sends more and keeps less", [sent, kept]
    )


DRAWN: dict[str, Callable[[], str]] = {
    "plan": plan,
    "ranks": ranks,
    "weighting": weighting,
    "loss": loss,
    "value-map": value_map,
    "sampler": sampler,
}


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for part in CALLS:
        (OUT / f"{part.replace(' ', '-')}.svg").write_text(plan(part), encoding="utf-8")
    for name, draw in DRAWN.items():
        (OUT / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
