"""Whether a step was really captured: training goes on without, and says so to its hooks alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unfog.training.hooks import TrainingHooks


@contextmanager
def must_capture(wanted: bool = True) -> Iterator[None]:
    """Inside, steps that are trained have to be captured, if that is `wanted`. RuntimeError with the reason if not."""
    said, usual = list[str](), TrainingHooks.on_capture
    TrainingHooks.on_capture = lambda self, message: said.append(message)  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingHooks.on_capture = usual  # type: ignore[method-assign]
    if wanted and not any("each step is one CUDA graph" in message for message in said):
        raise RuntimeError(f"no step was captured: {'; '.join(said) or 'nothing was said'}")
