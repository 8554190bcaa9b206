"""Draw docs/export.png: samples of a run by Unfog, and by diffusers from its export, from the same noise.

    python scripts/pages/export_side_by_side.py runs/photos

It prints the largest difference, and for each format the seconds of an export and the size of its folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from diffusers import DiffusionPipeline

import unfog
from unfog.diffusion.noise import NoiseSource
from unfog.reporting.image_grids import grid, save_png, with_caption

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "export.png"
FORMATS = ("diffusers", "safetensors", "onnx", "pt2")


def main() -> None:
    run = unfog.load(sys.argv[1])
    count = len(run.classes) or 10
    with tempfile.TemporaryDirectory() as place:
        for kind in FORMATS:
            began, folder = time.monotonic(), Path(place) / kind
            run.export(folder, format=kind)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            print(f"{kind}: {time.monotonic() - began:.1f} s, {size / 1e6:.2f} MB, {run.export_difference:.1g}")
        ours = np.asarray(run.sample(count, guide="none"))
        pipeline = DiffusionPipeline.from_pretrained(
            f"{place}/diffusers", trust_remote_code=True, low_cpu_mem_usage=False
        )
        noise = NoiseSource(0, range(count), run.config.input_shape).generators
        theirs = np.stack([np.asarray(one) for one in pipeline(batch_size=count, generator=noise).images])
    theirs = theirs.reshape(ours.shape)
    print("largest difference of pixels, of 255:", int(np.abs(ours.astype(int) - theirs).max()))
    both = grid(np.concatenate([ours, theirs]), count)
    save_png(
        PICTURE,
        PICTURE.parent,
        with_caption(both, ("above: unfog sample", "below: DiffusionPipeline of its export, same noise")),
    )
    print(PICTURE, f"{PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
