"""`unfog cache`: list the entries of the cache folder, clear it, or make room in it."""

from __future__ import annotations

import time

from unfog.config.requests.cache import CacheRequest
from unfog.files.cache_folder import CacheEntry, cache_folder, cache_limit, clear_cache, make_room
from unfog.process.run_folder import printable
from unfog.reporting.progress import format_duration, print_result, say, warn
from unfog.text import format_bytes, plural


def _cache_lines(entries: list[CacheEntry]) -> list[str]:
    """Return the entries as lines of text, most recently used first."""
    total, limit = sum(entry.nbytes for entry in entries), format_bytes(cache_limit())
    folder = printable(str(cache_folder()))
    counted = plural(len(entries), "entry")
    lines = [f"{folder}: {counted}, {format_bytes(total)} of at most {limit} (UNFOG_CACHE_LIMIT)"]
    if entries:
        lines.append(f"  {'size':>9}  {'last used':<17}  {'kind':<23}  name")
    for entry in reversed(entries):
        age = "in use" if entry.in_use() else f"{format_duration(max(0.0, time.time() - entry.used))} ago"
        lines.append(f"  {format_bytes(entry.nbytes):>9}  {age:<17}  {entry.kind:<23}  {entry.path.name}")
    return lines


def main(request: CacheRequest) -> int:
    """Clear or make room where that is asked, list the cache, and return the exit status."""
    limit = cache_limit() if request.limit is None else request.limit * 1e9
    if request.clear:
        for entry in CacheEntry.all():
            if not entry.evictable and not entry.in_use():  # nothing else removes it
                say(f"removes {printable(str(entry.path))}: {entry.kind}, {format_bytes(entry.nbytes)}")
        if left := clear_cache():
            warn(f"{plural(len(left), 'entry')} cannot be removed now, because a process or a run needs them")
    elif request.limit is not None and not make_room(limit=limit):
        warn(
            f"more than {format_bytes(limit)} are left: entries in use, and images from Python and Hugging Face sets, "
            "which --clear removes"
        )
    print_result("\n".join(_cache_lines(CacheEntry.all())))
    return 0
