"""Load an export of Unfog (safetensors or pt2) and sample from it; it needs torch and safetensors alone."""

import json
import math
import runpy
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file


def load(folder):
    model = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    if (Path(folder) / "model.pt2").exists():
        return model, torch.export.load(f"{folder}/model.pt2").module()
    network = runpy.run_path(f"{folder}/network.py")["build"](model)
    network.load_state_dict(load_file(f"{folder}/model.safetensors"))
    return model, network.eval()


@torch.inference_mode()
def sample(model, network, noise, label=None, columns=(), negative=()):  # label: int64 [B]; columns: by given.py
    def predict(conditions):
        y = network(now["c_in"] * x, torch.full((len(x),), now["c_noise"]), *conditions)[:, : x.shape[1]]
        return now["c_skip"] * x + now["c_out"] * y

    told = [*([] if label is None else [label]), *map(torch.tensor, columns)]
    hidden = [torch.full_like(one, math.nan if one.is_floating_point() else -1) for one in told]
    if label is not None:
        hidden[0].fill_(model["null_label"])
    hidden[len(hidden) - len(negative) :] = map(torch.tensor, negative)  # columns too, to lead away from

    levels, x, before = model["levels"], model["levels"][0]["sigma"] * noise, None
    guidance, (low, high) = model["guidance"], model["guidance_interval"]
    for now, then in pairwise(levels):
        x0 = predict(told)
        if guidance != 1 and low <= now["sigma"] / (now["alpha"] + now["sigma"]) <= high:
            x0 = guidance * x0 + (1 - guidance) * predict(hidden)
        x0 = x0.clamp(-1, 1) if model["sampler"]["clip"] else x0
        x0 = guess = x0.nan_to_num(0, math.inf, -math.inf) if model["mask"] and then["sigma"] else x0  # NaN spreads
        if before and before[0]["alpha"] and model["sampler"]["kind"] == "dpmpp" and then["sigma"]:  # else DDIM
            a, b, c = (math.log(level["alpha"] / level["sigma"]) for level in (before[0], now, then))
            guess = x0 + (c - b) / (b - a) / 2 * (x0 - before[1])
        x, before = then["alpha"] * guess + then["sigma"] / now["sigma"] * (x - now["alpha"] * guess), (now, x0)
    return x  # about [-1, 1]
