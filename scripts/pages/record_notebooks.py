"""Record the notebooks of the examples: run their cells, and store what these print and draw.

    python scripts/pages/record_notebooks.py [--folder FOLDER] [NAME …]

All run in one folder, a new one without `--folder`, in the order of NAMES: `first_hour` trains the run that
`look_inside` looks at. The drive of `train_on_a_rented_machine` is a folder there. Streams are shortened as in the
tutorials, and paths of this machine are replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from record_tutorials import FIRST, LAST, shown, without_paths

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("first_hour", "look_inside", "train_on_a_rented_machine")
LARGEST = 400_000  # bytes of a notebook
DRIVE = "/content/drive/MyDrive"


def record(path: Path, folder: Path) -> None:
    """Run a notebook in a folder, and write it with its outputs. Raises SystemExit if it becomes too large."""
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        cell.source = cell.source.replace(DRIVE, str(folder / "drive"))
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        cell.metadata = {}  # the times of the cells
        if cell.cell_type == "code":
            cell.outputs = readable(cell.outputs)
    notebook.metadata.language_info = {"name": "python"}  # without the version of this machine
    text = nbformat.writes(notebook).replace(str(folder / "drive"), DRIVE)
    text = without_paths(text, folder)
    if len(text) > LARGEST:
        sys.exit(f"{path.name} would have {len(text):,} bytes; {LARGEST:,} are allowed")
    path.write_text(text.rstrip() + "\n", encoding="utf-8")


def readable(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return outputs with what is printed in one piece, shortened in the middle, before what is shown."""
    streams = [output for output in outputs if output.output_type == "stream"]
    lines = shown("".join(output.text for output in streams), FIRST, LAST)
    printed = [nbformat.v4.new_output("stream", name="stdout", text="\n".join(lines) + "\n")] if lines else []
    rest = [output for output in outputs if output.output_type != "stream"]
    for output in rest:
        output.get("data", {}).pop("image/jpeg", None)  # Pillow gives it beside PNG
    # The progress line, where it is gone, leaves an empty text.
    return [*printed, *(output for output in rest if output.get("data") != {"text/plain": ""})]


def main(words: list[str]) -> None:
    """Record the notebooks that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--folder", type=Path, help="folder to work in, kept afterwards; default: a temporary one")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["UNFOG_CACHE"] = str(folder / "cache")
        for name in given.names:
            record(EXAMPLES / f"{name}.ipynb", folder)


if __name__ == "__main__":
    main(sys.argv[1:])
