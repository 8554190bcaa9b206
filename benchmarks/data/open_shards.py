"""Does opening a set of shards grow with the set? Seconds and memory of opening, of preparing it without a cache until
the first batch is there, and of reading at random places; of sets with labels of their own and of sets with folders.

    python benchmarks/data/open_shards.py [--images 10000 10000000] [--shards 10] [--rounds 5]

For each number of images it makes that many entries of an index as the scan of real shards leaves it behind, beside
sparse files of the size that the shards would have, with a few hundred images at the beginning of each, which the
entries name in turn; combines them as a first opening does; and then opens the set anew in fresh processes, which is
what is measured. It also scans a real shard of small members, for the speed of that.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from unfog.data.sources.registry import open_source
from unfog.data.sources.storage import _LocalStorage
from unfog.data.webdataset import shard_index
from unfog.data.webdataset.index_entry import ROW_DTYPE, IndexEntry

import numpy as np
from PIL import Image

MEMBER = 20_480  # bytes from one image to the next
PICTURES = 200  # different ones in each shard

OPENING = """
import json, random, resource, sys, time
from unfog.data.webdataset import shard_source as shards# what is the same for every set is no part of it
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream

def memory(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024

before, began = memory("VmRSS"), time.perf_counter()
source = open_source(sys.argv[1])
opened, held = time.perf_counter() - began, memory("VmRSS") - before
n = len(source.names)
places = [random.randrange(n) for _ in range(20_000)]
began = time.perf_counter()
for i in places:
    source.names[i]
    source.index.place(i)
looked_up = time.perf_counter() - began
began = time.perf_counter()
for i in places[:2000]:
    source._storage.read(*source.index.place(i))
read = time.perf_counter() - began
began = time.perf_counter()
prepared = prepare(open_source(sys.argv[1]), Data(cache="none"))
ready = time.perf_counter() - began
began = time.perf_counter()
stream = ImageStream(prepared.train, 0)
stream.batch(0, 64)
first = time.perf_counter() - began
assert len(prepared.train.classes) > 1
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([opened, held, looked_up / 20_000, read / 2000, ready, first, peak]))
stream.close()
"""


def pictures() -> list[bytes]:
    """Images of 64 x 64, of noise, each under MEMBER bytes."""
    found = []
    for i in range(PICTURES):
        buffer = io.BytesIO()
        noise = np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


def make(folder: Path, images: int, shards: int, labelled: bool) -> float:
    """A set of so many images, with labels or in folders, and its index. Seconds that combining took."""
    folder.mkdir()
    each, held = images // shards, pictures()
    sizes = np.array([len(data) for data in held])
    for k in range(shards):
        with (folder / f"set-{k:05}.tar").open("wb") as file:
            for i, data in enumerate(held):
                file.seek(i * MEMBER + 512)
                file.write(data)
            file.truncate(max(each, PICTURES) * MEMBER)
    paths = sorted(str(path) for path in folder.iterdir())
    states = _LocalStorage().states(paths)
    kept = shard_index.cache_folder() / "shards"
    kept.mkdir(parents=True, exist_ok=True)
    names = [b"%03d/%08d.png" % (i % 1000 if labelled else i * 1000 // each, i) for i in range(each)]
    for path in paths:
        rows = np.zeros(each, ROW_DTYPE)
        which = np.arange(each) % PICTURES
        rows["start"], rows["size"] = which * MEMBER + 512, sizes[which]
        rows["name"], rows["label"] = np.arange(each) * 16, np.arange(each) % 1000 if labelled else -1
        values = [("class", str(i)) for i in range(1000 * labelled)]
        key = shard_index.shard_key(path, states[path])
        IndexEntry(rows, b"".join(names), values).save(kept / f"{key}.piece.npz")
    began = time.perf_counter()
    assert len(open_source(folder).names) == each * shards
    return time.perf_counter() - began


def scan(folder: Path, members: int) -> float:
    """Members a second of going through a real shard of small images with their .cls."""
    with tarfile.open(folder / "real.tar", "w") as archive:
        for i in range(members // 2):
            for name, size in ((f"{i:06}.png", 3000), (f"{i:06}.cls", 3)):
                info = tarfile.TarInfo(name)
                info.size = size
                archive.addfile(info, io.BytesIO(b"123" * (size // 3)))
    began = time.perf_counter()
    open_source(folder / "real.tar")
    return members / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 10_000_000])
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["UNFOG_CACHE"] = f"{scratch}/cache"
        sets = {
            f"{images:>12,} images {'with labels' if labelled else 'in folders'}": (images, labelled)
            for images in given.images
            for labelled in (True, False)
        }
        folders = {title: Path(scratch) / f"{images}-{labelled:d}" for title, (images, labelled) in sets.items()}
        for title, (images, labelled) in sets.items():
            seconds = make(folders[title], images, given.shards, labelled)
            print(f"{title}, {given.shards} shards: combined once in {seconds:.2f} s")
        found: dict[str, list[list[float]]] = {title: [] for title in sets}
        for _ in range(given.rounds):
            for title, folder in folders.items():  # by turns, so that a slow moment is in all
                command = [sys.executable, "-c", OPENING, str(folder)]
                found[title].append(json.loads(subprocess.check_output(command, text=True)))
        for title, rows in found.items():
            opened, held, looked_up, read, ready, first, peak = (statistics.median(column) for column in zip(*rows))
            print(
                f"{title}: opened in {opened * 1e3:.1f} ms and {held:.1f} MB; name and place of one "
                f"{looked_up * 1e6:.1f} us; its 12 KB read in {read * 1e6:.0f} us; prepared without a cache in "
                f"{ready:.2f} s, first batch of 64 after {first:.2f} s more; {peak:,.0f} MB at most"
            )
        print(f"a real shard of small members is gone through at {scan(Path(scratch), 40_000):,.0f} members/s")


if __name__ == "__main__":
    main()
