"""The page in a real Chromium: live, without a server, by keyboard, on a phone, and by the rules of axe."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'unfog[dev]'")
pytest.importorskip("starlette", reason="starlette is not installed: pip install 'unfog[serve]'")
pytest.importorskip("orjson", reason="orjson is not installed: pip install 'unfog[serve]'")

from browsers import IN_A_BROWSER, WatchedPage, axe_violations, open_browser, serving, until
from conftest import NETWORK, few_images
from faults.mounts import SmallDisk
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.reporting.image_grids import grid
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.reporting.report import write_report
from waiting import wait_until

pytestmark = [pytest.mark.slow, *IN_A_BROWSER]
CANVASES = "document.querySelectorAll('unfog-chart canvas').length"
# Whether every chart that is seen has pixels of a curve, rather than an empty frame.
DRAWN = """[...document.querySelectorAll('unfog-chart canvas')].every((canvas) => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, colours = new Set();
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) colours.add(String(pixels.slice(i, i + 3)));
  return colours.size > 5;
})"""

# Messages of the system are noted, as there is no desktop to show them.
NOTIFICATIONS = """window.told = []; window.Notification = class {
  static permission = 'default';
  static async requestPermission() { return (this.permission = 'granted'); }
  constructor(title) { told.push(title); }
};"""


def make_run(path, lr, steps=200):
    """A run folder as training writes it, with a trouble, previews and numbers with their errors."""
    rng = np.random.default_rng(round(lr * 1e6))
    with Recorder(path, Log(every=1), total=steps) as run:
        run.event("choice", 0, name="precision", value="bf16", reason="the <i>hardware</i> has it")
        run.event("started", 0, steps=steps, device="cpu")
        for step in range(2, steps + 1, 2):
            loss = 0.3 + 1 / step + 0.05 * rng.random()
            values = {"gradient_norm": 1 + rng.random(), "lr": lr, "images_per_second": 100.0, "data_wait": 0.01}
            run.log(step, step * 8, loss=loss, loss_by_level=(loss * rng.random(10)).tolist(), **values)
            if step % 50 == 0:
                run.log(step, step * 8, held_out_loss=loss * 1.1, kid=loss / 9, kid_error=0.004)
                pixels = rng.integers(0, 255, (9, 16, 16), np.uint8)
                run.log_image(step, "samples", grid(pixels, gap=0))
        run.event("rolled_back", 100, reason="the loss was not finite", to=50, lr=lr / 2)
        run.event("finished", steps)
    (path / "config.toml").write_text(to_toml(Config(source="fashion")).replace("lr = 0.0", f"lr = {lr}", 1))
    return path


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, lr in (("first", 0.002), ("second", 0.001)):
        make_run(folder / name, lr)
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with serving(runs) as (found, _):
        yield found


def ids_of(page):
    return page.evaluate("fetch('api/runs').then((answer) => answer.json())")


def views(page, address):
    """Address of each view, by name."""
    page.goto(address)
    page.wait_for_selector("table.runs")
    ids = [str(run["id"]) for run in ids_of(page)]
    return {"list": "#/", "run": f"#/run/{ids[0]}", "compare": f"#/compare/{','.join(ids)}", "start": "#/start"}


def settle(page):
    page.wait_for_selector("table.runs, unfog-chart canvas, .fields .field")
    page.wait_for_timeout(300)


def test_a_report_opens_from_its_folder_and_asks_for_nothing(browser, runs):
    watched = WatchedPage(browser)
    page = watched.page
    page.goto(write_report(runs / "first").as_uri())
    page.wait_for_selector("unfog-chart canvas")
    page.wait_for_timeout(300)
    assert page.evaluate(CANVASES) >= 5
    page.evaluate("document.querySelectorAll('unfog-chart').forEach((chart) => { chart.seen = true; chart.redraw(); })")
    page.wait_for_timeout(200)
    assert page.evaluate(DRAWN)
    assert page.inner_text("h1") == "first"
    assert "the <i>hardware</i> has it" in page.inner_text("main")
    assert "Remedy: " in page.inner_text("main")
    assert not page.query_selector("unfog-ask, unfog-form")  # without a server there is nothing to press
    page.check("input[type=radio] >> nth=4", force=True)  # difference
    assert page.evaluate("document.querySelectorAll('.stage img').length") == 2
    assert watched.troubles == []
    assert [url for url in watched.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.exhaustive)])
def test_axe_finds_nothing(browser, address, runs, scheme):
    watched = WatchedPage(browser, color_scheme=scheme)
    page = watched.page
    found = {}
    for name, place in views(page, address).items():
        page.goto(f"{address}{place}")
        settle(page)
        page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
        page.wait_for_timeout(500)
        found[name] = axe_violations(page)
    page.goto(write_report(runs / "first").as_uri())
    settle(page)
    found["report"] = axe_violations(page)
    assert found == {name: [] for name in found}
    assert watched.troubles == []


@pytest.mark.exhaustive
def test_a_phone_needs_no_horizontal_scroll(browser, address):
    page = WatchedPage(browser, viewport={"width": 360, "height": 740}).page
    for name, place in views(page, address).items():
        page.goto(f"{address}{place}")
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name


def test_all_is_reached_by_keyboard(browser, address):
    page = WatchedPage(browser).page
    page.goto(address)
    page.wait_for_selector("table.runs")
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )
    assert {"Skip to the content", "Search runs", "Compare first", "first"} <= set(order)
    page.focus("a:text-is('first')")
    page.keyboard.press("Enter")
    page.wait_for_selector("unfog-chart canvas")
    page.focus("unfog-chart .plot")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    said = "document.activeElement.getAttribute('aria-valuetext')"
    page.keyboard.press("Home")
    first = page.evaluate(said)
    assert first.startswith("at step 2")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(said).startswith("at step 6")
    page.keyboard.press("e")
    until(page, "document.activeElement.getAttribute('aria-valuetext').includes('rolled back')")
    page.keyboard.press("+")
    until(page, "location.hash.includes('zoom=')")
    page.keyboard.press("0")
    until(page, "!location.hash.includes('zoom=')")


@pytest.mark.exhaustive
def test_memory_and_disk_are_charts_where_they_were_recorded(browser, address, runs, tmp_path):
    page = WatchedPage(browser).page
    heads = "[...document.querySelectorAll('unfog-chart h3')].map((one) => one.textContent)"
    with Recorder(tmp_path / "new", Log(every=1), total=9) as run:
        for step in range(1, 10):
            run.log(step, step * 8, loss=1 / step, memory_mib=900.0 + step, memory_device_mib=70.5, disk_free_mib=1e5)
    shown = {}
    for folder in (runs / "first", tmp_path / "new"):
        page.goto(write_report(folder).as_uri())
        page.wait_for_selector("unfog-chart canvas")
        shown[folder.name] = page.evaluate(heads)
    assert {"Memory, MiB", "Free on the disk, MiB"} <= set(shown["new"])
    assert not [head for head in shown["first"] if "emory" in head or "disk" in head]  # of before these were logged
    legend = page.inner_text("unfog-chart:has-text('Memory, MiB') .legend")
    assert "process 909" in legend
    assert "GPU, peak 70.5" in legend


@pytest.mark.exhaustive
def test_two_runs_are_compared(browser, address):
    watched = WatchedPage(browser)
    page = watched.page
    page.goto(address)
    page.check("[aria-label='Compare first']")
    page.check("[aria-label='Compare second']")
    page.click("text=Compare 2")
    page.wait_for_selector("unfog-chart canvas")
    assert page.inner_text(".legend >> nth=0").count("first") == 2  # loss and held-out
    assert "optimizer.lr" in page.inner_text("main")
    page.select_option("text=over", "images")
    assert "x=images" in page.evaluate("location.hash")
    page.focus(".slider input >> nth=0")
    page.keyboard.press("Home")
    assert page.inner_text(".slider b >> nth=0") == "50"  # the first preview
    page.check("input[type=radio] >> nth=1", force=True)  # wiper
    assert page.inner_text(".slider b >> nth=1") == "50"  # one slider for all runs
    assert page.evaluate("getComputedStyle(document.querySelector('.over img')).clipPath") == "inset(0px 0px 0px 50%)"
    hash_before = page.evaluate("location.hash")
    page.reload()
    page.wait_for_selector(".stage.wiper .over img")
    assert page.evaluate("location.hash") == hash_before
    assert watched.troubles == []


@pytest.mark.exhaustive
def test_a_view_is_kept_as_a_file(browser, address, tmp_path):
    page = WatchedPage(browser).page
    page.goto(address)
    page.click("a:text-is('second')")
    page.wait_for_selector("unfog-chart canvas")
    with page.expect_download() as download:
        page.click("text=Keep this view")
    download.value.save_as(tmp_path / "kept.html")
    again = WatchedPage(browser)
    again.page.goto((tmp_path / "kept.html").as_uri())
    again.page.wait_for_selector("unfog-chart canvas")
    assert again.page.inner_text("h1") == "second"
    assert again.page.evaluate(DRAWN)
    assert again.page.evaluate("[...document.images].filter((i) => i.src.startsWith('data:image/webp')).length") >= 1
    with again.page.expect_download() as download:  # and from there once more
        again.page.click("text=Keep this view")
    download.value.save_as(tmp_path / "twice.html")
    assert json.loads(re.search(r'id="embedded">(.*?)</script>', (tmp_path / "twice.html").read_text())[1])["runs"]
    assert again.troubles == []


class Impostor(BaseHTTPRequestHandler):
    """Another user's program at the port: it notes what it gets, and answers every request as if all were well."""

    paths: ClassVar[list[str]] = []

    def do_GET(self):
        self.paths.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"start": "0" * 32, "proof": "0" * 64}).encode())

    def log_message(self, *_):
        pass


def test_an_open_page_gives_its_secret_to_no_other_program_and_finds_its_server_again(browser, runs):
    watched = WatchedPage(browser)
    page = watched.page
    with serving(runs) as (address, process):
        port = int(re.search(r":(\d+)/", address)[1])
        page.goto(f"{address}#/start")
        page.fill("unfog-start .field input >> nth=0", "7")
        page.wait_for_function("document.querySelector('unfog-page').data.key")
        process.kill()
        process.wait()
        page.wait_for_selector(".banner")
    secret = address.split("/")[-2]
    with ThreadingHTTPServer(("127.0.0.1", port), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever).start()
        wait_until(lambda: len(Impostor.paths) > 1)
        page.evaluate("document.querySelector('unfog-page').data.get('api/runs').catch(() => {})")
        page.evaluate("new Image().src = document.querySelector('unfog-page').data.picture(1, 'contact')")
        page.wait_for_timeout(300)
        impostor.shutdown()
    assert all(re.fullmatch(r"/hello\?nonce=[0-9a-f]{32}", path) for path in Impostor.paths)
    with serving(runs, port) as (again, _):
        assert again.split("/")[-2] != secret
        page.wait_for_selector(".banner", state="detached")
        assert page.url == f"{again}#/start"
        assert page.input_value("unfog-start .field input >> nth=0") == "7"  # nothing was loaded anew
        page.goto(f"{again}#/draw")  # by the hash alone; the playground was not loaded before
        page.wait_for_selector("unfog-playground")
        page.goto(f"{again}#/")
        page.click("a:text-is('first')")
        page.wait_for_selector("unfog-chart canvas")


def test_the_browser_opens_the_page_and_no_process_has_its_secret_as_a_word(browser, runs, tmp_path):
    script, words = tmp_path / "browser", tmp_path / "words"
    script.write_text(f'#!/bin/sh\necho "$@" > {words}.new && mv {words}.new {words}\n')
    script.chmod(0o755)
    command = [sys.executable, "-m", "unfog", "serve", str(runs), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": f"{script} %s"}
    )
    try:
        address = process.stdout.readline().strip()
        wait_until(words.exists)
        file = Path(words.read_text().strip().removeprefix("file://"))
        secret = address.split("/")[-2]
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert secret not in words.read_text() + file.read_text()
        once = re.search(r"http://[^\"]+", file.read_text())[0]
        page = WatchedPage(browser).page
        page.goto(file.as_uri())
        page.wait_for_selector("table.runs")
        assert page.url.split("#")[0] == address
        again = WatchedPage(browser).page  # somebody who has seen the address of the file
        again.goto(once)
        assert "opens the page once" in again.content()
        assert not file.parent.exists()
    finally:
        process.terminate()
        process.wait()


@contextmanager
def training_live(folder, *flags):
    """Train the run `live` in a folder of runs until the end of the `with`, from its first two rows on."""
    command = [sys.executable, "-m", "unfog", "train", few_images(), "--out", str(folder / "live")]
    command += ["--network", NETWORK, "--steps", "100000", "--batch", "4", "--size", "8", "--log.every", "5"]
    command += ["--evaluate.every", "-1", "--preview.every", "-1", *flags]
    training = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ)
    try:
        record = folder / "live" / "metrics.jsonl"
        wait_until(lambda: record.exists() and record.read_bytes().count(b"\n") > 1, 120)
        yield training
    finally:
        training.kill()
        training.wait()


@pytest.mark.exhaustive
def test_a_run_is_watched_and_steered(browser, tmp_path):
    """Train live: the curve grows by itself, a preview comes when asked for, and Stop stops."""
    folder = tmp_path / "runs"
    folder.mkdir()
    with training_live(folder) as training, serving(folder) as (address, _):
        watched = WatchedPage(browser)
        page = watched.page
        page.add_init_script(NOTIFICATIONS)
        page.goto(address)
        page.click("a:text-is('live')")
        page.wait_for_selector("unfog-chart canvas", timeout=180_000)
        rows = "document.querySelector('unfog-run').store.rows"
        before = page.evaluate(rows)
        until(page, f"{rows} > {before} + 5")
        asked = len([url for url in watched.requests if "/metrics?from=0" in url])
        assert asked == 1  # all of them once, then only what is new
        previews = len(list((folder / "live" / "samples").glob("*.png")))
        page.click("button:text-is('Preview now')")
        wait_until(lambda: len(list((folder / "live" / "samples").glob("*.png"))) > previews)
        # It was started elsewhere: its messages come from its folder, and new ones by themselves.
        page.click("text=Output of the run")
        page.wait_for_selector("unfog-task pre:has-text('training')")
        page.click("text=Tell me when runs end")
        page.wait_for_selector("text=Tell me when runs end ✓")
        page.click("button:text-is('Stop')")
        page.wait_for_selector(".run-head .state.stopped", timeout=180_000)
        until(page, "told.includes('live: stopped')")
        page.wait_for_selector("unfog-task pre:has-text('stopped at step')")
        assert training.wait(60) == 3  # stopped on request
        assert watched.troubles == []


def test_messages_that_come_together_with_the_end_of_a_run_are_shown(browser, tmp_path):
    run = make_run(tmp_path / "live", 0.002, steps=20)
    log, events = run / "console.log", run / "events.jsonl"
    log.write_text("training\n")
    page = WatchedPage(browser).page
    with serving(tmp_path) as (address, _):
        page.goto(address)
        page.click("a:text-is('live')")
        page.click("text=Output of the run")
        page.wait_for_selector("unfog-task pre:has-text('training')")
        log.write_text("training\nstopped at step 20\n")  # no tick of the server is between the two
        events.write_text(f"{events.read_text()}{events.read_text().splitlines()[-1].replace('finished', 'stopped')}\n")
        page.wait_for_selector("unfog-task pre:has-text('stopped at step')", timeout=180_000)


def pressed(page, button, command, within="main"):
    """Press a button that starts a command, wait for its end, and return what it wrote."""
    page.click(f"{within} button:text-is('{button}')")
    page.wait_for_selector(f"{within} unfog-task .bar:has-text('{command}'):has-text('done')", timeout=300_000)
    return page.inner_text(f"{within} unfog-task pre")


def fill_settings(page, kind, **settings):
    for name, value in settings.items():
        page.fill(f"[id='f-{kind}-{name.replace('__', '.')}']", value)
    page.keyboard.press("Tab")


@pytest.mark.exhaustive
def test_a_run_is_planned_checked_started_checked_again_and_resumed_by_buttons_in_two_tabs(browser, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    with serving(folder, 0, "--source", few_images()) as (address, _):
        first, second = WatchedPage(browser), WatchedPage(browser)
        page, other = first.page, second.page
        page.goto(address)
        page.wait_for_selector("text=No runs yet")
        page.click("nav >> text=Start a run")
        page.wait_for_selector("unfog-form .field")
        page.select_option("main select >> nth=0", index=1)  # the source that was given
        fill_settings(page, "train", network="nonsense")
        page.wait_for_selector(".error:has-text('is unknown; give one of')")
        assert page.is_disabled("button.accent")
        fill_settings(page, "train", network=NETWORK, data__size="8", training__steps="20", training__batch="4")
        page.fill("text=Name of the run", "mine")
        page.keyboard.press("Tab")
        page.wait_for_selector("form .command:has-text('runs/mine'):has-text('--steps=20')")
        assert "memory" in pressed(page, "Plan time and memory", "unfog plan")
        page.wait_for_selector("form .command:has-text('unfog train')")
        assert "fine" in pressed(page, "Check images and settings", "unfog doctor")
        page.click("form button.accent")
        page.click("text=See its curves")
        page.wait_for_selector(".run-head .state.finished", timeout=300_000)
        assert page.inner_text("h1") == "mine"
        run = page.evaluate("location.hash")
        assert page.get_attribute("nav a:text-is('Draw')", "href") == run.replace("run", "draw")
        other.goto(f"{address}{run}")
        other.wait_for_selector("unfog-chart canvas")
        pressed(page, "Run the doctor", "unfog doctor", ".steering")
        assert other.query_selector("unfog-task:has-text('unfog doctor')") is None  # a tab shows what it has asked for
        other.click("text=Output of the run")  # and what the run itself has written
        other.wait_for_selector("unfog-task pre:has-text('training')")
        page.click("text=Resume, with changed settings")
        page.wait_for_selector("unfog-form .field")
        assert page.get_attribute("[id='f-resume-training.steps']", "placeholder") == "20"  # what the run has
        fill_settings(page, "resume", training__steps="30")
        page.wait_for_selector("form .command:has-text('--steps=30')")
        page.click("form button.accent")
        for tab in (page, other):
            tab.wait_for_selector(".run-head p:has-text('30 of 30 steps')", timeout=300_000)
            tab.wait_for_selector(".run-head .state.finished", timeout=300_000)
        assert second.troubles == []
        # The unknown network, and the run that is opened before it is there.
        assert all("status of 400" in trouble or "status of 404" in trouble for trouble in first.troubles)


@pytest.mark.exhaustive
def test_the_best_run_comes_first_choices_are_kept_and_the_end_is_explained(browser, address, runs):
    page = WatchedPage(browser).page
    page.goto(address)
    page.click("th.best button")
    best = page.evaluate("[...document.querySelectorAll('td.best')].map((cell) => parseFloat(cell.textContent))")
    assert best == sorted(best)
    page.check("[aria-label='Compare first']")
    page.check("[aria-label='Compare second']")
    page.click("text=Compare 2")
    page.wait_for_selector("unfog-chart canvas")
    page.go_back()
    page.wait_for_selector("text=Compare 2")
    assert page.evaluate("document.querySelectorAll('tbody input:checked').length") == 2
    page.goto(f"{address}#/run/{ids_of(page)[0]['id']}")
    page.wait_for_selector("unfog-chart canvas")
    assert page.query_selector(".ending") is None  # it has finished
    status = "{...document.querySelector('unfog-run').detail.status, state: 'killed', detail: 'evaluation'}"
    change = f"run.detail = {{...run.detail, checkpoints: [100], status: {status}}}"
    page.evaluate(f"(() => {{ const run = document.querySelector('unfog-run'); {change}; }})()")
    text = page.inner_text(".ending")
    assert "Last it did: evaluation" in text
    assert "from its checkpoint of step 100" in text
    assert page.inner_text(".ending code").startswith("unfog resume ")


@pytest.mark.exhaustive
def test_a_full_disk_is_said_with_its_remedy_and_the_page_recovers_when_there_is_room(browser, tmp_path):
    disk = SmallDisk(tmp_path / "disk", "size=40m")
    folder = disk.path / "runs"
    folder.mkdir()
    try:
        with training_live(folder, "--checkpoint.every", "40"), serving(folder) as (address, _):
            watched = WatchedPage(browser)
            page = watched.page
            page.goto(address)
            page.click("a:text-is('live')")
            page.wait_for_selector("unfog-chart canvas", timeout=180_000)
            filler = disk.fill()
            page.wait_for_selector(".run-head .line:has-text('waiting for disk space')", timeout=180_000)
            trouble = page.inner_text("tr:has-text('disk_full') >> nth=0")
            assert "the disk is full: a checkpoint needs" in trouble
            assert "Remedy: free some space: the run waits" in trouble
            checkpoints = "document.querySelector('unfog-run').detail.checkpoints.at(-1)"
            before = page.evaluate(checkpoints)
            filler.unlink()
            until(page, f"{checkpoints} > {before}", 120)
            page.wait_for_selector(".run-head .line:has-text('training')", timeout=180_000)
            assert watched.troubles == []
    finally:
        disk.remove()


@pytest.mark.exhaustive
def test_curves_are_smoothed_before_they_are_thinned_and_keep_their_spikes(browser, address):
    page = WatchedPage(browser).page
    page.goto(address)
    found = page.evaluate("""async () => {
      const {smooth, thin, logTicks, sentence} = await import('./static/curves.js');
      const x = Array.from({length: 50000}, (_, i) => i), y = x.map((i) => Math.sin(i / 5000));
      y[34567] = 9;
      y[45678] = -9;
      const kept = thin(x, y, 0, 50000, 300), near = thin(x, y, 34000, 34900, 300);
      const line = smooth(x, x.map((i) => i % 2), 100);
      return {
        kept: kept.length,
        rising: kept.every((one, i) => !i || one > kept[i - 1]),
        spikes: [34567, 45678].every((i) => kept.includes(i)), ends: [kept[0], kept.at(-1)],
        near: near.length, constant: smooth(x, x.map(() => 3), 10).every((v) => Math.abs(v - 3) < 1e-9),
        middle: line.slice(5000).every((v) => Math.abs(v - 0.5) < 0.01), none: smooth(x, y, 0) === y,
        ticks: logTicks(0.01, 100), few: logTicks(0.3, 0.4).length,
        said: sentence('loss', 'step', [1, 2, 3], [2, 0.5, 1]),
      };
    }""")
    assert 600 < found["kept"] <= 1204
    assert found["near"] == 902  # few enough to be exact, with a point beside each end
    assert found["ends"] == [0, 49999]
    assert all(found[name] for name in ("rising", "spikes", "constant", "middle", "none"))
    assert found["ticks"] == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert 3 <= found["few"] <= 9
    assert found["said"] == "loss fell from 2 to 1 up to step 3; lowest 0.5 at step 2, highest 2 at step 1."


@pytest.mark.exhaustive
def test_a_form_finds_settings_by_the_words_of_explain(browser, address):
    page = WatchedPage(browser).page
    page.goto(f"{address}#/start")
    page.wait_for_selector(".fields .field")
    for word, setting in (("caption", "data.condition"), ("prompt", "data.condition"), ("grad clip", "training.clip")):
        page.fill("input[type=search]", word)
        page.wait_for_selector(f".field:has-text('{setting}')")


@pytest.mark.exhaustive
def test_a_warning_takes_the_place_of_one_with_other_figures(browser, address):
    page = WatchedPage(browser).page
    page.goto(address)
    found = page.evaluate("""async () => {
      const {troublesOf} = await import('./static/panels.js');
      const one = (kind, cause) => ({kind, cause, trouble: kind !== 'started'});
      return troublesOf([
        one('warning', '247 steps are few'), one('rolled_back', 'step 5'), one('started', ''), one('warning', 'grey'),
        one('rolled_back', 'step 6'), one('warning', '1,143 steps are few'),
      ]).map((event) => event.cause);
    }""")
    assert found == ["step 5", "grey", "step 6", "1,143 steps are few"]


@pytest.mark.exhaustive
def test_a_long_run_comes_thinned_and_is_exact_where_it_is_zoomed(browser, tmp_path):
    folder = make_run(tmp_path / "runs" / "long", 0.002)
    rows = [
        json.dumps({"step": i, "images": i * 8, "seconds": i / 9, "loss": 9.0 if i == 77_777 else 1.0 + i % 7 / 10})
        for i in range(120_000)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    with serving(tmp_path / "runs") as (address, _):
        page = WatchedPage(browser).page
        page.goto(address)
        page.click("a:text-is('long')")
        page.wait_for_selector("unfog-chart canvas", timeout=180_000)
        raw = "document.querySelector('unfog-chart').series[0]"
        assert page.evaluate(f"{raw}.x.length") <= 4000
        assert page.evaluate(f"Math.max(...{raw}.high)") == 9
        page.evaluate("import('./static/zoom.js').then((module) => module.zoom([77700, 77900]))")
        until(page, f"{raw}.x.length && !{raw}.high")
        assert page.evaluate(f"{raw}.y[{raw}.x.indexOf(77777)]") == 9
        assert page.evaluate(f"{raw}.x.filter((x) => x >= 77700 && x <= 77900).length") == 201
