"""Load an ONNX export of Unfog and sample from it; it needs numpy and onnxruntime alone."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np


def load(folder):
    import onnxruntime

    model = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    return model, {path.stem: onnxruntime.InferenceSession(str(path)) for path in Path(folder).glob("*.onnx")}


def sample(model, sessions, noise, label=None, columns=(), negative=()):  # label: int64 [B]; columns: by given.py
    kind, guidance, (low, high) = model["sampler"]["kind"], model["guidance"], model["guidance_interval"]
    assert kind in ("ddim", "dpmpp", "heun"), f"this loop has no {kind}; export with --sampler dpmpp"

    def named(columns):
        ints = [one["kind"] in ("category", "text") for one in model["conditions"]]
        arrays = [np.array(one, np.int64 if i else np.float32) for one, i in zip(columns, ints)]
        return dict(zip((one["input"] for one in model["conditions"]), arrays))

    told = named(columns) | ({} if label is None else {"label": label})
    hidden = {name: np.full_like(one, -1 if one.dtype == np.int64 else np.nan) for name, one in told.items()}
    if label is not None:
        hidden["label"] = np.full_like(label, model["null_label"])
    hidden |= named(negative)  # columns too, to lead away from

    def predict(x, level, conditions):
        inputs = {"x": level["c_in"] * x, "c_noise": np.full(len(x), level["c_noise"], np.float32)}
        y = sessions["model"].run(None, inputs | conditions)[0]
        return level["c_skip"] * x + level["c_out"] * y[:, : x.shape[1]]

    def guided(x, level, last=False):
        x0 = predict(x, level, told)
        if guidance != 1 and low <= level["sigma"] / (level["alpha"] + level["sigma"]) <= high:
            x0 = guidance * x0 + (1 - guidance) * predict(x, level, hidden)
        x0 = x0.clip(-1, 1) if model["sampler"]["clip"] else x0
        return np.nan_to_num(x0, posinf=np.inf, neginf=-np.inf) if model["mask"] and not last else x0  # NaN spreads

    levels, x, before = model["levels"], model["levels"][0]["sigma"] * noise, None
    for now, then in pairwise(levels):
        x0 = guess = guided(x, now, not then["sigma"])
        if kind == "dpmpp" and before and before[0]["alpha"] and then["sigma"]:
            a, b, c = (math.log(level["alpha"] / level["sigma"]) for level in (before[0], now, then))
            guess = x0 + (c - b) / (b - a) / 2 * (x0 - before[1])
        moved = then["alpha"] * guess + then["sigma"] / now["sigma"] * (x - now["alpha"] * guess)
        if kind == "heun" and then["sigma"] and now["sigma"] <= 100 * now["alpha"]:
            ratio = now["sigma"] / now["alpha"] * then["alpha"] / then["sigma"]
            moved = moved + then["alpha"] * (ratio - 1) / 2 * (guided(moved, then) - x0)
        x, before = moved, (now, x0)
    return sessions["decoder"].run(None, {"x0": x})[0] if "decoder" in sessions else x  # about [-1, 1]
