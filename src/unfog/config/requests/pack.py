"""Request of `unfog pack`: images to decode once, and the new folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unfog.data.settings import Data
from unfog.settings import argument


@dataclass(frozen=True)
class PackRequest:
    """Decode and resize SOURCE once into OUT. Training reads it at the speed of memory.

    After an interruption, the same command continues.

      unfog pack photos/ photos.pack --size 64
      unfog train photos.pack                     afterwards
    """

    source: str = field(metadata=argument("SOURCE"))
    """Images, as for train."""
    out: Path = field(metadata=argument("OUT"))
    """New folder for the pack, or an unfinished pack of the same images."""
    data: Data = Data()
