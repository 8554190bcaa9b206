"""Checks of the learning rate, warm-up, optimiser, gradient clipping, EMA and batch size."""

from __future__ import annotations

import math

import numpy as np

from unfog.config.schema import Config
from unfog.models.network_settings import NetworkSettings
from unfog.models.settings import UNet
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_number
from unfog.text import plural
from unfog.training.learning_rate import REFERENCE_BATCH, default_learning_rate
from unfog.training.settings import Custom, EmaSchedule, Muon, OptimizerKind

# Batch beyond which nobody lets the learning rate grow in proportion.
_LINEAR_UP_TO = 512
# Times the usual learning rate. Small networks in short runs bear ten times as much: of a loss of 0.80 (47k weights,
# 14x14, 200 steps of 16) 0.30 was left at the usual rate, 0.26 at 3 times, 0.25 at 10 times, and 0.65 at 100 times.
_HIGH, _FAR_TOO_HIGH, _HOPELESS = 3.0, 10.0, 100.0
# Times the usual learning rate. DDPM's 2e-4 on a network of a million parameters is 1/15 of it, slow and sound.
_LOW, _FAR_TOO_LOW, _NEARLY_ZERO = 1 / 10, 1 / 30, 1 / 1000


def check_optimization(config: Config, images: int, parameters: int) -> list[Finding]:
    """Check batch, learning rate, warm-up, optimizer, clipping and EMA for so many training images and parameters."""
    return [
        _check_batch(config, images),
        _check_learning_rate(config, parameters),
        _check_warmup(config),
        _check_optimizer(config),
        _check_clipping(config),
        _check_ema(config),
    ]


def usual_learning_rate(config: Config, parameters: int) -> float | None:
    """Return the automatic learning rate; None for an open network or a custom optimiser."""
    method, network = config.optimizer.method, config.network
    if network is None or isinstance(method, Custom):
        return None
    return default_learning_rate(parameters, config.training.batch, network, method, bool(config.init.folder))


def describe_high_rate(config: Config, parameters: int, scale: float = 1.0) -> str:
    """Return how far the learning rate is above the usual one, as the reason of a bad step; "" if it is not far.

    `scale` is the factor on the rate of the settings that roll-backs have left.
    """
    usual, lr = usual_learning_rate(config, parameters), config.optimizer.lr * scale
    if usual is None or lr <= _FAR_TOO_HIGH * usual:
        return ""
    return f"the learning rate {lr:.2g} is {format_number(lr / usual)} times the usual {usual:.2g}: lower it first; "


def _linear_learning_rate(
    parameters: int, batch: int, network: NetworkSettings, optimizer: OptimizerKind | None = None
) -> float:
    """Return the default learning rate scaled linearly with the batch up to 512 images (Goyal et al. 2017)."""
    proportional = min(batch, _LINEAR_UP_TO)
    at_reference = default_learning_rate(parameters, REFERENCE_BATCH, network, optimizer)
    return at_reference * proportional / REFERENCE_BATCH * math.sqrt(batch / proportional)


def _check_learning_rate(config: Config, parameters: int) -> Finding:
    """Compare the peak with the larger of two scaling rules, and the mean over the run with the smaller."""
    batch, steps = config.training.batch, _steps(config)
    given = parameters, batch, config.network or UNet(), config.optimizer.method
    by_root, by_line = (rule(*given) for rule in (default_learning_rate, _linear_learning_rate))
    peak = config.optimizer.lr
    if isinstance(config.optimizer.method, Custom):
        said = f"lr {peak:.2g} of {config.optimizer.method.path}, for which no usual rate is known"
        return Finding("settings.lr", "fine", said, facts={"lr": peak, "parameters": parameters})
    mean = float(np.mean([config.optimizer.learning_rate(int(s), steps) for s in np.linspace(0, steps - 1, 200)]))
    # A cosine schedule halves the mean, which does not show a low rate.
    above, below = peak / max(by_root, by_line), min(1.0, 2 * mean / peak if peak else 0) * peak / min(by_root, by_line)
    facts = {"lr": peak, "mean": mean, "square_root_rule": by_root, "linear_rule": by_line, "parameters": parameters}
    rules = f"the square-root rule gives {by_root:.2g}" + (f" and the linear one {by_line:.2g}" if batch != 64 else "")
    remedy = f"--lr {by_root:.1g}"
    search = f"{remedy}, or try `unfog find-lr`"
    return Finding.graded(
        "settings.lr",
        f"lr {peak:.2g} for {parameters / 1e6:.2f}M parameters and batches of {batch}, where {rules}",
        (above >= _HOPELESS, "fatal", "; at this multiple a run hardly learns, or its loss becomes NaN", remedy),
        (above >= _FAR_TOO_HIGH, "warning", "; the loss may jump and samples get worse", search),
        (above > _HIGH, "hint", "; only short runs of small networks may tolerate it", search),
        (below < _NEARLY_ZERO, "fatal", "; the weights will hardly change", remedy),
        (below < _FAR_TOO_LOW, "warning", f"; at {mean:.2g} on average training takes many times as long", remedy),
        (below < _LOW, "hint", "; training is stable but slow", remedy),
        facts=facts,
    )


def _check_warmup(config: Config) -> Finding:
    """Check that warm-up leaves most of the run at the peak learning rate."""
    steps, warmup = _steps(config), config.optimizer.warmup
    remedy = f"--optimizer.warmup {max(1, min(5000, steps // 20))}"
    end = f", so the learning rate ends at {100 * steps / max(1, warmup):.0f}% of its peak"
    return Finding.graded(
        "settings.warmup",
        f"warm-up takes {warmup:,} of {plural(steps, 'step')}",
        (warmup >= steps and warmup > 1, "warning", end, remedy),
        (warmup >= steps / 2 and warmup > 1, "warning", ", which leaves little at the peak", remedy),
        facts={"warmup": warmup, "steps": steps},
    )


def _check_ema(config: Config) -> Finding:
    """Check the window of the EMA: neither weights of the first tenth of the run, nor only the last few steps."""
    steps = _steps(config)
    early, half = _ema_share_before(config.ema, steps // 10, steps), _ema_half_window(config.ema, steps)
    said = f"half of the EMA is from the last {half:,} of {plural(steps, 'step')}"
    remedy = "--ema power, whose window is a share of the run"
    return Finding.graded(
        "settings.ema",
        f"{said}, {format_number(100 * early)}% from the first tenth",
        (early > 0.05 and steps >= 10, "warning", ", before the network had learned much", remedy),
        (half < 10 and steps >= 200, "warning", "; that averages almost nothing", remedy),
        facts={"first_tenth": early, "half_from_last": half, "steps": steps, "kind": config.ema.kind},
    )


def _steps(config: Config) -> int:
    return max(1, config.training.images // config.training.batch)


def _ema_share_before(profile: EmaSchedule, step: int, steps: int) -> float:
    """Return the share of the EMA at update `steps` from the weights up to update `step` (0: the initial ones)."""
    # It is the product of all decays since. The sum of their logarithms is integrated where they are very many.
    if step >= steps:
        return 1.0
    updates = np.unique(np.geomspace(step + 1, steps, 4000).round().astype(np.int64))
    with np.errstate(divide="ignore"):
        logs = np.log([profile.decay(int(n)) for n in updates])
    if len(updates) == steps - step:  # every one of them
        return float(np.exp(logs.sum()))
    return float(np.exp(np.trapezoid(logs, updates) + (logs[0] + logs[-1]) / 2))


def _ema_half_window(profile: EmaSchedule, steps: int) -> int:
    """Return how many of the last updates make half of the EMA; by bisection."""
    low, high = 0, steps  # more than half is from before `high`, and less from before `low`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _ema_share_before(profile, middle, steps) > 0.5 else (middle, high)
    return steps - low


def _check_optimizer(config: Config) -> Finding:
    """Check the betas, eps and weight decay of AdamW; a custom optimiser is not checked."""
    settings = config.optimizer
    if isinstance(settings.method, Custom):
        said = f"{settings.method.path} with {', '.join(settings.method.arguments) or 'its own settings'}"
        return Finding("settings.optimizer", "fine", f"{said}, which is not checked", facts={})
    (beta1, beta2), eps, decay = settings.betas, settings.eps, settings.lr * settings.weight_decay
    muon = f"Muon with momentum {settings.method.momentum:g}, " if isinstance(settings.method, Muon) else ""
    # Below its square root beta 1 outlives the running square that its step is divided by.
    unsteady = beta1**2 >= beta2 or beta1 > 0.98 or beta2 < 0.9
    vanish = ": the gradients of a large network are smaller than eps, so its steps almost vanish"
    strong = decay > 2e-3
    half_life = f": each weight loses half of itself in {math.log(2) / decay:,.0f} steps" if strong else ""
    weaker = min(0.01, 1e-3 / settings.lr) if strong else 0.0
    betas = ": beta2 forgets as fast as beta1, so the step size is unsteady"
    return Finding.graded(
        "settings.optimizer",
        f"{muon}AdamW with betas {beta1:g} {beta2:g}, eps {eps:g}, weight decay {settings.weight_decay:g}",
        (unsteady, "warning", betas, "--optimizer.betas 0.9 0.999"),
        (eps > 1e-5, "warning", vanish, "--optimizer.eps 1e-8"),
        (strong, "warning", half_life, f"--optimizer.weight-decay {weaker:.2g}"),
        facts={"betas": list(settings.betas), "eps": eps, "weight_decay": settings.weight_decay},
    )


def _check_clipping(config: Config) -> Finding:
    """Check that the gradient is clipped."""
    clip = config.training.clip
    if clip == 0:
        said = "the gradient is not clipped, so one bad batch can ruin the weights"
        return Finding("settings.clip", "warning", said, "--training.clip 1", {"clip": clip})
    return Finding("settings.clip", "fine", f"the gradient is clipped to a norm of {clip:g}", facts={"clip": clip})


def _check_batch(config: Config, images: int) -> Finding:
    """Check that a batch is neither larger than the dataset nor too small for a useful gradient."""
    batch = config.training.batch
    facts = {"batch": batch, "microbatch": config.training.microbatch or batch, "images": images}
    if batch > max(8, images):
        said = f"a step of {plural(batch)} takes each of the {images:,} about {format_number(batch / images)} times"
        remedy = f"--batch {max(8, images // 8 * 8)}, which takes less time a step"
        return Finding("settings.batch", "hint", f"{said}, in other noise", remedy, facts)
    larger = min(32, max(8, images))
    more = f"--batch {larger} --microbatch {batch}, which takes no more memory, with a learning rate that suits it"
    return Finding.graded(
        "settings.batch",
        f"{batch} of {plural(images)} a step",
        (batch < 8, "hint", " make a gradient that is mostly noise", more),
        facts=facts,
    )
