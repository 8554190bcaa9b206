"""A process group without other processes, in which the memory of rank 0 is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from unfog.errors import RequestError


@contextmanager
def fake_process_group(processes: int) -> Iterator[None]:
    """Make torch believe that this is rank 0 of so many processes; messages go nowhere.

    Raises:
        RequestError: this process is in a real process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

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
