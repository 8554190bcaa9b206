"""`unfog export`: write the network of a run for programs that do not know Unfog."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from unfog.config.export_request import ExportRequest, ExportSettings
from unfog.config.validate import check_out, check_sampler, override_sampler
from unfog.process.run_folder import RunFolder


def main(request: ExportRequest) -> int:
    """Write the export, print its folder, and return the exit status."""
    stored = RunFolder(request.run).read_config()
    check_out(request.out, what="the folder of an export", argument="OUT")
    check_sampler(override_sampler(stored.sampler, request.sampler, request.steps), stored.diffusion.schedule)
    # Imported only now, as torch takes seconds: a wrong request is refused before.
    from unfog.inference.run import Run
    from unfog.reporting.progress import print_result, say

    run = Run(request.run, request.weights, request.checkpoint, "cpu", request.best, request.ema)
    settings = {f.name: getattr(request, f.name) for f in fields(ExportSettings)}
    out = run.export(request.out, **settings)
    say(f"  loaded again and compared with the run: the same to {run.export_difference:.1g} of the largest output")
    print_result(str(Path(out)))
    return 0
