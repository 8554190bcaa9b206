"""Locks of folders: one at a time, given back by the system, and nothing left lying in the folder."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys

import pytest

from unfog.errors import RequestError
from unfog.locks import LOCK, is_at, lock_alone, lock_of, lock_shared
from unfog.process.run_folder import RunFolder

HOLDS = """
import sys, time
from pathlib import Path
from unfog.locks import lock_of
with lock_of(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_is_locked_is_a_file_that_is_there_only_meanwhile(tmp_path, monkeypatch):
    """Linux takes no lock on a folder of NFS, and one on a file only where that is open for writing."""
    kinds, lock = [], fcntl.flock

    def seen(descriptor, operation):
        kinds.append(
            (stat.S_ISREG(os.fstat(descriptor).st_mode), fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)
        )
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", seen)
    with lock_of(tmp_path) as ours:
        assert ours.supported
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        with pytest.raises(BlockingIOError), lock_of(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()
    assert kinds
    assert all(regular and access in (os.O_WRONLY, os.O_RDWR) for regular, access in kinds)
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_killed_holds_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(RequestError, match="another process"), RunFolder(tmp_path).create_locked(""):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / LOCK).exists()
    with RunFolder(tmp_path).create_locked(""):  # what it left does not make the folder one that is not empty
        pass
    assert not list(tmp_path.iterdir())


def test_whoever_opened_the_file_before_it_was_removed_locks_the_new_one(tmp_path, monkeypatch):
    first, lock = lock_of(tmp_path), fcntl.flock
    first.__enter__()

    def late(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        first.__exit__(None, None, None)  # between opening and locking
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_of(tmp_path) as ours:
        assert ours.supported
        with pytest.raises(BlockingIOError), lock_of(tmp_path):
            pass


def test_of_a_folder_that_was_moved_and_made_anew_the_new_lock_stays(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    with lock_of(folder):
        folder.rename(tmp_path / "b")
        folder.mkdir()
        other = lock_of(folder)
        other.__enter__()
    assert (folder / LOCK).exists()
    other.__exit__(None, None, None)


def test_without_locks_the_folder_is_had_all_the_same(tmp_path, monkeypatch):
    def refuses(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with lock_of(tmp_path) as lock:
        assert not lock.supported
    assert not list(tmp_path.iterdir())
    with RunFolder(tmp_path / "run").create_locked(""):
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()


@pytest.fixture
def replaced_while_waiting(tmp_path, monkeypatch):
    """A file that another process removes and makes anew between its opening and its locking."""
    path, lock = tmp_path / "mark", fcntl.flock
    path.touch()

    def late(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        path.touch()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    return path


def test_a_lock_alone_is_on_the_file_that_is_there_now(replaced_while_waiting):
    with lock_alone(replaced_while_waiting) as alone:
        assert alone
        with lock_alone(replaced_while_waiting) as other:
            assert not other


def test_a_shared_lock_leaves_no_descriptor_of_a_file_that_is_gone(replaced_while_waiting):
    before = len(os.listdir("/proc/self/fd"))
    descriptor = lock_shared(replaced_while_waiting)
    assert is_at(descriptor, replaced_while_waiting)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    with lock_alone(replaced_while_waiting) as alone:
        assert not alone
    os.close(descriptor)


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), KeyboardInterrupt()])
def test_a_shared_lock_that_fails_leaves_no_descriptor(tmp_path, monkeypatch, error):
    def refuses(descriptor, operation):
        raise error

    monkeypatch.setattr(fcntl, "flock", refuses)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(type(error)):
        lock_shared(tmp_path / "mark")
    assert len(os.listdir("/proc/self/fd")) == before
    if isinstance(error, OSError):
        with lock_alone(tmp_path / "mark") as alone:
            assert not alone
