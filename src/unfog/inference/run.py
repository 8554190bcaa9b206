"""A run as Python sees it: `unfog.load("runs/photos").sample(16)`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from unfog.config.aliases import SAMPLING, usual_arguments
from unfog.config.requests.evaluate import EvaluationRequest
from unfog.config.requests.export import ExportSettings
from unfog.config.requests.sample import SamplingRequest
from unfog.config.schema import Config
from unfog.config.toml import update
from unfog.config.validate import folder_path, path_text
from unfog.custom import consent
from unfog.data.columns.given_table import read_given_table
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.editing import Edit
from unfog.diffusion.sampler import Observe
from unfog.errors import RequestError
from unfog.inference.guide import Guide, resolve_guidance
from unfog.inference.loaded_run import FAR, LoadedRun, weights_digest
from unfog.inference.samples import Samples
from unfog.pipeline.edit_images import ImageInput, build_edit, edit_size
from unfog.pipeline.generate import GenerationSettings, generate_batches
from unfog.pipeline.given_images import read_grid, read_pictures
from unfog.pipeline.measurement import (
    MeasureInput,
    Measurement,
    ObservedInput,
    as_input,
    build_measurement,
    say_misfit,
)
from unfog.process.device import available_memory
from unfog.reporting.image_grids import Pixels
from unfog.reporting.notebook import table
from unfog.reporting.progress import warn
from unfog.text import format_bytes, plural, sanitize
from unfog.training.precision import DTYPES
from unfog.values.columns import CLASS
from unfog.values.condition_format import Given
from unfog.values.condition_requests import CellNames, GuidanceScale, passes, spell_guidance
from unfog.values.image_format import Size

if TYPE_CHECKING:
    from unfog.inference.evaluation_files import Evaluation


def _of_posterior(request: SamplingRequest, guide: Guide | None, image: ImageInput | None) -> SamplingRequest:
    """Return the request for samples given a measurement. RequestError if it asks for another prior."""
    if request.guidance not in (None, 1.0) or guide not in (None, "none"):
        raise RequestError("guidance changes the prior, and measure samples the posterior of the run's; omit guidance")
    if image is not None:
        raise RequestError("measure and an image to edit are two ways to sample; give one of them")
    # Gradients of 16 bits are too coarse to solve with.
    precision = "fp32" if request.precision == "auto" else request.precision
    return replace(request, guidance=1.0, precision=precision)


def _check_one_posterior(generation: GenerationSettings) -> None:
    """Raise RequestError if samples of a posterior have different conditions: their mean would be of several."""
    name, values = next(((name, values) for name, values in generation.given if len(values) > 1), ("", ()))
    if name and generation.count > 1:
        raise RequestError(
            f"{name} has {len(values)} values, and measure draws one posterior, so all samples have the same "
            f"conditions; give one value of {name}"
        )


def _check_guidance(
    config: Config, request: SamplingRequest, scale: GuidanceScale, generation: GenerationSettings
) -> None:
    """Raise RequestError if the interval, negative or weights of guidance have no effect with this scale."""
    conditions = config.conditions
    if scale == 1 and request.guidance_interval is not None:
        remedy = "--guidance 2" if conditions.can_be_dropped and config.label_dropout else "a --guide"
        raise RequestError(f"guidance_interval has no effect with guidance = 1; give {remedy}, or omit it")
    if generation.negative:
        conditions.check_negative(scale)
    if request.guidance is not None:
        conditions.check_guided(request.guidance, generation.given)


class _Sampled(NamedTuple):
    """The conditions of samples, and what says how many these are."""

    given: Given
    n: int
    cells: CellNames | None
    files: Sequence[str]


def _read_conditions(
    config: Config,
    request: SamplingRequest,
    given: Mapping[str, object],
    table: str | PathLike[str] | None,
) -> _Sampled:
    """Return the conditions of a request: those of its table, its grid, and `given`. RequestError if two have one."""
    format = config.conditions
    if table is None and request.cells is None:
        return _Sampled(format.parse(read_pictures(config, given, request.n)), request.n, None, ())
    if table is None:
        assert request.cells is not None
        told, cells = format.crossed(read_grid(config, request.cells), read_pictures(config, given, request.n))
        return _Sampled(told, request.count(cells.cells, "the cells of the grid are"), cells, ())
    if request.cells is not None:
        raise RequestError("given_table and grid both give conditions; give one of them")
    read = read_given_table(Path(path_text(table, "given_table")), format)
    given = read_pictures(config, given, read.rows)
    format.parse(given)
    if twice := next((name for name in given if name in read.given), ""):
        raise RequestError(f"given_table and given both have {twice!r}; give it once")
    if read.unused:
        warn(f"not used, as this run has no such conditions: {', '.join(read.unused)}")
    told = format.parse({**given, **read_pictures(config, read.given, read.rows)})
    return _Sampled(told, request.count(read.rows, "the rows of the table are"), None, read.files)


class PreparedSampling(NamedTuple):
    """A request for samples that was checked, with all that it needs loaded."""

    generation: GenerationSettings
    guide: Denoiser | None
    edit: Edit | None
    caption: tuple[str, ...]
    """How the images are generated: run, step, weights, sampler, guidance, guide, measurement, seed."""
    measurement: Measurement | None = None
    cells: CellNames | None = None
    """Captions of the columns and rows of a grid of conditions."""
    files: Sequence[str] = ()
    """Names of the rows of a table of conditions, for those of the files; "" for a row without one."""


class Run(LoadedRun):
    """A loaded run that generates samples and evaluates itself; the arguments are those of `LoadedRun`."""

    calls: int = 0
    """Network calls that the last `sample` made for one image, those of guidance and of a guide included."""
    export_difference: float = 0.0
    """Largest difference of the last `export` from this run, over the largest output."""
    sampled: tuple[str, ...] = ()
    """How the last `sample` generated its images: run, step, weights, sampler, guidance, seed; for captions."""

    def sample(
        self,
        n: int = 16,
        *,
        label: Sequence[str | int] | str | int = (),
        prompt: Sequence[str] | str | None = None,
        given: Mapping[str, object] | None = None,
        given_table: str | PathLike[str] | None = None,
        guide: Guide | None = None,
        image: ImageInput | None = None,
        mask: ImageInput | None = None,
        measure: MeasureInput | None = None,
        observed: ObservedInput | None = None,
        noise: object = None,
        progress: Callable[[int], None] = lambda done: None,
        observe: Observe | None = None,
        size: Size = 0,
        **settings: Any,
    ) -> Samples:
        """Generate n images, an array uint8 [n, H, W, C], from noise or from `image`; `.pil()` gives PIL images.

        A run on values of another type generates that type, in the units of its source; `view` makes pictures of it.

        Image i is the same whatever n and batch are, to within the last bit of floating-point sums.

        Args:
            label: class names (text) or numbers (integers, from 0) that the images cycle through; () is all classes.
            prompt: captions that the images cycle through, of a run on captions.
            given: conditions by the names of columns, such as {"age": [20, 30]}, in the units of the images' source;
                a sequence is cycled through, and None hides it. {"class": "cat"} is the same as label="cat". An image
                is a file, a folder, or an array [H, W], [H, W, C] or [n, H, W, C].
            given_table: file .csv, .tsv or .jsonl with conditions as columns, a sample for each row; n is its rows.
            guide: a weaker network, given the same class; samples move away from what it generates. "auto" is this
                run's EMA of an earlier step, and what new runs without classes are guided by unless `image` is given;
                "none" uses no guide. Without one, guidance moves samples away from what the network generates without a
                class.
            image: file, or uint8 [H, W] or [H, W, C], brought to the run's size as training images are; the samples
                are variations of it.
            mask: file, or uint8 or bool of the image's height and width: only what is white is generated, to match
                the rest, which stays as it is to the bit.
            measure: function of an inverse problem, or a file FILE.py that defines it: images in the units of the
                run's source, [B, C, H, W], to [B, …], differentiable in torch. The samples are draws from the
                posterior of images, given `observed`.
            observed: what was measured of one image, […]: an array, a tensor or a file .npy.
            noise: standard deviation of the values of `observed`; None is `noise` of the file, or 0.
            observe: called with a `SamplingStep` at each step of each batch, of edits too. Where it returns True,
                sampling ends, and the images of the batches that were finished are returned.
            size: of the images, 64 or "96x64" (width x height), which the network must take; 0 is that of the run. Of a
                run with buckets it is that of the one nearest to `image`, or of the one with most images.
            settings: seed, to_seed, steps, sampler, grid, levels, guidance, guidance_interval, negative, guide_every,
                batch, precision, strength, repeats: see `config.requests.sample.SamplingRequest`. `guidance` may be
                a weight for each condition, {"age": 2}. `grid` may be one or two conditions against each other,
                {"age": "20..80", "stain": "all"}: then the samples are the cells, row by row, all from the same noise.

        RequestError if a setting, an image or a mask is not valid, or the guide does not fit or does not exist.
        """
        if not size and not self.resized and image is not None:
            size = edit_size(self.config, image)
        run, samples = self.at_size(size), list[Pixels]()
        settings |= {"measure": measure, "observed": observed, "noise": noise}
        settings |= {"given_table": given_table}
        prepared = run.prepare(
            n, label=label, prompt=prompt, given=given, guide=guide, image=image, mask=mask, **settings
        )
        for numbers, batch in run.draw(prepared, observe):
            samples.append(batch)
            progress(numbers[-1] + 1)
        self.sampled, self.calls = run.sampled, run.calls
        none = run.config.image_format.empty()  # where it was stopped at once
        made = np.concatenate(samples or [none])
        if prepared.measurement is not None and len(made):
            say_misfit(prepared.measurement, (as_input(run.config, one) for one in made))
        whole = prepared.cells is not None and len(made) == prepared.cells.cells
        return Samples.of(made, ", ".join(run.sampled), prepared.cells if whole else None)

    def view(self, samples: NDArray[Any], channels: str = "") -> NDArray[np.uint8]:
        """Return pictures uint8 [n, H, W, 3] of samples [n, H, W, C] of a run that keeps the values of its arrays.

        `channels` are one, such as "0" or "0:viridis", or three for red, green and blue, such as "3,2,1"; "" shows
        those of `preview.view`. RequestError if there are no such channels.
        """
        config = self.config.with_view(channels) if channels else self.config
        return config.view(np.asarray(samples))

    def prepare(
        self,
        n: int = 16,
        *,
        label: Sequence[str | int] | str | int = (),
        prompt: Sequence[str] | str | None = None,
        given: Mapping[str, object] | None = None,
        given_table: str | PathLike[str] | None = None,
        guide: Guide | None = None,
        image: ImageInput | None = None,
        mask: ImageInput | None = None,
        measure: MeasureInput | None = None,
        observed: ObservedInput | None = None,
        noise: object = None,
        **settings: Any,
    ) -> PreparedSampling:
        """Check a request and read its files. Arguments and errors are those of `sample`."""
        settings = usual_arguments(settings, SAMPLING)
        label = settings.pop("label", label)
        request = update(SamplingRequest(), {"n": n, **settings}, "")
        measurement = None
        if any(value is not None for value in (measure, observed, noise)):
            measurement = build_measurement(self.config, measure, observed, noise, self.device, self.path)
            request = _of_posterior(request, guide, image)
        conditions = self.config.conditions
        asked = conditions.with_prompts(conditions.with_label(given, label), prompt)
        negative = conditions.read_negative(request.negative)
        if measurement is not None and (given_table is not None or request.cells is not None):
            raise RequestError(
                "measure draws one posterior, so all samples have the same conditions; give them by given"
            )
        told = _read_conditions(self.config, request, asked, given_table)
        # An observed image may be of any class, which a network learns where labels are dropped at times.
        if measurement is not None and asked == {} and self.config.label_dropout > 0:
            # Each condition is hidden, not absent: networks of other people take numbers, which may be NaN, not None.
            told = told._replace(given=conditions.parse({one.name: None for one in conditions.facts}))
        generation = self._generation_settings(request, told, negative)
        if measurement is not None:
            _check_one_posterior(generation)
        self._warn_of_conditions(generation)
        edit = build_edit(self.config, image, mask, request.strength, request.repeats)
        # Last, as a guide is another network to load.
        guidance = resolve_guidance(
            self, guide, request.guidance, request.precision, request.guide_every, edits=edit is not None
        )
        _check_guidance(self.config, request, guidance.scale, generation)
        generation = replace(generation, guidance=guidance.scale)
        if self.enlarged > FAR:
            self._check_memory(generation, guidance.guide is not None)
        caption = self._describe(generation, guidance.name)
        if measurement is not None:
            caption = (*caption, f"given {sanitize(measurement.name)}")
        return PreparedSampling(generation, guidance.guide, edit, caption, measurement, told.cells, told.files)

    def _generation_settings(
        self, request: SamplingRequest, told: _Sampled, negative: tuple[int, ...]
    ) -> GenerationSettings:
        """Return the settings of a request for these conditions, with none left open but the scale of guidance."""
        return GenerationSettings(
            told.n,
            self.sampler(request.sampler, request.steps, request.noise_grid, request.levels),
            told.given,
            request.seed,
            1.0 if request.guidance is None else request.guidance,
            request.batch,
            request.guidance_interval or self.config.guidance_interval,
            precision=request.precision,
            guide_every=request.guide_every,
            negative=negative,
            shared=1 if told.cells is None else told.n,
            to_seed=request.to_seed,
        ).resolved(self.config, self.device)

    def _warn_of_conditions(self, generation: GenerationSettings) -> None:
        """Warn of values that the run has not seen, and of conditions that it needs and that are not given."""
        conditions, negative = self.config.conditions, generation.negative
        away = ((conditions.text.name, (negative,)),) if negative and conditions.text else ()
        alternating = [name for name, values in generation.given if len(values) > 1]
        if alternating and generation.to_seed is not None:
            warn(
                f"{alternating[0]} has several values, which alternate on the way to seed {generation.to_seed}; give "
                "one to see the noise alone change"
            )
        for concern in [*conditions.concerns((*generation.given, *away)), *self._untold(generation)]:
            warn(concern)

    def _untold(self, generation: GenerationSettings) -> list[str]:
        """Return a line if a condition is not given, and the run never hid any in training.

        RequestError if that is the class, as the network may have no number for "not known".
        """
        config, untold = self.config, self.config.conditions.untold(generation.given)
        if not untold or config.label_dropout or (config.columns and config.condition_dropout):
            return []
        if CLASS in untold:
            raise RequestError("the run never hid the class in training; give each sample a class, such as --label")
        return [
            f"the run never hid {', '.join(untold)} in training, and samples without may be poor; give each a value"
        ]

    def _check_memory(self, generation: GenerationSettings, guided: bool) -> None:
        """Raise RequestError if the memory that is free cannot hold a batch of images larger than those of the run."""
        # Loaded only here, so that images of the run's size start without it.
        from unfog.planning.memory_estimate import sampling_memory
        from unfog.planning.microbatch import memory_upper_bound

        count, half = min(generation.count, generation.batch), DTYPES.get(generation.precision)
        # Outputs with more and with fewer conditions, in one call.
        estimates = 1 if guided else passes(generation.guidance)
        free = available_memory(self.device)
        if memory_upper_bound(self.config, estimates * count) < free:  # saves the second that a trace takes
            return

        def needed(images: int) -> int:
            return sampling_memory(self.config, self.device.type, estimates * images, half)

        if (need := needed(count)) <= free:
            return
        fits = int(count * free / need)  # as most of it is in proportion to the images
        remedy = f"give --batch {fits}" if fits and needed(fits) <= free else "give a smaller --size"
        raise RequestError(
            f"size = {self.config.image_format.sides}: {plural(count, 'image')} at once need{'s' * (count == 1)} "
            f"{format_bytes(need)} of memory, and {self.device.type} has {format_bytes(free)} free; {remedy}"
        )

    def draw(
        self,
        prepared: PreparedSampling,
        observe: Observe | None = None,
        skip: Callable[[Sequence[int]], bool] = lambda numbers: False,
    ) -> Iterator[tuple[Sequence[int], Pixels]]:
        """Yield (numbers, images uint8 [n, H, W, C]) of each batch, but for those that `skip` is true of."""
        generation, guide, edit, _, measurement, *_ = prepared
        self.sampled, self.calls = prepared.caption, 0

        def count(calls: int) -> None:
            self.calls = max(self.calls, calls)  # the adaptive sampler takes another number for each batch

        observation = None if measurement is None else measurement.observation
        return generate_batches(self.network, self.config, generation, observe, guide, count, edit, skip, observation)

    def digest(self, prepared: PreparedSampling) -> str:
        """Return a digest of all that the images depend on, to the bit."""
        generation, guide, edit, _, measurement, cells, files = prepared
        # The weights themselves and not the step: an EMA of a width is rebuilt from whatever snapshots there are now.
        of: list[object] = [self.config, generation, weights_digest(self.network)]
        if guide is not None:
            of += [guide.diffusion, weights_digest(cast(nn.Module, guide.network))]
        if edit is not None:
            of += [edit.strength, edit.repeats, edit.image.tolist(), edit.unknown is not None and edit.unknown.tolist()]
        if measurement is not None:
            of.append(measurement.digest)
        if generation.negative:
            of.append(generation.negative)
        # The cells of a grid begin from the same noise; the files of a table are named after its rows.
        of += [part for part in (cells, files) if part]
        return hashlib.sha256(repr(of).encode()).hexdigest()

    def export(self, out: str | PathLike[str], **settings: Any) -> Path:
        """Write the network into a new folder, for programs that do not know Unfog; return the folder.

        Args:
            out: the folder, new or empty; it is written as a whole or not at all.
            settings: format, sampler, steps: see `config.requests.export.ExportSettings`.

        Raises:
            RequestError: the folder is not empty, or the format cannot hold this run.
            RunError: what was written does not give the outputs of this run.
        """
        # Loaded only here, so that sampling starts without it.
        from unfog.inference.export import export

        folder = folder_path(out, "out")
        self.export_difference = export(self, folder, update(ExportSettings(), settings, ""))
        return folder

    def _repr_html_(self) -> str:
        """Return HTML with the main facts of the run and its newest preview."""
        saved, preview = self.checkpoint, self.folder.newest_preview
        rows = {"run": self.path, **self._facts(), "weights": f"{self._weights()} of step {self.step:,}"}
        if saved.held_out_loss is not None:
            rows["held-out loss"] = f"{saved.held_out_loss:.4g}"
        return table(rows, preview, self.path, f"preview {preview.stem}")

    def _describe(self, generation: GenerationSettings, guide: str) -> tuple[str, ...]:
        conditions, negative = self.config.conditions, generation.negative
        return (
            self.path.resolve().name,
            f"step {self.step:,}",
            self._weights(),
            f"{generation.sampler.kind} {plural(generation.sampler.steps, 'step')}",
            *([f"guidance {spell_guidance(generation.guidance)}"] if generation.guidance != 1 else []),
            *([f"negative {sanitize(conditions.show_text(negative))}"] if negative else []),
            *([f"guide {guide}"] if guide else []),
            *([f"guide every {generation.guide_every}"] if generation.guide_every != 1 else []),
            *([generation.precision] if generation.precision != "fp32" else []),
            *([self.config.image_format.sides] if self.resized else []),
            f"seed {generation.seed}" + ("" if generation.to_seed is None else f" to {generation.to_seed}"),
        )

    def evaluate(self, metrics: Sequence[str] | str = (), n: int = 0, **settings: Any) -> Evaluation:
        """Compute metrics of this run, as `unfog evaluate` does, or read those that the run folder has already.

        Those of a run with buckets are of all sizes in proportion, then of each size; after `at_size`, of one size.

        Args:
            metrics: of fid, kid, precision, recall, density, coverage, sliced, detail, held_out, bits, fid_infinity,
                obeys, worth, clip; () is all that apply but bits, fid_infinity and, without `clip_folder`, clip.
            n: number of samples; 0 is 1,000 on a CPU, and 10,000 elsewhere.
            settings: features, reference, sampler, steps, seed, guidance, guide, guide_every, batch, precision,
                clip_folder, against: see `config.requests.evaluate.EvaluationRequest`.

        Raises:
            RequestError: there is no such metric, file or reference.
            RunError: the run folder or the cache cannot be written.
        """
        # Loaded only here, so that sampling starts without it.
        from unfog.inference.evaluate import evaluate

        consent.give_to_source(settings.get("reference"))
        names = (metrics,) if isinstance(metrics, str) else metrics
        return evaluate(self, update(EvaluationRequest(), {"metrics": names, "n": n, **settings}, ""))
