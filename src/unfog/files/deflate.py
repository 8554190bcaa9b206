"""Bound on the unpacked size of deflate streams, for libraries without such a bound."""

from __future__ import annotations

import zlib

DEFLATE_RATIO = 1032
"""The most that deflate packs bytes to one."""
_PIECE = 2**24  # bytes


def unpacks_to(packed: bytes, most: int, wbits: int = zlib.MAX_WBITS) -> bool:
    """Return True if bytes that are compressed by deflate unpack to `most` bytes or more.

    They are unpacked piece by piece, not kept. `wbits` is that of zlib, 31 for gzip. zlib.error if they are damaged.
    """
    stream, total = zlib.decompressobj(wbits), 0
    while packed:
        piece = len(stream.decompress(packed, _PIECE))
        total += piece
        if total >= most:
            return True
        if stream.eof and wbits > zlib.MAX_WBITS:  # gzip goes on with the next stream
            packed, stream = stream.unused_data.lstrip(b"\0"), zlib.decompressobj(wbits)
        elif piece:
            packed = stream.unconsumed_tail
        else:
            break
    return False
