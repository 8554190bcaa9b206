"""Value maps in an export: stored values of images to those of the model and back, in plain torch.

A description `values` has `dtype`, the type of stored values, and the ends `low` and `high` of a linear map to -1 and
1; or `maps`, the fitted map of each channel, with `kind`, `knee`, `middle` and `half`: x becomes (curve(x) - middle) /
half. The curve of "log" is log(x) from `knee` on, and its tangent below. The curve of "arcsinh" is asinh(x / knee). All
other kinds have the identity. Nothing is clipped, and gradients pass through both maps.
"""

import torch


def to_model(values, stored):
    """Return stored values [..., C, H, W] as the model takes them, float32 of about -1 to 1."""
    x = torch.as_tensor(stored).float()
    if values["maps"]:
        is_log, is_arcsinh, knee, middle, half = _channels(values, x.device)
        logarithm = torch.maximum(x, knee).log() + torch.clamp_max(x / knee - 1, 0)
        x = torch.where(is_log, logarithm, torch.where(is_arcsinh, (x / knee).asinh(), x))
        return (x - middle) / half
    middle, half = _linear(values)
    if values["dtype"].startswith("float"):
        return (x - middle) / half
    return x / half - middle / half


def to_stored(values, x):
    """Return values of the model [..., C, H, W] in the units of stored ones, float32: the inverse of `to_model`."""
    x = torch.as_tensor(x).float()
    if values["maps"]:
        is_log, is_arcsinh, knee, middle, half = _channels(values, x.device)
        y = x * half + middle
        edge = knee.log()
        # Other channels meet 0 in a curve, as an infinite value there would make their gradient NaN.
        log = torch.where(is_log, y, edge)
        exponential = torch.maximum(log, edge).exp() + knee * torch.clamp_max(log - edge, 0)
        sine = torch.where(is_arcsinh, y, torch.zeros_like(y)).sinh() * knee
        return torch.where(is_log, exponential, torch.where(is_arcsinh, sine, y))
    middle, half = _linear(values)
    if values["dtype"].startswith("float"):
        return x * half + middle
    return (x + middle / half) * half


def rounded(values, stored):
    """Return values in stored units as float32, or rounded and limited to a type of integers."""
    kind = getattr(torch, values["dtype"])
    if kind.is_floating_point:
        return stored.float()
    ends = torch.iinfo(kind)
    low, high = (ends.min, ends.max) if values["maps"] else (values["low"], values["high"])
    return stored.round().clamp(low, high).to(kind)


def _linear(values):
    return (values["high"] + values["low"]) / 2, (values["high"] - values["low"]) / 2


def _channels(values, device):
    maps = values["maps"]
    numbers = torch.tensor([[one[name] for one in maps] for name in ("knee", "middle", "half")], dtype=torch.float32)
    knee, middle, half = numbers.to(device)[:, :, None, None]
    kinds = [torch.tensor([one["kind"] == kind for one in maps], device=device) for kind in ("log", "arcsinh")]
    return *(kind[:, None, None] for kind in kinds), knee.abs(), middle, half
