"""`unfog sample`: generate images from a run into a folder. `unfog export`: write its network for other programs."""

from __future__ import annotations

from dataclasses import fields

from unfog.config.requests.export import ExportRequest, ExportSettings
from unfog.config.requests.sample import SampleRequest
from unfog.config.validate import check_out, resolve_sampler
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import print_result, say
from unfog.runs.sample import sample


def main(request: SampleRequest | ExportRequest) -> int:
    """Write images, or an export, print their folder, and return the exit status."""
    if isinstance(request, SampleRequest):
        print_result(str(sample(request)))
    else:
        _export(request)
        print_result(str(request.out))
    return 0


def _export(request: ExportRequest) -> None:
    stored = RunFolder(request.run).read_config()
    resolve_sampler(stored, request.sampler, request.steps)
    if stored.size_buckets:
        say(f"  the export generates {stored.image_format.sides}, as the bucket with most images")
    check_out(request.out, what="the folder of an export", argument="OUT")
    # Imported only now, as torch takes seconds: a wrong request is refused before.
    from unfog.inference.run import Run

    # On the CPU, where what was written is run for the comparison as well.
    run = Run(request.run, request.weights, request.checkpoint, "cpu", request.best, request.ema)
    say(f"  exporting step {run.checkpoint.step:,}, and comparing what was written with the run")
    run.export(request.out, **{f.name: getattr(request, f.name) for f in fields(ExportSettings)})
    say(f"  loaded again, it differs from the run by {run.export_difference:.1g} of the largest output")
