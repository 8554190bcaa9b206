"""Views of the channels of previews in a real Chromium: in the page of a server, and in the report."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'unfog[dev]'")
pytest.importorskip("starlette", reason="starlette is not installed: pip install 'unfog[serve]'")
pytest.importorskip("orjson", reason="orjson is not installed: pip install 'unfog[serve]'")

from browsers import IN_A_BROWSER, WatchedPage, open_browser, serving
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.reporting.channel_sheets import encode_channels
from unfog.reporting.image_grids import grid
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.reporting.report import write_report
from unfog.values.colour_map import colour_table, with_checkers
from waiting import wait_until

pytestmark = [pytest.mark.slow, *IN_A_BROWSER]
PLANES = np.random.default_rng(3).integers(0, 256, (6, 5, 24, 16), np.uint8)
KNOWN = np.random.default_rng(4).random(PLANES.shape) < 0.7
KNOWN[:, 3:5] = True
PLANES[~KNOWN] = 0
THREE = PLANES[:, [4, 1, 2]].transpose(0, 2, 3, 1)
SCALE, GAP = 128 // 24, 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of five channels with two previews, and one of pictures."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fields", "pictures"):
        with Recorder(folder / name, Log(every=1), total=20) as run:
            for step in (10, 20):
                run.log(step, step * 8, loss=0.5)
                if name == "fields":
                    ends = [[-k - step, k, 1e3 * k + step] for k in range(5)]
                    run.keep_image(step, "channels", encode_channels(PLANES // (21 - step), ends, known=KNOWN))
                run.log_image(step, "samples", grid(PLANES[:, 0]))
            run.event("finished", 20)
        (folder / name / "config.toml").write_text(to_toml(Config(source="fields.npy")))
    return folder


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


def choose(page, number, value):
    """Choose a value of a select by its number: 0 is the view, and those after it are its colours or channels."""
    page.select_option(f".pictures .bar label select >> nth={number}", value)


def body_of(page, number):
    """The pixels of a picture that the page has painted; None of others."""
    source = page.evaluate(f"document.querySelectorAll('.stage img')[{number}]?.src") or ""
    if not source.startswith("data:image/png"):
        return None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB"))


def images_in(body):
    """The images in a picture, uint8 [6, H, W, 3]."""
    h, w = 24 * SCALE + GAP, 16 * SCALE + GAP
    places = [(i // 3 * h, i % 3 * w) for i in range(6)]
    return np.stack([body[y : y + h - GAP : SCALE, x : x + w - GAP : SCALE] for y, x in places])


def wait_for(page, images, number=0):
    """Wait until a picture has these images, each pixel of them, and return it."""
    wait_until(lambda: (body := body_of(page, number)) is not None and (images_in(body) == images).all(), 60)
    return body_of(page, number)


def check_views(page):
    """Choose a channel in grey, in viridis, and three channels, and compare each pixel with what is stored."""
    page.wait_for_selector(".pictures label:has-text('View')")
    choose(page, 0, "3")
    wait_for(page, PLANES[:, 3, ..., None])
    choose(page, 1, "viridis")
    body = wait_for(page, colour_table("viridis")[PLANES[:, 3]])
    assert len(body) == 2 * (24 * SCALE + GAP) + 30  # a bar with the values of its ends
    assert (body[-25, [0, -1]] == colour_table("viridis")[[0, 256 * (body.shape[1] - 1) // body.shape[1]]]).all()
    assert "channel 3 in viridis, -23 to 3020" in page.inner_text(".stage figcaption")
    choose(page, 0, "0")
    wait_for(page, with_checkers(colour_table("viridis")[PLANES[:, 0]], KNOWN[:, 0]))
    assert "checkered: unknown" in page.inner_text(".stage figcaption")
    choose(page, 0, "rgb")
    choose(page, 1, "4")
    wait_for(page, THREE)
    assert "red channel 4: -24 to 4020, green channel 1" in page.inner_text(".stage figcaption")
    assert "4%2C1%2C2" in page.evaluate("location.hash")


def test_the_page_shows_each_channel_with_its_values_also_of_two_steps(browser, runs, tmp_path):
    with serving(runs) as (address, _):
        watched = WatchedPage(browser)
        page = watched.page
        page.goto(address)
        page.click("a:text-is('fields')")
        check_views(page)
        page.check("input[type=radio] >> nth=3", force=True)  # side by side: against the first step
        wait_for(page, THREE // 11, 1)
        page.reload()  # the view is in the address
        wait_for(page, THREE)
        with page.expect_download() as download:
            page.click("text=Keep this view")
        download.value.save_as(tmp_path / "kept.html")
        choose(page, 0, "")
        wait_until(lambda: "preview/20.webp" in page.evaluate("document.querySelector('.stage img').src"), 60)
        page.goto(f"{address}#/")
        page.click("a:text-is('pictures')")
        page.wait_for_selector(".stage img")
        assert "View" not in page.inner_text(".pictures .bar")
        assert watched.troubles == []
        watched.context.close()
    kept = WatchedPage(browser)
    kept.page.goto((tmp_path / "kept.html").as_uri())
    wait_for(kept.page, THREE)
    assert kept.troubles == []
    kept.context.close()


def test_the_report_shows_each_channel_without_a_server(browser, runs):
    watched = WatchedPage(browser)
    watched.page.goto(write_report(runs / "fields").as_uri())
    check_views(watched.page)
    assert watched.troubles == []
    assert [url for url in watched.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    watched.context.close()
