"""Commands of README and docs can be copied; pages that messages name exist, in the package too."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

import unfog
from command import exit_status
from conftest import QUIET, TRANSFORMER
from unfog.cli.parse import parse_args
from unfog.cli.read_request import REQUESTS
from unfog.config.aliases import COMMANDS
from unfog.config.requests.slurm import SlurmRequest
from unfog.errors import RequestError
from unfog.text import manual

ROOT = Path(unfog.__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its repository")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(page for folder in ("docs", "benchmarks", "examples") for page in sorted((ROOT / folder).rglob("*.md"))),
]
# Words that stand for others: `[--ema W]`, `…`, `{a,b}`.
_ENDS = ("&&", "&", "2>", ">", "|")  # of a command
_PLACEHOLDER = re.compile(r"[…|\[\]{}<>]|\.\.\.")


def commands(text: str) -> list[str]:
    """Return the lines of shell code that call unfog, continued lines joined."""
    blocks = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line.strip().removeprefix("$ ")
        for line in lines
        if re.match(r"\s*(?:\$ )?(?:torchrun .* -m )?unfog [a-z]", line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_code_have_a_language_and_no_other_words(page):
    """The site shows such blocks as text."""
    assert not re.findall(r"^ *```\w+ .*", page.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_docs_parse(page):
    for line in commands(page.read_text("utf-8")):
        words = shlex.split(line, comments=True)
        command, *rest = before_the_shell(words[words.index("unfog") + 1 :])
        if any(_PLACEHOLDER.search(word) for word in rest):
            continue
        command = COMMANDS.get(command, command)
        if command == "slurm":
            inner = next(i for i, word in enumerate(rest) if word in ("train", "resume"))
            parse_args(rest[:inner], SlurmRequest, "unfog slurm", {})
            command, rest = rest[inner], rest[inner + 1 :]
        assert command in REQUESTS, line
        if rest[:1] not in (["--help"], ["--help-all"]):
            parse_args(rest, REQUESTS[command], f"unfog {command}", {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_a_sentence_have_flags_that_exist(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`(unfog [a-z][^`]*)`", text):
        command, *rest = shlex.split(" ".join(line.split()))[1:]
        command = COMMANDS.get(command, command)
        if command == "slurm" or any(_PLACEHOLDER.search(word) for word in rest):
            continue
        assert command in REQUESTS, line
        message = ""
        try:
            parse_args(rest, REQUESTS[command], f"unfog {command}", {})
        except RequestError as error:  # a sentence may leave out the run, or the value of a flag
            message = str(error)
        assert "is not a flag" not in message or rest[0].startswith("--help"), line


SMALL = ("--steps", "4", "--batch", "4", "--network", TRANSFORMER, "--device", "cpu", *QUIET)
# What is added to the commands of the README, whose lengths are left out.
FEWEST = {
    "doctor": ("--quick", *SMALL),
    "train": SMALL,
    "sample": ("--steps", "2"),
    "evaluate": ("-n", "10", "--steps", "2"),
    "resume": ("--steps", "6"),
}


# Commands of the pages that take a second or two, once there are images and a run.
SHORT = r"unfog (explain|runs|cache|completion|slurm|watch|init .*--yes|export .*--format (run|denoiser))\b"


def before_the_shell(words: list[str]) -> list[str]:
    """Return the words of a command without what the shell does with it."""
    cut = next((i for i, word in enumerate(words) if word in _ENDS or word.endswith(";")), len(words))
    return [word.rstrip(";") for word in words[: cut + (cut < len(words) and words[cut].endswith(";"))]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the commands of the README have run one after the other."""
    folder = tmp_path_factory.mktemp("readme")
    for i in range(24):
        images = folder / "photos" / ("cats", "dogs")[i % 2]
        images.mkdir(parents=True, exist_ok=True)
        Image.radial_gradient("L").rotate(15 * i).resize((80, 72)).convert("RGB").save(images / f"{i}.png")
    section = (ROOT / "README.md").read_text("utf-8").partition("\n## Four commands\n")[2].partition("\n## ")[0]
    listed = [*commands(section), *re.findall(r"`(unfog resume [^`]*)`", section)]
    assert [line.split()[1] for line in listed] == list(FEWEST)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for line in listed:
            words = shlex.split(re.sub(r"--budget \S+", "", line), comments=True)[1:]
            assert exit_status(*words, *FEWEST[words[0]]) == 0, line
    return folder


@pytest.mark.slow
def test_the_commands_of_the_readme_run_one_after_the_other(folder):
    for made in ("doctor/photos/report.html", "runs/photos/report.html", "runs/photos/pictures/grid.png"):
        assert (folder / made).is_file(), made
    assert [*(folder / "runs/photos/evaluations").iterdir()]
    run = unfog.load(folder / "runs/photos")
    assert (run.step, run.classes) == (6, ("cats", "dogs"))


@pytest.mark.slow
def test_commands_of_the_pages_that_take_seconds_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    listed = {line for page in PAGES for line in commands(page.read_text("utf-8")) if re.match(SHORT, line)}
    kept = {tuple(before_the_shell(shlex.split(line, comments=True))[1:]) for line in listed}
    kept = {words for words in kept if not any(_PLACEHOLDER.search(word) for word in words)}
    assert {words[0] for words in kept} >= {"explain", "runs", "completion", "slurm", "watch", "init", "export"}
    for words in sorted(kept):
        here = [word.replace("/data/", "").replace("/shared/", "shared/") for word in words]
        if words[0] != "slurm":  # which begins a run
            here = [word.replace("runs/fashion", "runs/photos") for word in here]
        more = ["--once"] if words[0] == "watch" and "--once" not in words else []
        assert exit_status(*here, *more) == 0, (words, capsys.readouterr().err)
        for file in folder.glob("*.sbatch"):  # pages give the same run more than once
            file.unlink()


def test_prose_behind_a_command_is_noticed():
    text = "```\nunfog evaluate runs/photos    how good is it\n```\n"
    with pytest.raises(RequestError):
        parse_args(shlex.split(commands(text)[0])[2:], REQUESTS["evaluate"], "unfog evaluate", {})


def test_messages_name_pages_that_are_there():
    for path in (ROOT / "src").rglob("*.py"):
        for page in re.findall(r"manual\(\s*[\"']([^\"']+)", path.read_text("utf-8")):
            assert (ROOT / page).is_file(), (path, page)


def test_a_page_is_named_by_the_command_that_opens_it_where_the_site_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr("unfog.text.__file__", str(tmp_path / "text.py"))
    assert manual("docs/metrics.md") == "docs/metrics.md"
    site = tmp_path / "site/decisions/0007"
    site.mkdir(parents=True)
    (site / "index.html").touch()
    assert manual("docs/decisions/0007.md") == "`unfog docs decisions/0007`"


def test_each_cell_about_devices_begins_with_what_is_proven():
    page = (ROOT / "docs/devices.md").read_text()
    defined = set(re.findall(r"^- \*\*(\w+)\*\*: ", page, re.MULTILINE))
    assert defined == {"seen", "fake", "unproven", "none"}
    table = page.partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for what, *cells in rows:
        assert {re.split(r"\W", cell.strip())[0] for cell in cells} <= defined, what
        for cell in cells[1:]:  # where and when, of all but the CPU
            assert not cell.strip().startswith("seen") or re.match(r"seen on .+, .*20\d\d", cell.strip()), what


def test_the_changelog_has_the_headings_of_keep_a_changelog():
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert versions
    for version in versions:
        assert re.match(r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)\n", version), version[:40]
        found = re.findall(r"^### (.*)$", version, re.MULTILINE)
        assert found
        assert found == [kind for kind in kinds if kind in found], found
