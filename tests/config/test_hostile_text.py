"""Random settings, words of commands, records and checkpoints: each reader takes them or refuses them in a line."""

import json
import math
import shutil
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from hostile import DEEP, NUMBERS, places, png, put
from unfog.cli.main import one_line
from unfog.cli.parse import flags_of, parse_args
from unfog.cli.read_request import REQUESTS, read_request
from unfog.config import spec_strings as kinds
from unfog.config.presets import PRESETS, preset
from unfog.config.schema import Config
from unfog.config.toml import from_toml, read_toml, to_toml, update
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import noise_levels
from unfog.diffusion.weighting import CustomWeighting
from unfog.errors import RequestError, RunError
from unfog.models.settings import UNet
from unfog.pipeline.build import build_state
from unfog.reporting.records import Metrics, read_events, read_metrics
from unfog.reporting.report import write_report
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.load import load_weights
from unfog.values.condition_kinds import KINDS, ColumnFacts
from unfog.values.image_format import Size

pytestmark = pytest.mark.slow


def fuzz(examples: int):
    """So many examples, each within twenty seconds; the tests' folders may be used again by each."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    quiet.append(HealthCheck.filter_too_much)  # most settings that are drawn are refused, and which depends on the seed
    share = min(1, settings.default.max_examples / 100)  # half of them in `make test`
    return settings(max_examples=int(share * examples), deadline=20_000, suppress_health_check=quiet)


SPECIAL = [*NUMBERS, 1, 2**31, 2**64, 0.0, -0.0, 1e-300, 1e300, True, False, ""]
NAMES = sorted({"", "kind", "nosuch", "a.b", *(f.name for f in fields(Config)), *(f.name for f in fields(Data))})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(SPECIAL),
    st.sampled_from(NAMES),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@contextmanager
def in_a_few_words() -> Iterator[None]:
    """A refusal is fine, if it is one that a person would read."""
    said = ""
    try:
        yield
    except RequestError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000


# Settings


@fuzz(400)
@given(st.text() | st.text(alphabet='[]{}=.,"\\#\n abk019_-+e:T'))
@example(DEEP)
@example("a = " + DEEP)
@example("a = " + "{a=" * 10_000)
@example("[training]\nsteps = " + "9" * 5000)
@example("a" + ".a" * 20_000 + "=1")
@example('source = "\\u0000"')
@example("a" + ".a" * 1_000_000)
@example("x = {" + "a ." * 1_000_000 + "}")
@example("x = [" + '"n0144.0764", ' * 200_000 + "]")
@example("[training]\nsteps = 1979-05-27T07:32:00Z")
def test_any_text_is_settings_or_refused(text):
    with suppress(RequestError):
        assert isinstance(from_toml(text, Config()), Config)


@fuzz(200)
@given(st.binary() | st.sampled_from(sorted(PRESETS)).map(lambda name: to_toml(preset(name)).encode()), st.data())
def test_any_bytes_are_settings_or_refused(tmp_path, content, data):
    content = bytearray(content)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    try:
        config = read_toml(file, Config())
    except RequestError as error:
        if not str(error).startswith(str(file)):
            raise
    else:
        assert from_toml(to_toml(config), Config()) == config


@fuzz(500)
@given(st.data())
def test_any_table_is_settings_or_refused(data):
    table = data.draw(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
    with in_a_few_words():
        config = update(Config(), table, "")
        assert from_toml(to_toml(config), Config()) == config


def values_of(annotation: object) -> st.SearchStrategy:
    """Values of a setting's type, most of them ones that it may have."""
    if (words := kinds.registry_of(annotation)) is not None:
        return st.sampled_from([part for part in words.values() if part is not None]).flatmap(parts_like)
    args = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return st.sampled_from(args)
    if annotation == Size:
        return st.sampled_from([0, 1, 8, 32, "96x64", "8X8", "64x", "0x8"]) | st.integers() | st.text()
    if annotation is ColumnFacts:
        kind = st.sampled_from(["", *KINDS, "unknown"])
        names = st.sampled_from(["", "class", "age", "a b"])
        words = st.lists(st.text(max_size=5), max_size=3, unique=True)
        return st.fixed_dictionaries({"name": names, "kind": kind}, optional={"categories": words})
    if typing.get_origin(annotation) is tuple:
        size = {"max_size": 5} if args[-1] is Ellipsis else {"min_size": 2, "max_size": 2}
        return st.lists(values_of(args[0]), **size).map(tuple)
    return {
        int: st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 16, 32, 64, 1000]) | st.integers(),
        float: st.sampled_from([0.0, 1e-8, 1e-3, 0.1, 0.5, 0.9, 1.0, 2.0]) | st.floats(),
        bool: st.booleans(),
        bool | None: st.sampled_from([None, False, True]),
        str: st.sampled_from(["", "white", "#12345f", "90s", "auto", "cpu"]) | st.text(),
    }[annotation]


@st.composite
def parts_like(draw: st.DrawFn, part: object) -> object:
    """A part of the same kind with a field or two changed."""
    hints = typing.get_type_hints(type(part))
    for f in draw(st.lists(st.sampled_from(fields(part)), max_size=2)) if fields(part) else []:
        with suppress(RequestError, TypeError):
            part = replace(part, **{f.name: draw(values_of(hints[f.name]))})
    return part


def settings_places(tree: object, above: str = "") -> list[tuple[str, object]]:
    hints, found = typing.get_type_hints(type(tree)), []
    for f in fields(tree):
        name, value = f"{above}.{f.name}".lstrip("."), getattr(tree, f.name)
        if is_dataclass(value) and kinds.registry_of(hints[f.name]) is None:
            found += settings_places(value, name)
        else:
            found.append((name, hints[f.name]))
    return found


# Made once, so that a setting of a new type fails here, not only in the runs that happen to draw it.
VALUES = [(name, values_of(annotation)) for name, annotation in settings_places(Config())]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A valid configuration, a preset with some settings changed."""
    config = preset(draw(st.sampled_from(sorted(PRESETS))))
    for name, values in draw(st.lists(st.sampled_from(VALUES), max_size=6)):
        value: object = draw(values)
        for part in reversed(name.split(".")):
            value = {part: value}
        with suppress(RequestError):
            config = update(config, value, "")
    return config


@fuzz(300)
@given(configs())
def test_any_valid_config_survives_toml(config):
    assert from_toml(to_toml(config), Config()) == config
    assert update(Config(), {f.name: getattr(config, f.name) for f in fields(config)}, "") == config


WORDS = [words for _, words in kinds._REGISTRIES]


@fuzz(500)
@given(st.sampled_from(WORDS), st.data())
def test_any_text_is_a_part_or_refused(words, data):
    kind = data.draw(st.sampled_from(sorted(words)))
    names = [f.name for f in fields(words[kind])] if words[kind] is not None else []
    pair = st.tuples(st.sampled_from([*names, ""]) | st.text(max_size=3), st.sampled_from("=/:,"), SCALARS.map(str))
    text = data.draw(
        st.text() | st.lists(pair, max_size=3).map(lambda pairs: f"{kind}:{','.join(map(''.join, pairs))}")
    )
    with in_a_few_words():
        part = kinds.parse_spec(words, text)
        assert part is None or kinds.parse_spec(words, kinds.format_spec(part)) == part


@fuzz(300)
@given(st.data())
def test_a_diffusion_that_is_accepted_has_finite_weights_and_levels(data):
    hints = typing.get_type_hints(Diffusion)
    given_values = {f.name: data.draw(values_of(hints[f.name])) for f in fields(Diffusion)}
    given_values["adaptive"] = data.draw(st.sampled_from([0.0, 0.5]))  # of all numbers, too few are shares
    try:
        diffusion = Diffusion(**given_values)
    except (RequestError, TypeError):
        assume(False)
    assume(not isinstance(diffusion.weighting, CustomWeighting))  # which has no path of a function here
    u = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])
    logsnr = diffusion.schedule(u)
    assert not logsnr.isnan().any()
    assert (logsnr[1:] <= logsnr[:-1]).all()
    levels = noise_levels(diffusion.schedule, min(7, diffusion.schedule.steps or 7), "schedule")
    assert not levels.isnan().any()
    assert not diffusion.weight(logsnr).isnan().any(), diffusion


# The command line

FLAGS = sorted({flag for kind in REQUESTS.values() for flag in flags_of(kind)})
WORD = st.one_of(
    st.sampled_from(FLAGS),
    st.sampled_from(
        ["1", "-1", "0.5", "abc", "", "--", "-", "--nosuch", "fashion", "cosine:steps=5", "small", "=", "-5e3"]
    ),
    st.text(max_size=6),
    st.builds("{}={}".format, st.sampled_from(FLAGS), st.text(max_size=4)),
)


@fuzz(400)
@given(st.lists(WORD, max_size=8), st.sampled_from(sorted(REQUESTS)))
@example(["--" + "x" * 100_000], "train")
@example(["x", "--steps", "9" * 100_000], "train")
@example(["\ud800", "--out", "\udcff"], "train")
def test_any_words_are_a_request_or_refused(words, command):
    with in_a_few_words():
        parse_args(words, REQUESTS[command], f"unfog {command}", {})


@fuzz(200)
@given(st.lists(st.tuples(st.sampled_from(FLAGS), SCALARS.map(str)), max_size=3))
def test_any_settings_of_a_training_are_a_config_or_refused(tmp_path, pairs):
    words = [f"{flag}={value}" for flag, value in pairs]
    with suppress(RequestError):
        request = read_request("train", ["fashion", *words])
        config, out = request.settings, request.out
        assert from_toml(to_toml(config), Config()) == config
        assert out is None or not out.exists()


@fuzz(200)
@given(st.text())
@example("a\nb\x1b[2J\u202e\ud800")
def test_what_is_said_is_a_line(text):
    assert one_line(text).isprintable()


# The record


@fuzz(300)
@given(st.lists(st.binary() | JSON.map(lambda value: json.dumps(value).encode()), max_size=6))
@example([b'{"step": "nine", "loss": "low"}'])
@example([b'{"step": 1e999, "loss": 1}', b'{"step": 1, "images": ' + b"9" * 4000 + b"}"])
@example([b"\xff\xfe", b"[]", b"5", b'{"a":'])
@example([b'{"loss": ' + b"[" * 100_000])
@example([b'{"loss": ' + b"[" * 400 + b"]" * 400 + b"}"])
def test_any_record_is_read_and_repaired(tmp_path, lines):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join(lines))
    assert all(isinstance(row, dict) for row in read_metrics(file) + read_events(file))
    metrics = Metrics(file, start=10)
    metrics.write(11, 44, 1.0, {"loss": 0.5})
    metrics.close()
    assert read_metrics(file)[-1]["step"] == 11


METRICS = (
    "step",
    "images",
    "seconds",
    "loss",
    "held_out_loss",
    "loss_by_level",
    "gradient_norm",
    "lr",
    "held_out_by_level",
)
EVENTS = ("time", "step", "kind", "name", "value", "reason", "message")
KINDS_OF_EVENTS = st.sampled_from(["started", "choice", "data", "finished", "failed", "warning", "step_refused"])


@fuzz(120)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(METRICS), JSON | st.floats() | st.integers(0, 100), max_size=6), max_size=5
    ),
    st.lists(st.dictionaries(st.sampled_from(EVENTS), JSON | KINDS_OF_EVENTS, max_size=5), max_size=5),
    st.binary() | JSON.map(lambda value: json.dumps(value).encode()),
)
@example(
    [{"step": "nine", "images": "many", "seconds": "long", "loss": "low", "loss_by_level": ["a", 1, None]}], [], b""
)
@example([{"step": i, "loss": v} for i, v in enumerate([1e308, -1e308, 5e-324, 0])], [{"kind": ["a"]}], b"\xff")
@example(
    [{"step": 1, "loss": 10**400, "images": 10**400, "seconds": 10**400}], [{"kind": "finished", "step": "x"}], b"a = 1"
)
@example(
    [{"step": True, "images": None, "loss_by_level": [[1]]}],
    [{"kind": "choice"}, {"kind": {}}],
    b"[a]\nb = [[[[[[[[[[[1]]]]]]]]]]]",
)
def test_any_record_has_a_report(tmp_path, metrics, events, config):
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    (tmp_path / "config.toml").write_bytes(config)
    assert write_report(tmp_path).stat().st_size > 1000


def test_the_report_of_a_damaged_run(tmp_path):
    (tmp_path / "config.toml").write_text("a = " + DEEP)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/00000001.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\xff" * 30)
    (tmp_path / "samples/00000002.png").write_bytes(png(2**31 - 1, 2**31 - 1, 8, 2, b""))
    (tmp_path / "samples/00000003.png").mkdir()
    (tmp_path / "samples/٣.png").write_bytes(b"")
    (tmp_path / "checkpoints/00000001").mkdir(parents=True)
    (tmp_path / "checkpoints/00000001/manifest.json").symlink_to("nowhere")
    (tmp_path / "checkpoints/00000002").mkdir()
    (tmp_path / "checkpoints/00000002/manifest.json").write_text("{}")
    (tmp_path / "checkpoints/00000002/loop").symlink_to("loop")
    assert "config.toml" in write_report(tmp_path).read_text()


# Checkpoints

TINY = replace(
    preset("default"),
    network=UNet(channels=(8, 8), attention=(False, False), mid_attention=False, head_channels=0, norm_groups=4),
    data=Data(size=8, channels=1),
    training=replace(preset("default").training, precision="fp32"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict]:
    """A folder with one whole checkpoint, 00000001; its manifest."""
    folder = tmp_path_factory.mktemp("checkpoints")
    state = build_state(TINY, torch.device("cpu"))
    made = snapshot.write_checkpoint(snapshot.take_snapshot(state, 1, anchor=True), folder)
    assert checkpoint.newest(folder)[0] is not None
    return folder, json.loads((made / "manifest.json").read_text())


def copied(folder: Path, place: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(folder / "00000001", place / "checkpoints/00000001"))


def signed(manifest: object) -> str:
    """A manifest as whoever knows the format would forge it."""
    if isinstance(manifest, dict):
        manifest = {key: value for key, value in manifest.items() if key != "sha256"}
        manifest["sha256"] = checkpoint.manifest_digest(manifest)
    return json.dumps(manifest)


def none_or_passed_over(folder: Path) -> None:
    """All that asks for a checkpoint finds the one there is, or says why not, and never reads what is elsewhere."""
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        read = checkpoint.file_digest
        patch.setattr(checkpoint, "file_digest", lambda path, root: opened.append(path) or read(path, root))
        found, broken = checkpoint.list_checkpoints(folder)
        assert len(found) + len(broken) == 1
        assert all(isinstance(str(one), str) for one in broken)
        assert all(one.find_damage() is None or isinstance(one.find_damage(), str) for one in found)
        for step in (None, 1):
            with suppress(RequestError, RunError):
                checkpoint.find_checkpoint(folder, step)
    assert all(path.parent.parent == folder and not path.is_symlink() for path in opened)


@fuzz(500)
@given(data=st.data())
def test_a_manifest_describes_a_checkpoint_or_is_broken(saved, tmp_path, data):
    folder, manifest = saved
    there = tmp_path / "checkpoints/00000001"
    if not there.exists():
        copied(folder, tmp_path)
    names = st.sampled_from(
        ["../outside.safetensors", "/etc/passwd", "model.safetensors", "a\0b", "x" * 300, "..", "."]
    )
    for _ in range(data.draw(st.integers(1, 2))):
        manifest = put(manifest, data.draw(st.sampled_from(places(manifest))), data.draw(JSON | names))
    text = data.draw(st.sampled_from([signed(manifest), json.dumps(manifest), DEEP, json.dumps(manifest)[:-7]]))
    (there / "manifest.json").write_text(text)
    none_or_passed_over(there.parent)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/absolute", "..", "a\0b", "x" * 300, "", "inside.safetensors"]
)
def test_a_manifest_reaches_nothing_else(saved, tmp_path, name):
    """A manifest that takes its weights from elsewhere, where they are, and whole."""
    folder, manifest = saved
    there = copied(folder, tmp_path)
    name = str(tmp_path / "absolute.safetensors") if name == "/absolute" else name
    with suppress(OSError, ValueError):
        (there / name).write_bytes((there / "model.safetensors").read_bytes())
    manifest = deepcopy(manifest)
    manifest["files"][name] = manifest["files"].pop("model.safetensors")
    (there / "manifest.json").write_text(signed(manifest))
    none_or_passed_over(there.parent)
    with pytest.raises(RunError):
        checkpoint.newest(there.parent)


@pytest.mark.parametrize("key", ["step", "images", "held_out_loss"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 10**400, "x", None, [], -math.inf])
def test_numbers_that_no_step_can_be(saved, tmp_path, key, value):
    folder, manifest = saved
    there = copied(folder, tmp_path)
    (there / "manifest.json").write_text(signed({**manifest, key: value}))
    none_or_passed_over(there.parent)
    found, broken = checkpoint.list_checkpoints(there.parent)
    assert key == "held_out_loss" or value == 10**400 or (not found and broken[0].reason.startswith("manifest.json: "))


def test_sizes_are_compared_before_anything_is_read(saved, tmp_path, monkeypatch):
    folder, _manifest = saved
    there = copied(folder, tmp_path)
    with (there / "ema.safetensors").open("r+b") as file:
        file.truncate(2**40)  # with holes, so that it takes no room
    monkeypatch.setattr(
        checkpoint, "file_digest", lambda path: pytest.fail("read") if path.stat().st_size > 2**30 else ""
    )
    found, _ = checkpoint.list_checkpoints(there.parent)
    assert "bytes" in str(found[0]._replace(files={"ema.safetensors": found[0].files["ema.safetensors"]}).find_damage())


@fuzz(200)
@given(data=st.data())
def test_damaged_weights_are_read_or_refused(saved, tmp_path, data):
    folder, _ = saved
    content = bytearray((folder / "00000001/model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(content), 3000)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    (tmp_path / "model.safetensors").write_bytes(content)
    state = build_state(TINY, torch.device("cpu"))
    with suppress(RunError):
        load_weights(tmp_path, "model", state.model)
