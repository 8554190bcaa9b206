"""Make the images that all contestants train on: PNG files of one size in one folder, without classes.

    python benchmarks/quality/sets.py OUT cifar10=cifar10/train emoji=emoji

They are decoded and resized by Unfog (Lanczos, the centre square, transparency on white), so that nobody's resizing
makes a difference. A set that is there is left as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.reporting.progress import Progress

from PIL import Image


def main(out: Path, sets: list[str], size: int = 32) -> None:
    """OUT/sets/NAME/00000.png, …"""
    for name, _, source in (text.partition("=") for text in sets):
        folder, partial = out / "sets" / name, out / "sets" / f"{name}.partial"
        if folder.exists():
            continue
        partial.mkdir(parents=True, exist_ok=True)
        images = prepare(open_source(source), Data(size=size, channels=3, labels="none", held_out=0.0)).train
        with Progress(f"writing {name}", len(images)) as progress:
            for i in range(len(images)):
                Image.fromarray(images.pixels[i].transpose(1, 2, 0)).save(partial / f"{i:05d}.png")
                progress.update(i + 1)
        partial.rename(folder)
        print(f"{folder}: {len(images):,} images")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
