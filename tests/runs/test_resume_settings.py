"""Interrupted equals uninterrupted with everything at once, across versions, and whatever settings change."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import unfog
from conftest import NETWORK, TRANSFORMER, without_clock
from unfog.config.presets import preset
from unfog.config.resume_rules import check_changes, settings_digests, walk_settings
from unfog.config.schema import Config, nest_settings
from unfog.config.toml import from_toml, update
from unfog.data.augmentation import Augment
from unfog.data.settings import UNREAD
from unfog.diffusion.noise import LogitNormal
from unfog.diffusion.weighting import Elbo
from unfog.errors import RequestError
from unfog.files.safe_files import file_digest
from unfog.models.settings import ARCHITECTURES, UNet
from unfog.pipeline.build import build_loss, build_state
from unfog.process.run_folder import RunFolder
from unfog.reporting.records import read_metrics
from unfog.runs.session import Session, last_logged_step
from unfog.settings import setting
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import read_state
from unfog.training.checkpoints.posthoc_ema import to_float16
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.settings import EmaSnapshots, Evaluate
from unfog.values.conditions import Conditions

pytestmark = pytest.mark.slow

IMAGES = np.random.default_rng(0).integers(0, 256, (120, 8, 8, 1), dtype=np.uint8)
LABELS = np.arange(len(IMAGES)) % 3
MPUNET = "mpunet:channels=8,blocks=1,attention=1,head_channels=8"
DIT = "dit:width=32,depth=1,head_channels=16,patch=2"
COMMON = {
    "network": TRANSFORMER,
    "precision": "fp32",
    "device": "cpu",
    "batch": 8,
    "microbatch": 3,
    "lr": 2e-3,
    "sampler": {"steps": 2},
    "preview": {"every": 8, "images": 2},
    "evaluate": {"every": 4, "images": 4, "levels": 2},
    "checkpoint": {"every": 4, "keep": 20},
    "averages": {"every": 2},
    "log": {"every": 3},
    "data": {"held_out": 0.2},
}
MEASURED = {"metrics": ["kid"], "samples": 12, "reference": 30, "metrics_every": 4, "best": "kid"}
EVERYTHING = {
    "magnitudes": {
        "network": MPUNET,
        "precision": "fp16",
        "optimizer": {"method": "muon", "schedule": "cooldown", "cooldown": 0.5},
        "diffusion": {"weighting": "uncertainty", "adaptive": 0.5},
    },
    "patches": {
        "network": DIT,
        "optimizer": "custom:path=torch.optim.NAdam,arguments=momentum_decay=0.01",
        "evaluate": COMMON["evaluate"] | MEASURED,
        "augment": 0.3,
    },
    "variance": {
        "network": NETWORK,
        "path": "vp",
        "schedule": "cosine:steps=50,zero_terminal=1",
        "target": "v",
        "optimizer": "muon",
        "precision": "bf16",
        "diffusion": {"learned_variance": True, "adaptive": 0.5},
        "guidance": 2.0,
        "guidance_interval": (0.2, 0.8),
    },
}


def configured(**settings: object) -> Config:
    config = update(preset("default"), nest_settings({"source": "x", "steps": 4, "size": 8} | COMMON | settings), "")
    data = replace(config.data, size=8, channels=1)
    return replace(config, data=data, classes=("a", "b", "c"), ema_snapshots=EmaSnapshots(every=2))


def trained(out: Path, steps: int = 12, **settings: object) -> Path:
    return unfog.train(IMAGES, labels=LABELS, out=out, steps=steps, **COMMON | settings).path


def cut(run: Path, into: Path, step: int) -> Path:
    """The run as if it had been killed after this step's checkpoint, somewhat later."""
    shutil.copytree(run, into)
    for path in (into / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return into


def assert_same(one: Path, other: Path, step: int = 12) -> None:
    for name in (*checkpoint.FILES, checkpoint.EMA2):
        mine, theirs = (folder / "checkpoints" / f"{step:08d}" / name for folder in (one, other))
        assert mine.read_bytes() == theirs.read_bytes(), name
    kept = [{p.name: p.read_bytes() for p in (folder / "averages").iterdir()} for folder in (one, other)]
    assert len(kept[0]) == step // 2
    assert kept[0] == kept[1]
    assert without_clock(one / "metrics.jsonl") == without_clock(other / "metrics.jsonl")
    for path in (other / "samples").iterdir():
        assert (one / "samples" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("settings", EVERYTHING.values(), ids=EVERYTHING)
def test_interrupted_is_uninterrupted_with_everything(tmp_path, settings):
    straight = trained(tmp_path / "straight", **settings)
    broken = cut(straight, tmp_path / "broken", 4)
    (broken / "averages" / ".partial-00000007").write_bytes(b"half")  # what a kill leaves
    (broken / "averages" / "00000010.safetensors").write_bytes(b"half")  # what a power cut may
    unfog.resume(broken)
    assert_same(broken, straight)
    assert "equal to the bit" in unfog.verify(broken)
    metric = "kid" if "evaluate" in settings else "held_out_loss"
    values = {row["step"]: row[metric] for row in read_metrics(broken / "metrics.jsonl") if metric in row}
    assert len(values) > 2
    found, _ = checkpoint.list_checkpoints(broken / "checkpoints")
    assert checkpoint.best_of(found).value == pytest.approx(min(values.values()))


def test_started_from_weights_and_killed_before_or_after_the_first_checkpoint(tmp_path):
    first = trained(tmp_path / "first", steps=4)
    settings = {"init": {"folder": str(first)}, "optimizer": {"method": "muon"}}
    straight = trained(tmp_path / "straight", **settings)
    early, late = (cut(straight, tmp_path / name, step) for name, step in (("early", -1), ("late", 4)))
    (early / "metrics.jsonl").unlink()
    unfog.resume(early)
    shutil.rmtree(first)  # from here on nobody needs it
    unfog.resume(late)
    for broken in (early, late):
        assert_same(broken, straight)


def test_a_run_that_is_cooled_down_at_its_end_can_be_interrupted_there(tmp_path):
    run = trained(tmp_path / "run", optimizer={"schedule": "constant"})
    more = {"steps": 20, "optimizer": {"schedule": "cooldown", "cooldown": 0.5}}
    straight, broken = (shutil.copytree(run, tmp_path / name) for name in ("straight", "broken"))
    for folder in (straight, broken):
        unfog.resume(folder, **more)
    shutil.rmtree(broken / "checkpoints/00000020")
    unfog.resume(broken)
    assert_same(broken, straight, 20)
    rates = {row["step"]: row["lr"] for row in read_metrics(broken / "metrics.jsonl") if "lr" in row}
    assert rates[9] == pytest.approx(2e-3)
    assert rates[20] < 2e-4


FIRST = {"training": "8a9269587cca258b", "repeat": "ba41d81b75038025", "measure": "2d76a61d3b1b7ff9"}
"""Digests of the settings in first_version.toml that a checkpoint of that version holds."""


def test_digests_of_settings_are_those_of_the_first_version_where_nothing_new_is_used():
    config = from_toml((Path(__file__).parents[1] / "first_version.toml").read_text(), Config())
    assert {name: settings_digests(config)[name] for name in FIRST} == FIRST
    same = replace(config, ema_snapshots=EmaSnapshots(every=-1))  # what a resume by this version makes of it
    assert {name: settings_digests(same)[name] for name in FIRST} == FIRST
    for new, differ in (
        (replace(config, diffusion=replace(config.diffusion, adaptive=0.5)), {"training", "repeat", "measure"}),
        (replace(config, ema_snapshots=EmaSnapshots(every=5)), {"repeat"}),
        (replace(config, optimizer=replace(config.optimizer, cooldown=0.5)), {"training", "repeat"}),
    ):
        assert {name for name in FIRST if settings_digests(new)[name] != FIRST[name]} == differ


@dataclass(frozen=True)
class _LaterUNet(UNet):
    extra: int = setting(1, added_later=True)


@dataclass(frozen=True)
class _LaterSchedule(LogitNormal):
    extra: int = setting(1, added_later=True)


def test_a_setting_added_later_to_a_kind_that_is_not_the_usual_one_enters_only_where_it_is_used():
    """The usual settings hold no network, and a schedule of another kind."""
    config = replace(preset("default"), network=UNet())
    before = settings_digests(config)
    for part, differ in (
        (lambda n: {"network": _LaterUNet(extra=n)}, {"training", "repeat"}),
        (
            lambda n: {"diffusion": replace(config.diffusion, schedule=_LaterSchedule(extra=n))},
            {"training", "repeat", "measure", "objective"},
        ),
    ):
        assert settings_digests(replace(config, **part(1))) == before
        after = settings_digests(replace(config, **part(2)))
        assert {name for name in before if before[name] != after[name]} == differ


OF_THE_FIRST_VERSION = {
    "averages": {"every": -1},
    "optimizer": {"method": "adamw"},
    "training": {"noise": "microbatch"},
}
"""What it trained with."""


def as_of_the_first_version(run: Path) -> None:
    """Take from a run what its first version did not have."""
    new = ("ema_snapshots", "evaluate.metrics", "evaluate.best", "init", "latents", "autoencoder", "optimizer.method")
    later = (
        *new,
        "diffusion.adaptive",
        "diffusion.learned_variance",
        "guidance_interval",
        "optimizer.cooldown",
        "training.noise",
    )
    for config in (run / "config.toml", *run.glob("checkpoints/*/config.toml")):
        lines, keep, section = [], True, ""
        for line in config.read_text().splitlines():
            if line.startswith("["):
                section = line.strip("[]")
                keep = not among(new, section)
            name = f"{section}.{line.partition(' ')[0]}".lstrip(".")
            lines += [line] if keep and not among(later, name) else []
        config.write_text("\n".join(lines) + "\n")
    for folder in (run / "checkpoints").iterdir():
        state = json.loads((folder / "state.json").read_text())
        state["keys"] = {name: state["keys"][name] for name in FIRST}
        (folder / "state.json").write_text(json.dumps(state))
        sealed(folder, ("chosen_by", "value"))


def sealed(folder: Path, without: tuple[str, ...] = ()) -> None:
    """Make a checkpoint's manifest, without these, one of the files as they are now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("sha256", *without):
        del manifest[name]
    for name in ("state.json", "config.toml"):
        size, digest = (folder / name).stat().st_size, file_digest(folder / name, folder)
        manifest["files"][name] = {"bytes": size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": checkpoint.manifest_digest(manifest)}))


def test_a_run_of_the_first_version_goes_on_to_the_bit(tmp_path):
    straight = trained(tmp_path / "straight", **OF_THE_FIRST_VERSION)
    broken = cut(straight, tmp_path / "broken", 8)
    as_of_the_first_version(broken)
    assert "ema_snapshots" not in (broken / "config.toml").read_text()
    assert "equal to the bit" in unfog.verify(broken)
    unfog.resume(broken)
    for name in ("model", "ema", "optimizer"):
        mine, theirs = (run / f"checkpoints/00000012/{name}.safetensors" for run in (broken, straight))
        assert mine.read_bytes() == theirs.read_bytes(), name
    assert not (broken / "checkpoints/00000012" / checkpoint.EMA2).exists()
    assert not (broken / "averages").exists()
    assert "equal to the bit" in unfog.verify(broken)  # from a checkpoint of one version to one of the other
    assert unfog.load(broken).sample(2).shape == (2, 8, 8, 1)


def test_what_a_run_of_the_first_version_had_learned_is_not_forgotten(tmp_path):
    run = cut(trained(tmp_path / "straight", **OF_THE_FIRST_VERSION), tmp_path / "run", 8)
    for path in run.glob("checkpoints/*/state.json"):  # as after two roll-backs, and on a machine with little memory
        state = json.loads(path.read_text())
        state["guard"]["roll_backs"], state["microbatch"], state["best"] = 2, 2, 1e-9
        path.write_text(json.dumps(state))
    as_of_the_first_version(run)
    before = json.loads((run / "checkpoints/00000008/state.json").read_text())
    unfog.resume(run)
    after = json.loads((run / "checkpoints/00000012/state.json").read_text())
    assert (after["guard"]["roll_backs"], after["microbatch"], after["best"]) == (2, 2, 1e-9)
    assert after["guard"]["recent"][:8] == before["guard"]["recent"]
    found, _ = checkpoint.list_checkpoints(run / "checkpoints")
    assert len({(one.chosen_by, one.measure) for one in found}) == 1


REFUSED = (
    *(
        "data.size",
        "data.aspect",
        "data.channels",
        "data.axes",
        "data.slices",
        "data.dtype",
        "data.map",
        "data.map_values",
        "data.map_range",
        "data.unknown",
        "data.unknown_share",
        "data.unknown_mask",
        "data.wrap",
        "data.augment",
        "data.upright",
        "data.condition",
        "network",
        "text_encoder.",
        "autoencoder_folder",
        "latents.",
        "autoencoder.",
        "classes",
        "columns",
    ),
    *("diffusion.sigma_data", "diffusion.conditioning", "diffusion.scale_input", "diffusion.learned_variance"),
    *("diffusion.path", "diffusion.schedule", "diffusion.target", "training.batch", "init."),
)


def among(names: tuple[str, ...], name: str) -> bool:
    """Whether a setting is one of these, or in a section of them, which ends with a dot."""
    return any(name == one or name.startswith(one if one.endswith(".") else f"{one}.") for one in names)


FORCED = (
    "training.seed",
    "diffusion.weighting",
    "diffusion.adaptive",
    "diffusion.loss",
    "ema",
    "data.background",
    "data.range",
    "data.clip",
    "data.held_out",
)


@pytest.mark.parametrize(("due", "left"), [([], [8, 9]), (["preview"], [8, 9]), (["log"], [8]), (["evaluate"], [8])])
def test_a_line_that_is_due_again_is_cut_off_first(tmp_path, due, left):
    """A run was stopped before it logged step 9, was resumed, logged it, and was killed before its next checkpoint."""
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (8, 9, 10)))
    session = SimpleNamespace(
        step=9, steps=20, config=Config(), defer_interrupts=nullcontext,
        context=SimpleNamespace(folder=RunFolder(tmp_path)),
    )  # fmt: skip
    Session._open_recorder(session, last_logged_step(9, due)).close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == left


def test_every_setting_is_in_one_list_of_what_a_resume_may_change():
    for network in (None, *(kind() for kind in ARCHITECTURES)):
        for name, _, rules in walk_settings(replace(Config(), network=network)):
            if name in ("data.kind", "diffusion.kind", "training.kind"):  # of a section that is of no kind: no setting
                continue
            refused = among(REFUSED, name) and name != "network.dropout"
            forced = among((*FORCED, "fingerprint", "buckets"), name)
            assert (rules.resume or "fixed") == ("fixed" if refused else "force" if forced else "free"), name


def with_keys(state, config, loss=1.0):
    state.adopt_settings(settings_digests(config))
    state.levels.add(torch.full((4,), 0.5), torch.full((4,), loss))
    return state


def test_the_loss_by_level_is_kept_up_only_where_it_is_read():
    cpu = torch.device("cpu")
    assert build_state(configured(), cpu).levels is None
    for settings in ({"weighting": "uncertainty"}, {"diffusion": {"adaptive": 0.5}}):
        config = configured(**settings)
        assert config.diffusion.follows_losses
        assert build_loss(config, build_state(config, cpu)).levels is not None
        codec = replace(config, autoencoder=replace(config.autoencoder, factor=2, channels=(8,)))
        assert build_state(codec, cpu).levels is None


def test_what_follows_the_loss_by_level_starts_with_none_of_it_where_a_resume_turns_it_on(tmp_path):
    plain = trained(tmp_path / "run", steps=4)
    shutil.copytree(plain, older := tmp_path / "older")  # of a version that kept it up in every run
    state = json.loads((older / "checkpoints/00000004/state.json").read_text())
    assert state["levels"] is None
    state["levels"] = {"seen": 32, "sums": [[1.0] * 33] * 3}
    (older / "checkpoints/00000004/state.json").write_text(json.dumps(state))
    sealed(older / "checkpoints/00000004")
    for run in (plain, older):
        unfog.resume(run, steps=8, force=True, weighting="uncertainty")
        assert read_state(run / "checkpoints/00000008")["levels"]["seen"] == 32  # four steps of eight
    for name in checkpoint.FILES:
        mine, theirs = (run / "checkpoints/00000008" / name for run in (plain, older))
        assert mine.read_bytes() == theirs.read_bytes(), name
    unfog.resume(plain, steps=12, force=True, weighting="plain")
    assert read_state(plain / "checkpoints/00000012")["levels"] is None


def test_the_loss_by_level_outlives_what_it_does_not_depend_on_and_no_more():
    config = configured(weighting="uncertainty")
    state = with_keys(build_state(config, torch.device("cpu")), config)
    for same in (
        replace(config, evaluate=Evaluate(images=9, levels=3)),
        replace(config, training=replace(config.training, patience=7)),
        replace(config, optimizer=replace(config.optimizer, lr=1e-4)),
    ):
        state.adopt_settings(settings_digests(same))
        assert state.levels.seen == 4
    state.adopt_settings(settings_digests(replace(config, diffusion=replace(config.diffusion, weighting=Elbo()))))
    assert state.levels.seen == 0


def test_a_roll_back_to_before_another_weighting_does_not_bring_its_losses_by_level_back():
    config = configured(weighting="uncertainty")
    state = with_keys(build_state(config, torch.device("cpu")), config)
    saved = state.progress()
    state.roll_back_to(saved)
    assert state.levels.seen == 4
    with_keys(state, replace(config, diffusion=replace(config.diffusion, weighting=Elbo())))
    state.roll_back_to(saved)
    assert state.levels.seen == 0


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for the device."""

    READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero", "equal")
    WRITES = ("tensor", "as_tensor", "new_tensor")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.READS + self.WRITES:
            self.found.append(func.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("settings", [{}, *EVERYTHING.values()], ids=["plain", *EVERYTHING])
def test_a_step_waits_for_the_device_once(settings):
    # Torch's own optimisers may wait, and fp16 asks its scaler.
    ours = {"precision": "fp32"} | ({"optimizer": "adamw"} if "custom" in str(settings.get("optimizer")) else {})
    config = configured(**settings | ours)
    state = build_state(config, torch.device("cpu"))

    class Images:
        def batch(self, first, size):
            index = torch.arange(first, first + size) % len(IMAGES)
            pixels = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)[index]
            return type("Batch", (), {"pixels": pixels, "conditions": Conditions(torch.from_numpy(LABELS)[index])})

    def until(step):
        task = Task(Images(), Augment.from_settings(config.data), build_loss(config, state))
        settings = LoopSettings(replace(config.training, images=8 * step), config.optimizer)
        train(settings, state, task, TrainingHooks())

    until(1)  # which makes the tables that are kept
    steps = 4
    with Waits() as waits:
        until(1 + steps)
    last = ["tolist"] * 4  # what is due at the end: whether all is finite, and the three sums of the log
    assert state.updates == 1 + steps
    assert waits.found == ["tolist"] * steps + last


def test_a_snapshot_of_averages_waits_once_for_all_whether_they_fit_in_float16():
    state = build_state(configured(network=MPUNET), torch.device("cpu"))
    assert len(state.ema.parameters) > 20
    with Waits() as waits:
        to_float16(state.ema.parameters)
    assert waits.found == ["tolist"]


def test_of_images_known_by_their_files_it_is_said_which_copy_is_the_same():
    for before, now, told in (("a", "b", False), (f"{UNREAD}a", f"{UNREAD}b", True)):
        with pytest.raises(RequestError, match="not those that this run was trained on") as refused:
            check_changes(replace(Config(), fingerprint=before), replace(Config(), fingerprint=now))
        assert ("cp -a" in str(refused.value)) == told


def test_what_drawn_pictures_depend_on_makes_another_choice():
    by_kid = replace(Config(), evaluate=Evaluate(metrics=("kid",), best="kid"))
    for name, changed in {
        "evaluate": replace(by_kid, evaluate=replace(by_kid.evaluate, features="pixels")),
        "reference": replace(by_kid, evaluate=replace(by_kid.evaluate, reference=50)),
        "sampler": replace(by_kid, sampler=replace(by_kid.sampler, steps=7)),
        "guidance": replace(by_kid, guidance=2.0),
        "interval": replace(by_kid, guidance_interval=(0.1, 0.9)),
    }.items():
        assert settings_digests(changed)["best"] != settings_digests(by_kid)["best"], name
        assert settings_digests(changed)["training"] == settings_digests(by_kid)["training"], name
