"""Processes that are not there, for traces of what one of them would do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from unfog.errors import RequestError


@contextmanager
def fake_process_group(processes: int) -> Iterator[None]:
    """Within, this is the first of so many processes for torch, whose messages go nowhere.

    Raises:
        RequestError: this one belongs to others that are there.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which also makes the backend known

    if dist.is_initialized():
        raise RequestError(
            "the memory of a divided network cannot be predicted while torch.distributed is in use; call "
            "destroy_process_group first"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()
