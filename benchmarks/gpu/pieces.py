"""A folder as files of limited size, for machines that take and give back no larger ones; every file is checked."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

PIECE = 60 * 10**6
"""Bytes of a piece at the most: below 64 MiB."""
INDEX = "index.json"


def split(folder: Path, out: Path, size: int = PIECE) -> int:
    """Write the files of a folder as pieces into `out`, whose pieces they replace. Return the number of pieces."""
    fresh = out.with_name(f"{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    index: dict[str, dict[str, object]] = {}
    count = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest, names = hashlib.sha256(), []
        with path.open("rb") as file:
            while chunk := file.read(size):
                digest.update(chunk)
                names.append(f"{count:05}.piece")
                (fresh / names[-1]).write_bytes(chunk)
                count += 1
        index[path.relative_to(folder).as_posix()] = {"sha256": digest.hexdigest(), "pieces": names}
    (fresh / INDEX).write_text(json.dumps(index, indent=1))
    # The old pieces go only now, so that a kill leaves one of both whole.
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    return count


def join(pieces: Path, folder: Path) -> None:
    """Write the files that `split` made pieces of. ValueError if one is damaged, or would be outside of the folder."""
    for name, entry in json.loads((pieces / INDEX).read_text()).items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or any("/" in piece for piece in entry["pieces"]):
            raise ValueError(f"{name} is outside of {folder}")
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for piece in entry["pieces"]:
                chunk = (pieces / piece).read_bytes()
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != entry["sha256"]:
            raise ValueError(f"the pieces of {name} are damaged or missing")
