"""Real processes that begin at once: each is forked from a server that has imported torch and all of Unfog.

Starting Python and importing torch costs two to three seconds of a core, which most tests of processes do not mean to
test. A forked process has its own number, signals, streams, environment and exit status like any other; what tests of
imports, of start-up or of memory need is a fresh interpreter instead.
"""

import atexit
import gc
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import reduction

import unfog

CONTEXT = multiprocessing.get_context("forkserver")
_MODULES = [module.name for module in pkgutil.walk_packages(unfog.__path__, "unfog.")]
# Optimizers import torch._dynamo when the first is made, which takes a second.
CONTEXT.set_forkserver_preload(
    ["no_collector", *(name for name in _MODULES if not name.endswith("__main__")), "torch._dynamo"]
)


class Forked:
    """What tests use of `subprocess.Popen`, for `python -m unfog WORDS`, or for `python -c SCRIPT WORDS`.

    `stdout` and `stderr` are `subprocess.PIPE`, `subprocess.STDOUT`, `subprocess.DEVNULL` or a file; without them the
    process writes where the tests do.
    """

    def __init__(
        self, words: Sequence[object], script: str = "", stdout=None, stderr=None, text: bool = True, **options
    ) -> None:
        self.args, self.text, self._files = [str(word) for word in words], text, []
        self.stdout, out = self._opened(stdout)
        self.stderr, err = (None, out) if stderr == subprocess.STDOUT else self._opened(stderr)
        environment = options.pop("env", None) or dict(os.environ)
        given = {"env": environment, "cwd": os.getcwd(), "script": script, "words": self.args} | options
        self._process = CONTEXT.Process(target=_begin, args=(_Stream(out), _Stream(err), given))
        self._process.start()
        for fd in self._files:
            os.close(fd)
        self.pid = self._process.pid

    def _opened(self, stream):
        """What the test reads from, and the number of what the process writes to."""
        if stream is None:
            return None, None
        if stream == subprocess.PIPE:
            read, write = os.pipe()
            self._files.append(write)
            return os.fdopen(read, "r" if self.text else "rb", **({"errors": "replace"} if self.text else {})), write
        if stream == subprocess.DEVNULL:
            self._files.append(os.open(os.devnull, os.O_RDWR))
            return None, self._files[-1]
        return None, stream if isinstance(stream, int) else stream.fileno()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None):
        """Everything that it still says on stdout and on stderr, once it has ended."""
        said = [None, None]

        def read(at, stream):
            with stream:
                said[at] = stream.read()

        streams = [(at, one) for at, one in enumerate((self.stdout, self.stderr)) if one is not None and not one.closed]
        threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in streams]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return tuple(said)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def run(words: Sequence[object], script: str = "", timeout: float = 560, **options) -> subprocess.CompletedProcess:
    """As `subprocess.run` with `capture_output=True`."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    process = Forked(words, script, **streams)
    try:
        out, said = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, said)


class _Stream:
    """The number of an open file, on its way to another process."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd

    def __reduce__(self):
        return _received, (None if self.fd is None else reduction.DupFd(self.fd),)


def _received(sent) -> int | None:
    return None if sent is None else sent.detach()


def _begin(out: int | None, err: int | None, given: dict) -> None:
    """In the process: take on streams, environment and arguments, and run what was asked for."""
    os.fsync = os.fstat  # as in the tests, see conftest.py
    gc.freeze()  # what the server has imported is not looked through, which would copy its memory
    gc.enable()
    os.chdir(given["cwd"])
    os.environ.clear()
    os.environ.update(given["env"])
    for stream, fd in ((1, out), (2, err)):
        if fd is not None:
            os.dup2(fd, stream)
    for fd in {out, err} - {None, 1, 2}:
        os.close(fd)
    # The server's own know what it wrote to: they are made anew, as a new interpreter makes them.
    as_set = {"encoding": given["env"].get("PYTHONIOENCODING"), "closefd": False}
    sys.stdout = sys.__stdout__ = open(1, "w", **as_set)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", **as_set)  # noqa: SIM115
    if given.get("start_new_session"):
        os.setsid()
    # What is started in the background, or under nohup, inherits that these are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os._exit(_status(given["words"], given["script"]))


def _status(words: list[str], script: str) -> int:
    """Run it and end as the interpreter would, whose exit `multiprocessing` would do in a way of its own."""
    status = 0
    try:
        if script:
            sys.argv = ["-c", *words]
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        else:
            from unfog.cli.main import main

            sys.argv = ["unfog", *words]
            main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = 120
    return status
