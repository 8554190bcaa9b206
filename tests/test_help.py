"""What helps to find a setting: --help, --help-all, explain, completion and init."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from unfog.cli.main import main
from unfog.cli.requests import REQUESTS
from unfog.commands.explain import explain
from unfog.config.describe import describe
from unfog.config.presets import add_autoencoder, autoencoder_recipe
from unfog.config.schema import SHORT, Config
from unfog.config.toml import to_toml
from unfog.config.values import registry_of

REPOSITORY = Path(__file__).parent.parent

TRAINING = ("train", "resume", "train-autoencoder", "doctor", "plan", "find-lr")


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs a command, and returns what it prints; it must end with this status."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        output = capsys.readouterr()
        assert left.value.code == status, output.err
        return output.out if status == 0 else output.err

    return run


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?([a-z][a-z.-]*)", "\n".join(re.findall(r"^  -.*", text, re.MULTILINE))))


@pytest.mark.parametrize("command", TRAINING)
def test_help_is_one_screen_with_examples_and_leads_to_the_rest(said, command):
    text = said(command, "--help")
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 80
    assert f"\n  unfog {command} " in text
    assert "--help-all" in text
    assert 5 <= len(flags_in(text)) <= 25
    assert flags_in(text) < flags_in(said(command, "--help-all"))


def test_help_all_has_every_flag_with_its_default(said):
    text = said("train", "--help-all")
    assert {flag for each in describe(REQUESTS["train"]) if not each.positional for flag in each.flags} == flags_in(
        text
    )
    assert "unfog.train" not in text
    words = " ".join(text.split())
    assert "--optimizer.warmup N Steps of linear rise" in words
    assert "(default: cosine)" in words
    assert "--sampler.no-clip" in words


@pytest.mark.parametrize("command", sorted(set(REQUESTS) - set(TRAINING)))
def test_other_commands_have_one_level(said, command):
    assert said(command, "--help") == said(command, "--help-all")


def test_every_setting_has_a_text():
    for kind in REQUESTS.values():
        for each in describe(kind):
            assert len(each.text) > 3, (kind, each.path)


def test_resume_lists_only_what_a_resume_can_change(said):
    flags = flags_in(said("resume", "--help-all"))
    assert {"lr", "steps", "force", "seed", "network", "checkpoint.every"} <= flags
    for fixed in ("size", "data.size", "path", "target", "init", "autoencoder", "diffusion.sigma-data", "batch"):
        assert fixed not in flags, fixed


def test_an_autoencoder_lists_only_what_it_reads(said, tmp_path):
    flags = flags_in(said("train-autoencoder", "--help-all"))
    assert {"factor", "lr", "evaluate.images"} <= flags
    assert not any(flag.startswith(("ema-snapshots", "sampler", "data.labels")) for flag in flags)
    config = replace(add_autoencoder(autoencoder_recipe()), source="photos")
    (tmp_path / "config.toml").write_text(to_toml(config))
    resumed = flags_in(said("resume", str(tmp_path), "--help-all"))
    assert {"lr", "evaluate.images"} <= resumed
    assert not any(flag.startswith(("ema-snapshots", "sampler", "guidance", "label-dropout")) for flag in resumed)


def test_short_names_and_descriptions_agree():
    described = {flag: each.setting for each in describe(Config) for flag in each.flags}
    assert all(described[short] == place for short, place in SHORT.items())


def test_explain_tells_all_that_a_field_holds(said):
    text = " ".join(said("explain", "lr").split())
    for part in (
        "optimizer.lr Peak learning rate",
        "--lr, --optimizer.lr NUMBER",
        "lr, below [optimizer]",
        "default 0; 0.0002 with --preset ddpm",
        "at least 0; usual: 1e-4 to 3e-3",
        "on resume can change",
        "why 0.003 suits a million parameters",
        "measured Fréchet distance",
        "see docs/decisions/0007-default-recipe.md",
    ):
        assert part in text
    assert "cannot change, but for dropout" in said("explain", "network")
    assert "with --force" in said("explain", "seed")
    assert "Karras et al. 2022, appendix F" in said("explain", "data.augment")
    assert said("explain", "held_out") == said("explain", "data.held-out")


def test_explain_knows_every_setting_section_and_kind(said):
    overview = said("explain")
    for each in describe(Config):
        assert each.setting in explain(each.setting).splitlines()
        assert {each.path[0], each.path[-1]} <= set(re.findall(r"\w+", overview))
        assert f"  {each.setting} " in explain(each.path[0]) or len(each.path) == 1
        for word in each.choices if registry_of(each.annotation) else ():
            assert word == "auto" or word in explain(word)
    assert "did you mean lr" in said("explain", "lrr", status=2)
    assert "a choice of --weighting" in said("explain", "min-snr")


def test_explanations_name_files_that_exist_and_figures_that_they_hold():
    for each in describe(Config):
        if each.rules.measured:
            text = " ".join((REPOSITORY / each.rules.see).read_text().split())
            for figure in re.findall(r"\d+\.\d+", each.rules.measured):
                assert figure in text or f"{float(figure) * 1000:.4g}" in text, (each.setting, figure)
        if each.rules.see:
            assert (REPOSITORY / each.rules.see).is_file()
