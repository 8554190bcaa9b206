"""Record the tutorials: run the commands of a page, and write what they print behind each of them.

    python scripts/record_tutorials.py docs/tutorials/first-hour.md
    python scripts/record_tutorials.py docs/tutorials/drawings.md --images drawings=FOLDER

A block ```console has commands, each behind `$ `, and their output: the first lines and the last ones, as many as the
comment `<!-- lines: FIRST LAST -->` before the block says. A comment `<!-- file: NAME -->` before a block of code
writes the block to that file. A comment `<!-- picture: FILE -->` before a picture of the page copies it. All of it
happens in a new folder, or in the one that `--folder` names. A training whose run is finished there is not repeated:
the page gets the messages that the run recorded. `--quick` trains a few steps only, and changes no page: it is the test
that every command still works.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

LARGEST = 300_000  # bytes of a picture
FIRST, LAST = 16, 8
COLUMNS = 100
# What `--quick` puts in place of lengths and counts, and adds to trainings.
QUICK = (
    (r"--(budget|images|steps|batch) \S+", ""),
    (r"-n \d+", "-n 12"),
    (r"(unfog (?:train|train-autoencoder)) (\S+)", r"\1 \2 --steps 4 --batch 4 --device cpu"),
    (r"(unfog train) (\S+)", r"\1 \2 --sampler.steps 2 --preview.images 4 --evaluate.every -1"),
    (r"(unfog resume) (\S+)", r"\1 \2 --steps 6"),
    (r"(unfog sample) (\S+)", r"\1 \2 --steps 2"),
    (r"--seconds \d+", "--seconds 5"),
)
_BLOCK = re.compile(
    r"(?P<comments>(?:^<!-- [^\n]* -->\n)*)"
    r"(?:^```(?P<language>\w+)\n(?P<text>.*?)^```$|^!\[[^\]]*\]\((?P<target>[^)]+)\))",
    re.M | re.S,
)
_COMMENT = re.compile(r"<!-- (lines|file|picture): (.*?) -->")


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a block, a continued line as one."""
    for match in re.finditer(r"^\$ (.*(?<!\\)$|(?:.*\\\n)+.*$)", block, re.M):
        yield match[1]


def shorten(command: str) -> str:
    """Return a command that does the same on a small scale."""
    for pattern, replacement in QUICK:
        command = re.sub(pattern, replacement, command)
    return command


def shown(output: str, first: int, last: int) -> list[str]:
    """Return the lines of an output that a page has, less those of progress."""
    lines = [line.rstrip() for line in output.replace("\r", "\n").splitlines()]
    lines = [line for line in lines if not line.endswith(" so far")]
    while lines and not lines[-1]:
        lines.pop()
    return lines if len(lines) <= first + last + 1 else [*lines[:first], "…", *(lines[-last:] if last else [])]


def run(command: str, folder: Path, statuses: tuple[int, ...] = (0,)) -> str:
    """Run a command in the shell, and return what it prints. Raises SystemExit if it ends with another status."""
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "PYTHONIOENCODING": "utf-8",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "UNFOG_CACHE": str(folder / "cache"),
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    if done.returncode not in statuses:
        sys.exit(f"$ {command}\n{done.stdout}\nexit status {done.returncode}")
    return without_paths(done.stdout, folder)


def without_paths(text: str, folder: Path) -> str:
    """Return a text in which paths are relative to a folder, and the cache is where it is by default."""
    text = text.replace(str(folder / "cache"), "~/.cache/unfog")
    return text.replace(f"{folder}/", "").replace(str(folder), "/home/me")


def recorded(command: str, folder: Path) -> str | None:
    """Return the messages of a training that is finished in the folder already; None of any other command."""
    match = re.match(r"unfog train(-autoencoder)? (\S+).*?(?:--out (\S+)|$)", command)
    path = folder / (match[3] or f"runs/{Path(match[2]).name}{match[1] or ''}") if match else folder
    log, state = path / "console.log", path / "heartbeat.json"
    if not match or not log.is_file() or '"finished"' not in state.read_text(encoding="utf-8"):
        return None
    return re.sub(r"^-- .*\n", "", log.read_text(encoding="utf-8"), flags=re.M)  # without date and process


def save_picture(source: Path, target: Path) -> None:
    """Copy a picture, in as many colours as fit into LARGEST bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(source).convert("RGB")
    picture.save(target, optimize=True)
    for colours in (256, 128, 64):
        if target.stat().st_size <= LARGEST:
            return
        picture.quantize(colours, dither=Image.Dither.NONE).save(target, optimize=True)


def record(page: Path, folder: Path, quick: bool) -> str:
    """Run all that a page names, in order. Returns the page with the output of now."""

    def block(match: re.Match[str]) -> str:
        given = dict(_COMMENT.findall(match["comments"]))
        if match["target"]:
            if "picture" in given:
                source = sorted(folder.glob(given["picture"]))
                if not source:
                    sys.exit(f"{page}: nothing is at {given['picture']}")
                if quick:
                    Image.open(io.BytesIO(source[-1].read_bytes())).load()
                else:
                    save_picture(source[-1], page.parent / match["target"])
            return match[0]
        if "file" in given:
            (folder / given["file"]).write_text(match["text"], encoding="utf-8")
        if match["language"] != "console":
            return match[0]
        first, last = map(int, given["lines"].split()) if "lines" in given else (FIRST, LAST)
        lines = []
        for command in commands(match["text"]):
            print(f"$ {command}", flush=True)
            output = recorded(command, folder) or run(shorten(command) if quick else command, folder)
            lines += [f"$ {command}", *shown(output, first, last)]
        text = "\n".join(lines)
        return f"{match['comments']}```console\n{text}\n```"

    return _BLOCK.sub(block, page.read_text(encoding="utf-8"))


def main(words: list[str]) -> int:
    """Record the pages that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--images", nargs="*", default=[], metavar="NAME=FOLDER", help="images that the pages name")
    parser.add_argument("--folder", type=Path, help="folder to work in, kept afterwards; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="train a few steps, and change no page")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        for page in given.pages:
            folder = (given.folder or Path(temporary)).resolve() / page.stem
            folder.mkdir(parents=True, exist_ok=True)
            for name, _, images in (each.partition("=") for each in given.images):
                if not (folder / name).exists():
                    (folder / name).symlink_to(Path(images).resolve())
            text = record(page, folder, given.quick)
            if not given.quick:
                page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
