"""Build a release, and rehearse it: `python scripts/release.py [--upload]`.

Builds sdist and wheel, checks them with twine, installs the wheel in an empty environment, trains, samples and exports
there, and prints the hash of the sdist for the conda recipe. `--upload` also uploads both with twine. It refuses unless
the tree is clean, the tag vVERSION is at HEAD, and the changelog dates that version.

Needs the extra `release`, which `make package` installs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from addresses import addresses, outdated

ROOT = Path(__file__).resolve().parent.parent
DIST, EMPTY = ROOT / "dist", ROOT / "build" / "empty"
TRAIN = "train fashion --steps 3 --network tiny --batch 8 --device cpu --sampler.steps 2 --preview.images 4 --out run"


def version() -> str:
    """Return the version in the package, which the build reads too."""
    found = re.search(r'^__version__ = "(.+?)"', (ROOT / "src/unfog/_version.py").read_text("utf-8"), re.MULTILINE)
    assert found, "src/unfog/_version.py has no __version__"
    return found[1]


def problems(number: str, upload: bool) -> list[str]:
    """Return what is in the way of releasing this version."""
    found = []
    for file, line in {
        "CITATION.cff": f"version: {number}\n",
        "packaging/conda/recipe.yaml": f'version: "{number}"\n',
        "CHANGELOG.md": f"## {number} ",
    }.items():
        if line not in (ROOT / file).read_text("utf-8"):
            found.append(f"{file} does not have {line.strip()!r}")
    released = re.search(r'^date-released: "?([\d-]+)', (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    dated = re.search(rf"^## {re.escape(number)} \((\d{{4}}-\d\d-\d\d)\)$", changelog(), re.MULTILINE)
    if (released and released[1]) != (dated and dated[1]):
        found.append("CITATION.cff and CHANGELOG.md have different dates of the release, or one of them has none")
    found += [f"{name} does not have the addresses of [project.urls]: run scripts/addresses.py" for name in outdated()]
    if upload:
        if not addresses():
            found.append("pyproject.toml has no [project.urls], so links of the README are plain text")
        if output("git", "status", "--porcelain"):
            found.append("the working tree has changes")
        if f"v{number}" not in output("git", "tag", "--points-at", "HEAD").split():
            found.append(f"HEAD does not have the tag v{number}")
        if not dated:
            found.append(f"CHANGELOG.md does not date {number}")
    return found


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text("utf-8")


def build() -> list[Path]:
    """Build sdist and wheel, check them, and return their paths."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    files = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return files


def try_out(wheel: Path) -> None:
    """Install the wheel in an environment that holds nothing but torch and what the wheel asks for, and use it."""
    shutil.rmtree(EMPTY.parent, ignore_errors=True)
    run("make", f"VENV={EMPTY}", f"{EMPTY}/bin/python")
    lend_torch()
    run("make", f"VENV={EMPTY}", f"{EMPTY}/.torch")  # writes the constraints that go with that torch
    python, pinned = EMPTY / "bin" / "python", EMPTY / "constraints.txt"
    run(python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "-c", pinned, wheel)
    run(python, "-m", "pip", "check")
    unfog = EMPTY / "bin" / "unfog"
    run(unfog, *TRAIN.split())
    run(unfog, *["sample", "run", "-n", "2", "--steps", "2", "--out", "samples"])
    run(unfog, *["export", "run", "exported", "--format", "safetensors"])
    made = sorted(path.name for path in (EMPTY.parent / "samples").glob("0*.png"))
    assert len(made) == 2, made


def lend_torch() -> None:
    """Link the torch of this environment into the empty one. Packages that torch needs are installed there by pip."""
    torch, (packages,) = metadata.distribution("torch"), EMPTY.glob("lib/python3*/site-packages")
    for name in {file.parts[0] for file in torch.files or ()} - {".."}:
        (packages / name).symlink_to(Path(str(torch.locate_file(name))).resolve())


def run(*words: object) -> None:
    """Run a command beside the empty environment, so that it cannot import this checkout."""
    where = EMPTY.parent
    where.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"UNFOG_CACHE": str(where / "cache")}
    command = [str(word) for word in words]
    print("+", *command, flush=True)
    subprocess.run(command, check=True, cwd=ROOT if words[0] == "make" else where, env=environment)


def output(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upload", action="store_true", help="upload with twine once everything has worked")
    upload = parser.parse_args(arguments).upload
    if found := problems(version(), upload):
        print(*found, sep="\n", file=sys.stderr)
        return 1
    files = build()
    wheel = next(path for path in files if path.suffix == ".whl")
    try_out(wheel)
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.name}  {path.stat().st_size / 1e3:.0f} kB  sha256 {digest}")
    if upload:
        run(sys.executable, "-m", "twine", "upload", *files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
