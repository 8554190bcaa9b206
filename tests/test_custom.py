"""A network, weighting and sampler step from somebody's own module, and such parts registered from Python."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import unfog
from launches import TORCHRUN
from unfog import custom
from unfog.config.schema import Config, nest_settings
from unfog.config.toml import from_toml, read_toml, to_toml, update
from unfog.config.values import format_spec, parse_spec, registry_of
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
SETTINGS = {"size": 8, "steps": 2, "batch": 4, "lr": 1e-3}


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


PARTS = [
    ({"network": "custom:path={}.Net"}, "Net"),
    ({"weighting": "custom:path={}.weight"}, "weight"),
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
    with suppress(RequestError):  # the network is no optimiser
        check_custom_parts(config)
    assert (tmp_path / "ran").exists()
    # Consent is remembered for this file, and for no other of that name.
    monkeypatch.delenv("UNFOG_TRUST")
    monkeypatch.setattr(custom, "_announced", set())
    with suppress(ValueError):
        custom.check_consent(f"{mine}.{name}", "a part")
    monkeypatch.setattr(custom, "_module_file", lambda path: "/elsewhere.py")
    with pytest.raises(RequestError, match="would run with your rights"):
        custom.check_consent(f"{mine}.{name}", "a part")


GIVES = """
import sys
from unfog import custom
print("ready", flush=True)
input()
for i in range(20):
    custom.check_consent(f"{sys.argv[1]}{i}.Net", "a network")
"""


def test_no_consent_is_lost_where_processes_store_theirs_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    kept = tmp_path / "dotfiles"
    kept.write_text("mine.Net\t/mine.py")  # without an end of the line
    (tmp_path / "unfog").mkdir()
    (tmp_path / "unfog/trusted-code").symlink_to(kept)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", GIVES, name], **pipes) for name in "ab"]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    stored = {line.split("\t")[0] for line in kept.read_text().splitlines() if line}
    assert stored == {"mine.Net"} | {f"{name}{i}.Net" for name in "ab" for i in range(20)}
    assert (tmp_path / "unfog/trusted-code").is_symlink()


def test_a_source_that_a_file_of_settings_names_runs_only_with_consent(strangers, mine, tmp_path):
    config = strangers({}, source=f"python:{mine}:Net:argument")
    with pytest.raises(RequestError, match=f"set UNFOG_TRUST={mine}:Net"):
        open_source(config.source)
    assert not (tmp_path / "ran").exists()
    custom.give_consent(f"train python:{mine}:Net:argument")
    with pytest.raises(RequestError, match="not a subclass"):
        open_source(config.source)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [["-m", "unfog"], [*TORCHRUN[1:], 2, "-m", "unfog"]], ids=["python", "torchrun"])
def test_a_strangers_run_is_resumed_only_with_consent(strangers, mine, images, tmp_path, launch):
    strangers({"network": "custom:path={}.Net", "steps": 2}, source=str(images))
    words = [sys.executable, *map(str, launch), "resume", str(tmp_path)]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert f"set UNFOG_TRUST={mine}.Net" in told.stderr
    assert not (tmp_path / "ran").exists()


def test_settings_that_name_code_import_nothing_until_it_is_announced(mine, monkeypatch, capsys):
    config = update(Config(), {"network": f"custom:path={mine}.Net"}, "")
    assert from_toml(to_toml(config), Config()) == config
    assert format_spec(config.network) == f"custom:path={mine}.Net"
    monkeypatch.setattr(custom, "import_module", lambda name: pytest.fail("not announced"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(custom, "import_module", lambda name: capsys.readouterr().err.index(name) and torch)
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
