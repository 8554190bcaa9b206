"""Test the tests: plant one mistake at a time, and see whether the tests that should catch it do.

The mistakes are listed in planted_mistakes.toml. Each is a text of the package that occurs once, the wrong text that
takes its place, and the tests that are expected to fail. Each is planted into a copy of this checkout.

    python scripts/planted_mistakes.py                          # all; about half an hour on two cores
    python scripts/planted_mistakes.py --check                  # only look whether all can be planted; a second
    python scripts/planted_mistakes.py --only diffusion "ema"   # whole sections, and names with these words in them
    python scripts/planted_mistakes.py --none                   # the named tests without mistakes; all must pass
    python scripts/planted_mistakes.py --base 2941532           # those that can be planted into an earlier commit

The exit status is 1 if a mistake survives, and 2 if the list does not fit the code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
PACKAGE = Path("src/unfog")
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive")
LIMIT = 600.0  # seconds for the tests of one mistake; a mistake may also make them wait for ever


class Mistake(NamedTuple):
    """A wrong text, and the tests that should notice it."""

    section: str
    name: str
    old: str
    new: str
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """The verdict (caught, survived, or unusable), its reason, and the seconds that it took."""

    verdict: str
    reason: str
    seconds: float


def read_list(path: Path) -> list[Mistake]:
    """Read the list, in the order of the file."""
    table = tomllib.loads(path.read_text("utf-8"))
    return [
        Mistake(section, name, one["old"], one["new"], tuple(one["tests"].split()))
        for section, entries in table.items()
        for name, one in entries.items()
    ]


def find_places(mistakes: list[Mistake], root: Path) -> tuple[dict[Mistake, Path], list[str]]:
    """Return the file of each mistake, and a line for each that cannot be planted."""
    texts = {path.relative_to(root): path.read_text("utf-8") for path in sorted((root / PACKAGE).rglob("*.py"))}
    places: dict[Mistake, Path] = {}
    problems: list[str] = []
    for one in mistakes:
        found = {path: count for path, text in texts.items() if (count := text.count(one.old))}
        missing = [test for test in one.tests if not _test_exists(root, test)]
        if one.old == one.new:
            problems.append(f"{one.name}: old and new are the same text")
        elif sum(found.values()) != 1:
            where = ", ".join(f"{path} ({count})" for path, count in found.items()) or "no file"
            problems.append(f"{one.name}: old must occur once, and it is in {where}: {one.old!r}")
        elif missing:
            problems.append(f"{one.name}: there is no test {', '.join(missing)}")
        else:
            places[one] = next(iter(found))
    return places, problems


def _test_exists(root: Path, test: str) -> bool:
    file, _, function = test.partition("::")
    path = root / "tests" / file
    return path.is_file() and (not function or f"def {function.partition('[')[0]}(" in path.read_text("utf-8"))


def copy_tree(target: Path, base: str | None) -> None:
    """Copy the files that git knows of this checkout, changed or not, or those of an earlier commit."""
    target.mkdir()
    if base is not None:
        archive = subprocess.run(["git", "-C", ROOT, "archive", base], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", target], input=archive, check=True)
        return
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def check_import(copy: Path) -> None:
    """Make sure that the tests would import the copy, and not an installed package."""
    command = [sys.executable, "-c", "import unfog; print(unfog.__file__)"]
    found = subprocess.run(command, cwd=copy, env=_environment(copy), check=True, capture_output=True, text=True).stdout
    if not Path(found.strip()).is_relative_to(copy):
        raise SystemExit(f"the tests would import {found.strip()}, and not the copy in {copy}")


def _environment(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}


def run_tests(copy: Path, tests: tuple[str, ...], log: Path) -> int | None:
    """Run tests in the copy, and write what pytest prints to a file. Return its status; None if it did not end."""
    command = [sys.executable, *PYTEST, *(f"tests/{test}" for test in tests)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=copy, env=_environment(copy), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # tests that fail may leave processes of this group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def judge(copy: Path, tests: tuple[str, ...]) -> Outcome:
    """Run tests, and say whether they noticed something."""
    started, log = time.monotonic(), copy.with_suffix(".log")
    status = run_tests(copy, tests, log)
    text, seconds = log.read_text("utf-8", "replace"), time.monotonic() - started
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", text, re.MULTILINE)
    if status is None:
        return Outcome("caught", f"no end within {LIMIT:.0f} s", seconds)
    if status == 0 and not re.search(r"^\d+ passed|\D\d+ passed", text, re.MULTILINE):
        return Outcome("unusable", "all tests were skipped", seconds)
    if status in (0, 1):
        return Outcome("caught" if status else "survived", failed[1] if failed else "", seconds)
    return Outcome("unusable", f"pytest ended with {status}: {' '.join(text.split())[-200:]}", seconds)


def plant(copy: Path, place: Path, one: Mistake) -> Outcome:
    """Plant a mistake in the copy, judge the tests by it, and take it out again."""
    path = copy / place
    before = path.read_text("utf-8")
    path.write_text(before.replace(one.old, one.new), "utf-8")
    _forget_compiled(path)
    try:
        return judge(copy, one.tests)
    finally:
        path.write_text(before, "utf-8")
        _forget_compiled(path)


def _forget_compiled(path: Path) -> None:
    # Python takes compiled code for current if size and time in seconds are equal, so compiled code goes.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def select(mistakes: list[Mistake], words: list[str]) -> list[Mistake]:
    """Return the mistakes of these sections, and those with one of the words in their names."""
    if not words:
        return mistakes
    parts = [word.lower() for word in words if word not in {one.section for one in mistakes}]
    found = [one for one in mistakes if one.section in words or any(part in one.name.lower() for part in parts)]
    if not found:
        sections = ", ".join(dict.fromkeys(one.section for one in mistakes))
        raise SystemExit(f"no mistake is called {' or '.join(words)}; there are the sections {sections}")
    return found


def print_table(outcomes: dict[Mistake, Outcome], seconds: float) -> bool:
    """Print the sums by section, the slowest, and all that were not caught. Return whether all were caught."""
    print(f"\n{'section':<14}{'caught':>8}{'survived':>10}{'unusable':>10}{'seconds':>9}")
    for section in [*dict.fromkeys(one.section for one in outcomes), "in all"]:
        some = [outcome for one, outcome in outcomes.items() if section in (one.section, "in all")]
        counts = Counter(outcome.verdict for outcome in some)
        spent = sum(outcome.seconds for outcome in some)
        print(f"{section:<14}{counts['caught']:>8}{counts['survived']:>10}{counts['unusable']:>10}{spent:>9.0f}")
    print(f"{seconds:.0f} s")
    for one, outcome in outcomes.items():
        if outcome.verdict != "caught":
            print(f"{outcome.verdict.upper()}: {one.name} ({one.section}; {' '.join(one.tests)}) {outcome.reason}")
    return all(outcome.verdict == "caught" for outcome in outcomes.values())


def main() -> int:
    """Plant what is asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="sections, or words of names")
    parser.add_argument("--jobs", type=int, default=2, help="mistakes that are planted at the same time")
    parser.add_argument("--base", metavar="COMMIT", help="plant into this commit what its code has")
    parser.add_argument("--check", action="store_true", help="only look whether all can be planted")
    parser.add_argument("--none", action="store_true", help="run the named tests without any mistake")
    asked = parser.parse_args()
    mistakes = select(read_list(LIST), asked.only)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mistakes-") as temporary:
        folder = Path(temporary)
        if asked.base:
            copy_tree(folder / "base", asked.base)
        places, problems = find_places(mistakes, folder / "base" if asked.base else ROOT)
        print("\n".join(problems), end="\n" if problems else "")
        if problems and not asked.base:
            print(f"{len(problems)} of {len(mistakes)} mistakes do not fit the code; correct {LIST.name}")
            return 2
        print(f"{len(places)} mistakes can be planted", flush=True)
        if asked.check:
            return 0
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.jobs):
            copy_tree(folder / f"copy{number}", asked.base)
            copies.put(folder / f"copy{number}")
        check_import(folder / "copy0")
        if asked.none:
            outcome = judge(folder / "copy0", tuple(dict.fromkeys(test for one in places for test in one.tests)))
            print(f"{outcome.verdict}: {outcome.reason} ({outcome.seconds:.0f} s)")
            return int(outcome.verdict != "survived")

        def one_mistake(one: Mistake) -> Outcome:
            copy = copies.get()
            try:
                outcome = plant(copy, places[one], one)
            finally:
                copies.put(copy)
            print(
                f"{outcome.verdict:<9}{outcome.seconds:>6.1f} s  {one.section}: {one.name}  [{outcome.reason}]",
                flush=True,
            )
            return outcome

        with ThreadPoolExecutor(asked.jobs) as pool:
            outcomes = dict(zip(places, pool.map(one_mistake, places)))
    return int(not print_table(outcomes, time.monotonic() - started))


if __name__ == "__main__":
    sys.exit(main())
