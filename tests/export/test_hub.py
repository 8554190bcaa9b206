"""Push to the Hugging Face Hub: the real huggingface_hub against a local stub of its HTTP API."""

import json
import socket

import huggingface_hub.constants
import pytest
from huggingface_hub import ModelCard

import unfog
from conftest import FEW_PICTURES, few_images
from hub_server import TOKEN, running_hub
from test_export import run_of
from unfog.cli.main import main
from unfog.errors import RequestError, RunError


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A running stub of the Hub, and the token where huggingface_hub looks for it."""
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # Of large files, its other protocol is compiled code that needs more than HTTP.
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)  # before it tries again
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path_factory.mktemp("hf") / "token"))
        yield server


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "diffusers"])
def test_an_export_is_pushed_to_a_private_repository_in_one_commit(tmp_path, hub, kind):
    run_of().export(tmp_path / "out", format=kind, push_to_hub="photos")
    pushed = hub.repositories["me/photos"]
    assert pushed["private"]
    assert len(pushed["messages"]) == 1
    files = {name: data for name, data in pushed["files"].items() if name != ".gitattributes"}
    assert files == contents(tmp_path / "out")
    card = ModelCard(files["README.md"].decode())
    assert '"me/photos"' in card.text
    assert "FOLDER" not in card.text
    assert TOKEN.encode() not in b"".join(files.values())


@pytest.mark.slow
def test_a_repository_is_public_only_if_that_is_asked_for(tmp_path, hub):
    run_of().export(tmp_path / "a", push_to_hub="me/open", public=True)
    assert not hub.repositories["me/open"]["private"]
    with pytest.raises(RequestError, match=r"'me/open' exists and is public.*--public"):
        run_of().export(tmp_path / "b", push_to_hub="me/open")
    assert not (tmp_path / "b").exists()
    run_of().export(tmp_path / "b", push_to_hub="me/open", public=True)
    assert len(hub.repositories["me/open"]["messages"]) == 2


@pytest.mark.parametrize(
    ("token", "reason"),
    [("hf_wrong", r"does not accept the token \(401\); log in"), ("", "no token of the Hub is stored here; log in")],
)
def test_a_wrong_or_missing_token_is_found_before_the_work(tmp_path, hub, monkeypatch, token, reason):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(RequestError, match=reason) as raised:
        run_of().export(tmp_path / "out", push_to_hub="me/photos")
    assert "hf_wrong" not in str(raised.value)
    assert not hub.repositories
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_cannot_be_reached_is_found_before_the_work(tmp_path, hub, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(RequestError, match=r"127\.0\.0\.1:\d+ cannot be reached"):
            run_of().export(tmp_path / "out", push_to_hub="me/photos")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "a/b/c", "--", "x" * 200])
def test_a_name_that_is_none_is_refused(tmp_path, hub, name):
    with pytest.raises(RequestError, match="repository; give NAME or OWNER/NAME"):
        run_of().export(tmp_path / "out", push_to_hub=name)


@pytest.mark.parametrize(
    ("step", "status", "reason"),
    [
        ("create", 403, r"may not write there \(403\)"),
        ("preupload", 400, "400"),
        ("store", 413, "413"),
        ("store", 0, "."),
        ("commit", 500, "500"),
    ],
)
@pytest.mark.slow
def test_a_failure_half_way_loses_nothing_and_says_how_to_go_on(tmp_path, hub, step, status, reason, monkeypatch):
    hub.fails = {step: status}
    with pytest.raises(RunError, match=f"{reason}.*hf upload me/photos .*--private"):
        run_of().export(tmp_path / "out", push_to_hub="me/photos")
    assert {"README.md", "model.safetensors", "samples.png"} <= contents(tmp_path / "out").keys()
    assert not hub.repositories.get("me/photos", {"files": {}})["files"]
    hub.fails = {}
    run_of().export(tmp_path / "again", push_to_hub="me/photos")  # it exists, and is empty
    assert "README.md" in hub.repositories["me/photos"]["files"]


@pytest.mark.slow
def test_the_command_reads_endpoint_and_token_from_the_usual_places(tmp_path, hub, capsys):
    kind = "unet:channels=8/8,attention=0/0,mid_attention=0,norm_groups=4"
    settings = {"steps": 2, "size": 8, "network": kind, "device": "cpu", "batch": 8}
    run = unfog.train(few_images(), out=tmp_path / "run", **settings, **FEW_PICTURES)
    words = ["--push-to-hub", "photos", "--license", "mit"]
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run.path), str(tmp_path / "out"), *words])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert f"uploaded: {hub.address}/me/photos" in shown.err
    assert shown.out.strip() == str(tmp_path / "out")
    assert json.loads(hub.repositories["me/photos"]["files"]["model.json"])["run"]["step"] == 2
    hub.fails = {"commit": 500}
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run.path), str(tmp_path / "other"), *words])
    assert ended.value.code == 1
    assert "Nothing is lost" in capsys.readouterr().err
