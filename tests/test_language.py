"""The mechanical part of plain English: names are words of the field, and summaries say what a thing is or does."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from package_source import trees

REPOSITORY = Path(__file__).parent.parent
# Words that only the makers understood; what the field calls these things is in CONTRIBUTING.md.
PRIVATE_WORDS = """
pulse vigil meeting culprit glance looks drawn undrawn measuring rehearse rehearsal rehearsed together joint
undivided averaged likeness tint tones exhibit exhibits memorised pretended imitation footprint ledger
quarantined quarantine survey tally patiently anchor strange heal settle settling lesson drill unfit codec
asked told taken looked wanted begun vigilant dealt unite whereto wherefrom
""".split()  # noqa: SIM905
OLD_NAMES = {"train_codec"}  # kept for scripts that call it
RIDDLES = {"What", "Whether", "Who", "Whoever", "How", "Which", "Where", "As", "Of"}
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


def test_the_map_of_the_code_is_current():
    script = REPOSITORY / "scripts" / "code_map.py"
    subprocess.run([sys.executable, script, "--check"], check=True)
