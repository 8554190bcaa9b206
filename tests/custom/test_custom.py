"""A network, weighting and sampler step from somebody's own module, and such parts registered from Python."""

import py_compile
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import unfog
from conftest import FEW_PICTURES, TRANSFORMER
from launches import (
    AGENT,
    TORCHRUN,
    ended,  # noqa: F401  a fixture
    forked,
    output,
)
from unfog import custom
from unfog.cli.main import main
from unfog.cli.read_request import read_request
from unfog.config.schema import Config, nest_settings
from unfog.config.spec_strings import format_spec, parse_spec, registry_of
from unfog.config.toml import from_toml, read_toml, to_toml, update
from unfog.custom import consent
from unfog.data.sources.registry import open_source
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.weighting import Weighting
from unfog.errors import RequestError
from unfog.runs.train import check_custom_parts

MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, channels, classes, out_channels, width=8):
        super().__init__()
        self.inner = torch.nn.Conv2d(channels, width, 3, padding=1)
        self.outer = torch.nn.Conv2d(width, out_channels, 3, padding=1)
        self.label = torch.nn.Embedding(classes + 1, width) if classes else None

    def forward(self, x, c_noise, label):
        h = self.inner(x)
        if self.label is not None and label is not None:
            h = h + self.label(label)[:, :, None, None]
        return self.outer(torch.relu(h))

class Narrow(Net):
    def forward(self, x, c_noise, label):
        return super().forward(x, c_noise, label)[:, :, 1:]

def weight(logsnr, own, sigma_data, power=1.0):
    return own ** power

def step(x, x0, now, then, context, share=1.0):
    return then.alpha * x0 + then.sigma / now.sigma * (x - now.alpha * x0) * share

class Lines:
    name = "lines"

    def __init__(self, run_dir, start, config, file="lines"):
        self.file = open(run_dir / file, "a")

    def log_scalars(self, step, values):
        self.file.write(f"{step} ")

    log_histogram = log_image = lambda self, *arguments: None

    def close(self):
        self.file.close()
"""
SETTINGS = {"size": 8, "steps": 2, "batch": 4, "lr": 1e-3, "preview": FEW_PICTURES["preview"]}


@pytest.fixture
def mine(tmp_path, monkeypatch, images):
    """Images in a folder, and a module of a name that no other test has imported."""
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def images(tmp_path):
    from PIL import Image

    for i in range(12):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.new("L", (8, 8), 20 * i).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path / "photos"


@pytest.mark.slow
def test_a_run_trains_resumes_and_samples_with_own_parts(mine, images, tmp_path, capsys):
    parts = {
        "network": f"custom:path={mine}.Net,width=4",
        "weighting": f"custom:path={mine}.weight,power=0.5",
        "sampler": f"custom:path={mine}.step,share=0.9",
        "log": {"every": 1, "sinks": [f"custom:path={mine}.Lines,file='logged'"]},
    }
    run = unfog.train(images, out=tmp_path / "run", **SETTINGS, **parts)
    told = capsys.readouterr().err
    assert [told.count(f"imports and runs {mine}.{name}") for name in ("Net", "weight", "step", "Lines")] == [1] * 4
    assert run.network.inner.out_channels == 4
    text = (tmp_path / "run" / "config.toml").read_text()
    assert f'path = "{mine}.Net"' in text
    assert 'arguments = ["width=4"]' in text
    assert unfog.resume(tmp_path / "run", steps=4).sample(2, seed=1).shape == (2, 8, 8, 1)
    assert set((tmp_path / "run" / "logged").read_text().split()) == set("1234")


def as_a_new_process(monkeypatch, *modules):
    """Forget what was imported, given and read, but not what is stored."""
    for name in ("_given", "_imported", "_from_files"):
        monkeypatch.setattr(consent, name, set())
    for module in modules:
        sys.modules.pop(module, None)
    custom.resolve_step.cache_clear()
    custom.resolve_path.cache_clear()


PARTS = [
    ({"network": "custom:path={}.Net"}, "Net"),
    ({"weighting": "custom:path={}.weight"}, "weight"),
    ({"loss": "custom:path={}.weight"}, "weight"),
    ({"sampler": "custom:path={}.step"}, "step"),
    ({"optimizer": "custom:path={}.Net"}, "Net"),
    ({"log.sinks": ("custom:path={}.Lines",)}, "Lines"),
]


@pytest.fixture
def strangers(mine, tmp_path):
    """A function that stores settings as a stranger's file, and reads them; the module says whether it ran."""
    (tmp_path / f"{mine}.py").write_text(f"{MODULE}\nopen({str(tmp_path / 'ran')!r}, 'w')\n")

    def read(settings, source="fashion"):
        def named(value):
            if isinstance(value, tuple):
                return tuple(map(named, value))
            return value.format(mine) if isinstance(value, str) else value

        changes = nest_settings({name: named(value) for name, value in settings.items()})
        (tmp_path / "config.toml").write_text(to_toml(update(Config(source=source), changes, "")))
        return read_toml(tmp_path / "config.toml", Config())

    return read


@pytest.mark.parametrize(("settings", "name"), PARTS)
def test_code_that_a_file_of_settings_names_runs_only_with_consent(
    strangers, mine, tmp_path, monkeypatch, settings, name
):
    config = strangers(settings)
    with pytest.raises(RequestError, match=f"set UNFOG_TRUST={mine}.{name}"):
        check_custom_parts(config)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("UNFOG_TRUST", f"other.Net,{mine}.{name}")
    with suppress(RequestError):  # the network is not an optimiser
        check_custom_parts(config)
    assert (tmp_path / "ran").exists()
    # Consent is remembered for this content of this file.
    monkeypatch.delenv("UNFOG_TRUST")
    as_a_new_process(monkeypatch, mine)
    consent.require(config)
    consent.check(f"{mine}.{name}", "a part")
    with (tmp_path / f"{mine}.py").open("a") as file:
        file.write("# another content\n")
    with pytest.raises(RequestError, match="has changed since you trusted it"):
        consent.check(f"{mine}.{name}", "a part")
    (tmp_path / f"{mine}.py").rename(tmp_path / "moved.py")
    with pytest.raises(RequestError, match="would run with your rights"):
        consent.check(f"{mine}.{name}", "a part")


GIVES = """
import sys
from unfog.custom import consent
print("ready", flush=True)
input()
for i in range(20):
    consent.give(f"{sys.argv[1]}.Net{i}")
    consent.check(f"{sys.argv[1]}.Net{i}", "a network")
"""


@pytest.mark.slow
def test_no_consent_is_lost_where_processes_store_theirs_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    kept = tmp_path / "dotfiles"
    kept.write_text("mine.Net\t/mine.py")  # without an end of the line
    (tmp_path / "unfog").mkdir()
    (tmp_path / "unfog/trusted-code").symlink_to(kept)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("")
    processes = [subprocess.Popen([sys.executable, "-c", GIVES, name], cwd=tmp_path, **pipes) for name in "ab"]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=300)
    stored = {line.split("\t")[0] for line in kept.read_text().splitlines() if line}
    assert stored == {"mine.Net"} | {f"{name}.Net{i}" for name in "ab" for i in range(20)}
    assert (tmp_path / "unfog/trusted-code").is_symlink()


def test_a_source_that_a_file_of_settings_names_runs_only_with_consent(strangers, mine, tmp_path):
    config = strangers({}, source=f"python:{mine}:Net:argument")
    with pytest.raises(RequestError, match=f"set UNFOG_TRUST={mine}:Net"):
        open_source(config.source)
    assert not (tmp_path / "ran").exists()
    consent.give_to_source(f"python:{mine}:Net:argument")
    with pytest.raises(RequestError, match="not a subclass"):
        open_source(config.source)


@pytest.fixture
def stranger(tmp_path, monkeypatch, images):
    """The current folder, with a run of two steps, and a module that says that it ran."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    folder = tmp_path / "stranger"
    folder.mkdir()
    monkeypatch.chdir(folder)
    unfog.train(images, out=folder / "run", network=TRANSFORMER, **SETTINGS)
    (folder / "tuned.py").write_text(f"{MODULE}\nopen({str(tmp_path / 'ran')!r}, 'a').write('x')\n")
    config = read_toml(folder / "run/config.toml", Config())
    named = update(config, {"sampler": {"kind": "custom:path=tuned.step"}}, "")
    (folder / "run/config.toml").write_text(to_toml(named))
    as_a_new_process(monkeypatch, "tuned")
    yield folder
    sys.modules.pop("tuned", None)


NAMED_LIKE_CODE = [
    ("sample", "runs/custom:path=tuned.step", "-n", "1"),
    ("sample", "python:tuned:step", "-n", "1"),
    ("resume", "runs/custom:path=tuned.step", "--steps", "3"),
    ("evaluate", "custom:path=tuned.step", "-n", "10", "--metrics", "sliced"),
    ("sample", "plain", "-n", "1", "--out", "custom:path=tuned.step"),
    ("sample", "plain", "-n", "1", "--label", "custom:path=tuned.step"),
    ("train", "other", "--config", "plain/config.toml", "--out", "custom:path=tuned.step"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", NAMED_LIKE_CODE, ids=" ".join)
def test_names_of_runs_and_folders_give_no_consent(stranger, images, tmp_path, capsys, words):
    run = stranger / (words[1] if words[0] != "train" else "plain")
    run.parent.mkdir(exist_ok=True)
    (stranger / "run").rename(run)
    (stranger / "other").symlink_to(images)
    with pytest.raises(SystemExit, match="2"):
        main(list(words))
    told = capsys.readouterr().err
    assert "set UNFOG_TRUST=tuned.step" in told or "no classes" in told
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_flag_or_keyword_that_names_a_part_gives_consent(stranger, monkeypatch):
    main_words = [["sample", "run", "-n", "1", "--sampler", "custom:path=tuned.step", "--out", "0"]]
    main_words += [["sample", "run", "-n", "1", "--out", "1"]]  # as it was stored
    for words in main_words:
        with pytest.raises(SystemExit, match="0"):
            main(words)
        as_a_new_process(monkeypatch, "tuned")
    (stranger.parent / "own/unfog/trusted-code").unlink()
    assert len(unfog.load("run").sample(1, sampler="custom:path=tuned.step", steps=2)) == 1
    as_a_new_process(monkeypatch, "tuned")
    read_request("resume", ["run", "--sampler", "custom:path=tuned.step"])
    assert consent.given_paths() == ["tuned.step"]


class NamesCode:
    """An object whose text names code, as an array of images may."""

    def __init__(self, value=0):
        self.value = value

    def __repr__(self):
        return "custom:path=tuned.step"

    __str__ = __repr__


@pytest.mark.slow
def test_texts_of_other_settings_give_no_consent(stranger, images, tmp_path, monkeypatch):
    for source, settings in [
        ("runs/python:tuned:step", {}),
        (images, {"labels": "custom:path=tuned.step"}),
        (images, {"steps": NamesCode()}),
        (images, {"init": "custom:path=tuned.step"}),
        (images, {"sampler": read_toml(stranger / "run/config.toml", Config()).sampler, "steps": -1}),
    ]:
        with pytest.raises(RequestError):
            unfog.train(source, out=tmp_path / "new", **{"steps": 1, **settings})
    with pytest.raises(RequestError, match=r"UNFOG_TRUST=tuned\.step"):
        unfog.load("run").sample(1)
    assert not (tmp_path / "ran").exists()
    assert consent.given_paths() == []


@pytest.mark.slow
def test_a_folder_that_is_named_like_a_source_of_code_is_refused(stranger, tmp_path):
    (stranger / "python:tuned:step").mkdir()
    for text in ("python:tuned:step", "python:tuned:step/"):
        with pytest.raises(RequestError, match="is a file or folder here"):
            unfog.plan(text)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_words_of_the_page_give_no_consent(stranger, monkeypatch):
    monkeypatch.setenv(consent.STARTED_BY, "page")
    with pytest.raises(SystemExit, match="2"):
        main(["sample", "run", "-n", "1", "--sampler", "custom:path=tuned.step"])
    with consent.words_of_others():
        read_request("resume", ["run", "--sampler", "custom:path=tuned.step"])
    assert consent.given_paths() == []


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_consent_is_for_one_content_of_one_file_and_the_packages_around_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    for owner in ("mine", "theirs"):  # a folder without __init__.py, and one with it
        write(tmp_path / owner / "loose/part.py", f"NAME = '{owner}'\n")
        write(tmp_path / owner / "tight/__init__.py", "")
        write(tmp_path / owner / "tight/part.py", "NAME = 'the same'\n")

    def find(folder, path):
        as_a_new_process(monkeypatch)
        monkeypatch.chdir(tmp_path / folder)
        consent.require(f"custom:path={path}")
        return consent.check(path, "a part")

    for path in ("loose.part.NAME", "tight.part.NAME"):
        with monkeypatch.context() as patched:
            patched.setenv("UNFOG_TRUST", path)
            find("mine", path)
        assert find("mine", path).file == str(tmp_path / "mine" / path.replace(".", "/").replace("/NAME", ".py"))
        with pytest.raises(RequestError, match="would run"):
            find("theirs", path)
    (tmp_path / "mine/tight/__init__.py").write_text("print('and more')")
    with pytest.raises(RequestError, match="has changed"):
        find("mine", "tight.part.NAME")
    assert not {"loose", "tight", "loose.part"} & sys.modules.keys()
    assert str(tmp_path / "theirs") not in sys.path  # optional packages are looked for there as well


def test_stored_consent_without_a_hash_is_no_consent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "part.py", "")
    write(tmp_path / "unfog/trusted-code", f"part.Net\t{tmp_path}/part.py\nmissing.Net\tNone\nmissing.Net\t\t\n")
    for path in ("part.Net", "missing.Net"):
        consent.require(f"custom:path={path}")
        with pytest.raises(RequestError, match="would run"):
            consent.check(path, "a part")


def test_a_name_of_a_folder_makes_no_line_of_consent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    folder = tmp_path / "x\nother.Net\tother.py"
    write(folder / "part.py", "Net = 1")
    monkeypatch.chdir(folder)
    consent.give("part.Net")
    consent.check("part.Net", "a part")
    assert not (tmp_path / "own").exists()
    consent.require("custom:path=part\nother.Net")
    with pytest.raises(RequestError, match="must name a module"):
        custom.resolve_path("custom:path=part\nother.Net", "a part")


def test_the_import_runs_the_bytes_that_were_consented_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"pinned_{abs(hash(str(tmp_path)))}"
    file = tmp_path / f"{name}.py"
    file.write_text("raise SystemExit('bytecode')")
    bytecode = py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    file.write_text("VALUE = 'mine'\n")
    code = consent.check(f"{name}.VALUE", "a part")
    file.write_text("VALUE = 'exchanged'\n")
    assert code.load().VALUE == "mine"
    assert Path(bytecode).is_file()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("launch", [["-m", "unfog"], [*TORCHRUN[1:], 2, "-m", "unfog"]], ids=["python", "torchrun"])
def test_a_strangers_run_is_resumed_only_with_consent(strangers, mine, images, tmp_path, launch):
    strangers({"network": "custom:path={}.Net", "steps": 2}, source=str(images))
    words = [sys.executable, *map(str, launch), "resume", str(tmp_path)]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert f"set UNFOG_TRUST={mine}.Net" in told.stderr
    assert not (tmp_path / "ran").exists()


def test_settings_that_name_code_import_nothing_until_it_is_announced(mine, monkeypatch, capsys):
    monkeypatch.setenv("UNFOG_TRUST", f"{mine}.Net")
    config = update(Config(), {"network": f"custom:path={mine}.Net"}, "")
    assert from_toml(to_toml(config), Config()) == config
    assert format_spec(config.network) == f"custom:path={mine}.Net"
    monkeypatch.setattr(consent, "import_module", lambda name: pytest.fail("not announced"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(consent, "import_module", lambda name: capsys.readouterr().err.index(name) and torch)
    with pytest.raises(RequestError, match="cannot be imported"):
        config.network.load()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"network": "custom"}, "must name a class"),
        ({"network": "custom:path={}.Net,widht=4"}, "cannot be built as a network"),
        ({"network": "custom:path={}.Net,width=four"}, "not a keyword argument"),
        ({"network": "custom:path={}.Missing"}, "cannot be imported"),
        ({"network": "custom:path={}.step"}, "cannot be built as a network"),
        ({"network": "custom:path={}.Narrow"}, r"returns shape \(1, 1, 7, 8\)"),
        ({"weighting": "custom:path={}.weight,gamma=1"}, "cannot be used as a weighting"),
        ({"sampler": "custom:path={}.missing"}, "cannot be imported"),
        ({"sampler": "custom"}, "no"),
    ],
)
def test_what_cannot_be_used_is_refused_before_training(mine, images, tmp_path, part, said):
    part = {name: text.format(mine) for name, text in part.items()}
    with pytest.raises(RequestError, match=said):
        unfog.train(images, out=tmp_path / "run", **SETTINGS, **part)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_registered_parts_have_names_like_the_built_in_ones(monkeypatch):
    for section in ("weighting", "sampler"):
        monkeypatch.setitem(custom.REGISTERED, section, custom.REGISTERED[section].copy())

    @custom.register("sampler")
    def half_euler(x, x0, now, then, context):
        return then.alpha * x0 + then.sigma / now.sigma * (x - now.alpha * x0)

    assert update(Config(), {"sampler": {"kind": "half-euler"}}, "").sampler == Sampler(kind="half-euler")
    with pytest.raises(RequestError):
        Sampler(kind="half-eule")


@custom.register("weighting")
@dataclass(frozen=True)
class Rooted:
    kind: ClassVar[str] = "rooted"
    power: float = 0.5

    def __call__(self, logsnr, own, sigma_data):
        return own**self.power


def test_a_registered_weighting_has_settings():
    config = update(Config(), {"diffusion": {"weighting": "rooted:power=0.25"}}, "")
    assert config.diffusion.weighting == Rooted(0.25)
    assert from_toml(to_toml(config), Config()) == config
    assert parse_spec(registry_of(Weighting), "rooted") == Rooted()
    assert config.diffusion.weight(torch.zeros(2)).shape == (2,)


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_ranks_import_what_a_flag_of_rank_0_names_and_a_resume_has_the_stored_consent(images, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    (tmp_path / "ranked.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    ranks = [2, 0, Path(unfog.__file__).with_name("__main__.py")]
    flags = ["--network", "custom:path=ranked.Net", "--size", "8", "--batch", "4", "--lr", "1e-3", "--device", "cpu"]
    for words in (["train", "photos", "--out", "run", "--steps", "2", *flags], ["resume", "run", "--steps", "3"]):
        output(forked([*ranks, *words], AGENT))
    assert (tmp_path / "run/checkpoints/00000003").is_dir()
