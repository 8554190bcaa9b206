"""What shards far away are like now; and what they were like before, for a run that goes on without some of them.

A set's states as they were when all of it was there are kept in the cache, in shards/KEY.seen.json, where the key is a
hash of what the source is called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from unfog.cache_folder import cache_folder
from unfog.data.sources.byte_storage import FileState, Storage
from unfog.data.sources.locate import SourceLocation
from unfog.data.webdataset.index_files import write_atomically
from unfog.data.webdataset.remote_shards import RemotePolicy, too_many
from unfog.data.webdataset.shard_index import shard_name
from unfog.errors import RequestError
from unfog.text import sanitize


def remote_states(
    storage: Storage, located: SourceLocation, care: RemotePolicy
) -> tuple[dict[str, FileState], dict[str, str]]:
    """(the state of each shard, sorted by path; path -> reason of those that a run which goes on does without).

    Those are in the state in which they were last seen, so that the set is the one that the run began with.

    Raises:
        RequestError: one cannot be looked at and was never seen, or too many cannot be.
    """
    absent: dict[str, str] = {}
    states = storage.states(located.paths, None if care.failed_before is None else absent)
    lost: dict[str, str] = {}
    if care.failed_before is not None:
        known, there = _seen(located), {_plain(path) for path in states}
        urls = {_plain(path): path for path in located.paths}
        for name, state in known.items():
            path = urls.get(name, name)
            begun = care.failed_before if len(care.failed_before) <= care.max_failed * len(known) else {}
            reason = begun.get(shard_name(path, located.base))
            if reason is None and name not in there:
                reason = absent.get(path, "is not there")
            if reason is not None:
                states[path], lost[path] = state, reason
    for path, reason in absent.items():
        if path not in states:
            raise RequestError(f"{sanitize(path)} {reason}; bring it back, or check the URL")
    if len(lost) > care.max_failed * len(states):
        named = {shard_name(path, located.base): reason for path, reason in lost.items()}
        raise RequestError(too_many(located.name, named, len(states)))
    if not lost:
        _remember(located, states)
    return dict(sorted(states.items())), lost


def _plain(path: str) -> str:
    return path.partition("?")[0]  # less a signature, which is another each day, and nobody's business


def _file(located: SourceLocation) -> Path:
    called = repr([_plain(path) for path in located.paths]).encode("utf-8", "replace")
    return cache_folder() / "shards" / f"{hashlib.sha256(called).hexdigest()[:32]}.seen.json"


def _seen(located: SourceLocation) -> dict[str, FileState]:
    """The states as they were remembered; {} if they were not."""
    try:
        stored = json.loads(_file(located).read_text("utf-8"))
        return {str(path): FileState(int(size), str(version)) for path, (size, version) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _remember(located: SourceLocation, states: Mapping[str, FileState]) -> None:
    """Store the states, where that is possible and not done already."""
    now = {_plain(path): state for path, state in states.items()}
    if now != _seen(located):
        with suppress(OSError):
            file = _file(located)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, [json.dumps(now).encode()])
