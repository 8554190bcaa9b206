"""Description of an exported model: all that a sampler has to know besides the weights, for ours and for diffusers.

At each noise level the network's output y becomes E[x0 | x_t] by four numbers, whatever path, target and condition
the run was trained with:

    x0 = c_skip x_t + c_out y(c_in x_t, c_noise, label)

A pipeline of diffusers has a scheduler that samples as the run does, and the objective of the network.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from unfog.config.schema import Config
from unfog.diffusion.ddpm_schedules import TimestepSchedule
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import EDM_LIMITS, VP, Cosine, Flow, FlowUniform, Linear, LogitNormal, LogNormal
from unfog.diffusion.sampler import RANDOM, Level, Sampler
from unfog.diffusion.target import X0, Eps, V
from unfog.errors import RequestError
from unfog.inference.exports.conditions import describe_columns, has_named_inputs
from unfog.inference.loaded_run import LoadedRun
from unfog.models.settings import UNet
from unfog.settings import is_auto
from unfog.values.kinds.image_kinds import image_columns

_VERSION = 1
_TABLE = 20_000  # log SNRs that a denoiser has of a continuous schedule of timesteps
_KINDS = ("ddim", "dpmpp", "heun", "ddpm", "dpmpp-sde", "unipc")
# Kind -> algorithm of diffusers' DPM-Solver.
_SOLVERS = {"ddim": "dpmsolver++", "dpmpp": "dpmsolver++", "dpmpp-sde": "sde-dpmsolver++"}
_PREDICTIONS = {Eps.kind: "epsilon", X0.kind: "sample", V.kind: "v_prediction"}


def describe_network(config: Config) -> dict[str, Any]:
    """Return all that builds the network of a run in an export, as plain values for JSON."""
    network, classes, text = config.network, list(config.classes), config.conditions
    assert network is not None  # a run's is settled
    return {
        "network": {"kind": network.kind, "settings": asdict(network)},
        "input": list(config.input_shape),
        "out_channels": config.input_shape[0] * (1 + config.diffusion.learned_variance),
        "wrap": config.data.wrapped,
        "classes": classes,
        "null_label": len(classes) if classes else None,
        "conditions": describe_columns(config),
        "mask": config.data.has_unknown,
        **({"image_factor": text.image_factor} if image_columns(config.columns) else {}),
        **({"text": {"layers": text.text_layers, "width": text.text_width}} if text.text else {}),
    }


def describe_model(run: LoadedRun, sampler: Sampler) -> dict[str, Any]:
    """Return the description of a run's network and of its sampler, as plain values for JSON."""
    config = run.config
    sampler, scaling = config.representation.sampler(sampler), config.representation.scaling()
    return {
        "format": "unfog-model",
        "version": _VERSION,
        "run": {"name": run.path.resolve().name, "step": run.step, "weights": run.weights, "ema": run.ema},
        **describe_network(config),
        "guidance": config.usual_guidance,
        "guidance_interval": list(config.guidance_interval),
        "sampler": {"kind": sampler.kind, "order": sampler.order, "clip": sampler.clip},
        "levels": noise_levels(config.diffusion, sampler),
        "latents": scaling and {"factor": config.representation.factor, **scaling},
        "values": asdict(config.image_format.values),
    }


def noise_levels(diffusion: Diffusion, sampler: Sampler) -> list[dict[str, float]]:
    """Return the noise levels of a sampler, noisiest first, with the coefficients at each; the last is clean."""
    levels = sampler.levels(diffusion.path, diffusion.schedule)
    return [*(_coefficients(diffusion, level) for level in levels[:-1]), {"alpha": 1.0, "sigma": 0.0}]


def _coefficients(diffusion: Diffusion, level: Level) -> dict[str, float]:
    """Return alpha, sigma, c_in, c_noise, c_skip and c_out at a level, computed in float32 as sampling does."""
    logsnr, one, zero = torch.tensor([level.logsnr]), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    # By calling what sampling calls, rather than by formulas of their own that could differ.
    c_in, c_noise = diffusion.network_input(one, logsnr)
    # x0 is linear in x_t and y.
    c_skip, c_out = diffusion.recover(zero, one, logsnr)[0], diffusion.recover(one, zero, logsnr)[0]
    names = {"c_in": c_in, "c_noise": c_noise, "c_skip": c_skip, "c_out": c_out}
    return {"alpha": level.alpha, "sigma": level.sigma} | {name: value.item() for name, value in names.items()}


def describe_denoiser(run: LoadedRun, sampler: Sampler) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the description of a run's denoiser, as plain values for JSON, and the log SNR of its timesteps.

    The log SNR is float32 [T], or [0] if the network receives no timesteps. `sampler` is that of the model card.
    """
    config, model = run.config, describe_model(run, sampler)
    diffusion = config.diffusion
    schedule, condition, levels = diffusion.schedule, _condition(config), torch.zeros(0)
    if condition["kind"] == "timestep":
        assert isinstance(schedule, TimestepSchedule)  # others have another kind of condition
        if schedule.steps:
            first, step, levels = 0.0, 1.0, schedule.table().float()
        else:
            first, step = 1e-3, (1000 - 2e-3) / (_TABLE - 1)
            levels = schedule((first + step * torch.arange(_TABLE, dtype=torch.float64)) / 1000).float()
        condition |= {"first": first, "step": step}
    noisiest, cleanest = schedule.limits()
    if math.isinf(noisiest):
        noisiest = float(levels[-2])  # of a schedule whose last level is pure noise
    return {
        "format": "unfog-denoiser",
        "version": _VERSION,
        "run": model["run"],
        **describe_network(config),
        "values": model["values"],
        "objective": {
            "path": diffusion.path.kind,
            "target": diffusion.target.kind,
            "sigma_data": diffusion.sigma_data,
            "scale_input": diffusion.scale_input,
            "condition": {name: value for name, value in condition.items() if name != "scale"},
        },
        "sigma": [math.exp(-cleanest / 2), math.exp(-noisiest / 2)],
    }, levels


class _Scheduler(NamedTuple):
    """A scheduler of diffusers, or ours in a file of its own, and its settings."""

    kind: str
    settings: dict[str, Any]

    @property
    def component(self) -> list[str]:
        return ["levels_scheduler" if self.kind == "LevelsScheduler" else "diffusers", self.kind]


def equal_network(config: Config) -> UNet | None:
    """Return the network of a run if diffusers has one that is equal, `UNet2DModel`; else None."""
    network = config.network
    # It pads with zeros, and has no input but timestep and class.
    equal = isinstance(network, UNet) and not config.data.wrapped and not has_named_inputs(config)
    return network if equal and isinstance(network, UNet) else None


def check_sampler_maps(config: Config, sampler: Sampler) -> None:
    """Raise RequestError if no pipeline samples as this sampler does."""
    if sampler.kind not in _KINDS:
        raise RequestError(
            f"sampler = {sampler.kind} has no equivalent in diffusers; give --sampler ddim, dpmpp or heun"
        )
    if sampler.kind in ("unipc", "dpmpp-sde") and not _has_solver(config, sampler):
        raise RequestError(
            f"sampler = {sampler.kind} has an equivalent in diffusers only with the levels of a flow schedule, or with "
            "the timesteps of a linear or cosine one, none of them pure noise; give --sampler ddim, dpmpp or heun"
        )
    if sampler.kind == "dpmpp" and sampler.order != 2:
        raise RequestError(
            f"sampler.order = {sampler.order} of dpmpp has no equivalent in diffusers; give --sampler ddim, or set it "
            "to 2: unfog resume RUN --sampler.order 2"
        )
    if sampler.kind == "ddpm" and (config.diffusion.learned_variance or not _is_table(config, sampler)):
        raise RequestError(
            "sampler = ddpm has an equivalent in diffusers only with the timesteps of a linear or cosine schedule on "
            "the vp path, without a learned variance; give --sampler ddim"
        )


def _is_table(config: Config, sampler: Sampler) -> bool:
    """Return True if diffusers has the table of noise levels that is sampled at."""
    diffusion, schedule = config.diffusion, config.diffusion.schedule
    # Offset and cap are constants in diffusers' cosine table, so other ones have no equal there.
    known = isinstance(schedule, Linear) or (
        isinstance(schedule, Cosine) and (schedule.offset, schedule.max_beta) == (Cosine.offset, Cosine.max_beta)
    )
    on_timesteps = diffusion.conditioning == "timestep" and _ends_with_schedule(sampler)
    return isinstance(diffusion.path, VP) and known and schedule.steps > 0 and on_timesteps


def _is_flow(config: Config, sampler: Sampler) -> bool:
    """Return True if diffusers' flow schedulers have the noise levels that are sampled at."""
    diffusion = config.diffusion
    straight = isinstance(diffusion.path, Flow) and isinstance(diffusion.schedule, FlowUniform | LogitNormal)
    return straight and _ends_with_schedule(sampler)


def _ends_with_schedule(sampler: Sampler) -> bool:
    """Return True if the noise levels are the schedule's own, down to the last."""
    return sampler.grid == "schedule" and is_auto(sampler, "last")


def _has_solver(config: Config, sampler: Sampler) -> bool:
    """Return True if a solver of diffusers takes these steps."""
    # In pure noise, where alpha is 0, it takes another level.
    table = _is_table(config, sampler) and not getattr(config.diffusion.schedule, "zero_terminal", False)
    return (sampler.kind in _SOLVERS or sampler.kind == "unipc") and (table or _is_flow(config, sampler))


def is_stock(config: Config, sampler: Sampler) -> bool:
    """Return True if a pipeline of diffusers samples this run, so that no code is needed."""
    diffusion = config.diffusion
    plain = not (
        config.classes or config.representation.scaling() or diffusion.scale_input or diffusion.learned_variance
    )
    # UNet2DModel embeds the timestep as it is.
    unet = (equal := equal_network(config)) is not None and equal.time_scale == 1
    table = _is_table(config, sampler) and (sampler.kind == "ddpm" or _has_solver(config, sampler))
    # Pipelines of diffusers give a scheduler their generator, and that of UniPC takes none.
    return plain and unet and table and sampler.kind != "unipc" and diffusion.target.kind in _PREDICTIONS


def _table(config: Config) -> dict[str, Any]:
    """Return the settings by which diffusers' schedulers make the table of a linear or cosine schedule."""
    schedule = config.diffusion.schedule
    assert isinstance(schedule, Linear | Cosine)  # checked by `_is_table`
    table: dict[str, Any] = {"num_train_timesteps": schedule.steps, "timestep_spacing": "trailing"}
    if isinstance(schedule, Cosine):
        return table | {"beta_schedule": "squaredcos_cap_v2"}
    betas = schedule.betas()
    return table | {"beta_schedule": "linear", "beta_start": betas[0], "beta_end": betas[-1]}


def stock_scheduler(config: Config, sampler: Sampler) -> _Scheduler:
    """Return the scheduler for a pipeline of diffusers. The pipeline passes it the network's output unchanged."""
    kind, settings = custom_scheduler(config, sampler)
    predicted = {"prediction_type": _PREDICTIONS[config.diffusion.target.kind]}
    if kind == "DDPMScheduler":
        return _Scheduler(kind, settings | predicted | {"clip_sample": sampler.clip})
    # Not DDIMScheduler, which clips the image and leaves the noise that belongs to the unclipped one.
    return _Scheduler(kind, settings | predicted | {"thresholding": sampler.clip, "sample_max_value": 1.0})


def custom_scheduler(config: Config, sampler: Sampler) -> _Scheduler:
    """Return the scheduler for our pipeline, which gives it clean images."""
    schedule, shared = config.diffusion.schedule, {"prediction_type": "sample"}
    if sampler.kind == "ddpm":
        zero = {"rescale_betas_zero_snr": getattr(schedule, "zero_terminal", False), "clip_sample": False}
        return _Scheduler("DDPMScheduler", shared | _table(config) | zero)
    if not _has_solver(config, sampler):
        path = {"kind": sampler.kind, "path": config.diffusion.path.kind}
        return _Scheduler("LevelsScheduler", path | _grid(config, sampler))
    flow = {"use_flow_sigmas": True, "flow_shift": getattr(schedule, "shift", 1.0), "num_train_timesteps": 1000}
    levels = {"final_sigmas_type": "zero", **shared} | (flow if _is_flow(config, sampler) else _table(config))
    if sampler.kind == "unipc":
        return _Scheduler("UniPCMultistepScheduler", levels | {"solver_order": sampler.order, "solver_type": "bh2"})
    solver = {"solver_order": 1 if sampler.kind == "ddim" else 2, "solver_type": "midpoint"}
    return _Scheduler("DPMSolverMultistepScheduler", levels | solver | {"algorithm_type": _SOLVERS[sampler.kind]})


def _grid(config: Config, sampler: Sampler) -> dict[str, Any]:
    """Return the noise levels of our scheduler: a formula for any number of steps, or a list."""
    diffusion, grid = config.diffusion, sampler.grid
    own = isinstance(diffusion.schedule, LogNormal) and grid == "schedule"  # EDM's, which are karras
    if (own or grid in ("karras", "logsnr")) and is_auto(sampler, "last") and _condition(config)["kind"] != "timestep":
        noisiest, cleanest = diffusion.schedule.limits()
        ends = {"noisiest": max(noisiest, EDM_LIMITS[0]), "cleanest": min(cleanest, EDM_LIMITS[1])}
        return {"grid": "karras" if own else grid, **ends}
    levels = noise_levels(diffusion, sampler)[:-1]
    return {"grid": "list", "levels": [[level[name] for name in ("alpha", "sigma", "c_noise")] for level in levels]}


def _condition(config: Config) -> dict[str, Any]:
    """Return how the noise condition of the network follows from the noise level."""
    diffusion, schedule = config.diffusion, config.diffusion.schedule
    # UNet2DModel has no such factor, and other networks have it inside.
    equal = equal_network(config)
    scale = {"scale": 1.0 if equal is None else equal.time_scale}
    if diffusion.conditioning == "logsnr":
        return {"kind": "logsnr", **scale}
    if isinstance(schedule, LogNormal | LogitNormal):
        return {"kind": "normal", "mean": schedule.mean, "std": schedule.std, **scale}
    if isinstance(schedule, FlowUniform):
        return {"kind": "flow", "shift": schedule.shift, **scale}
    return {"kind": "timestep", **scale}


def describe_objective(config: Config, sampler: Sampler) -> dict[str, Any]:
    """Return the settings of our pipeline, besides its components."""
    diffusion, classes = config.diffusion, list(config.classes)
    return {
        "target": diffusion.target.kind,
        "sigma_data": diffusion.sigma_data,
        "scale_input": diffusion.scale_input,
        "condition": _condition(config),
        "classes": classes,
        "null_label": len(classes),
        "conditions": describe_columns(config),
        "guidance": config.usual_guidance,
        "guidance_interval": list(config.guidance_interval),
        "clip": sampler.clip,
        "random": sampler.kind in RANDOM,
        "steps": sampler.steps,
        "latents": config.representation.scaling(),
    }
