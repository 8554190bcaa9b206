"""Findings of checks: printed in a line each, and written to findings.json and an HTML page with figures."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import jinja2

from unfog.files.safe_files import write_atomic
from unfog.reporting.image_grids import Pixels, encode_png
from unfog.reporting.progress import say
from unfog.reporting.records import json_values
from unfog.text import sanitize

Severity = Literal["fatal", "warning", "hint", "fine"]

# Severities, worst first, with terminal styles: training is pointless; it will suffer; worth a thought; fine.
_SEVERITIES: dict[Severity, str] = {"fatal": "bold red", "warning": "yellow", "hint": "", "fine": ""}

# Area of the codes of a dry run: scripts know it in findings.json by this name.
DRY_RUN = "rehearsal"

# Whether it applies, severity, addition to the evidence, and remedy.
Case = tuple[bool, Severity, str, str]


@dataclass(frozen=True, eq=False)
class Figure:
    """An image, a chart or a table that shows what a finding says."""

    title: str
    image: Pixels | None = None
    """uint8 [H, W] or [H, W, 3]."""
    svg: str = ""
    """A chart of `reporting.charts`."""
    table: Sequence[Sequence[str]] = ()
    """Rows of cells, the first of which is the heading."""
    caption: str = ""

    @property
    def uri(self) -> str:
        """The image as a `data:` URI; "" without one."""
        return (
            "" if self.image is None else f"data:image/png;base64,{base64.b64encode(encode_png(self.image)).decode()}"
        )


@dataclass(frozen=True, eq=False)
class Finding:
    """Result of one check: severity, evidence, remedy, and figures that show it."""

    code: str
    """Stable name for scripts and tests, "area.thing": "data.duplicates", "settings.lr"."""
    severity: Severity
    evidence: str
    """Observation with its numbers and names, as a sentence without a full stop."""
    remedy: str = ""
    """What to do, with the command or setting; "" for nothing."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the evidence, as plain values for JSON."""
    figures: tuple[Figure, ...] = ()
    """Charts and images that show the evidence, for the HTML page."""

    @classmethod
    def graded(
        cls, code: str, evidence: str, *cases: Case, facts: Mapping[str, Any], figures: tuple[Figure, ...] = ()
    ) -> Finding:
        """Return the finding of the first case that applies, else one that is fine."""
        for applies, severity, addition, remedy in cases:
            if applies:
                return cls(code, severity, evidence + addition, remedy, facts, figures)
        return cls(code, "fine", evidence, facts=facts, figures=figures)

    def __repr__(self) -> str:
        return f"<finding {self.code}, {self.severity}: {self.evidence}{f'; {self.remedy}' * bool(self.remedy)}>"

    def __str__(self) -> str:
        mark = "" if self.severity == "fine" else f"{self.severity}: "
        return f"{mark}{self.evidence}" + (f"; {self.remedy}" if self.remedy else "")


def list_names(names: Sequence[str]) -> str:
    """Return the first names as "a.png, b.png, c.png, ..."."""
    return ", ".join([*map(sanitize, names[:3]), *["..."] * (len(names) > 3)])


def format_share(part: int, whole: int) -> str:
    """Return a part of a whole as "34 of 100 (34%)"."""
    return f"{part:,} of {whole:,} ({format_percent(part / max(whole, 1))})"


def format_percent(fraction: float) -> str:
    """Return a fraction as "34%", "1.2%" or "0.05%"."""
    return f"{100 * fraction:.2g}%" if fraction < 0.0995 else f"{100 * fraction:.0f}%"


def _sort_by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Sort the worst first; findings of one severity keep their order."""
    return sorted(findings, key=lambda finding: list(_SEVERITIES).index(finding.severity))


def has_fatal(findings: Sequence[Finding]) -> bool:
    """Return True if a finding makes training pointless."""
    return any(finding.severity == "fatal" for finding in findings)


def print_findings(findings: Sequence[Finding], fine: bool = False) -> None:
    """Print the findings, the worst first, those that are `fine` only if asked for, and the number of each severity."""
    for finding in _sort_by_severity(findings):
        if fine or finding.severity != "fine":
            say(f"  {finding}", style=_SEVERITIES[finding.severity])
    say(f"  {_summary(findings)}")


def _summary(findings: Sequence[Finding]) -> str:
    """Count findings by severity: "1 warning, 2 hints, 14 fine"."""
    counts = Counter(finding.severity for finding in findings)
    plural = {"fatal": "fatal", "warning": "warnings", "hint": "hints", "fine": "fine"}
    named = [f"{counts[s]} {s if counts[s] == 1 else plural[s]}" for s in _SEVERITIES if counts[s]]
    return ", ".join(named) or "nothing was checked"


def write_findings(folder: Path, title: str, findings: Sequence[Finding]) -> Path:
    """Write findings.json and a self-contained report.html into a folder; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("code", "severity", "evidence", "remedy", "facts")
    plain = [{name: json_values(getattr(one, name)) for name in names} for one in _sort_by_severity(findings)]
    text = json.dumps({"title": title, "findings": plain}, indent=2, ensure_ascii=False, allow_nan=False)
    # Names of files that are not UTF-8 hold surrogates, which cannot be encoded.
    write_atomic(folder / "findings.json", f"{text}\n".encode("utf-8", "replace"), folder, shared=True)
    path = folder / "report.html"
    write_atomic(path, _render(title, findings).encode("utf-8", "replace"), folder, shared=True)
    return path


def write_result(file: Path, result: Mapping[str, Any], page: Path, title: str, finding: Finding) -> None:
    """Write the result of a command as JSON, and its finding as a page."""
    text = json.dumps(json_values(result), indent=2, allow_nan=False)
    write_atomic(file, f"{text}\n".encode(), file.parent, shared=True)
    write_atomic(page, _render(title, [finding]).encode("utf-8", "replace"), page.parent, shared=True)


def _render(title: str, findings: Sequence[Finding]) -> str:
    """Render the findings as an HTML page that makes no requests."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("unfog.reporting"),
        # Evidence holds names of files and classes, which may be a stranger's.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in the template is an error rather than an empty place on the page.
        undefined=jinja2.StrictUndefined,
    )
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = environment.get_template("findings.html")
    return page.render(title=title, summary=_summary(findings), findings=_sort_by_severity(findings), written=written)
