"""Settings that are chosen automatically: the word auto, the value that it gives, and the question `is_auto`."""

import ast
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import unfog
from unfog.cli.parse import parse_args
from unfog.cli.read_request import REQUESTS
from unfog.config.describe import Description, describe
from unfog.config.explain import explain
from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml, update
from unfog.errors import RequestError
from unfog.models.settings import TextEncoderSettings
from unfog.settings import NO_AUTO, auto_value, is_auto
from unfog.training.settings import Training

SETTINGS = [each for each in describe(Config) if each.rules.auto is not NO_AUTO]
# The spelling in config.toml, which runs of earlier versions have and digests hash. None is left out of the file.
STORED = {
    "data.size": 0,
    "data.channels": 0,
    "data.range": (),
    "data.dtype": "auto",
    "data.axes": "auto",
    "data.map": "auto",
    "data.labels": "auto",
    "data.cache": "auto",
    "network": None,
    "text_encoder.layers": 0,
    "text_encoder.width": 0,
    "training.batch": 0,
    "training.microbatch": 0,
    "training.precision": "auto",
    "training.memory_format": "auto",
    "training.deterministic": "auto",
    "training.device": "auto",
    "training.compile": None,
    "training.capture": None,
    "optimizer.lr": 0.0,
    "optimizer.warmup": 0,
    "ema_snapshots.every": 0,
    "ema_snapshots.second": 0.0,
    "sampler.last": 0.0,
    "log.every": 0,
    "preview.every": 0,
    "evaluate.every": 0,
    "evaluate.samples": 0,
    "evaluate.reference": 0,
    "evaluate.metrics_every": 0,
    "checkpoint.every": 0,
}
# Of each setting a value that is not automatic.
GIVEN = preset("demo")
GIVEN = replace(
    GIVEN,
    data=replace(
        GIVEN.data,
        size=16,
        channels=3,
        range=(0.0, 9.0),
        dtype="float32",
        axes="NHWC",
        map="log",
        labels="none",
        cache="disk",
    ),
    text_encoder=TextEncoderSettings(3, 64),
    training=Training(
        batch=8,
        microbatch=4,
        precision="bf16",
        memory_format="contiguous",
        deterministic="off",
        device="cpu",
        compile=True,
        capture=False,
    ),
    optimizer=replace(GIVEN.optimizer, lr=1e-3, warmup=5),
    ema_snapshots=replace(GIVEN.ema_snapshots, every=-1, second=0.05),
    sampler=replace(GIVEN.sampler, last=0.01),
    log=replace(GIVEN.log, every=7),
    preview=replace(GIVEN.preview, every=-1),
    evaluate=replace(GIVEN.evaluate, every=-1, samples=50, reference=60, metrics_every=-1),
    checkpoint=replace(GIVEN.checkpoint, every=-1),
)


def owner_of(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path[:-1]:
        tree = getattr(tree, name)
    return tree


def test_each_automatic_setting_keeps_its_spelling_in_files() -> None:
    assert {each.setting: each.rules.auto for each in SETTINGS} == STORED
    assert all(type(each.rules.auto) is type(STORED[each.setting]) for each in SETTINGS)  # 0 and 0.0 are two digests


@pytest.mark.parametrize("each", SETTINGS, ids=lambda each: each.setting)
def test_the_word_auto_leaves_a_setting_to_be_chosen(each: Description) -> None:
    *above, name = each.path
    assert not is_auto(owner_of(GIVEN, each.path), name)
    section = f"[{'.'.join(above)}]\n" if above else ""
    nested: Any = "auto"
    for part in reversed(each.path):
        nested = {part: nested}
    changed = [from_toml(f'{section}{name} = "auto"', GIVEN), update(GIVEN, nested, "")]
    for flag in () if isinstance(getattr(owner_of(GIVEN, each.path), name), bool) else each.flags:
        for words in ([f"--{flag}", "auto"], [f"--{flag}=auto"]):
            args = parse_args(["images", *words], REQUESTS["train"], "unfog train", {})
            changed.append(update(GIVEN, args.table["settings"], ""))
    for config in changed:
        assert is_auto(owner_of(config, each.path), name)
        found = getattr(owner_of(config, each.path), name)
        assert found == each.rules.auto
        assert type(found) is type(each.rules.auto)
        assert from_toml(to_toml(config), Config()) == config
        assert "auto" in to_toml(config) or each.rules.auto != "auto"


def test_auto_works_for_other_requests_and_not_for_other_settings() -> None:
    for command, field in (("evaluate", "n"), ("ema-sweep", "n"), ("ema-sweep", "widths"), ("evaluate", "features")):
        args = parse_args(["run", f"--{field}", "auto"], REQUESTS[command], f"unfog {command}", {})
        request = update(REQUESTS[command](run=Path("run")), args.table, "")
        assert is_auto(request, field)
    for setting in ('[training]\nseed = "auto"', '[optimizer]\nbetas = "auto"', '[data]\nflip = "auto"'):
        with pytest.raises(RequestError, match="auto"):
            from_toml(setting, Config())
    with pytest.raises(RequestError, match="auto"):
        parse_args(["images", "--seed", "auto"], REQUESTS["train"], "unfog train", {})
    assert "the same as 0" in explain("lr")
    assert "the same as" not in explain("seed")


def test_the_question_names_fields_that_can_be_automatic() -> None:
    assert is_auto(Training(batch=0), "batch")
    assert not is_auto(Training(), "batch")
    assert is_auto(Training(batch=0), "precision", "batch")
    assert is_auto(Training(precision="bf16", batch=0), "batch")
    assert auto_value(Training(), "compile") is None
    with pytest.raises(TypeError, match="seed"):
        is_auto(Training(), "seed")
    # A wrong name would fail only where that line runs.
    known = {f.name for kind in _dataclasses() for f in fields(kind) if _auto_of(f) is not NO_AUTO}
    calls = [
        (file.name, node.lineno, argument.value)
        for file in Path(unfog.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("is_auto", "auto_value")
        for argument in node.args[1:]
        if isinstance(argument, ast.Constant)
    ]
    assert len(calls) > 40
    assert [call for call in calls if call[2] not in known] == []


def _dataclasses() -> set[type]:
    """Return the requests and, of the settings in them, all dataclasses."""
    found, left = set[type](), [*REQUESTS.values(), Config]
    while left:
        kind = left.pop()
        found.add(kind)
        left += [type(f.default) for f in fields(kind) if f.default is not MISSING and is_dataclass(f.default)]
    return found


def _auto_of(f: Any) -> Any:
    return f.metadata["rules"].auto if "rules" in f.metadata else NO_AUTO
