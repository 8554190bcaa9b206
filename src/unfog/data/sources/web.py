"""Read web servers by fsspec, and no more of an answer than was asked for. Imports aiohttp, so only where used."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import ClientResponse, ClientSession, ClientTimeout, DummyCookieJar
from fsspec.implementations.http import HTTPFileSystem

from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import NO_PARTS


def web_file_system(silence: float) -> Any:
    """Return fsspec's file system for http and https; a server that says nothing for `silence` seconds has failed."""

    async def client(**settings: Any) -> ClientSession:
        return ClientSession(
            # aiohttp's default waits five minutes for a server that says nothing.
            timeout=ClientTimeout(total=None, sock_connect=silence, sock_read=silence),
            # A few packed bytes may unpack to gigabytes, and ranges of a packed file are no ranges of the file.
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            response_class=_BoundedResponse,
            cookie_jar=DummyCookieJar(),  # or a server could have us hold more cookies with each answer
            **settings,
        )

    return HTTPFileSystem(get_client=client, skip_instance_cache=True)


class _BoundedResponse(ClientResponse):  # type: ignore[misc]
    """An answer whose body is read up to a byte more than the Range that was asked for, and not without a Range."""

    async def read(self) -> bytes:
        """Return the body, b"" of an error. Raises ImageError where it is not the bytes of the range."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
        if self.status >= 400 or asked is None:
            self.close()
            return b""
        start, end = int(asked[1]), int(asked[2]) + 1
        coding = self.headers.get("Content-Encoding", "")
        if coding not in ("", "identity") or (self.status != 206 and start):
            self.close()
            raise ImageError("on a server that packs what it sends (Content-Encoding)" if coding else NO_PARTS)
        body = bytearray()
        while len(body) <= end - start and (part := await self.content.read(end - start + 1 - len(body))):
            body += part
        if len(body) > end - start:
            self.close()  # or the connection would fetch the rest before it is used again
        return bytes(body)
