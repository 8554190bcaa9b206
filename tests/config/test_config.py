"""Settings in and out of TOML, by word and by name, and what is said about mistakes."""

import functools
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unfog import __version__
from unfog.cli.parse import parse_args
from unfog.config import spec_strings as kinds
from unfog.config.describe import describe
from unfog.config.presets import PRESETS, preset
from unfog.config.requests.train import TrainRequest as Train
from unfog.config.resume_rules import walk_settings
from unfog.config.schema import SHORT, Config, nest_settings
from unfog.config.toml import from_toml, read_toml, to_toml, update, with_version
from unfog.diffusion.noise import Cosine, LogNormal
from unfog.diffusion.weighting import MinSnr
from unfog.errors import RequestError
from unfog.models.settings import SIZES, UNet
from unfog.training.settings import FixedEma, PowerEma


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_toml(name):
    config = preset(name)
    assert from_toml(to_toml(config), Config()) == config
    assert preset(name).__doc__


def test_a_settled_config_survives_toml():
    config = replace(
        preset("ddpm"),
        source='odd "name"\\ with\ttab\n\u2603',
        network=SIZES["cifar10"],
        classes=("a", "b\x7f"),
        fingerprint="0f",
        ema=FixedEma(0.999),
    )
    assert from_toml(to_toml(config), Config()) == config


@given(st.text())
@pytest.mark.slow
def test_any_text_survives_toml(text):
    config = Config(source=text)
    assert from_toml(to_toml(config), Config()) == config


@given(st.floats(allow_nan=False, min_value=1e-300, max_value=1e30))
@pytest.mark.slow
def test_any_number_survives_toml(number):
    base = Config()
    config = replace(base, optimizer=replace(base.optimizer, lr=number))
    assert from_toml(to_toml(config), base) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimiser]\nlr = 1", "unknown setting optimiser; did you mean 'optimizer'"),
        ("[optimizer]\nlearning_rate = 1", "unknown setting optimizer.learning_rate"),
        ("[optimizer]\nwarm_up = 1", "optimizer.warm_up; did you mean 'warmup'"),
        ('[optimizer]\nlr = "1e-4"', "optimizer.lr = '1e-4' is not a number; remove the quotes"),
        ("[training]\nbatch = 1.5", "training.batch = 1.5 is not a whole number"),
        ("[training]\nbatch = true", "training.batch = True is not a whole number"),
        ('[training]\nprecision = "fp6"', "did you mean fp16?"),
        ("[optimizer]\nbetas = [0.9]", "must have 2 values"),
        ("optimizer = 3", "optimizer = 3 must be a table"),
        ('[diffusion.schedule]\nkind = "cosin"', "diffusion.schedule.kind: 'cosin' is unknown; did you mean"),
        ('[diffusion.schedule]\nkind = "cosine"\nstep = 3', "diffusion.schedule.step; did you mean 'steps'"),
        (
            "[diffusion.schedule]\nsteps = 3",
            "must be one of cosine, flow, linear, logitnormal, lognormal, sigmoid, or a table",
        ),
        ("[training", "not valid TOML"),
        ("[training]\n# caf\udce9\n", "is not text in UTF-8 (line 2, byte 17); save it as UTF-8"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    file = tmp_path / "mine.toml"
    file.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(RequestError) as error:
        read_toml(file, Config())
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_a_function_of_python_is_refused_with_its_path():
    def few_words():
        return 0

    with pytest.raises(RequestError, match=r"loss='custom:path=textwrap\.dedent'"):
        update(Config(), {"diffusion": {"loss": textwrap.dedent}}, "")
    typed = type(few_words)(few_words.__code__, {"__name__": "__main__"})
    typed.__qualname__ = "mine"
    with pytest.raises(RequestError, match=r"loss='custom:path=MODULE\.mine'"):
        update(Config(), {"diffusion": {"loss": typed}}, "")
    for nameless in (lambda: 0, few_words, functools.partial(few_words)):
        with pytest.raises(
            RequestError, match=r"define it with a name in a module, .* loss='custom:path=MODULE\.NAME'"
        ):
            update(Config(), {"diffusion": {"loss": nameless}}, "")


def test_a_pipe_is_refused_unless_it_is_the_shells(tmp_path):
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(RequestError, match=r"config.toml: it is a pipe; give a file"):
        read_toml(tmp_path / "config.toml", Config())
    end, start = os.pipe()
    with os.fdopen(start, "w") as written:
        written.write("[training]\nseed = 7\n")
    assert read_toml(Path(f"/dev/fd/{end}"), Config()).training.seed == 7
    os.close(end)


def test_a_partial_file_changes_only_what_it_names():
    base = preset("default")
    config = from_toml('[diffusion]\nschedule = "lognormal:mean=-0.5"\n[optimizer]\nlr = 1', base)
    assert config.diffusion.schedule == LogNormal(mean=-0.5)
    assert config.optimizer == replace(base.optimizer, lr=1.0)
    assert config.training == base.training


def every_part():
    return [(words, part) for _, words in kinds._REGISTRIES for part in words.values()]


@pytest.mark.parametrize(("words", "part"), every_part())
def test_every_part_is_spelled_and_read_back(words, part):
    assert kinds.parse_spec(words, kinds.format_spec(part)) == part


def test_parts_by_word():
    schedules = kinds.registry_of(Cosine | LogNormal)
    assert kinds.parse_spec(schedules, "cosine:steps=500,zero_terminal=1") == Cosine(steps=500, zero_terminal=True)
    networks = kinds.registry_of(UNet | None)
    assert kinds.parse_spec(networks, "auto") is None
    assert kinds.parse_spec(networks, "small:dropout=0.3") == replace(SIZES["small"], dropout=0.3)
    two = kinds.parse_spec(networks, "unet:channels=32/64,attention=0/1")
    assert two.channels == (32, 64)
    assert two.attention == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min-snr:gama=3", "min-snr has no setting 'gama'; did you mean 'gamma'"),
        ("min-snr:gamma", "needs a value"),
        ("min-snr:gamma=x", "min-snr:gamma = 'x' is not a number"),
        ("minsnr", "did you mean 'min-snr'"),
        ("plain:gamma=1", "plain has no setting 'gamma'"),
    ],
)
def test_wrong_words_are_explained(text, message):
    words = kinds.registry_of(MinSnr)
    with pytest.raises(RequestError) as error:
        kinds.parse_spec(words, text)
    assert message in str(error.value)


def test_unions_that_are_no_parts_are_left_alone():
    assert kinds.registry_of(str | None) is None
    assert kinds.registry_of(int) is None
    assert kinds.registry_of(PowerEma | FixedEma).keys() == {"power", "fixed"}


def test_short_names_lead_somewhere():
    names = {name for name, *_ in walk_settings(Config())}
    assert {"lr", "size", "steps", "optimizer", "init", "autoencoder"} <= set(SHORT)
    for short, long in SHORT.items():
        assert long in names or f"{long}.kind" in names, short


def test_python_settings_by_short_name_section_and_instance():
    table = nest_settings({"lr": 1e-3, "size": 32, "optimizer": {"warmup": 7}, "schedule": LogNormal(), "ema": "fixed"})
    config = update(Config(), table, "")
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.warmup == 7
    assert config.data.size == 32
    assert config.diffusion.schedule == LogNormal()
    assert config.ema == FixedEma()


@pytest.mark.slow
def test_help_needs_no_torch():
    code = (
        "import sys, unfog.cli.main as m\n"
        "try: m._run(['train', '--help-all'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'help imports torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--optimizer.warmup" in done.stdout


def test_old_names_of_settings_keep_working():
    old = "[averages]\nevery = 5\n[data]\nlost_shards = 0.2\n"
    config = from_toml('codec = "there"\n' + old, Config())
    assert (config.autoencoder_folder, config.ema_snapshots.every, config.data.failed_shards) == ("there", 5, 0.2)
    python = nest_settings({"codec": "there", "averages": {"every": 5}, "data": {"lost_shards": 0.2}})
    assert update(Config(), python, "") == config
    words = ["s", "--codec", "there", "--averages.every", "5", "--data.lost-shards", "0.2"]
    assert update(Config(), parse_args(words, Train, "unfog train", {}).table["settings"], "") == config


@pytest.mark.parametrize(
    ("first_line", "said"),
    [
        ("", f"this is unfog {__version__}; a newer version may know it: update unfog, or remove the line"),
        (
            "# Written by unfog 99.1.0\n",
            f"unfog 99.1.0 wrote the file, and this is {__version__}; install that version",
        ),
        (with_version(""), "which wrote the file, so the line was added later"),
    ],
)
def test_an_unknown_setting_in_a_file_is_told_with_the_version_that_wrote_it(tmp_path, first_line, said):
    (tmp_path / "a.toml").write_text(f"{first_line}[training]\nfrobs = 3\n")
    with pytest.raises(RequestError, match=r"unknown setting training\.frobs") as refused:
        read_toml(tmp_path / "a.toml", Config())
    assert said in str(refused.value)


def test_a_setting_is_given_by_one_of_its_names():
    for table in (
        "[averages]\nevery = 100\n[ema_snapshots]\nsecond = 0.2\n",
        'codec = "a"\nautoencoder_folder = "b"\n',
    ):
        with pytest.raises(RequestError, match="given twice, once by its old name"):
            from_toml(table, Config())
    with pytest.raises(RequestError, match="given twice"):
        nest_settings({"codec": "a", "autoencoder_folder": "b"})
    with pytest.raises(RequestError, match=r"unknown setting data\.x\.flip"):
        from_toml('[data]\n"x.flip" = true\n', Config())


def test_a_switch_that_is_left_open():
    """On the command line it is left out. A file may name it, and one of an older version has true or false."""
    assert Config().training.compile is None
    assert "compile" not in to_toml(Config())
    for word, value in (("true", True), ("false", False), ('"auto"', None)):
        config = from_toml(f"[training]\ncompile = {word}\ncapture = {word}", Config())
        assert (config.training.compile, config.training.capture) == (value, value)
        assert from_toml(to_toml(config), Config()) == config
    with pytest.raises(RequestError, match="compile = 'on' is not true or false"):
        from_toml('[training]\ncompile = "on"', Config())
    with pytest.raises(RequestError, match="flip"):
        from_toml('[data]\nflip = "auto"', Config())  # a switch that nothing chooses
    for words, value in ((["--compile"], True), (["--training.no-compile"], False), ([], None)):
        table = parse_args(["x", *words], Train, "unfog train", {}).table
        assert table.get("settings", {}).get("training", {}).get("compile") is value
    described = {each.setting: each for each in describe(Config)}["training.compile"]
    assert described.flags == ["compile", "training.compile", "no-compile", "training.no-compile"]
    assert described.default() == "auto"
    assert described.default(from_toml("[training]\ncompile = false", Config())) == "off"


@pytest.mark.parametrize(("word", "number"), [("10k", 10_000), ("1.5k", 1500), ("2M", 2_000_000), ("-1", -1)])
def test_thousands_have_a_letter(word, number):
    assert kinds.parse_value(int, [word]) == number


@pytest.mark.parametrize("word", ["10m", "1.0001k", "k", "10kk", "10 k", "1e3k", "10G"])
def test_other_letters_are_refused(word):
    with pytest.raises(kinds.FormatError, match="not a whole number"):
        kinds.parse_value(int, [word])
