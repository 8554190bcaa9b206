"""Take the pictures of the page that the docs show, from runs that exist:

    python scripts/screenshots.py RUNS

serves that folder, opens it in a real Chromium, and writes docs/page-*.png. The newest run that is not running is shown
alone and drawn from, and it and the next are compared. Needs `unfog[dev]` and Debian's chromium.

    python scripts/screenshots.py doctor/photos/report.html docs/pictures/doctor.png

takes the beginning of a page that a command wrote.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from browsers import WatchedPage, open_browser, serving  # noqa: E402

LARGEST = 150_000  # bytes of each
DESKTOP, PHONE = {"width": 1200, "height": 860}, {"width": 390, "height": 800}


def save(page, name: str | Path) -> None:
    """Write what the page shows to a path or docs/page-NAME.png, in as many colours as fit into LARGEST bytes."""
    page.wait_for_timeout(1500)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = name if isinstance(name, Path) else ROOT / "docs" / f"page-{name}.png"
    for colours in (256, 128, 64, 32):
        picture.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < LARGEST:
            break
    print(path, path.stat().st_size)


def shoot_file(file: Path, picture: Path) -> None:
    """Write how a page on the disk begins."""
    with open_browser() as browser:
        page = WatchedPage(browser, viewport=DESKTOP, color_scheme="light").page
        page.goto(file.resolve().as_uri())
        height = page.evaluate("document.body.getBoundingClientRect().height")
        page.set_viewport_size({**DESKTOP, "height": min(DESKTOP["height"], round(height))})
        save(page, picture)


def shoot_runs(folder: Path) -> None:
    """Write the pictures of the page of runs."""
    with open_browser() as browser, serving(folder) as (address, _):
        page = WatchedPage(browser, viewport={**DESKTOP, "height": 320}, color_scheme="light").page
        page.goto(address)
        page.wait_for_selector("table.runs tbody tr")
        runs = page.evaluate("fetch('api/runs').then((answer) => answer.json())")
        runs = sorted(runs, key=lambda run: (run["state"] == "running", run["age"] or 0))
        one, ids = runs[0]["id"], ",".join(str(run["id"]) for run in runs[:2])
        save(page, "runs")
        page = WatchedPage(browser, viewport=DESKTOP, color_scheme="light").page
        page.goto(f"{address}#/run/{one}")
        page.wait_for_selector("unfog-chart canvas")
        page.wait_for_timeout(500)
        page.evaluate("document.getElementById('Curves').scrollIntoView()")
        save(page, "curves")
        page = WatchedPage(browser, viewport=DESKTOP, color_scheme="dark").page
        page.goto(f"{address}#/compare/{ids}")
        page.wait_for_selector("unfog-chart canvas")
        save(page, "compare-dark")
        page = WatchedPage(browser, viewport=PHONE, color_scheme="light").page
        page.goto(f"{address}#/run/{one}")
        page.wait_for_selector("unfog-chart canvas")
        page.wait_for_timeout(500)
        page.evaluate("document.getElementById('Samples').scrollIntoView()")
        save(page, "phone")
        for scheme, name in (("light", "playground"), ("dark", "playground-dark")):
            page = WatchedPage(browser, viewport=DESKTOP, color_scheme=scheme).page
            page.goto(f"{address}#/draw/{one}")
            draw(page, dark=scheme == "dark")
            save(page, name)


def draw(page, dark: bool) -> None:
    """Draw pictures, and look at a step half-way; in the dark, paint into one of them, with the levels in sight."""
    state = "document.querySelector('unfog-playground').job"
    page.wait_for_selector(".controls button.accent")
    page.click(".controls button.accent")
    page.wait_for_function(f"{state}?.state === 'done'")
    if not dark:
        page.focus(".scrub input")
        for _ in range(9):
            page.keyboard.press("ArrowLeft")
        return
    page.click("text=Levels of this drawing")
    page.click("text=Take these levels")
    page.click("text=Paint into it")
    page.wait_for_selector(".mask canvas")
    box = page.locator(".mask canvas").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 110, steps=5)
    page.mouse.up()
    before = page.evaluate(f"{state}.job")
    page.click(".controls button.accent")
    page.wait_for_function(f"{state}.job !== {before} && {state}.state === 'done'")
    page.evaluate("scrollTo(0, 0)")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        shoot_file(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        shoot_runs(Path(sys.argv[1]))
