"""Sources far away: a real S3 server on this machine (moto), and a real web server with and without ranges."""

import io
import os
import re
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

import unfog
from conftest import FEW_PICTURES, TRANSFORMER
from image_bytes import random_png as png
from unfog.config.validate import check_source
from unfog.data import decode_pool as bulk
from unfog.data.decode import decode
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources import storage as remote
from unfog.data.sources.base import TransientImageError
from unfog.data.sources.labels import read_labels
from unfog.data.sources.registry import open_source
from unfog.data.sources.storage import describe_remote_error, is_permanent
from unfog.errors import RequestError, RunError, install_command
from unfog.values.image_format import ImageFormat

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp")
pytest.importorskip("s3fs")


def tar(images: range) -> bytes:
    """A shard of these images, the even ones cats, the odd ones dogs."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i in images:
            for name, data in ((f"{i:04}.png", png(i)), (f"{i:04}.cls", ("cat", "dog")[i % 2].encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


SHARDS = {f"set-{k:03}.tar": tar(range(start, stop)) for k, (start, stop) in enumerate([(0, 7), (7, 8), (8, 20)])}


def check(url: str) -> None:
    """A source of SHARDS gives all their images, in order, with their labels."""
    source = open_source(url)
    assert list(source.names) == [
        *(f"set-000.tar/{i:04}.png" for i in range(7)),
        "set-001.tar/0007.png",
        *(f"set-002.tar/{i:04}.png" for i in range(8, 20)),
    ]
    assert source.resolved == url
    assert read_labels(source, "auto")[0] == ("cat", "dog")
    assert source.labels is not None
    assert source.labels.tolist() == [i % 2 for i in range(20)]
    assert source.stamp()[1] == sum(map(len, SHARDS.values()))
    for i in (19, 0, 7):
        want = np.asarray(Image.open(io.BytesIO(png(i)))).transpose(2, 0, 1)
        assert (decode(lambda i=i: source.open(i), ImageFormat(3, 16, 16), (0, 0, 0))[0] == want).all()


# S3


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The environment that leads to a bucket called pictures, with SHARDS below the folder sets."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    import s3fs

    where = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    system = s3fs.S3FileSystem(
        endpoint_url=where["AWS_ENDPOINT_URL"], key="somebody", secret="something", skip_instance_cache=True
    )
    system.mkdir("pictures")
    for name, data in SHARDS.items():
        system.pipe(f"pictures/sets/{name}", data)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for i in range(4):
            out.writestr(f"in/{i}.png", png(i))
    system.pipe("pictures/some.zip", archive.getvalue())
    yield where
    server.stop()


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # which remembers the environment of before


@pytest.mark.usefixtures("bucket")
def test_s3_shards_by_braces_pattern_and_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ("s3://pictures/sets/set-{000..002}.tar", "s3://pictures/sets/set-*.tar", "s3://pictures/sets/")
    for url in urls:
        check_source(url)
        check(url)
    monkeypatch.setattr(remote, "_MIN_LISTED", 2)  # from which on a folder's listing is asked for
    check(urls[0])
    with pytest.raises(RequestError, match=r"set-003\.tar is not there"):
        open_source("s3://pictures/sets/set-{000..003}.tar")
    pieces = list((Path(os.environ["UNFOG_CACHE"]) / "shards").glob("*.npz"))
    assert len(pieces) == 3, "a shard is gone through once, however it is found"


@pytest.mark.usefixtures("bucket")
def test_s3_zip_is_read_in_place() -> None:
    source = open_source("s3://pictures/some.zip")
    assert list(source.names) == [f"in/{i}.png" for i in range(4)]
    want = np.asarray(Image.open(io.BytesIO(png(3))))
    assert (np.asarray(source.open(3)) == want).all()


@pytest.mark.parametrize("error", [TimeoutError(), OSError("no route")])
def test_a_server_that_is_not_there_may_be_a_forgotten_endpoint(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    remedy = ", or set AWS_ENDPOINT_URL for a server other than Amazon's"
    assert describe_remote_error(error, "s3://bucket/a.tar").endswith(f"check the network and try again{remedy}")
    assert remedy not in describe_remote_error(error, "https://host/a.tar")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    assert remedy not in describe_remote_error(error, "s3://bucket/a.tar")


@pytest.mark.usefixtures("bucket")
def test_s3_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"set-003\.tar is not there.*AWS_ENDPOINT_URL"):
        open_source("s3://pictures/sets/set-{000..003}.tar")
    with pytest.raises(
        RequestError, match=r"nothing is there under s3://pictures/none/\*\.tar, or there is no such bucket"
    ):
        open_source("s3://pictures/none/")
    with pytest.raises(RequestError, match="is not there"):
        open_source("s3://no-such-bucket/a.tar")


@pytest.mark.usefixtures("bucket")
def test_train_from_s3_and_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = "s3://pictures/sets/set-{000..002}.tar"
    settings = {"size": 8, "batch": 4, "network": TRANSFORMER, "device": "cpu", "precision": "fp32", **FEW_PICTURES}
    run = unfog.train(url, out=tmp_path / "run", steps=2, **settings)
    assert "20 images in 2 classes; 20 used" in capfd.readouterr().err
    assert tuple(run.classes) == ("cat", "dog")
    assert f'source = "{url}"' in (tmp_path / "run/config.toml").read_text()
    unfog.resume(tmp_path / "run", steps=3)


# The web


class Web(BaseHTTPRequestHandler):
    """SHARDS under /sets/, with ranges; /whole/ has none. Failures are what `faults` says of a path, each once."""

    faults: ClassVar[Counter[str]] = Counter()
    asked: ClassVar[list[tuple[str, str, str]]] = []
    etag = '"1"'
    expired = "(no signature)"
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # answers leave whole: in two pieces, the second would wait 40 ms for the first to be acknowledged

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        folder, _, name = self.path.partition("?")[0].lstrip("/").partition("/")
        wanted = self.headers.get("Range") or ""
        self.asked.append((self.command, name, wanted))
        if self.faults[f"{self.command} {name} {wanted}".strip()] > 0:
            self.faults[f"{self.command} {name} {wanted}".strip()] -= 1
            return self._send(503, b"busy" if with_body else b"", {})
        if self.path.endswith(self.expired):
            return self._send(403, b"", {})
        if name not in SHARDS:
            return self._send(404, b"", {})
        data, headers, status = SHARDS[name], {"ETag": self.etag}, 200
        if folder == "sets" and (match := re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)):
            first, last = int(match[1]), min(int(match[2]), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        return self._send(status, data, headers, with_body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(Web, "faults", Counter())
    monkeypatch.setattr(Web, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_http_shards(web: str) -> None:
    check(f"{web}/sets/set-{{000..002}}.tar")


def test_http_reads_headers_to_index_and_an_image_to_open_it(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARDS, "big.tar", big := _large_members())
    source = open_source(f"{web}/sets/big.tar")
    read = sum(_length(wanted) for _, _, wanted in Web.asked)
    assert read < len(big) / 2, "the payload of large members is passed over"
    Web.asked.clear()
    source.open(2)
    ((_, _, wanted),) = Web.asked
    assert _length(wanted) == 2**20
    Web.asked.clear()
    open_source(f"{web}/sets/big.tar?signature=another")
    assert all(_length(wanted) <= 2 for _, _, wanted in Web.asked), "an index is built once, whatever the signature"
    monkeypatch.setattr(Web, "etag", '"2"')
    Web.asked.clear()
    open_source(f"{web}/sets/big.tar")
    assert any(_length(wanted) > 2 for _, _, wanted in Web.asked), "and anew for another ETag"


def _large_members() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i in range(4):
            info = tarfile.TarInfo(f"{i}.png")
            info.size = 2**20
            archive.addfile(info, io.BytesIO(png(i).ljust(info.size, b"\0")))
    return file.getvalue()


def _length(wanted: str) -> int:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
    return int(match[2]) - int(match[1]) + 1 if match else 0


def test_what_fails_twice_is_read_the_third_time_and_else_unreachable_for_now(web: str) -> None:
    Web.faults["HEAD set-000.tar"] = Web.faults["GET set-000.tar"] = 1
    source = open_source(f"{web}/sets/set-000.tar")
    _, start, size = source.index.place(1)
    which = f"GET set-000.tar bytes={start}-{start + size - 1}"
    Web.faults[which] = 2
    assert source.open(1).size == (16, 16)
    Web.faults[which] = 3
    with pytest.raises(TransientImageError, match=r"3 tries .*503"):
        source.open(1)
    assert source.open(1).size == (16, 16)


@pytest.mark.parametrize(("status", "permanent"), [(404, True), (403, True), (408, False), (429, False), (503, False)])
def test_a_server_that_asks_for_patience_gets_it(status: int, permanent: bool) -> None:
    error = OSError("an answer")
    error.status = status  # type: ignore[attr-defined]
    assert is_permanent(error) == permanent


def test_the_first_look_at_a_server_is_tried_again_and_then_said(web: str) -> None:
    open_source(f"{web}/sets/set-000.tar")
    probe = next(f"GET set-000.tar {wanted}" for _, _, wanted in Web.asked if wanted.startswith("bytes=1-"))
    Web.faults[probe] = 2
    assert len(open_source(f"{web}/sets/set-000.tar").names) > 0
    Web.faults[probe] = 99
    with pytest.raises(RequestError, match=r"set-000\.tar could not be reached in 3 tries .*503"):
        open_source(f"{web}/sets/set-000.tar")


def test_a_zip_whose_signature_expires_meanwhile_is_no_smaller_set(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(bulk, "_CHUNK", 16)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for i in range(48):
            archive.writestr(f"{i:02}.png", png(i))
    monkeypatch.setitem(SHARDS, "a.zip", file.getvalue())

    def expire(done: int, total: int) -> None:
        monkeypatch.setattr(Web, "expired", "signature=old")

    with pytest.raises(RunError, match=r"403.*`unfog resume`"):
        prepare(open_source(f"{web}/sets/a.zip?signature=old"), Data(size=16, cache="disk"), expire)
    whole = prepare(open_source(f"{web}/sets/a.zip?signature=new"), Data(size=16, cache="disk"))
    assert (whole.report.used, whole.report.skipped) == (48, ())


def test_what_a_url_opens_with_is_in_the_settings_alone(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{web}/sets/set-{{000..002}}.tar?signature=SECRET".replace("http://", "http://me:SECRET@")
    settings = {
        "size": 8,
        "batch": 4,
        "network": TRANSFORMER,
        "steps": 1,
        "device": "cpu",
        "precision": "fp32",
    } | FEW_PICTURES
    run, pack = tmp_path / "run", tmp_path / "pack"
    unfog.train(url, out=run, **settings)
    assert (run / "config.toml").stat().st_mode & 0o077 == 0
    unfog.resume(run, source=url.replace("SECRET", "SECRET2"), steps=2)
    unfog.pack(url, out=pack, size=8)
    cache = Path(os.environ["UNFOG_CACHE"])
    (seen,) = cache.glob("shards/*.seen.json")
    assert "set-000.tar" in seen.read_text()
    assert seen.stat().st_mode & 0o077 == 0
    files = [path for place in (run, pack, cache) for path in place.rglob("*") if path.is_file()]
    assert [path for path in files if b"SECRET" in path.read_bytes()] == [run / "config.toml"]
    assert str(web.partition("//")[2]) in (run / "report.html").read_text()
    monkeypatch.setattr(Web, "expired", "signature=SECRET2")
    with pytest.raises(RequestError, match=r"set-000\.tar is refused \(the server answers 403\)") as refused:
        unfog.resume(run, steps=3)
    assert "SECRET" not in str(refused.value)


def test_a_server_without_ranges_is_refused_before_it_sends_everything(web: str) -> None:
    with pytest.raises(RequestError, match="serves no parts of a file"):
        open_source(f"{web}/whole/set-002.tar")
    with pytest.raises(RequestError, match=r"set-009\.tar is not there"):
        open_source(f"{web}/sets/set-009.tar")
    with pytest.raises(RequestError, match="could not be reached in 3 tries"):
        open_source("http://127.0.0.1:9/a.tar")


def test_urls_that_nothing_reads() -> None:
    with pytest.raises(RequestError, match=r"ftp://x/a.tar has an unknown protocol; give s3://"):
        check_source("ftp://x/a.tar")
    with pytest.raises(RequestError, match=r"a\.jpg, but only \.tar shards"):
        check_source("https://x/a.jpg")
    with pytest.raises(RequestError, match=r"a\.tar\.gz is compressed as a whole.*plain \.tar"):
        check_source("https://x/a.tar.gz")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfog.data.sources.registry.find_spec", lambda name: None)
    with pytest.raises(
        RequestError, match=re.escape(f"s3:// needs s3fs, which is not installed: {install_command('s3')}")
    ):
        check_source("s3://pictures/a.tar")
