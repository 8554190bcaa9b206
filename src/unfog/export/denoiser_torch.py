"""The denoiser in an export: D(x, sigma) and the score of plain torch, and adapters for deepinv and azula."""

import json
import math

import torch
from safetensors import safe_open
from torch import nn

from unfog.export.given_values import read
from unfog.export.values_torch import to_model, to_stored


class Denoiser(nn.Module):
    """D(x, sigma) = E[x0 | x], the clean image that is expected behind x = x0 + sigma * noise.

    Images are float [B, C, H, W] with values of about -1 to 1, see `to_model`; `shape` is (C, H, W). Levels `sigma` are
    a number or a tensor [B], from 0 to `sigma_max`. One below `sigma_min`, the least that was trained, counts as
    `sigma_min`. `label` is int64 [B] in 0 to len(classes) - 1; None, or len(classes), stands for no class. `given` has
    values of other conditions by name, such as {"age": 60, "stain": ["HE", "PAS"]}, see `read` and `conditions`; those
    that are left out stay open. Other shapes, levels, labels and values raise ValueError. Where no image has known
    values D is 0. The network computes in float32, that of its weights.
    """

    def __init__(self, network, model, levels):
        super().__init__()
        self.network, self.model = network, model
        self.shape, self.classes, self.conditions = tuple(model["input"]), model["classes"], model["conditions"]
        self.sigma_min, self.sigma_max = model["sigma"]
        self.register_buffer("levels", levels)  # log SNR of each timestep, if the network receives timesteps

    def forward(self, x, sigma, label=None, given=None):
        if x.ndim != 4 or x.shape[1] != self.shape[0]:
            raise ValueError(f"x has the shape {list(x.shape)}; give [B, {', '.join(map(str, self.shape))}]")
        if label is not None and not self.classes:
            raise ValueError("this denoiser has no classes; give no label")
        told = [self._label(x, label)] if self.classes else []
        told += [torch.tensor(each, device=x.device) for each in read(self.conditions, given, len(x))]
        logsnr = -2 * self._level(x, sigma).log()
        alpha, noise = (part[:, None, None, None] for part in self._path(logsnr))
        objective, x_t = self.model["objective"], alpha * x
        deviation = objective["sigma_data"]
        c_in = (noise.square() + (deviation * alpha).square()).rsqrt() if objective["scale_input"] else 1
        typed = (c_in * x_t).to(next(self.network.parameters()).dtype)
        y = self.network(typed, self._c_noise(logsnr), *told)[:, : x.shape[1]]
        known = self.network.known if self.model["mask"] else None
        y = y if known is None else y.where(known, 0.0)
        a, b = self._target(alpha, noise, deviation)
        x0 = (b * x_t - noise * y) / (alpha * b - noise * a)
        return x0 if known is None else x0.where(known, 0.0)

    def score(self, x, sigma, label=None, given=None):
        """Return the gradient of log p(x; sigma), (D(x, sigma) - x) / sigma^2, for `sigma` from `sigma_min` on."""
        variance = self._level(x, sigma).square()[:, None, None, None]
        return (self(x, sigma, label, given) - x) / variance

    def to_model(self, stored):
        """Map stored values [..., C, H, W], such as 0 to 255, to float values of about -1 to 1."""
        return to_model(self.model["values"], stored)

    def to_stored(self, x):
        """Map values of the model to the units of stored ones, without rounding: the inverse of `to_model`.

        Gradients pass through it. `rounded(denoiser.model["values"], …)` makes the stored type of them.
        """
        return to_stored(self.model["values"], x)

    def _label(self, x, label):
        null = len(self.classes)
        if label is None:
            return torch.full((len(x),), null, device=x.device)
        label = _for_each(x, torch.as_tensor(label, device=x.device), "label")
        # Looked up in the table of classes, such a label would stop the process on CUDA.
        if label.is_floating_point() or bool(((label < 0) | (label > null)).any()):
            raise ValueError(f"a label is a whole number from 0 to {null}, which stands for no class; see `classes`")
        return label.long()

    def _level(self, x, sigma):
        sigma = _for_each(x, torch.as_tensor(sigma, dtype=torch.float32, device=x.device), "sigma")
        if bool((sigma > 1.001 * self.sigma_max).any()):
            raise ValueError(f"sigma = {float(sigma.max()):g} is above the most that was trained, {self.sigma_max:g}")
        if not bool((sigma >= 0).all()):
            raise ValueError(f"sigma = {float(sigma.min()):g} is not a level of noise; give 0 to {self.sigma_max:g}")
        return sigma.clamp(self.sigma_min, self.sigma_max)

    def _path(self, logsnr):
        kind = self.model["objective"]["path"]
        if kind == "vp":
            return logsnr.sigmoid().sqrt(), (-logsnr).sigmoid().sqrt()
        if kind == "flow":
            return (logsnr / 2).sigmoid(), (-logsnr / 2).sigmoid()
        return torch.ones_like(logsnr), (-logsnr / 2).exp()

    def _target(self, alpha, noise, deviation):
        """Return (a, b) of the network's output, y = a x0 + b noise."""
        kind, one = self.model["objective"]["target"], torch.ones_like(alpha)
        if kind == "edm":
            norm = (noise.square() + (deviation * alpha).square()).sqrt()
            return noise / (deviation * norm), -deviation * alpha / norm
        return {"eps": (0 * one, one), "x0": (one, 0 * one), "v": (-noise, alpha), "flow": (-one, one)}[kind]

    def _c_noise(self, logsnr):
        condition = self.model["objective"]["condition"]
        if condition["kind"] == "logsnr":
            return -logsnr / 8
        if condition["kind"] == "normal":
            return 500 * (((-logsnr / 2 - condition["mean"]) / condition["std"] / math.sqrt(2)).erf() + 1)
        if condition["kind"] == "flow":
            return 1000 * (-logsnr / 2 - math.log(condition["shift"])).sigmoid()
        noisiness = -self.levels
        k = torch.searchsorted(noisiness, -logsnr).sub(1).clamp(0, len(noisiness) - 2)
        between = (-logsnr - noisiness[k]) / (noisiness[k + 1] - noisiness[k])
        return condition["first"] + condition["step"] * (k + between.clamp(0, 1).nan_to_num(nan=1.0))


def _for_each(x, value, name):
    """Return a tensor of one value or B values as [B], for images [B, C, H, W]."""
    if value.numel() not in (1, len(x)):
        raise ValueError(f"{name} has {value.numel()} values for {len(x)} images; give one for each, or one for all")
    return value.reshape(-1).expand(len(x))


def load(path):
    """Return the `Denoiser` of a file denoiser.safetensors, on the CPU, without gradients of its weights.

    ValueError if the file is another, such as the weights of another export.
    """
    with safe_open(path, "pt") as file:
        described = (file.metadata() or {}).get("unfog")
        if described is None:
            raise ValueError(f"{path} is not the file denoiser.safetensors of an export with --format denoiser")
        model = json.loads(described)
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    network = build(model)  # noqa: F821 (above in the file)
    levels = weights.pop("levels")
    network.load_state_dict(weights)
    return Denoiser(network, model, levels).eval().requires_grad_(False)


def for_deepinv(denoiser):
    """Return the denoiser for deepinv: images from 0 to 1, `sigma` on that scale, `label=` and `given=` as arguments.

    A sigma above the trained range counts as its end, as solvers begin at levels of their own.
    """
    from deepinv.models import Denoiser as Base

    class UnitRange(Base):
        def __init__(self):
            super().__init__()
            self.denoiser = denoiser

        def forward(self, x, sigma, label=None, given=None, **kwargs):
            sigma = (2 * torch.as_tensor(sigma, device=x.device)).clamp(max=denoiser.sigma_max)
            return (self.denoiser(2 * x - 1, sigma, label, given) + 1) / 2

    return UnitRange()


def for_azula(denoiser, schedule=None):
    """Return the denoiser for azula: x_t = alpha_t x0 + sigma_t noise of any schedule, with `label=`, `given=`.

    The usual schedule has alpha_t = 1, and sigma_t in the trained range, 80 at most.
    """
    from azula.denoise import Denoiser as Base
    from azula.denoise import DiracPosterior
    from azula.noise import VESchedule

    class AnySchedule(Base):
        def __init__(self):
            super().__init__()
            self.denoiser = denoiser
            self.schedule = schedule or VESchedule(max(denoiser.sigma_min, 1e-3), min(denoiser.sigma_max, 80.0))

        def forward(self, x_t, t, label=None, given=None, **kwargs):
            alpha, sigma = self.schedule(t)
            x = x_t / alpha.reshape(-1, *[1] * (x_t.ndim - 1))
            return DiracPosterior(mean=self.denoiser(x, sigma / alpha, label, given))

    return AnySchedule()
