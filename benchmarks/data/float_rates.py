"""Images a second that a training loop is handed, of one array of floats in each container and type.

    python benchmarks/data/float_rates.py OUT [--images 4000] [--side 64] [--channels 4] [--seconds 3]

The array has normal values, which hardly compress. Every way gives shuffled batches of 64 images, and is run for so
many seconds after a warm-up of one batch. Files are read in place, with `cache = none`, and lie in the system's cache
of files, as they were just written.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from unfog.config.requests.pack import PackRequest
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.pipeline.pack import pack

import h5py
import numpy as np
import zarr
from rates import measure, streamed


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("out", type=Path)
    words.add_argument("--images", type=int, default=4000)
    words.add_argument("--side", type=int, default=64)
    words.add_argument("--channels", type=int, default=4)
    words.add_argument("--seconds", type=float, default=3.0)
    given = words.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    shape = (given.images, given.side, given.side, given.channels)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {'x'.join(map(str, shape))} float32")
    print(f"  {'':34}{'images/s':>10}{'per CPU second':>16}")
    for dtype in ("float32", "float16"):
        settings = Data(dtype=dtype, held_out=0)  # type: ignore[arg-type]
        place = given.out / f"pack-{dtype}"
        np.save(given.out / "x.npy", values)
        pack(PackRequest(str(given.out / "x.npy"), place, settings))
        measure(f"pack, {dtype}", streamed(Pack.open(place).dataset(settings, "pack").train), given.seconds)
    for name, source in written(values, given.out).items():
        asked = Data(dtype="float32", cache="none")
        measure(name, streamed(prepare(open_source(source), asked).train), given.seconds)


def written(values: np.ndarray, out: Path) -> dict[str, str]:
    """Write the array in each format. Returns SOURCE of each."""
    one = (1, *values.shape[1:])
    many = (32, *values.shape[1:])
    with h5py.File(out / "x.h5", "w") as file:
        file["whole"] = values
        file.create_dataset("one", data=values, chunks=one, compression="gzip", compression_opts=1)
        file.create_dataset("many", data=values, chunks=many, compression="gzip", compression_opts=1)
    zarr.create_array(str(out / "one.zarr"), data=values, chunks=one)
    return {
        ".npy": f"{out}/x.npy",
        "HDF5": f"{out}/x.h5:whole",
        "HDF5, gzip, 1 image a chunk": f"{out}/x.h5:one",
        "HDF5, gzip, 32 images a chunk": f"{out}/x.h5:many",
        "Zarr, zstd, 1 image a chunk": f"{out}/one.zarr",
    }


if __name__ == "__main__":
    main()
