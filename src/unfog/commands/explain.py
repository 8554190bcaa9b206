"""`unfog explain`: print what a setting does, its default and why, bounds, resume rule, measured effect and source."""

from __future__ import annotations

from unfog.config.explain import explain
from unfog.config.requests.explain import ExplainRequest
from unfog.reporting.progress import print_result


def main(request: ExplainRequest) -> int:
    """Print the explanation. Return the exit status."""
    print_result(explain(request.setting).rstrip())
    return 0
