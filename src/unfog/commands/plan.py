"""`unfog plan`: predict memory, time and disk of a run before it starts, and print the plan."""

from __future__ import annotations

import json

from unfog.config.requests.plan import PlanRequest
from unfog.planning.plan import plan
from unfog.reporting.findings import has_fatal, print_findings
from unfog.reporting.progress import print_result


def main(request: PlanRequest) -> int:
    """Print the plan, and return the exit status: 2 if it does not fit."""
    planned = plan(request)
    print_result(json.dumps(planned.to_dict(), indent=2) if request.json else "\n".join(planned.lines()))
    print_findings(planned.findings)
    return 2 if has_fatal(planned.findings) else 0
