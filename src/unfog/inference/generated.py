"""Pictures drawn to be measured: kept as they come, so that whoever is interrupted goes on, and nobody draws twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from unfog.errors import RunError
from unfog.reporting.image_grids import Pixels
from unfog.reporting.records import write_atomic
from unfog.training.distributed.world import World


class GeneratedSamples:
    """The first `count` pictures of a seed, uint8 [N, C, H, W] by slices, in a folder, a file for each `chunk`.

    A file is whole or absent. More pictures go on where fewer ended; only a last chunk that was cut is drawn again, so
    that each is drawn with the same neighbours, and to the same bit, whoever draws it.
    """

    def __init__(self, folder: Path, count: int, chunk: int):
        self.folder, self.count, self.chunk = folder, count, chunk

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: slice) -> NDArray[np.uint8]:
        first, last, _ = key.indices(self.count)
        parts = []
        for start in range(first - first % self.chunk, last, self.chunk):
            pictures = self._load(start)
            if pictures is None:
                raise RunError(f"{self._file(start)} is missing; run it again, and it is drawn anew")
            parts.append(pictures[max(0, first - start) : last - start])
        return np.concatenate(parts) if parts else np.zeros((0, 1, 1, 1), np.uint8)

    @property
    def grid(self) -> Pixels:
        """The first pictures, [N, H, W, C], for people to look at."""
        return self[0:64].transpose(0, 2, 3, 1)

    def missing(self) -> list[int]:
        """The first picture of each chunk that is still to be drawn."""
        return [start for start in range(0, self.count, self.chunk) if self._load(start) is None]

    def count_in(self, starts: Sequence[int]) -> int:
        """How many pictures these chunks have."""
        return sum(self._size(start) for start in starts)

    def generate_missing(
        self, draw: Callable[[int, int], Pixels], world: World, progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Draw what is missing, this process every `world`-th chunk; returns when all are there.

        Args:
            draw: (first picture, how many) -> uint8 [n, H, W, C].
            world: the processes that share the folder.
            progress: told how many of those pictures that were missing are drawn, as far as this process can tell.

        Raises:
            RunError: another process writes to another folder, or it cannot be written.
        """
        missing, done = self.missing(), 0
        world.barrier()  # nobody draws before all have looked, or they would divide different lists
        for start in missing[world.rank :: world.size]:
            self._keep(start, draw(start, self._size(start)))
            done += self._size(start)
            progress(min(done * world.size, self.count_in(missing)))
        world.barrier()
        if left := self.missing():
            raise RunError(
                f"{self._file(left[0])} is not there, which another process drew; they must share the run folder"
            )

    @property
    def bytes(self) -> int:
        """What the files take."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def _size(self, start: int) -> int:
        return min(self.chunk, self.count - start)

    def _file(self, start: int) -> Path:
        return self.folder / f"{start:08d}.safetensors"

    def _load(self, start: int) -> NDArray[np.uint8] | None:
        """A chunk; None if it is not there, is not whole, or has fewer pictures than are wanted."""
        with suppress(OSError, SafetensorError, KeyError):
            pictures: NDArray[np.uint8] = load_file(self._file(start))["pictures"]
            if pictures.dtype == np.uint8 and pictures.ndim == 4 and len(pictures) >= self._size(start):
                return pictures
        return None

    def _keep(self, start: int, pictures: Pixels) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file(start), save({"pictures": np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))}))
        except OSError as error:
            raise RunError(
                f"{self.folder} cannot be written ({error.strerror or error}); put that right, then run it again: "
                "what was drawn before is kept"
            ) from error


def weights_digest(network: torch.nn.Module) -> str:
    """sha256 of the weights, whatever file or average they came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
