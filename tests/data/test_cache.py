"""The cache folder has a limit, and `unfog cache` lists and clears it."""

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_bytes import png
from unfog.cli.main import main
from unfog.config.requests.cache import CacheRequest
from unfog.data.dataset import ImageSet
from unfog.data.packs.latent_cache import EncodeJob
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.arrays import ArraySource
from unfog.data.sources.registry import open_source
from unfog.data.webdataset.remote_shards import ByteRangeCache
from unfog.errors import Interrupted, RequestError
from unfog.evaluation.feature_networks import inception_path
from unfog.evaluation.features import compute_features, compute_statistics, open_features
from unfog.files.cache_folder import (
    CacheEntry,
    cache_folder,
    cache_limit,
    clear_cache,
    fits_limit,
    hold,
    is_private,
    make_room,
    release,
)

MB = 2**20


FILES = {"latents": "latents.f16", "feature": "00000000.safetensors", "members": f"{'e' * 32}-000000.members"}


def entry(name: str, megabytes: int, used: int) -> Path:
    """An entry that was used last so many hours ago."""
    folder = cache_folder() / name
    folder.mkdir(parents=True)
    (folder / FILES.get(name[:7], "pixels.u8")).write_bytes(os.urandom(megabytes * MB))
    hold(folder)
    release(folder)
    mark = cache_folder() / ".used" / name.replace("/", "-")
    os.utime(mark, (mark.stat().st_mtime - used * 3600,) * 2)
    return folder


@pytest.fixture
def four() -> list[Path]:
    kinds = ["a" * 32, f"latents-{'b' * 32}", f"features/{'c' * 32}", "members"]
    return [entry(name, 1, used) for name, used in zip(kinds, (3, 1, 4, 2))]


def test_what_was_used_least_recently_goes_first(four: list[Path]) -> None:
    others = cache_folder() / "inception-2015-12-05.pt"
    others.write_bytes(bytes(4 * MB))
    assert [found.path for found in CacheEntry.all()] == [four[i] for i in (2, 0, 3, 1)]
    assert make_room(needed=MB, limit=3.5 * MB)
    assert [path.exists() for path in four] == [False, True, False, True]
    assert make_room(needed=0, limit=0)
    assert others.exists()
    assert not CacheEntry.all()


def test_nothing_goes_for_what_does_not_fit_even_then(four: list[Path]) -> None:
    hold(four[3])
    assert not make_room(needed=3 * MB, limit=3.5 * MB)
    assert all(path.exists() for path in four)
    assert make_room(needed=2 * MB, limit=3.5 * MB)
    assert [path.exists() for path in four] == [False, False, False, True]
    release(four[3])


@pytest.mark.parametrize(
    "name",
    [
        "a" * 32,
        f"latents-{'b' * 32}",
        f"features/{'c' * 32}",
        "members",
        "shards",
        "hf",
        f"array-{'d' * 32}.npz",
        f"images-{'d' * 32}.images",
    ],
)
def test_a_folder_of_somebody_else_stays(name: str) -> None:
    """UNFOG_CACHE may be a home folder, and a name of ours a folder of theirs."""
    theirs = cache_folder() / name / "thesis.tex"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("years of work")
    beside = cache_folder() / f"{'e' * 32}.json"
    beside.write_text('{"see": "nothing"}')
    marks = cache_folder() / ".used/notes"
    marks.parent.mkdir()
    marks.touch()
    hold(cache_folder() / name)
    release(cache_folder() / name)
    assert not CacheEntry.all()
    assert make_room(limit=0)
    assert not clear_cache()
    for path in (theirs, beside, marks):
        assert path.exists()


@pytest.mark.parametrize("name", ["a" * 32, f"latents-{'b' * 32}", f"features/{'c' * 32}", "members"])
def test_one_file_of_somebody_else_keeps_an_entry(name: str) -> None:
    folder = entry(name, 1, used=1)
    (found,) = CacheEntry.all()
    (folder / "notes").mkdir()
    assert not found.remove()
    assert not CacheEntry.all()
    (folder / "notes").rmdir()
    assert found.remove()


def test_links_lead_to_no_entry(tmp_path: Path) -> None:
    for name in ("a" * 32, f"features/{'c' * 32}", ".used/file"):
        (tmp_path / "outside" / name).mkdir(parents=True)
        (tmp_path / "outside" / name / "pixels.u8").touch()
        (tmp_path / "outside" / name / "00000000.safetensors").touch()
    cache_folder().mkdir(parents=True, exist_ok=True)
    before = sorted((tmp_path / "outside").rglob("*"))
    for name in ("a" * 32, "features", ".used"):
        (cache_folder() / name).symlink_to(tmp_path / "outside" / name)
    hold(cache_folder() / "members")
    assert not CacheEntry.all()
    assert make_room(limit=0)
    assert not clear_cache()
    assert sorted((tmp_path / "outside").rglob("*")) == before


@pytest.mark.slow
def test_what_the_datasets_library_keeps_goes_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [png(Image.new("L", (8, 8), i)) for i in range(3)]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "set.parquet")
    source = open_source(str(tmp_path / "set.parquet"))
    release(cache_folder() / "hf")
    (found,) = CacheEntry.all()
    assert found.kind == "Hugging Face sets"
    assert not make_room(limit=0)
    assert not fits_limit(cache_limit() - found.nbytes / 2)
    assert found.path.exists()
    del source
    with pytest.raises(SystemExit):
        main(["cache", "--clear"])
    assert f"removes {found.path}" in capsys.readouterr().err
    assert not found.path.exists()


@pytest.mark.slow
def test_an_entry_in_use_stays(four: list[Path]) -> None:
    code = "import sys, pathlib, unfog.files.cache_folder as c\n"
    code += "c.hold(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, four[2]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        hold(four[0])  # of this process
        assert not make_room(limit=0)
        assert [path.exists() for path in four] == [True, False, True, False]
        assert len(clear_cache()) == 2
        process.communicate("\n")
    assert [found.path for found in clear_cache()] == [four[0]]
    release(four[0])
    assert not clear_cache()


def stopped(done: int, total: int) -> None:
    if done > total / 2:
        raise Interrupted


@pytest.mark.slow
def test_all_that_unfog_writes_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), np.uint8)
    images = ImageSet(pixels, [str(i) for i in range(60)])
    features = open_features("pixels")
    compute_statistics(compute_features(pixels, features, "key"), features, "key")
    for key, progress in (("a" * 32, lambda done, total: None), ("b" * 32, stopped)):
        with suppress(Interrupted):
            EncodeJob([images], (3, 4, 4), 1, lambda x: x[..., ::2, ::2] / 255, 10).load_or_encode(key, progress)
    (cache_folder() / "members").mkdir()
    ByteRangeCache(cache_folder() / "members", 10**9, 10**6).write("c" * 32, 512, b"bytes")
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        (tmp_path / "0.png").write_bytes(png(Image.new("L", (8, 8), 1)))
        archive.add(tmp_path / "0.png", "0.png")
    open_source(str(tmp_path / "set.tar"))
    ArraySource.store(pixels)
    np.save(tmp_path / "set.npy", pixels)
    source = open_source(str(tmp_path / "set.npy"))
    prepare(source, Data(size=8, cache="disk"))
    (finished,) = cache_folder().glob("*/pack.json")
    finished.with_name("pack.json.partial").touch()  # of a process that was killed
    with suppress(Interrupted):
        prepare(source, Data(size=4, cache="disk"), stopped)
    (cache_folder() / "shards" / f"{'f' * 32}.json.12-34.partial").touch()
    kinds = sorted(found.kind for found in CacheEntry.all())
    several = ["decoded images"] * 2 + ["features", "index of shards"] + ["latents"] * 2
    assert kinds == ["array", *several, "read from remote shards"]


def test_decoded_images_keep_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "set.npz", images=np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), np.uint8))
    source, settings = open_source(str(tmp_path / "set.npz")), Data(size=32, cache="disk")
    old = entry("a" * 32, 1, used=5)
    monkeypatch.setenv("UNFOG_CACHE_LIMIT", "0.001")
    dataset = prepare(source, settings)
    assert not old.exists()
    (made,) = [found for found in CacheEntry.all() if found.kind == "decoded images"]
    assert made.in_use()
    assert not make_room(limit=0)
    assert dataset.train.pixels[0].shape == (3, 32, 32)
    monkeypatch.setenv("UNFOG_CACHE_LIMIT", "0.0001")
    with pytest.raises(RequestError, match="UNFOG_CACHE_LIMIT higher"):
        prepare(source, Data(size=16, cache="disk"))
    monkeypatch.setattr("unfog.data.prepare._MEMORY_FILES", 100)
    assert "the cache may hold (UNFOG_CACHE_LIMIT)" in prepare(source, Data(size=16), to_draw=1000).placement


def test_the_command_lists_and_clears(four: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    redirect = cache_folder() / f"{'d' * 32}.json"
    redirect.write_text(f'{{"see": "{"a" * 32}"}}')
    hold(four[1])
    with pytest.raises(SystemExit):
        main(["cache"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{cache_folder()}: 4 entries, 4.2 MB of at most 50.0 GB (UNFOG_CACHE_LIMIT)"
    assert lines[2].split() == ["1.0", "MB", "in", "use", "latents", four[1].name]
    assert "4 h 00 min ago" in lines[5]
    assert redirect.exists()
    with pytest.raises(SystemExit) as ended:
        main(["cache", "--clear"])
    assert ended.value.code == 0
    output = capsys.readouterr()
    assert "1 entry cannot be removed now" in output.err
    assert [path.exists() for path in four] == [False, True, False, False]
    assert not redirect.exists()
    release(four[1])
    with pytest.raises(SystemExit):
        main(["cache", "--limit", "0"])
    assert not four[1].exists()


def test_entries_from_before_a_setting_keep_their_names() -> None:
    assert Data().later_key == ()
    assert Data(range=(0.0, 1.0), clip=True).later_key == ((0.0, 1.0), "clip")
    usual = {"range": (), "clip": False, "dtype": "auto", "axes": "auto", "unknown": "none", "slices": "axial"}
    assert Data.later_of({}) == usual
    assert Data.later_of({"range": [0, 4095], "clip": True}) == usual | {"range": (0.0, 4095.0), "clip": True}


def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("much", "-1", "nan"):
        monkeypatch.setenv("UNFOG_CACHE_LIMIT", given)
        with pytest.raises(RequestError, match="not a size; give gigabytes"):
            make_room()
    with pytest.raises(RequestError, match="at least 0"):
        CacheRequest(limit=-1)
    with pytest.raises(RequestError, match="--clear removes everything"):
        CacheRequest(clear=True, limit=1)


def as_user(user: int, folder: Path, **variables: str) -> str:
    """Return what `cache_folder` gives a user, or why it refuses."""
    code = (
        "import os, sys; user = int(sys.argv[1])\n"
        "os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)\n"
        "try: print(c.cache_folder(), oct(c.cache_folder().stat().st_mode)[-3:])\n"
        "except c.RequestError as error: print(error)"
    )
    # Imported before the user changes, who may not read the program.
    words = [sys.executable, "-c", f"import unfog.files.cache_folder as c\n{code}", str(user)]
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), **variables}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True, timeout=300)
    return done.stdout + done.stderr


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A folder like /tmp, which every user can reach."""
    if os.geteuid() != 0:
        pytest.skip("becomes other users, which root may")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.mark.slow
def test_a_user_without_a_writable_home_has_a_private_folder(shared_place: Path) -> None:
    assert as_user(12345, shared_place, HOME="/nonexistent") == f"{shared_place}/unfog-12345 700\n"
    assert as_user(12346, shared_place, HOME="/nonexistent") == f"{shared_place}/unfog-12346 700\n"
    (shared_place / "unfog-12347").mkdir()
    os.chown(shared_place / "unfog-12347", 65534, 65534)
    said = as_user(12347, shared_place, HOME="/nonexistent")
    assert "is user 65534's" in said
    assert "UNFOG_CACHE" in said


@pytest.mark.parametrize("user", [0, 12345])
@pytest.mark.slow
def test_a_cache_that_others_may_exchange_is_refused(shared_place: Path, user: int) -> None:
    def told(mode: int, owner: int, above: int, above_owner: int = 0) -> str:
        cache = shared_place / "above/cache"
        cache.mkdir(parents=True, exist_ok=True)
        os.chmod(cache, mode)
        os.chown(cache, owner, 0)
        os.chmod(cache.parent, above)
        os.chown(cache.parent, above_owner, 0)
        return as_user(user, shared_place, UNFOG_CACHE=str(cache))

    other = 54321
    assert "not used" not in told(0o700, user, 0o755)
    assert "not used" not in told(0o755, other, 0o755)  # a group's, named by a person
    assert "not used" not in told(0o755, 0, 0o1777)
    assert "not used" in told(0o755, other, 0o1777)  # its name could be taken by everybody
    assert "not used" in told(0o777, other, 0o755)
    assert "not used" in told(0o700, user, 0o777, other)
    said = told(0o777, 0, 0o755)  # as an empty volume of a container has it
    assert "not used" not in said
    assert said.count("every user may write") == 1


def test_only_a_private_folder_takes_compiled_code(shared_place: Path) -> None:
    cache = shared_place / "cache"
    (cache / "compiled").mkdir(mode=0o700, parents=True)
    assert is_private(cache / "compiled")
    for above, owner in ((0o777, 0), (0o755, 54321)):
        os.chmod(cache, above)
        os.chown(cache, owner, 0)
        assert not is_private(cache / "compiled")


def test_pixels_that_were_exchanged_are_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(png(Image.new("L", (8, 8), 10 * i)))
    first = np.array(prepare(open_source(str(tmp_path)), Data(size=8, cache="disk")).train.pixels)
    (entry,) = (found.path for found in CacheEntry.all())
    (entry / "pixels.u8").write_bytes(b"\xff" * (entry / "pixels.u8").stat().st_size)
    monkeypatch.setattr("unfog.data.cache._compared", set())  # as in another process
    release(entry)
    again = prepare(open_source(str(tmp_path)), Data(size=8, cache="disk")).train.pixels
    assert np.array_equal(again, first)


def test_a_cache_that_is_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for given, said in ((str(tmp_path / "file"), "is not a folder"), ("~no-such-user/x", "no such home")):
        monkeypatch.setenv("UNFOG_CACHE", given)
        with pytest.raises(RequestError, match=rf"UNFOG_CACHE.*{said}"):
            cache_folder()
    monkeypatch.delenv("UNFOG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "s3://bucket")
    with pytest.raises(RequestError, match=r"XDG_CACHE_HOME = .* is an address"):
        cache_folder()


@pytest.mark.parametrize("given", ["s3://bucket/cache", "https://me:SECRET@host/cache?key=SECRET", "gs:/bucket"])
def test_a_cache_at_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNFOG_CACHE", given)
    with pytest.raises(RequestError, match=r"UNFOG_CACHE = .*is an address") as refused:
        cache_folder()
    assert "SECRET" not in str(refused.value)
    monkeypatch.setenv("UNFOG_INCEPTION", given)
    with pytest.raises(RequestError, match=r"UNFOG_INCEPTION = .*is an address"):
        inception_path()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
