"""Failed remote shards and undecodable images: what a run may continue without, and its warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.lazy import remote_shards_of
from unfog.data.report import SkippedFile
from unfog.data.settings import bytes_of
from unfog.data.sources.base import RemotePolicy
from unfog.pipeline.data_report import DATA_FILE, data_json
from unfog.process.run_folder import RunFolder
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import write_atomic
from unfog.text import sanitize
from unfog.training.checkpoints import format as checkpoint

_SHARD = "shard"
"""Marks a shard among the failures that ranks send each other."""


def retry_policy(config: Config, lost: Mapping[str, str] | None) -> RemotePolicy:
    """How shards far away are dealt with. Only a run that goes on may do without what it had at its beginning."""
    begun = lost if lost is not None else {} if config.fingerprint else None
    return RemotePolicy(bytes_of(config.data.cache_limit), config.data.failed_shards, begun)


def read_failed_shards(saved: checkpoint.CheckpointInfo | None) -> Mapping[str, str] | None:
    """Return name -> reason of the shards that a run continued without until the checkpoint; None without one."""
    return None if saved is None else checkpoint.read_state(saved.folder).get("lost_shards", {})


def failures_on_this_rank(images: ImageSet) -> set[tuple[str, ...]]:
    """Return (name, reason) of images that this rank could not decode, and (name, reason, _SHARD) of failed shards."""
    shards = remote_shards_of(images)
    found: set[tuple[str, ...]] = {(one.name, one.reason) for one in getattr(images.pixels, "skipped", [])}
    return found | ({(*item, _SHARD) for item in shards.failed.items()} if shards is not None else set())


class FailureReporter:
    """Warns once of each image that cannot be decoded and each shard that fails during training."""

    def __init__(self, folder: RunFolder, prepared: Dataset) -> None:
        self._folder, self._prepared = folder, prepared
        self._shards = remote_shards_of(prepared.train)
        self._told: set[SkippedFile] = set()

    @property
    def shards(self) -> dict[str, str]:
        """Name -> reason of the failed shards."""
        return {} if self._shards is None else self._shards.failed

    def report(self, recorder: Recorder, step: int, elsewhere: Sequence[Sequence[str]] = ()) -> None:
        """Warn of new failures and record them, including those of other ranks (`failures_on_this_rank`).

        Raises:
            RunError: more shards failed on all ranks together than `data.lost_shards` allows.
        """
        sets = (self._prepared.train, self._prepared.held_out)
        here = [getattr(part.pixels, "skipped", []) for part in sets]  # of images that are decoded while training
        for found in (*here, [SkippedFile(*one) for one in elsewhere if _SHARD not in one[2:]]):
            for one in self._new(found):
                said = f"{sanitize(one.name)} cannot be used: {one.reason}; the next image stands in for it"
                recorder.warn(step, said)
                recorder.event("quarantined", step, image=one.name, reason=one.reason)
        if self._shards is None:
            return
        if trouble := self._shards.cache_error:
            for one in self._new([SkippedFile("", trouble)]):
                recorder.warn(step, f"{one.reason}; what is read is no longer kept for later epochs")
        self._shards.mark_failed({one[0]: one[1] for one in elsewhere if _SHARD in one[2:]})
        lost = self._new([SkippedFile(*item) for item in self._shards.failed.items()])
        for one in lost:
            images = self._shards.image_count(one.name)
            others = f"others stand in for its {images:,} image{'s' * (images != 1)}"
            recorder.warn(step, f"{sanitize(one.name)} {one.reason}; {others}")
            recorder.event("quarantined", step, shard=one.name, reason=one.reason, images=images)
        if lost:
            with suppress(OSError):  # data.json is not needed for training
                write_atomic(self._folder.path / DATA_FILE, data_json(self._prepared))

    def _new(self, some: list[SkippedFile]) -> list[SkippedFile]:
        """Return those not reported yet, and mark them as reported."""
        new = [one for one in some if one not in self._told]
        self._told.update(new)
        return new
