"""Disks and mounts that cannot be reached for a while: nothing is taken for missing, and the run goes on."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from faults.harness import Job, Recipe, events, resume, step_reached, steps_saved, train
from faults.mounts import Mount, SmallDisk
from served import make_run
from unfog.config.requests.pack import PackRequest
from unfog.data import outages
from unfog.data.dataset import ImageSet
from unfog.data.file_rows import FileRows, load_rows
from unfog.data.lazy import outage_of
from unfog.data.outages import Outage
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.errors import Interrupted, RunError
from unfog.pipeline.load_data import OutageNotice
from unfog.pipeline.pack import pack
from unfog.process.run_place import RunPlace
from unfog.process.run_status import RunStatus, find_runs
from unfog.process.signals import StopSignals
from unfog.reporting.report import write_report
from unfog.serve.runs import RunList
from waiting import wait_until

ALL = np.arange(40)
NOBODY = 65534
BIND, FUSE = "bind mount", "FUSE"


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; runs in other ones pause as they do."""
    monkeypatch.setattr(outages, "_RETRY", 0.02)
    monkeypatch.setattr(outages, "_REPORT", 0.01)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may enter, unlike tmp_path."""
    folder = Path(tempfile.mkdtemp(prefix="outage-"))
    folder.chmod(0o755)
    yield folder
    os.seteuid(os.getuid())
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No image is read before training, so that the system keeps none of them in memory."""
    monkeypatch.setattr("unfog.data.scan.check_range", lambda source, ranges: [])


@pytest.fixture
def mount() -> Iterator[Callable[..., Mount]]:
    """Makes mounts that are gone after the test."""
    made: list[Mount] = []

    def make(real: Path, at: Path, fuse: bool = False) -> Mount:
        made.append(Mount(real, at, fuse))
        return made[-1]

    yield make
    Job.end_all()
    for one in reversed(made):
        one.remove()


def fill(folder: Path, count: int = 40, seed: int = 0, side: int = 16) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(folder / f"{i:03}.png")
    return folder


def opened(source: Path) -> tuple[ImageSet, list[str]]:
    """Images that are decoded as they are read, and what the reader is told of outages."""
    images, told = (
        prepare(open_source(source), Data(size=16, channels=3, range=(0, 255), held_out=0, cache="none")).train,
        [],
    )
    images.pixels.source.outage.on_wait = told.append
    images.take(ALL[:1])
    return images, told


def forget(file: Path) -> None:
    """Drop a file from memory, as what is there needs no mount."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def renamed(folder: Path) -> Iterator[None]:
    folder.rename(folder.with_name("elsewhere"))
    yield
    folder.with_name("elsewhere").rename(folder)


@contextmanager
def forbidden(paths: list[Path]) -> Iterator[None]:
    modes = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(0)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)
    for path, mode in zip(paths, modes):
        path.chmod(mode)


def assert_survived(images: ImageSet, told: list[str], away) -> None:
    """What is read from within an outage is what would have been read without it."""
    pixels = images.pixels
    with ThreadPoolExecutor(1) as reader:
        with away:
            task = reader.submit(images.take, ALL)
            wait_until(lambda: told)
            assert pixels.skipped == [], "nothing is known of the images"
        assert task.result(30).rows.tolist() == ALL.tolist()
    assert told[0], "the reader is told why it waits"
    assert told[-1] == ""
    assert pixels.skipped == []
    pixels.close()


@pytest.mark.parametrize("kind", [BIND, FUSE, "renamed", "folder forbidden", "files forbidden"])
def test_images_out_of_reach_are_waited_for(place: Path, mount, kind: str) -> None:
    if "forbidden" in kind and os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    real, at = fill(place / "real"), place / "at"
    if kind in (BIND, FUSE):
        away = mount(real, at, fuse=kind == FUSE).away()
    else:
        real.rename(at)
        away = renamed(at) if kind == "renamed" else forbidden([at] if kind[:6] == "folder" else list(at.iterdir()))
    assert_survived(*opened(at), away)


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_an_archive_out_of_reach_is_waited_for(place: Path, mount, unsampled, form: str) -> None:
    """The descriptor of the dead mount is of no use once the mount is back."""
    (place / "real").mkdir()
    shutil.make_archive(str(place / "real/set"), form, fill(place / "set", side=256))
    fuse = mount(place / "real", place / "at", fuse=True)
    assert_survived(*opened(place / f"at/set.{form}"), fuse.away())


@pytest.mark.parametrize("form", ["pack", "npy"])
def test_a_mapped_file_on_a_mount_that_dies_is_waited_for(place: Path, mount, form: str) -> None:
    """A read of a mapped file would end the process with SIGBUS."""
    x = np.random.default_rng(0).integers(0, 256, (40, 256, 256, 3), np.uint8)
    (place / "real").mkdir()
    if form == "npy":
        np.save(place / "real/set.npy", x)
    else:
        np.save(place / "x.npy", x)
        pack(PackRequest(str(place / "x.npy"), place / "real/set.pack", Data(size=256, held_out=0)))
    fuse = mount(place / "real", place / "at", fuse=True)
    source, told = open_source(place / f"at/set.{form}"), []
    images = prepare(source, Data(size=256, channels=3, held_out=0, cache="none")).train
    source.outage.on_wait = told.append
    assert outage_of(images) is source.outage, "a run hears of it"
    images.take(ALL[:1])
    forget(place / f"at/set.{form}{'/pixels.u8' * (form == 'pack')}")
    with ThreadPoolExecutor(1) as reader:
        with fuse.away():
            task = reader.submit(images.take, ALL)
            wait_until(lambda: told)
        batch = task.result(30)
    assert told[0]
    assert told[-1] == ""
    assert np.array_equal(batch.pixels, x.transpose(0, 3, 1, 2))
    if form == "npy":
        images.pixels.close()


def test_rows_on_a_mount_that_dies_are_waited_for_and_a_changed_file_is_refused(place: Path, mount) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 65536), np.uint8)
    (place / "real").mkdir()
    x.tofile(place / "real/x")
    fuse = mount(place / "real", place / "at", fuse=True)
    rows, told = FileRows(place / "at/x", place / "at", np.uint8, x.shape, waits=Outage()).rows(slice(8, 40)), []
    assert rows.waits is not None
    rows.waits.on_wait = told.append
    with ThreadPoolExecutor(1) as reader:
        with fuse.away():
            task = reader.submit(rows.take, ALL[:32])
            wait_until(lambda: told)
        assert np.array_equal(task.result(30), x[8:])
        told.clear()
        forget(place / "at/x")
        with fuse.away():
            task = reader.submit(rows.take, ALL[:32])
            wait_until(lambda: told)
            x.tofile(place / "real/x")
        with pytest.raises(RunError, match="has changed"):
            task.result(30)


def test_rows_of_a_file_are_those_of_an_array(place: Path, mount) -> None:
    x = np.random.default_rng(0).integers(0, 256, (20, 3, 8), np.uint8)
    (place / "real").mkdir()
    np.save(place / "real/x.npy", x)
    np.save(place / "real/columns.npy", np.asfortranarray(x))
    mount(place / "real", place / "at", fuse=True)
    rows = load_rows(place / "at/x.npy", place)
    assert isinstance(rows, FileRows)
    keys = [3, -1, slice(2, 9), slice(None, None, 3), slice(-3, None), [4, -2, 4], np.arange(20) % 3 == 0, (2, 1)]
    keys += [([1, 4, 1], [0, 2, 1]), ([[1], [2]], [0, 2]), ([4, 2], slice(None), [0, 5]), (3, slice(None), [0, 5])]
    keys += [
        (..., 1),
        (None, 3),
        (np.arange(20) % 7 == 0, [0, 1, 2]),
        ([2, 5], slice(1)),
        (slice(1, 5), 2),
        (slice(None), slice(None), 3),
        slice(9, 3),
        np.array([[1, 2], [3, 4]]),
    ]
    for key in keys:
        assert np.array_equal(rows[key], x[key]), key
    assert np.array_equal(np.asarray(rows.rows(slice(4, 9))), x[4:9])
    assert (rows.shape, rows.dtype, len(rows), rows.nbytes) == (x.shape, x.dtype, len(x), x.nbytes)
    assert np.array_equal(load_rows(place / "at/columns.npy", place), x)
    with pytest.raises(IndexError):
        rows[20]


def test_an_arrow_file_that_is_not_on_a_local_disk_has_a_warning(place: Path, mount) -> None:
    datasets = pytest.importorskip("datasets")
    fill(place / "set", 8)
    images = [Image.open(path) for path in sorted((place / "set").iterdir())]
    datasets.Dataset.from_dict({"image": images}).save_to_disk(str(place / "real/set"))
    assert list(open_source(place / "real/set").reading_warnings) == []
    mount(place / "real", place / "at", fuse=True)
    (warning,) = open_source(place / "at/set").reading_warnings
    assert "unfog pack" in warning


def test_a_class_on_a_mount_of_its_own_is_waited_for(place: Path, mount) -> None:
    fill(place / "at/a", 20)
    one = mount(fill(place / "real", 20, seed=1), place / "at/b")
    assert_survived(*opened(place / "at"), one.away())


def test_the_folder_of_a_class_that_is_renamed_for_a_moment_is_waited_for(place: Path) -> None:
    fill(place / "set/a", 20)
    fill(place / "set/b", 20, seed=1)
    assert_survived(*opened(place / "set"), renamed(place / "set/b"))


def test_a_file_or_a_folder_of_a_class_that_is_removed_is_gone(place: Path, monkeypatch) -> None:
    monkeypatch.setattr(outages, "_REMOVED_AFTER", 0.5)
    fill(place / "a", 20)
    fill(place / "b", 20, seed=1)
    images, told = opened(place)
    (place / "a/003.png").unlink()
    assert images.take(ALL[3:5]).rows.tolist() == [4, 4]
    shutil.rmtree(place / "b")
    assert images.take(ALL[-2:]).rows.tolist() == [0, 0]
    images.take(ALL)  # what was missing before the wait was tried again
    assert {one.name for one in images.pixels.skipped} == {"a/003.png", *(f"b/{i:03}.png" for i in range(20))}
    assert told[-1:] in ([], [""]), "it was waited for half a second at most"
    images.pixels.close()


def test_images_that_were_never_in_reach_are_not_waited_for(place: Path, unsampled) -> None:
    fill(place / "set")
    # With everything given, so that nothing is found from a sample.
    data = Data(size=16, channels=3, range=(0, 255), held_out=0, cache="none")
    images = prepare(open_source(place / "set"), data).train
    shutil.rmtree(place / "set")
    with pytest.raises(RunError, match="in a row"):
        images.take(ALL)


def test_the_wait_for_images_has_an_end_and_obeys_a_stop(place: Path) -> None:
    images, told = opened(fill(place / "set"))
    with renamed(place / "set"):
        images.pixels.source.outage.patience = 1.5
        with pytest.raises(RunError, match="unfog resume"):
            images.take(ALL)
        with StopSignals(saves=False, quiet=True) as stop:
            images.pixels.source.outage.patience = 600.0
            images.pixels.source.outage.on_wait = OutageNotice(stop, 600.0, warn=told.append)
            stop.request("test")
            began = time.monotonic()
            with pytest.raises(Interrupted):
                images.take(ALL)
            assert time.monotonic() - began < 60  # it would wait for 600
    assert images.pixels.skipped == []
    images.pixels.close()


def test_a_run_folder_is_moved_only_where_it_cannot_be_out_of_reach(place: Path, mount) -> None:
    folder = place / "at/run"
    (place / "real/run").mkdir(parents=True)
    one = mount(place / "real", place / "at")
    seen = RunPlace(folder)
    assert seen.look() == "here"
    with one.away():
        assert seen.look() == "away"
    assert seen.look() == "here"
    folder.rename(place / "at/other")
    assert (seen.look(), seen.moved_to()) == ("moved", place / "at/other")
    folder.mkdir()
    assert seen.look() == "moved", "another folder is at the path"
    (place / "at/other").rmdir()
    assert seen.look() == "moved"
    folder.rmdir()
    assert (seen.look(), seen.moved_to()) == ("moved", None), "the folder above does not list it"


def test_a_run_folder_that_is_itself_a_mount_is_out_of_reach_while_that_is_gone(place: Path, mount) -> None:
    one = mount(place / "real", place / "run")
    seen = RunPlace(place / "run")
    with one.away():
        assert seen.look() == "away"
    assert seen.look() == "here"


@pytest.mark.parametrize("kind", [BIND, FUSE])
@pytest.mark.parametrize("whole", [True, False])
def test_the_page_keeps_runs_whose_mount_is_gone(place: Path, mount, kind: str, whole: bool, monkeypatch) -> None:
    folder = place / "runs"
    make_run(place / "real/a")
    make_run(place / "real/b" if whole else folder / "b")
    one = mount(*((place / "real", folder) if whole else (place / "real/a", folder / "a")), fuse=kind == FUSE)
    runs = RunList(folder)
    runs.scan()
    runs.tick(everything=True)
    numbers = {entry.name: entry.id for entry in runs}
    with one.away():
        wait_until(runs.scan)  # the system remembers for a second that a file is there
        runs.tick(everything=True)
        shown = {entry.name: entry.as_json() for entry in runs}
        assert {name: row["id"] for name, row in shown.items()} == numbers
        assert "cannot be reached" in shown["a"]["detail"]
        assert (shown["b"]["state"] == "finished") == (not whole)
        assert not runs.scan(), "said once"
        runs.read_columns(runs[numbers["a"]])
    assert runs.scan()
    runs.tick(everything=True)
    assert {entry.name: (entry.id, entry.as_json()["state"]) for entry in runs} == {
        name: (number, "finished") for name, number in numbers.items()
    }
    assert runs.read_columns(runs[numbers["a"]]).rows == 40
    shutil.rmtree(folder / "b")
    assert runs.scan()
    assert [entry.name for entry in runs] == ["a"], "a folder that was removed is gone"
    monkeypatch.setattr("unfog.serve.runs.PATIENCE", 0.0)
    with one.away():
        wait_until(lambda: runs.scan() and not len(runs))


RUN = {"--preview.every": 40, "--evaluate.every": 40, "--size": 16, "--ema-snapshots.every": 40}


@pytest.mark.parametrize("kind", [BIND, FUSE])
def test_a_run_waits_for_its_folder(place: Path, mount, faults, kind: str) -> None:
    run = place / "at/run"
    one = mount(place / "real", place / "at", fuse=kind == FUSE)
    job = train(Recipe("outage", steps=200, every=40, flags=RUN), run)
    with faults.tried(f"{kind} of the run is gone for seconds"):
        assert job.until(lambda: steps_saved(run) and step_reached(run) > 42)
        with one.away():
            assert job.until(lambda: "cannot be reached" in job.said)
            assert run not in find_runs(place), "listing what is there does not fail"
            RunStatus.read(run)
        said = job.ends()
    assert said.count("its disk or mount is gone") == 1, "said once"
    assert "can be reached again" in said
    assert [row["step"] for row in events(run, "finished")] == [200]
    assert step_reached(run) == 200
    assert 200 in steps_saved(run)
    assert "can be reached again" in (run / "console.log").read_text()
    assert (run / "samples/00000200.png").is_file()
    write_report(run)


def test_a_run_that_waits_for_images_stops_when_it_is_asked_to(place: Path, mount, faults) -> None:
    one, run = mount(fill(place / "real"), place / "at"), place / "run"
    flags = {**RUN, "--data.cache": "none", "--evaluate.every": -1, "--preview.every": -1}
    recipe = Recipe("images away", steps=4000, every=1000, flags=flags, source=str(place / "at"))
    job = train(recipe, run)
    with faults.tried("images are gone, and a stop comes"):
        assert job.until(lambda: step_reached(run) > 2)
        with one.away():
            assert job.until(lambda: "the images cannot be reached" in job.said)
            job.ask("SIGTERM", run)
            said = job.ends(3, seconds=30)
        assert said.count("the images cannot be reached") == 1
        assert events(run, "quarantined") == []
        assert steps_saved(run)[-1] == step_reached(run)
    more = resume(run, "--steps", steps_saved(run)[-1] + 4)
    more.ends()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose network takes more than the full disk has."""
    run = tmp_path_factory.mktemp("large") / "run"
    flags = {**RUN, "--network": "tiny", "--evaluate.every": -1, "--preview.every": -1}
    train(Recipe("exported", steps=1, every=1, flags=flags), run).ends()
    return run


@pytest.mark.parametrize("form", ["safetensors", "diffusers", "pt2", "onnx"])
def test_an_export_to_a_full_disk_names_the_bytes_that_it_needs(place: Path, large: Path, form: str) -> None:
    disk = SmallDisk(place / "small", "size=600k")
    try:
        if form in ("onnx", "diffusers"):
            pytest.importorskip({"onnx": "onnxscript", "diffusers": "diffusers"}[form])
        said = Job("export", large, disk.path / "out", "--format", form, before=disk.inside).ends(1)
        assert "No space left on device" in said
        assert " MB" in said
        assert "bug in unfog" not in said
        assert not os.path.exists(disk.path / "out")
    finally:
        Job.end_all()
        disk.remove()
