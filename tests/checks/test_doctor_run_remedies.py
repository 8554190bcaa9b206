"""Remedies can be typed as they are: every flag that the doctor names is one, of the command that it names, and what
follows it is a value for it. They are read off the source, where they are written, so that none is left out.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import unfog
from unfog.cli.parse import flags_of
from unfog.cli.read_request import REQUESTS

ROOT = Path(unfog.__file__).parent
MODULES = [*(ROOT / "checks").rglob("*.py"), *(ROOT / "runs").glob("dry_run*.py")]
FLAGS = {command: flags_of(kind) for command, kind in REQUESTS.items()}
EVERYWHERE = {"--debug", "--help", "--help-all"}
"""Flags of every command."""
FILLED = "\N{SECTION SIGN}"
"""Stands for what an f-string puts in."""
FLAG = re.compile(r"(?<![\w-])(--[a-zA-Z][\w.-]*\w)(?: ([^\s;]+))?")
COMMAND = re.compile(r"unfog ([a-z-]+) ([^,;()]*)")
IN_WORDS = re.compile(r"\b(a lower|a smaller|another|lower|raise|low|or|and|after|with|by|is|of) $|--[\w.-]+, $")
"""Before a flag without a value, as in "a lower --lr"."""


class Written(NamedTuple):
    """A piece of text in the source."""

    place: str
    text: str
    command: str
    """To which it is handed over: `record.command("resume", text)`; "" if it is not."""


def text_of(node: ast.AST) -> str | None:
    """A string as it is written; None for what is not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else FILLED for part in node.values)
    return None


def verb_of(call: ast.Call) -> str:
    """The command of which the strings in a call become the flags."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "resume_command":
        return "resume"
    return call.args[0].value if name == "command" and isinstance(call.args[0], ast.Constant) else ""


def written(tree: ast.AST, place: str) -> Iterator[Written]:
    """All strings but docstrings, parts of others left out."""
    docstrings, done = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (verb := verb_of(node)):
            for inner in node.args:
                done |= set(ast.walk(inner))
                if (text := text_of(inner)) is not None and text != verb:
                    yield Written(f"{place}:{inner.lineno}", text, verb)
        elif isinstance(node, ast.JoinedStr):
            done |= set(node.values)
    for node in ast.walk(tree):
        if node not in done | docstrings and (text := text_of(node)) is not None:
            yield Written(f"{place}:{node.lineno}", text, "")


def faults(piece: Written) -> list[str]:
    """What is wrong with the flags in it."""
    found = []
    for match in FLAG.finditer(piece.text):
        named, value = match.groups()
        commands = [piece.command] if piece.command else [
            of[1] for of in COMMAND.finditer(piece.text) if of.start(2) <= match.start() < of.end()
        ] or ["train", "resume", *(["plan"] if "plan/" in piece.place else [])]  # fmt: skip
        if named in EVERYWHERE:
            continue
        flags = {key: flag for command in commands for key, flag in FLAGS.get(command, {}).items()}
        if named not in flags:
            found.append(f"{piece.place}: {named} is not a flag of {' or '.join(commands)}: {piece.text!r}")
            continue
        flag, said = flags[named], (value or "").rstrip(",:.)")
        before = piece.text[: match.start()]
        if flag.switch is not None or FILLED in said or IN_WORDS.search(before):
            continue
        try:
            assert said, "no value"
            flag.parse([said], named)
        except Exception as error:
            found.append(f"{piece.place}: {named} {said}: {error}: {piece.text!r}")
    return found


@pytest.mark.slow
def test_every_remedy_can_be_typed():
    pieces = [piece for path in MODULES for piece in written(ast.parse(path.read_text()), str(path.relative_to(ROOT)))]
    told = [piece for piece in pieces if FLAG.search(piece.text)]
    assert len(told) > 40, "they are no longer found"
    assert [fault for piece in told for fault in faults(piece)] == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('x = "no images are held out (--data.held_out 0.05 would)"', "held_out is not a flag of train"),
        ('x = f"{y}, and save more often: --checkpoint.every"', "no value"),
        ('x = "more steps: unfog sample RUN --sampler.steps 50"', "sampler.steps is not a flag of sample"),
        ('x = "--precision fp8"', "fp8"),
        ('x = record.command("resume", f"--weights {y}")', "weights is not a flag of resume"),
        ('x = record.resume_command("--best")', "best is not a flag of resume"),
        (
            'x = f\'draw: {r.command("sample", "--weights raw")}; a lower --lr, --flip or --ema power:width={y:g}\'',
            "",
        ),
    ],
)
def test_what_cannot_be_typed_is_seen(source, fault):
    found = [one for piece in written(ast.parse(source), "here") for one in faults(piece)]
    assert bool(found) == bool(fault)
    assert fault in "".join(found)
