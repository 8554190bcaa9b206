"""Conditions in the playground: what the page may ask for, and its fields in a real Chromium."""

import numpy as np
import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'unfog[serve]'")
pytest.importorskip("orjson", reason="orjson is not installed: pip install 'unfog[serve]'")

import unfog
from browsers import WatchedPage, axe_violations, in_a_browser, open_browser, serving
from conftest import NETWORK
from unfog.errors import RequestError
from unfog.serve.playground.drawing import command_of, python_of, read_request, settings_of
from unfog.serve.run_files import conditions_of
from waiting import wait_until

PLAYGROUND = "document.querySelector('unfog-playground')"
GIVEN = ["age=60", "markers=thin, dark;red", "place=0.1;0.2", "stain=HE"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    random, count = np.random.default_rng(0), 24
    images = random.integers(0, 256, (count, 8, 8, 3), np.uint8)
    conditions = {
        "age": np.linspace(20, 80, count),
        "markers": [["red"], [], ["red", "thin, dark"]] * (count // 3),
        "place": random.random((count, 2)),
        "stain": ["HE", "PAS"] * (count // 2),
        "text": ["a red heart", "a dark star"] * (count // 2),
    }
    settings = {"network": NETWORK, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"every": -1}}
    out = tmp_path_factory.mktemp("runs") / "cells"
    return unfog.train(images, conditions=conditions, out=out, steps=2, sampler={"steps": 4}, **settings)


@pytest.mark.slow
def test_the_page_asks_for_conditions_as_the_command_does(run):
    asked = read_request(run.path, {"n": 2, "given": GIVEN}, False, False)
    assert settings_of(asked)["given"] == GIVEN
    assert "--given age=60 'markers=thin, dark;red' 'place=0.1;0.2' stain=HE" in command_of(asked)
    found: dict = {}
    exec(python_of(asked), found)
    words = conditions_of(run.path).read_words(GIVEN)
    assert np.array_equal(found["images"], run.sample(2, given=words))
    for given, message in {
        ("age=old",): r"age = 'old' is not a number; it is 2.* to [78]",
        ("agee=3",): "did you mean 'age'",
        ("stain=blue",): "give one of HE, PAS",
        ("age",): "must be NAME=VALUE",
        (f"text={'heart ' * 99}",): "longer than the 16",
    }.items():
        with pytest.raises(RequestError, match=message):
            read_request(run.path, {"given": [*given]}, False, False)
    led = read_request(run.path, {"n": 1, "given": ["text=a heart, a star"], "negative": "dark"}, False, False)
    assert "'text=a heart, a star'" in command_of(led)
    assert "--negative dark" in command_of(led)
    assert "negative='dark'" in python_of(led)
    with pytest.raises(RequestError, match="longer than the 16"):
        read_request(run.path, {"negative": "heart " * 99}, False, False)


def test_a_configuration_of_somebody_else_has_no_conditions(tmp_path):
    for text in ("columns = 3", "columns = [3]", "[[columns]]\nkind = 'number'", "[[columns]]\nname = 'a'\nkind = 'b'"):
        (tmp_path / "config.toml").write_text(text)
        assert conditions_of(tmp_path).columns == ()


@pytest.mark.slow
@in_a_browser
def test_each_kind_has_a_field_and_the_history_keeps_its_value(run):
    pytest.importorskip("playwright", reason="playwright is not installed: pip install 'unfog[dev]'")
    with serving(run.path.parent) as (address, _), open_browser() as browser:
        watched = WatchedPage(browser, viewport={"width": 1200, "height": 1000})
        page = watched.page
        page.goto(f"{address}#/draw")
        page.wait_for_selector(".condition", timeout=180_000)
        given = lambda: page.evaluate(f"{PLAYGROUND}.form.given ?? []")  # noqa: E731
        assert page.locator(".condition").count() == 5
        assert given() == []
        age, markers, place = (page.get_by_role("group", name=name) for name in ("age", "markers", "place"))
        age.locator("input[type=number]").fill("200")
        assert "The training images have 2" in age.inner_text()
        age.locator("input[type=range]").fill("60")
        page.get_by_role("combobox", name="stain").select_option("HE")
        markers.get_by_role("button", name="red").click()
        markers.get_by_role("button", name="thin, dark").click()
        markers.get_by_role("button", name="red").click()
        place.locator("input").fill("0.1;0.2")
        place.locator("input").blur()
        text, marked = page.get_by_role("group", name="Prompt"), lambda: page.locator("mark").all_inner_texts()
        text.locator("input").fill("A red Zebra, heart")
        page.get_by_label("Negative prompt").fill("dark mauve")
        wait_until(lambda: marked() == ["zebra", "mauve"], 60)
        page.fill(".controls label:has-text('Guidance') input", "2")
        told = ["age=60", "stain=HE", "markers=thin, dark", "place=0.1;0.2", "text=A red Zebra, heart"]
        assert sorted(given()) == sorted(told)
        page.fill(".controls label:has-text('Pictures') input", "2")
        page.click("button.accent")
        wait_until(
            lambda: page.evaluate(f"[{PLAYGROUND}.job?.state, {PLAYGROUND}.job?.settings.n].join()") == "done,2", 180
        )
        assert sorted(page.evaluate(f"{PLAYGROUND}.job.settings.given")) == sorted(told)
        assert "stain=HE" in page.locator(".history").inner_text()
        assert "negative dark mauve" in page.locator(".history").inner_text()
        assert axe_violations(page) == []
        markers.get_by_role("button", name="none").click()
        assert "none of them" in markers.inner_text()
        markers.get_by_role("button", name="clear markers").click()
        age.get_by_role("button", name="clear age").click()
        text.locator("input").fill("")
        wait_until(lambda: marked() == ["mauve"], 60)
        assert sorted(given()) == ["place=0.1;0.2", "stain=HE"]
        # A moved slider draws by itself once it rests, so some drawings have a part of these.
        whole = page.locator(".history button").filter(has_text="place=0.1;0.2").filter(has_text="markers=thin, dark")
        whole.filter(has_text="age=60").filter(has_text="stain=HE").first.click()
        wait_until(lambda: sorted(given()) == sorted(told))
        page.get_by_role("button", name="Grid of two settings").click()
        for axis, name, values in (("a", "given age", "20, 40"), ("b", "given text", "a heart, red; a star")):
            page.select_option(f"unfog-grid select[name={axis}]", name)
            page.fill(f"unfog-grid input[name={axis}-values]", values)
        page.get_by_role("button", name="Draw the grid").click()
        wait_until(lambda: page.locator("unfog-grid unfog-tile").count() == 4, 180)
        newest = f"{PLAYGROUND}.jobs.slice(-4).map((one) => one.settings.given?.slice(-2).join())"
        asked = [f"age={age},text={text}" for age in (20, 40) for text in ("a heart, red", "a star")]
        wait_until(lambda: page.evaluate(newest) == asked)  # the page asks for drawings that others began
        assert "a heart, red" in page.locator("unfog-grid th").all_inner_texts()
        assert watched.troubles == []
