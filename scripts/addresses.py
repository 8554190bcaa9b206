"""Write the addresses of the project into the files that name them: `python scripts/addresses.py [--check]`.

`[project.urls]` of pyproject.toml is the one place to fill: `Source` (the repository, on a host with the paths of
GitHub) and `Documentation` (the site). From there they go into CITATION.cff, the conda recipe, the issue forms and the
settings of the site. The description of the package (hatch_build.py) and the links of the site to files (site.py) take
them by themselves. Without addresses, no file names one.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# File -> (the line before which addresses stand, the lines that have them); "" for the end of the file.
LINES = {
    "CITATION.cff": ("license:", ["repository-code: {Source}", "url: {Documentation}"]),
    "packaging/conda/recipe.yaml": (
        "  summary:",
        ["  homepage: {Documentation}", "  repository: {Source}", "  documentation: {Documentation}"],
    ),
    "zensical.toml": ("docs_dir =", ['site_url = "{Documentation}/"']),
    ".github/ISSUE_TEMPLATE/config.yml": (
        "",
        [
            "contact_links:",
            "  - name: Documentation",
            "    url: {Documentation}/fix-it/",
            "    about: Fix it, by symptom.",
            "  - name: A security problem",
            "    url: {Source}/security/advisories/new",
            "    about: Report it in private.",
        ],
    ),
}


def addresses() -> dict[str, str]:
    """Return `[project.urls]` of pyproject.toml, without slashes at the end. SystemExit if an address is missing."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    if urls and (missing := {"Source", "Documentation"} - set(urls)):
        sys.exit(f"[project.urls] of pyproject.toml lacks {' and '.join(sorted(missing))}: add it")
    return {name: url.rstrip("/") for name, url in urls.items()}


def written(name: str, urls: dict[str, str]) -> str:
    """Return the text of a file of LINES with these addresses, in place of those that it had."""
    before, templates = LINES[name]
    had = tuple(template.partition("{")[0] for template in templates)
    lines = [line for line in (ROOT / name).read_text("utf-8").splitlines() if not line.startswith(had)]
    at = next(i for i, line in enumerate(lines) if line.startswith(before)) if before else len(lines)
    lines[at:at] = [template.format(**urls) for template in templates] if urls else []
    return "\n".join(lines) + "\n"


def outdated() -> dict[str, str]:
    """Return the new text of each file that does not have the addresses of [project.urls]."""
    urls = addresses()
    texts = {name: written(name, urls) for name in LINES}
    return {name: text for name, text in texts.items() if text != (ROOT / name).read_text("utf-8")}


def main(words: list[str]) -> int:
    """Write the files, or only name those that are not current. Return the exit status."""
    changed = outdated()
    for name, text in changed.items():
        print(f"{name} {'does not have the addresses of [project.urls]' if '--check' in words else 'written'}")
        if "--check" not in words:
            (ROOT / name).write_text(text, "utf-8")
    return int(bool(changed) and "--check" in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
