"""`unfog doctor`: check images, settings and machine before a run, a run, or a GPU, and print the path of the page."""

from __future__ import annotations

from unfog.config.requests.doctor import DoctorRequest
from unfog.reporting.findings import has_fatal
from unfog.reporting.progress import print_result
from unfog.runs.doctor import doctor


def main(request: DoctorRequest) -> int:
    """Examine, print the path of the page, and return the exit status: 2 if training makes no sense."""
    page, findings = doctor(request)
    print_result(str(page))
    return 2 if has_fatal(findings) else 0
