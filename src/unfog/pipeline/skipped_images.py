"""Report the skipped images of a run: data.json lists every file, and failures during training are warned of."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from unfog.data.data_report import COMMON_ACTIONS, SkippedFile
from unfog.data.dataset import Dataset, ImageSet, skipped_images
from unfog.data.lazy import remote_shards_of
from unfog.files.safe_files import read_file, write_atomic
from unfog.process.run_folder import RunFolder
from unfog.reporting.recorder import Recorder
from unfog.settings import is_auto
from unfog.text import plural, sanitize, valid_text
from unfog.values.columns import columns_digest, without_class

DATA_FILE = "data.json"
_MAX_LISTED = 100_000  # files in data.json; beyond that, only skipped files and unusual conversions
_LARGEST_REPORT = 2**26  # bytes of a data.json that is read
_MAX_SINGLE = 3  # images with the same reason that are warned of one by one
_SHARD = "shard"  # marks a shard among the failures that ranks send each other

# Facts of data.json that a change of the images shows in -> their names in messages.
_FACTS = {
    "class_counts": "images of a class",
    "modes": "modes",
    "sides": "sides in pixels",
    "values": "range of values",
}

_encode = json.JSONEncoder(ensure_ascii=False).encode


def data_json(dataset: Dataset) -> bytes:
    """Return the report of the data set, and a line for each file: {"name", "status", "converted", "reason"}.

    The status is "used", "held out" or "quarantined" (skipped), and only the last has a reason. "converted" is null
    where images are decoded only when training wants them. "columns" has two digests of each column but the
    labels: of the training values and of the held-out values. Failed shards are in "shards_given_up". A name that is
    not valid text has \\xff for such a byte.
    """
    report = dataset.report
    files = report.used + len(report.skipped)
    # A line for each file, so that the list can be searched with grep; as a whole it is JSON.
    lines = [f"    {_encode(row)}" for row in _rows(dataset, everything=files <= _MAX_LISTED)]
    head = {
        "summary": report.line(),
        # The lines spell the treatments out.
        **{name: value for name, value in report.to_dict().items() if name not in ("treatment", "treatments")},
        "quarantined": len(report.skipped),
        "actions": report.actions,
        "unlisted": files - len(lines),
    }
    parts = [without_class(images.columns) for images in (dataset.train, dataset.held_out)]
    if parts[0]:
        head["columns"] = {name: [columns_digest({name: part[name]}) for part in parts] for name in parts[0]}
    shards = remote_shards_of(dataset.train)
    if shards is not None and shards.failed:
        head["shards_given_up"] = shards.failed
    opening = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    listing = ",\n".join(lines)
    return f'{opening},\n  "files": [\n{listing}\n  ]\n}}\n'.encode("utf-8", "replace")


def _rows(dataset: Dataset, everything: bool) -> Iterator[dict[str, object]]:
    """Yield a row for each file; unless `everything`, for those skipped or converted in an unusual way."""
    report, begin = dataset.report, 0
    phrases = [report.phrases(i) for i in range(len(report.treatments))]
    unusual = [i for i, done in enumerate(report.treatments) if not COMMON_ACTIONS.issuperset(done)]
    for status, names in (("used", dataset.train.names), ("held out", dataset.held_out.names)):
        treatment = report.treatment_of(slice(begin, begin + len(names)))
        begin += len(names)
        if everything:
            listed: Iterable[int] = range(len(names))
        else:  # of images that are not decoded yet, what will be done to them is not known
            listed = np.flatnonzero(np.isin(treatment, unusual)).tolist() if report.read else ()
        for i in listed:
            converted = phrases[treatment[i]] if report.read else None
            yield {"name": valid_text(names[i]), "status": status, "converted": converted, "reason": None}
    for one in report.skipped:
        name, reason = map(valid_text, one)
        yield {"name": name, "status": "quarantined", "converted": [], "reason": reason}


def describe_changes(folder: RunFolder, dataset: Dataset) -> str:
    """Return how the files of a data set differ from those in the data.json of a run; "" if that does not say."""
    try:
        stored = json.loads(read_file(folder.path / DATA_FILE, folder.path, _LARGEST_REPORT))
        before = {str(file["name"]): str(file["status"]) for file in stored["files"]}
        now = json.loads(data_json(dataset))
        facts = [*_changed_facts(stored, now), *_changed_columns(stored, now)]
        if stored["unlisted"] or now["unlisted"]:
            return "; ".join(facts)
        after = {file["name"]: file["status"] for file in now["files"]}
        if files := _changed_files(before, after):
            return "; ".join([*files, *facts])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    names = f"the {len(before):,} names are the same"
    if is_auto(dataset.settings, "range") and "float" in dataset.report.actions:
        return (
            f"{names}, but {dataset.report.values}, one range for the set, and the version of Unfog that began the run "
            "read each image by its own range: resume with that version, which config.toml names"
        )
    if facts:
        return "; ".join([names, *facts])
    if [*before] != [*after]:
        return f"{names}, but in another order"
    classes = ", or the class of some," if now["class_counts"] else ""
    return f"{names}, and so are their order, modes and sides: the content of images{classes} differs"


def _changed_files(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return how files differ that are given as name -> status."""
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    parts = [f"{len(gone):,} of {len(before):,} are gone, such as {sanitize(gone[0])}"] if gone else []
    parts += [f"{len(new):,} are new, such as {sanitize(new[0])}"] if new else []
    changed = defaultdict[tuple[str, str], list[str]](list)
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            changed[before[name], after[name]].append(name)
    for (was, now), names in changed.items():
        parts.append(f"{len(names):,} were {was} and are {now} now, such as {sanitize(names[0])}")
    return parts


def _changed_columns(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return which columns of two reports have other values."""
    was, is_now = (dict(report.get("columns", {})) for report in (before, now))
    names = [sanitize(str(name)) for name in was | is_now if was.get(name) != is_now.get(name)]
    more = ", …" * (len(names) > _MAX_SINGLE)
    return [f"columns with other values: {', '.join(names[:_MAX_SINGLE])}{more}"] if names else []


def _changed_facts(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return which facts of two reports differ, as far as both have them."""
    parts = []
    for key, what in _FACTS.items():
        was, is_now = before.get(key), now.get(key)
        if key not in before or was == is_now:
            continue
        if isinstance(was, dict) and isinstance(is_now, dict):
            names = [name for name in {**was, **is_now} if was.get(name) != is_now.get(name)]
            pairs = [
                f"{sanitize(str(name))} {was.get(name, 0)} -> {is_now.get(name, 0)}" for name in names[:_MAX_SINGLE]
            ]
            parts.append(f"{what}: {', '.join(pairs)}{', …' * (len(names) > _MAX_SINGLE)}")
        else:
            parts.append(f"{what}: {sanitize(str(was or 'as the type'))} -> {sanitize(str(is_now or 'as the type'))}")
    return parts


class FailureReporter:
    """Warns once of each image that cannot be decoded and each shard that fails during training."""

    def __init__(self, folder: RunFolder, dataset: Dataset) -> None:
        self._folder, self._dataset = folder, dataset
        self._shards = remote_shards_of(dataset.train)
        self._reported: set[SkippedFile] = set()

    @staticmethod
    def on_this_rank(images: ImageSet) -> set[tuple[str, ...]]:
        """Return (name, reason) of images that could not be decoded, and (name, reason, _SHARD) of failed shards."""
        shards = remote_shards_of(images)
        found: set[tuple[str, ...]] = {(one.name, one.reason) for one in skipped_images(images.pixels)}
        return found | ({(*item, _SHARD) for item in shards.failed.items()} if shards is not None else set())

    @property
    def shards(self) -> dict[str, str]:
        """Name -> reason of the failed shards."""
        return {} if self._shards is None else self._shards.failed

    def report(self, recorder: Recorder, step: int, elsewhere: Sequence[Sequence[str]] = ()) -> None:
        """Warn of new failures and record them, including those of other ranks (`on_this_rank`).

        RunError if more shards failed on all ranks together than `data.failed_shards` allows.
        """
        sets = (self._dataset.train, self._dataset.held_out)
        # Only images that are decoded while training can fail now.
        images = [one for part in sets for one in skipped_images(part.pixels)]
        self._report_images(recorder, step, images + [SkippedFile(*one) for one in elsewhere if _SHARD not in one[2:]])
        if self._shards is None:
            return
        if trouble := self._shards.cache_error:
            for one in self._new([SkippedFile("", trouble)]):
                recorder.warn(step, f"{one.reason}; what is read is no longer kept for later epochs")
        self._shards.mark_failed({one[0]: one[1] for one in elsewhere if _SHARD in one[2:]})
        lost = self._new([SkippedFile(*item) for item in self._shards.failed.items()])
        for one in lost:
            count = self._shards.image_count(one.name)
            recorder.warn(step, f"{sanitize(one.name)} {one.reason}; others replace its {plural(count, 'image')}")
            recorder.event("quarantined", step, shard=one.name, reason=one.reason, images=count)
        if lost:
            with suppress(OSError):  # data.json is not needed for training
                write_atomic(self._folder.path / DATA_FILE, data_json(self._dataset), self._folder.path)

    def _report_images(self, recorder: Recorder, step: int, images: list[SkippedFile]) -> None:
        """Warn of each new image, or of all with the same reason in one line where they are many."""
        new = defaultdict[str, list[str]](list)
        for one in self._new(images):
            new[one.reason].append(one.name)
            recorder.event("quarantined", step, image=one.name, reason=one.reason)
        for reason, names in new.items():
            if len(names) > _MAX_SINGLE:
                named = ", ".join(map(sanitize, names[:_MAX_SINGLE]))
                recorder.warn(
                    step, f"{plural(len(names))} cannot be used: {reason}, such as {named}; others replace them"
                )
                continue
            for name in names:
                recorder.warn(step, f"{sanitize(name)} cannot be used: {reason}; the next image replaces it")

    def _new(self, some: list[SkippedFile]) -> list[SkippedFile]:
        """Return those not reported yet, and mark them as reported."""
        new = [one for one in dict.fromkeys(some) if one not in self._reported]
        self._reported.update(new)
        return new
