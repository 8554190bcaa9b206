"""Evaluate the subject of a request: a run, a model of another program, or images."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING

from unfog.config.requests.evaluate import EvaluateRequest, EvaluationRequest
from unfog.config.requests.sample import is_model
from unfog.config.validate import check_source, resolve_sampler
from unfog.errors import Interrupted, RequestError
from unfog.process.run_folder import RunFolder
from unfog.process.run_status import RunStatus

# Modules that import torch are imported inside functions, so that a wrong request is refused at once.

if TYPE_CHECKING:
    from unfog.inference.evaluation_files import Evaluation


def evaluate(request: EvaluateRequest) -> Evaluation:
    """Return the metrics of the run, model or images that `request.run` names. A run gets a new report.html too."""
    kind = _of_images if request.is_of_images else _of_model if is_model(request.run) else _of_run
    return kind(request)


def _of_images(request: EvaluateRequest) -> Evaluation:
    check_source(request.reference)
    from unfog.inference.evaluate import evaluate_images
    from unfog.training.distributed.process_group import local_device

    return evaluate_images(str(request.run), request, request.size, local_device(request.device))


def _of_model(request: EvaluateRequest) -> Evaluation:
    check_source(request.reference)
    from unfog.runs.weights.model import Model

    settings = {f.name: getattr(request, f.name) for f in fields(EvaluationRequest)}
    return Model(request.run, request.device, request.size).evaluate(**settings)


def _of_run(request: EvaluateRequest) -> Evaluation:
    stored = RunFolder(request.run).read_config()
    sizes = [bucket.size for bucket in stored.size_buckets] or [stored.data.size]
    if request.size not in (0, *sizes):
        raise RequestError(f"size = {request.size} is not a size of {request.run}; give {', '.join(map(str, sizes))}")
    resolve_sampler(stored, request.sampler, request.steps)
    if request.reference not in ("", "held-out"):
        check_source(request.reference)
    from unfog.inference.run import Run
    from unfog.reporting.progress import say
    from unfog.reporting.report import write_report
    from unfog.training.distributed.process_group import local_device

    run = Run(request.run, request.weights, request.checkpoint, local_device(request.device), request.best)
    run = run.at_size(request.size)
    try:
        found = run.evaluate(**{f.name: getattr(request, f.name) for f in fields(EvaluationRequest)})
    except Interrupted:
        say("the same command continues with the samples that are there")
        raise
    if is_main_process():
        # The report shows evaluations, so it is out of date as soon as there is a new one.
        write_report(run.path, RunStatus.read(run.path).headline)
    return found


def is_main_process() -> bool:
    """Return whether this is rank 0."""
    return os.environ.get("RANK", "0") == "0"
