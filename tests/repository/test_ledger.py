"""Rows of the ledger have its form, pages of evidence are current, and figures in prose are those of their rows."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "scripts").exists(), reason="installed without its repository")
ROW = 'date = 2026-11-20\nmachine = "A"\ncommand = "run"\nnote = "ran"\n'


@pytest.fixture
def ledger(scripts_on_path):
    import ledger as module

    return module


def rows_of(ledger, tmp_path, text):
    for topic in ledger.TOPICS:
        (tmp_path / f"{topic}.toml").write_text(text if topic == "speed" else "")
    return ledger.read(tmp_path)


def test_pages_of_evidence_are_current_and_figures_in_prose_are_those_of_their_rows():
    done = subprocess.run([sys.executable, "scripts/ledger.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A KID of 0.044 after that.", 1),
        ("It is 0.18 ± 0.03 with blur.", 1),
        ("| FD | 16.5 | 29.0 |\n|---|---|---|\n| FID | 3 | 4 |", 1),
        ("A KID of [0.044](evidence/quality.md#a-2026-11-20.b) after that.", 0),
        ("The literature has a FID of 3.15.", 0),
        ("FID is of Inception. The rate is 0.003.", 0),
        ("```\nkid 0.044 ± 0.002\n```\n\n    fid 3.15 ± 0.1\n\nGive `--fd 1.5` for FD.", 0),
        ("A KID of 0.044 after\nthat, and a FID\nof 16.5; FD 2.", 1),
    ],
)
def test_a_decimal_of_a_metric_without_a_link_is_found(ledger, tmp_path, text, found):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(ledger.unlinked([page])) == found


def test_pages_for_people_are_read(ledger):
    pages = {path.name for path in ledger.guides()}
    assert {"README.md", "sampling.md", "metrics.md", "ddpm-tutorial.md", "cifar10.md"} <= pages
    assert not pages & {"0013-networks.md", "quality.md", "settings.md"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"[a-2026-11-20]\n{ROW}[a-2026-11-20.figures]\nb = 3\n", "what"),
        (f"[a-2026-11-20]\n{ROW}[a-2026-11-20.figures]\nb = {{ what = 'b', value = '3' }}\n", "numbers"),
        (f"[a-2026-11-20]\n{ROW}[a-2026-11-20.figures]\nb = {{ what = 'b', value = 3, low = 2 }}\n", "low and high"),
        (f"[a-2026-11-20]\n{ROW}[a-2026-11-20.figures]\nb = {{ what = 'b', value = 3, sd = 2 }}\n", "sd"),
        (f"[a-2026-11-21]\n{ROW}", "ends with the date"),
        (f"[A-2026-11-20]\n{ROW}", "small letters"),
        (f"[a-2026-11-20]\n{ROW.replace('note', 'notes')}", "notes"),
        (f"[a-2026-11-20]\n{ROW}after = 'b'\n", "not an id"),
        (f"[a-2026-11-20]\n{ROW}commit = 'main'\n", "hexadecimal"),
        (f"[a-2026-11-20]\n{ROW.replace('A', 'Z')}", "machines.toml"),
        (f"[a-2026-11-20]\n{ROW}[a-2026-11-20]\n{ROW}", "speed.toml"),
    ],
)
def test_a_row_of_another_form_is_refused(ledger, tmp_path, text, named):
    with pytest.raises(ledger.LedgerError, match=named):
        rows_of(ledger, tmp_path, text)


@pytest.mark.parametrize(
    ("prose", "value", "right"),
    [
        ("0.031", "value = 0.0308", True),
        ("0.07 s", "value = 0.07", True),
        ("0.030", "value = 0.0308", False),
        ("**0.070 ± 0.002**", "value = 0.0698, error = 0.0024", True),
        ("0.070 ± 0.003", "value = 0.0698, error = 0.0024", False),
        ("20.6 (20.0 to 21.2)", "value = 20.62, low = 20.04, high = 21.20", True),
        ("0 to 4%", "value = [0, 4]", True),
        ("50 of 50 times", "value = [50, 50]", True),
        ("49 of 50 times", "value = [50, 50]", False),
        ("3 min 07 s", "value = 187", True),
        ("480,000 a second", "value = 481192", True),
        ("1,200", "value = 1190", False),
        ("1.2e-5", "value = 1.2e-5", True),
        ("2e-5", "value = 1.2e-5", False),
        ("-1.9% to 1.6%", "value = [-1.9, 1.6]", True),
        ("twice", "value = 2", False),
        ("4, of 5", "value = 4", False),
    ],
)
def test_figures_in_prose_are_compared_with_their_row(ledger, tmp_path, prose, value, right):
    text = f"[a-2026-11-20]\n{ROW}[a-2026-11-20.figures]\nb = {{ what = 'b', {value} }}\n"
    page = tmp_path / "page.md"
    page.write_text(f"It is [{prose}](docs/evidence/speed.md#a-2026-11-20.b), see [all](speed.md#a-2026-11-20).")
    assert len(list(ledger.links(page.read_text()))) == 2
    assert (ledger.wrong_links(rows_of(ledger, tmp_path, text), [page]) == []) is right


def test_links_to_rows_that_are_not_there_are_found(ledger, tmp_path):
    rows = rows_of(ledger, tmp_path, f"[a-2026-11-20]\n{ROW}")
    page = tmp_path / "page.md"
    page.write_text("[1](speed.md#b-2026-11-20), [2](gpu.md#a-2026-11-20), [3](speed.md#a-2026-11-20.b)")
    assert [one.split(": ")[1] for one in ledger.wrong_links(rows, [page])] == [
        "b-2026-11-20 is not in the ledger",
        "a-2026-11-20 is on speed.md, not on gpu.md",
        "a-2026-11-20.b is not in the ledger",
    ]


def test_a_chart_has_a_bar_and_a_label_for_each_figure(ledger):
    found = ledger.figures(ledger.read())
    bars = [("Unfog <b>", found["guide-default-2026-11-24.cifar10"]), ("x", found["time-budget-2026-11-23.quiet"])]
    for log in (False, True):
        picture = ledger.bar_chart("A & B", bars, log=log)
        assert picture.count("<rect") == 3
        assert "Unfog &lt;b&gt;" in picture
        assert "119 s" in picture
        assert "nan" not in picture
