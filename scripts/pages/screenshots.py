"""Take the pictures of the page that the docs show, from runs that exist:

    python scripts/pages/screenshots.py RUNS ONE FIRST SECOND DRAWN

serves the folder of runs, opens it in a real Chromium, and writes docs/page-*.png: of run ONE alone, of FIRST and
SECOND compared, and of drawings from DRAWN, a run of `make demo-text`. Needs `unfog[dev]` and Debian's chromium.

    python scripts/pages/screenshots.py doctor/photos/report.html docs/pictures/doctor.png

takes the beginning of a page that a command wrote.

    jupyter nbconvert --to html examples/first_hour.ipynb
    python scripts/pages/screenshots.py first_hour.html docs/pictures/notebook.png "Samples: an array"

begins where a text stands: here with a cell of a notebook.

    tensorboard --logdir runs --port 6006
    python scripts/pages/screenshots.py http://localhost:6006 docs/pictures/tensorboard.png

takes that of TensorBoard, with losses and previews of the runs.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from browsers import WatchedPage, open_browser, serving  # noqa: E402

LARGEST = 150_000  # bytes of each
DESKTOP, PHONE = {"width": 1200, "height": 860}, {"width": 390, "height": 800}
NOTEBOOK, TENSORBOARD = {"width": 800, "height": 900}, {"width": 1100, "height": 900}
TAGS = "^loss$|^held_out_loss$|^samples$"  # shown of TensorBoard


def save(page, name: str | Path, whole: str = "", margin: int = 16) -> None:
    """Write what the page shows to a path or docs/page-NAME.png, in as many colours as fit into LARGEST bytes.

    The picture ends with the last element that is whole in sight, of those that `whole` selects, and `margin` pixels.
    """
    page.wait_for_timeout(1500)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    if whole:
        ends = page.evaluate(
            "(s) => [...document.querySelectorAll(s)].map((e) => e.getBoundingClientRect().bottom)", whole
        )
        picture = picture.crop(
            (0, 0, picture.width, margin + round(max(e for e in ends if e < picture.height - margin)))
        )
    path = name if isinstance(name, Path) else ROOT / "docs" / f"page-{name}.png"
    for colours in (256, 128, 64, 32):
        picture.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < LARGEST:
            break
    print(path, path.stat().st_size)


def until(page, true: str) -> None:
    """Wait until an expression is true. `wait_for_function` would need rights that the page does not give."""
    while not page.evaluate(true):
        page.wait_for_timeout(500)


def shoot_file(file: Path, picture: Path, text: str = "") -> None:
    """Write how a page on the disk begins, or how it goes on from the element in which a text stands."""
    with open_browser() as browser:
        page = WatchedPage(browser, viewport=NOTEBOOK if text else DESKTOP, color_scheme="light").page
        page.goto(file.resolve().as_uri(), wait_until="domcontentloaded" if text else "load")
        if text:
            page.get_by_text(text).first.evaluate("(element) => element.scrollIntoView()")
        else:
            height = page.evaluate("document.body.getBoundingClientRect().height")
            page.set_viewport_size({**DESKTOP, "height": min(DESKTOP["height"], round(height))})
        save(page, picture, ".jp-OutputArea-child" if text else "", margin=4)


def shoot_tensorboard(address: str, picture: Path) -> None:
    """Write what TensorBoard shows of losses and previews, without its settings."""
    with open_browser() as browser:
        page = WatchedPage(browser, viewport=TENSORBOARD, color_scheme="light").page
        page.goto(f"{address}/#timeseries")
        page.wait_for_selector("text=Settings")
        page.get_by_role("button", name="Settings").first.click()
        page.get_by_role("combobox", name="Filter tags (regex)").fill(TAGS)
        page.keyboard.press("Tab")  # closes the list of suggestions
        page.wait_for_timeout(15_000)  # it draws when its data come
        save(page, picture)


def shoot_runs(folder: Path, one: str, first: str, second: str, drawn: str) -> None:
    """Write the pictures of the page of runs."""
    with open_browser() as browser, serving(folder) as (address, _):
        page = WatchedPage(browser, viewport=DESKTOP, color_scheme="light").page
        page.goto(address)
        page.wait_for_selector("table.runs tbody tr")
        runs = page.evaluate("fetch('api/runs').then((answer) => answer.json())")
        ids = {run["name"]: run["id"] for run in runs}
        counted = (
            "[...document.querySelectorAll('table.runs tbody tr')].every((row) => /\\d (k|M|G)B/.test(row.innerText))"
        )
        until(page, counted)  # the space on the disk
        save(page, "runs", "table.runs tbody tr")
        page = WatchedPage(browser, viewport=DESKTOP, color_scheme="light").page
        page.goto(f"{address}#/run/{ids[one]}")
        page.wait_for_selector("unfog-chart canvas")
        page.wait_for_timeout(500)
        page.evaluate("document.getElementById('Curves').scrollIntoView()")
        save(page, "curves", "unfog-chart")
        page = WatchedPage(browser, viewport=DESKTOP, color_scheme="dark").page
        page.goto(f"{address}#/compare/{ids[first]},{ids[second]}")
        page.wait_for_selector("unfog-chart canvas")
        save(page, "compare-dark", "unfog-chart")
        page = WatchedPage(browser, viewport=PHONE, color_scheme="light").page
        page.goto(f"{address}#/run/{ids[one]}")
        page.wait_for_selector("unfog-chart canvas")
        page.wait_for_timeout(500)
        page.evaluate("document.getElementById('Samples').scrollIntoView()")
        save(page, "phone")
        for scheme, name in (("light", "playground"), ("dark", "playground-dark")):
            page = WatchedPage(browser, viewport={**DESKTOP, "height": 1000}, color_scheme=scheme).page
            page.goto(f"{address}#/draw/{ids[drawn]}")
            draw(page, dark=scheme == "dark")
            save(page, name)


def draw(page, dark: bool) -> None:
    """Draw pictures, and look at a step half-way; in the dark, paint over most of one, and draw that part anew."""
    state = "document.querySelector('unfog-playground').job"
    page.wait_for_selector(".controls button.accent")
    page.locator("[aria-label=Prompt] input").fill("thumbs up" if dark else "medium dark skin")
    page.click(".controls button.accent")
    until(page, f"{state}?.state === 'done'")
    if not dark:
        page.focus(".scrub input")
        for _ in range(9):
            page.keyboard.press("ArrowLeft")
        return
    page.click("text=Paint into it")
    page.wait_for_selector(".mask canvas")
    box = page.locator(".mask canvas").bounding_box()
    x, y, width, height = (box[name] for name in ("x", "y", "width", "height"))
    page.mouse.move(x + width * 0.1, y + height * 0.3)
    page.mouse.down()
    for row in range(9):
        for side in (0.1, 0.9) if row % 2 == 0 else (0.9, 0.1):
            page.mouse.move(x + width * side, y + height * (0.3 + 0.075 * row), steps=12)
    page.mouse.up()
    before = page.evaluate(f"{state}.job")
    page.locator("[aria-label=Prompt] input").fill("")
    page.click(".controls button.accent")
    until(page, f"{state}.job !== {before} && {state}.state === 'done'")
    page.evaluate("scrollTo(0, 0)")


if __name__ == "__main__":
    if len(sys.argv) > 4:
        shoot_runs(Path(sys.argv[1]), *sys.argv[2:])
    elif sys.argv[1].startswith("http"):
        shoot_tensorboard(sys.argv[1], Path(sys.argv[2]))
    else:
        shoot_file(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
