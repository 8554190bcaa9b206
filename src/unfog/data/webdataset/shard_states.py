"""The states of remote shards now, and as they were before, for a run that resumes without some of them.

The states of a set are remembered while all of it is there, in shards/KEY.seen.json of the cache, where the key is a
hash of the shards' URLs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from unfog.cache_folder import cache_folder
from unfog.data.sources.base import RemotePolicy, SourceLocation
from unfog.data.sources.storage import FileState, Storage
from unfog.data.webdataset.index_files import write_atomically
from unfog.data.webdataset.remote_shards import too_many_failed
from unfog.data.webdataset.shard_index import shard_name
from unfog.errors import RequestError
from unfog.text import sanitize


def remote_states(
    storage: Storage, location: SourceLocation, policy: RemotePolicy
) -> tuple[dict[str, FileState], dict[str, str]]:
    """Return (the state of each shard, sorted by URL; URL -> reason of the failed ones a resume does without).

    Failed shards have the state in which they were last seen, so that the set stays the one the run began with.

    Raises:
        RequestError: a shard cannot be looked at and was never seen, or too many cannot be.
    """
    absent: dict[str, str] = {}
    states = storage.states(location.paths, None if policy.failed_before is None else absent)
    failed: dict[str, str] = {}
    if policy.failed_before is not None:
        known, present = _load(location), {_without_query(path) for path in states}
        urls = {_without_query(path): path for path in location.paths}
        # If more failed before than may now, all get another chance: some may be back.
        allowed = len(policy.failed_before) <= policy.max_failed * len(known)
        failed_before = policy.failed_before if allowed else {}
        for name, state in known.items():
            path = urls.get(name, name)
            reason = failed_before.get(shard_name(path, location.base))
            if reason is None and name not in present:
                reason = absent.get(path, "is not there")
            if reason is not None:
                states[path], failed[path] = state, reason
    for path, reason in absent.items():
        if path not in states:
            raise RequestError(f"{sanitize(path)} {reason}; bring it back, or check the URL")
    if len(failed) > policy.max_failed * len(states):
        named = {shard_name(path, location.base): reason for path, reason in failed.items()}
        raise RequestError(too_many_failed(location.name, named, len(states)))
    if not failed:
        _store(location, states)
    return dict(sorted(states.items())), failed


def _without_query(path: str) -> str:
    return path.partition("?")[0]  # a signature changes daily, and is a secret


def _file(location: SourceLocation) -> Path:
    urls = repr([_without_query(path) for path in location.paths]).encode("utf-8", "replace")
    return cache_folder() / "shards" / f"{hashlib.sha256(urls).hexdigest()[:32]}.seen.json"


def _load(location: SourceLocation) -> dict[str, FileState]:
    try:
        stored = json.loads(_file(location).read_text("utf-8"))
        return {str(path): FileState(int(size), str(version)) for path, (size, version) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _store(location: SourceLocation, states: Mapping[str, FileState]) -> None:
    now = {_without_query(path): state for path, state in states.items()}
    if now != _load(location):
        with suppress(OSError):  # without it only a resume with missing shards is refused
            file = _file(location)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, [json.dumps(now).encode()])
