"""The playground in a real Chromium: see every step, cancel, scrub, inpaint, compare; and a worker that is killed."""

import os
import signal

import numpy as np
import pytest

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'unfog[dev]'")
pytest.importorskip("starlette", reason="starlette is not installed: pip install 'unfog[serve]'")
pytest.importorskip("orjson", reason="orjson is not installed: pip install 'unfog[serve]'")

import unfog
from browsers import IN_A_BROWSER, WatchedPage, axe_violations, open_browser, serving, until
from conftest import NETWORK, few_images

pytestmark = [pytest.mark.slow, *IN_A_BROWSER]
PLAYGROUND = "document.querySelector('unfog-playground')"
STATE = f"{PLAYGROUND}.job?.state"
_PIXELS = """[...(() => {
  const canvas = document.querySelector('.drawn canvas');
  return canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
})()]"""
_CANCEL = f"""(() => {{
  const done = {PLAYGROUND}.job.done;
  [...document.querySelectorAll('.controls button')].find((one) => one.textContent === 'Cancel').click();
  return done;
}})()"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with four checkpoints and EMA snapshots."""
    settings = {"network": NETWORK, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"images": 2}}
    more = {"checkpoint": {"every": 2, "milestones": 2}, "ema_snapshots": {"every": 2}, "sampler": {"steps": 6}}
    return unfog.train(few_images(), out=tmp_path_factory.mktemp("runs") / "tiny", steps=6, **settings, **more)


@pytest.fixture(scope="module")
def address(run):
    with serving(run.path.parent) as (found, _):
        yield found


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture
def page(browser, address):
    watched = WatchedPage(browser, viewport={"width": 1200, "height": 1000})
    watched.page.allowed = watched.allowed = []
    opened(watched.page, address)
    yield watched.page
    # Reading pixels back is what these tests do, and not the page.
    assert [trouble for trouble in watched.troubles if "readback" not in trouble] == watched.allowed
    assert [url for url in watched.requests if not url.startswith((address, "blob:", "data:"))] == []
    watched.context.close()


def opened(page, address):
    page.goto(f"{address}#/draw")
    page.wait_for_selector(".controls button.accent", timeout=180_000)
    # The page opens the newest drawing of the run, if there is one, once it has the list.
    mine = f"{PLAYGROUND}.jobs.some((one) => String(one.run) === String({PLAYGROUND}.run))"
    until(page, f"{PLAYGROUND}.about && ({PLAYGROUND}.job || !{mine})")


def fill(page, label, value):
    page.fill(f".controls label:has-text('{label}') input", str(value))


def draw(page, state="done", **settings):
    """Draw with settings by the names of their fields, and wait for the state."""
    for label, value in settings.items():
        fill(page, label, value)
    before = page.evaluate(f"{PLAYGROUND}.job?.job ?? 0")
    page.click(".controls button.accent")
    until(page, f"{PLAYGROUND}.job?.job !== {before} && {STATE} === '{state}'")
    return page.evaluate(f"{PLAYGROUND}.job")


def shown(page):
    """Pixels of the first picture."""
    return page.evaluate(_PIXELS)


def test_every_step_is_seen_and_kept_and_time_can_be_scrubbed(page):
    page.evaluate("window.seen = []; document.addEventListener('painted', (e) => seen.push(e.detail.split('?')[0]))")
    job = draw(page, Pictures=3, Steps=12)
    until(page, f"{PLAYGROUND}.job.kept_steps.length === 12")  # the page asks for those that it has not seen
    until(page, f"seen.includes('{job['job']}/pictures.webp')")  # the finished pictures come last
    seen = page.evaluate("[...new Set(seen)]")
    # While it was drawn. A slow machine paints few of the twelve: two were seen beside other work.
    assert any("/steps/" in path for path in seen), seen
    until(page, f"{PLAYGROUND}.about.worker.pid > 0")
    finished = shown(page)
    page.focus(".scrub input")
    page.keyboard.press("Home")  # pure noise
    until(page, "document.querySelector('.drawn canvas').getAttribute('aria-label').includes('step 1, noise')")
    until(page, f"JSON.stringify({finished}) !== JSON.stringify({_PIXELS})")
    guess = shown(page)
    page.check("text=noisy state", force=True)
    until(page, f"JSON.stringify({guess}) !== JSON.stringify({_PIXELS})")
    # The same noise at an earlier checkpoint: another picture at the end, the same noise at the start.
    noise = shown(page)
    page.focus(".controls input[type=range]")
    page.keyboard.press("Home")
    until(page, f"{PLAYGROUND}.job.settings.checkpoint === 0 && {STATE} === 'done'")
    until(page, f"JSON.stringify({noise}) === JSON.stringify({_PIXELS})")
    page.click("text=Undo")
    until(page, f"{PLAYGROUND}.job.job === {job['job']}")
    page.click("text=Redo")
    until(page, f"{PLAYGROUND}.job.settings.checkpoint === 0")
    again = page.evaluate(f"{PLAYGROUND}.jobs.length")
    page.click(".controls button.accent")  # what was drawn is not drawn again
    page.wait_for_timeout(500)
    assert page.evaluate(f"{PLAYGROUND}.jobs.length") == again
    assert "unfog sample" in page.text_content(".copies")
    page.reload()  # what was drawn is still there
    until(page, f"{PLAYGROUND}?.jobs.length === {again} && {STATE} === 'done'")


@pytest.mark.exhaustive
def test_a_drawing_is_cancelled_within_a_step(page):
    fill(page, "Steps", 1000)
    fill(page, "Pictures", 32)  # so that it lasts until the page shows it, even on a busy machine
    page.click(".controls button.accent")
    until(page, f"{STATE} === 'drawing' && {PLAYGROUND}.job.done > 2")
    done = page.evaluate(_CANCEL)
    until(page, f"{STATE} === 'cancelled'")
    # A step may have been under way, and another may have been computed before the page saw the one that it showed.
    assert page.evaluate(f"{PLAYGROUND}.job.done") <= done + 12
    fill(page, "Steps", 6)


@pytest.mark.exhaustive
def test_painting_into_a_picture_keeps_the_others_to_the_bit(page):
    draw(page, Pictures=2, Steps=6)
    page.click("text=Paint into it")
    page.wait_for_selector(".mask canvas")
    mask = "document.querySelector('unfog-mask')"
    box = page.locator(".mask canvas").bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 60, steps=4)
    page.mouse.up()
    painted = page.evaluate(f"{mask}.painted")
    assert painted > 20
    page.focus(".mask canvas")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    assert page.evaluate(f"{mask}.painted") > painted
    page.keyboard.press("z")
    assert page.evaluate(f"{mask}.painted") == painted
    page.keyboard.press("Shift+Z")
    assert page.evaluate(f"{mask}.painted") > painted
    page.keyboard.press("z")
    page.click("text=Eraser")
    page.mouse.move(box["x"] + 30, box["y"] + 30)
    page.mouse.down()
    page.mouse.up()
    assert page.evaluate(f"{mask}.painted") < painted
    fill(page, "Repeats", 2)
    job = draw(page)
    assert job["edit"] == {"image": True, "mask": True}
    until(page, f"{PLAYGROUND}.job.kept?.equal === true")
    page.wait_for_selector(".kept:has-text('equal to the bit')")
    assert page.evaluate(f"{PLAYGROUND}.job.kept.pixels") + page.evaluate(f"{mask}.painted") == 28 * 28
    page.wait_for_selector("text=where the 2 fillings disagree")
    page.click("text=Start from noise again")


@pytest.mark.exhaustive
def test_a_mask_has_the_width_and_height_of_the_pictures(browser, tmp_path):
    settings = {"network": NETWORK, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"every": -1}}
    pictures = np.random.default_rng(0).integers(0, 256, (12, 16, 32, 3), np.uint8)
    run = unfog.train(pictures, out=tmp_path / "runs/wide", size="32x16", steps=1, sampler={"steps": 3}, **settings)
    with serving(run.path.parent) as (address, _):
        watched = WatchedPage(browser, viewport={"width": 1200, "height": 1000})
        page = watched.page
        opened(page, address)
        draw(page, Pictures=2, Steps=3)
        until(page, "document.querySelector('.drawn canvas').width === 32")
        assert page.evaluate("document.querySelector('.drawn canvas').height") == 16
        page.click("text=Paint into it")
        page.wait_for_selector(".mask canvas")
        mask = "document.querySelector('unfog-mask')"
        assert page.evaluate(f"[{mask}.canvas.width, {mask}.canvas.height, {mask}.bits.length]") == [32, 16, 512]
        page.evaluate(f"{mask}.brush = 1")
        box = page.locator(".mask canvas").bounding_box()
        assert box["width"] == 2 * box["height"]
        page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3)  # the corner at the bottom right
        assert page.evaluate(f"[{mask}.painted, {mask}.bits[511]]") == [1, 1]
        job = draw(page)
        assert job["edit"] == {"image": True, "mask": True}
        until(page, f"{PLAYGROUND}.job.kept?.equal === true")
        assert page.evaluate(f"{PLAYGROUND}.job.kept.pixels") == 511
        watched.context.close()


@pytest.mark.exhaustive
def test_a_finger_paints_and_two_fingers_zoom(browser, address):
    watched = WatchedPage(browser, has_touch=True, viewport={"width": 400, "height": 900})
    page = watched.page
    opened(page, address)
    draw(page, Pictures=1, Steps=3)
    page.click("text=Paint into it")
    page.wait_for_selector(".mask canvas")
    page.locator(".mask canvas").scroll_into_view_if_needed()
    box = page.locator(".mask canvas").bounding_box()
    fingers = watched.context.new_cdp_session(page)

    def touch(kind, *places):
        points = [{"x": box["x"] + x, "y": box["y"] + y, "id": i} for i, (x, y) in enumerate(places)]
        fingers.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    mask = "document.querySelector('unfog-mask')"
    for kind, places in (("Start", [(40, 40)]), ("Move", [(90, 60)]), ("Move", [(140, 60)]), ("End", [])):
        touch(kind, *places)
    until(page, f"{mask}.painted > 20")
    painted, zoom = page.evaluate(f"[{mask}.painted, {mask}.shownZoom]")
    steps = [[(60, 60)], [(60, 60), (100, 60)], [(40, 60), (120, 60)], [(20, 60), (140, 60)], []]
    for kind, places in zip(("Start", "Start", "Move", "Move", "End"), steps):
        touch(kind, *places)
    until(page, f"{mask}.shownZoom > {zoom}")
    assert page.evaluate(f"{mask}.painted") == painted  # what the first of two fingers touched is not painted
    page.click("text=Start from noise again")
    assert watched.troubles == [] or all("readback" in trouble for trouble in watched.troubles)
    watched.context.close()


@pytest.mark.exhaustive
def test_levels_are_dragged_and_moved_by_keys(page, address):
    run = page.evaluate(f"{PLAYGROUND}.run")
    page.goto(f"{address}#/draw/{run}")  # as from the page of a run
    page.reload()
    page.wait_for_selector(".controls button.accent")
    draw(page, Pictures=1, Steps=5)
    page.click("text=Levels of this drawing")
    page.click("text=Take these levels")
    page.wait_for_selector(".shares button")
    levels = f"{PLAYGROUND}.form.levels"
    before = page.evaluate(levels)
    assert len(before) == 5
    assert before == sorted(before, reverse=True)
    handle = page.locator(".shares button >> nth=2")
    handle.focus()
    page.keyboard.press("ArrowRight")
    until(page, f"{levels}[2] > {before[2]}")
    until(page, f"{PLAYGROUND}.job.settings.levels?.[2] === {levels}[2] && {STATE} === 'done'")  # it is drawn with them
    axis, box = page.locator(".shares").bounding_box(), handle.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(axis["x"] - 50, box["y"] + 5, steps=4)
    page.mouse.up()
    moved = page.evaluate(levels)
    assert moved[2] == pytest.approx(before[3] + 0.001)  # it stops before its neighbour
    assert moved == sorted(moved, reverse=True)
    until(page, f"{PLAYGROUND}.job.settings.levels?.[2] === {levels}[2] && {STATE} === 'done'")
    assert "--levels" in page.text_content(".copies")


@pytest.mark.exhaustive
def test_the_pictures_follow_the_width_of_the_ema_and_go_between_two_seeds(page):
    draw(page, Pictures=3, Steps=4)
    slider = ".controls label:has-text('EMA width') input"
    page.focus(slider)
    page.keyboard.press("End")
    page.wait_for_selector(".result .error:has-text('cannot be rebuilt')", timeout=180_000)  # of three snapshots
    page.fill(slider, "0.05")
    until(page, f"{PLAYGROUND}.job.settings.ema === 0.05 && {STATE} === 'done'")
    page.click("text=Use the run's EMA")
    until(page, f"{PLAYGROUND}.job.settings.ema === undefined && {STATE} === 'done'")
    page.click("text=Levels, interpolation, weights")
    fill(page, "To seed", 9)
    job = draw(page)
    assert job["settings"]["to_seed"] == 9
    assert "--to-seed 9" in page.text_content(".copies")


@pytest.mark.exhaustive
def test_settings_travel_inside_the_png(page, tmp_path):
    draw(page, Pictures=1, Steps=7)
    with page.expect_download() as saving:
        page.click("text=Save as PNG")
    saving.value.save_as(tmp_path / "saved.png")
    fill(page, "Steps", 3)
    page.set_input_files("input[type=file]", tmp_path / "saved.png")
    page.click("text=Take its settings")
    until(page, f"{PLAYGROUND}.form.steps === 7 && {PLAYGROUND}.form.n === 1")
    (tmp_path / "hostile.png").write_bytes(b"<svg onload=alert(1)>")
    page.set_input_files("input[type=file]", tmp_path / "hostile.png")
    page.wait_for_selector(".error:has-text('cannot be used')")
    page.allowed.append("Failed to load resource: the server responded with a status of 400 (Bad Request)")


@pytest.mark.exhaustive
def test_a_grid_over_two_settings(page):
    page.click("text=Grid of two settings")
    page.fill("[name=a-values]", "0 1")
    page.fill("[name=b-values]", "2 4")
    page.click("text=Draw the grid")
    until(page, "document.querySelectorAll('table.grid canvas').length === 4")
    until(page, "document.querySelector('table.grid canvas').width === 28")


@pytest.mark.exhaustive
def test_two_checkpoints_are_compared_blindly(page, run):
    fill(page, "Pictures", 2)
    page.click("text=Blind comparison")
    page.click("text=Draw 2 pairs")
    page.wait_for_selector("text=Pair 1 of 2", timeout=180_000)
    page.focus(".blind .pair + .bar button")
    page.keyboard.press("1")
    page.wait_for_selector("text=Pair 2 of 2")
    page.keyboard.press("0")
    page.wait_for_selector(".blind td:has-text(' to ')")
    assert (run.path / "blind-comparisons.jsonl").read_text().count("\n") == 2


@pytest.mark.exhaustive
def test_copies_are_searched(page):
    draw(page, Pictures=1, Steps=5)
    page.click("text=Is it a copy?")
    page.wait_for_selector("text=nearest training images", timeout=180_000)
    page.wait_for_selector("text=This is not a copy")


@pytest.mark.exhaustive
def test_the_page_recovers_from_a_killed_worker(page):
    page.fill("#seed", "41")  # of no other test: what was drawn before needs no worker
    draw(page, Pictures=1, Steps=2)
    until(page, f"{PLAYGROUND}.about.worker.pid > 0")
    page.evaluate(f"{PLAYGROUND}.data.post('api/worker/stop', {{}})")  # not by the button, after which the page reloads
    page.wait_for_selector("text=The worker is not running")
    draw(page, Pictures=1, Steps=4)
    until(page, f"{PLAYGROUND}.about.worker.pid > 0")
    pid = page.evaluate(f"{PLAYGROUND}.about.worker.pid")
    fill(page, "Steps", 900)
    fill(page, "Pictures", 32)  # so that it lasts until the page shows it, even on a busy machine
    page.click(".controls button.accent")
    until(page, f"{STATE} === 'drawing' && {PLAYGROUND}.job.done > 1")
    os.kill(pid, signal.SIGKILL)
    page.wait_for_selector("[role=alert]:has-text('signal 9')")
    fill(page, "Steps", 3)
    fill(page, "Pictures", 1)
    page.click("text=Draw again")
    until(page, f"{STATE} === 'done'")
    assert page.evaluate(f"{PLAYGROUND}.job.settings.steps") == 3


@pytest.mark.exhaustive
def test_axe_finds_nothing_and_a_phone_needs_no_horizontal_scroll(browser, address):
    for options in ({"color_scheme": "light"}, {"color_scheme": "dark", "viewport": {"width": 360, "height": 740}}):
        watched = WatchedPage(browser, **options)
        page = watched.page
        opened(page, address)
        page.fill("#seed", str(len(options)))
        draw(page, Pictures=2, Steps=4)
        page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
        found = {}
        for pane in ("Grid of two settings", "Blind comparison", "Pictures"):
            page.click(f".result button:has-text('{pane}')")
            found[pane] = axe_violations(page)
        page.click("text=Paint into it")
        page.wait_for_selector(".mask canvas")
        found["mask"] = axe_violations(page)
        assert found == {name: [] for name in found}
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        assert watched.troubles == []
        watched.context.close()
