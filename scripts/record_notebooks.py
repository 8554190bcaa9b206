"""Record the notebooks of the examples: run their cells, and store what these print and draw.

    python scripts/record_notebooks.py

`first_hour` trains, and `look_inside` looks at the run that it makes. Paths of this machine are left out. The third
notebook is for a machine that has a second place for checkpoints, and stays without output.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("first_hour", "look_inside")
LARGEST = 600_000  # bytes of a notebook


def record(path: Path, folder: Path) -> None:
    """Run a notebook in a folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # the times of the cells
        if cell.cell_type == "code":
            cell.outputs = shown(cell.outputs)
    notebook.metadata.language_info = {"name": "python"}
    text = nbformat.writes(notebook).replace(f"{folder}/", "").replace(str(folder), "/home/me")
    if len(text) > LARGEST:
        sys.exit(f"{path.name} would have {len(text):,} bytes; {LARGEST:,} are allowed")
    path.write_text(text.rstrip() + "\n", encoding="utf-8")


def shown(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return outputs as a reader sees them: a stream in one piece, with the last form of a line that is drawn anew."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    return [output for output in kept if output.output_type != "stream" or output.text.strip()]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            record(ROOT / "examples" / f"{name}.ipynb", Path(folder).resolve())


if __name__ == "__main__":
    main()
