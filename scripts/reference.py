"""Write the pages of docs/reference that are made from code: settings, parts, commands, words, Python, findings.

`python scripts/reference.py --check` writes nothing and exits with 1 if a page is out of date; the tests call it so.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import unfog
from unfog.cli.help import listed_settings
from unfog.cli.main import USAGE
from unfog.cli.read_request import REQUESTS
from unfog.config.advice import all_advice
from unfog.config.aliases import OUT, SAMPLING, USUAL
from unfog.config.describe import Description, describe, field_texts, format_value
from unfog.config.explain import describe_part, setting_rows
from unfog.config.schema import Config
from unfog.config.spec_strings import registry_of

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "unfog"
FOLDER = ROOT / "docs" / "reference"
MADE = "*`python scripts/reference.py` writes this page from the code; a test checks that it is current.*"
CODE = r"[a-z]+\.[a-z_]+"  # of a finding
# Modules beside `checks` that make findings of the doctor.
OTHER_CHECKS = ("inference/memorization.py", "runs/doctor.py")
_SECTIONS = ("Args:", "Returns:", "Raises:", "Attributes:", "Yields:")
# Classes that the functions of the package return, and the parts that programs of their own use.
CLASSES = (
    "unfog.inference.run:Run",
    "unfog.inference.run:Samples",
    "unfog.inference.evaluation_files:Evaluation",
    "unfog.planning.plan:Plan",
    "unfog.reporting.findings:Finding",
    "unfog.callbacks:Callback",
)


def settings_page() -> str:
    """Return the page of all settings of a run, section by section."""
    names = _other_names()
    lines = _head(
        "Settings",
        f"All {len(describe(Config))} settings of a run. `unfog explain NAME` prints the same in a terminal. A flag "
        'such as `--optimizer.lr` is `lr` below `[optimizer]` in a file of settings, and `optimizer={"lr": …}` or, '
        "with a short flag, `lr=…` in Python.",
    )
    for section, members in _grouped(describe(Config), lambda each: ".".join(each.path[:-1])):
        lines += [f"## {section or 'Above all sections'}", ""]
        for each in members:
            lines += [f"### {each.setting}", "", _escape(each.text), ""]
            rows = setting_rows(each) | {"in Python": _in_python(each)}
            rows |= {"elsewhere": ", ".join(f"`{name}`" for name in names.get(each.setting, ()))}
            lines += [f"- **{title}**: {_value(title, text)}" for title, text in rows.items() if text]
            registry = registry_of(each.annotation)
            lines += [f"- **choices**: {_choices(registry)}"] if registry else []
            said = " ".join(f"`{word}`: {text}" for word, text in each.rules.choices)
            lines += [f"- **choices**: {said}"] if said else []
            lines += [""]
    return _page(lines)


def parts_page() -> str:
    """Return the page of the kinds of parts, such as schedules, with the settings of each."""
    lines = _head(
        "Parts",
        "Parts of a recipe that a word names, with settings after a colon: `--schedule linear:steps=1000`.",
    )
    for each in describe(Config):
        kinds = {word: part for word, part in (registry_of(each.annotation) or {}).items() if part is not None}
        if not kinds:
            continue
        lines += [f"## --{each.flags[0]}", "", _escape(each.text), ""]
        for word, part in kinds.items():
            kind: Any = type(part)
            if word != kind.kind:
                lines += [f"### {word}", "", f"`{describe_part(word, part)}`", ""]
                continue
            lines += [f"### {word}", "", *_docstring(kind), ""]
            texts = field_texts(kind)
            rows = [(f.name, format_value(getattr(part, f.name)), texts.get(f.name, "")) for f in fields(part)]
            lines += _table(("setting", "default", "meaning"), rows) if rows else []
    return _page(lines)


def commands_page() -> str:
    """Return the page of all commands, with the settings that belong to each alone."""
    lines = _head("Commands", "`unfog COMMAND --help` prints what people change, `--help-all` every setting.")
    lines += ["```", *USAGE.strip().splitlines(), "```", ""]
    for command, kind in REQUESTS.items():
        listed = listed_settings(command, kind)
        own = [each for each in listed if each.path[0] != "settings"]
        words = " ".join(each.metavar for each in own if each.positional)
        lines += [f"## unfog {command}", "", f"`unfog {command} {words}`".replace(" `", "`"), "", *_docstring(kind), ""]
        rows = [(_flag(each), each.default(), each.text) for each in own]
        lines += _table(("option", "default", "meaning"), rows) if rows else []
        if len(own) < len(listed):
            lines += ["It also takes the [settings](settings.md) of a run.", ""]
    return _page(lines)


def words_page() -> str:
    """Return the page of the words of other trainers and tutorials."""
    lines = _head(
        "Words of other trainers",
        "What to give here for a flag, an argument or a word that you know from elsewhere. The command line and `unfog "
        "explain WORD` say the same.",
    )
    lines += ["## Words with another name here", ""]
    lines += _table(("elsewhere", "here"), [(f"`{word}`", f"`{setting}`") for word, setting in sorted(USUAL.items())])
    lines += ["## Words without a setting", ""]
    by_advice: dict[str, list[str]] = {}
    for word, advice in all_advice().items():
        by_advice.setdefault(advice.text, []).append(word)
    rows = [(", ".join(f"`{word}`" for word in words), text) for text, words in by_advice.items()]
    lines += _table(("elsewhere", "here"), rows)
    lines += ["## Arguments from Python", ""]
    rows = [(f"`{word}`", f"`{here}` of `run.sample`") for word, here in sorted(SAMPLING.items())]
    lines += _table(("elsewhere", "here"), [*rows, *((f"`{word}`", "`out`") for word in OUT)])
    return _page(lines)


def python_page() -> str:
    """Return the page of the Python interface."""
    lines = _head("Python", "What `import unfog` offers. [From Python](../python.md) shows it in use.")
    for name in sorted(unfog.__all__, key=lambda one: (not one.islower(), one.lower())):
        value = getattr(unfog, name)
        if callable(value):
            lines += _member(f"unfog.{name}", value)
    for path in CLASSES:
        module, _, name = path.partition(":")
        kind = getattr(importlib.import_module(module), name)
        lines += [f"## {name}", "", *_docstring(kind), ""]
        texts = field_texts(kind)
        for member in sorted(one for one in {*vars(kind), *texts} if not one.startswith("_")):
            lines += _member(f"{name}.{member}", getattr(kind, member, None), 3, texts.get(member, ""))
    return _page(lines)


def findings_page() -> str:
    """Return the page of the findings of the doctor, from where the checks make them."""
    lines = _head(
        "Findings of the doctor",
        "`unfog doctor` prints these codes, with evidence and a remedy. A check may give several, a line each. "
        "… stands for a number, a name or a command of the run. Codes that begin with `rehearsal.` are those of the "
        "dry run, and name the part that was tried, such as `rehearsal.training`.",
    )
    found: dict[str, str] = {}
    remedies: dict[str, dict[str, None]] = {}
    checks = [*sorted((SOURCE / "checks").rglob("*.py")), *(SOURCE / name for name in OTHER_CHECKS)]
    modules = [_functions(module) for module in checks]
    everywhere = {name: function for module in modules for name, function in module.items()}
    for module in modules:
        functions = everywhere | module
        for function in module.values():
            text = (ast.get_docstring(function) or "").partition("\n\n")[0].replace("\n", " ")
            for code, call in _findings(function):
                # Checks of a run begin with their code.
                text = re.sub(rf"^(?:{CODE}(?:, | and ))*{CODE}: (\w)", lambda match: match[1].upper(), text)
                found[code] = found.get(code) or text
                remedies.setdefault(code, {}).update(dict.fromkeys(_remedies(call, function, functions)))
    for section, codes in _grouped(found, lambda code: code.partition(".")[0]):
        rows = [(f"`{code}`", found[code], _several(remedies[code])) for code in codes]
        lines += [f"## {section}", "", *_table(("code", "check", "remedies"), rows)]
    return _page(lines)


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "parts.md": parts_page,
    "commands.md": commands_page,
    "words.md": words_page,
    "python.md": python_page,
    "findings.md": findings_page,
}


def _functions(module: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions and methods of a module by name."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    return {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def _several(texts: Iterable[str]) -> str:
    """Return the cell of a table with a text, or with several below each other."""
    first, *rest = [*texts] or [""]
    return "<br>".join(f"• {text}" for text in (first, *rest)) if rest else first


def _findings(function: ast.FunctionDef) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls that make the findings of a function, each with its code."""
    calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
    named = re.findall(CODE, (ast.get_docstring(function) or "").partition(": ")[0])
    for call in calls:
        match call:
            case ast.Call(args=[ast.Constant(value=str() as code), *_]) if "Finding" in ast.unparse(call.func):
                yield code, call
            # Finding(code, …) in a check that serves several codes, which its docstring names.
            case ast.Call(args=[ast.Name(id="code"), *_]) if "Finding" in ast.unparse(call.func):
                yield from ((code, call) for code in named)
            # finding = partial(Finding, "run.state"), which is called as finding(severity, evidence, remedy).
            case ast.Call(
                func=ast.Name(id="partial"), args=[ast.Name(id="Finding"), ast.Constant(value=str() as code)]
            ):
                for each in calls:
                    if ast.unparse(each.func) == "finding":
                        yield code, ast.Call(each.func, [call.args[1], *each.args], each.keywords)
            # _exceptions(scan, "data.blank", which, description, remedy), which makes the finding.
            case ast.Call(func=ast.Name(id="_exceptions"), args=[_, ast.Constant(value=str() as code), *_]) if (
                re.fullmatch(CODE, code)
            ):
                yield code, ast.Call(call.func, call.args[1:], call.keywords)


def _remedies(call: ast.Call, function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Yield the texts of the remedies of a call of Finding or Finding.graded."""
    if ast.unparse(call.func).endswith("graded"):
        cases = [case.elts[3] for case in call.args[2:] if isinstance(case, ast.Tuple)]
    else:
        cases = [*call.args[3:4], *(word.value for word in call.keywords if word.arg == "remedy")]
    for case in cases:
        for text in _texts(case, function, functions):
            # A text without words of its own names nothing, nor does a part of a longer text.
            if re.search(r"\w{3}", text) and not text.startswith((" ", ",", ";")):
                yield text


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets and values of the assignments of a function; those of `a, b = 1, 2` each by itself."""
    for each in ast.walk(function):
        match each:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from zip(targets, values, strict=False)
            case ast.Assign(targets=targets, value=value):
                yield from ((target, value) for target in targets)


def _texts(value: ast.expr, function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Yield the texts that an expression may be: through branches, local variables and functions of the module."""
    parts: list[ast.expr | None] = []
    match value:
        case ast.Constant(value=str() as text):
            yield text
        case ast.JoinedStr():
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in value.values)
            yield re.sub("…+", "…", text)
            if not re.search(r"\w{3}", text):  # it is made of other texts
                parts = [part.value for part in value.values if isinstance(part, ast.FormattedValue)]
        case ast.IfExp():
            parts = [value.body, value.orelse]
        case ast.BoolOp():
            parts = [*value.values]
        case ast.BinOp():
            parts = [value.left, value.right]
        case ast.Name(id=name):
            parts = [value for target, value in _assignments(function) if ast.unparse(target) == name]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) | ast.Attribute(attr=name) if (
            name in functions and functions[name] is not function
        ):
            function = functions[name]
            parts = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
    for part in filter(None, parts):
        yield from _texts(part, function, functions)


def _other_names() -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for word, setting in USUAL.items():
        names.setdefault(setting, []).append(word)
    for word, advice in all_advice().items():
        for setting in advice.settings:
            names.setdefault(setting, []).append(word)
    return names


def _grouped(each: Iterable[Any], key: Callable[[Any], str]) -> Iterator[tuple[str, list[Any]]]:
    groups: dict[str, list[Any]] = {}
    for one in each:
        groups.setdefault(key(one), []).append(one)
    yield from sorted(groups.items())


def _in_python(each: Description) -> str:
    *section, last = each.path
    short = next((flag.replace("-", "_") for flag in each.flags if "." not in flag and len(flag) > 1), "")
    return f"`{short}=…`" if short else f'`{section[-1]}={{"{last}": …}}`'


def _value(title: str, text: str) -> str:
    if title == "flag":
        return f"`{text}`"
    if title == "in TOML":
        name, _, place = text.partition(", ")
        return f"`{name}`, " + re.sub(r"(\[[a-z_.]+\])", r"`\1`", place)
    if title == "see":
        return f"[{text}](../{text.removeprefix('docs/')})" if text.startswith("docs/") else f"`{text}`"
    return text if title in ("in Python", "elsewhere") else _escape(text)


def _choices(registry: dict[str, Any]) -> str:
    return ", ".join(f"`{word}`" for word in registry) + "; see [parts](parts.md)"


def _flag(each: Description) -> str:
    name = each.metavar if each.positional else f"--{each.flags[0]} {each.metavar}".rstrip()
    return f"`{name}`"


def _member(name: str, value: Any, level: int = 2, text: str = "") -> list[str]:
    """Return the signature and the docstring of a function, method or property, or the text of an attribute."""
    lines = [f"{'#' * level} {name}", ""]
    # The docstring of a value, such as a number, is that of its type; what is said of it stands under the field.
    if not (callable(value) or isinstance(value, property)):
        return [*lines, text, ""]
    try:
        signature = str(inspect.signature(value))
        for pattern, text in ((r"<function .*? at \w+>", "…"), (r"(?<=[:>] )'([^']*)'", r"\1")):
            signature = re.sub(pattern, text, signature)
        lines += ["```python", f"{name}{signature}", "```", ""]
    except (TypeError, ValueError):
        pass
    return [*lines, *_docstring(value), ""]


def _docstring(value: Any) -> list[str]:
    """Return a docstring as Markdown: sections such as "Args:" as lists, other indented lines as code."""
    lines: list[str] = []
    section = code = False
    for line in (inspect.getdoc(value) or "").splitlines():
        if line and not line.startswith(" "):
            lines += ["```", ""] * code
            section, code = line in _SECTIONS, False
            lines += [f"**{line.removesuffix(':')}**", ""] if section else [line]
        elif section:
            # An item begins at the indent of its section; what is deeper continues it.
            lines.append(f"- {line.strip()}" if line.startswith("    ") and line[4:5].strip() else line)
        else:
            lines += [*([""] if lines and lines[-1] else []), "```bash"] * (bool(line) and not code)
            code = code or bool(line)
            # What a command does stands beside it, far to the right.
            lines.append(re.sub(r"(?<=\S) {2,}(?=\S)", "  # ", line.strip()) if code else line)
    return re.sub(r"\n+```$", "\n```", "\n".join([*lines, *["```"] * code]), flags=re.M).splitlines()


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [
        [cell if cell.startswith("`") else "<br>".join(map(_escape, cell.split("<br>"))) for cell in row]
        for row in rows
    ]
    body = ["| " + " | ".join(row) + " |" for row in cells]
    # A pipe ends a cell, inside of code too.
    body = [re.sub(r"(?<=\w)\|(?=\w)", r"\\|", line) for line in body]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body, ""]


def _escape(text: str) -> str:
    """Return text in which no character means something to Markdown but pairs of backticks."""
    parts = " ".join(text.split()).split("`")
    return "`".join(re.sub(r"([*<>\[\]])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts))


def _head(title: str, text: str) -> list[str]:
    return [f"# {title}", "", text, "", MADE, ""]


def _page(lines: Iterable[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> int:
    """Write or check the pages."""
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"docs/reference/{', '.join(stale)} out of date; run: python scripts/reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
