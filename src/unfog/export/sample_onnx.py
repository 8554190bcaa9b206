"""Load an ONNX export of Unfog and sample from it; it needs numpy and onnxruntime alone."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np


def load(folder):
    import onnxruntime

    model = json.loads((Path(folder) / "model.json").read_text())
    return model, {path.stem: onnxruntime.InferenceSession(str(path)) for path in Path(folder).glob("*.onnx")}


def sample(model, sessions, noise, label=None):  # noise: float32 [B, C, H, W]; label: int64 [B] if there are classes
    kind, guidance, (low, high) = model["sampler"]["kind"], model["guidance"], model["guidance_interval"]
    assert kind in ("ddim", "dpmpp", "heun"), f"this loop has no {kind}; export with --sampler dpmpp"

    def predict(x, level, label):
        inputs = {"x": level["c_in"] * x, "c_noise": np.full(len(x), level["c_noise"], np.float32)}
        y = sessions["model"].run(None, inputs if label is None else inputs | {"label": label})[0]
        return level["c_skip"] * x + level["c_out"] * y[:, : x.shape[1]]

    def guided(x, level):
        x0 = predict(x, level, label)
        if guidance != 1 and low <= level["sigma"] / (level["alpha"] + level["sigma"]) <= high:
            without = predict(x, level, np.full_like(label, model["null_label"]))
            x0 = without + guidance * (x0 - without)
        return x0.clip(-1, 1) if model["sampler"]["clip"] else x0

    levels, x, before = model["levels"], model["levels"][0]["sigma"] * noise, None
    for now, then in pairwise(levels):
        x0 = guess = guided(x, now)
        if kind == "dpmpp" and before and before[0]["alpha"] and then["sigma"]:
            a, b, c = (math.log(level["alpha"] / level["sigma"]) for level in (before[0], now, then))
            guess = x0 + (c - b) / (b - a) / 2 * (x0 - before[1])
        moved = then["alpha"] * guess + then["sigma"] / now["sigma"] * (x - now["alpha"] * guess)
        if kind == "heun" and then["sigma"] and now["sigma"] <= 100 * now["alpha"]:
            ratio = now["sigma"] / now["alpha"] * then["alpha"] / then["sigma"]
            moved = moved + then["alpha"] * (ratio - 1) / 2 * (guided(moved, then) - x0)
        x, before = moved, (now, x0)
    return sessions["decoder"].run(None, {"x0": x})[0] if "decoder" in sessions else x  # about [-1, 1]
