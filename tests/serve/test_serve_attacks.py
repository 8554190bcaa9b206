"""Attacks on a real server, sent as bytes, one for each class that others were broken into by; named by their CVEs."""

import json
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("orjson")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import forked
import unfog
from conftest import TRANSFORMER
from hostile import png
from served import make_run, serving
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of two runs, one of them by somebody who wants to break in, beside a file that is nobody's business."""
    place = tmp_path_factory.mktemp("place")
    (place / "private.txt").write_text("private words")
    make_run(place / "runs" / "a")
    evil = make_run(place / "runs" / "<script>alert(1)</script>")
    text = (evil / "config.toml").read_text()
    (evil / "config.toml").write_text(text.replace('"fashion"', '"python:evil:source"'))
    with (evil / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "warning", "step": 1, "message": "<img src=x onerror=alert(1)>"}) + "\n")
    (evil / "samples" / "00000030.png").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>")
    (evil / "samples" / "00000040.png").symlink_to(place / "private.txt")
    return place


@pytest.fixture(scope="module")
def web(place, tmp_path_factory):
    settings = str(tmp_path_factory.mktemp("settings"))
    with serving(place / "runs", XDG_CONFIG_HOME=settings) as (address, process):
        address.process = process
        yield address


def number(web, name="a"):
    return next(row["id"] for row in web.get("api/runs") if row["name"] == name)


def test_it_listens_on_the_loopback_only(web):
    """Open by default: SimpleTuner binds 0.0.0.0."""
    assert web.place[0] == "127.0.0.1"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A"}
    assert f"0100007F:{web.place[1]:04X}" in listening
    assert f"00000000:{web.place[1]:04X}" not in listening


def test_the_server_process_has_no_torch(web):
    assert web.get("api/runs")
    assert web.get(f"api/runs/{number(web)}")["rows"] == 40
    assert web.post("api/train?dry=1", {"source": web.get("api/state")["sources"][0]["id"]})[0] == 200
    assert "torch" not in Path(f"/proc/{web.process.pid}/maps").read_text()


def test_dns_rebinding_cve_2025_14279(web):
    port = web.place[1]
    name = f"rebound.example:{port}"
    for more in ({}, {"Origin": f"http://{name}", "Sec_Fetch_Site": "same-origin"}):
        status, headers, body = web.send("GET", "api/runs", Host=name, **more)
        assert status == 403
        assert b'"name"' not in body
        assert not [header for header in headers if header.startswith("access-control")]


def test_two_hosts_and_a_host_in_the_first_line_are_refused(web):
    rest = "Connection: close\r\n\r\n"
    twice = f"GET {web.path}api/runs HTTP/1.1\r\nHost: {web.host}\r\nHost: evil.example\r\n{rest}"
    assert web.send_raw(twice.encode())[0] == 400
    absolute = f"GET http://evil.example{web.path}api/runs HTTP/1.1\r\nHost: {web.host}\r\n{rest}"
    assert web.send_raw(absolute.encode())[0] == 404
    none = f"GET {web.path}api/runs HTTP/1.0\r\n{rest}"
    assert web.send_raw(none.encode())[0] in (400, 403)


@pytest.mark.parametrize("path", ["ask", "resume"])
def test_forms_and_requests_of_other_sites_steer_nothing_cve_2024_2196_comfyui_manager_2818(web, path):
    at, body = f"api/runs/{number(web)}/{path}", b'{"what": "stop"}'
    form = web.send("POST", at, body, Content_Type="text/plain")
    site = web.send("POST", at, body, Content_Type="application/json", Sec_Fetch_Site="cross-site")
    port = web.send("POST", at, body, Content_Type="application/json", Sec_Fetch_Site="same-site")
    null = web.send("POST", at, body, Content_Type="application/json", Origin="null")
    other = web.send("POST", at, body, Content_Type="application/json", Origin="http://evil.example", Cookie="a=b")
    assert [status for status, _, _ in (form, site, port, null, other)] == [415, 403, 403, 403, 403]
    assert web.get("api/tasks") == []


def test_a_preflight_is_given_nothing_cve_2024_7760(web):
    asks = {"Origin": "http://evil.example", "Access_Control_Request_Method": "POST"}
    status, headers, _ = web.send("OPTIONS", "api/train", **asks)
    assert status in (403, 405)
    assert not [header for header in headers if header.startswith("access-control")]


def test_websockets_are_refused_cve_2024_11045(web):
    upgrade = {"Upgrade": "websocket", "Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in upgrade.items())
    request = f"GET {web.path}api/stream HTTP/1.1\r\nHost: {web.host}\r\n{head}Connection: Upgrade\r\n\r\n"
    with socket.create_connection(web.place, timeout=10) as connection:
        connection.sendall(request.encode())
        assert b" 101 " not in connection.recv(64)


TRAVERSALS = """
../private.txt ..%2fprivate.txt %2e%2e/private.txt ....//private.txt ..%5cprivate.txt ..%252fprivate.txt /etc/passwd
static/../private.txt static/..%2f..%2fprivate.txt static//etc/passwd static/%2fetc%2fpasswd static/vendor/../../x.py
api/runs/..%2fprivate.txt api/runs/a api/runs/-1 api/runs/1.5 api/runs/0x10 api/runs/%00 api/runs/1/preview/..%2f1.webp
api/runs/1/preview/00000040.png api/runs/file:///etc/passwd api/tasks/../runs static/index.html%00.js
""".split()  # noqa: SIM905


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leads_to_a_file_cve_2023_1177_cve_2024_1483_cve_2021_43775_cve_2023_51449(web, path):
    """Sent as it is: a client would tidy it up first. Each of MLflow's fixes was gone round by another spelling.

    Starlette's own files: GHSA-v5gw-mw7f-84px.
    """
    status, _, body = web.send("GET", path)
    assert status in (400, 404)
    assert b"private words" not in body
    assert b"root:" not in body


def test_a_link_in_a_run_is_not_followed_cve_2023_6909_cve_2026_56671(web):
    run = number(web, "<script>alert(1)</script>")
    status, _, body = web.send("GET", f"api/runs/{run}/preview/40.webp")
    assert status in (400, 404, 422)
    assert b"private words" not in body


def test_nothing_that_a_run_holds_is_passed_on_as_a_page_cve_2024_6578_cve_2026_56670_cve_2026_111984(web):
    """Names, messages and pictures of a stranger: JSON that nothing sniffs, and pixels that were encoded anew."""
    run = number(web, "<script>alert(1)</script>")
    for path in ("api/runs", f"api/runs/{run}", f"api/runs/{run}/events", "api/state"):
        _, headers, _ = web.send("GET", path)
        assert headers["content-type"] == "application/json"
        assert headers["x-content-type-options"] == "nosniff"
        assert "unsafe" not in headers["content-security-policy"]
    status, headers, body = web.send("GET", f"api/runs/{run}/preview/30.webp")
    assert (status, headers["content-type"]) == (400, "application/json")
    assert b"<svg" not in body


def source_of(web):
    return next(one["id"] for one in web.get("api/state")["sources"] if one["name"] == "fashion")


NOT_FROM_PAGE = [
    {"network": "custom:path=evil.Net"},
    {"network": "custom:arguments=a=1,path=evil.Net"},
    {"optimizer.method": "custom:path=os.system"},
    {"sampler.kind": "custom:path=evil.step"},
    {"diffusion.weighting": "custom :path=evil.weight"},
    {"log.sinks": "custom:path=evil.Tracker"},
    {"log.sinks": "wandb"},
    {"evaluate.features": "/etc/passwd"},
    {"init.folder": "/home"},
    {"autoencoder_folder": "../x"},
    {"data.labels": "/etc/passwd"},
    {"out": "/tmp/x"},
    {"config": "/tmp/x.toml"},
    {"source": "http://169.254.169.254/"},
    {"settings": {"out": "x"}},
    {"optimizer.lr": "1; touch /tmp/x"},
    {"optimizer.lr": "$(touch /tmp/x)"},
    {"optimizer.lr": "1e-3 --out=/tmp/x"},
    {"optimizer.lr": "--out=/tmp/x"},
    {"optimizer.lr": "1\n--out"},
    {"optimizer.betas": "0.9 --out"},
    {"training.steps": {"a": 1}},
    {"__class__": "x"},
]


@pytest.mark.parametrize("settings", NOT_FROM_PAGE)
def test_the_page_names_no_code_no_path_and_no_address_cve_2024_32025_cve_2024_2195_cve_2024_12029_cve_2026_28416(
    web, place, settings
):
    """Shell strings of kohya_ss, queries of Aim, addresses that Gradio fetches: settings are parsed as `train` does."""
    status, answer = web.post("api/train", {"source": source_of(web), "settings": settings})
    assert status == 400, answer
    assert answer["error"]
    assert web.get("api/tasks") == []


@pytest.mark.parametrize(
    "source", ["fashion", "/etc", "http://evil.example/x.tar", -1, None, True, 2**60, [1], {"a": 1}]
)
def test_a_source_is_a_number_of_the_list_cve_2026_2393(web, source):
    for path in ("api/train", "api/plan", "api/doctor"):
        assert web.post(path, {"source": source})[0] == 400


def test_a_source_that_is_code_is_not_offered(web):
    assert [one["name"] for one in web.get("api/state")["sources"]] == ["fashion"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b"\xff", b"[" * 100_000, b'{"source": NaN}'])
def test_bodies_that_are_no_objects_are_answered(web, body):
    for path in ("api/train", "api/draw"):
        status, _, answer = web.send("POST", path, body, Content_Type="application/json", Content_Length=str(len(body)))
        assert status in (400, 404, 405)
        assert json.loads(answer)["error"]


def test_ranges_are_not_computed_cve_2025_62727(web):
    run, ranges = number(web), "bytes=" + ",".join(f"{i}-" for i in range(2000))
    began = time.monotonic()
    status, headers, _ = web.send("GET", f"api/runs/{run}/preview/10.webp", Range=ranges)
    assert status == 200
    assert "content-range" not in headers
    assert time.monotonic() - began < 60


def test_multipart_is_not_parsed_cve_2025_54121(web):
    body = b"--x\r\nContent-Disposition: form-data; name=a; filename=b\r\n\r\n" + b"x" * 2**19
    assert web.send("POST", "api/train", body, Content_Type="multipart/form-data; boundary=x")[0] == 415


def test_large_bodies_are_not_read_cve_2026_33332_cve_2026_111985(web):
    announced = web.send("POST", "api/train", b"x", Content_Type="application/json", Content_Length=str(10**12))
    assert announced[0] == 413
    head = f"POST {web.path}api/train HTTP/1.1\r\nHost: {web.host}\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with socket.create_connection(web.place, timeout=20) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent, answer = 0, b""
        try:
            while sent < 2**24:
                connection.sendall(chunk)
                sent += len(chunk)
            answer = connection.recv(2**16)
        except OSError:  # closed while more is sent
            pass
    assert sent < 2**24 or b" 413 " in answer
    assert web.get("api/tasks") == []


def test_a_huge_picture_is_not_decoded_cve_2026_111985(web, place):
    (place / "runs" / "a" / "samples" / "00000050.png").write_bytes(png(100_000, 100_000, 8, 2, b""))
    status, _, answer = web.send("GET", f"api/runs/{number(web)}/preview/50.webp")
    assert status == 400
    assert b"megapixels" in answer


def test_errors_show_no_traceback_and_no_secret(web):
    for path in ("api/runs/1", "api/runs/99999999999999999999", "api/nothing", "api/settings?command=cache"):
        status, _, answer = web.send("GET", path)
        assert status in (400, 404)
        assert b"Traceback" not in answer
        assert web.path.strip("/").encode() not in answer


def test_the_key_is_kept_for_its_owner(tmp_path, monkeypatch):
    from unfog.serve.address import folder_key

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "new"))
    first = folder_key(tmp_path / "runs")
    assert len(first) == 64
    assert int(first, 16) >= 0
    assert folder_key(tmp_path / "runs") == first != folder_key(tmp_path / "others")
    key = tmp_path / "new" / "unfog" / "serve-key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)  # somebody else may have read it
    assert folder_key(tmp_path / "runs") != first
    key.unlink()
    os.symlink(tmp_path / "elsewhere", key)
    (tmp_path / "elsewhere").write_text("0" * 64)
    assert folder_key(tmp_path / "runs") != folder_key(tmp_path / "runs")


def test_of_processes_that_make_a_key_at_once_one_wins(tmp_path, monkeypatch, capsys):
    from unfog.files.seals import stored_key
    from unfog.process.machine_key import machine_key

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    first, _ = stored_key("machine-key")
    monkeypatch.setattr("os.path.lexists", lambda path: False)  # as if it had looked before the other one wrote
    assert stored_key("machine-key") == (first, "")
    assert [path.name for path in (tmp_path / "unfog").iterdir()] == ["machine-key"]
    (tmp_path / "unfog" / "machine-key").chmod(0o640)
    assert machine_key.__wrapped__() != first
    assert "chmod 600" in capsys.readouterr().err


SHADOWS = ("numpy.py", "torch.py", "json.py", "random.py", "PIL/__init__.py", "unfog/__init__.py", "sitecustomize.py")


@pytest.fixture(scope="module")
def strangers_place(tmp_path_factory):
    """A folder from a stranger: runs, one that names code and is called like it, and modules that say that they ran."""
    place = tmp_path_factory.mktemp("stranger")
    images = place / "images"
    images.mkdir()
    for i in range(12):
        Image.new("L", (8, 8), 20 * i).save(images / f"{i}.png")
    settings = {"network": TRANSFORMER, "size": 8, "steps": 2, "batch": 4, "lr": 1e-3, "device": "cpu"}
    unfog.train(images, out=place / "runs/plain", **settings)
    named = place / "runs/custom:path=tuned.step"
    shutil.copytree(place / "runs/plain", named)
    text = (named / "config.toml").read_text()
    config = from_toml(text, Config())
    sampler = replace(config.sampler, kind="custom:path=tuned.step")
    (named / "config.toml").write_text(to_toml(replace(config, sampler=sampler)))
    ran = f"open({str(place / 'ran')!r}, 'a').write(__file__ + ' ')\n"
    (place / "tuned.py").write_text(ran + "def step(x, x0, now, then, context):\n    return x0\n")
    for name in SHADOWS:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(ran + "raise SystemExit(99)\n")
    return place


def finished(web, answer):
    """The ended task or drawing that a button has started."""
    status, body = answer
    assert status == 200, body
    path = f"api/draw/{body['job']}" if "job" in body else f"api/tasks/{body['task']}"

    def ended():
        found = web.get(path)
        return found.get("state", "ended") in ("ended", "done", "failed") and not found.get("running") and found

    return wait_until(ended, every=0.2)


@pytest.fixture(scope="module")
def strangers_web(strangers_place, tmp_path_factory):
    own = str(tmp_path_factory.mktemp("own"))
    with serving(Path("runs"), "--source", "images", cwd=strangers_place, XDG_CONFIG_HOME=own) as (address, _):
        yield address


def press(web, button, run):
    source = next(one["id"] for one in web.get("api/state")["sources"] if one["name"].endswith("images"))
    settings = {"data.size": "8", "training.steps": "1", "training.batch": "4", "network": TRANSFORMER}
    at = number(web, run)
    path, body = {
        "draw": ("api/draw", {"run": at, "settings": {"n": 1, "steps": 2}}),
        "doctor": ("api/doctor", {"run": at, "quick": True}),
        "resume": (f"api/runs/{at}/resume", {"settings": {"training.steps": "3"}}),
        "plan": ("api/plan", {"source": source, "settings": settings}),
        "train": ("api/train", {"source": source, "settings": settings}),
    }[button]
    return web.post(path, body)


# A drawing and a command are started in two places; the other commands by the same line as training.
@pytest.mark.parametrize(
    "button",
    ["draw", "train", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("doctor", "resume", "plan"))],
)
def test_no_button_imports_from_the_current_folder_cwe_427(strangers_place, strangers_web, button):
    task = finished(strangers_web, press(strangers_web, button, "plain"))
    assert task.get("state") == "done" or task.get("status") == 0, task
    assert not (strangers_place / "ran").exists()


@pytest.mark.parametrize("button", ["draw", "resume", "doctor"])
def test_a_run_that_is_named_like_code_gives_no_consent(strangers_place, strangers_web, button):
    status, body = press(strangers_web, button, "custom:path=tuned.step")
    error = body["error"] if status == 400 else finished(strangers_web, (status, body))["error"]
    assert "set UNFOG_TRUST=tuned.step" in error
    assert not (strangers_place / "ran").exists()


def test_consent_in_a_terminal_holds_for_the_buttons(strangers_place, tmp_path):
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    run = "custom:path=tuned.step"
    words = ["sample", f"runs/{run}", "-n", "1", "--out", tmp_path / "out"]
    trusting = os.environ | environment | {"UNFOG_TRUST": "tuned.step"}
    try:
        done = forked.run(words, cwd=str(strangers_place), env=trusting)
        assert done.returncode == 0, done.stderr
        with serving(Path("runs"), cwd=strangers_place, **environment) as (web, _):
            asked = {"run": number(web, run), "settings": {"n": 1, "steps": 2}}
            assert finished(web, web.post("api/draw", asked))["state"] == "done"
        names = {Path(name).name for name in (strangers_place / "ran").read_text().split()}
        assert names == {"tuned.py"}
    finally:
        (strangers_place / "ran").unlink(missing_ok=True)


def test_credentials_of_a_source_are_in_no_words_of_a_process(tmp_path):
    run = make_run(tmp_path / "runs" / "a")
    text = (run / "config.toml").read_text()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the plan waits for it
        url = f"http://alice:hunter2@127.0.0.1:{silent.getsockname()[1]}/a.tar"
        (run / "config.toml").write_text(text.replace('"fashion"', f'"{url}"'))
        with serving(tmp_path / "runs", XDG_CONFIG_HOME=str(tmp_path)) as (web, process):
            source = next(one["id"] for one in web.get("api/state")["sources"] if "a.tar" in one["name"])
            status, body = web.post("api/plan", {"source": source})
            assert status == 200, body
            silent.settimeout(60)
            connection, _ = silent.accept()
            words = [
                Path(f"/proc/{one}/cmdline").read_bytes()
                for task in Path(f"/proc/{process.pid}/task").iterdir()
                for one in (task / "children").read_text().split()
            ]
            assert any(b"@UNFOG_URL_1" in one for one in words), words
            assert not any(b"hunter2" in one for one in words)
            connection.close()
