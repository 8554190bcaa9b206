"""`unfog sample`: generate images from a run into a folder. `unfog export`: write its network for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unfog.config.export_request import ExportRequest, ExportSettings
from unfog.config.run_requests import SampleRequest, SamplingRequest, is_model
from unfog.config.validate import check_out, check_sampler, override_sampler, report_dropped_levels
from unfog.config.values import quote
from unfog.errors import RequestError
from unfog.process.run_folder import RunFolder, unused_path
from unfog.reporting.image_grids import Pixels, grid, save_png, with_caption
from unfog.reporting.progress import Progress, print_result, say
from unfog.text import sanitize

if TYPE_CHECKING:
    from unfog.config.schema import Config
    from unfog.diffusion.editing import Edit
    from unfog.diffusion.sampler import Observe, Sampler
    from unfog.diffusion.steps import SamplingStep
    from unfog.inference.run import Run
    from unfog.pipeline.image_files import DenoisingStrip

_LONGEST_NAME = 40  # characters of a class in the name of a file
_MAX_IN_GRID = 1000  # samples; a grid of ten thousand takes more memory than generating them, and few programs open it


def main(request: SampleRequest | ExportRequest) -> int:
    """Write images, or an export, print their folder, and return the exit status."""
    if isinstance(request, SampleRequest) and is_model(request.run):
        print_result(str(_sample_model(request)))
        return 0
    stored = RunFolder(request.run).read_config()
    if isinstance(request, ExportRequest):
        sampler = override_sampler(stored.sampler, request.sampler, request.steps)
    else:
        sampler = _sampler(request, stored)
    check_sampler(sampler, stored.diffusion.schedule)
    if isinstance(request, ExportRequest):
        check_out(request.out, what="the folder of an export", argument="OUT")
        _export(request)
        out = request.out
    else:
        out = _sample(request, stored, sampler, lambda: _load(request))
    print_result(str(out))
    return 0


def _export(request: ExportRequest) -> None:
    from unfog.inference.run import Run

    run = Run(request.run, request.weights, request.checkpoint, "cpu", request.best, request.ema)
    say(f"  exporting step {run.checkpoint.step:,}, and comparing what was written with the run")
    run.export(request.out, **{f.name: getattr(request, f.name) for f in fields(ExportSettings)})
    say(f"  loaded again, it differs from the run by {run.export_difference:.1g} of the largest output")


def _sample_model(request: SampleRequest) -> Path:
    """Generate images with a network that has no run, and return their folder."""
    from unfog.runs.model import Model

    model = Model(request.run, request.device)
    sampler = _sampler(request, model.config)
    check_sampler(sampler, model.config.diffusion.schedule)
    return _sample(request, model.config, sampler, lambda: model)


def _sampler(request: SampleRequest, config: Config) -> Sampler:
    return override_sampler(config.sampler, request.sampler, request.steps, request.grid, request.levels)


def _load(request: SampleRequest) -> Run:
    from unfog.inference.run import Run

    return Run(request.run, request.weights, request.checkpoint, request.device, request.best, request.ema)


def _sample(request: SampleRequest, stored: Config, sampler: Sampler, load: Callable[[], Run]) -> Path:
    """Generate images, write them, and return their folder."""
    check_out(request.out or unused_path(request.run / "pictures"), what="the folder of the samples")
    if request.animate is not None:
        _check_animation(request.animate)
    # Imported only now, as torch takes seconds: a wrong request is refused before.
    from unfog.pipeline.animation import DenoisingAnimation
    from unfog.pipeline.generate import parse_labels
    from unfog.pipeline.image_files import DenoisingStrip, build_edit

    parse_labels(request.label, stored.classes)  # before the weights are read
    edit = build_edit(stored, request.image, request.mask, request.strength, request.repeats)
    run = load()
    report_dropped_levels(stored.sampler, sampler)
    diffusion = run.config.diffusion
    strip = DenoisingStrip(diffusion.schedule, run.decode) if request.strip else None
    steps = edit.steps(sampler.steps) if edit else sampler.steps
    animation = DenoisingAnimation(diffusion.path, steps, run.decode) if request.animate else None
    observe = _observe_all(strip, animation)
    known = request.ema is None and run.checkpoint.step
    label = f"sampling from step {run.checkpoint.step:,}" if known else "sampling"
    settings = {f.name: getattr(request, f.name) for f in fields(SamplingRequest)}
    inputs = {name: getattr(request, name) for name in ("label", "image", "mask")}
    guide = request.guide if request.guide_checkpoint is None else request.guide_checkpoint
    with Progress(label, request.n) as progress:
        images = run.sample(**settings, **inputs, guide=guide, progress=progress.update, observe=observe)
    if sampler.kind == "adaptive":
        say(f"  adaptive took up to {run.calls} network calls")
    out = request.out or unused_path(run.path / "pictures")
    classes = [run.classes[i] for i in parse_labels(request.label, run.classes)]
    _write_images(out, images, classes, strip, edit, run.sampled)
    if animation is not None and request.animate is not None:
        animation.save(request.animate, images)
    return out


def _observe_all(*observers: Observe | None) -> Observe | None:
    """Return one observer that calls those that are there; None without any."""
    given = [observer for observer in observers if observer is not None]

    def observe(step: SamplingStep) -> None:
        for observer in given:
            observer(step)

    return observe if given else None


def _edit_grid(edit: Edit, samples: Pixels) -> Pixels:
    """Return a grid of the image, its mask if there is one, and the samples: uint8 [H, W, 3]."""
    from unfog.pipeline.generate import to_pixels

    first = [to_pixels(edit.image).permute(1, 2, 0).numpy()]
    if edit.unknown is not None:
        first.append(np.broadcast_to(255 * edit.unknown[0].byte().numpy()[..., None], first[0].shape))
    return grid(np.concatenate([np.stack(first), samples]))


def _write_images(
    folder: Path,
    samples: Pixels,
    classes: Sequence[str],
    strip: DenoisingStrip | None,
    edit: Edit | None = None,
    settings: Sequence[str] = (),
) -> None:
    """Write 000000-CLASS.png, 000001-CLASS.png, …, grid.png, and strip.png if sampling was observed.

    The grid shows the first thousand samples; those of an edit come after the edited image and its mask. The samples
    cycle through the `classes`. The `settings` are stored in each file, and are the caption of the grid.
    """
    from unfog.pipeline.generate import sample_grid

    folder.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(samples):
        name = sanitize(classes[number % len(classes)]) if classes else ""
        text = {"Class": name} if name else {}
        text |= {"Settings": sanitize(", ".join([*settings, f"sample {number}"]))} if settings else {}
        save_png(folder / f"{number:06d}{_in_file_name(name)}.png", sample, text=text)
    if len(samples) > _MAX_IN_GRID:
        say(f"  grid.png shows the first {_MAX_IN_GRID:,} of {len(samples):,} samples")
    first = samples[:_MAX_IN_GRID]
    image = _edit_grid(edit, first) if edit else sample_grid(first, classes)
    save_png(folder / "grid.png", with_caption(image, settings) if settings else image)
    if strip is not None:
        save_png(folder / "strip.png", strip.image())


def _in_file_name(name: str) -> str:
    """Return a class as part of a file name: "-T_shirt"; letters and digits of any language stay."""
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)[:_LONGEST_NAME]
    return f"-{plain}" if plain else ""


def _check_animation(file: Path) -> None:
    """Raise RequestError unless an animation can be written to this file."""
    if file.suffix == ".mp4" and not find_spec("imageio_ffmpeg"):
        raise RequestError("an MP4 needs imageio-ffmpeg: pip install 'unfog[video]'; or animate as .gif or .webp")
    if file.exists() or file.is_symlink():
        raise RequestError(f"{quote(str(file))} exists; give another --animate")
    if not file.parent.is_dir():
        raise RequestError(f"{quote(str(file.parent))} is no folder; make it, or give another --animate")
