"""Draw samples from a run, or from a network without one, into a folder of images."""

from __future__ import annotations

import hashlib
import unicodedata
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from unfog.config.requests.sample import SampleRequest, SamplingRequest, is_model
from unfog.config.spec_strings import quote
from unfog.config.validate import check_out, check_sample_size, report_dropped_levels, resolve_sampler
from unfog.data.columns.given_table import read_given_table, save_given_table
from unfog.data.scans.write import sample_format
from unfog.errors import RequestError, install_command
from unfog.files.seals import seal_of
from unfog.pipeline.sample_folder import SampleFolder
from unfog.process.machine_key import machine_key
from unfog.process.run_folder import RunFolder, unused_path
from unfog.reporting.image_grids import Pixels, captioned_grid, grid, save_png, with_caption
from unfog.reporting.progress import Progress, say
from unfog.text import plural, sanitize
from unfog.values.buckets import share_samples
from unfog.values.kinds.image_kinds import image_columns

if TYPE_CHECKING:
    from unfog.config.schema import Config
    from unfog.diffusion.editing import Edit
    from unfog.diffusion.sampler import Observe, Sampler
    from unfog.diffusion.steps import SamplingStep
    from unfog.inference.run import PreparedSampling, Run
    from unfog.pipeline.denoising_pictures import DenoisingAnimation, DenoisingStrip
    from unfog.values.condition_requests import CellNames
    from unfog.values.image_format import ImageFormat, Size

_MOST_WORDS = 20  # of prompts that may be one in several words
_MAX_IN_GRID = 1000  # samples; a grid of ten thousand takes more memory than generating them, and few programs open it


def sample(request: SampleRequest) -> Path:
    """Generate the images that are asked for, and return their folder, which a later call goes on with if interrupted.

    RequestError if the request does not fit the run or network, before its weights are read if that can be known.
    """
    if is_model(request.run):
        from unfog.runs.weights.model import Model

        model = Model(request.run, request.device, request.size)
        return _sample(request, model.config, lambda: model)
    stored = RunFolder(request.run).read_config()
    if request.size:
        stored = stored.at_size(request.size)
        check_sample_size(stored)
    return _sample(request, stored, lambda: _load(request).at_size(request.size))


def _load(request: SampleRequest) -> Run:
    from unfog.inference.run import Run

    return Run(request.run, request.weights, request.checkpoint, request.device, request.best, request.ema)


def _sample(request: SampleRequest, stored: Config, load: Callable[[], Run]) -> Path:
    """Generate images, write them, and return their folder."""
    sampler = resolve_sampler(stored, request.sampler, request.steps, request.noise_grid, request.levels)
    _check_outputs(request)
    if request.label:
        stored.conditions.parse(stored.conditions.with_label({}, request.label))  # raises for an unknown class
    # Imported only now, as torch takes seconds: a wrong request is refused before.
    from unfog.pipeline.denoising_pictures import DenoisingAnimation, DenoisingStrip
    from unfog.pipeline.edit_images import build_edit
    from unfog.pipeline.measurement import write_posterior

    nearest = _nearest_size(request, stored)
    stored = stored.at_size(nearest) if nearest else stored
    stored = stored.with_view(request.view) if request.view else stored
    prompts = request.read_prompts()
    words = _words_of_conditions(request, stored, prompts)
    asked = _read_conditions(request, stored, words, len(prompts))
    # Before the weights: a file that cannot be read should not take a minute to be found.
    edit = build_edit(stored, request.image, request.mask, request.strength, request.repeats)
    steps = _count_steps(request, sampler, edit)
    run = load().at_size(nearest)
    if request.view:
        run.show_channels(request.view)
    report_dropped_levels(stored.sampler, sampler)
    diffusion = run.config.diffusion
    strip = DenoisingStrip(diffusion.schedule, run.show) if request.strip else None
    # On the way between two seeds the samples themselves are the frames.
    denoises = request.animate and request.to_seed is None
    animation = DenoisingAnimation(diffusion.path, steps, run.show) if denoises else None
    prepared = _prepare(request, run, asked)
    measurement, cells = prepared.measurement, prepared.cells
    of_one_size = (
        request.size or edit or measurement or strip or request.animate or request.to_seed is not None or cells
    )
    pictures_in_table = request.given_table and image_columns(stored.columns)
    parts, digest = _parts(run, prepared, words, split=not (of_one_size or pictures_in_table))
    if request.out is None:  # in the run, into which a stranger may have put unfinished samples of any pictures
        digest = seal_of(machine_key(), "samples", digest.encode()).hex()
    with SampleFolder.reserve(request.out, run.path / "pictures", digest) as out:
        folder = _sample_folder(out, digest, run.config, prepared)
        for part in parts:
            _draw(part, folder, observe_all(strip, animation))
        if request.animate is not None:
            _animate(request.animate, animation, folder)
        if measurement is not None:
            write_posterior(folder, run.config, measurement)
        edited = _edited(edit, run.config.image_format) if edit and not cells else ()
        if folder.view is not None:  # files of values have no text "Given"
            files = [folder.file(number).with_suffix(folder.suffix).name for number in range(folder.count)]
            save_given_table(out, run.config.conditions, prepared.generation.given, files)
        write_grid(folder, run.config, edited, strip, cells)
    return out


def _nearest_size(request: SampleRequest, stored: Config) -> Size:
    """Return the size of the bucket that suits the image of an edit, and say it; 0 for that of the run."""
    from unfog.pipeline.edit_images import edit_size

    nearest = edit_size(stored, request.image) if request.image and not request.size else 0
    if nearest:
        say(f"  size = {nearest}: of the buckets of the run, the one nearest to the shape of the image")
    return nearest


def _animate(file: Path, denoising: DenoisingAnimation | None, folder: SampleFolder) -> None:
    """Write the animation of a denoising, or of the samples one after the other, and print its path."""
    from unfog.pipeline.denoising_pictures import MOST_FRAMES, MOST_SAMPLES, save_animation

    if denoising is not None:
        denoising.save(file, folder.first(MOST_SAMPLES))
    else:
        if folder.count > MOST_FRAMES:
            say(f"  the animation shows the first {MOST_FRAMES} of {folder.count:,} samples")
        save_animation(file, [sample[None] for sample in folder.first(MOST_FRAMES)])
    say(f"  animation: {file}")


def _check_outputs(request: SampleRequest) -> None:
    """Raise RequestError unless the folder and the animation that are asked for can be written."""
    if request.out is None or not SampleFolder.is_unfinished(request.out):
        check_out(request.out or unused_path(request.run / "pictures"), what="the folder of the samples")
    if request.animate is not None:
        check_animation(request.animate)


def _count_steps(request: SampleRequest, sampler: Sampler, edit: Edit | None) -> int:
    """Return the number of steps from the noise that is added. RequestError if steps are to be shown and are 0."""
    steps = edit.steps(sampler.steps) if edit else sampler.steps
    if steps == 0 and (request.strip or request.animate):
        shown = f"strength = {request.strength} leaves none of {plural(sampler.steps, 'step')} to show"
        raise RequestError(f"{shown}; raise it, or omit --strip and --animate")
    return steps


def _prepare(request: SampleRequest, run: Run, asked: Mapping[str, object]) -> PreparedSampling:
    """Return the checked sampling of a request, with these values of conditions."""
    settings = {f.name: getattr(request, f.name) for f in fields(SamplingRequest)}
    guide = request.guide if request.guide_checkpoint is None else request.guide_checkpoint
    settings |= {"measure": request.measure, "observed": request.observed, "given_table": request.given_table}
    return run.prepare(**settings, given=asked, guide=guide, image=request.image, mask=request.mask)


def _words_of_conditions(request: SampleRequest, stored: Config, prompts: Sequence[str]) -> Mapping[str, object]:
    """Return the requested values of conditions; pictures are still names of files."""
    format = stored.conditions
    labelled = format.with_label(format.read_words(request.given), request.label)
    return format.with_prompts(labelled, prompts)


def _read_conditions(
    request: SampleRequest, stored: Config, words: Mapping[str, object], prompts: int
) -> Mapping[str, object]:
    """Replace names of files by their pictures, and check all conditions, before the weights are read."""
    from unfog.pipeline.given_images import read_grid, read_pictures

    format = stored.conditions
    asked = read_pictures(stored, words, request.n)
    format.parse(asked)
    format.read_negative(request.negative)
    if request.cells is not None:
        format.crossed(read_grid(stored, request.cells), asked)
    elif request.given_table is not None:
        read_given_table(request.given_table, format)
    else:
        _say_prompts(request, prompts)
    return asked


def _say_prompts(request: SampleRequest, prompts: int) -> None:
    """Say which prompts are left out, and whether several may be the words of one."""
    in_pieces = len(request.prompt) > 1 and all(_is_word(prompt) for prompt in request.prompt)
    if in_pieces:
        told = [sanitize(prompt) for prompt in request.prompt[:_MOST_WORDS]]
        say(
            f"  {plural(len(request.prompt), 'prompt')} of one word each: {', '.join(told)}; one prompt of several "
            f'words stands in quotes: --prompt "{" ".join(told)}"'
        )
    if prompts > request.n:
        more = "" if in_pieces else f"; -n {prompts} draws all of them"
        say(f"  the first {request.n:,} of {prompts:,} prompts are drawn{more}")


def _is_word(prompt: str) -> bool:
    """Return True for a text without spaces, in a script with cases: Chinese and Japanese put no spaces at all."""
    return " " not in prompt.strip() and not any(unicodedata.category(letter) == "Lo" for letter in prompt)


def _sample_folder(path: Path, digest: str, config: Config, prepared: PreparedSampling) -> SampleFolder:
    """Return the folder that the samples are written to, with all that their files say of them."""
    format, generation = config.conditions, prepared.generation
    view = config.view if prepared.measurement or not config.image_format.is_picture else None
    # Draws of a posterior are read back for their mean.
    own = view is not None and not prepared.measurement
    return SampleFolder(
        path,
        digest,
        generation.count,
        format.names(generation.given, generation.count),
        prepared.caption,
        told="Given" if format.columns else "Class",
        view=view,
        format=sample_format(config.source, config.data.slices) if own else None,
        files=prepared.files,
        negative=format.show_text(generation.negative),
        short_names=format.file_names(generation.given, generation.count),
        captions=format.captions(generation.given, generation.count),
    )


class _Part(NamedTuple):
    """Samples of one size: the run at that size, and the sampling of its share."""

    run: Run
    """A run that generates this size."""
    prepared: PreparedSampling
    before: int = 0
    """Samples of the parts before."""


def _parts(run: Run, prepared: PreparedSampling, words: Mapping[str, object], split: bool) -> tuple[list[_Part], str]:
    """Return the parts of the samples, and a digest of everything that their pixels depend on.

    With `split`, samples of a run with buckets have several sizes: that of the bucket nearest to the picture that they
    are given in `words`, or all in proportion to the images of the buckets.
    """
    from unfog.pipeline.given_images import read_pictures, sizes_of_pictures

    generation, buckets, digest = prepared.generation, run.config.size_buckets, run.digest(prepared)
    if not (buckets and split):
        return [_Part(run, prepared)], digest
    sizes = sizes_of_pictures(run.config, words, generation.count) or [
        one.size for one, count in zip(buckets, share_samples(buckets, generation.count)) for _ in range(count)
    ]
    numbers: dict[Size, list[int]] = {}
    for number, size in enumerate(islice(cycle(sizes), generation.count)):
        numbers.setdefault(size, []).append(number)
    at_sizes = {size: run.at_size(size) for size in numbers}
    given = {
        size: sized.config.conditions.parse(read_pictures(sized.config, words, generation.count, numbers[size]))
        for size, sized in at_sizes.items()
        if image_columns(sized.config.columns)  # hidden ones too have the size of the bucket
    }
    parts, before = [], 0
    for size, own in numbers.items():
        part = replace(generation, numbers=(*own,), count=len(own), given=given.get(size, generation.given))
        parts.append(_Part(at_sizes[size], prepared._replace(generation=part), before))
        before += len(own)
    if given:  # read at another size, a picture shows more
        digest = hashlib.sha256(f"{digest} {[*given.values()]}".encode()).hexdigest()
    return parts, hashlib.sha256(f"{digest} {numbers}".encode()).hexdigest()


def _draw(part: _Part, folder: SampleFolder, observe: Observe | None) -> None:
    """Generate and write the samples that are missing, batch by batch."""
    run, generation = part.run, part.prepared.generation
    numbers = generation.indices
    title = f"sampling from step {run.step:,}" if run.step else "sampling"

    def skip(numbers: Sequence[int]) -> bool:
        # A strip or an animation is of the first batch, which is drawn again for it even if its files are there.
        observed = observe is not None and numbers[0] == 0
        return not observed and folder.holds(numbers)

    held = next((place for place, number in enumerate(numbers) if not folder.holds([number])), 0)
    with Progress(title, folder.count, part.before + held) as progress:
        for done, samples in run.draw(part.prepared, observe, skip):
            folder.write(done, samples)
            progress.update(part.before + bisect(numbers, done[-1]))
    if generation.sampler.kind == "adaptive" and run.calls:
        say(f"  adaptive took up to {run.calls} network calls")


def observe_all(*observers: Observe | None) -> Observe | None:
    """Return one observer that calls those that are there; None without any."""
    given = [observer for observer in observers if observer is not None]

    def observe(step: SamplingStep) -> None:
        for observer in given:
            observer(step)

    return observe if given else None


def _edited(edit: Edit, format: ImageFormat) -> list[Pixels]:
    """Return the image of an edit, and its mask if there is one: uint8 [H, W, C]."""
    first = [format.to_pictures(edit.image[None])[0]]
    if edit.unknown is not None:
        first.append(np.broadcast_to(255 * edit.unknown[0].byte().numpy()[..., None], first[0].shape))
    return first


def write_grid(
    folder: SampleFolder,
    config: Config,
    edited: Sequence[Pixels] = (),
    strip: DenoisingStrip | None = None,
    cells: CellNames | None = None,
) -> None:
    """Write grid.png of the first thousand samples, and strip.png if sampling was observed; the folder is done then.

    The samples of an edit come after `edited`, its image and mask. `cells` are the captions of a grid of conditions.
    """
    from unfog.pipeline.generate import named_grid, samples_show_unknown, with_legend

    if folder.count > _MAX_IN_GRID:
        say(f"  grid.png shows the first {_MAX_IN_GRID:,} of {folder.count:,} samples")
    first = folder.first(_MAX_IN_GRID)
    if cells is not None:
        image = captioned_grid(first, cells.across, cells.down)
    elif edited:
        image = grid(np.concatenate([np.stack(edited), first]))
    else:
        image = named_grid(first, folder.captions or folder.names)
    image = with_legend(image, config, samples_show_unknown(config))
    said = (*folder.settings, *(cells.shared if cells else ()))
    captioned = with_caption(image, said) if said else image
    save_png(folder.path / "grid.png", folder.path, captioned, folder.text)
    if strip is not None:
        save_png(folder.path / "strip.png", folder.path, strip.image())
    # Last, as a folder that is finished is not gone on with.
    folder.finish()


def check_animation(file: Path) -> None:
    """Raise RequestError unless an animation can be written to this file."""
    if file.suffix == ".mp4" and not find_spec("imageio_ffmpeg"):
        raise RequestError(f"an MP4 needs imageio-ffmpeg: {install_command('video')}; or animate as .gif or .webp")
    if file.exists() or file.is_symlink():
        raise RequestError(f"{quote(str(file))} exists; give another --animate")
    if not file.parent.is_dir():
        raise RequestError(f"{quote(str(file.parent))} is not a folder; make it, or give another --animate")
