"""Servers that answer with other than what was asked for: no more is read than that, in memory and in time."""

import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Thread

import pytest

from shard_server import Server, serving
from unfog.data.sources import storage as remote
from unfog.data.sources.base import ImageError
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp")

READ = """
import sys
from unfog.data.sources.base import ImageError
from unfog.data.sources.storage import open_storage
from unfog.data.sources.web import web_file_system  # so that the peak is that of reading
sys.argv[1].startswith("s3:") and __import__("s3fs")
storage = open_storage(sys.argv[1])
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
storage.states([sys.argv[1]], {})
print("ready", flush=True)
input()
before = peak()
try:
    print(len(storage.read(sys.argv[1], 0, 1000)))
except ImageError as error:
    print(error, peak() - before < 50_000, sep="|")
"""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    with serving() as server:
        yield server


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize(("fault", "said"), [("endless", "serves no parts"), ("packed", "packs what it sends")])
def test_no_more_is_read_than_was_asked_for(web: Server, fault: str, said: str) -> None:
    """A body of any length, or one that unpacks to 200 MB, takes next to no memory."""
    url = f"http://127.0.0.1:{web.port}/s-000.tar"
    with subprocess.Popen(
        [sys.executable, "-c", READ, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        web.faults["s-000.tar"] = fault
        out, _ = child.communicate("\n", timeout=300)
    assert said in out
    assert out.endswith("|True\n")


def test_headers_that_never_end_are_not_waited_for(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_SILENCE", 0.3)
    monkeypatch.setattr(remote, "_TRIES", 1)
    web.faults["s-000.tar"] = "dripping"
    began = time.monotonic()
    with pytest.raises(RequestError, match="did not answer in time"):
        open_source(f"http://127.0.0.1:{web.port}/s-000.tar")
    assert time.monotonic() - began < 20


def test_an_answer_that_is_another_part_is_none(web: Server) -> None:
    url = f"http://127.0.0.1:{web.port}/s-000.tar"
    storage = remote.open_storage(url)
    storage.states([url])
    whole = web.files["s-000.tar"]
    assert storage.read(url, 512, 1000) == whole[512:1512]
    web.faults["s-000.tar"] = "whole"
    with pytest.raises(ImageError, match="serves no parts"):
        storage.read(url, 512, len(whole))  # as long as was asked for, but from the beginning


def test_a_web_server_is_not_asked_for_a_list(web: Server) -> None:
    with pytest.raises(RequestError, match=r"lists no files; name the shards"):
        open_source(f"http://127.0.0.1:{web.port}/s-*.tar")
    assert web.fetched == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize(("fault", "said"), [("endless", "serves no parts"), ("denied", "serves no parts")])
def test_no_more_is_read_of_s3_than_was_asked_for(
    web: Server, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    """The same of an S3 endpoint, whose errors have texts."""
    pytest.importorskip("s3fs")
    web.files["album/s-000.tar"] = web.files["s-000.tar"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{web.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    with subprocess.Popen(
        [sys.executable, "-c", READ, "s3://album/s-000.tar"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        web.faults["album/s-000.tar"] = fault
        out, _ = child.communicate("\n", timeout=300)
    assert said in out
    assert out.endswith("|True\n")


def test_a_listing_without_end_is_refused(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An S3 endpoint that has one more page of names after each."""
    pytest.importorskip("s3fs")
    from unfog.data.sources import web as remote_files

    monkeypatch.setattr(remote_files, "_MOST_PAGES", 5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{web.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    web.files["album"] = b"""<?xml version="1.0" encoding="UTF-8"?>
        <ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>album</Name><Prefix></Prefix>
        <KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><Delimiter>/</Delimiter><IsTruncated>true</IsTruncated>
        <NextContinuationToken>more</NextContinuationToken><Contents><Key>s-000.tar</Key><ETag>"1"</ETag>
        <LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>512</Size></Contents></ListBucketResult>"""
    with pytest.raises(RequestError, match=r"over a million names"):
        open_source("s3://album/s-*.tar")


def test_an_answer_that_is_not_http_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another service may listen at the port, such as ssh."""

    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(RequestError, match=r"answers are not HTTP; check the host and port"):
            open_source(f"http://127.0.0.1:{server.server_address[1]}/s-000.tar")
        server.shutdown()
