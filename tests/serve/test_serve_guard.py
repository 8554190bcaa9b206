"""The guard of the server, called as uvicorn calls it: what is refused before any route, and the headers of answers."""

import asyncio
import gzip
import hmac
import json
import socket
import threading

import pytest

from served import HOST, SECRET, serving
from unfog.cli.main import main
from unfog.errors import RequestError
from unfog.serve.address import Address, listen
from unfog.serve.guard import Guard
from unfog.serve.page import Page

SAME = {"host": HOST}
KEY = "ab" * 32
ADDRESS = Address("127.0.0.1", 8642, KEY)
ADDRESS.secret = SECRET  # it is random


class Reached:
    """An application that notes what reaches it, and answers with the path and the length of the body."""

    def __init__(self):
        self.paths = []

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


def call(method="GET", path=f"/{SECRET}/api/runs", headers=SAME, body=(b"",), kind="http", query=""):
    """(status, headers, body, paths that reached the application) of one request; the body comes in parts."""
    app, sent, parts = Reached(), [], list(body)

    async def receive():
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    pairs = [
        (name.encode(), value.encode()) for name, value in (headers.items() if isinstance(headers, dict) else headers)
    ]
    scope = {"type": kind, "method": method, "path": path, "headers": pairs, "query_string": query.encode()}
    asyncio.run(Guard(app, ADDRESS)(scope, receive, send))
    if kind != "http":
        return sent, app.paths
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], head, sent[1]["body"], app.paths


def test_a_page_of_the_server_is_let_through_without_its_secret():
    for site in ({}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {"origin": f"http://{HOST}"}):
        status, _, _, paths = call(headers=SAME | site)
        assert (status, paths) == (200, ["/api/runs"])


@pytest.mark.parametrize(
    "host", ["", "evil.example:8642", "127.0.0.1", "127.0.0.1:80", f"{HOST}.evil.example", "[::1]"]
)
def test_dns_rebinding_cve_2025_14279(host):
    """A name that an attacker points at this machine: Host and Origin agree, and both are not of the list."""
    status, _, _, paths = call(headers={"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"})
    assert (status, paths) == (403, [])


def test_a_host_that_is_sent_twice_is_refused():
    status, _, _, paths = call(headers=[("host", HOST), ("host", "evil.example")])
    assert (status, paths) == (400, [])


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "none, same-origin", "anything"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_requests_of_other_sites_cve_2024_2196_cve_2024_7760_cve_2024_1727(site, method):
    """`same-site` is another port of this machine: cookies and sites know no ports."""
    kind = {"content-type": "application/json"} if method == "POST" else {}
    status, headers, _, paths = call(method, headers=SAME | kind | {"sec-fetch-site": site})
    assert (status, paths) == (403, [])
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "https://127.0.0.1:8642", "http://127.0.0.1", "http://localhost:8642", ""]
)
def test_origins_that_are_null_or_another_cve_2024_47165_cve_2026_56674(origin):
    status, _, _, paths = call("POST", headers=SAME | {"content-type": "application/json", "origin": origin})
    assert (status, paths) == (403, [])


def test_a_cookie_switches_no_check_off_cve_2024_47084_cve_2025_5320():
    for more in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        status, _, _, paths = call(headers=SAME | {"cookie": "session=1"} | more)
        assert (status, paths) == (403, [])


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx"],
)
def test_types_that_a_form_can_send_are_refused_comfyui_manager_2818(kind):
    """Multipart is also where Starlette stalled: CVE-2025-54121."""
    status, _, _, paths = call("POST", headers=SAME | {"content-type": kind})
    assert (status, paths) == (415, [])


def test_websockets_are_closed_cve_2024_11045():
    sent, paths = call(kind="websocket", headers=SAME | {"origin": f"http://{HOST}"})
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert paths == []


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", f"/{SECRET[:-1]}/", f"/{SECRET}", f"/{SECRET}0/", f"/x/{SECRET}/", "//", f"//{SECRET}/"]
)
def test_without_the_secret_nothing_answers(path):
    """Open by default: SimpleTuner, ai-toolkit. Pictures need it too, as it is part of every address."""
    status, _, body, paths = call(path=path)
    assert (status, paths) == (404, [])
    assert SECRET[:6] not in body.decode()


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"])
def test_other_methods_are_refused_and_preflights_with_them(method):
    status, headers, _, paths = call(method)
    assert (status, paths) == (405, [])
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("announced", [True, False])
def test_bodies_have_a_limit_cve_2026_33332_cve_2026_111985(announced):
    """A body that is announced too long is not read; one that announces nothing is read up to the limit."""
    json_type = {"content-type": "application/json"}
    length = {"content-length": str(2**20 + 1)} if announced else {}
    parts = [b"x" * 2**19] * 3 if not announced else []
    status, _, _, paths = call("POST", headers=SAME | json_type | length, body=parts)
    assert (status, paths) == (413, [])
    status, _, body, _ = call("POST", headers=SAME | json_type, body=[b"x" * 2**19] * 2)
    assert (status, body) == (200, str(2**20).encode())
    status, _, body, _ = call("POST", headers=SAME | {"content-type": "image/png"}, body=[b"x" * 2**23] * 2)
    assert (status, body) == (200, str(2**24).encode())


def test_a_slow_body_is_given_up(monkeypatch):
    monkeypatch.setattr("unfog.serve.guard._BODY_SECONDS", 0.05)

    async def receive():
        await asyncio.sleep(5)

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"host", HOST.encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": f"/{SECRET}/", "headers": headers}
    asyncio.run(Guard(Reached(), ADDRESS)(scope, receive, send))
    assert sent[0]["status"] == 408


@pytest.mark.parametrize("refused", [False, True])
def test_every_answer_forbids_scripts_frames_sniffing_and_storing_cve_2024_10099_cve_2026_21873(refused):
    _, headers, body, _ = call(path="/" if refused else f"/{SECRET}/")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert not [name for name in headers if name.startswith("access-control") or name == "set-cookie"]
    if refused:
        assert "error" in json.loads(body)


class Slow:
    """Routes that take long to load, and a state whose end is noted."""

    def __init__(self):
        self.loaded, self.closed, self.hub = threading.Event(), False, self

    def build(self):
        assert self.loaded.wait(120)
        return self, Reached()

    async def watch(self):
        await asyncio.sleep(60)

    def close(self):
        self.closed = True


def test_the_page_is_there_before_the_routes_are_and_its_files_are_a_table():
    """Path traversal in static files: GHSA-v5gw-mw7f-84px. What is not a file of the table is asked of the routes."""
    slow = Slow()

    async def use():
        page, inbox, sent = Page(slow.build), asyncio.Queue(), []

        async def send(message):
            sent.append(message)

        living = asyncio.create_task(page({"type": "lifespan"}, inbox.get, send))
        await inbox.put({"type": "lifespan.startup"})

        async def get(path, *headers):
            answer = []

            async def keep(message):
                answer.append(message)

            async def receive():
                return {"type": "http.request", "body": b""}

            scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
            await page(scope, receive, keep)
            return answer[0]["status"], dict(answer[0]["headers"]), answer[1]["body"]

        await asyncio.sleep(0.01)
        index, script = await get("/"), await get("/static/main.js")
        again = await get("/", (b"if-none-match", index[1][b"etag"]))
        packed = await get("/static/main.js", (b"accept-encoding", b"gzip, br"))
        assert (packed[1][b"content-encoding"], gzip.decompress(packed[2])) == (b"gzip", script[2])
        assert packed[1][b"content-length"] == str(len(packed[2])).encode()
        waiting = asyncio.create_task(get("/static/../guard.py"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        slow.loaded.set()
        assert (await waiting)[2] == b"0"  # from the routes
        await inbox.put({"type": "lifespan.shutdown"})
        await living
        return index, script, again, [message["type"] for message in sent]

    index, script, again, said = asyncio.run(use())
    assert (index[0], index[1][b"content-type"]) == (200, b"text/html; charset=utf-8")
    assert b"<script" in index[2]
    assert script[1][b"content-type"] == b"text/javascript; charset=utf-8"
    assert (again[0], again[2]) == (304, b"")
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert slow.closed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["FILE"], "is a file; give the folder that holds runs"),
        (["nosuch"], "'nosuch' does not exist; give the folder that holds your runs, or make an empty one"),
        ([".", "--port", "TAKEN"], "another --port, or --port 0"),
        ([".", "--port", "70000"], "must be from 0 to 65535"),
        ([".", "--host", "no.such.host.invalid"], "give another --"),
        ([".", "--source", "no such folder"], "no such folder"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as left:
            main(["serve", *(port if word == "TAKEN" else word for word in words), "--no-browser"])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["art/runs", "--source", "fashion"]])
def test_the_folder_of_the_first_run_is_made(tmp_path, monkeypatch, capsys, words):
    """Of `runs`, where commands put runs, and where a source says that one is to be started; not of a misspelt name."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        main(["serve", *words, "--port", str(taken.getsockname()[1]), "--no-browser"])
    folder = words[0] if words else "runs"
    said = capsys.readouterr().err
    assert f"made the folder '{folder}', for your first run" in said
    assert "another --port" in said
    assert (tmp_path / folder).is_dir()


@pytest.mark.slow
def test_a_folder_without_runs_is_served_and_said_to_have_none(tmp_path):
    with serving(tmp_path) as (address, process):
        assert address.get("api/runs") == []
        process.terminate()
        assert "no runs there yet: start one on the page" in process.stderr.read()


def test_hosts_are_this_machine_and_the_one_that_was_named():
    local = {"localhost:9", "127.0.0.1:9", "[::1]:9"}
    assert Address("127.0.0.1", 9, KEY).hosts == local
    assert Address("10.0.0.7", 9, KEY).hosts == local | {"10.0.0.7:9"}
    assert Address("fe80::1", 9, KEY).hosts == local | {"[fe80::1]:9"}
    assert Address("0.0.0.0", 9, KEY).hosts == local | {f"{socket.gethostname()}:9"}
    assert "localhost" in Address("127.0.0.1", 80, KEY).hosts


def test_a_server_proves_that_it_has_the_key_and_gives_no_secret_away():
    nonce = "0" * 32
    status, _, body, paths = call(path="/hello", query=f"nonce={nonce}")
    found = json.loads(body)
    assert (status, paths) == (200, [])
    assert found["proof"] == hmac.digest(KEY.encode(), f"proof 8642 {nonce} {found['start']}".encode(), "sha256").hex()
    for port, key in ((8643, KEY), (8642, "cd" * 32)):  # what another program could pass on proves nothing
        assert Address("127.0.0.1", port, key).prove(nonce)["proof"] != found["proof"]
    made = Address("127.0.0.1", 8642, KEY)
    start = made.prove(nonce)["start"]
    assert made.secret == hmac.digest(KEY.encode(), f"address {start}".encode(), "sha256").hex()[:32]
    assert made.secret != Address("127.0.0.1", 8642, KEY).secret  # of the next start
    for query in ("", "nonce=x", f"nonce={nonce}0", "nonce=%00"):
        assert call(path="/hello", query=query)[0] == 404
    for headers in ({"host": "evil.example:8642"}, SAME | {"sec-fetch-site": "cross-site"}):
        assert call(path="/hello", query=f"nonce={nonce}", headers=headers)[0] == 403


def test_the_key_goes_to_the_page_alone_and_never_over_a_network():
    assert json.loads(call(path=f"/{SECRET}/api/key")[2]) == {"key": KEY}
    assert call(path="/api/key")[0] == call(path=f"/{SECRET[:-1]}f/api/key")[0] == 404
    assert Address("0.0.0.0", 8642, KEY).key == Address("10.0.0.7", 8642, KEY).key == ""


def test_a_token_opens_the_page_once_and_for_a_person_alone():
    used = []
    token = ADDRESS.one_time(lambda: used.append(1)).rpartition("/")[2]
    from_file = SAME | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    refused = [
        (f"/open/{token[:-1]}", from_file),
        ("/open/", from_file),
        (f"/open/{token}", from_file | {"host": "evil.example:8642"}),
        (f"/open/{token}", from_file | {"sec-fetch-dest": "iframe"}),
        (f"/open/{token}", from_file | {"sec-fetch-mode": "no-cors"}),
    ]
    assert [call(path=path, headers=headers)[0] for path, headers in refused] == [404, 404, 403, 404, 404]
    status, headers, _, _ = call(path=f"/open/{token}", headers=from_file)
    assert (status, headers["refresh"], used) == (200, f"0; url=/{SECRET}/", [1])
    assert call(path=f"/open/{token}", headers=from_file)[0] == 404


def test_localhost_is_no_other_users_in_either_family():
    if not can_bind("::1"):
        pytest.skip("this machine has no IPv6")
    sockets = listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    assert not can_bind("::1", port)
    for one in sockets:
        one.close()
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", 0))
        other.listen()
        with pytest.raises(RequestError, match="another --port"):
            listen("127.0.0.1", other.getsockname()[1])


def can_bind(host, port=0):
    with socket.socket(socket.AF_INET6) as one:
        try:
            one.bind((host, port))
        except OSError:
            return False
    return True
