"""`unfog sample`: generate images from a run into a folder."""

from __future__ import annotations

from dataclasses import fields

from unfog.config.run_requests import SampleRequest, SamplingRequest
from unfog.config.validate import check_out, check_sampler, override_sampler, report_dropped_levels
from unfog.process.run_folder import RunFolder, unused_path


def main(request: SampleRequest) -> int:
    """Generate images, write them, print their folder, and return the exit status."""
    stored = RunFolder(request.run).read_config()
    sampler = override_sampler(stored.sampler, request.sampler, request.steps)
    check_sampler(sampler, stored.diffusion.schedule)
    check_out(request.out or unused_path(request.run / "pictures"), what="the folder of the samples")
    # Imported only now, as torch takes seconds: a wrong request is refused before.
    from unfog.inference.run import Run
    from unfog.pipeline.generate import parse_labels
    from unfog.pipeline.image_files import DenoisingStrip, build_edit, write_images
    from unfog.reporting.progress import Progress, print_result, say

    parse_labels(request.label, stored.classes)  # before the weights are read
    edit = build_edit(stored, request.image, request.mask, request.strength, request.repeats)
    run = Run(request.run, request.weights, request.checkpoint, request.device, request.best, request.ema)
    report_dropped_levels(stored.sampler, sampler)
    strip = DenoisingStrip(run.config.diffusion.schedule, run.decode) if request.strip else None
    label = f"sampling from step {run.checkpoint.step:,}" if request.ema is None else "sampling"
    settings = {f.name: getattr(request, f.name) for f in fields(SamplingRequest)}
    inputs = {name: getattr(request, name) for name in ("label", "image", "mask")}
    guide = request.guide if request.guide_checkpoint is None else request.guide_checkpoint
    with Progress(label, request.n) as progress:
        images = run.sample(**settings, **inputs, guide=guide, progress=progress.update, observe=strip)
    if sampler.kind == "adaptive":
        say(f"  adaptive took up to {run.calls} network calls")
    out = request.out or unused_path(run.path / "pictures")
    classes = [run.classes[i] for i in parse_labels(request.label, run.classes)]
    write_images(out, images, classes, strip, edit, run.sampled)
    print_result(str(out))
    return 0
