"""Read web servers and S3 by fsspec, and no more than was asked for. Imports aiohttp, so only where used."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, ClassVar

from aiohttp import ClientResponse, ClientSession, ClientTimeout, DummyCookieJar
from fsspec.implementations.http import HTTPFileSystem

from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import NO_PARTS

_MANY_NAMES = "in a folder of over a million names; name the shards, as in s-{000..099}.tar"

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_LARGEST_ANSWER = 2**24  # of S3 to what names no range: a page of a listing, or the text of an error
_MOST_PAGES = 1000  # of the listing of a folder, each of up to a thousand names; a server could go on for ever


def web_file_system(silence: float) -> Any:
    """Return fsspec's file system for http and https; a server that says nothing for `silence` seconds has failed."""

    async def client(**settings: Any) -> ClientSession:
        return ClientSession(
            # aiohttp's default waits five minutes for a server that says nothing.
            timeout=ClientTimeout(total=None, sock_connect=silence, sock_read=silence),
            # A few packed bytes may unpack to gigabytes, and ranges of a packed file are not ranges of the file.
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
        asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
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


def s3_file_system() -> Any:
    """Return fsspec's file system for S3. ImportError without s3fs."""
    from aiobotocore.httpsession import AIOHTTPSession
    from s3fs import S3FileSystem

    class BoundedSession(AIOHTTPSession):  # type: ignore[misc]
        async def send(self, request: Any) -> Any:
            text = str(request.headers.get("Range", b""), "ascii") if request.stream_output else ""
            # Otherwise the body would be read before it has a limit.
            whole, request.stream_output = not request.stream_output, True
            response = await super().send(request)
            asked = _RANGE.fullmatch(text) if response.status_code < 300 else None
            limit = int(asked[2]) + 1 - int(asked[1]) if asked else _LARGEST_ANSWER
            response.raw.content = _BoundedBody(response.raw, limit)
            if whole:
                await response.content
            return response

    class BoundedFileSystem(S3FileSystem):  # type: ignore[misc]
        pages: ClassVar[Counter[object]] = Counter()

        async def _call_s3(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            folder = (kwargs.get("Bucket"), kwargs.get("Prefix"))
            self.pages[folder] = self.pages[folder] + 1 if "ContinuationToken" in kwargs else 0
            if self.pages[folder] >= _MOST_PAGES:
                raise ImageError(_MANY_NAMES)
            return await super()._call_s3(method, *args, **kwargs)

    return BoundedFileSystem(config_kwargs={"http_session_cls": BoundedSession}, skip_instance_cache=True)


class _BoundedBody:
    """The body of an answer. Reading raises ImageError after `limit` bytes."""

    def __init__(self, answer: ClientResponse, limit: int) -> None:
        self._answer, self._body, self._left = answer, answer.content, limit

    async def read(self, size: int = -1) -> bytes:
        found = bytearray()
        while size < 0 or len(found) < size:
            part = await self._body.read(min(size - len(found) if size >= 0 else 2**20, self._left + 1))
            if not part:
                break
            self._left -= len(part)
            if self._left < 0:
                self._answer.close()  # or the connection would fetch the rest before it is used again
                raise ImageError(NO_PARTS)
            found += part
        return bytes(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)
