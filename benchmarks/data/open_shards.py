"""Does opening a set of shards grow with the set? Seconds and memory of opening, and of reading at random places.

    python benchmarks/data/open_shards.py [--images 10000 10000000] [--shards 10] [--rounds 5]

For each number of images it makes that many entries of an index as the scan of real shards leaves it behind, beside
sparse files of the size that the shards would have; combines them as a first opening does; and then opens the set anew
in fresh processes, which is what is measured. It also scans a real shard of small members, for the speed of that.
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

import numpy as np

from unfog.data.formats import shard_index
from unfog.data.formats.shard_piece import ROW, Piece
from unfog.data.formats.storage import LocalStorage
from unfog.data.sources import open_source

MEMBER = 20_480  # bytes from one image to the next

OPENING = """
import json, random, resource, sys, time
from unfog.data import shards  # what is the same for every set is no part of it
from unfog.data.sources import open_source

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
print(json.dumps([opened, held, looked_up / 20_000, (time.perf_counter() - began) / 2000]))
"""


def make(folder: Path, images: int, shards: int) -> float:
    """A set of so many images and its index. Seconds that combining took."""
    folder.mkdir()
    each = images // shards
    for k in range(shards):
        with (folder / f"set-{k:05}.tar").open("wb") as file:
            file.truncate(each * MEMBER)
    paths = sorted(str(path) for path in folder.iterdir())
    states = LocalStorage().states(paths)
    kept = shard_index.cache_folder() / "shards"
    kept.mkdir(parents=True, exist_ok=True)
    names = [b"%08d.jpg" % i for i in range(each)]
    for path in paths:
        rows = np.zeros(each, ROW)
        rows["start"], rows["size"] = np.arange(each) * MEMBER + 512, MEMBER - 512
        rows["name"], rows["label"] = np.arange(each) * 12, np.arange(each) % 1000
        values = [("class", str(i)) for i in range(1000)]
        key = shard_index._key(path, states[path])
        shard_index._save_piece(kept / f"{key}.piece.npz", Piece(rows, b"".join(names), values))
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
        sets = {images: Path(scratch) / f"{images}" for images in given.images}
        for images, folder in sets.items():
            seconds = make(folder, images, given.shards)
            print(f"{images:>12,} images in {given.shards} shards: combined once in {seconds:.2f} s")
        found: dict[int, list[list[float]]] = {images: [] for images in sets}
        for _ in range(given.rounds):
            for images, folder in sets.items():  # by turns, so that a slow moment is in both
                command = [sys.executable, "-c", OPENING, str(folder)]
                found[images].append(json.loads(subprocess.check_output(command, text=True)))
        for images, rows in found.items():
            opened, held, looked_up, read = (statistics.median(column) for column in zip(*rows))
            print(
                f"{images:>12,} images: opened in {opened * 1e3:.1f} ms and {held:.1f} MB; "
                f"name and place of one {looked_up * 1e6:.1f} us; its 20 KB read in {read * 1e6:.0f} us"
            )
        print(f"a real shard of small members is gone through at {scan(Path(scratch), 40_000):,.0f} members/s")


if __name__ == "__main__":
    main()
