"""`unfog evaluate`: measure a run or images, and print the metrics. `unfog report`: write report.html."""

from __future__ import annotations

from unfog.config.requests.evaluate import EvaluateRequest
from unfog.config.requests.runs import ReportRequest
from unfog.errors import RequestError
from unfog.files.safe_files import write_atomic
from unfog.process.run_status import RunStatus
from unfog.reporting.progress import print_result
from unfog.runs.evaluate import evaluate, is_main_process


def main(request: EvaluateRequest | ReportRequest) -> int:
    """Print the metrics, or the path of the report, and return the exit status."""
    if isinstance(request, EvaluateRequest):
        _evaluate(request)
    else:
        from unfog.reporting.report import write_report

        print_result(str(write_report(request.run, RunStatus.read(request.run).headline)))
    return 0


def _evaluate(request: EvaluateRequest) -> None:
    if request.out is not None and request.out.is_dir():
        raise RequestError(f"--out {request.out} is a folder; give the name of a file, such as result.json")
    found = evaluate(request)
    if is_main_process():
        print_result("\n".join(found.lines()))
        if request.out is not None:
            request.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(request.out, found.to_json(), request.out.parent, shared=True)
