"""Export a run, and draw from it in a program that does not know Unfog: numpy and onnxruntime.

    pip install 'unfog[onnx]'
    python export_and_draw.py runs/photos

Everything below `main` runs without Unfog and without torch.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image


def main() -> None:
    import unfog

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--out", default="exported", help="a new folder")
    asked = parser.parse_args()
    folder = unfog.load(asked.run).export(asked.out, format="onnx")
    for number, picture in enumerate(draw(folder, 4, seed=0)):
        picture.save(folder / f"picture-{number}.png")
    print(folder)


def draw(folder: Path, count: int, seed: int) -> list[Image.Image]:
    """Draw with DPM-Solver++(2M): two estimates of the clean image are extrapolated along the log of alpha / sigma."""
    model = json.loads((folder / "model.json").read_text())
    network = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    noise = np.random.default_rng(seed).standard_normal((count, *model["input"])).astype(np.float32)
    classes = len(model["classes"])
    labels = {"label": np.arange(count) % classes} if classes else {}

    levels = model["levels"]  # the noisiest first, the last is clean
    x, before = levels[0]["sigma"] * noise, None
    for now, then in zip(levels, levels[1:]):
        inputs = {"x": now["c_in"] * x, "c_noise": np.full(count, now["c_noise"], np.float32)} | labels
        y = network.run(None, inputs)[0][:, : x.shape[1]]
        x0 = guess = (now["c_skip"] * x + now["c_out"] * y).clip(-1, 1)
        if before and before[0]["alpha"] and then["sigma"]:
            a, b, c = (math.log(level["alpha"] / level["sigma"]) for level in (before[0], now, then))
            guess = x0 + (c - b) / (b - a) / 2 * (x0 - before[1])
        x = (then["alpha"] * guess + then["sigma"] / now["sigma"] * (x - now["alpha"] * guess)).astype(np.float32)
        before = (now, x0)

    pixels = ((x + 1) * 127.5).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return [Image.fromarray(one.squeeze()) for one in pixels]


if __name__ == "__main__":
    main()
