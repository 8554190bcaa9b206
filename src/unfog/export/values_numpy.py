"""Value maps in an ONNX export: stored values of images to those of the model and back, in plain numpy.

A description `values` has `dtype`, the type of stored values, and the ends `low` and `high` of a linear map to -1 and
1; or `maps`, the fitted map of each channel, with `kind`, `knee`, `middle` and `half`: x becomes (curve(x) - middle) /
half. The curve of "log" is log(x) from `knee` on, and its tangent below. The curve of "arcsinh" is asinh(x / knee). All
other kinds have the identity. Nothing is clipped. `unknown` is "none", or else what stands for unknown values: "nan" or
a number. They are NaN for the model.
"""

import numpy as np

MAPS = ("linear", "minmax", "percentile", "standard", "log", "arcsinh")


def to_model(values, stored):
    """Return stored values [..., C, H, W] as the model takes them, float32 of about -1 to 1."""
    x = np.asarray(stored, np.float32)
    if _filler(values) is not None:
        x = np.where(x == np.float32(_filler(values)), np.float32("nan"), x)
    if values["maps"]:
        kinds, knee, middle, half = _channels(values)
        logarithm = np.log(np.maximum(x, knee)) + np.minimum(x / knee - 1, 0)
        x = np.where(kinds["log"], logarithm, x)
        x = np.where(kinds["arcsinh"], np.arcsinh(x / knee), x)
        return (x - middle) / half
    middle, half = _linear(values)
    return (x - middle) / half


def to_stored(values, x):
    """Return values of the model [..., C, H, W] in the units of stored ones, float32: the inverse of `to_model`."""
    x = np.asarray(x, np.float32)
    if values["maps"]:
        kinds, knee, middle, half = _channels(values)
        y = x = x * half + middle
        edge = np.log(knee)
        log = np.where(kinds["log"], y, edge)
        exponential = np.exp(np.maximum(log, edge)) + knee * np.minimum(log - edge, 0)
        x = np.where(kinds["log"], exponential, x)
        return np.where(kinds["arcsinh"], np.sinh(np.where(kinds["arcsinh"], y, 0)) * knee, x)
    middle, half = _linear(values)
    return x * half + middle


def rounded(values, stored):
    """Return values in stored units as float32, or rounded and limited to a type of integers; for NaN, `unknown`."""
    kind, filler = np.dtype(values["dtype"]), _filler(values)
    whole = stored.astype(np.float32)
    if kind.kind != "f":
        ends = np.iinfo(kind)
        low, high = (ends.min, ends.max) if values["maps"] else (values["low"], values["high"])
        whole = stored.round().clip(low, high)
        if filler is not None:  # no known value becomes the number that stands for unknown ones
            whole = np.where(whole == filler, filler - 1 if filler > 0 else filler + 1, whole)
    whole = whole if filler is None else np.where(np.isnan(stored), filler, whole)
    return whole.astype(np.float32 if kind.kind == "f" else kind)


def _filler(values):
    """Return the number that stands for unknown values; None if all are known, or NaN does."""
    return None if values["unknown"] in ("none", "nan") else float(values["unknown"])


def _linear(values):
    return np.float32((values["high"] + values["low"]) / 2), np.float32((values["high"] - values["low"]) / 2)


def _channels(values):
    maps = values["maps"]
    knee, middle, half = (
        np.array([one[name] for one in maps], np.float32)[:, None, None] for name in ("knee", "middle", "half")
    )
    kinds = {kind: np.array([one["kind"] == kind for one in maps])[:, None, None] for kind in MAPS}
    return kinds, np.abs(knee), middle, half
