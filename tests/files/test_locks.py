"""Locks of folders: one at a time, given back by the system, and nothing left lying in the folder."""

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from unfog.errors import RequestError, RunError
from unfog.files import locks
from unfog.files.cache_folder import clear_cache, hold, release
from unfog.files.locks import LOCK, OwnedError, Owner, is_at, lock_alone, lock_of, lock_shared, started_at
from unfog.files.work_folder import whole_folder, work_folder
from unfog.process.run_folder import RunFolder
from waiting import wait_until

HOLDS = """
import sys, time
from pathlib import Path
from unfog.files.locks import lock_of
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


# Locks that a file system grants to everybody, as NFS mounted with `nolock` does among machines.
LYING = "import fcntl; fcntl.flock = lambda *_: None\n"
ENTERS = """
import sys, time
from pathlib import Path
from unfog.files.locks import OwnedError
from unfog.files.locks import lock_of
sys.stdin.readline()
try:
    with lock_of(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except OwnedError as error:
    print("refused", error.owner and error.owner.pid, flush=True)
"""


@pytest.fixture
def enter():
    """Starts processes that lock a folder at a line of their input, and give it back at another one."""
    started = []

    def start(folder: Path, before: str = LYING) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", before + ENTERS, str(folder)]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def lie(monkeypatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def test_with_locks_that_lie_the_mark_of_a_living_process_refuses_and_that_of_a_dead_one_does_not(
    tmp_path, monkeypatch, enter
):
    first = enter(tmp_path)
    say(first)
    assert first.stdout.readline() == "held\n"
    lie(monkeypatch)
    with pytest.raises(OwnedError) as refused, lock_of(tmp_path):
        pass
    assert refused.value.owner.pid == first.pid
    first.kill()  # a process that has ended and was not waited for still has its number
    began = time.monotonic()
    while first.poll() is None:
        time.sleep(0.01)
    with lock_of(tmp_path) as lock:
        assert not lock.supported
        assert lock.before.pid == first.pid
    assert time.monotonic() - began < locks.OVERDUE / 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True])
def test_of_processes_that_come_at_once_one_gets_the_folder(tmp_path, enter, stale):
    if stale:
        gone = enter(tmp_path)
        say(gone)
        gone.stdout.readline()
        gone.kill()
        gone.wait()
    processes = [enter(tmp_path) for _ in range(4)]
    for process in processes:
        say(process)
    said = sorted(process.stdout.readline().split()[0] for process in processes)
    assert said == ["held", "refused", "refused", "refused"]


def marked(folder: Path, **changes: object) -> Owner:
    """Leave the mark of a process that was killed."""
    owner = replace(Owner.this_process(), **changes)
    (folder / LOCK).write_text(f"{owner} {folder.stat().st_dev}")
    return owner


def test_a_process_number_that_was_given_to_another_process_owns_nothing(tmp_path, monkeypatch):
    lie(monkeypatch)
    marked(tmp_path, pid=os.getppid(), start=1)
    with lock_of(tmp_path) as lock:
        assert lock.before.pid == os.getppid()
    marked(tmp_path, pid=os.getppid(), start=started_at(os.getppid()))
    with pytest.raises(OwnedError), lock_of(tmp_path):
        pass


def test_a_process_that_has_ended_and_was_not_waited_for_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    owner = replace(Owner.this_process(), pid=process.pid, start=started_at(process.pid))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_gone()
    process.wait()
    assert owner.is_gone()


def test_an_owner_on_another_machine_is_watched_until_its_mark_is_overdue(tmp_path, monkeypatch):
    marked(tmp_path, kernel="0" * 8, host="elsewhere")
    os.utime(tmp_path / LOCK, (time.time() - 60,) * 2)
    with lock_of(tmp_path):  # overdue for long
        pass
    monkeypatch.setattr(locks, "OVERDUE", 0.5)
    began = time.monotonic()
    marked(tmp_path, kernel="0" * 8, host="elsewhere")
    with lock_of(tmp_path):
        assert time.monotonic() - began > 0.3
    monkeypatch.setattr(locks, "OVERDUE", 20)
    marked(tmp_path, kernel="0" * 8, host="elsewhere")
    alive = threading.Timer(0.2, os.utime, [tmp_path / LOCK])
    alive.start()
    with pytest.raises(OwnedError, match="locked"), lock_of(tmp_path):
        pass
    alive.join()


def test_a_lock_that_works_needs_no_other_sign_of_processes_of_this_machine(tmp_path):
    """As after a container was killed, whose process numbers say nothing here."""
    marked(tmp_path, space=1, pid=1)
    began = time.monotonic()
    with lock_of(tmp_path) as lock:
        assert lock.supported
    assert time.monotonic() - began < locks.OVERDUE / 2


def test_who_is_taken_over_finds_out_and_leaves_the_mark_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "REFRESH", 0.05)
    with lock_of(tmp_path) as lock:
        assert lock.new_owner() is None
        other = marked(tmp_path, pid=1)
        assert lock.new_owner() == other
        wait_until(lambda: lock.lost)
        with pytest.raises(RunError, match="taken over"):
            RunFolder(tmp_path).check_owned(lock)
    assert str(other) in (tmp_path / LOCK).read_text()


def test_a_mark_is_refreshed(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "REFRESH", 0.05)
    with lock_of(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        wait_until(lambda: (tmp_path / LOCK).stat().st_mtime > 0)


def test_a_file_system_that_does_not_answer_is_given_up_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_SAY_AFTER", 0.1)
    monkeypatch.setattr(locks, "_GIVE_UP_AFTER", 0.3)
    monkeypatch.setattr(locks._flock, "__defaults__", (0.3,))
    monkeypatch.setattr(locks, "_silent_for", {})
    monkeypatch.setattr(fcntl, "flock", lambda *_: time.sleep(20))
    said = []
    monkeypatch.setattr(locks, "listener", said.append)
    with lock_of(tmp_path) as lock:
        assert not lock.supported
        with pytest.raises(OwnedError), lock_of(tmp_path):
            pass
    assert len(said) == 1
    assert "waiting for a lock" in said[0]
    assert str(tmp_path) in said[0]


def test_a_mark_of_the_cache_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path))
    entry = tmp_path / ("a" * 32)
    hold(entry)
    release(entry)
    with lock_alone(tmp_path / ".used" / entry.name) as alone:
        assert alone
        began = time.monotonic()
        hold(entry)
        with pytest.raises(BlockingIOError):
            lock_shared(tmp_path / ".used" / entry.name)
        assert time.monotonic() - began < 10


def test_locks_that_lie_evict_nothing_that_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path))
    entry = tmp_path / ("a" * 32)
    entry.mkdir()
    (entry / "pixels.u8").touch()
    lie(monkeypatch)
    hold(entry)
    assert [left.path for left in clear_cache()] == [entry]
    release(entry)


def test_a_work_folder_is_taken_over_from_a_dead_process_alone(tmp_path):
    target, rest = tmp_path / "target", tmp_path / "target.partial"
    dead = tmp_path / f"target.{replace(Owner.this_process(), pid=os.getppid(), start=1)}.partial"
    dead.mkdir()
    (dead / "done").touch()
    with work_folder(target, rest) as own:
        assert (own / "done").exists()
        assert not dead.exists()
        with pytest.raises(OwnedError), work_folder(target, rest):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["target.partial"]  # for the next one to go on with
    with work_folder(target, rest) as own:
        own.rename(target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    with work_folder(tmp_path / "other", rest):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_of_two_that_write_the_same_folder_the_first_one_stays(tmp_path):
    other = tmp_path / f".out.{replace(Owner.this_process(), pid=os.getppid(), start=1)}.partial"
    other.mkdir()
    (other / "half").touch()
    late = whole_folder(tmp_path / "out")
    assert [path.name for path in late.__enter__().iterdir()] == [LOCK]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").touch()
    with pytest.raises(OSError, match="has written it meanwhile"):
        late.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


def test_the_heartbeat_of_the_process_before_does_not_refuse(tmp_path):
    """Its number may be that of another process by now."""
    beat = {"time": datetime.now(UTC).isoformat(), "pid": os.getppid(), "host": socket.gethostname(), "next": 5}
    (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    with pytest.raises(RequestError, match="another process"), RunFolder(tmp_path).locked():
        pass
    marked(tmp_path, pid=os.getppid(), start=1)
    with RunFolder(tmp_path).locked():
        pass
