"""Inputs of a drawing besides its settings: image and mask of an edit, and pictures that are conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Inputs:
    """Image files of a drawing, by their use; b"" for one that is missing."""

    image: bytes = b""
    """PNG to start from, at the size of the run."""
    mask: bytes = b""
    """PNG that is white where the image is painted anew."""
    given: Mapping[str, bytes] = field(default_factory=dict)
    """Image files of conditions by name, as they were uploaded."""

    @property
    def head(self) -> dict[str, Any]:
        """Lengths of the parts, by which `read` takes the body apart."""
        lengths = [[name, len(data)] for name, data in self.given.items()]
        return {"image_bytes": len(self.image), "mask_bytes": len(self.mask), "given_bytes": lengths}

    @property
    def body(self) -> bytes:
        return b"".join((self.image, self.mask, *self.given.values()))

    @property
    def nbytes(self) -> int:
        """Length of `body`, without joining its parts."""
        return sum(map(len, (self.image, self.mask, *self.given.values())))

    @property
    def key(self) -> bytes:
        """Bytes that are equal for the same inputs alone."""
        edit = len(self.image).to_bytes(8, "little")
        return edit + self.body + (json.dumps(self.head["given_bytes"]).encode() if self.given else b"")

    @classmethod
    def read(cls, head: Mapping[str, Any], body: bytes) -> Inputs:
        """Return the inputs of a message or file with this head. ValueError or TypeError if they are damaged."""
        lengths = [("", int(head.get("image_bytes", 0))), ("", int(head.get("mask_bytes", 0)))]
        lengths += [(str(name), int(length)) for name, length in head.get("given_bytes", ())]
        if any(length < 0 for _, length in lengths) or sum(length for _, length in lengths) != len(body):
            raise ValueError("the inputs of a drawing have other lengths")
        parts, start = list[bytes](), 0
        for _, length in lengths:
            parts.append(body[start : start + length])
            start += length
        return cls(parts[0], parts[1], {name: part for (name, _), part in zip(lengths[2:], parts[2:], strict=True)})


NO_INPUTS = Inputs()
