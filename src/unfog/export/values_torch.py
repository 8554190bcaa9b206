"""Value maps in an export: stored values of images to those of the model and back, in plain torch.

A description `values` has `dtype`, the type of stored values, and the ends `low` and `high` of a linear map to -1 and
1; or `maps`, the fitted map of each channel, with `kind`, `knee`, `middle` and `half`: x becomes (curve(x) - middle) /
half. The curve of "log" is log(x) from `knee` on, and its tangent below. The curve of "arcsinh" is asinh(x / knee). All
other kinds have the identity. Nothing is clipped, and gradients pass through both maps. `unknown` is "none", or else
what stands for unknown values: "nan" or a number. They are NaN for the model.
"""

import torch

MAPS = ("linear", "minmax", "percentile", "standard", "log", "arcsinh")


def to_model(values, stored):
    """Return stored values [..., C, H, W] as the model takes them, float32 of about -1 to 1."""
    x = torch.as_tensor(stored).float()
    if _filler(values) is not None:
        x = x.masked_fill(x == _filler(values), float("nan"))
    if values["maps"]:
        kinds, knee, middle, half = _channels(values, x.device)
        logarithm = torch.maximum(x, knee).log() + torch.clamp_max(x / knee - 1, 0)
        x = torch.where(kinds["log"], logarithm, x)
        x = torch.where(kinds["arcsinh"], (x / knee).asinh(), x)
        return (x - middle) / half
    middle, half = _linear(values)
    if values["dtype"].startswith("float"):
        return (x - middle) / half
    return x / half - middle / half


def to_stored(values, x):
    """Return values of the model [..., C, H, W] in the units of stored ones, float32: the inverse of `to_model`."""
    x = torch.as_tensor(x).float()
    if values["maps"]:
        kinds, knee, middle, half = _channels(values, x.device)
        y = x = x * half + middle
        edge = knee.log()
        # Other channels meet 0 in a curve, as an infinite value there would make their gradient NaN.
        log = torch.where(kinds["log"], y, edge)
        exponential = torch.maximum(log, edge).exp() + knee * torch.clamp_max(log - edge, 0)
        x = torch.where(kinds["log"], exponential, x)
        sine = torch.where(kinds["arcsinh"], y, torch.zeros_like(y)).sinh() * knee
        return torch.where(kinds["arcsinh"], sine, x)
    middle, half = _linear(values)
    if values["dtype"].startswith("float"):
        return x * half + middle
    return (x + middle / half) * half


def rounded(values, stored):
    """Return values in stored units as float32, or rounded and limited to a type of integers; for NaN, `unknown`."""
    kind, filler = getattr(torch, values["dtype"]), _filler(values)
    stored = torch.as_tensor(stored)
    whole = stored.float()
    if not kind.is_floating_point:
        ends = torch.iinfo(kind)
        low, high = (ends.min, ends.max) if values["maps"] else (values["low"], values["high"])
        whole = stored.round().clamp(low, high)
        if filler is not None:  # no known value becomes the number that stands for unknown ones
            whole = whole.where(whole != filler, filler - 1 if filler > 0 else filler + 1)
    whole = whole if filler is None else whole.where(~stored.isnan(), filler)
    return whole if kind.is_floating_point else whole.to(kind)


def _filler(values):
    """Return the number that stands for unknown values; None if all are known, or NaN does."""
    return None if values["unknown"] in ("none", "nan") else float(values["unknown"])


def _linear(values):
    return (values["high"] + values["low"]) / 2, (values["high"] - values["low"]) / 2


def _channels(values, device):
    maps = values["maps"]
    numbers = torch.tensor([[one[name] for one in maps] for name in ("knee", "middle", "half")], dtype=torch.float32)
    knee, middle, half = numbers.to(device)[:, :, None, None]
    found = [one["kind"] for one in maps]
    kinds = {kind: torch.tensor([one == kind for one in found], device=device)[:, None, None] for kind in MAPS}
    return kinds, knee.abs(), middle, half
