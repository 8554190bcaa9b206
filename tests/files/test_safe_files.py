"""A folder of a stranger: a link, a pipe, a device or a folder under its names leads nowhere; nothing waits for it."""

import ast
import errno
import inspect
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import unfog
from hostile import KINDS, plant
from package_source import trees
from unfog.files import safe_files
from unfog.files.locks import lock_of
from unfog.files.safe_files import (
    check_folder,
    discard,
    make_folder,
    move,
    open_file,
    read_file,
    remove,
    remove_tree,
    replace_file,
    write_atomic,
)
from unfog.files.work_folder import whole_folder

SOURCE = Path(unfog.__file__).parent
# Methods and functions that write, rename or delete by name.
WRITERS = {"write_text", "write_bytes", "touch", "unlink", "rename", "symlink_to", "hardlink_to", "tofile", "truncate"}
MODULES = {"os": {"replace", "rename", "remove", "unlink", "truncate", "link", "symlink", "makedirs"}}
MODULES["shutil"] = {"rmtree", "move", "copytree", "copy", "copy2", "copyfile"}
BY_NAME = {"save_file": 1, "copyfile": 1}  # library functions that write by name, and which argument that is
WITHIN_NEW = ("new_file",)
WRITING_NAMES = {"open", "fdopen", "replace"}.union(WRITERS, BY_NAME, *MODULES.values())


def _writes(call: ast.Call) -> bool:
    """Whether a call opens for writing, or writes, renames or deletes by name."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in WRITING_NAMES:
        return False
    text = ast.unparse(call)
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name in BY_NAME:
        return not ast.unparse(call.args[BY_NAME[name]]).startswith(WITHIN_NEW)
    if owner in MODULES:
        return name in MODULES[owner]
    if owner == "os" or "os.devnull" in text:
        return name == "open" and any(word in text for word in ("WRONLY", "RDWR", "CREAT")) and "devnull" not in text
    if name in ("open", "fdopen"):
        modes = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
        return any(isinstance(mode, str) and set(mode) & set("wax+") and len(mode) < 4 for mode in modes)
    if name == "replace" and owner:
        return len(call.args) == 1 and not call.keywords  # of a path; a text is given two
    if name == "truncate":
        return owner in ("os", "path")
    return name in WRITERS and bool(owner)


@pytest.mark.slow
def test_nothing_else_writes_by_name():
    found = []
    for place, tree in trees().items():
        if Path(place).name == "safe_files.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _writes(node):
                found.append(f"{place}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not found, "\n".join(found)


# Library functions that read by name; they may be given a safe path, an open file or bytes in memory instead.
LIBRARIES = {"np.load", "np.memmap", "np.fromfile", "load_file", "safe_open", "torch.load", "json.load", "tomllib.load"}
LIBRARIES |= {"torch.jit.load", "torch.export.load", "zipfile.ZipFile", "onnxruntime.InferenceSession"}
READING_NAMES = {"open", "read_bytes", "read_text", *(library.rpartition(".")[2] for library in LIBRARIES)}
GIVEN_SAFELY = re.compile(r"(str\()?(regular|tensor)_file\(|(io\.)?BytesIO\(|BlockReader\(|(file|facts|stored)\b")
# Modules that read files by name, and why. All others read by `safe_files`, below the folder that a person has named.
READ_BY_NAME = {
    "checks/gpu_checks.py": "a file of /proc",
    "config/advice.py": "a file of this package",
    "config/toml.py": "a file that --config names may be a link or a shell's pipe; a pipe in a run is refused there",
    "data/file_rows.py": "a file of /proc",
    "data/containers/netcdf3.py": "a set that a person names, which may lie behind links",
    "data/scans/": "images that a person names, which may lie behind links",
    "data/sources/": "images that a person names, which may lie behind links",
    "device/cores.py": "files of /proc and /sys",
    "errors.py": "the description of this installed package",
    "evaluation/feature_networks.py": "a network that a person names",
    "export/denoiser_torch.py": "copied into an export, where unfog may be missing",
    "export/sample_onnx.py": "copied into an export, where unfog may be missing",
    "export/sample_torch.py": "copied into an export, where unfog may be missing",
    "export/source_code.py": "a file of this package",
    "pipeline/denoising_pictures.py": "a file that it wrote into a temporary folder of its own",
    "process/command_clock.py": "a file of /proc",
    "process/identity.py": "files of /proc",
    "process/device.py": "files of /proc and /sys",
    "reporting/page/bundle.py": "files of this package",
    "serve/page.py": "files of this package",
    "serve/run_files.py": "a file of /proc",
}


def _reads_by_name(call: ast.Call) -> bool:
    function, first = call.func, ast.unparse(call.args[0]) if call.args else ""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in READING_NAMES:
        return False
    if ast.unparse(function) in LIBRARIES:
        return not GIVEN_SAFELY.match(first)
    if name == "open":
        return "devnull" not in first if isinstance(function, ast.Name) else first in ("", "'r'", "'rb'")
    return name in ("read_bytes", "read_text")


def test_nothing_else_reads_by_name():
    found = []
    for place, tree in trees().items():
        if Path(place).name == "safe_files.py" or place.startswith(tuple(READ_BY_NAME)):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _reads_by_name(node):
                found.append(f"{place}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_pillow_is_always_given_the_formats_that_it_may_read():
    """Among its readers is one of PostScript, which starts Ghostscript on what the file says."""
    found = []
    for place, tree in trees().items():
        for node in ast.walk(tree):
            opens = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "open"
            opens = opens and ast.unparse(node.func).endswith("Image.open")
            if opens and not any(one.arg == "formats" for one in node.keywords):
                found.append(f"{place}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not found, "\n".join(found)


def test_the_root_has_no_default():
    """A guard that may be left out is left out once."""
    for name, function in inspect.getmembers(safe_files, inspect.isfunction):
        if function.__module__ == safe_files.__name__ and name not in ("disk_usage", "_explained"):
            names = [one.name for one in inspect.signature(function).parameters.values() if one.default is one.empty]
            assert "root" in names, name
    assert inspect.signature(read_file).parameters["limit"].default is inspect.Parameter.empty


@pytest.fixture(params=KINDS)
def planted(request, tmp_path):
    """Returns a function that plants something at a path, and at the end looks whether it was followed."""
    if request.param == "device" and os.geteuid() != 0:
        pytest.skip("devices are made by root")
    victim = tmp_path / "outside" / "victim"
    victim.parent.mkdir()
    victim.write_text("untouched")
    yield lambda path: plant(path, request.param, victim)
    assert [one.name for one in victim.parent.iterdir()] == ["victim"]
    assert victim.read_text() == "untouched"


def test_no_link_or_pipe_is_read_or_written(planted, tmp_path):
    path = tmp_path / "file"
    planted(path)
    for mode in ("rb", "r+b", "ab", "xb", "a+b"):
        with pytest.raises(OSError, match=r"link|pipe|folder|device|exists"):
            open_file(path, mode, path.parent)
    with pytest.raises(OSError, match=r"link|pipe|folder|device"):
        read_file(path, tmp_path, 10)


def test_writing_puts_a_file_in_the_place_of_a_link_or_pipe(planted, tmp_path, request):
    for name in ("file", "file.partial"):
        path = tmp_path / name
        planted(path)
        if path.is_dir():
            with pytest.raises(OSError, match="a folder"):
                write_atomic(tmp_path / "file", b"ours", tmp_path)
        else:
            write_atomic(tmp_path / "file", b"ours", tmp_path)
            assert (tmp_path / "file").read_bytes() == b"ours"
            assert not (tmp_path / "file").is_symlink()
        remove_tree(tmp_path / "file", tmp_path)
        assert not os.path.lexists(tmp_path / "file")


def test_no_folder_below_the_named_one_is_a_link(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "1.png").write_text("untouched")
    (tmp_path / "real").mkdir()
    run.symlink_to(tmp_path / "real")  # the folder that a person names may be one
    (run / "samples").symlink_to(outside)
    for act in (
        lambda: write_atomic(run / "samples/1.png", b"ours", run),
        lambda: make_folder(run / "samples/deep", run),
        lambda: check_folder(run / "samples", run),
        lambda: remove(run / "samples/1.png", run),
        lambda: move(run / "samples/1.png", run / "samples/2.png", run),
        lambda: open_file(run / "samples/1.png", "ab", run),
    ):
        with pytest.raises(OSError, match="a link"):
            act()
    remove_tree(run / "samples/1.png", run)
    assert [path.name for path in outside.iterdir()] == ["1.png"]
    make_folder(run / "denoising/deep", run)
    write_atomic(run / "denoising/deep/1.png", b"ours", run)
    assert (tmp_path / "real/denoising/deep/1.png").read_bytes() == b"ours"
    assert not check_folder(run / "averages", run)


@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_a_file_with_another_name_elsewhere_is_written_to_as_a_copy(tmp_path, mode):
    path, other = tmp_path / "run/events.jsonl", tmp_path / "backup"
    path.parent.mkdir()
    path.write_text("kept")
    path.chmod(0o640)
    os.link(path, other)
    with open_file(path, mode, path.parent) as file:
        file.seek(0, os.SEEK_END)
        file.write(b", and more")
    assert path.read_text() == "kept, and more"
    assert other.read_text() == "kept"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_lock_with_another_name_stays_one_lock(tmp_path):
    """A copy of a run by hard links, made while it is trained, must not let a second process train in it."""
    with lock_of(tmp_path):
        os.link(tmp_path / ".lock", tmp_path / "backup")
        with pytest.raises(BlockingIOError), lock_of(tmp_path):
            pass


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old", tmp_path, private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError), replace_file(path, tmp_path) as file:
        file.write("no bytes")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"old")]
    with pytest.raises(ValueError, match="over 2 bytes"):
        read_file(path, tmp_path, 2)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """A folder with all kinds of files, which cannot be renamed, and a folder outside that a link in it leads to."""
    folder, outside = tmp_path / "run/a", tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").write_text("untouched")
    (folder / "deep/file").write_text("kept")
    (folder / "deep/file").chmod(0o600)
    (folder / "link").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    if os.geteuid() == 0:
        os.mknod(folder / "device", 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero, which never ends

    def refuse(*args, **kwargs):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "replace", refuse)
    yield folder
    assert (outside / "file").read_text() == "untouched"


def test_a_folder_that_cannot_be_renamed_is_copied(refused):
    """overlayfs answers EXDEV for a folder of a layer below."""
    target = refused.with_name("b")
    move(refused, target, refused.parent)
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == {"deep", "deep/file", "link"}
    assert (target / "deep/file").read_text() == "kept"
    assert (target / "deep/file").stat().st_mode & 0o777 == 0o600
    assert (target / "link").is_symlink()
    assert not refused.exists()


def test_a_folder_that_cannot_be_renamed_is_removed_in_its_place(refused):
    discard(refused, refused.with_name("b"), refused.parent)
    assert not list(refused.parent.iterdir())


def test_a_copy_replaces_nothing(refused):
    target = refused.with_name("b")
    (target / "deep").mkdir(parents=True)
    (target / "deep/file").write_text("another")
    with pytest.raises(FileExistsError):
        move(refused, target, refused.parent)
    assert (target / "deep/file").read_text() == "another"
    assert (refused / "deep/file").read_text() == "kept"


OVERLAY = """
import sys
from pathlib import Path
from unfog.files.safe_files import discard, move
run = Path("merged/run")
move(run / "a", run / "b", run)
discard(run / "c", run / "d", run)
print(sorted(str(path.relative_to(run)) for path in run.rglob("*")))
"""


def test_on_a_real_overlay(tmp_path):
    for name in ("below/run/a", "below/run/c", "above", "work", "merged"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "below/run/a/file").write_text("kept")
    (tmp_path / "below/run/c/file").write_text("old")
    mount = 'mount -t overlay overlay -o lowerdir=below,upperdir=above,workdir=work merged || exit 99; exec "$@"'
    words = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", OVERLAY]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if done.returncode not in (0, 1) or "unshare" in done.stderr:
        pytest.skip("no overlay can be mounted here")
    assert done.stdout == "['b', 'b/file']\n", done.stderr


def test_a_folder_is_written_as_a_whole_or_not_at_all(tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder gives way
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "of a process that was killed").touch()
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
        assert not (tmp_path / "out" / "a").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    with pytest.raises(OSError, match="not empty"), whole_folder(tmp_path / "out"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"), whole_folder(tmp_path / "link") as folder:
        (folder / "a").touch()
    with suppress(KeyError), whole_folder(tmp_path / "new") as folder:
        (folder / "a").touch()
        raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_folder_that_is_written_whole_may_be_named_by_a_link(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "place")
    with whole_folder(tmp_path / "link") as folder:
        (folder / "a").touch()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "place"]


def test_an_error_without_a_name_gets_that_of_the_file(tmp_path):
    with pytest.raises(OSError, match=r"full.*result\.json"), replace_file(tmp_path / "result.json", tmp_path):
        raise OSError(errno.ENOSPC, "the disk is full")
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time_writes_a_whole_folder(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "old").touch()  # of a process that was killed
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
        with pytest.raises(OSError, match=r"another process is writing it.*out"), whole_folder(tmp_path / "out"):
            pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_stands_in_the_place_of_a_partial_folder_is_not_followed(planted, tmp_path):
    planted(tmp_path / ".out.partial")
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_two_that_write_one_file_at_once_both_succeed_and_old_leftovers_go(tmp_path):
    file = tmp_path / "report.html"
    with replace_file(file, tmp_path, shared=True) as first:
        first.write(b"half")
        write_atomic(file, b"second", tmp_path, shared=True)
        assert file.read_bytes() == b"second"
        first.write(b" and half")
    assert file.read_bytes() == b"half and half"
    (tmp_path / "report.html.12-34.partial").touch()
    os.utime(tmp_path / "report.html.12-34.partial", (0, 0))
    write_atomic(file, b"third", tmp_path, shared=True)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
