"""Conditions that are images in the playground: uploads, painted masks, what is drawn, history; and runs on arrays."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'unfog[serve]'")
pytest.importorskip("orjson", reason="orjson is not installed: pip install 'unfog[serve]'")

import unfog
from browsers import WatchedPage, axe_violations, in_a_browser, open_browser, serving
from conftest import NETWORK
from image_bytes import png
from studio_jobs import draw, pixels
from unfog.config.requests.sample import SampleRequest
from unfog.errors import RequestError
from unfog.reporting.channel_sheets import decode_channels
from unfog.serve.playground.drawing import command_of, python_of, read_request
from unfog.serve.playground.given_pictures import check_pictures, condition_view, mask_file
from unfog.serve.playground.images import npy
from unfog.serve.playground.inputs import Inputs
from unfog.serve.run_files import conditions_of
from unfog.values.colour_map import category_colours
from unfog.values.condition_format import ColumnFacts
from waiting import wait_until

PLAYGROUND = "document.querySelector('unfog-playground')"
SETTINGS = {"network": NETWORK, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"every": -1}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on 12x8 pictures, to see width and height apart, whose masks have the labels 0, 3 and 9."""
    folder, random = tmp_path_factory.mktemp("cells"), np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for i in range(24):
        Image.fromarray(random.integers(0, 256, (8, 12, 3), np.uint8)).save(folder / "images" / f"{i}.png")
        labels = np.array([0, 3, 9], np.uint8)[random.integers(0, 3, (8, 12))]
        Image.fromarray(labels).save(folder / "masks" / f"{i}.png")
    condition = f"mask={folder / 'masks'},degrade:factor=2,hole"
    data = {"condition": condition, "size": "12x8"}
    out = tmp_path_factory.mktemp("runs") / "masked"
    return unfog.train(folder / "images", out=out, steps=2, data=data, sampler={"steps": 3}, **SETTINGS)


def labels(seed=1):
    return np.array([0, 3, 9], np.uint8)[np.random.default_rng(seed).integers(0, 3, (8, 12))]


def column(run, name):
    return check_pictures(conditions_of(run.path), {name: 1})[name]


@pytest.mark.slow
def test_an_upload_is_drawn_as_sample_draws_it(run):
    small = np.random.default_rng(2).integers(0, 256, (4, 6, 3), np.uint8)
    said = draw(run, given={"degrade": png(small), "mask": png(labels())})
    (began,), (done,) = said.of("began"), said.of("done")
    assert np.array_equal(pixels(done), run.sample(2, given={"mask": labels(), "degrade": small}))
    assert not np.array_equal(pixels(done), run.sample(2))
    assert began.head["given"] == ["degrade", "mask"]
    shown = np.frombuffer(began.body, np.uint8).reshape(began.head["given_shape"])
    colours = np.array(category_colours(["0", "3", "9"]), np.uint8)
    assert np.array_equal(shown[1], colours[np.searchsorted([0, 3, 9], labels())])
    # As it is shown in the form, before it is drawn.
    form = np.asarray(Image.open(io.BytesIO(condition_view(png(labels()), column(run, "mask")))))
    assert np.array_equal(form, shown[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "mask",
            png(np.full((8, 12), 5, np.uint8)),
            "has the value 5, and the masks of the run have 0, 3, 9; use these",
        ),
        ("mask", b"\x89PNG\r\n\x1a\n", "mask: the upload cannot be used"),
        ("hole", png(np.zeros((8, 12, 3), np.uint8)), "nothing of the picture is missing; make the pixels"),
    ],
)
def test_what_does_not_suit_the_run_is_said_with_value_and_remedy(run, name, data, message):
    with pytest.raises(RequestError, match=message):
        draw(run, given={name: data})


def test_the_page_names_no_file_and_no_other_condition(run):
    for word in ("mask=/etc/passwd", "degrade=python:os", "mask=a|1x8x12|AAAA"):
        with pytest.raises(RequestError, match="is an image, and the page reads no files; upload it"):
            read_request(run.path, {"given": [word]}, False, False)
    conditions = conditions_of(run.path)
    for given, message in {
        ("masks",): "'masks' is not a condition that is an image; give one of degrade, hole, mask",
        tuple("abcdefghi"): "at most 8 names",
    }.items():
        with pytest.raises(RequestError, match=message):
            check_pictures(conditions, {name: {"upload": 1} for name in given})
    with pytest.raises(RequestError, match="must be an object"):
        check_pictures(conditions, ["mask"])


def test_the_command_and_the_python_name_files_for_pictures(run):
    asked = read_request(run.path, {"n": 2}, False, False)
    assert "--given degrade=degrade.png mask=mask.png" in command_of(asked, ["degrade", "mask"])
    assert "given={'mask': 'mask.png'}" in python_of(asked, ["mask"])


def test_the_command_draws_the_size_of_the_page_where_a_run_has_several(tmp_path):
    (tmp_path / "config.toml").write_text('buckets = ["12x8:30", "8x8:9"]\n[data]\nsize = "12x8"\n')
    request = SampleRequest(run=tmp_path, n=2)
    assert command_of(request, ["mask"]).endswith("-n 2 --size 12x8 --given mask=mask.png")
    assert "--size" not in command_of(replace(request, image=tmp_path / "a.png"))  # an edit has one size


@pytest.mark.parametrize(
    "names",
    [("0", "3", "9"), ("0", "300", "65535"), ("#000000", "#ff8000", "#0000ff")],
    ids=["bytes", "deep", "colours"],
)
def test_a_painted_mask_becomes_the_file_that_the_run_reads(names):
    facts = ColumnFacts("mask", "mask", names, (1.0, 8.0, 12.0))
    numbers = np.random.default_rng(0).integers(0, 3, (8, 12, 1)).astype(np.uint8).repeat(3, 2)
    seen = np.asarray(Image.open(io.BytesIO(condition_view(mask_file(numbers, facts), facts))))
    assert np.array_equal(seen, np.array(category_colours(names), np.uint8)[numbers[..., 0]])
    with pytest.raises(RequestError, match="values that a PNG cannot hold; give its mask with `unfog sample`"):
        mask_file(numbers, ColumnFacts("mask", "mask", ("0", "70000", "x"), facts.statistics))
    numbers[0, 0] = 3
    with pytest.raises(RequestError, match="has the number 3, and the run has 3 labels"):
        mask_file(numbers, facts)


def test_transparent_pixels_of_an_upload_are_shown_as_a_hole(run):
    picture = np.random.default_rng(0).integers(0, 256, (8, 12, 4), np.uint8)
    picture[..., 3] = np.where(np.arange(12) < 5, 0, 255)
    seen = np.asarray(Image.open(io.BytesIO(condition_view(png(picture), column(run, "hole")))))
    assert np.array_equal(seen[..., 3], picture[..., 3])
    assert np.array_equal(seen[:, 5:, :3], picture[:, 5:, :3])


@pytest.mark.slow
def test_a_hole_of_a_picture_that_its_exif_turns_is_where_it_is_seen(run):
    picture = np.random.default_rng(0).integers(0, 256, (8, 12, 4), np.uint8)
    picture[..., 3] = np.where(np.arange(12) < 5, 0, 255)
    turned, exif = Image.fromarray(np.rot90(picture)), Image.Exif()
    exif[0x0112] = 6  # a quarter of a turn clockwise shows it upright
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    data, facts = [png(picture), file.getvalue()], column(run, "hole")
    assert condition_view(data[1], facts) == condition_view(data[0], facts)
    upright, seen = (draw(run, given={"hole": one}).of("began")[0].body for one in data)
    assert seen == upright


def test_inputs_are_read_as_they_were_written():
    inputs = Inputs(b"image", b"", {"mask": b"xyz", "grey": b""})
    assert Inputs.read(inputs.head, inputs.body) == inputs
    assert inputs.nbytes == len(inputs.body) == 8
    assert Inputs(given={"a": b"xy"}).key != Inputs(given={"b": b"xy"}).key != Inputs(b"xy").key
    for head in ({"image_bytes": 3}, {"image_bytes": -1, "mask_bytes": 9}, {"given_bytes": [["a", 7]]}):
        with pytest.raises(ValueError, match="other lengths"):
            Inputs.read(head, inputs.body)


@pytest.mark.slow
def test_a_run_on_arrays_is_drawn_as_a_view_with_its_values(tmp_path):
    values = np.random.default_rng(0).normal(100, 30, (16, 8, 12, 4)).astype(np.float32)
    settings = SETTINGS | {"preview": {"every": -1, "view": "3:viridis"}}
    made = unfog.train(
        values, out=tmp_path / "runs/maps", steps=1, data={"dtype": "float32"}, sampler={"steps": 3}, **settings
    )
    said = draw(made, seed=1)
    (done,), head = said.of("done"), said.of("done")[0].head
    samples = made.sample(2, seed=1)
    length, sheet = int(np.prod(head["images"])), head["channel_bytes"]
    shown = np.frombuffer(done.body[:length], np.uint8).reshape(head["images"])
    assert np.array_equal(shown, made.view(samples, "3:viridis"))
    told = np.load(io.BytesIO(npy(done.body[length + sheet :], head["values"])))
    assert told.dtype == np.float32
    assert np.array_equal(told, samples)
    found = decode_channels(done.body[length : length + sheet])
    assert (found["images"], found["channels"], found["width"]) == (2, 4, 12)
    assert {tuple(step.head["tiles"]) for step in said.of("step")} == {(2, 8, 12, 3)}


@pytest.mark.slow
@in_a_browser
def test_a_mask_is_uploaded_painted_and_drawn_again_from_the_history(run, tmp_path):
    pytest.importorskip("playwright", reason="playwright is not installed: pip install 'unfog[dev]'")
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(png(labels()))
    bad.write_bytes(png(labels() + 1))
    with serving(run.path.parent) as (address, _), open_browser() as browser:
        watched = WatchedPage(browser, color_scheme="dark", viewport={"width": 360, "height": 740})
        page = watched.page
        page.goto(f"{address}#/draw")
        page.wait_for_selector("unfog-condition", timeout=180_000)
        mask = page.get_by_role("group", name="mask", exact=True)
        mask.locator("input[type=file]").set_input_files(bad)
        wait_until(lambda: "has the value 1, and the masks of the run have 0, 3, 9" in mask.inner_text(), 60)
        mask.locator("input[type=file]").set_input_files(good)
        mask.locator("img").wait_for()
        mask.get_by_label("paint the mask").check()
        element = "document.querySelector('unfog-mask')"
        wait_until(
            lambda: page.evaluate(f"[...{element}.bits]") == np.searchsorted([0, 3, 9], labels()).ravel().tolist()
        )
        mask.locator("canvas").focus()
        page.evaluate(f"{element}.brush = 1")
        for key in ("2", "ArrowLeft", " "):  # the label 9, in column 6 of row 5
            page.keyboard.press(key)
        painted = labels()
        painted[4, 5] = 9
        page.fill(".controls label:has-text('Pictures') input", "1")
        page.click("button.accent")
        job = f"{PLAYGROUND}.job"
        wait_until(lambda: page.evaluate(f"{job}?.state") == "done", 180)
        wait_until(lambda: page.evaluate(f"{job}.given") == ["mask"], 60)
        shown = """(() => {
          const canvas = document.querySelector('.drawn canvas');
          return [...canvas.getContext('2d').getImageData(0, 0, 12, 8).data];
        })()"""
        wanted = np.asarray(run.sample(1, given={"mask": painted}))[0]
        wait_until(lambda: np.array_equal(np.array(page.evaluate(shown)).reshape(8, 12, 4)[..., :3], wanted), 60)
        assert axe_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        mask.get_by_role("button", name="clear mask").click()
        page.click("button.accent")
        wait_until(lambda: page.evaluate(f"[{job}?.job, {job}?.state].join()") == "2,done", 180)
        page.locator(".history button").filter(has_text="mask: a picture").click()
        wait_until(lambda: "as in drawing 1" in mask.inner_text(), 60)
        with page.expect_response(lambda one: one.url.endswith("api/draw") and one.request.method == "POST") as answer:
            page.click("button.accent")
        assert answer.value.json()["job"] == 1  # the same inputs: it was drawn before
        assert [one for one in watched.troubles if "readback" not in one and "400" not in one] == []
