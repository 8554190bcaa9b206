"""Images a second that a training loop is handed: this project's ways of reading beside those of others.

    python benchmarks/data/rates.py PNGS JPEGS OUT [--seconds 6] [--images 3000]

PNGS is a folder of pictures of 32x32 (CIFAR-10, say), read at 32. JPEGS is a folder of any pictures: of the first
of them JPEGs of 512x512 are made in OUT, read at 64. Every way gives shuffled batches of 64 images, uint8 [64, 3,
size, size], resized by antialiased Lanczos where that is needed, and is run for so many seconds after a warm-up of one
batch. Wall time and the processor time of all processes are both told: on a busy machine only the latter compares.

DataLoader is torch's, with Pillow for each item; "datasets" is Hugging Face's, map-style, the files' bytes in Arrow;
"webdataset" reads a tar of the same files. None of them is needed: what is not installed is left out.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from unfog.config.requests.pack import PackRequest
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream
from unfog.pipeline.pack import pack

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

BATCH = 64
Ways = dict[str, Callable[[], Iterator[int]]]


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("pngs", type=Path)
    words.add_argument("jpegs", type=Path)
    words.add_argument("out", type=Path)
    words.add_argument("--seconds", type=float, default=6.0)
    words.add_argument("--images", type=int, default=3000)
    given = words.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    os.environ["UNFOG_CACHE"] = str(given.out / "cache")
    small = linked(given.pngs, given.out / "png32", given.images)
    large = made_jpegs(given.jpegs, given.out / "jpeg512", given.images // 4)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; batches of {BATCH}")
    for what, folder, size in (("PNG 32x32 at 32", small, 32), ("JPEG 512x512 at 64", large, 64)):
        files = sorted(folder.rglob("*.*"))
        print(f"\n{what}: {len(files):,} files, {sum(f.stat().st_size for f in files) / len(files) / 1e3:.1f} kB each")
        print(f"  {'':34}{'images/s':>10}{'per CPU second':>16}")
        started, cpu = time.perf_counter(), used()
        pack(PackRequest(str(folder), given.out / f"pack{size}", Data(size=size, channels=3)))
        tell("unfog pack", len(files), time.perf_counter() - started, used() - cpu)
        for name, way in ways(files, folder, given.out, size).items():
            measure(name, way(), given.seconds)


def ways(files: list[Path], folder: Path, out: Path, size: int) -> Ways:
    """What hands out batches; each item is how many images came."""
    found: Ways = {
        f"DataLoader + Pillow, {workers} workers": partial(loaded, files, size, workers) for workers in (0, 2)
    }
    found["unfog, pack"] = lambda: streamed(Pack.open(out / f"pack{size}").dataset(Data(), "pack").train)
    asked = Data(size=size, channels=3, cache="none")
    found["unfog, on the fly, read ahead"] = lambda: streamed(prepare(open_source(folder), asked).train)
    try:
        import datasets

        datasets.disable_progress_bars()
        found["datasets + Pillow"] = lambda: hub(datasets, files, out / f"arrow{size}", size)
    except ImportError:
        print("  datasets is not installed")
    try:
        import webdataset

        found["webdataset + Pillow"] = lambda: shards(webdataset, files, out / f"{size}.tar", size)
    except ImportError:
        print("  webdataset is not installed")
    return found


def resized(image: Image.Image, size: int) -> np.ndarray:
    image = image.convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.LANCZOS)
    return np.asarray(image)


class Files(Dataset[torch.Tensor]):
    """One file after the other, as most training scripts do it."""

    def __init__(self, files: list[Path], size: int) -> None:
        self.files, self.size = files, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> torch.Tensor:
        with Image.open(self.files[i]) as image:
            return torch.from_numpy(resized(image, self.size).transpose(2, 0, 1).copy())


def loaded(files: list[Path], size: int, workers: int) -> Iterator[int]:
    loader = DataLoader(
        Files(files, size), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    while True:
        yield from (len(batch) for batch in loader)


def streamed(images: object) -> Iterator[int]:
    stream = ImageStream(images, seed=0)  # type: ignore[arg-type]
    try:
        position = 0
        while True:
            yield len(stream.batch(position, BATCH).pixels)
            position += BATCH
    finally:
        stream.close()


def hub(datasets: object, files: list[Path], folder: Path, size: int) -> Iterator[int]:
    rows = {"image": [{"bytes": file.read_bytes(), "path": None} for file in files]}
    features = datasets.Features({"image": datasets.Image()})  # type: ignore[attr-defined]
    made = datasets.Dataset.from_dict(rows, features=features)  # type: ignore[attr-defined]
    made.save_to_disk(str(folder))
    table = datasets.load_from_disk(str(folder))  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(table))
        for start in range(0, len(order) - BATCH, BATCH):
            pictures = table[order[start : start + BATCH].tolist()]["image"]
            batch = torch.from_numpy(np.stack([resized(image, size).transpose(2, 0, 1) for image in pictures]))
            yield len(batch)


def shards(webdataset: object, files: list[Path], tar: Path, size: int) -> Iterator[int]:
    with tarfile.open(tar, "w", dereference=True) as archive:
        for i, file in enumerate(files):
            archive.add(file, f"{i:06}{file.suffix}")
    kind = files[0].suffix[1:]
    made = webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False)  # type: ignore[attr-defined]
    made = made.shuffle(1000).to_tuple(kind)
    made = made.map(
        lambda one: torch.from_numpy(resized(Image.open(io.BytesIO(one[0])), size).transpose(2, 0, 1).copy())
    )
    while True:
        yield from (len(batch) for batch in DataLoader(made, BATCH, num_workers=0, drop_last=True))


def measure(name: str, batches: Iterator[int], seconds: float) -> None:
    next(batches)
    images, started, cpu = 0, time.perf_counter(), used()
    while time.perf_counter() - started < seconds:
        images += next(batches)
    wall = time.perf_counter() - started
    batches.close()  # type: ignore[attr-defined]
    tell(name, images, wall, used() - cpu)


def tell(name: str, images: int, wall: float, cpu: float) -> None:
    print(f"  {name:34}{images / wall:>10,.0f}{images / max(cpu, 1e-9):>16,.0f}", flush=True)


def used() -> float:
    """Processor seconds of this process and of its workers that have ended, or that the system tells of."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    living = sum(of_process(child) for child in children())
    return sum(one.ru_utime + one.ru_stime for one in times) + living


def children() -> list[Path]:
    try:
        tasks = Path("/proc/self/task").glob("*/children")
        return [Path(f"/proc/{number}/stat") for task in tasks for number in task.read_text().split()]
    except OSError:
        return []


def of_process(stat: Path) -> float:
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def linked(source: Path, folder: Path, count: int) -> Path:
    """The first of these files, spread over the source."""
    files = sorted(file for file in source.rglob("*.png"))
    folder.mkdir()
    for i, file in enumerate(files[:: max(1, len(files) // count)][:count]):
        (folder / f"{i:05}.png").symlink_to(file.resolve())
    return folder


def made_jpegs(source: Path, folder: Path, count: int) -> Path:
    files = sorted(file for file in source.rglob("*.png") if "/." not in str(file))
    folder.mkdir()
    for i, file in enumerate(files[:: max(1, len(files) // count)][:count]):
        with Image.open(file) as image:
            flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
        flat.resize((512, 512), Image.Resampling.LANCZOS).save(folder / f"{i:05}.jpg", quality=90)
    return folder


if __name__ == "__main__":
    main()
