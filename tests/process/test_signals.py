"""Real processes that get real signals."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from textwrap import dedent

import pytest

from forked import Forked
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.errors import Interrupted
from unfog.process.signals import StopSignals

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")]

PRELUDE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may have had them ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from unfog.errors import Interrupted
from unfog.process.signals import StopSignals
start = time.monotonic()
def tell(*words): print(*words, flush=True)
def ready():
    global start
    tell("ready")
    start = time.monotonic()
def seconds(): return time.monotonic() - start
stop = StopSignals()
"""


class Child:
    """A process that runs `body`, past its line `ready()`."""

    def __init__(self, body: str):
        self.process = Forked([], PRELUDE + dedent(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = self.process.stdout.readline()
        assert first == "ready\n", (first, self.process.communicate())

    def send(self, *numbers: int) -> "Child":
        for number in numbers:
            self.process.send_signal(number)
        return self

    def told(self) -> str:
        """The next line that it prints."""
        return self.process.stdout.readline().strip()

    def finish(self, status: int = 0) -> tuple[str, str]:
        """All it says on stdout and on stderr."""
        self.process.wait(timeout=300)
        # Not by `communicate`, which loses what `readline` has read ahead.
        with self.process:
            out, said = self.process.stdout.read(), self.process.stderr.read()
        assert self.process.returncode == status, (self.process.returncode, out, said)
        return out.strip(), said


CUT_OFF = 15
"""Seconds. The children sleep for 20; a bound says that they were woken, and a busy machine may take its time."""


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*", text)]


def test_first_signal_is_a_flag_for_a_loop_that_looks():
    body = """
        with stop:
            ready()
            while not stop():
                time.sleep(0.01)
            stop.silence()
            quick = seconds()
            time.sleep(1.5)  # what is left to do after that is not cut off
        tell(stop.received, quick < 0.9)
    """
    children = {name: Child(body) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")}
    for name, child in children.items():
        child.send(getattr(signal, name))
    for name, child in children.items():
        out, said = child.finish()
        assert out == f"{name} True"
        if name == "SIGINT":
            assert said == "Stopping and saving. Press Ctrl-C again to quit immediately.\n"
        else:
            assert said == f"{name}: stopping and saving; a second signal quits immediately\n"


def test_alarm_cuts_off_what_does_not_look():
    child = Child("""
        with stop:
            ready()
            try:
                time.sleep(20)
            except Interrupted as interrupted:
                tell(isinstance(interrupted, KeyboardInterrupt), interrupted, seconds())
                stop.silence()
                time.sleep(1.5)
                tell("saved")
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    assert out.startswith("True SIGTERM")
    assert 0.9 < numbers_in(out)[0] < CUT_OFF
    assert out.endswith("saved")


def test_who_looks_late_has_a_second_from_there():
    child = Child("""
        with stop:
            ready()
            try:
                time.sleep(0.7)
                tell(stop(), stop())
                time.sleep(0.7)
                tell("quick enough")
                for _ in range(100):
                    stop()  # who only looks, and does not go, is cut off all the same
                    time.sleep(0.05)
            except Interrupted:
                tell("out after", seconds())
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    assert out.startswith("True True\nquick enough\nout after")
    assert numbers_in(out)[0] < CUT_OFF


def test_who_leaves_by_asking_is_not_cut_off_on_the_way():
    child = Child("""
        with stop:
            ready()
            while not stop():
                time.sleep(0.01)
            try:
                try:
                    time.sleep(0.5)
                    stop.leave_if_requested()
                finally:
                    time.sleep(1.3)
                    tell("in order")
            except Interrupted:
                stop.silence()
                stop.leave_if_requested()
                tell("saved")
    """)
    assert child.send(signal.SIGTERM).finish()[0] == "in order\nsaved"


def test_there_is_a_whole_second_after_an_alarm_that_came_late():
    child = Child("""
        with stop:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # as a long call into C does
            ready()
            try:
                time.sleep(1.8)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
                time.sleep(20)
            except Interrupted:
                pass
            time.sleep(0.6)
            stop.silence()
            tell("settled")
    """)
    assert child.send(signal.SIGTERM).finish()[0] == "settled"


def test_alarm_waits_for_what_is_undivided_and_rings_soon_after():
    child = Child("""
        with stop:
            ready()
            try:
                with stop.defer_interrupts():
                    with stop.defer_interrupts():
                        time.sleep(1.3)
                    time.sleep(1)
                    inside = seconds()
                time.sleep(20)
            except Interrupted:
                tell(inside, seconds() - inside)
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    inside, after = numbers_in(out)
    assert inside >= 2.3
    assert after < CUT_OFF


def test_a_loop_that_looks_after_an_undivided_step_is_not_cut_off():
    child = Child("""
        with stop:
            ready()
            while not stop():
                with stop.defer_interrupts():
                    time.sleep(1.3)
            tell("out after", seconds())
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    assert out.startswith("out after")


def test_alarm_rings_again_where_a_library_swallows_it():
    body = """
        def library():
            for _ in range(2):
                try:
                    time.sleep(20)
                {}
                finally:
                    tell("swallowed")
            time.sleep(20)
        with stop:
            ready()
            try:
                library()
            except Interrupted:
                tell("out after", seconds())
    """
    swallows = (
        "except BaseException: pass",
        "except KeyboardInterrupt as error: kept = error",
        "except BaseException as error: kept = error; time.sleep(0.3)",
    )
    children = [Child(body.format(swallow)).send(signal.SIGUSR1) for swallow in swallows]
    for child in children:
        out, _ = child.finish()
        assert out.startswith("swallowed\nswallowed\nout after")
        assert 2.5 < numbers_in(out)[0] < CUT_OFF


def test_alarm_is_not_an_exception_that_libraries_catch():
    child = Child("""
        with stop:
            ready()
            try:
                try:
                    time.sleep(20)
                except Exception:
                    tell("caught")
            except Interrupted:
                tell("out after", seconds())
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    assert out.startswith("out after")


def test_alarm_rings_again_after_a_destructor_where_python_ignores_exceptions():
    child = Child("""
        class Slow:
            def __del__(self):
                time.sleep(20)
        with stop:
            ready()
            try:
                Slow()
                tell("destroyed")
                time.sleep(20)
            except Interrupted:
                tell("out after", seconds())
    """)
    out, said = child.send(signal.SIGTERM).finish()
    assert out.startswith("destroyed\nout after")
    assert "Exception ignored in" in said


def test_alarm_does_not_cut_through_what_puts_things_in_order_after_it():
    child = Child("""
        from contextlib import contextmanager
        @contextmanager
        def swapped():
            try:
                yield
            finally:
                time.sleep(1.4)
                tell("put back")
        class Closing:
            def __enter__(self): pass
            def __exit__(self, *error):
                time.sleep(0.2)
                tell("closed")
        with stop:
            ready()
            try:
                with Closing(), swapped():
                    time.sleep(20)
            except Interrupted:
                time.sleep(1)
                stop.silence()
                tell("in order")
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    assert out.split("\n") == ["put back", "closed", "in order"]


def test_putting_in_order_does_not_take_for_ever_either():
    child = Child("""
        from unfog.process import signals
        signals._CLEANUP = 1.5
        with stop:
            ready()
            try:
                try:
                    time.sleep(20)
                finally:
                    time.sleep(20)
            except Interrupted:
                tell("out after", seconds())
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    assert 2.5 < numbers_in(out)[0] < CUT_OFF


def test_waiting_for_threads_is_cut_off():
    child = Child("""
        from concurrent.futures import ThreadPoolExecutor
        over = threading.Event()
        def work(_):
            over.wait(20)
        def tasks(pool):
            try:
                yield from pool.map(work, range(40))
            finally:
                over.set()
                pool.shutdown(cancel_futures=True)
        with stop:
            ready()
            try:
                list(tasks(ThreadPoolExecutor(2)))
            except Interrupted:
                tell("out after", seconds())
    """)
    out, _ = child.send(signal.SIGTERM).finish()
    assert numbers_in(out)[0] < CUT_OFF


LONG_WORK = """
    with stop:
        ready()
        try:
            with {context}:
                while not stop():
                    time.sleep(0.01)
                tell("flag")
                time.sleep(20)
        except KeyboardInterrupt as error:
            tell(type(error).__name__, seconds())
"""


@pytest.mark.parametrize("context", ["open(os.devnull)", "stop.defer_interrupts()"])
def test_second_interrupt_leaves_at_once(context):
    child = Child(dedent(LONG_WORK).format(context=context)).send(signal.SIGINT)
    assert child.told() == "flag"
    out, said = child.send(signal.SIGINT).finish()
    assert out.startswith("KeyboardInterrupt")
    assert numbers_in(out)[0] < CUT_OFF
    assert said.count("\n") == 1


def test_second_signal_leaves_also_after_settling_and_the_way_out_is_left_alone():
    child = Child("""
        with stop:
            ready()
            while not stop():
                time.sleep(0.01)
            stop.silence()
            time.sleep(1.2)
            try:
                tell("saving")
                time.sleep(20)
            except KeyboardInterrupt as error:
                tell(type(error).__name__)
                time.sleep(0.5)
                tell("cleaned")
    """).send(signal.SIGTERM)
    assert child.told() == "saving"
    child.send(signal.SIGTERM)
    assert child.told() == "KeyboardInterrupt"
    assert child.send(signal.SIGTERM, signal.SIGINT, signal.SIGHUP).finish()[0] == "cleaned"


def test_one_request_that_arrives_on_several_ways_is_one():
    ways = (
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        (signal.SIGUSR1, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM),
    )
    children = [Child(dedent(LONG_WORK).format(context="open(os.devnull)")) for _ in ways]
    for numbers, child in zip(ways, children):
        child.send(numbers[0])
        assert child.told() == "flag"
        child.send(*numbers[1:])
    for child in children:
        out, said = child.finish()
        assert out.startswith("Interrupted")
        assert said.count("\n") == 1


def test_a_signal_long_after_the_first_is_another():
    child = Child("""
        with stop:
            ready()
            try:
                with stop.defer_interrupts():
                    while not stop():
                        time.sleep(0.01)
                    time.sleep(1.2)
                    tell("late")
                    time.sleep(20)
            except KeyboardInterrupt as error:
                tell(type(error).__name__)
    """).send(signal.SIGTERM)
    assert child.told() == "late"
    assert child.send(signal.SIGUSR1).finish()[0] == "KeyboardInterrupt"


def test_storm_of_signals_is_one_request():
    child = Child("""
        with stop:
            ready()
            while not stop():
                time.sleep(0.001)
            stop.silence()
            time.sleep(0.5)
        tell("whole")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    """)
    out, said = child.send(*[signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM] * 50).finish()
    assert out == "whole"
    assert said.count("\n") == 1


def test_storm_of_interrupts_leaves_once_and_cleanly():
    child = Child("""
        with stop:
            ready()
            try:
                time.sleep(20)
            except KeyboardInterrupt as error:
                time.sleep(0.5)
                tell(type(error).__name__, seconds())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    """)
    for _ in range(200):
        child.send(signal.SIGINT)
        time.sleep(0.001)
    out, said = child.finish()
    assert out.startswith("KeyboardInterrupt")
    assert said.count("\n") == 1


def test_request_from_a_thread_is_a_request():
    child = Child("""
        def later():
            time.sleep(0.2)
            stop.request("STOP file")
            stop.request("STOP file")
        with stop:
            ready()
            threading.Thread(target=later).start()
            try:
                time.sleep(20)
            except Interrupted as interrupted:
                tell(interrupted, seconds())
    """)
    out, said = child.finish()
    assert out.startswith("STOP file")
    assert 1.1 < numbers_in(out)[0] < CUT_OFF
    assert said == "STOP file: stopping and saving\n"


def test_signal_after_a_request_by_file_is_the_first_signal():
    child = Child("""
        with stop:
            stop.request("STOP file")
            ready()
            try:
                time.sleep(20)
            except KeyboardInterrupt as error:
                tell(type(error).__name__)
    """)
    out, said = child.send(signal.SIGTERM).finish()
    assert out == "Interrupted"
    assert said.startswith("STOP file: stopping and saving\nSIGTERM: stopping")


def test_requests_while_the_context_is_left_do_not_kill():
    # A thread that still asks when the handler of the alarm is gone would end the process by SIGALRM.
    child = Child("""
        ready()
        for _ in range(300):
            stop = StopSignals()
            with stop:
                thread = threading.Thread(target=stop.request, args=["STOP file"])
                thread.start()
            thread.join()
        time.sleep(1.2)
        tell(signal.getsignal(signal.SIGALRM) == signal.SIG_DFL, signal.getitimer(signal.ITIMER_REAL))
    """)
    assert child.finish()[0] == "True (0.0, 0.0)"


@pytest.mark.parametrize("ending", ["silence", "__exit__"])
def test_settling_and_leaving_are_not_cut_through(ending):
    # The alarm rings microseconds before, thousands of times; where it strikes is seen from the traceback.
    child = Child(f"""
        ready()
        struck = set()
        for turn in range(5000):
            stop = StopSignals().__enter__()
            stop.received = "SIGTERM"
            try:
                stop._alarm.ring_in(1e-6 * (1 + turn % 20))
                stop.{ending}(*[None] * {3 if ending == "__exit__" else 0})
            except Interrupted as error:
                place = error.__traceback__
                while place:
                    struck.add(place.tb_frame.f_code.co_name)
                    place = place.tb_next
            stop.__exit__(None, None, None)
        tell("_ring" in struck, "{ending}" in struck)
    """)
    assert child.finish()[0] == "True False"


def test_outside_the_main_thread_asking_is_what_is_left():
    stop, told = StopSignals(), []

    def work():
        with stop:
            told.append(stop())
            stop.request("STOP file")
            told.append(stop())
            with stop.defer_interrupts():
                time.sleep(1.2)
            with pytest.raises(Interrupted, match="STOP file"):
                stop.leave_if_requested()
            stop.silence()
            stop.leave_if_requested()

    before = [signal.getsignal(number) for number in signal.valid_signals()]
    timer = signal.getitimer(signal.ITIMER_REAL)[0]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == [False, True]
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer > 0)


def test_handlers_and_a_running_timer_come_back():
    child = Child("""
        rung = []
        def mine(number, frame):
            rung.append(seconds())
        names = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
        for number in names:
            signal.signal(number, mine)
        ready()
        signal.setitimer(signal.ITIMER_REAL, 0.2, 1.8)
        with stop:
            time.sleep(0.4)  # it rings once while nothing is requested
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            stop.silence()
        tell(all(signal.getsignal(number) is mine for number in names))
        tell(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        time.sleep(2)
        tell(*rung)
    """)
    same, interrupt, rung = child.finish()[0].split("\n")
    assert (same, interrupt) == ("True", "True")
    assert numbers_in(rung) == pytest.approx([0.2, 2.0], abs=0.3)


def test_a_timer_that_was_due_meanwhile_rings_at_the_end_and_one_from_before_does_not():
    body = """
        rung = []
        signal.signal(signal.SIGALRM, lambda number, frame: rung.append(seconds()))
        ready()
        signal.setitimer(signal.ITIMER_REAL, {})
        with stop:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            with stop.defer_interrupts():
                time.sleep(0.7)
        time.sleep(1.5)
        tell(*rung)
    """
    children = {rings_at: Child(body.format(delay)) for delay, rings_at in ((0.5, 0.9), (0.1, 0.1))}
    for rings_at, child in children.items():
        assert numbers_in(child.finish()[0]) == pytest.approx([rings_at], abs=0.3)


def test_what_whoever_started_us_has_ignored_stays_ignored():
    child = Child("""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with stop:
            ready()
            time.sleep(0.5)
            tell(stop.received)
            os.kill(os.getpid(), signal.SIGTERM)
            tell(stop.received)
    """)
    assert child.send(signal.SIGHUP).finish()[0] == "None\nSIGTERM"


def test_a_forked_worker_ends_as_it_would_without_us():
    child = Child("""
        with stop:
            read, write = os.pipe()
            worker = os.fork()
            if worker == 0:
                os.write(write, b".")
                time.sleep(20)
                os._exit(0)
            os.read(read, 1)
            ready()
            os.kill(worker, signal.SIGTERM)
            tell(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), stop())
    """)
    assert child.finish()[0] == f"-{signal.SIGTERM.value} False"


def test_closed_stderr_is_not_written_to_whatever_has_its_number(tmp_path):
    body = dedent(f"""
        mine = os.open({str(tmp_path / "log")!r}, os.O_RDWR | os.O_CREAT)
        assert mine == 2
        with stop:
            ready()
            while not stop():
                time.sleep(0.01)
    """)
    command = f"exec '{sys.executable}' -c \"$BODY\" 2>&-"
    with subprocess.Popen(
        ["sh", "-c", command], env={**os.environ, "BODY": PRELUDE + body}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert (tmp_path / "log").read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "command", "status"),
    [
        ("SIGTERM", "train", 130),
        pytest.param("SIGUSR1", "train", 130, marks=pytest.mark.exhaustive),
        pytest.param("SIGINT", "train", 130, marks=pytest.mark.exhaustive),
        ("SIGHUP", "resume", 3),
    ],
)
def test_a_signal_during_the_imports_of_training_gives_its_status(name, command, status, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.toml").write_text(to_toml(Config(source="fashion")))
    words = ["train", "fashion", "--out", str(tmp_path / "run")] if command == "train" else ["resume", str(begun)]
    script = f"""
        import importlib.abc, os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        class Finder(importlib.abc.MetaPathFinder):  # the signal comes as torch is imported
            def find_spec(self, module, path, target=None):
                if module == "torch":
                    os.kill(os.getpid(), signal.{name})
        sys.meta_path.insert(0, Finder())
        sys.argv = ["unfog", *{words!r}]
        from unfog.cli.main import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert f"{name}: stopping" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_signal_after_the_work_does_not_change_the_status():
    script = """
        import os, signal
        from unfog.process import early_signals
        from unfog.process.signals import StopSignals
        early_signals.catch(saved=False)
        with StopSignals():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        early_signals.ignore()
        os.kill(os.getpid(), signal.SIGUSR1)
        print("saved")
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
