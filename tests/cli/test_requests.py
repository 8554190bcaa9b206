"""Wrong requests, by every route: refused in a line or two, with status 2, at once, and before anything is made."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import typing
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import unfog
from unfog.cli.main import main
from unfog.cli.read_request import read_request
from unfog.config import spec_strings as kinds
from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.config.validate import check_out
from unfog.diffusion.noise import Cosine
from unfog.errors import Interrupted, RequestError, install_command
from unfog.models.settings import SIZES
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import Progress
from unfog.values.image_format import Size

pytestmark = pytest.mark.timeout(240)  # a request that is not refused would train for an hour

HUGE = 2**63
STORED = to_toml(replace(preset("default"), source="fashion"))


def leaves(kind: type, above: tuple[str, ...] = ()) -> list[tuple[str, object]]:
    """(dotted name, type) of every setting, found without the code under test."""
    found = []
    hints = typing.get_type_hints(kind)
    for f in fields(kind):
        annotation = hints[f.name]
        if is_dataclass(annotation) and kinds.registry_of(annotation) is None:
            found += leaves(annotation, (*above, f.name))
        else:
            found.append((".".join((*above, f.name)), annotation))
    return found


LEAVES = leaves(Config)
HIDDEN = (
    "source",
    "classes",
    "columns",
    "buckets",
    "fingerprint",
    "data.map_values",
    "data.map_range",
    "data.unknown_share",
    "data.unknown_mask",
    "init.sha256",
    "latents.",
    "autoencoder.",
    "text_encoder.sha256",
    "text_encoder.pretrained_",
)  # no flags, as the program fills them in
FLAGGED = [leaf for leaf in LEAVES if not leaf[0].startswith(HIDDEN)]

# Texts that no setting of the kind can be, and values that are of the type but that none may have.
OPEN_IF_EMPTY = ("training.budget", "autoencoder_folder", "text_encoder.pretrained")
BAD_TEXTS = {
    int: ["abc", "", "1.5", "١٢", "1e99", "9" * 5000, "0x10", "-5", str(HUGE)],
    float: ["abc", "", "1,5", "١", "inf", "-inf", "nan", "1e999"],
    Size: ["abc", "", "1.5", "١٢", "1e99", "9" * 5000, "0x10", "-5", str(HUGE), "96x", "x64", "96x64x3", "3x64"],
    bool: ["maybe", ""],
    "part": ["nosuch", "", "nosuch:a=1", ":", "auto:x=1"],
    "choice": ["nosuch", "", "AUTO "],
    "text": ["nosuch", "10 minutes", "\x00", "١m"],
}
BAD_VALUES = {
    int: ["abc", "12", "", 1.5, True, [1], {"a": 1}, -5, HUGE, math.inf],
    float: ["abc", "0.5", True, [1.0], {}, math.inf, -math.inf, math.nan, 10**400],
    Size: ["abc", "", 1.5, True, [96, 64], {"a": 1}, -5, HUGE, math.inf, "96x", "64x3"],
    bool: [1, 0, "true", [True], {}],
    "part": [5, "nosuch", {}, {"kind": "nosuch"}, {"kind": 5}, {"kind": ["cosine"]}, [], True],
    "choice": [True, "nosuch", [], {}, 5, ""],
    "text": [5, True, ["a"], {}],
    "list": [5, "ab", {"a": 1}, [5], [[]], True],
    "section": [5, "a", [], True],
}


def sort(annotation: object) -> object:
    """Which of the lists above go with a type."""
    if kinds.registry_of(annotation) is not None:
        return "part"
    if typing.get_origin(annotation) is tuple:
        return "list"
    if typing.get_origin(annotation) is typing.Literal:
        return "choice"
    if annotation == bool | None:  # a switch that may be left open
        return bool
    return "text" if annotation is str else annotation


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def literal(value: object) -> str:
    """A value in TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def in_toml(name: str, value: object) -> str:
    return f"{name} = {literal(value)}\n"


def nested(name: str, value: object) -> dict:
    first, _, rest = name.partition(".")
    return {first: nested(rest, value) if rest else value}


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working folder with a run that has settings alone; the cache is in it, so that nothing made goes unseen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(STORED)
    return tmp_path


@pytest.fixture
def refused(here, capsys, monkeypatch):
    """Run a command in this process; it must be refused as a request is, and leave nothing. Returns what was said."""
    monkeypatch.setattr(Progress, "_print", lambda self, now: None)  # a busy machine takes the two seconds to a line

    def run(*words: object) -> str:
        before = everything(here)
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        out, said = capsys.readouterr()
        assert (left.value.code, out) == (2, ""), said
        assert said.startswith("unfog: ")
        assert said.endswith("\n")
        assert said.count("\n") <= 2
        assert len(said) < 1200
        assert "Traceback" not in said
        assert said.isascii() or said.replace("\n", "").isprintable()
        assert everything(here) == before
        return said

    return run


def test_a_run_of_no_steps_and_a_key_of_another_version_are_refused(refused, here):
    for name in ("steps", "images"):
        said = refused("train", "fashion", f"--{name}", "0")
        assert f"{name} = 0 would train nothing; give at least 1" in said
        with pytest.raises(RequestError, match=f"{name} = 0 would train nothing"):
            unfog.train("fashion", **{name: 0})
    (here / "mine.toml").write_text("[training]\nbatsch = 5\n")
    said = refused("train", "fashion", "--config", "mine.toml")
    assert f"did you mean 'batch'? (this is unfog {unfog.__version__};" in said


@pytest.mark.parametrize(("name", "annotation"), FLAGGED, ids=[name for name, _ in FLAGGED])
def test_no_flag_takes_what_it_cannot_mean(refused, name, annotation):
    kind = sort(annotation)
    pair = kind == "list" and typing.get_args(annotation) == (float, float)
    texts = BAD_TEXTS[float if pair else kind] if pair or kind != "list" else ["nosuch", ""]
    for text in texts:
        many = [text, text] if pair else [text]
        words = [f"{flag(name)}={text}"] if kind is bool else [flag(name), *many]
        if kind == "text" and name in OPEN_IF_EMPTY and text == "":
            continue
        if name == "checkpoint.mirror" and text != "\x00":  # any path is a folder that can be made
            continue
        said = refused("train", "fashion", *words)
        assert name.rpartition(".")[2] in said.replace("-", "_"), said
        if kind is not bool:
            assert text[:10].strip() in said or repr(text)[1:5] in said or "infinite" in said or "finite" in said, said
    if kind is not bool:
        assert "needs" in refused("train", "fashion", flag(name))
        assert "needs" in refused("train", "fashion", flag(name), "--steps", "5")


@pytest.mark.parametrize(("name", "annotation"), LEAVES, ids=[name for name, _ in LEAVES])
def test_no_toml_and_no_python_takes_what_it_cannot_mean(refused, here, name, annotation):
    """Every value by one way from a file, one from a run and one from Python; the first one by all ways."""
    kind = sort(annotation)
    for nth, value in enumerate(BAD_VALUES[kind]):
        if kind == "list" and name != "optimizer.betas" and value == []:
            continue
        table = in_toml(name, value)
        (here / "mine.toml").write_text(table)
        (here / "run/config.toml").write_text(table)
        last = name.rpartition(".")[2]
        said = refused("train", "fashion", "--config", "mine.toml")
        assert "mine.toml: " in said
        said += refused("resume", "run")
        before = everything(here)
        if nth == 0:
            said += refused("sample", "run")
            with pytest.raises(RequestError) as error:
                unfog.load(here / "run")
            said += str(error.value)
        if name not in HIDDEN:
            with pytest.raises(RequestError) as error:
                unfog.train("fashion", **nested(name, value))
            assert "\n" not in str(error.value)
            said += str(error.value)
            if nth == 0:
                (here / "run/config.toml").write_text(STORED)
                before = everything(here)
                with pytest.raises(RequestError) as error:
                    unfog.resume(here / "run", **nested(name, value))
                said += str(error.value)
        ways = (2 if nth else 4) if name in HIDDEN else (3 if nth else 6)
        assert said.count(last) >= ways, said
        assert everything(here) == before


SECTIONS = [f.name for f in fields(Config) if is_dataclass(typing.get_type_hints(Config)[f.name])]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_is_a_table(refused, here, name):
    for value in BAD_VALUES["section"]:
        (here / "mine.toml").write_text(in_toml(name, value))
        assert name in refused("train", "fashion", "--config", "mine.toml")
        with pytest.raises(RequestError, match=name):
            unfog.train("fashion", **{name: value})


def numbers_of_parts() -> list[tuple[str, str, str, object]]:
    """(place, kind, field, type) of every number in the parts that are named by word."""
    found = []
    for place in ("diffusion.schedule", "diffusion.weighting", "ema", "network"):
        annotation = dict(LEAVES)[place]
        for kind, part in kinds.registry_of(annotation).items():
            if not type(part).__module__.startswith(("unfog.", "builtins")):
                continue  # registered by another test
            hints = typing.get_type_hints(type(part)) if part is not None else {}
            names = [f.name for f in fields(part)] if part is not None else []
            found += [(place, kind, name, hints[name]) for name in names if hints[name] in (int, float)]
    return found


@pytest.mark.parametrize(("place", "kind", "name", "annotation"), numbers_of_parts())
def test_no_part_takes_a_number_that_it_cannot_have(refused, here, place, kind, name, annotation):
    texts = ["abc", "-25", "inf", "nan", "1e400"] + (["1.5", str(HUGE)] if annotation is int else [])
    for text in texts:
        said = refused("train", "fashion", flag(place), f"{kind}:{name}={text}")
        assert name in said
        (here / "mine.toml").write_text(in_toml(place, f"{kind}:{name}={text}"))
        assert place in refused("train", "fashion", "--config", "mine.toml")
    for value in ([-25, HUGE] if annotation is int else [-25.0, math.inf, math.nan, 10**400]) + ["a", True, None]:
        with pytest.raises(RequestError, match=name):
            unfog.train("fashion", **nested(place, {"kind": kind, name: value}))


TABLE = [
    # what is written, what is said
    ("train", "SOURCE is missing"),
    ("resume", "RUN is missing"),
    ("sample -n 4", "RUN is missing"),
    ("report", "RUN is missing"),
    ("sample --label cat run -n 4", "RUN is missing; --label took 'cat run'; write it first: unfog sample RUN"),
    ("train a b", "takes one SOURCE"),
    ("trian fashion", "did you mean 'train'"),
    ("--steps 5", "before the command"),
    ("train fashion --stepz 5", "did you mean --steps?"),
    ("sample runs/a --sampler.steps 5", "find-lr; did you mean --steps?"),
    ("train fashion --steps", "--steps needs a value: a whole number"),
    ("train fashion --steps --lr 1", "--steps needs a value"),
    ("train fashion --optimizer.betas 0.9", "--optimizer.betas needs 2 values, each a number, and got 1"),
    ("train fashion --weight-decay 0", "did you mean --optimizer.weight-decay?"),
    ("train fashion --learning-rate 1", "did you mean --lr?"),
    ("train fashion --batch-size 8", "did you mean --batch?"),
    ("train fashion --max_train_steps 8", "did you mean --steps?"),
    ("train fashion --out s3://bucket/run", "mount the bucket"),
    ("resume s3://bucket/run", "mount the bucket"),
    ("pack fashion gs://bucket/pack", "mount the bucket"),
    ("train fashion --epochs 8", "give --images, which is all images times the epochs"),
    ("train fashion --output-dir x", "did you mean --out?"),
    ("sample run --num-inference-steps 8", "did you mean --steps?"),
    ("sample run --guidance-scale 2", "did you mean --guidance?"),
    ("train fashion --every 8", "--log.every or --preview.every"),
    ("train fashion --sampler dim", "did you mean ddim"),
    ("train fashion --strip", "--strip is not a flag of unfog train, but of unfog sample"),
    ("train fashion --optimizer.clip 0", "did you mean --data.clip or --training.clip or"),
    ("sample run --lr 1", "not a flag of unfog sample, but of unfog train, unfog resume, unfog train-autoencoder"),
    ("report run --lr 1", "not a flag of unfog report"),
    ("train fashion --zzz", "see unfog train --help"),
    ("train fashion -z", "-z is not a flag"),
    ("train fashion --steps 5 --steps 6", "given twice: '--steps 5' and '--steps 6'"),
    ("train fashion --steps 5 --training.steps 6", "given twice"),
    ("train fashion --flip --no-flip", "given twice"),
    ("sample runs/photos --label a --label b", "after one flag: --label a b"),
    ("evaluate runs/photos --metric fid", "but of unfog ema-sweep; did you mean --metrics?"),
    (
        "train fashion --network unet:channels=32/64",
        "attention has 3 entries, but channels has 2 levels; try attention=0/1",
    ),
    ("train fashion --flip true", "--flip takes no value; write"),
    ("train fashion --flip=true", "--flip takes no value"),
    ("train fashion --images 1e6", "not a whole number; write 1000000"),
    ("train fashion --images 1,000", "not a whole number; write 1000"),
    ("train fashion --steps 5 --images 6", "the length is given 2 times"),
    ("train fashion --lr 1e31", "optimizer.lr = 1e+31 is too large a number"),
    ("train fashion --batch 4 --microbatch 8", "microbatch = 8 must be at most batch = 4"),
    ("train fashion --preset demoo", "preset = 'demoo' is unknown; did you mean 'demo'"),
    ("train fashion --schedule cosin", "--schedule: 'cosin' is unknown; did you mean 'cosine'"),
    ("train fashion --network small:chanels=3", "--network: small has no setting 'chanels'; did you mean 'channels'"),
    ("train fashion --network small:channels", "needs a value, as in channels=1"),
    ("train fashion --network small:channels=", "small:channels = '' is not a whole number"),
    ("train fashion --network small:channels=32/48/96", "multiple of norm_groups"),
    ("train fashion --network small:dropout=0.1,dropout=0.2", "dropout is given twice"),
    ("train fashion --network auto:dropout=1", "auto has no setting 'dropout'"),
    ("train fashion --network small --size 30", "size = 30 must be a multiple of 4"),
    ("train fashion --network small:attention=0/1", "attention has 2 entries"),
    ("train fashion --network small:attention=0/1/2", "small:attention = '0/1/2' is not true or false"),
    ("train fashion --label-dropout 3", "label_dropout = 3.0"),
    ("train fashion --schedule cosine:steps=10 --sampler.steps 20", "more than the 10 levels of the cosine schedule"),
    ("train fashion --schedule cosine:steps=1000000000", "steps = 1000000000"),
    ("train fashion --schedule cosine:max_beta=1e-300", "steps that add no noise"),
    ("train fashion --schedule linear:beta_end=0.99", "leave no signal before the end"),
    ("train fashion --schedule linear:beta_start=1e-320", "beta_start"),
    ("train fashion --schedule cosine:offset=1e300", "offset"),
    ("train fashion --diffusion.sigma-data 1e-300", "sigma_data"),
    ("train fashion --optimizer.eps 0", "eps = 0.0 must be above 0"),
    ("train fashion --network small:norm_eps=0", "norm_eps"),
    ("train fashion --network small:head_channels=-32", "head_channels"),
    ("train fashion --path ve --schedule cosine:zero_terminal=1", "sigma is infinite"),
    ("train fashion --log.sinks tensorbord", "log.sinks names 'tensorbord'"),
    ("train fashion --data.background nocolour", "background = 'nocolour' is not a colour"),
    ("train fashion --device cuda:x", "device = 'cuda:x'"),
    ("train fashion --device vulkan", "device = 'vulkan'"),
    ("train fashion --device cuda:9999", "device = cuda:9999 is not available"),
    ("train fashion --budget 10", "write 90s, 10m, 2h, 1d"),
    ("train fashio", "did you mean fashion?"),
    ("train ~nosuchuser/photos", "cannot be read"),
    ("resume runn", "runn is not a run; did you mean run?"),
    ("resume elsewhere", "elsewhere is not a run: there is no such folder"),
    ("export run", "OUT is missing; write both: unfog export RUN OUT"),
    ("resume run --network small", "cannot become"),
    ("resume run --seed 5", "--force"),
    ("resume run --verify=1", "--verify takes no value"),
    ("resume run --source nosuch", "neither a folder nor a built-in set"),
    ("train fashion --force", "not a flag of unfog train, but of unfog resume"),
    ("sample run -n 0", "n = 0 must be at least 1"),
    ("sample run -n -4", "n = -4 must be at least 1"),
    ("sample run -n 4 --n 5", "given twice"),
    ("sample run --batch 0", "batch = 0 must be at least 1"),
    ("sample run --checkpoint -1", "checkpoint = -1"),
    ("sample run --steps 0", "sampler.steps = 0"),
    ("sample run --sampler dimm", "did you mean ddim?"),
    ("sample run --guidance nan", "guidance = nan must be a finite number"),
    ("sample run --weights EMA", "--weights got 'EMA', which is not one of ema, raw"),
    ("sample run --label cat", "label = 'cat', but this run has no classes"),
    ("train fashion --config nosuch.toml", "nosuch.toml cannot be read"),
    ("sample run --device gpu", "device = 'gpu'"),
]


@pytest.mark.parametrize(("words", "said"), TABLE, ids=[words for words, _ in TABLE])
def test_what_is_said(refused, words, said):
    assert said in refused(*words.split())


def test_values_of_a_flag_given_twice_are_quoted_in_the_remedy(refused):
    said = refused("sample", "run", "--prompt", "a red cat", "--prompt", "a fish")
    assert 'give all values after one flag: --prompt "a red cat" "a fish"' in said


def test_all_unknown_flags_are_named_in_one_error_with_what_to_give_here(refused):
    words = "train fashion --grad-clip 1 --lr 1 --warmup-steps=5000 --adam_beta1 -1 --adam_beta2 0.9 --strip --zzz"
    said = refused(*words.split(), "--", "--not-a-flag")
    names = "--grad-clip, --warmup-steps, --adam_beta1, --adam_beta2, --strip and --zzz"
    assert f"{names} are not flags of unfog train. --grad-clip: did you mean --training.clip? " in said
    assert "? --warmup-steps: did you mean --optimizer.warmup? " in said
    assert "--adam_beta1, --adam_beta2: give --optimizer.betas" in said
    assert said.strip().endswith("--strip: a flag of unfog sample. --zzz: see unfog train --help")


@pytest.mark.slow
def test_odd_places(refused, here, tmp_path):
    (here / "file").write_text("")
    (here / "empty").mkdir()
    (here / "photos").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(here / "photos/a.png")
    long = "x" * 300
    for out, said in (
        ("file", "is a file"),
        ("file/run", "is a file"),
        ("run", "is already a run"),
        ("photos", "it is not empty"),
        (long, "name too long"),
        (f"new/{long}/run", "name is too long"),
        ("a\nb", "cannot be shown"),
        ("a\x00b", "cannot be"),
        ("a\x1b[31mb", "cannot be shown"),
        ("~nosuchuser/\x07", "cannot be shown"),
    ):
        assert said in refused("train", "fashion", "--out", out).lower()
    assert "a folder of its own" in refused("train", "photos", "--out", "photos")
    assert "a folder of its own" in refused("train", ".", "--out", ".")
    for source, said in (
        ("file", "is a file"),
        ("", "source is empty"),
        ("empty", "found 0 images"),
        ("nosuch", "neither a folder nor a built-in set"),
        (long, "name too long"),
        (f"{long}/x", "name too long"),
        ("a\x00b", "a\\x00b"),
        ("new\nline", "neither a folder"),
    ):
        assert said in refused("train", source).lower()
        for command in ("resume", "sample", "report"):
            refused(command, source)
    (here / "runs").write_text("a file where the runs would go")
    assert "is a file" in refused("train", "fashion")
    for out, said in (("file", "is a file"), ("photos", "it is not empty"), (long, "too long")):
        assert said in refused("sample", "run", "--out", out)


def test_a_run_in_the_place_of_images_and_the_other_way_round(refused, here, monkeypatch):
    (here / "run/checkpoints/00000001").mkdir(parents=True)
    for words in (("train", "run"), ("plan", "run"), ("find-lr", "run"), ("pack", "run", "out")):
        assert "'run' is the folder of a run, and not of images" in refused(*words)
    assert "checkpoints/00000001 is not a run, but a part of one; give run\n" in refused(
        "resume", "run/checkpoints/00000001"
    )
    for against, said in (("ruin", "did you mean run?"), ("5e3", "no such folder; give the step of a checkpoint")):
        assert said in refused("evaluate", "run", "--metrics", "held_out", "--against", against)
    assert "the step of a checkpoint" in refused("evaluate", "run", "--metrics", "held_out", "--against", "")
    with monkeypatch.context() as patch:  # as a parent of mode 711, which may be entered and not listed
        patch.setattr(os, "listdir", lambda path=".": os.stat(here / "nothing"))
        assert "a part of one; give run\n" in refused("resume", "run/checkpoints/00000001")
    (here / "photos").mkdir()
    (here / "photos/a.png").write_bytes(b"")
    assert "it has no config.toml; give the folder of a run (unfog runs lists them)" in refused("sample", "photos")
    shutil.copytree(here / "run", here / "all/newer")
    shutil.copytree(here / "run", here / "all/older")
    os.utime(here / "all/older/config.toml", (1, 1))
    assert f"all is not a run, but a folder of runs; give one of them, such as {Path('all/newer')}" in refused(
        "watch", "all"
    )


def test_home_is_meant_by_a_tilde(refused, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert read_request("train", ["fashion", "--out=~/new", "--steps", "1"]).out == here / "new"
    (here / "file").write_text("")
    for words in (["train", "fashion", "--out=~/file"], ["sample", "~/run", "--out=~/file"]):
        assert f"{here}/file is a file" in refused(*words)
    assert "~" not in refused("sample", "~/nosuch")
    with pytest.raises(RequestError, match=f"{here}/nosuch is not a run"):
        unfog.load("~/nosuch")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_places_without_permission(refused, here):
    (here / "shut").mkdir(mode=0o500)
    assert "shut is not writable" in refused("train", "fashion", "--out", "shut/run")
    (here / "run").chmod(0o500)
    assert "is not writable" in refused("sample", "run")
    with pytest.raises(RequestError, match="is not writable"):
        RunFolder(here / "run").check_writable()
    (here / "run").chmod(0o700)
    (here / "blind").mkdir(mode=0o000)
    assert "ermission" in refused("train", "blind")


@pytest.mark.slow
def test_odd_files_of_settings(refused, here):
    (here / "deep.toml").write_text("a = " + "[" * 100_000)
    (here / "tables.toml").write_text("a" + ".a" * 5000 + " = 1")
    (here / "binary.toml").write_bytes(bytes(range(256)) * 10)
    (here / "large.toml").write_text("# a comment\n" * 1_000_000)
    (here / "long.toml").write_text("[training]\nsteps = " + "9" * 5000)
    (here / "word.toml").write_text("[training]\nbudget = " + '"' + "x" * 100_000 + '"')
    (here / "key.toml").write_text('"' + "x" * 100_000 + '" = 1')
    (here / "twice.toml").write_text("[data]\nsize = 8\n[data]\nsize = 8")
    for name, said in (
        ("deep.toml", "nested far too deep"),
        ("tables.toml", "nested far too deep"),
        ("binary.toml", "is not text in utf-8"),
        ("large.toml", "over 4 mb"),
        ("long.toml", "not valid toml"),
        ("word.toml", "budget = 'xxx"),
        ("key.toml", "unknown setting xxx"),
        ("twice.toml", "not valid toml"),
        ("run", "is a directory"),
        ("nosuch.toml", "no such file"),
        ("x" * 300, "name too long"),
        ("a\x00b", "null"),
    ):
        started = time.process_time()
        assert said in refused("train", "fashion", "--config", name).lower(), name
        assert time.process_time() - started < 1.5, name
        if name.endswith(".toml") and (here / name).exists():
            (here / "run/config.toml").write_bytes((here / name).read_bytes())
            refused("resume", "run")


def test_settings_from_python_that_no_toml_could_hold(here):
    class Odd:
        def __repr__(self) -> str:
            return "odd\nin two lines"

    before = everything(here)
    for settings, said in (
        ({"optimizer": {1: 2}}, "unknown setting optimizer.1"),
        ({"stepz": 5}, "unknown setting stepz; did you mean 'steps'"),
        ({"steps": None}, "training.steps = None is not a whole number"),
        ({"steps": Odd()}, "odd in two lines"),
        ({"lr": 1j}, "optimizer.lr = 1j is not a number"),
        ({"lr": np.float64("nan")}, "must be a finite number"),
        ({"batch": np.arange(3)}, "training.batch"),
        ({"precision": np.array(["fp32", "bf16"])}, "training.precision"),
        ({"schedule": Cosine(zero_terminal="x")}, "diffusion.schedule.zero_terminal = 'x' is not true or false"),
        ({"schedule": SIZES["small"]}, "diffusion.schedule"),
        ({"network": "small", "size": 30}, "size = 30"),
        ({"preset": "demoo"}, "did you mean 'demo'"),
        ({"preset": 5}, "preset = 5 is unknown"),
        ({"device": "tpu"}, "device = 'tpu'"),
    ):
        with pytest.raises(RequestError) as error:
            unfog.train("fashion", **settings)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    assert everything(here) == before


def test_paths_from_python(here):
    before = everything(here)
    for call in (
        lambda: unfog.train(5),
        lambda: unfog.train(b"photos"),
        lambda: unfog.train(None),
        lambda: unfog.train("fashion", out=5),
        lambda: unfog.train("fashion", out="x" * 300),
        lambda: unfog.train("fashion", out="new/" + "x" * 300),
        lambda: unfog.train("fashion", out="a\0b"),
        lambda: unfog.train("fashion", out="run"),
        lambda: unfog.train("nosuch", out="new/run"),
        lambda: unfog.resume(5),
        lambda: unfog.load(None),
    ):
        with pytest.raises(RequestError):
            call()
    assert everything(here) == before


def test_no_folder_is_left_by_images_that_cannot_be_used(refused, here):
    (here / "photos").mkdir()
    (here / "photos/a.png").write_bytes(b"nothing")
    assert "none of 1 image in" in refused("train", "photos")
    assert "none of 1 image in" in refused("train", "photos", "--out", "new/run")


def test_drawing_from_python(here):
    from unfog.inference.run import Run

    run = Run.__new__(Run)  # what is wrong is seen before the network is needed
    run.config = preset("default")
    for name, value in (
        *(("n", value) for value in ("4", 1.5, 0, -1, None, True, [4])),
        *(("steps", value) for value in ("4", 1.5, 0, -1, True)),
        *(("seed", value) for value in ("4", 1.5, None, 2**70)),
        *(("guidance", value) for value in ("4", math.nan, True, [1.0])),
        *(("batch", value) for value in ("4", 0, 2.5)),
        *(("sampler", value) for value in ("nosuch", 5, True)),
        *(("label", value) for value in ("cat", 5, 5.0, ["cat"])),
    ):
        with pytest.raises(RequestError):
            run.sample(**{name: value})


def test_numbers_of_numpy_are_numbers():
    from unfog.config.toml import update

    table = {"training": {"steps": np.int64(5)}, "optimizer": {"lr": np.float32(0.5)}, "guidance": np.int32(2)}
    config = update(Config(), table, "")
    assert (config.training.steps, config.optimizer.lr, config.guidance) == (5, 0.5, 2.0)
    assert [type(v) for v in (config.training.steps, config.optimizer.lr, config.guidance)] == [int, float, float]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("train", "muon"),
        ("train SOURCE", "muon"),
        ("train SOURCE TOO_MANY", "muon"),
        ("train --preset ddpm", "adamw"),
        ("train SOURCE --preset ddpm", "adamw"),
        ("plan SOURCE --preset ddpm", "adamw"),
        ("train-autoencoder SOURCE", "adamw"),
    ],
)
def test_help_shows_the_defaults_of_the_recipe_that_is_named(capsys, words, value):
    with pytest.raises(SystemExit):
        main([*words.split(), "--help-all"])
    said = " ".join(re.sub(r"[│╭╰]", " ", capsys.readouterr().out).split())
    assert f"(default: {value})" in said.partition("--optimizer.method ")[2][:300]


def test_lists_leave_the_last_word_to_the_run():
    from unfog.cli.parse import parse_args
    from unfog.config.requests.sample import SampleRequest as Sample

    for words in (
        "--label cat dog -n 3 run",
        "run --label cat dog -n 3",
        "-n 3 --label cat dog run",
        "-n=3 run --label cat dog",
    ):
        given = parse_args(words.split(), Sample, "unfog sample", {})
        assert (given.named, given.table) == ({"run": Path("run")}, {"label": ("cat", "dog"), "n": 3})


def test_ways_to_write_a_flag():
    from unfog.cli.parse import parse_args
    from unfog.config.requests.train import TrainRequest as Train

    def read(words: str) -> dict:
        return parse_args(words.split(), Train, "unfog train", {}).table["settings"]

    assert read("s --training.steps 5") == read("s --steps=5") == read("--steps 5 -- s") == {"training": {"steps": 5}}
    assert read("s --optimizer.weight_decay 1") == read("s --optimizer.weight-decay=1.0")
    assert read("s --no-flip") == read("s --data.no-flip") == {"data": {"flip": False}}
    assert read("s --guidance -1.5") == {"guidance": -1.5}
    assert (
        read("s --optimizer.betas 0.5 0.9")
        == read("s --optimizer.betas=0.5 0.9")
        == {"optimizer": {"betas": (0.5, 0.9)}}
    )
    assert read("s --steps 5 --steps 5") == {"training": {"steps": 5}}


PROCESSES = [
    ("train", "fashion", "--steps", "abc"),
    ("train", "fashion", "--stepz", "5"),
    ("train", "fashion", "--network", "small", "--size", "30"),
    ("train", "fashion", "--lr", "nan"),
    ("train", "fashion", "--out", "/dev/null/run"),
    ("train", "fashion", "--config", "/dev/zero"),
    ("train", "fashion", "--device", "cuda:77"),
    ("train", "fashion", "--schedule", "cosine:steps=99999999999"),
    ("train", "nosuch"),
    ("train", b"caf\xe9"),
    ("train", "fashion", "--budget", "1 hour"),
    ("train",),
    ("resume", "nosuch"),
    ("sample", "run", "-n", "0"),
    ("sample", "run", "--steps", "0"),
    ("sample", "run", "--label", "cat"),
    ("report", "/"),
    # Commands whose modules import torch.
    *((command, "fashion", "--nosuch") for command in ("doctor", "plan", "pack", "find-lr", "evaluate", "tune")),
]


EACH_REFUSED = """
import contextlib, io, json, os, sys
from unfog.cli.main import main
said = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            main()
        except SystemExit as left:
            said.append([left.code, out.getvalue(), error.getvalue()])
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_refusal_does_not_wait_for_torch(here, tmp_path):
    """All are refused in one process, in which an import of torch, which takes seconds, is an exit with a message."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    before = everything(here)
    words = json.dumps([[os.fsdecode(word) for word in words] for words in PROCESSES])
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", EACH_REFUSED, words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    for words, (status, out, error) in zip(PROCESSES, json.loads(done.stdout), strict=True):
        assert (status, out) == (2, ""), (words, error)
        assert 1 <= error.count("\n") <= 2, words
        assert "Traceback" not in error
    assert everything(here) == before


@pytest.mark.slow
def test_settings_are_refused_before_torch_is_imported():
    code = (
        "import sys, unfog.cli.main as m\n"
        "size = ['--size', '30', '--network', 'small']\n"
        "for words in (['--steps', 'x'], ['--lr', '-1'], size, ['--out', '/dev/null/x']):\n"
        "    try: m.main(['train', 'fashion', *words])\n"
        "    except SystemExit as left: assert left.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["help"], 0), (["--version"], 0)])
def test_no_command_is_a_wrong_request_and_a_question_is_none(words, status):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == status


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'pip install "unfog[hf]"'),
        ({"url": "https://example.org/unfog.whl", "archive_info": {}}, 'pip install "unfog[hf]"'),
        ({"url": "file:///home/a/my%20unfog", "dir_info": {"editable": True}}, 'pip install -e "/home/a/my unfog[hf]"'),
        ({"url": "file:///src/unfog", "dir_info": {}}, 'pip install "/src/unfog[hf]"'),
        ({"url": "file:///src/$x", "dir_info": {}}, "pip install '/src/$x[hf]'"),
    ],
)
def test_an_extra_is_installed_from_where_unfog_came_from(monkeypatch, origin, command):
    class Installed:
        def read_text(self, name):
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr("unfog.errors.distribution", lambda name: Installed())
    assert install_command("hf") == command


def test_an_extra_of_a_checkout_that_is_not_installed(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("unfog.errors.distribution", missing)
    assert install_command("hf") == f'pip install -e "{Path(__file__).parents[2]}[hf]"'


@pytest.mark.parametrize(("at", "next_said"), [("resolve_metrics", False), ("quick_check_images", True)])
def test_a_stop_at_the_start_says_what_is_there(tmp_path, monkeypatch, capsys, at, next_said):
    def stop(*_):
        raise Interrupted

    np.save(tmp_path / "images.npy", np.zeros((8, 8, 8), np.uint8))
    monkeypatch.setattr(f"unfog.runs.train.{at}", stop)
    network = "unet:channels=8/8,attention=0/0,mid_attention=0,norm_groups=4"
    words = ["--out", tmp_path / "run", "--steps", "2", "--device", "cpu", "--size", "8", "--network", network]
    with pytest.raises(SystemExit) as left:
        main(list(map(str, ["train", tmp_path / "images.npy", *words])))
    said = capsys.readouterr().err
    assert left.value.code == (3 if next_said else 130)
    assert said.endswith("Stopped.\n")
    assert (f"next      unfog resume {tmp_path / 'run'}" in said) == next_said == (tmp_path / "run").exists()


@pytest.mark.parametrize("argument", ["--out", "OUT"])
def test_a_link_that_leads_nowhere_is_refused_before_the_work(tmp_path, argument):
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with pytest.raises(RequestError, match=f"a link that leads nowhere; give another {argument}"):
        check_out(tmp_path / "out", argument=argument)
