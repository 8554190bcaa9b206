"""Network calls that a run makes: training, previews, evaluation and metrics."""

from __future__ import annotations

from unfog.config.schema import Config
from unfog.diffusion.sampler import TWO_CALLS


def forward_passes(config: Config, held_out: int) -> dict[str, float]:
    """Return the cost of each part of a run, in forward passes of one image in fp32.

    The keys are "training", "preview", "evaluate" and "metrics". Where the number of samples for metrics is chosen
    automatically, "metrics" is the share of the training time that they may take.

    Args:
        config: resolved settings.
        held_out: number of held-out images.
    """
    evaluate, steps = config.evaluate, config.training.images // config.training.batch
    calls = config.sampler.steps * (2 if config.sampler.kind in TWO_CALLS else 1)
    calls *= 2 if config.usual_guidance != 1 else 1
    # A backward pass costs two forward passes. bf16 and fp16, which only training uses, take about two thirds of fp32.
    training = config.training.images * (3.0 if config.training.precision == "fp32" else 2.0)
    metrics = 0.0
    if evaluate.metrics and evaluate.metrics_every >= 0:
        fixed = evaluate.samples and evaluate.metrics_every
        # Metrics run at the first evaluation after each multiple of their interval, and after the last step.
        count = 1 + max(0, steps - 1) // max(evaluate.metrics_every, evaluate.every, 1)
        metrics = float(count * evaluate.samples * calls) if fixed else evaluate.share * training
    evaluated = min(evaluate.images, held_out) * evaluate.levels * (evaluate.every > 0)
    return {
        "training": training,
        "preview": repetitions(config.preview.every, steps) * config.preview.images * calls,
        "evaluate": repetitions(evaluate.every, steps) * evaluated,
        "metrics": metrics,
    }


def repetitions(every: int, steps: int) -> int:
    """Return how often a run previews or evaluates: at both ends, and every so many steps if that is not -1."""
    return 2 + (max(0, steps - 1) // every if every > 0 else 0)
