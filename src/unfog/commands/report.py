"""`unfog report`: write report.html of a run."""

from __future__ import annotations

from unfog.config.run_requests import ReportRequest
from unfog.reporting.progress import print_result
from unfog.reporting.report import write_report


def main(request: ReportRequest) -> int:
    """Write the report, print its path, and return the exit status."""
    print_result(str(write_report(request.run)))
    return 0
