"""The mechanical part of plain English: words of the field, subjects in summaries, no riddles in sentences."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from package_source import ROOT, trees

REPOSITORY = Path(__file__).parents[2]
# Words that only the makers understood; what the field calls these things is in CONTRIBUTING.md.
PRIVATE_WORDS = """
pulse vigil meeting culprit glance looks drawn undrawn measuring rehearse rehearsal rehearsed together joint
undivided averaged likeness tint tones exhibit exhibits memorised pretended imitation footprint ledger
quarantined quarantine survey tally patiently anchor strange heal settle settling lesson drill unfit codec
asked told taken looked wanted begun vigilant dealt unite whereto wherefrom
""".split()  # noqa: SIM905
# Words that no variable, argument or attribute has either.
PRIVATE_NAMES = "exhibit exhibits lesson guilty heeded unheeded beaten heart backs culprit pulse".split()  # noqa: SIM905
OLD_NAMES = {"train_codec"}  # kept for scripts that call it
# First words of a summary that names no subject.
RIDDLES = set("What Whether Who Whoever How Which Where As Of Why Alone Nothing Nobody Those That It They".split())  # noqa: SIM905
# Phrases of a summary that a reader has to decode, and the plain form.
RIDDLE_PHRASES = {
    r"^(Return|Yield|Write|Print|List|Describe) what\b": "name the thing",
    r"\b(as it is|as they are)(?=[.;,:]|$)": "unchanged",
    r"\bof late\b": "recent",
    r"\bfares?\b": "the state of",
    r"\bsuch that\b": "so that",
}
# Phrases of any sentence that a reader has to decode, and the plain form.
HABITS = {
    r"(?<!\b[Tt]here )\b(is|are|was|were) no (?!longer|more|one|worse|better)": "is not a",
    r"(\b[Nn]one|\bnan|\b[Nn]othing|\"\"|\{\}|\[\]|\(\)) where\b": "None if",
    r"\bwhere there (is|are|was|were)\b": "if there",
    r"\b[Tt]ells\b|\b(?<!_)told(?=\b(?!\.|:| =))|\bcan(not| )tell\b|\bnot tell\b": "show, state or report",
    r"\b(says?|knows?|proves?|tells?) nothing of\b": "nothing about",
    r"\bof more\b(?! than)": "beyond that",
    r"\bwhoever\b": "anybody who",
    r"\bleaves none\b|\bnone is known\b": "is unknown",
    r"(?<!them )\bif (it|they|there) (is|are) none\b": "if it is not an X, or without an X",
    r"\b(is|are) none of (?!them)": "is not one of",
}
Defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def words_of(name: str) -> set[str]:
    """The words of an identifier, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_names_are_words_of_the_field():
    found = []
    for file, tree in trees().items():
        names = [Path(file).stem, *(node.name for node in ast.walk(tree) if isinstance(node, Defined))]
        found += [
            f"{file}: {name}" for name in names if words_of(name).intersection(PRIVATE_WORDS) and name not in OLD_NAMES
        ]
    assert not found, "\n".join(found)


def test_summaries_say_what_a_thing_is_or_does():
    found = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (*Defined, ast.Module)) and (docstring := ast.get_docstring(node)):
                first = docstring.split()[0].strip(",:`")
                if first in RIDDLES:
                    found.append(f"{file}: {docstring.splitlines()[0]}")
    assert not found, "\n".join(found)


def test_private_names_are_gone_from_variables_and_arguments():
    found = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            name = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.keyword: "arg"}.get(type(node))
            words = words_of((getattr(node, name) or "").lower().replace("roll_back", "")) if name else set()
            if words.intersection(PRIVATE_NAMES):
                found.append(f"{file}:{getattr(node, 'lineno', 0)}: {getattr(node, name)}")
    assert not found, "\n".join(found)


def phrases(text: str, patterns: dict[str, str]) -> list[str]:
    """Each phrase of a text that matches a pattern, with its plain form."""
    text = " ".join(text.split())
    hits = ((re.search(pattern, text), plain) for pattern, plain in patterns.items())
    return [
        f"{hit.group()!r} ({plain}): …{text[max(0, hit.start() - 30) : hit.end() + 40]}" for hit, plain in hits if hit
    ]


def test_summaries_name_their_subject():
    found = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (*Defined, ast.Module)) and (docstring := ast.get_docstring(node)):
                found += [f"{file}: {hit}" for hit in phrases(docstring.splitlines()[0], RIDDLE_PHRASES)]
    assert not found, "\n".join(found)


def sentences(tree: ast.Module, source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments, joined over their lines, and of texts of several words: docstrings and messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3:
            yield node.lineno, node.value
    comment, begun = "", 0
    for number, line in enumerate(source.splitlines(), 1):
        before, sign, text = line.partition("# ")
        if comment and (before.strip() or not sign):
            yield begun, comment
            comment = ""
        if sign and before.strip():
            yield number, text
        elif sign:
            comment, begun = f"{comment} {text}", begun if comment else number


def test_sentences_have_no_riddles():
    found = []
    for file, tree in trees().items():
        for line, text in sentences(tree, (ROOT / file).read_text("utf-8")):
            found += [f"{file}:{line}: {hit}" for hit in phrases(text, HABITS)]
    for path in sorted((REPOSITORY / "docs").rglob("*.md")):
        prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        found += [f"{path.name}: {hit}" for paragraph in prose.split("\n\n") for hit in phrases(paragraph, HABITS)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "sentence",
    [
        "a mask is no class",
        "None where it was not measured",
        "the form tells them apart",
        "the network is not told",
        "of more, as many evenly spread",
        "which says nothing of the second",
    ],
)
def test_the_habits_are_recognised(sentence):
    assert phrases(sentence, HABITS)


def test_the_map_of_the_code_is_current():
    script = REPOSITORY / "scripts" / "code_map.py"
    subprocess.run([sys.executable, script, "--check"], check=True)
