"""Files of an evaluation in RUN/evaluations: its result, and its samples, from which an interrupted one goes on."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from unfog.data.buckets.joined_set import Rows, scale
from unfog.data.dataset import Dataset, ImageSet
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RunError
from unfog.evaluation.condition_worth import ConditionWorth
from unfog.evaluation.image_agreement import ImageAgreement
from unfog.evaluation.judged_kinds import ConditionScore
from unfog.evaluation.metrics import BRACKETS, MetricResult
from unfog.files.safe_files import LARGEST_TEXT, make_folder, read_file, write_atomic
from unfog.files.seals import is_sealed, seal_of, seal_of_object
from unfog.inference.compare_images import Comparison, real_text
from unfog.inference.loaded_run import LoadedRun
from unfog.models.pretrained.image_text import ImageTextModel
from unfog.pipeline.generate import GenerationSettings
from unfog.reporting.image_grids import Pixels
from unfog.reporting.notebook import preformatted
from unfog.reporting.progress import align_columns
from unfog.text import plural, without_secrets
from unfog.training.distributed.world import World
from unfog.values.image_format import ImageFormat

FORMAT = 1
# Version of the computation of metrics; results of another version are computed again.
ARITHMETIC = 3
_HEADER_BYTES = 2**16  # of a file of samples, besides these

_OBEYS_HEAD = ("condition", "measure", "samples", "95% interval", "real images", "shuffled", "n", "obeyed")
_WORTH_HEAD = ("condition", "shuffled", "95% interval", "not given", "95% interval")
_TRUTH_HEAD = ("condition", "measure", "one draw", "95% interval", "mean of draws", "given", "shuffled", "n")
_TABLE_HEAD = ("metric", "value", "95% interval", "real images", "n", "reference", "features", "resize")


class EvaluationPart(NamedTuple):
    """Samples and real images of one size."""

    run: LoadedRun
    """A run that generates this size."""
    generation: GenerationSettings
    reference: ImageSet
    """Real images of this size; there may be few, or no images at all."""

    @property
    def sides(self) -> str:
        """Width x height in full: "48x80"."""
        return self.run.config.image_format.sides


class Against(NamedTuple):
    """Another network whose held-out losses are compared, image by image."""

    key: int | str
    """The step of the same run, or a digest of the weights of another."""
    name: str
    """For the note on the difference: "at step 500"."""
    load: Callable[[], nn.Module]


class EvaluationSetup(NamedTuple):
    """An evaluation request with every open setting chosen."""

    compared: Comparison
    """With real images of all sizes, which are scaled to one size if there are several."""
    generation: GenerationSettings
    """Of the samples of all sizes."""
    parts: tuple[EvaluationPart, ...]
    """One, or one for each bucket that has samples."""
    dataset: Dataset
    """Of the run."""
    reference_name: str
    against: Against | None
    guide: Denoiser | None = None
    """Weaker network of autoguidance."""
    guide_name: str = ""
    clip: ImageTextModel | None = None
    """Model of the CLIP score."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one evaluation of a run, with how its samples were generated; or of images without a run."""

    step: int | None
    """Of the checkpoint; None for images without a run."""
    drawn: Mapping[str, Any]
    """Settings of the samples: sampler, steps, seed, guidance, weights, reference."""
    measured: Sequence[MetricResult]
    """Each metric with `metric`, its name, and `value`; `low` and `high`, the 95% interval, and `error`, the standard
    error; `real`, what other real images reach, and `real_low` and `real_high`, its ends over random halves. Numbers
    are None if unknown."""
    copies: Sequence[Mapping[str, Any]] = ()
    """Searches for copies of training images: by, severity, evidence, remedy, facts, picture (a file name)."""
    verdict: str = ""
    """How near the samples are to real images, in a sentence."""
    spectrum: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Radial spectra of luma: `frequency` over Nyquist's, mean power of `generated` and `real`; {} if not measured."""
    curves: Sequence[Mapping[str, Any]] = ()
    """Spectra and histograms of channels, as fields of `evaluation.value_metrics.Curve`."""
    obeys: Sequence[ConditionScore] = ()
    """Whether samples have the conditions that were asked, by condition and measure."""
    judge: str = ""
    """Network and real images of `obeys`, as a sentence."""
    worth: Sequence[ConditionWorth] = ()
    """What each condition is worth, in held-out loss."""
    truth: Sequence[ImageAgreement] = ()
    """How draws from conditions that are images agree with the held-out images."""
    seconds: float = 0.0
    """Time that the evaluation took."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request."""

    def __getitem__(self, metric: str) -> MetricResult:
        """Return the metric of this name. KeyError if it is unknown."""
        for one in self.measured:
            if one.metric == metric:
                return one
        raise KeyError(metric)

    def __repr__(self) -> str:
        named = [
            f"{one.metric} {one.value:.4g}{one.interval(BRACKETS)}" for one in self.measured if one.value is not None
        ]
        metrics = ", ".join([*named, *(f"{one.condition} {one.measure} {one.value:.4g}" for one in self.obeys)])
        what = "images" if self.step is None else f"step {self.step:,}"
        return f"<evaluation of {what}: {metrics or 'no metrics'}>"

    def _repr_html_(self) -> str:
        return preformatted(self.lines())

    def lines(self) -> list[str]:
        """Return the verdict, and the metrics as a table with notes below."""
        notes: dict[str, list[str]] = {}
        for one in self.measured:
            if one.note:
                notes.setdefault(one.note, []).append(one.metric)
        return [
            *filter(None, [self.verdict]),
            ("" if self.step is None else f"step {self.step:,}: ") + describe_sampling(self.drawn),
            *(align_columns([_TABLE_HEAD, *map(_table_row, self.measured)]) if self.measured else []),
            *(f"{', '.join(names)}: {note}" for note, names in notes.items()),
            *(line for said, rows in self.condition_tables() for line in (said, *align_columns(rows))),
            *(f"copies, by {one['by']}: {one['evidence']}" for one in self.copies),
        ]

    def condition_tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Return `obeys` and `worth`, each as a sentence and rows, the heads first; [] for a run without conditions."""
        tables = list[tuple[str, list[tuple[str, ...]]]]()
        if self.judge:
            said = f"Samples and what was asked, by a judge: {self.judge}"
            tables.append((said, [_OBEYS_HEAD, *map(_obeys_row, self.obeys)]))
        if self.truth:
            said = f"Draws and the held-out images, {self.truth[0].draws} draws for each"
            tables.append((said, [_TRUTH_HEAD, *map(_truth_row, self.truth)]))
        if self.worth:
            one = self.worth[0]
            # None in files of earlier versions.
            known = one.loss_low is not None and one.loss_high is not None
            within = f" ({one.loss_low:.4g} to {one.loss_high:.4g})" if known else ""
            loss = f"{one.loss:.4g}{within} of {plural(one.n)}"
            said = f"Rise of the held-out loss, {loss}, with conditions of others or none"
            tables.append((said, [_WORTH_HEAD, *map(_worth_row, self.worth)]))
        return tables

    def write(self, path: Path, key: bytes) -> None:
        """Write the file with a seal, by which `read` knows what was measured with the same key."""
        run, stored = path.parent.parent, json.loads(self.to_json())
        text = (
            json.dumps({**stored, "seal": seal_of_object(key, path.name, stored)}, indent=2, allow_nan=False)
            + os.linesep
        )
        make_folder(path.parent, run)
        write_atomic(path, text.encode(), run, private=True, shared=True)  # sources may be URLs with credentials

    def to_json(self) -> bytes:
        """Return the file of this evaluation, without the passwords of URLs."""
        # Python would write NaN, which no other reader of JSON takes.
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, allow_nan=False) + os.linesep
        return without_secrets(text).encode()

    @classmethod
    def read(cls, path: Path, key: bytes | None = None) -> Evaluation | None:
        """Return the content that `write` stored; None if the file is missing, damaged or of another format.

        With a `key`, also if the file was written with another one, or changed since.
        """
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            stored = json.loads(read_file(path, path.parent.parent, LARGEST_TEXT))
            if key is not None and not is_sealed(key, path.name, stored):
                return None
            stored.pop("seal", None)
            if stored.pop("format") == FORMAT:
                measured = [MetricResult(**one) for one in stored.pop("measured")]
                obeys = [ConditionScore(**one) for one in stored.pop("obeys", ())]
                worth = [ConditionWorth(**one) for one in stored.pop("worth", ())]
                truth = [ImageAgreement(**one) for one in stored.pop("truth", ())]
                return cls(measured=measured, obeys=obeys, worth=worth, truth=truth, **stored)
        return None


def describe_sampling(drawn: Mapping[str, Any], without: str = "") -> str:
    """Return how samples were drawn, such as "sampler dpmpp, steps 20, 20 calls a sample", but for one setting."""
    said = {
        "calls": lambda value: f"{value} calls a sample",
        "unknown_share": lambda value: f"share of unknown values {value}",
        "samples_masked": lambda value: f"samples {'with' if value else 'without'} unknown values",
    }
    spelled = ((name, said.get(name, f"{name} {{}}".format)(value)) for name, value in drawn.items())
    return ", ".join(text for name, text in spelled if name != without)


def _table_row(one: MetricResult) -> tuple[str, ...]:
    value = "refused" if one.value is None else f"{one.value:.4g}"
    reference = f"{one.n_reference:,}" if one.n_reference else "-"
    return one.metric, value, one.interval(), real_text(one, 4), f"{one.n:,}", reference, one.features, one.resize


def _obeys_row(one: ConditionScore) -> tuple[str, ...]:
    real = "" if one.real is None else f"{one.real:.3g}"
    if one.real_low is not None and one.real_high is not None:
        real += f" ({one.real_low:.3g} to {one.real_high:.3g})"
    within = f"{one.low:.3g} to {one.high:.3g}"
    return (
        *(one.condition, one.measure, f"{one.value:.3g}", within),
        *(real, f"{one.shuffled:.3g}", f"{one.n:,}", one.obeyed),
    )


def _truth_row(one: ImageAgreement) -> tuple[str, ...]:
    given = "" if one.given is None else f"{one.given:.3g}"
    within = f"{one.low:.3g} to {one.high:.3g}"
    return (
        *(one.condition, one.measure, f"{one.value:.3g}", within),
        *(f"{one.mean:.3g}", given, f"{one.shuffled:.3g}", f"{one.n:,}"),
    )


def _worth_row(one: ConditionWorth) -> tuple[str, ...]:
    shuffled = _signed(one.shuffled, one.shuffled_low, one.shuffled_high)
    return one.condition, *shuffled, *_signed(one.none, one.none_low, one.none_high)


def _signed(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    within = "" if low is None or high is None else f"{low:+.3g} to {high:+.3g}"
    return "not trained" if value is None else f"{value:+.3g}", within


class GeneratedSamples:
    """The first `count` samples of a seed, [N, C, H, W] by slices: a folder with one file for each `chunk`.

    A file is complete or absent. A larger `count` keeps the files of a smaller one, except a shorter last chunk. The
    run may come from a stranger, so a file counts only if it has the seal of `key`: others are generated again.
    """

    # A chunk is one batch of the sampler. Floating-point sums depend on the neighbours in a batch, so a chunk that
    # was cut is generated again as a whole; then every sample is the same to the bit, on whichever rank.

    def __init__(
        self, folder: Path, count: int, chunk: int, root: Path, key: bytes, image_bytes: int, dtype: str = "uint8"
    ):
        self.folder, self.count, self.chunk, self.dtype = folder, count, chunk, np.dtype(dtype)
        self._root, self._key = root, key  # below the root no link is followed
        self._largest = (chunk * image_bytes) + _HEADER_BYTES

    def __len__(self) -> int:
        return self.count

    @property
    def key(self) -> str:
        """Name of these samples in the cache of features."""
        return f"{self.folder.name} sealed"

    def __getitem__(self, key: slice) -> NDArray[Any]:
        first, last, _ = key.indices(self.count)
        parts = []
        for start in range(first - first % self.chunk, last, self.chunk):
            samples = self._load(start)
            if samples is None:
                raise RunError(f"{self._file(start)} is missing; repeat the command, which generates it again")
            parts.append(samples[max(0, first - start) : last - start])
        return np.concatenate(parts) if parts else np.zeros((0, 1, 1, 1), self.dtype)

    def missing(self) -> list[int]:
        """Return the number of the first sample of each missing chunk."""
        return [start for start in range(0, self.count, self.chunk) if self._load(start) is None]

    def unsealed(self) -> list[int]:
        """Return the number of the first sample of each chunk whose file was not written with this key, or changed."""
        starts = range(0, self.count, self.chunk)
        return [start for start in starts if os.path.lexists(self._file(start)) and self._sealed(start) is None]

    def count_in(self, starts: Sequence[int]) -> int:
        """Return the number of samples in the chunks that start here."""
        return sum(self._size(start) for start in starts)

    def generate_missing(
        self, generate: Callable[[int, int], Pixels], world: World, progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Generate the missing chunks, each rank its share; return when all are there.

        Args:
            generate: (first sample, count) -> [n, H, W, C] of `dtype`.
            world: the ranks, which share the folder.
            progress: called with the number of samples that are done on all ranks, estimated from this one.

        RunError if another rank writes to another folder, or the folder cannot be written.
        """
        missing, done = self.missing(), 0
        world.barrier()  # every rank has listed the missing chunks before any is written
        for start in missing[world.rank :: world.size]:
            self._write(start, generate(start, self._size(start)))
            done += self._size(start)
            progress(min(done * world.size, self.count_in(missing)))
        world.barrier()
        if left := self.missing():
            raise RunError(
                f"{self._file(left[0])} is missing, although another rank wrote it; all ranks must share the run folder"
            )

    def _size(self, start: int) -> int:
        return min(self.chunk, self.count - start)

    def _file(self, start: int) -> Path:
        return self.folder / f"{start:08d}.safetensors"

    def _load(self, start: int) -> NDArray[Any] | None:
        """Return a chunk; None if it is missing, not sealed or has too few samples."""
        samples = self._sealed(start)
        # The last chunk has more than needed after an evaluation with more samples.
        return None if samples is None or len(samples) < self._size(start) else samples

    def _sealed(self, start: int) -> NDArray[Any] | None:
        """Return the samples of a file; None if it is missing, or not as this key has sealed it."""
        with suppress(OSError, ValueError, SafetensorError, KeyError):
            stored = load(read_file(self._file(start), self._root, self._largest))
            samples: NDArray[Any] = stored["pictures"]
            known = samples.dtype == self.dtype and samples.ndim == 4
            if known and hmac.compare_digest(stored["seal"].tobytes(), self._seal(start, samples)):
                return samples
        return None

    def _seal(self, start: int, samples: NDArray[Any]) -> bytes:
        kind = f" {samples.dtype}" * (samples.dtype != np.uint8)
        name = f"{self.folder.name} {start} {samples.shape}{kind}"
        return seal_of(self._key, name, np.ascontiguousarray(samples).tobytes())

    def _write(self, start: int, samples: Pixels) -> None:
        try:
            make_folder(self.folder, self._root)
            pictures = np.ascontiguousarray(samples.transpose(0, 3, 1, 2))
            seal = np.frombuffer(self._seal(start, pictures), np.uint8)
            write_atomic(self._file(start), save({"pictures": pictures, "seal": seal}), self._root, shared=True)
        except OSError as error:
            raise RunError(
                f"{self.folder} cannot be written ({error.strerror or error}); correct that, then repeat the "
                "command; the samples so far are kept"
            ) from error


class MixedSamples:
    """Samples of several sizes as one set, uint8 [N, C, H, W] by slices: scaled to one format, and well mixed.

    The first samples are of all sizes, in about the proportion of the whole.
    """

    def __init__(self, parts: Sequence[GeneratedSamples], format: ImageFormat):
        self._parts, self._format = parts, format
        self._rows = Rows(tuple(map(len, parts)))
        places = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
        self._order = np.argsort(places, kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    @property
    def key(self) -> str:
        """Name of these samples in the cache of features."""
        return f"{' '.join(part.key for part in self._parts)} {self._rows.lengths}"

    @property
    def order(self) -> NDArray[np.int64]:
        """Number of each sample, int64 [N], if those of the parts are counted one part after the other."""
        return self._order

    def __getitem__(self, key: slice) -> NDArray[np.uint8]:
        wanted = self._order[key]
        out = self._format.empty_stored(len(wanted))
        for number, places, own in self._rows.split(wanted):
            first = int(own.min())  # the rows of a part are about as close together as those that are wanted
            out[places] = scale(self._parts[number][first : int(own.max()) + 1][own - first], self._format)
        return out


class EvaluationSamples(NamedTuple):
    """Samples of an evaluation, by size and all together."""

    parts: tuple[GeneratedSamples, ...]
    """Of each size; () if no metric needs any."""
    mixed: GeneratedSamples | MixedSamples | None
    """All of them at one size; None without any."""

    @property
    def each(self) -> list[GeneratedSamples | MixedSamples]:
        """All sets whose features may be in the cache."""
        return [*self.parts, *([self.mixed] if isinstance(self.mixed, MixedSamples) else [])]
