"""`unfog pack`: decode and resize images once, and print the folder of the pack."""

from __future__ import annotations

from unfog.config.requests.pack import PackRequest
from unfog.pipeline.pack import pack
from unfog.reporting.progress import print_result


def main(request: PackRequest) -> int:
    """Pack, print the folder, and return the exit status."""
    print_result(str(pack(request)))
    return 0
