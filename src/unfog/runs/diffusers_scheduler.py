"""Translate a scheduler of diffusers to path, schedule and target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfog.config.values import sanitize
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VP, Cosine, Flow, FlowUniform, Linear
from unfog.diffusion.target import X0, Eps, FlowVelocity, Target, V
from unfog.errors import RequestError

_TARGETS: dict[str, Target] = {"epsilon": Eps(), "sample": X0(), "v_prediction": V()}
_REMEDY = "give --path, --schedule and --target"


def objective_from_scheduler(scheduler: Mapping[str, Any], base: Diffusion) -> Diffusion:
    """Return the objective that a model was trained with, from its scheduler_config.json.

    Args:
        scheduler: missing keys have the defaults of diffusers' DDPMScheduler.
        base: everything else, such as the weighting.

    Raises:
        RequestError: it has no equivalent here.
    """
    kind = str(scheduler.get("_class_name", "DDPMScheduler"))
    plain = replace(base, conditioning="timestep", scale_input=False)
    if kind.startswith("FlowMatch"):
        return replace(plain, path=Flow(), schedule=FlowUniform(), target=FlowVelocity())
    if kind.startswith(("EDM", "KarrasVe", "ScoreSdeVe", "VQ", "Cosine", "CM")) or scheduler.get("trained_betas"):
        raise RequestError(f"the scheduler {kind} has no equivalent that could be read off it; {_REMEDY}")
    steps, betas = scheduler.get("num_train_timesteps", 1000), scheduler.get("beta_schedule", "linear")
    zero = bool(scheduler.get("rescale_betas_zero_snr", False))
    if not isinstance(steps, int) or steps < 2:
        raise RequestError(f"the scheduler's num_train_timesteps = {sanitize(steps)} is no number of steps; {_REMEDY}")
    if betas == "linear":
        ends = (float(scheduler.get(name, usual)) for name, usual in (("beta_start", 1e-4), ("beta_end", 0.02)))
        # Ours are stated for 1,000 steps.
        first, last = (round(beta * steps / 1000, 12) for beta in ends)
        schedule: Linear | Cosine = Linear(steps=steps, beta_start=first, beta_end=last, zero_terminal=zero)
    elif betas == "squaredcos_cap_v2":
        schedule = Cosine(steps=steps, zero_terminal=zero)
    else:
        raise RequestError(
            f"the scheduler's beta_schedule = {sanitize(betas)} has no equivalent; there is linear and "
            f"squaredcos_cap_v2; {_REMEDY}"
        )
    predicted = scheduler.get("prediction_type", "epsilon")
    if predicted not in _TARGETS:
        raise RequestError(
            f"the scheduler's prediction_type = {sanitize(predicted)} has no equivalent; there is "
            f"{', '.join(_TARGETS)}; {_REMEDY}"
        )
    return replace(plain, path=VP(), schedule=schedule, target=_TARGETS[predicted])
