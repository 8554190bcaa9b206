"""Search for the noise levels at which a run is sampled best in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from unfog.config.requests.tune import TuneRequest
from unfog.config.resume_rules import TUNED_EVENT
from unfog.config.toml import of_type, update
from unfog.config.validate import check_sampler
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.noise import Grid, NoiseSource, Schedule, cleanest_level, noise_levels
from unfog.diffusion.sampler import RANDOM, TWO_CALLS, Denoise, Sampler
from unfog.errors import RequestError
from unfog.inference.guide import resolve_guidance
from unfog.inference.run import Run
from unfog.pipeline.generate import GenerationSettings, conditional_denoiser
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.notebook import preformatted
from unfog.reporting.progress import Progress, say
from unfog.reporting.records import Events
from unfog.text import plural

_BUILT_IN = tuple(grid for grid in get_args(Grid) if grid != "tuned")
_MANY_STEPS = 128
_BATCH = 64  # images per forward pass
_SEEDS = (0x7E57, 0x7E58)  # of the noise that grids are searched on, and of that on which the result is measured
_MOVES = (1.0, 0.3)  # in logsnr; halved whenever each level has been moved by itself
_FINEST = 0.1  # part of _MOVES below which there is nothing to gain
_LEAST_GAP = 0.02  # of logsnr, between two levels
_START = -6.0  # upper limit of logsnr of the first level: at sigma / alpha = 20 there is next to nothing to see


@dataclass(frozen=True)
class TuneResult:
    """Result of `tune`: how far each grid ends from the solution in many steps, on noise that it was not tuned on."""

    sampler: Sampler
    """With the best grid."""
    errors: dict[str, float]
    """Root mean square difference of a sample in [-1, 1] scale, averaged over samples, for each grid and "tuned"; of
    latents, if the run is trained on latents."""
    reference: float
    """The same between solutions in many steps and in half as many: smaller differences mean nothing."""
    calls: int
    """Network calls of the search, each for up to 64 samples, without those of guidance."""

    def __repr__(self) -> str:
        errors = ", ".join(f"{name} {error:.4f}" for name, error in sorted(self.errors.items(), key=lambda row: row[1]))
        return f"<noise levels of {self.sampler.kind} in {plural(self.sampler.steps, 'step')}, by error: {errors}>"

    def _repr_html_(self) -> str:
        return preformatted(self.table().splitlines())

    def table(self) -> str:
        """Return a header and a line for each grid, the best first."""
        rows = sorted(self.errors.items(), key=lambda row: row[1])
        many = f"RMS difference of pixel values in [-1, 1] from samples in {_MANY_STEPS} steps"
        lines = [f"{'levels':9} error   ({many}; differences below {self.reference:.4f} mean nothing)"]
        return "\n".join([*lines, *(f"{name:9} {error:.4f}" for name, error in rows)])


@caller_flags_kept()
def tune(request: TuneRequest) -> TuneResult:
    """Find the best grid of noise levels for a number of steps, and make it the run's default.

    The levels are moved, several and later one at a time, wherever that brings the samples nearer to the result of many
    steps from the same noise: the aim of LD3 (Tong et al. 2025) and GITS (Chen et al. 2024). A search that only
    compares results needs no gradients through the sampler, so it works for every deterministic sampler.
    """
    steps, pictures, tries, store = request.steps, request.pictures, request.tries, request.store
    for name, value, least in (("steps", steps, 2), ("pictures", pictures, 1), ("tries", tries, 1)):
        if of_type(int, value, name) < least:
            raise RequestError(f"{name} = {value} must be at least {least}")
    if steps > _MANY_STEPS // 2:
        raise RequestError(
            f"steps = {steps} must be at most {_MANY_STEPS // 2}, because results are compared with samples "
            f"in {_MANY_STEPS} steps; tuning helps most with 5 to 20 steps"
        )
    run = Run(request.run, device=request.device)
    own = run.config.sampler
    # A sampler with noise of its own ends elsewhere each time, so a deterministic one is tuned in its place.
    kind = request.sampler or ("dpmpp" if own.kind in (*RANDOM, "adaptive") else own.kind)
    if kind in RANDOM or kind == "adaptive":
        why = "chooses its own levels" if kind == "adaptive" else "ends elsewhere each time"
        raise RequestError(f"sampler = {kind} {why}, so there is nothing to tune; choose ddim, heun, dpmpp or unipc")
    base: Sampler = update(own, {"kind": kind, "steps": steps, "grid": "logsnr"}, "sampler")
    check_sampler(base, run.config.diffusion)
    with run.folder.locked():  # fails now rather than after minutes
        if store:
            run.folder.check_writable()
    tuned = _search(run, base, pictures, tries)
    if store:
        with run.folder.locked(), run.folder.saving_results(lambda: [str(tuned.sampler), *tuned.table().splitlines()]):
            config = run.folder.read_config()
            with closing(Events(run.folder.events)) as events:
                events.write(TUNED_EVENT, run.checkpoint.step, {"sampler": asdict(tuned.sampler)})
            run.folder.write_config(replace(config, sampler=tuned.sampler))
        say(f"  {run.path} is now sampled by {kind} in {plural(steps, 'step')}, grid {tuned.sampler.grid}")
    return tuned


def _search(run: Run, base: Sampler, pictures: int, tries: int) -> TuneResult:
    """Search a grid on one noise, and measure all grids on another."""
    schedule = run.config.diffusion.schedule
    guided, usual = resolve_guidance(run, None, None, "fp32"), GenerationSettings.default(run.config, pictures, _BATCH)
    usual = replace(usual, precision="fp32")  # grids differ by less than 16 bits do
    drawings = [replace(usual, seed=seed, guidance=guided.scale) for seed in _SEEDS]
    candidates = {name: replace(base, grid=name) for name in _BUILT_IN}
    grids = [sampler.visits(schedule)[:-1] for sampler in candidates.values()]
    each = base.steps * (2 if base.kind in TWO_CALLS else 1)
    batches = -(-pictures // _BATCH)
    # The references, each built-in grid twice, the tries, and the result.
    total = batches * (_MANY_STEPS * 5 // 2 + each * (2 * len(_BUILT_IN) + tries + 1))
    with Progress("tuning", total) as progress:
        calls = _CallCounter(progress.update)
        # On other noise than it was searched on, or the tuned grid would always win.
        trial, test = (_GridError(run, base, drawn, guided.guide, calls) for drawn in drawings)
        best = _search_levels(min(grids, key=trial.error), trial.error, schedule, tries)
        candidates["tuned"] = replace(base, grid="tuned", tuned=tuple((-best / 2).sigmoid().tolist()))
        errors = {name: test.error(sampler.visits(schedule)[:-1]) for name, sampler in candidates.items()}
        reference = test.half_as_many()
    winner = candidates[min(errors, key=errors.__getitem__)]
    return TuneResult(winner, errors, reference, calls.count)


class _CallCounter:
    def __init__(self, progress: Callable[[int], None]) -> None:
        self.progress, self.count = progress, 0

    def of(self, denoise: Denoise) -> Denoise:

        def counting(x_t: Tensor, logsnr: Tensor) -> Tensor:
            self.count += 1
            self.progress(self.count)
            return denoise(x_t, logsnr)

        return counting


class _GridError:
    """Error of a grid: distance of its samples from those of many steps from the same noise."""

    def __init__(
        self, run: Run, sampler: Sampler, drawing: GenerationSettings, guide: Denoiser | None, calls: _CallCounter
    ):
        self.run, self.sampler, self.drawing, self.guide, self.calls = run, sampler, drawing, guide, calls
        self.reference = self.draw(self.many(_MANY_STEPS))

    def many(self, steps: int) -> Sampler:
        """Return the sampler in many steps: evenly spaced in logsnr, after one from where the run's levels start."""
        # EDM's start, sigma / alpha = 80, leaves the mean of the images out of x, which shows in the samples.
        schedule = self.run.config.diffusion.schedule
        even = noise_levels(schedule, steps - 1, "logsnr")[:-1]
        first = min(schedule.limits()[0], float(even[0]) - _LEAST_GAP)
        shares = (-torch.cat([even.new_tensor([first]), even]) / 2).sigmoid()
        return replace(self.sampler, kind="unipc", order=2, steps=steps, grid="tuned", tuned=tuple(shares.tolist()))

    def draw(self, sampler: Sampler) -> Tensor:
        """Return samples, pixels or latents as the network sees them, float32 [N, C, H, W]."""
        config, device = self.run.config, self.run.device
        shape, sampler = config.input_shape, config.representation.sampler(sampler)
        denoiser, drawn = Denoiser(self.run.network, config.diffusion), []
        for first in range(0, self.drawing.count, self.drawing.batch):
            indices = range(first, min(first + self.drawing.batch, self.drawing.count))
            conditions = self.drawing.conditions(config, indices, device)
            denoise = self.calls.of(conditional_denoiser(denoiser, config, self.drawing, conditions, self.guide))
            noise = NoiseSource(self.drawing.seed, indices, shape, device)
            with torch.inference_mode():
                drawn.append(sampler(denoise, config.diffusion.path, config.diffusion.schedule, noise.draw))
        return torch.cat(drawn)

    def error(self, logsnr: Tensor) -> float:
        """Return the error of a grid, logsnr [steps]."""
        shares = tuple((-logsnr / 2).sigmoid().tolist())
        return self.distance(self.draw(replace(self.sampler, grid="tuned", tuned=shares)))

    def half_as_many(self) -> float:
        """Return the error of half as many steps as the reference has."""
        return self.distance(self.draw(self.many(_MANY_STEPS // 2)))

    def distance(self, drawn: Tensor) -> float:
        # A mean of roots, so that no single sample counts for most.
        return float((drawn - self.reference).flatten(1).square().mean(1).sqrt().mean())


def _search_levels(
    logsnr: Tensor,
    error: Callable[[Tensor], float],
    schedule: Schedule,
    tries: int,
) -> Tensor:
    """Return levels, logsnr float64 [steps] from the noisiest, moved wherever that lowers the error, in so many tries.

    Each move is a hat function of the level's number: 1 at one level, falling to 0 at the ends of its width. Wide
    hats, which move many levels together, come first, and long moves before short ones; a move that helped is repeated.
    """
    best, least, tried = logsnr, error(logsnr), 1
    number = torch.arange(len(logsnr), dtype=torch.float64)
    width, scale = (len(logsnr) - 1) / 2, 1.0
    while tried < tries and scale > _FINEST:
        for move in _MOVES:
            for centre in torch.arange(0, len(logsnr) - 1 + width / 2, width).tolist():
                hat = scale * move * (1 - (number - centre).abs() / width).clamp(min=0)
                for way in (hat, -hat):
                    while tried < tries and _levels_are_valid(moved := best + way, schedule):
                        found, tried = error(moved), tried + 1
                        # Also of a NaN, which no comparison is true of.
                        if not found < least:
                            break
                        best, least = moved, found
        width, scale = (width / 2, scale) if width >= 3 else (1.0, scale if width > 1 else scale / 2)
    return best


def _levels_are_valid(logsnr: Tensor, schedule: Schedule) -> bool:
    # In order, and starting in noise, but not beyond the levels of the training; a first level at -inf stays there.
    noisiest, cleanest = schedule.limits()[0], cleanest_level(schedule)
    begins = noisiest <= logsnr[0] <= max(_START, noisiest + 1)
    return bool(begins and logsnr.diff().min() >= _LEAST_GAP and logsnr[-1] <= cleanest)
