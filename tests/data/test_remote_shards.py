"""Shards far away: what a rank fetches, what is kept, and what happens when they fail, over real sockets."""

import json
import re
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import unfog
from conftest import FEW_PICTURES, TRANSFORMER
from forked import Forked
from shard_server import EACH, SHARDS, Server, png, serving, shard
from unfog.data import decode_pool as bulk
from unfog.data import stream as ahead
from unfog.data.lazy import LazyPixels
from unfog.data.packs.latent_cache import EncodeJob
from unfog.data.prepare import prepare
from unfog.data.settings import Data, bytes_of
from unfog.data.sources import storage as remote
from unfog.data.sources.base import RemotePolicy
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream, ReadOrder
from unfog.data.webdataset import remote_shards
from unfog.data.webdataset.remote_shards import ByteRangeCache
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import cache_folder
from unfog.pipeline.skipped_images import FailureReporter
from unfog.process.run_folder import RunFolder
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import read_events

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp")

N = SHARDS * EACH
ASKED = Data(size=8, channels=3, cache="none", held_out=0)
CARE = RemotePolicy(max_failed=0.2)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(bulk, "_FIRST_PAUSE", 0.01)
    with serving() as server:
        yield server


def opened(web: Server, care: RemotePolicy = CARE, seed: int = 0) -> ImageStream:
    """The stream of all images; the index of the shards has been read by then."""
    return ImageStream(prepare(open_source(web.url, policy=care), ASKED).train, seed)


def shards_of(stream: ImageStream) -> remote_shards.RemoteShards:
    assert isinstance(stream.images.pixels, LazyPixels)
    assert stream.images.pixels.remote_shards is not None
    return stream.images.pixels.remote_shards


def numbers(stream: ImageStream, first: int, count: int, batch: int = 10) -> list[int]:
    """The number of the image at each of these positions, by its colour; index and label are of the same image."""
    found: list[int] = []
    for at in range(first, first + count, batch):
        got = stream.batch(at, min(batch, first + count - at))
        colours = (got.pixels[:, 0, 0, 0] + 256 * got.pixels[:, 1, 0, 0].long()).tolist()
        assert got.conditions.label is not None
        assert got.conditions.label.tolist() == [number % 2 for number in colours]
        assert got.index.tolist() == colours  # as numbers follow the order of the set
        found += colours
    return found


# What a rank reads


def test_a_course_counts_its_positions_in_turns() -> None:
    for first, batch, begin, share in ((0, 1, 0, 1), (0, 10, 0, 10), (7, 10, 3, 4), (5, 4, 3, 1), (0, 6, 6, 0)):
        course = ReadOrder(first, batch, begin, share)
        wanted = [p for p in range(60) if p >= first and begin <= (p - first) % batch < begin + share]
        if share:
            assert course.positions(0, len(wanted)).tolist() == wanted
            assert course.positions(3, 5).tolist() == wanted[3:8]
        for p in range(50):
            for size in (1, 2, 5):
                here = [wanted.index(q) if q in wanted else None for q in range(p, p + size)]
                whole = None not in here and (share == batch or here[-1] - here[0] == size - 1)
                assert course.index_of(p, size) == (here[0] if whole else None)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_fetches_its_own_images_alone(web: Server, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(ahead, "_LEAST", 8)
    monkeypatch.setattr(ahead, "_BATCHES", 1)
    batch, steps = 10, 3  # so that nobody reads ahead into the next epoch, where each image comes once more
    alone = opened(web).index(0, batch * steps).tolist()
    fetched = []
    for rank in range(ranks):
        begin, end = rank * batch // ranks, (rank + 1) * batch // ranks
        stream = opened(web)
        web.fetched.clear()
        stream.prefetch_share(begin, end - begin, batch)
        for step in range(steps):
            first = step * batch + begin
            for at, size in ((first, 2), (first + 2, end - begin - 2)):  # in micro-batches
                assert numbers(stream, at, size) == alone[at : at + size]
        ahead_of_it = stream._prefetcher
        assert ahead_of_it is not None
        for block in ahead_of_it._blocks.values():
            block.result()
        index = stream.images.pixels.source.index  # type: ignore[attr-defined]
        own = [p for p in range(N) if begin <= p % batch < end]
        places = {p: (index.place(int(stream.index(p, 1)[0]))) for p in own}
        asked = {(Path(places[p][0]).name, places[p][1]) for p in own if p < batch * steps}
        ahead_too = {(Path(places[p][0]).name, places[p][1]) for p in own}
        assert asked <= web.members() <= ahead_too
        assert len(web.members()) > len(asked), "it reads ahead, on its own course"
        assert sum(size for *_, size in web.fetched) == len(web.members()) * len(png(0)), "each once, and nothing else"
        fetched.append(web.members())
        assert numbers(stream, 3, 9) == alone[3:12], "others may still be asked for"
        stream.close()
    assert sum(map(len, fetched)) == len(set().union(*fetched)), "none is fetched by two"


def test_a_share_that_is_none_is_refused(web: Server) -> None:
    stream = opened(web)
    for wrong in ((-1, 5, 10), (6, 5, 10), (0, 0, 0), (0, 2, 1)):
        with pytest.raises(ValueError, match="of batches of"):
            stream.prefetch_share(*wrong)
    stream.prefetch_share(10, 0, 10)  # a rank of more ranks than images in a batch
    assert numbers(stream, 0, 4) == numbers(opened(web), 0, 4)


# What is kept


def test_what_was_read_is_not_fetched_again(web: Server) -> None:
    care = replace(CARE, cache_bytes=10**9)
    first = numbers(opened(web, care), 0, N)
    assert len(web.members()) == N
    web.fetched.clear()
    assert numbers(opened(web, care), 0, 2 * N)[:N] == first
    assert not web.members()
    assert len(numbers(opened(web), 0, 8)) == 8
    assert web.members(), "unless nothing is to be kept"


@pytest.mark.parametrize("placed", ["none", "auto"])
def test_the_cache_of_what_is_read_is_opened_once(web: Server, monkeypatch: pytest.MonkeyPatch, placed: str) -> None:
    rooms: list[float] = []
    monkeypatch.setattr(remote_shards, "make_room", rooms.append)
    monkeypatch.setattr("unfog.data.prepare._placement", lambda *args: ("none", "for want of room"))
    care = replace(CARE, cache_bytes=10**9)
    found = prepare(open_source(web.url, policy=care), replace(ASKED, cache=placed))
    assert len(rooms) == 1
    assert found.placement.startswith("for want of room; what is read of the shards is kept for later epochs")


def test_what_was_kept_and_is_damaged_is_fetched_anew(web: Server) -> None:
    care = replace(CARE, cache_bytes=10**9)
    first = numbers(opened(web, care), 0, N)
    web.fetched.clear()
    files = sorted((cache_folder() / "members").iterdir())
    assert len(files) == SHARDS
    files[0].write_bytes(files[0].read_bytes()[:-1500])
    damaged = bytearray(files[1].read_bytes())
    damaged[-len(png(0)) :] = bytes(len(png(0)))
    files[1].write_bytes(damaged)
    files[2].unlink()
    assert numbers(opened(web, care), 0, N) == first
    assert EACH < len(web.members()) < 2 * EACH


def test_what_was_kept_of_a_shard_is_not_taken_for_its_successor(web: Server) -> None:
    care, rows = replace(CARE, cache_bytes=10**9), np.arange(EACH)
    assert opened(web, care).images.take(rows).pixels[:, 0, 0, 0].tolist() == rows.tolist()
    web.files["s-000.tar"] = web.files["s-001.tar"]  # of the same size, with its images in the same places
    assert opened(web, care).images.take(rows).pixels[:, 0, 0, 0].tolist() == (rows + EACH).tolist()


def test_a_transfer_that_went_wrong_is_not_kept(web: Server) -> None:
    care = replace(CARE, cache_bytes=10**9)
    stream = opened(web, care)
    web.faults["s-004.tar"] = "garbage:3"
    assert numbers(stream, 0, N) == numbers(opened(web, care), 0, N)
    assert not shards_of(stream).failed
    assert not stream.images.pixels.skipped  # type: ignore[attr-defined]


def test_a_member_is_kept_whole_for_its_shard_its_place_and_its_size_or_not_at_all(tmp_path: Path) -> None:
    cache = ByteRangeCache(tmp_path, 10**9, 100)
    cache.write("0" * 32, 1024, b"one")
    assert cache.read("0" * 32, 1024, 3) == b"one"
    assert cache.read("1" * 32, 1024, 3) is None
    assert cache.read("0" * 32, 1024, 4) is None
    assert cache.read("0" * 32, 1536, 3) is None
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"x", b""):
        file.write_bytes(damaged)
        assert cache.read("0" * 32, 1024, 3) is None
    file.write_bytes(whole)
    assert cache.read("0" * 32, 1024, 3) == b"one"
    cache.discard("0" * 32, 1024)
    assert cache.read("0" * 32, 1024, 3) is None
    cache.write("0" * 32, 1024, b"")
    assert cache.read("0" * 32, 1024, 0) is None


def fill(cache: ByteRangeCache, key: str, parts: int, size: int = 2**16) -> int:
    """Write members of that size all over so many parts of a shard; how many are there then."""
    starts = [
        part * remote_shards._SEGMENT_BYTES + at
        for part in range(parts)
        for at in range(0, remote_shards._SEGMENT_BYTES, size)
    ]
    for start in starts:
        cache.write(key, start, key[:1].encode() * size)
    return sum(cache.read(key, start, size) == key[:1].encode() * size for start in starts)


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.members"))


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shards, "_SEGMENT_BYTES", 2**20)
    limit = 16 * 2**20
    folder, mine = tmp_path / "members", tmp_path / "members/holiday.jpg"
    folder.mkdir()
    mine.write_bytes(b"x" * 2**20)
    (folder / f"{'f' * 32}-000000.members").symlink_to(mine)
    old, new = ByteRangeCache(folder, limit, 8 * 2**20), ByteRangeCache(folder, limit, 12 * 2**20)
    assert fill(old, "a" * 32, 8) == 8 * 16, "a set that fits is kept whole"
    for path in folder.glob("a*"):
        time.sleep(0.01)
        path.touch()
    assert fill(new, "b" * 32, 12) == 12 * 16
    assert taken(folder) <= limit * 1.1
    left = sorted(path.name for path in folder.glob("a*"))
    assert 0 < len(left) < 8, "what is older goes first, and no more of it than is needed"
    assert mine.stat().st_size == 2**20
    assert (folder / f"{'f' * 32}-000000.members").is_symlink(), "nothing is removed that is not its own"


def test_the_limit_holds_for_many_processes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shards, "_SEGMENT_BYTES", 2**18)
    limit, total, size, processes = 16 * 2**20, 12 * 2**20, 2**16, 32
    old = ByteRangeCache(tmp_path, limit, total)
    new = [ByteRangeCache(tmp_path, limit, total, processes) for _ in range(processes)]
    most = 0
    for key, caches in (("a" * 32, [old]), ("b" * 32, new)):
        for number in range(total // size):
            caches[number % len(caches)].write(key, number * size, b"x" * size)
            most = max(most, taken(tmp_path))
    assert most <= limit * 1.1


def test_of_a_set_that_does_not_fit_always_the_same_part_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By least recently used, images that come once an epoch in ever another order would nearly never be found."""
    monkeypatch.setattr(remote_shards, "_SEGMENT_BYTES", 2**18)
    parts, size = 200, 2**16
    limit = parts * 2**18 // 2
    cache = ByteRangeCache(tmp_path, limit, parts * 2**18)
    found = []
    for epoch in range(3):
        starts = np.random.default_rng(epoch).permutation(parts * 2**18 // size) * size
        hits = 0
        for start in starts.tolist():
            if cache.read("c" * 32, start, size) is None:
                cache.write("c" * 32, start, b"c" * size)
            else:
                hits += 1
        found.append(hits / len(starts))
    assert found[0] == 0
    assert 0.35 < found[1] == found[2] < 0.55
    assert taken(tmp_path) <= limit


def test_a_disk_that_refuses_is_gone_without(web: Server) -> None:
    care = replace(CARE, cache_bytes=10**9)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    stream = opened(web, care)
    # A file may grow to no more than this: so it is on a full disk, too, but for the number of the error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (remote_shards._SEGMENT_BYTES // 128 + 4000, before[1]))
    try:
        assert numbers(stream, 0, N) == numbers(opened(web), 0, N)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    cache = shards_of(stream).cache
    assert cache is not None
    assert cache.error.endswith("members cannot be written (File too large)")
    assert numbers(opened(web, care), 0, N) == numbers(opened(web), 0, N), "what was cut off is not believed"


SEVERAL = """
import random, sys
from pathlib import Path
from unfog.data.webdataset import remote_shards
remote_shards._SEGMENT_BYTES = 2**18
cache, dice = remote_shards.ByteRangeCache(Path(sys.argv[1]), 2**22, 2**22), random.Random(sys.argv[2])
found = 0
for _ in range(4000):
    key, place = dice.choice("abcde") * 32, dice.randrange(64) * 16384
    data = f"{key}{place}".encode() * 300
    kept = cache.read(key, place, len(data))
    assert kept in (None, data)
    found += kept is not None
    if kept is None:
        cache.write(key, place, data)
assert found > 100 and not cache.error, (found, cache.error)
"""


def test_processes_share_it(tmp_path: Path) -> None:
    running = [Forked([tmp_path, k], SEVERAL) for k in range(3)]
    assert [one.wait() for one in running] == [0, 0, 0]
    assert taken(tmp_path) <= 2**22 * 1.2


def test_sizes_on_disk() -> None:
    assert (bytes_of("0"), bytes_of("500mb"), bytes_of("1.5GB"), bytes_of("2tb")) == (0, 5e8, 1.5e9, 2e12)
    for wrong in ("", "10", "-1gb", "1e9", "10 gigs", "9999999999gb"):
        with pytest.raises(RequestError, match=r"is not a size; write 500mb, 50gb"):
            Data(cache_limit=wrong)
    with pytest.raises(RequestError, match="failed_shards"):
        Data(failed_shards=1.0)


# Shards that fail

LASTING = {
    "gone": "is not there",
    "busy": r"could not be reached in 3 tries \(the server answers 503.*",
    "cut": r"could not be reached in 3 tries \(ClientPayloadError.*",
    "stalled": "did not answer in time in 3 tries",
    "trickling": "did not answer in time in 3 tries",
    "garbage": r"is damaged \(8 of 8 headers that were read are damaged\)",
    "moved": "is not the file that was indexed",
}
INSIDE = range(3 * EACH, 4 * EACH)


@pytest.mark.parametrize("fault", LASTING)
def test_a_shard_that_fails_is_given_up_and_others_stand_in(
    web: Server, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    stream = opened(web)
    whole = stream.index(0, N).tolist()
    if fault in ("stalled", "trickling"):
        monkeypatch.setattr(remote, "_SILENCE", 0.5)
        monkeypatch.setattr(bulk, "_PATIENCE", 1.0)
    web.faults["s-003.tar"] = fault
    found = numbers(stream, 0, N)
    given_up = shards_of(stream).failed
    assert list(given_up) == ["s-003.tar"]
    assert re.fullmatch(LASTING[fault], given_up["s-003.tar"])
    assert shards_of(stream).image_count("s-003.tar") == EACH
    assert not stream.images.pixels.skipped, "said of the shard, not of each image"  # type: ignore[attr-defined]
    stand_in = {i: new for i, new in zip(whole, found) if i in INSIDE}
    assert all(new == stand_in.get(i, i) for i, new in zip(whole, found)), "all others are as they were"
    assert not set(stand_in.values()) & set(INSIDE)
    assert len(set(stand_in.values())) >= EACH - 3, "from all over the set"
    # Whoever goes on without it sees the same, in whatever pieces.
    later = opened(web, replace(CARE, failed_before=given_up))
    asked = -1
    while asked != (asked := len(web.fetched)):  # what the first stream reads ahead may still be under way
        time.sleep(1)
    web.fetched.clear()
    assert numbers(later, N // 2, N // 2, batch=7) == found[N // 2 :]
    assert not [name for name, *_ in web.fetched if name == "s-003.tar"]
    assert later.images.fingerprint == stream.images.fingerprint


def test_a_shard_that_another_process_has_given_up_is_given_up_here_too(web: Server, tmp_path: Path) -> None:
    prepared, there = prepare(open_source(web.url, policy=CARE), ASKED), opened(web)
    here = ImageStream(prepared.train, 0)
    web.faults["s-003.tar"] = "gone"
    found = numbers(there, 0, N)
    elsewhere = [list(one) for one in FailureReporter.on_this_rank(there.images)]
    assert elsewhere == [["s-003.tar", "is not there", "shard"]]
    missing = FailureReporter(RunFolder(tmp_path), prepared)
    with Recorder(tmp_path, Log(), total=10) as recorder:
        missing.report(recorder, 3, elsewhere)
        missing.report(recorder, 4, elsewhere)
    (event,) = [row for row in read_events(tmp_path / "events.jsonl") if row["kind"] == "quarantined"]
    assert (event["step"], event["shard"], event["images"]) == (3, "s-003.tar", EACH)
    assert missing.shards == {"s-003.tar": "is not there"}
    assert numbers(here, 0, N) == found
    with pytest.raises(RunError, match=r"more than data\.failed_shards allows"):
        shards_of(here).mark_failed({f"s-00{i}.tar": "is not there" for i in range(4)})


@pytest.mark.parametrize("fault", ["gone:3", "busy:6", "stalled:2", "cut:6", "garbage:1"])
def test_a_shard_that_comes_back_is_missed_by_nobody(web: Server, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    stream = opened(web)
    whole = stream.index(0, N).tolist()
    monkeypatch.setattr(remote, "_SILENCE", 0.5)
    web.faults["s-003.tar"] = fault
    assert numbers(stream, 0, N) == whole
    assert not shards_of(stream).failed


def test_a_server_that_restarts_is_waited_for(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_FIRST_PAUSE", 0.1)
    stream = opened(web)
    whole = stream.index(0, N).tolist()
    assert numbers(stream, 0, 20) == whole[:20]
    web.stop()
    timer = threading.Timer(0.4, web.start)
    timer.start()
    assert numbers(stream, 20, N - 20) == whole[20:]
    timer.join()
    assert not shards_of(stream).failed


def test_without_a_network_nothing_is_given_up_and_the_run_says_so(web: Server) -> None:
    stream = opened(web)
    whole = stream.index(0, N).tolist()
    web.faults = dict.fromkeys(web.files, "busy")
    with pytest.raises(RunError, match=r"after 5 tries.*`unfog resume`"):
        stream.batch(0, 8)
    assert not shards_of(stream).failed
    web.faults.clear()
    assert numbers(stream, 0, N) == whole


def test_more_than_may_be_missed_ends_it_with_their_names(web: Server) -> None:
    stream = opened(web)
    web.faults |= dict.fromkeys(("s-001.tar", "s-004.tar", "s-007.tar"), "gone")
    said = r"3 of 10 shards of http.* cannot be used, more than data.failed_shards allows: .*s-00\d\.tar is not there"
    with pytest.raises(RunError, match=said):
        numbers(stream, 0, N)
    assert len(shards_of(stream).failed) == 2
    strict = ImageStream(stream.images, 0)
    with pytest.raises(RunError, match="3 of 10"):
        numbers(strict, 0, N)


def test_a_run_begins_with_all_shards_and_goes_on_with_those_that_are_there(web: Server) -> None:
    whole = opened(web)
    lost = {"s-002.tar": "is damaged"}
    web.faults["s-003.tar"] = "gone"
    with pytest.raises(RequestError, match=r"s-003\.tar is not there; check the URL"):
        opened(web)
    later = opened(web, replace(CARE, failed_before={}))
    assert shards_of(later).failed == {"s-003.tar": "is not there"}
    assert later.images.fingerprint == whole.images.fingerprint
    assert set(numbers(later, 0, N)).isdisjoint(INSIDE)
    assert list(shards_of(opened(web, replace(CARE, failed_before=lost))).failed) == ["s-002.tar", "s-003.tar"]
    web.faults["s-004.tar"] = "gone"
    with pytest.raises(RequestError, match=r"3 of 10 shards .*s-002\.tar .*s-003\.tar"):
        opened(web, replace(CARE, failed_before=lost))
    web.faults.clear()
    assert not shards_of(opened(web, RemotePolicy(max_failed=0, failed_before=lost))).failed, (
        "none may be lost: they are tried anew"
    )
    never_seen = Server()
    never_seen.files = web.files | {"s-003.tar": shard(range(4))}
    never_seen.start()
    never_seen.faults["s-003.tar"] = "gone"
    with pytest.raises(RequestError, match=r"s-003\.tar is not there"):
        opened(never_seen, replace(CARE, failed_before={}))
    never_seen.stop()


def test_latents_made_without_a_shard_are_for_those_alone_who_are_without_it(web: Server) -> None:
    encodings: list[int] = []

    def encode(pixels: np.ndarray) -> np.ndarray:
        encodings.append(len(pixels))
        return pixels[:, :2, :1, :1].astype(np.float32)

    def rows_of(stream: ImageStream) -> list[int]:
        job = EncodeJob([stream.images], (2, 1, 1), 1, encode, 10)
        return job.load_or_encode("k", lambda done, total: None).rows.tolist()

    first, second = opened(web), opened(web)
    web.faults["s-003.tar"] = "gone"
    without = rows_of(first)
    assert set(without).isdisjoint(INSIDE)
    encodings.clear()
    assert rows_of(second) == without
    assert not encodings
    assert shards_of(second).failed == shards_of(first).failed, "it is told of"
    web.faults.clear()
    assert rows_of(opened(web, replace(CARE, failed_before=shards_of(first).failed))) == without
    assert not encodings
    assert rows_of(opened(web)) == list(range(N)), "it is back"
    assert sum(encodings) == N
    encodings.clear()
    assert rows_of(opened(web)) == list(range(N))
    assert not encodings


# Whole runs

SETTINGS = {
    "size": 8,
    "batch": 8,
    "network": TRANSFORMER,
    "device": "cpu",
    "precision": "fp32",
    "data": {"cache": "none", "lost_shards": 0.2, "held_out": 0},
    **FEW_PICTURES,
    "evaluate": {"every": -1},
    "checkpoint": {"every": 2},
}


def test_a_run_loses_a_shard_says_so_once_and_goes_on_after_a_stop_as_if_there_had_been_none(
    web: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    open_source(web.url)
    web.faults["s-003.tar"] = "hidden"  # there when the run begins, and not when it is read
    whole = unfog.train(web.url, out=tmp_path / "whole", steps=4, **SETTINGS)
    said = capfd.readouterr().err
    assert said.count("s-003.tar is not there; others replace its 12 images") == 1
    events = [json.loads(line) for line in (whole.path / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["kind"] == "quarantined"]
    assert [(one["shard"], one["reason"], one["images"]) for one in lost] == [("s-003.tar", "is not there", EACH)]
    assert json.loads((whole.path / "data.json").read_text())["shards_given_up"] == {"s-003.tar": "is not there"}
    shutil.copytree(whole.path, tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoints/00000004")
    web.faults["s-003.tar"] = "gone"
    parts = unfog.resume(tmp_path / "parts")
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, parts.network.state_dict()[name]), name
    assert lost_by(tmp_path / "parts", 4) == {"s-003.tar": "is not there"}, "it stays so until somebody says otherwise"
    web.faults.clear()
    unfog.resume(tmp_path / "parts", steps=6, data={"lost_shards": 0})
    assert lost_by(tmp_path / "parts", 6) == {}


def lost_by(run: Path, step: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((run / f"checkpoints/{step:08}/state.json").read_text())["lost_shards"]
    return found


def test_labels_of_a_table_change_nothing_of_that(web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are counted without those that have no row, shards with them."""
    monkeypatch.setattr("unfog.data.scan.check_range", lambda source, ranges: [])  # no sample is read and kept
    names = open_source(web.url).names
    table = tmp_path / "labels.csv"
    table.write_text("name,label\n" + "".join(f"{name},{i % 3}\n" for i, name in enumerate(names) if i > 8))
    source = open_source(web.url, policy=replace(CARE, cache_bytes=10**9))
    images = prepare(source, replace(ASKED, labels=str(table), range=(0, 65535))).train
    rows = np.arange(len(images))
    web.faults["s-003.tar"] = "gone"
    first = images.take(rows)
    stood_in = [row for row in rows.tolist() if row + 9 in INSIDE]
    assert [row for row, got in zip(rows.tolist(), first.rows.tolist()) if row != got] == stood_in
    assert list(shards_of(ImageStream(images, 0)).failed) == ["s-003.tar"]
    web.fetched.clear()
    assert np.array_equal(images.take(rows).pixels, first.pixels)
    assert not web.members()
