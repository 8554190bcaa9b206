"""Images decoded when their turn comes, and read ahead: the same as all others, at any position, whatever happens."""

import errno
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from unfog.checks.run import run_checks as examination
from unfog.checks.settings.overfit_one_batch import OverfitBatch
from unfog.config.presets import preset
from unfog.data import decode_pool as bulk
from unfog.data import lazy, scan
from unfog.data import prepare as preparing
from unfog.data import stream as ahead
from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset
from unfog.data.lazy import LazyPixels, training_index
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError, TransientImageError
from unfog.data.sources.folder import FolderSource
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream
from unfog.diffusion.objective import Objective
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import cache_folder
from unfog.pipeline.build import build_held_out_set
from unfog.pipeline.contact_sheet import contact_sheet
from unfog.pipeline.skipped_images import data_json
from unfog.process.signals import StopSignals
from unfog.runs import find_lr
from unfog.values.image_format import BYTES
from waiting import wait_until

ASKED = Data(size=8, channels=3, cache="none")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 pictures in two classes, each all of one colour that tells its number; none is damaged."""
    folder = tmp_path_factory.mktemp("photos")
    for kind in ("even", "odd"):
        (folder / kind).mkdir()
    for i in range(300):
        colour = (i % 256, i // 256, 7)
        Image.new("RGB", (10, 10), colour).save(folder / ("even", "odd")[i % 2] / f"{i:03}.png", compress_level=0)
    return folder


def both(folder: Path, asked: Data = ASKED) -> tuple[Dataset, Dataset]:
    """(decoded on the fly, decoded at once)."""
    return prepare(open_source(folder), asked), prepare(open_source(folder), replace(asked, cache="memory"))


@pytest.fixture
def stream(photos: Path) -> Iterator[ImageStream]:
    made = ImageStream(prepare(open_source(photos), ASKED).train, seed=3)
    yield made
    made.close()


@pytest.mark.slow
def test_on_the_fly_is_what_is_decoded_at_once(photos: Path) -> None:
    fly, memory = both(photos)
    assert isinstance(fly.train.pixels, LazyPixels)
    for a, b in ((fly.train, memory.train), (fly.held_out, memory.held_out)):
        assert a.pixels.shape == b.pixels.shape
        assert len(a) == len(b) > 0
        assert list(a.names) == list(b.names)
        assert list(a.names[3:9]) == list(b.names[3:9])
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(a.pixels[:], b.pixels[:])
        assert np.array_equal(a.pixels[2:9:3], b.pixels[2:9:3])
        assert np.array_equal(a.pixels[-1], b.pixels[-1])
        assert np.array_equal(a.pixels[np.array([5, 1])], b.pixels[np.array([5, 1])])
    assert fly.settings == replace(memory.settings, cache="none")
    assert fly.train.fingerprint != fly.held_out.fingerprint
    assert "300 images in 2 classes; decoded during training (8x8 RGB)" in fly.report.line()
    again = prepare(open_source(photos), ASKED)
    assert again.train.fingerprint == fly.train.fingerprint
    other = prepare(open_source(photos), replace(ASKED, size=4))
    assert other.train.fingerprint != fly.train.fingerprint


@pytest.mark.slow
def test_the_record_is_written_without_reading_everything(photos: Path) -> None:
    fly, memory = both(photos)
    assert np.array_equal(contact_sheet(fly, Augment(), 0), contact_sheet(memory, Augment(), 0))
    assert data_json(fly).count(b'"converted": null') == 300


@given(st.sets(st.integers(0, 60)), st.integers(0, 30))
def test_rows_skip_those_held_out(held: set[int], more: int) -> None:
    n = max(held, default=0) + 1 + more
    indices = np.array(sorted(held), np.int64)
    train = np.arange(n - len(held))
    assert training_index(indices, train).tolist() == [i for i in range(n) if i not in held]


def test_of_very_many_images_those_held_out_are_evenly_spaced(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_EVEN_SPLIT_FROM", 200)
    monkeypatch.setattr(scan, "_MAX_HELD_OUT", 10)
    prepared = prepare(open_source(photos), ASKED)
    assert (len(prepared.train), len(prepared.held_out)) == (290, 10)
    assert list(prepared.held_out.names) == [open_source(photos).names[i] for i in range(0, 300, 30)]
    assert not set(prepared.train.names) & set(prepared.held_out.names)
    assert prepared.held_out.labels is not None
    assert prepared.held_out.labels.tolist() == [0] * 5 + [1] * 5


class Damaged(FolderSource):
    """Some of its images cannot be opened."""

    bad: frozenset[int] = frozenset()

    def open(self, i: int) -> Image.Image:
        if i in self.bad:
            raise ImageError("empty")
        return super().open(i)


@pytest.mark.slow
def test_what_cannot_be_decoded_is_replaced_by_the_next_with_its_label_and_named(photos: Path) -> None:
    source = Damaged(photos, "damaged")
    source.bad = frozenset([4, 5, 149, 299])  # 150 is the first of the other class
    prepared = prepare(source, replace(ASKED, held_out=0))
    stream = ImageStream(prepared.train, seed=0)
    batches = [stream.batch(first, 50) for first in range(0, 300, 50)]
    taken = torch.cat([batch.index for batch in batches]).numpy()
    pixels = torch.cat([batch.pixels for batch in batches]).numpy()
    asked = stream.index(0, 300)
    replacement = {4: 6, 5: 6, 149: 150, 299: 0}
    assert taken.tolist() == [replacement.get(int(i), int(i)) for i in asked]
    names = [int(Path(prepared.train.names[i]).stem) for i in taken]
    assert (pixels[:, 0, 0, 0] + 256 * pixels[:, 1, 0, 0].astype(int)).tolist() == names
    labels = np.concatenate([batch.conditions.label for batch in batches if batch.conditions.label is not None])
    assert labels.tolist() == [number % 2 for number in names]
    assert isinstance(prepared.train.pixels, LazyPixels)
    assert sorted(one.name for one in prepared.train.pixels.skipped) == [source.names[i] for i in sorted(source.bad)]
    assert {one.reason for one in prepared.train.pixels.skipped} == {"empty"}
    stream.close()


class Flaky(FolderSource):
    """Image `victim` cannot be read the times `failing`, counted from 1, and says so as `trouble`."""

    victim, failing, trouble, asked = -1, range(0), Exception(), 0

    def open(self, i: int) -> Image.Image:
        if i == self.victim:
            self.asked += 1
            if self.asked in self.failing:
                raise self.trouble
        return super().open(i)


PASSING = [
    OSError(errno.EIO, "disk"),
    OSError(errno.ESTALE, "gone"),
    MemoryError(),
    TimeoutError(),
    TransientImageError("far"),
]


@pytest.mark.slow
@pytest.mark.parametrize("trouble", PASSING, ids=repr)
def test_what_passes_is_waited_for_and_changes_nothing(
    photos: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """Else a run that goes on after an outage would see other images than one that had none."""
    monkeypatch.setattr(bulk, "_FIRST_PAUSE", 0.001)
    source, plain = Flaky(photos, "flaky"), prepare(open_source(photos), replace(ASKED, held_out=0)).train
    lazy_set, at_once = (replace(ASKED, held_out=0, cache=cache) for cache in ("none", "memory"))
    fly = prepare(source, lazy_set).train
    source.victim, source.failing, source.trouble = 30, range(1, bulk._TRIES), trouble
    taken = fly.take(np.arange(28, 33))
    assert taken.rows.tolist() == [28, 29, 30, 31, 32]
    assert np.array_equal(taken.pixels, plain.pixels[28:33])
    assert fly.pixels.skipped == []
    source.asked = 0
    assert np.array_equal(prepare(source, at_once).train.pixels[:], plain.pixels[:])
    source.failing = range(1, 10**6)
    for ask in (lambda: fly.take(np.arange(28, 33)), lambda: prepare(source, at_once)):
        source.asked = 0
        with pytest.raises(
            RunError, match=rf"060\.png of flaky: .*also after {bulk._TRIES} tries; once it can be read"
        ):
            ask()
        assert source.asked == bulk._TRIES
    assert fly.pixels.skipped == []
    source.failing = range(0)
    assert np.array_equal(fly.take(np.arange(28, 33)).pixels, plain.pixels[28:33])


@pytest.mark.parametrize(
    "trouble", [ImageError("odd"), FileNotFoundError(errno.ENOENT, "x"), OSError("broken")], ids=repr
)
def test_what_lasts_is_not_waited_for(photos: Path, trouble: Exception) -> None:
    source = Flaky(photos, "flaky")
    source.victim, source.failing, source.trouble = 30, range(1, 10**6), trouble
    fly = prepare(source, replace(ASKED, held_out=0)).train
    source.asked = 0
    assert fly.take(np.array([29, 30])).rows.tolist() == [29, 31]
    # A missing file is looked for once more, as the whole source may have been out of reach.
    assert source.asked == (2 if isinstance(trouble, FileNotFoundError) else 1)


@pytest.mark.parametrize("asked", [Data(size=0, channels=3, cache="none"), Data(size=8, channels=0, cache="none")])
def test_size_and_channels_are_not_chosen_by_those_that_an_outage_leaves(
    photos: Path, monkeypatch: pytest.MonkeyPatch, asked: Data
) -> None:
    monkeypatch.setattr(bulk, "_FIRST_PAUSE", 0.001)
    source = Flaky(photos, "flaky")
    source.victim, source.failing, source.trouble = 0, range(1, 3), TimeoutError()
    assert prepare(source, asked).settings == prepare(open_source(photos), asked).settings
    assert source.asked == 4  # two that fail, and one for the depth of values beside the one for size or channels
    source.failing = range(1, 10**6)
    with pytest.raises(RunError, match="or repeat the command"):
        prepare(source, asked)


def test_what_pillow_finds_odd_is_not_said_while_training(tmp_path: Path) -> None:
    for i in range(3):
        damaged = b"Exif\0\0II*\0\x08\0\0\0\x05\0"
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.jpg", exif=damaged)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Image.open(tmp_path / "0.jpg") as image:
            image.getexif()
        prepare(open_source(tmp_path), ASKED).train.pixels.take(np.arange(3), axis=0)
    # The collector may add warnings about objects of other tests.
    assert sum("EXIF" in str(each.message) for each in said) == 1


def test_closing_does_not_wait_for_an_image_that_is_waited_for(photos: Path) -> None:
    source = Flaky(photos, "flaky")
    fly = prepare(source, replace(ASKED, held_out=0)).train
    source.victim, source.failing, source.trouble = 30, range(1, 10**6), TimeoutError()
    assert isinstance(fly.pixels, LazyPixels)
    taking = fly.pixels.start_decoding(np.array([30]))
    wait_until(lambda: source.asked, every=0.001)
    fly.pixels.close()
    started = time.monotonic()
    with pytest.raises(RunError):
        taking.result()
    assert time.monotonic() - started < 20


def is_read_ahead(stream: ImageStream) -> bool:
    ahead = stream._prefetcher
    return ahead is None or all(task.done() for block in ahead._blocks.values() for task in block._tasks)


@pytest.mark.slow
def test_a_label_is_that_of_the_pixels_also_where_one_is_found_damaged_after_it_was_read_ahead(photos: Path) -> None:
    """The second epoch is decoded before the first batch of it is asked for; what fails there fails only then."""
    source = Flaky(photos, "flaky")
    prepared = prepare(source, replace(ASKED, held_out=0))
    stream = ImageStream(prepared.train, 0)
    source.victim, source.failing, source.trouble = int(stream.index(250, 1)[0]), range(2, 10**6), ImageError("bad")
    for first in range(0, 600, 10):
        batch = stream.batch(first, 10)
        assert batch.conditions.label is not None
        wait_until(lambda: is_read_ahead(stream), every=0.001)
        numbers = (batch.pixels[:, 0, 0, 0] + 256 * batch.pixels[:, 1, 0, 0].long()).tolist()
        assert numbers == [int(Path(prepared.train.names[i]).stem) for i in batch.index]
        assert batch.conditions.label.tolist() == [number % 2 for number in numbers]
    assert isinstance(prepared.train.pixels, LazyPixels)
    assert len(prepared.train.pixels.skipped) == 1
    stream.close()


@pytest.mark.slow
def test_whoever_takes_images_gets_the_labels_of_those_that_stand_in(photos: Path) -> None:
    """Held-out loss, learning rate, doctor: class and pixels of an image at the end of a class and damaged agree."""
    source = Damaged(photos, "damaged")
    clean = prepare(open_source(photos), replace(ASKED, held_out=0.2))
    last = max(i for i, name in enumerate(clean.held_out.names) if name.startswith("even"))
    source.bad = frozenset([source.names.index(clean.held_out.names[last]), 149])
    config = replace(preset("default"), data=ASKED, classes=("even", "odd"))
    cpu, stop = torch.device("cpu"), StopSignals()
    objective = Objective(config.diffusion, 0.0)

    def fresh() -> Dataset:
        return prepare(source, replace(ASKED, held_out=0.2))

    assert int(fresh().held_out.take(np.array([last])).rows[0]) == last + 1
    held = build_held_out_set(fresh(), config, cpu)
    probe = find_lr._test_setup(config, fresh(), cpu, stop).probe
    looked = examination.loss_images(fresh().held_out, cpu, BYTES.to_model)
    shown, own = examination._training_pixels(fresh().train, (0, 1))
    at_the_end = Damaged(photos, "damaged")
    at_the_end.bad = frozenset([299])  # for which the first stands in, of the other class
    batch = OverfitBatch.of(
        prepare(at_the_end, replace(ASKED, held_out=0)).train,
        objective,
        cpu,
        BYTES.to_model,
        ASKED.image_format.to_view,
    )
    assert held is not None
    assert looked is not None
    for x0, label in (
        (held.x0, held.conditions.label),
        (probe.x0, probe.conditions.label),
        (looked.x0, looked.conditions.label),
        (batch.x0, batch.conditions.label),
    ):
        assert label is not None
        numbers = ((x0[:, :2, 0, 0] + 1) * 127.5).round().long()
        assert ((numbers[:, 0] + 256 * numbers[:, 1]) % 2).tolist() == label.tolist()
    assert own is not None
    assert ((shown[:, 0, 0, 0] + 256 * shown[:, 0, 0, 1].astype(int)) % 2).tolist() == own.tolist()


@pytest.mark.slow
def test_when_everything_is_gone_it_says_so_at_the_batch_that_needs_it(photos: Path) -> None:
    source = Damaged(photos, "damaged")
    stream = ImageStream(prepare(source, replace(ASKED, held_out=0)).train, seed=0)
    whole = [stream.batch(first, 8).pixels for first in range(0, 64, 8)]
    source.bad = frozenset(range(300))
    stream.close()
    fresh = ImageStream(prepare(source, replace(ASKED, held_out=0)).train, seed=0)
    with pytest.raises(RunError, match=r"100 images in a row .*the last: empty"):
        fresh.batch(0, 8)
    source.bad = frozenset()
    fresh = ImageStream(prepare(source, replace(ASKED, held_out=0)).train, seed=0)
    assert [torch.equal(fresh.batch(first, 8).pixels, part) for first, part in zip(range(0, 64, 8), whole)] == [
        True
    ] * 8
    fresh.close()


@pytest.mark.slow
def test_trouble_ahead_is_nobody_s_business_yet(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image whose decoding fails altogether fails the batch it is in, and none before."""
    prepared = prepare(open_source(photos), replace(ASKED, held_out=0))
    stream, good = ImageStream(prepared.train, 1), ImageStream(both(photos, replace(ASKED, held_out=0))[1].train, 1)
    assert isinstance(prepared.train.pixels, LazyPixels)
    fatal, once = int(stream.index(70, 1)[0]), prepared.train.pixels._one

    def one(row: int) -> np.ndarray:
        if row == fatal:
            raise RunError("gone")
        return once(row)

    monkeypatch.setattr(prepared.train.pixels, "_one", one)
    for first in range(0, 70, 5):
        assert torch.equal(stream.batch(first, 5).pixels, good.batch(first, 5).pixels)
    for _ in range(2):
        with pytest.raises(RunError, match="gone"):
            stream.batch(70, 5)
    assert torch.equal(stream.batch(75, 5).pixels, good.batch(75, 5).pixels)
    stream.close()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 0, 1, -7]), st.integers(1, 70))
        | st.tuples(st.integers(2, 2000), st.integers(1, 70)),
        min_size=1,
        max_size=12,
    )
)
def test_reading_ahead_changes_nothing(photos: Path, reads: list[tuple[int, int]]) -> None:
    """Reads that go on where the last ended (0), skip or go back a little, or seek; across epochs of 300."""
    fly, memory = _sets(photos)
    stream, plain = ImageStream(fly.train, 5), ImageStream(memory.train, 5)
    position = 0
    for jump, size in reads:
        position = max(0, position + jump) if abs(jump) < 8 else jump
        mine, theirs = stream.batch(position, size), plain.batch(position, size)
        assert torch.equal(mine.pixels, theirs.pixels)
        assert torch.equal(mine.index, theirs.index)
        assert mine.conditions.label is not None
        assert theirs.conditions.label is not None
        assert torch.equal(mine.conditions.label, theirs.conditions.label)
        position += size
    stream.close()


@pytest.fixture(autouse=True)
def _not_far_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """As far as one batch, so that many short reads take no time."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.name == "test_reading_ahead_changes_nothing":
            patch.setattr(ahead, "_LEAST", 40)
            patch.setattr(ahead, "_BATCHES", 1)
        yield


_made: dict[Path, tuple[Dataset, Dataset]] = {}


def _sets(photos: Path) -> tuple[Dataset, Dataset]:
    if photos not in _made:
        _made[photos] = both(photos)
    return _made[photos]


@pytest.mark.slow
def test_the_next_batches_are_decoded_before_they_are_asked_for(photos: Path) -> None:
    decoded: list[int] = []

    class Watched(FolderSource):
        def open(self, i: int) -> Image.Image:
            decoded.append(i)
            return super().open(i)

    stream = ImageStream(prepare(Watched(photos, "watched"), ASKED).train, seed=0)
    decoded.clear()
    stream.batch(0, 16)
    assert len(decoded) == 16  # nobody is known to read on
    stream.batch(16, 16)
    wait_until(lambda: len(decoded) >= 16 + 16 + ahead._LEAST, every=0.001)
    before = len(decoded)
    stream.batch(32, 16)
    stream.batch(48, 16)
    wait_until(lambda: len(decoded) >= before + 32, every=0.001)
    time.sleep(0.05)
    assert len(decoded) == before + 32  # each once, and no further ahead than it should be
    for position in (700, 100, 900):  # those who only look something up set nothing in motion
        stream.batch(position, 1)
    time.sleep(0.05)
    assert len(decoded) == before + 35
    stream.batch(64, 16)
    wait_until(lambda: len(decoded) >= before + 35 + 16, every=0.001)
    stream.close()


def test_memory_bounds_how_far_ahead_is_read(stream: ImageStream, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream._prefetcher is not None
    assert stream._prefetcher._reach(64) == 512
    monkeypatch.setattr(ahead, "_BYTES", 100 * 3 * 8 * 8)
    assert stream._prefetcher._reach(64) == 100
    assert stream._prefetcher._reach(200) == 200
    for first in (0, 16, 5000, 5016):
        stream.batch(first, 16)
    assert min(stream._prefetcher._blocks) >= 5008  # what was read ahead for the position before the seek is gone


@pytest.mark.slow
def test_closing_ends_the_threads_and_reading_on_starts_them_anew(photos: Path) -> None:
    before = set(threading.enumerate())
    fly, memory = both(photos)
    stream, plain = ImageStream(fly.train, 0), ImageStream(memory.train, 0)
    for first in range(0, 64, 16):
        stream.batch(first, 16)
    mine = set(threading.enumerate()) - before
    assert mine
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 20
    wait_until(lambda: not any(thread.is_alive() for thread in mine), every=0.001)
    assert torch.equal(stream.batch(64, 16).pixels, plain.batch(64, 16).pixels)
    stream.close()


def test_threads_end_with_whoever_forgot_to_close(photos: Path) -> None:
    before = set(threading.enumerate())
    fly = prepare(open_source(photos), ASKED)
    ImageStream(fly.train, 0).batch(0, 16)
    mine = set(threading.enumerate()) - before
    assert mine
    del fly
    wait_until(lambda: not any(thread.is_alive() for thread in mine), every=0.001)


# Where decoded images live by themselves


def chosen(photos: Path, to_draw: int = 0, **asked: object) -> Dataset:
    return prepare(open_source(photos), replace(ASKED, cache="auto", **asked), to_draw=to_draw)


def test_small_sets_stay_in_memory_without_a_word(photos: Path) -> None:
    prepared = chosen(photos, to_draw=10)
    assert isinstance(prepared.train.pixels, np.ndarray)
    assert prepared.placement == ""


@pytest.mark.slow
def test_large_sets_are_decoded_once_if_that_pays(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_MEMORY_FILES", 100)
    few = chosen(photos, to_draw=100)
    assert isinstance(few.train.pixels, LazyPixels)
    assert "100 of 300; --data.cache disk" in few.placement
    many = chosen(photos, to_draw=200)
    assert many.placement.startswith("decoded once, for all runs: under 0.1 MB decoded, in ")
    found = chosen(photos, to_draw=1)  # once it is there, it is used
    assert (found.placement, found.train.fingerprint) == ("", many.train.fingerprint)
    assert not isinstance(found.train.pixels, LazyPixels)


@pytest.mark.slow
def test_a_run_that_goes_on_decodes_as_it_began(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its fingerprint would be another, and the images held out of very many as well."""
    monkeypatch.setattr(preparing, "_MEMORY_FILES", 100)
    source, asked = open_source(photos), replace(ASKED, cache="auto")
    fly = prepare(source, asked, to_draw=100).train.fingerprint
    assert prepare(source, asked, to_draw=5000, known=fly).train.fingerprint == fly
    disk = prepare(source, asked, to_draw=5000).train.fingerprint
    assert prepare(source, asked, to_draw=10, known=disk).train.fingerprint == disk
    assert prepare(source, asked, to_draw=5000, known=fly).train.fingerprint == fly  # though it is in the cache by now
    other = replace(asked, size=4)
    assert not prepare(source, other, to_draw=10, known=disk).train.fingerprint.startswith(lazy.UNREAD)
    for cache, known in (("disk", fly), ("memory", fly), ("none", disk)):
        with pytest.raises(RequestError, match=f"resume with cache = auto.*cache = {cache}"):
            prepare(source, replace(asked, cache=cache), known=known)  # type: ignore[arg-type]
    monkeypatch.setattr("unfog.data.cache.shutil.disk_usage", lambda folder: type("", (), {"free": 1000}))
    with pytest.raises(RequestError, match=r"UNFOG_CACHE .*enough space"):
        prepare(source, replace(asked, size=12), known=disk)


def test_what_does_not_fit_in_half_the_room_is_decoded_each_time(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_MEMORY_FILES", 100)
    monkeypatch.setattr("unfog.data.cache.shutil.disk_usage", lambda folder: type("", (), {"free": 300 * 192 * 2 - 1}))
    prepared = chosen(photos)
    assert isinstance(prepared.train.pixels, LazyPixels)
    assert "are more than half of the 0.1 MB free" in prepared.placement
    assert "`unfog pack SOURCE OUT`" in prepared.placement


@pytest.mark.slow
def test_an_interrupted_pack_counts_as_room_that_there_is(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that began with it would go on without, which is refused."""
    monkeypatch.setattr(preparing, "_MEMORY_FILES", 100)
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 100)
    total, source, asked = 2 * 300 * 64**2 * 3, open_source(photos), replace(ASKED, cache="auto", size=64)

    def room() -> int:
        return total - sum(path.stat().st_size for path in cache_folder().glob("*/pixels.u8"))

    def stop(done: int, total: int) -> None:
        if done >= 200:
            raise KeyboardInterrupt

    monkeypatch.setattr("unfog.data.prepare.free_bytes", room)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, asked, stop, to_draw=5000)
    assert room() < total
    assert not isinstance(prepare(source, asked, to_draw=5000).train.pixels, LazyPixels)


def test_without_a_cache_to_write_to_small_ones_stay_in_memory(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "file/cache"))
    monkeypatch.setattr(preparing, "_MEMORY_FILES", 100)
    assert "in memory, as the cache in" in chosen(photos).placement
    monkeypatch.setattr(preparing, "_MEMORY_PIXEL_BYTES", 1000)
    prepared = chosen(photos)
    assert isinstance(prepared.train.pixels, LazyPixels)
    assert "cannot be written" in prepared.placement


@pytest.mark.slow
def test_images_in_colour_among_grey_ones_stay_in_colour(tmp_path: Path) -> None:
    for i in range(140):  # every third is looked at
        Image.new("RGB", (10, 10), (i, i, i) if i % 3 != 1 else (i, 0, 99)).save(tmp_path / f"{i:03}.png")
    for asked, channels in ((Data(cache="none"), 3), (Data(cache="none", channels=1), 1)):
        prepared = prepare(open_source(tmp_path), asked)
        assert prepared.settings.channels == prepared.train.pixels.shape[1] == channels
    first = prepare(open_source(tmp_path), Data(cache="none", held_out=0)).train.pixels[1:2]
    assert first[0, :, 0, 0].tolist() == [1, 0, 99]
