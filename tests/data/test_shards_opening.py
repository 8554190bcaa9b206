"""What opening a set of shards reads and holds, counted in bytes, of few and of very many images."""

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.sources.storage import open_storage
from unfog.data.webdataset import shard_index
from unfog.data.webdataset.index_entry import ROW_DTYPE, IndexEntry

FEW, MANY, SHARDS = 10_000, 1_000_000, 4
PAGES = 2**18  # what the system reads at once around a byte that is asked for, a few times over

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")


def make(folder: Path, images: int) -> Path:
    """A set of so many images and its index, as going through the shards leaves it; the shards themselves are holes."""
    folder.mkdir()
    each = images // SHARDS
    for k in range(SHARDS):
        with (folder / f"s-{k}.tar").open("wb") as file:
            file.truncate(each * 1024)
    paths = sorted(str(path) for path in folder.iterdir())
    kept = shard_index.cache_folder() / "shards"
    kept.mkdir(parents=True, exist_ok=True)
    for path, state in open_storage(paths[0]).states(paths).items():
        rows = np.zeros(each, ROW_DTYPE)
        rows["start"], rows["size"], rows["name"] = np.arange(each) * 1024 + 512, 512, np.arange(each) * 12
        rows["label"] = np.arange(each) % 10
        names = b"".join(b"%08d.png" % i for i in range(each))
        entry = IndexEntry(rows, names, [("class", str(i)) for i in range(10)])
        entry.save(kept / f"{shard_index.shard_key(path, state)}.piece.npz")
    open_source(folder)  # combines them
    return folder


def mapped() -> dict[str, int]:
    """Bytes of each file of an index that have been read into this process, by the end of its name."""
    found: dict[str, int] = {}
    end = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            end = Path(line.split()[-1]).suffix if "/shards/" in line else ""
        elif first == "Rss:" and end:
            found[end] = found.get(end, 0) + int(line.split()[1]) * 1024
    return found


def opening(folder: Path) -> tuple[dict[str, int], int, int]:
    """(bytes of the index that opening a set reads, bytes held then, bytes held once it is ready to be trained on)."""
    gc.collect()
    assert not mapped()
    tracemalloc.start()
    source = open_source(folder)
    held, read = tracemalloc.get_traced_memory()[0], mapped()
    prepared = prepare(source, Data(size=8, channels=3, cache="none", held_out=0.01))
    ready, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(prepared.train) + len(prepared.held_out) == len(source.names)
    assert prepared.train.names[len(prepared.train) - 1].endswith(".png")
    return read, held, ready


@pytest.mark.slow
def test_it_depends_on_the_number_of_images_by_no_more_than_their_labels(tmp_path: Path) -> None:
    few, many = (opening(make(tmp_path / f"{n}", n)) for n in (FEW, MANY))
    for read, held, _ in (few, many):
        assert read[".rows"] + read[".names"] <= PAGES < MANY * ROW_DTYPE.itemsize / 100
        assert held < 2**16
    assert many[0][".codes"] <= 8 * MANY + PAGES, "each label is looked at once"
    assert many[2] <= 8 * MANY + 2**20, "labels to train on are in memory, and nothing else of each image"
