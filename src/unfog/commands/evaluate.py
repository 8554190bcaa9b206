"""`unfog evaluate`: measure a run and print the metrics. `unfog report`: write its report.html."""

from __future__ import annotations

import os
from dataclasses import fields

from unfog.config.run_requests import EvaluateRequest, EvaluationRequest, ReportRequest
from unfog.config.validate import check_sampler, check_source, override_sampler
from unfog.process.run_folder import RunFolder
from unfog.process.run_status import RunStatus


def main(request: EvaluateRequest | ReportRequest) -> int:
    """Print the metrics, or the path of the report, and return the exit status."""
    if isinstance(request, EvaluateRequest):
        _evaluate(request)
    else:
        from unfog.reporting.progress import print_result
        from unfog.reporting.report import write_report

        print_result(str(write_report(request.run, RunStatus.read(request.run).headline)))
    return 0


def _evaluate(request: EvaluateRequest) -> None:
    stored = RunFolder(request.run).read_config()
    check_sampler(override_sampler(stored.sampler, request.sampler, request.steps), stored.diffusion.schedule)
    if request.reference not in ("", "held-out"):
        check_source(request.reference)
    # Imported only now, as torch takes seconds: a wrong request is refused before.
    from unfog.inference.run import Run
    from unfog.reporting.progress import print_result
    from unfog.reporting.report import write_report
    from unfog.training.distributed.process_group import local_device

    run = Run(request.run, request.weights, request.checkpoint, local_device(request.device), request.best)
    found = run.evaluate(**{f.name: getattr(request, f.name) for f in fields(EvaluationRequest)})
    if _is_main_process():
        print_result("\n".join(found.lines()))
        write_report(run.path, RunStatus.read(run.path).headline)


def _is_main_process() -> bool:
    """Return whether this is rank 0."""
    return os.environ.get("RANK", "0") == "0"
