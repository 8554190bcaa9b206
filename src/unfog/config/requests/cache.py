"""Request of `unfog cache`: list the cache folder, or make room in it."""

from __future__ import annotations

from dataclasses import dataclass

from unfog.errors import RequestError


@dataclass(frozen=True)
class CacheRequest:
    """List the entries of the cache folder, or make room in it. UNFOG_CACHE names the folder.

    UNFOG_CACHE_LIMIT limits it, in GB (default 50). When it is full, the least recently used entries go first. No
    command removes an entry that a process uses.

    Keep the 20 GB that were used last: unfog cache --limit 20
    """

    clear: bool = False
    """Remove all entries that are not in use, also Hugging Face sets; images from Python only if no run has them."""
    limit: float | None = None
    """Remove the least recently used entries until at most so many GB are left."""

    def __post_init__(self) -> None:
        # `not`, rather than below 0: a NaN, of which no comparison is true, is refused too.
        if self.limit is not None and not self.limit >= 0:
            raise RequestError(f"limit = {self.limit} must be at least 0 GB")
        if self.clear and self.limit is not None:
            raise RequestError(f"--clear removes everything, so it cannot be combined with --limit {self.limit:g}")
