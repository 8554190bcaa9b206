"""Buckets of images of equal area: sizes, the bucket of each step, the data set, and runs that keep aspects."""

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from safetensors.torch import load_file

import unfog
from command import exit_status
from conftest import TRANSFORMER
from unfog.checks.images.image_scan import ImageScan, unusable_files
from unfog.config.schema import Config
from unfog.config.validate import check_request
from unfog.data.buckets.prepare import BucketChoice, prepare_buckets
from unfog.data.buckets.sizes import BucketPlan, cropped_away, least_images, nearest_bucket, possible_sizes
from unfog.data.buckets.stream import BucketSchedule, BucketStream
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.prepare import prepare
from unfog.data.scan import read_sides
from unfog.data.settings import UNREAD, Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.files.cache_folder import CacheEntry
from unfog.inference.evaluation_files import GeneratedSamples, MixedSamples
from unfog.models.settings import SIZES, DiT
from unfog.pipeline.build import build_network
from unfog.pipeline.skipped_images import FailureReporter
from unfog.process.run_folder import RunFolder
from unfog.training.batches import split_batch
from unfog.training.distributed.world import World
from unfog.values.buckets import Bucket, bucket_texts, parse_buckets, share_samples
from unfog.values.columns import Column
from unfog.values.conditions import NO_CONDITIONS
from unfog.values.image_format import ImageFormat, sides_of

ANY = BucketChoice(lambda height, width: True, batch=8)


def ellipse(width: int, height: int, colour: tuple[int, int, int] = (40, 90, 160)) -> Image.Image:
    """An ellipse that touches the four edges of an image."""
    image = Image.new("RGB", (width, height), (235, 235, 230))
    ImageDraw.Draw(image).ellipse((0, 0, width - 1, height - 1), fill=colour)
    return image


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder of 40 wide, 40 square and 40 tall images in the classes a and b; all tall ones are in b."""
    for i in range(120):
        width, height = ((48, 32), (36, 36), (32, 48))[i % 3]
        folder = tmp_path / "mixed" / ("b" if i % 3 == 2 or i % 2 else "a")
        folder.mkdir(parents=True, exist_ok=True)
        ellipse(width, height, (i, 2 * i, 255 - i)).save(folder / f"{i:03d}.png")
    return tmp_path / "mixed"


def prepared(source: Path, choice: BucketChoice = ANY, said: list[str] | None = None, **data: object) -> Dataset:
    say = [].append if said is None else said.append
    chosen = Data(**{"size": 16, "aspect": "keep", "cache": "memory", **data})  # type: ignore[arg-type]
    return prepare_buckets(open_source(str(source)), chosen, choice, say)


# Sizes


@pytest.mark.parametrize("size", [16, 28, 32, 64, "96x64", 100, 256])
def test_possible_sizes_have_the_area_and_aspects_up_to_three(size: int | str) -> None:
    sizes = possible_sizes(size, lambda height, width: True)
    height, width = sides_of(size)
    aspects = [Bucket(each, 0).aspect for each in sizes]
    assert aspects == sorted(aspects)
    assert len(sizes) >= 5
    assert size in sizes
    for each in sizes:
        h, w = sides_of(each)
        assert abs(math.log(h * w / (height * width))) < 0.15
        assert max(h, w) <= 3 * min(h, w)
    # A tall bucket for each wide one.
    if isinstance(size, int):
        assert {sides_of(each) for each in sizes} == {sides_of(each)[::-1] for each in sizes}


@pytest.mark.parametrize(("network", "size"), [(SIZES["base"], 64), (DiT(patch=4), 64), (DiT(patch=3), 48)])
def test_the_network_takes_all_sizes(network: DiT, size: int) -> None:
    def fits(height: int, width: int) -> bool:
        try:
            network.check((height, width))
        except RequestError:
            return False
        return True

    sizes = possible_sizes(size, fits)
    assert len(sizes) > 3
    for each in sizes:
        network.check(sides_of(each))


def test_an_image_goes_to_the_nearest_logarithm_of_the_aspect() -> None:
    sizes = ["32x64", 48, "64x32"]
    sides = np.array([[100, 200], [100, 142], [142, 100], [100, 140], [1000, 1], [70, 70]], np.int32)
    assert nearest_bucket(sizes, sides).tolist() == [0, 0, 2, 1, 2, 1]


def test_cropped_away_is_what_the_bucket_does_not_show() -> None:
    sides = np.array([[300, 200], [200, 300], [200, 200]], np.int32)
    assert cropped_away(np.array([[64, 64]]), sides) == pytest.approx([1 / 3, 1 / 3, 0])
    assert cropped_away(np.array([[64, 96], [64, 64], [32, 64]]), sides) == pytest.approx([0, 1 / 3, 0.5])


def test_a_bucket_with_few_images_is_merged_and_named() -> None:
    sides = np.array([[64, 64]] * 50 + [[128, 64]] * 30 + [[72, 56]] * 3 + [[10, 100]], np.int32)
    plan = BucketPlan.of(possible_sizes(64, lambda h, w: True), sides, least=8)
    assert plan.sizes == [64, "88x48"]
    assert np.bincount(plan.bucket).tolist() == [54, 30]
    said = "\n".join(plan.lines(sides))
    assert "under 8 images" in said
    assert "72x56 (3)" in said
    assert "1 longer than 3:1" in said


def test_images_of_a_merged_bucket_are_counted_once_and_a_batch_that_keeps_it_is_named() -> None:
    """Portraits that went to the squares were counted again when the squares were merged."""
    sides = np.array([[56, 40]] * 300 + [[40, 56]] * 30 + [[48, 48]] * 31, np.int32)
    sizes = possible_sizes(24, lambda h, w: True)
    plan = BucketPlan.of(sizes, sides, least_images(len(sides), 64))
    first, *_, merged = plan.lines(sides)
    assert first == "1 bucket of 560 pixels: 28x20 (361)"
    assert merged.endswith("under 64 images: 20x28 (30), 24x24 (31); --batch 31 gives 24x24 one")
    kept = BucketPlan.of(sizes, sides, least_images(len(sides), 31))
    assert 24 in kept.sizes
    # The line of a resume, which knows the size of the largest bucket alone.
    assert BucketPlan.known(kept.sizes, sides).lines(sides)[0] == kept.lines(sides)[0]


def test_no_batch_is_named_where_the_least_share_of_the_set_decides() -> None:
    sides = np.array([[56, 40]] * 3000 + [[40, 56]] * 20, np.int32)
    plan = BucketPlan.of(possible_sizes(24, lambda h, w: True), sides, least_images(len(sides), 8))
    assert plan.lines(sides)[-1].endswith("under 31 images: 20x28 (20)")


def test_least_images_leaves_small_sets_their_buckets() -> None:
    assert least_images(40, 64) == 10
    assert least_images(1000, 64) == 64
    assert least_images(1_000_000, 64) == 10_000


def test_buckets_are_stored_as_text() -> None:
    buckets = (Bucket("48x80", 12), Bucket(64, 3))
    assert bucket_texts(buckets) == ("48x80:12", "64x64:3")
    assert parse_buckets(bucket_texts(buckets)) == buckets
    for wrong in ("64", "64x64", "64x64:", "axb:1", "64x64:-1", "1x1:1", "99999x9:1", "0:5"):
        with pytest.raises(RequestError):
            parse_buckets([wrong])
    with pytest.raises(RequestError, match="at most 100"):
        parse_buckets(["64x64:1"] * 101)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.integers(0, 500))
def test_samples_are_shared_in_proportion(images: list[int], count: int) -> None:
    shares = share_samples([Bucket(64, n) for n in images], count)
    if not sum(images):
        return
    assert sum(shares) == count
    for n, share in zip(images, shares):
        assert abs(share - count * n / sum(images)) < 1


# The bucket of each step

COUNTS = st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(any)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(1, 70), st.integers(0, 2**40))
def test_every_bucket_has_its_share_of_the_steps(counts: list[int], batch: int, seed: int) -> None:
    schedule, n = BucketSchedule(counts, batch, seed), sum(counts)
    steps = 3 * schedule.round
    seen = [0] * len(counts)
    for step in range(steps):
        if step % schedule.round == 0:
            for taken, count in zip(seen, counts):
                assert abs(taken - step * count / n) <= 1
        turn = schedule.turn(step)
        assert turn.earlier == seen[turn.bucket]
        assert schedule.steps_before(step) == seen
        seen[turn.bucket] += 1
    # After n rounds the shares are exact.
    assert schedule.steps_before(n * schedule.round) == [count * schedule.round for count in counts]


def test_any_step_is_found_at_once_and_the_order_depends_on_the_seed() -> None:
    counts = [400_000_000, 500_000_000, 100_000_000]
    schedule = BucketSchedule(counts, 64, seed=1)
    assert schedule.round <= 256
    far = 10**15 + 7
    before = schedule.steps_before(far)
    assert sum(before) == far
    assert abs(before[0] - 0.4 * far) < schedule.round
    orders = [[BucketSchedule(counts, 64, seed).turn(k).bucket for k in range(100)] for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert orders[0] == [schedule.turn(k).bucket for k in range(100)]


def some_sets(*lengths: int) -> list[ImageSet]:
    """Sets of images of other sizes, whose first pixels spell the number of the set and of the image."""
    sets = []
    for number, n in enumerate(lengths):
        pixels = np.zeros((n, 1, 4 + number, 8 - number), np.uint8)
        pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = number, np.arange(n)
        sets.append(ImageSet(pixels, [f"{number}/{i}" for i in range(n)]))
    return sets


def test_every_image_comes_equally_often() -> None:
    lengths, batch = (30, 50, 0, 21), 8
    stream, n = BucketStream(some_sets(*lengths), batch, seed=3), sum(lengths)
    seen, steps = Counter[int](), 20 * n // batch
    for step in range(steps):
        taken = stream.batch(step * batch, batch)
        assert taken.first == step * batch
        assert len(set(taken.pixels[:, 0, 0, 0].tolist())) == 1
        starts = np.cumsum([0, *lengths])
        assert (taken.index.numpy() == starts[taken.pixels[:, 0, 0, 0]] + taken.pixels[:, 0, 0, 1].numpy()).all()
        seen.update(taken.index.tolist())
    assert set(seen) == set(range(n))
    # A bucket may be a step ahead or behind, and the rest of a round; within it images differ by one.
    mean = steps * batch / n
    slack = 1 + (2 * batch + batch * stream._schedule.round / 4) / min(length for length in lengths if length)
    assert max(abs(count - mean) for count in seen.values()) <= slack


def test_micro_batches_and_ranks_read_the_same_bucket() -> None:
    batch = 12
    stream = BucketStream(some_sets(30, 50), batch, seed=0)
    for step in (0, 1, 17, 1000):
        whole = stream.batch(step * batch, batch)
        parts = [
            stream.batch(part.first, part.images)
            for rank in range(2)
            for part in split_batch(step * batch, batch, batch, World(rank, 2).batch_range(step * batch, batch), 4)
        ]
        assert torch.equal(torch.cat([part.pixels for part in parts]), whole.pixels)
        assert torch.equal(torch.cat([part.index for part in parts]), whole.index)
    with pytest.raises(ValueError, match="several steps"):
        stream.batch(6, batch)


# Data sets


@pytest.mark.slow
def test_buckets_hold_out_the_images_that_a_crop_holds_out(mixed: Path) -> None:
    cropped = prepare(open_source(str(mixed)), Data(size=16, held_out=0.2, cache="memory"))
    kept = prepared(mixed, held_out=0.2)
    assert sorted(kept.held_out.names) == sorted(cropped.held_out.names)
    assert sorted(kept.train.names) == sorted(cropped.train.names)
    assert kept.train.classes == cropped.train.classes == ("a", "b")
    labels = dict(zip(cropped.train.names, cropped.train.labels))
    assert labels == dict(zip(kept.train.names, kept.train.labels))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_all_buckets_have_the_range_of_values_of_the_whole_set(tmp_path: Path, cache: str) -> None:
    """The tall images alone would be of 10 bits."""
    for i in range(40):
        values = np.full((32, 48), 900, np.uint16)
        values[:8] = 60_000 if i % 2 else 900
        Image.fromarray(values if i % 2 else values.T.copy()).save(tmp_path / f"{i:02d}.png")
    tall, wide = prepared(tmp_path, cache=cache).buckets
    assert tall.train.take(np.arange(5)).pixels.max() == round(900 / 65535 * 255)
    assert wide.train.take(np.arange(5)).pixels.max() > 150
    assert prepared(tmp_path, cache=cache, range=(0.0, 1000.0), clip=True).buckets[0].train.pixels[0:1].max() > 200


@pytest.mark.slow
def test_few_values_beyond_a_given_range_are_judged_by_the_whole_set(tmp_path: Path) -> None:
    for i in range(100):
        values = np.full((32, 48), 2000 if i in (0, 9, 12) else 500, np.uint16)
        Image.fromarray(values.T.copy() if i < 14 else values).save(tmp_path / f"{i:02d}.png")
    kept = prepared(tmp_path, range=(0.0, 1000.0))  # three of the fourteen tall images would be refused
    assert [one.name for one in kept.report.skipped] == ["00.png", "09.png", "12.png"]


@pytest.mark.slow
def test_a_bucket_of_damaged_images_is_left_out(mixed: Path) -> None:
    for path in mixed.rglob("*.png"):
        with Image.open(path) as image:
            wide = image.width > image.height
        if wide:
            path.write_bytes(path.read_bytes()[:60])
    said: list[str] = []
    kept = prepared(mixed, said=said)
    assert [part.settings.size for part in kept.buckets] == ["12x20", 16]
    assert len(kept.report.skipped) == 40
    assert "20x12" in said[-1]
    shutil.rmtree(mixed / "b")
    for path in mixed.rglob("*.png"):
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(RequestError, match="none of"):
        prepared(mixed)


@pytest.mark.slow
def test_the_cache_keeps_the_sides_of_many_images(mixed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("unfog.data.cache._KEPT_SIDES", 100)
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    reads = []
    monkeypatch.setattr("unfog.data.cache.read_sides", lambda source, progress: reads.append(1) or read_sides(source))
    first, second = prepared(mixed), prepared(mixed)
    assert len(reads) == 1
    assert first.train.fingerprint == second.train.fingerprint
    [entry] = [each for each in CacheEntry.all() if "sides" in each.kind]
    assert entry.path.name.startswith("sides-")
    entry.path.write_bytes(b"short")
    prepared(mixed)
    ellipse(48, 32).save(mixed / "a" / "new.png")
    assert prepared(mixed).report.found == 121
    assert len(reads) == 3


@pytest.mark.slow
def test_each_image_is_in_the_bucket_of_its_aspect_and_nothing_is_cut(mixed: Path) -> None:
    said: list[str] = []
    kept = prepared(mixed, said=said, size=24)
    sizes = [part.settings.size for part in kept.buckets]
    assert len(sizes) == 3
    assert Bucket(sizes[0], 0).aspect < 0.8 < Bucket(sizes[1], 0).aspect == 1 < 1.25 < Bucket(sizes[2], 0).aspect
    tall, _, wide = kept.buckets
    assert wide.train.classes == tall.train.classes == ("a", "b")
    assert set(np.asarray(tall.train.labels)) == {1}
    for part in kept.buckets:
        images = part.train.pixels[:].astype(int)
        middle = images[:, 2, images.shape[2] // 2]  # the ellipse reaches the left and the right edge
        assert (np.abs(middle[:, 0] - middle[:, images.shape[3] // 2]) < 60).all()
    assert "3 buckets" in said[0]
    assert "squares would lose" in said[1]
    assert kept.report.used == 120
    assert "the size of a bucket" in kept.report.line()


@pytest.mark.slow
def test_the_images_of_all_buckets_are_one_set_for_what_needs_one_size(mixed: Path) -> None:
    kept = prepared(mixed, held_out=0.2)
    n, size = len(kept.train), kept.settings.image_format
    assert kept.train.pixels[:].shape == (n, *size.shape)
    rows = np.array([n - 1, 0, n // 2])
    assert np.array_equal(kept.train.take(rows).pixels, kept.train.pixels[:][rows])
    assert sum(len(part.train) for part in kept.buckets) == n
    assert kept.of_one_size.settings.size == kept.settings.size
    assert len(kept.of_one_size.train) == max(len(part.train) for part in kept.buckets)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_a_run_that_goes_on_finds_its_buckets(mixed: Path, cache: str) -> None:
    first = prepared(mixed, cache=cache)
    known = BucketChoice(ANY.fits, batch=64, known=tuple(part.settings.size for part in first.buckets))
    again = prepare_buckets(
        open_source(str(mixed)), first.settings, known, lambda line: None, known=first.train.fingerprint
    )
    assert again.train.fingerprint == first.train.fingerprint
    assert again.train.fingerprint.startswith(UNREAD) == (cache == "none")
    assert [part.settings.size for part in again.buckets] == [part.settings.size for part in first.buckets]
    a, b = (BucketStream([part.train for part in each.buckets], 8, 0).batch(80, 8) for each in (first, again))
    assert torch.equal(a.pixels, b.pixels)
    assert torch.equal(a.conditions.label, b.conditions.label)
    assert [first.train.names[i] for i in a.index] == [again.train.names[i] for i in b.index]


@pytest.mark.slow
def test_columns_go_with_their_images(mixed: Path) -> None:
    source = open_source(str(mixed))
    numbers = np.array([int(Path(name).stem) for name in source.names], np.float32)
    source.columns = {"number": Column("number", "number", numbers)}
    kept = prepare_buckets(source, Data(size=16, aspect="keep", held_out=0.2), ANY, lambda line: None)
    for images in (kept.train, kept.held_out, *(part.train for part in kept.buckets)):
        assert images.columns["number"].values.tolist() == [int(Path(name).stem) for name in images.names]


@pytest.mark.slow
def test_images_that_are_damaged_are_reported_and_left_out(mixed: Path) -> None:
    (mixed / "a" / "000.png").write_bytes(b"no image")
    kept = prepared(mixed)
    assert [one.name for one in kept.report.skipped] == ["a/000.png"]
    assert len(kept.train) + len(kept.held_out) == 119


@pytest.mark.slow
def test_an_image_that_is_found_damaged_while_it_is_read_is_reported_and_not_counted_twice(mixed: Path) -> None:
    damaged = sorted(mixed.glob("b/*.png"))[7]
    damaged.write_bytes(damaged.read_bytes()[:60])
    whole = prepared(mixed, cache="none")
    scan = ImageScan.create(whole)
    name = f"b/{damaged.name}"
    assert [one.name for one in unusable_files(whole)] == [name]
    assert len(scan.rows) == 119
    assert name not in {scan.name(row) for row in scan.rows}
    assert FailureReporter.on_this_rank(whole.train) | FailureReporter.on_this_rank(whole.held_out) == {
        (name, unusable_files(whole)[0].reason)
    }


def test_one_bucket_in_colour_makes_all_rgb(tmp_path: Path) -> None:
    for i in range(60):
        image = ellipse(48, 32) if i >= 30 else ellipse(32, 48).convert("L")
        image.save(tmp_path / f"{i:02d}.png")
    kept = prepared(tmp_path)
    assert kept.settings.channels == 3
    assert {part.train.pixels.shape[1] for part in kept.buckets} == {3}


@pytest.mark.slow
def test_a_pack_is_refused_with_a_way_out(mixed: Path, tmp_path: Path) -> None:
    unfog.pack(mixed, tmp_path / "images.pack", size=16)
    with pytest.raises(RequestError, match="cut to one size"):
        prepared(tmp_path / "images.pack")
    with pytest.raises(RequestError, match="aspect acts during training"):
        unfog.pack(mixed, tmp_path / "other.pack", size=16, aspect="keep")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"training": {"compile": True}}, "compile"), ({"training": {"capture": True}}, "capture")],
)
def test_what_needs_one_size_is_refused(mixed: Path, changes: dict[str, dict[str, bool]], said: str) -> None:
    config = Config(source=str(mixed), data=Data(aspect="keep"))
    config = replace(config, training=replace(config.training, **changes["training"]))
    with pytest.raises(RequestError, match=f"aspect = keep.*--training.{said}"):
        check_request(config)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["tiny", "mp-tiny", "dit-tiny"])
def test_networks_take_images_of_all_buckets(network: str) -> None:
    config = Config(network=SIZES[network], data=Data(size=16, channels=3), buckets=("12x20:5", "16x16:5", "24x12:5"))
    built = build_network(config).eval()
    for bucket in config.size_buckets:
        height, width = sides_of(bucket.size)
        x = torch.zeros(2, 3, height, width)
        assert built(x, torch.zeros(2), NO_CONDITIONS).shape == x.shape
    with pytest.raises(RequestError, match="30x12"):
        build_network(replace(config, network=SIZES["tiny"], buckets=("30x12:5",)))


# Runs

TINY = {"network": TRANSFORMER, "size": 16, "batch": 8, "device": "cpu", "aspect": "keep"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on wide, square and tall images in two classes."""
    folder = tmp_path_factory.mktemp("keep")
    for i in range(150):
        width, height = ((48, 32), (36, 36), (32, 48))[i % 3]
        place = folder / "images" / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        ellipse(width, height, (i, 255 - i, 2 * i % 255)).save(place / f"{i:03d}.png")
    settings = {"preview.every": 3, "evaluate.every": 3, "checkpoint.every": 3, "microbatch": 3}
    settings |= {"preview.images": 3, "sampler.steps": 2}
    unfog.train(folder / "images", out=folder / "run", steps=6, **TINY, **settings)
    return folder / "run"


@pytest.mark.slow
def test_a_run_records_its_buckets_and_draws_all_of_them(run: Path) -> None:
    config = RunFolder(run).read_config()
    assert config.data.aspect == "keep"
    assert [bucket.size for bucket in config.size_buckets] == ["12x20", 16, "20x12"]
    assert sum(bucket.images for bucket in config.size_buckets) > 130
    preview = Image.open(run / "samples" / "00000006.png")
    assert preview.height > preview.width  # three grids, one below the other
    lines = (run / "metrics.jsonl").read_text()
    assert "held_out_loss" in lines


@pytest.mark.slow
def test_a_resumed_run_ends_bit_equal(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    shutil.rmtree(copied / "checkpoints" / "00000006")
    unfog.resume(copied)
    for name in ("model", "ema"):
        one, other = (load_file(each / "checkpoints" / "00000006" / f"{name}.safetensors") for each in (run, copied))
        assert all(torch.equal(one[key], other[key]) for key in one)
    with pytest.raises(RequestError, match="batch"):
        unfog.resume(copied, batch=4, steps=12)


@pytest.mark.slow
def test_samples_have_the_sizes_of_the_buckets_or_the_one_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    def sample(*words: object) -> None:
        assert exit_status("sample", run, "--steps", 2, "--device", "cpu", *words) == 0

    sample("-n", 6, "--out", tmp_path / "all")
    sizes = [Image.open(path).size for path in sorted((tmp_path / "all").glob("0*.png"))]
    assert sizes == [(12, 20), (12, 20), (16, 16), (16, 16), (20, 12), (20, 12)]
    sample("-n", 2, "--size", "24x12", "--out", tmp_path / "one")
    assert {Image.open(path).size for path in (tmp_path / "one").glob("0*.png")} == {(24, 12)}
    loaded = unfog.load(run)
    assert loaded.sample(2, steps=2, size="20x12").shape == (2, 12, 20, 3)
    assert "20x12" in loaded.sampled
    usual = loaded.sample(2, steps=2)
    assert np.array_equal(usual, loaded.sample(2, steps=2, size=loaded.config.data.size))
    with pytest.raises(RequestError, match=r"size = 18x12.*multiple of patch = 4"):
        loaded.sample(2, size="18x12")


@pytest.mark.slow
def test_a_size_that_memory_cannot_hold_is_refused_with_a_batch_that_it_can(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, free = unfog.load(run), 8 * 10**9
    monkeypatch.setattr("unfog.inference.run.available_memory", lambda device: free)
    with pytest.raises(RequestError, match=r"2000x2000: 16 images at once need .* free; give --batch") as refused:
        loaded.sample(16, size="2000x2000", steps=2)
    batch = int(str(refused.value).rsplit(" ", 1)[1])
    sized = loaded.at_size("2000x2000")
    assert sized.at_size("64x48").enlarged == pytest.approx(loaded.at_size("64x48").enlarged)
    assert sized.prepare(16, batch=batch).generation.batch == batch < 16
    assert loaded.sample(2, size="64x48", steps=2).shape == (2, 48, 64, 3)
    free = 10**8
    with pytest.raises(RequestError, match=r"2000x2000: 1 image at once needs .* give a smaller --size"):
        sized.prepare(1)


@pytest.mark.slow
def test_a_bucket_is_evaluated_with_its_own_images(run: Path) -> None:
    loaded = unfog.load(run)
    found = loaded.at_size("20x12").evaluate("kid,held_out", n=20, features="texture", steps=2)
    assert {one.metric for one in found.measured} == {"kid", "held_out"}
    base = loaded.at_size(loaded.config.data.size).evaluate("kid", n=20, features="texture", steps=2)
    assert base["kid"].value != found["kid"].value


@pytest.mark.slow
def test_a_run_is_evaluated_over_all_buckets_and_by_bucket(run: Path) -> None:
    loaded = unfog.load(run)
    words = {"n": 60, "features": "texture", "steps": 2}
    found = loaded.evaluate("kid,sliced,held_out", **words)
    sides = ["12x20", "16x16", "20x12"]
    kid = {one.metric: one for one in found.measured if one.metric.startswith("kid")}
    assert list(kid) == ["kid", *(f"kid {each}" for each in sides)]
    assert kid["kid"].n == sum(kid[f"kid {each}"].n for each in sides) == 60
    assert kid["kid"].n_reference == sum(kid[f"kid {each}"].n_reference for each in sides)
    # The part of a bucket is what the bucket alone measures.
    alone = loaded.at_size("12x20").evaluate("kid", n=kid["kid 12x20"].n, features="texture", steps=2)
    assert alone["kid"].value == pytest.approx(kid["kid 12x20"].value, rel=1e-3)
    losses = [one for one in found.measured if one.metric.startswith("held_out ")]
    assert found["held_out"].n == sum(one.n for one in losses)
    assert found["held_out"].value == pytest.approx(sum(one.value * one.n for one in losses) / found["held_out"].n)
    assert found.drawn["sizes"].count(" of ") == 3
    other = loaded.evaluate("kid", reference=str(run.parent / "images"), **words)
    assert [one.metric for one in other.measured] == list(kid)
    with pytest.raises(RequestError, match="--size"):
        loaded.evaluate("bits", **words)


def test_samples_of_several_sizes_are_mixed_and_scaled(tmp_path: Path) -> None:
    shapes = {"a": (30, 4, 8), "b": (10, 8, 4)}
    parts = []
    for value, (name, (n, height, width)) in enumerate(shapes.items(), 1):
        part = GeneratedSamples(tmp_path / name, n, 7, tmp_path, b"key", 3 * height * width)
        shape = (height, width, 3)
        part.generate_missing(lambda first, count, s=shape, v=value: np.full((count, *s), v, np.uint8), World(0, 1))
        parts.append(part)
    mixed = MixedSamples(parts, ImageFormat.of(3, "8x4"))
    assert mixed[0:40].shape == (40, 3, 4, 8)
    assert np.bincount(mixed[0:12][:, 0, 0, 0]).tolist() == [0, 9, 3]
    assert np.bincount(mixed[0:40][:, 0, 0, 0]).tolist() == [0, 30, 10]
    assert np.array_equal(mixed[5:17], mixed[0:40][5:17])
