"""Connections of senders that have not shown the secret: their number, their time, and what they cost."""

import contextlib
import os
import resource
import socket
import sys
import threading
import time

import pytest

pytest.importorskip("orjson")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from served import make_run, serving
from unfog.serve import connections
from unfog.serve.guard import KNOWN


@pytest.fixture
def waits():
    """Set once a request for a path with `wait` has reached the application."""
    return threading.Event()


@pytest.fixture
def place(monkeypatch, waits):
    """Address of a server in a thread, with short times. A path with `known` has the secret; one with `wait` waits."""
    monkeypatch.setattr(connections, "_FIRST_SECONDS", 0.4)
    monkeypatch.setattr(connections, "_NEXT_SECONDS", 0.8)

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        if "known" in scope["path"]:
            scope[KNOWN] = True
        if "wait" in scope["path"]:
            waits.set()
        while "wait" in scope["path"] and (await receive())["type"] != "http.disconnect":
            pass
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    listener = socket.create_server(("127.0.0.1", 0))
    server = connections.web_server(app, lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(20)


def connected(place, data=b""):
    found = socket.create_connection(place, timeout=10)
    found.sendall(data)
    return found


def is_closed(connection, seconds=0.0):
    """Whether the other side has ended a connection, or does so in that time."""
    connection.settimeout(max(seconds, 0.01))
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize(
    "start", [b"", b"GET /x HT", b"GET /x HTTP/1.1\r\nHost: a\r\n", b"\x00\xff" * 20, b"GET /" + b"x" * 20_000]
)
def test_a_head_has_a_time_and_a_length(place, start):
    with connected(place, start) as connection:
        began = time.monotonic()
        assert is_closed(connection, 30)
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "start", [b"GET /x HTTP/1.1\r\n", b"GET /x HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n"]
)
def test_a_head_or_body_that_comes_byte_by_byte_gets_no_more_time(place, start):
    with connected(place, start) as connection:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 40:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 20


def test_an_answer_may_take_any_time_and_a_connection_is_used_again(place, monkeypatch):
    monkeypatch.setattr(connections, "_NEXT_SECONDS", 2.0)
    request = b"GET /known HTTP/1.1\r\nHost: a\r\n\r\n"
    with connected(place, b"GET /known/wait HTTP/1.1\r\nHost: a\r\n\r\n") as waiting, connected(place) as used:
        for _ in range(4):  # over all longer than the time between two requests
            used.sendall(request)
            answer = b""
            while not answer.endswith(b"ok"):
                answer += (part := used.recv(2**12))
                assert part, "the connection has ended"
            time.sleep(0.6)
        assert not is_closed(waiting)
        assert is_closed(used, 5)


@pytest.mark.slow
def test_the_oldest_stranger_makes_room(place, waits, monkeypatch):
    monkeypatch.setattr(connections, "_MOST_CONNECTIONS", 6)
    monkeypatch.setattr(connections, "_FIRST_SECONDS", 60)
    known = connected(place, b"GET /known/wait HTTP/1.1\r\nHost: a\r\n\r\n")
    assert waits.wait(60)
    strangers = [connected(place, b"GET") for _ in range(40)]
    with connected(place, b"GET /known HTTP/1.1\r\nHost: a\r\n\r\n") as page:
        assert page.recv(2**12).startswith(b"HTTP/1.1 200")
    assert not is_closed(known)
    assert [is_closed(one, 0.2) for one in strangers] == [True] * 36 + [False] * 4
    for one in (known, *strangers):
        one.close()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of another process can be set on Linux alone")
def test_a_page_goes_on_among_idle_connections_and_says_a_lack_of_files_once(tmp_path):
    make_run(tmp_path / "a")
    with serving(tmp_path) as (address, process):
        files = f"/proc/{process.pid}/fd"
        usual, base = resource.prlimit(process.pid, resource.RLIMIT_NOFILE), len(os.listdir(files))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, usual[1]))
        strangers = [socket.create_connection(address.place) for _ in range(300)]
        assert address.send("GET", "api/runs")[0] == 200
        assert len(os.listdir(files)) < base + 80
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (base, usual[1]))
        more = [socket.create_connection(address.place) for _ in range(20)]
        time.sleep(3)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, usual)
        assert address.send("GET", "api/runs")[0] == 200
        for one in (*strangers, *more):
            one.close()
        process.terminate()
        said = process.stderr.read()
        assert said.count("accepts no connection at present") == 1
        assert "Traceback" not in said
