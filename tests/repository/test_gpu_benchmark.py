"""The benchmark for a machine with a GPU: its counting, what becomes of parts that fail, and a rehearsal on the CPU."""

import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.tags import sys_tags
from PIL import Image

from unfog.cli.read_request import read_request
from unfog.models.network_settings import build_model
from unfog.models.settings import DiT
from unfog.planning.flops import NetworkCost
from unfog.process.torch_flags import set_repeatable

FOLDER = Path(__file__).parents[2] / "benchmarks/gpu"
FAKES = Path(__file__).parents[1] / "fake_cuda"
sys.path.insert(0, str(FAKES))

from compile_device import compile_device  # noqa: E402

MODULES = tuple(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def bench(monkeypatch):
    """Return a module of the benchmark by name; none of them stays imported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_flops_of_a_transformer_block_are_those_of_its_products(bench):
    """A block of width w on N tokens: 12 w^2 weights in products, twice N each, and 4 N^2 w for attention."""
    width, side, patch = 64, 16, 2
    tokens = (side // patch) ** 2

    def cost(depth):
        return NetworkCost.of(lambda: build_model(DiT(width=width, depth=depth, patch=patch), 3), (3, side, side))

    one, two = cost(1), cost(2)
    block = build_model(DiT(width=width, depth=1, patch=patch), 3).blocks[0]
    weights = sum(p.numel() for p in block.parameters() if p.ndim == 2 and width in p.shape)
    products, attention = 2 * tokens * weights, 4 * tokens**2 * width
    assert two.forward - one.forward == products + attention
    # Backward takes two products for each of the forward pass; attention's computes its scores anew, so 5 for 2.
    assert two.training - one.training == 3 * products + 3.5 * attention
    mfu = bench("rows").mfu
    assert mfu(two.training, images_per_second=1000.0, peak=two.training * 4000) == pytest.approx(0.25)


def test_the_time_in_which_a_kernel_runs_counts_overlaps_once(bench):
    rows, profile = bench("rows"), bench("part_profile")
    assert rows.busy([]) == 0
    assert rows.busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.0, 1.5)]) == 4
    assert [profile.is_kernel(name, False) for name in ("ampere_gemm", "Optimizer.step#Muon.step")] == [True, False]
    assert [profile.is_kernel(name, True) for name in ("aten::add", "profiled range")] == [True, False]
    events = [("conv", 0.0, 3e5), ("add", 2e5, 4e5), ("conv", 9e5, 1e6)]
    total, kinds, first, second = profile.kernels("net", events, seconds=1.0)
    assert kinds.figures == {"convolutions": pytest.approx(2 / 3), "elementwise": pytest.approx(1 / 3)}
    assert total.figures == {"launches": 1.0, "idle": pytest.approx(0.5)}
    assert first.said.startswith("66.7%, 0.666667 a step: conv")
    assert second.figures["share"] == pytest.approx(1 / 3)
    # A driver may let nobody count: that is no idle device.
    assert [row.state for row in profile.kernels("net", [], seconds=1.0)] == ["failed"]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>", "copies"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNN", "products"),
        ("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("at::native::RowwiseMomentsCUDAKernel<float>", "norms"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "update"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("at::native::reduce_kernel<512, 1>", "sums"),
    ],
)
def test_kernels_are_told_apart_by_their_names(bench, kernel, kind):
    assert bench("part_profile").kind_of(kernel) == kind


def test_rows_become_a_table_a_ledger_row_and_a_picture(bench, tmp_path):
    rows = bench("rows")
    rate = {"images_per_second": 120.0}
    found = [
        rows.Row("steps a", "unfog eager", "120 images/s | 3 x diffusers", figures=rate),
        rows.Row("steps a", "bare eager", "140 images/s", figures={"images_per_second": 140.0}),
        rows.Row("ranks", "FSDP2", "it did\nnot work", "failed"),
        rows.Row("packages", "diffusers", "not installed", "skipped"),
    ]
    table = rows.table(found)
    assert len(table) == 6
    assert all(line.count("|") == 4 for line in table)
    assert table[4] == "| ranks | FSDP2 | **failed**: it did not work |"
    assert rows.summary(found) == "2 ok, 1 failed (ranks: FSDP2), 1 skipped"
    ledger = tomllib.loads(rows.ledger_row("2026-01-01", 'a "card"', "run.sh", found))["gpu-visit-2026-01-01"]
    assert ledger["state"] == 'a "card"'
    assert "steps a, unfog eager: 120 images/s" in ledger["note"]
    aside = [
        rows.Row("commands", "train", "1 s", figures={"s": 1}),
        rows.Row("profile", "kernel 1", "9%", figures=rate),
    ]
    assert rows.ledger_row("2026-01-01", "H100", "run.sh", aside).endswith('note = ". 2 ok"')
    assert "1 failed (ranks: FSDP2)" in ledger["note"]
    short = rows.short_summary("H100", [*found, *(rows.Row("a", str(i), "bad " * 99, "failed") for i in range(40))])
    assert len(short) <= 30
    assert max(map(len, short)) <= 200
    assert short[:3] == ["H100", "2 ok, 1 skipped, 41 failed", "FAILED ranks, FSDP2: it did\nnot work"]
    assert any("120 images/s" in line for line in short)
    rows.picture(tmp_path / "gpu.png", "H100", found)
    with Image.open(tmp_path / "gpu.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=100_000)}
    assert {(31, 111, 139), (185, 185, 185)} <= colours
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(row.to_json() for row in found) + '\n{"part": "cut')
    assert rows.Row.read(file) == found
    with pytest.raises(ValueError, match="ok, failed, skipped"):
        rows.Row("a", "b", "c", "fine")


PARTS = {
    "good": "yield Row('good', 'a', 'well')",
    "raises": "yield Row('raises', 'a', 'well')\n    raise RuntimeError('the device is gone')",
    "dies": "yield Row('dies', 'a', 'well')\n    import os\n    os.abort()",
    "hangs": "yield Row('hangs', 'a', 'well')\n    import subprocess\n    subprocess.run(['sleep', '60'])",
    "silent": "return\n    yield",
}


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_a_row_and_keeps_those_that_it_had(bench, tmp_path, monkeypatch):
    parts, told = bench("parts"), []
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    found = {}
    for name, body in PARTS.items():
        (tmp_path / f"{name}.py").write_text(f"from rows import Row\n\ndef measure(setting):\n    {body}\n")
        started = time.monotonic()
        part = parts.Part(name, name, 9, needs=())
        found[name] = parts.run_part(part, True, tmp_path / "out", 4, head="torch 2.13", tell=told.append)
        assert time.monotonic() - started < 20
    assert [row.part for row in told] == ["good", "raises", "dies", "hangs"]  # as they came
    log = (tmp_path / "out/parts/raises.log").read_text()
    assert log.startswith("torch 2.13\n")
    assert "Traceback" in log
    assert 'raise RuntimeError("the device is gone")' in log.replace("'", '"')
    assert [(row.said, row.state) for row in found["good"]] == [("well", "ok")]
    for name in ("raises", "dies", "hangs"):
        assert [row.state for row in found[name]] == ["ok", "failed"], name
    assert "RuntimeError: the device is gone" in found["raises"][1].said
    assert "exit status -6" in found["dies"][1].said
    assert found["hangs"][1].said == "not finished after 4 s"
    assert [(row.said, row.state) for row in found["silent"]] == [("yielded nothing", "failed")]
    lacking = parts.run_part(parts.Part("x", "good", 9, needs=("no_such_module", "json")), True, tmp_path / "out", 4)
    assert [(row.said, row.state) for row in lacking] == [("needs no-such-module", "skipped")]


def test_missing_packages_are_named_with_what_they_need_in_turn_and_what_they_cost(bench, monkeypatch):
    packages = bench("packages")
    assert packages.missing_distributions(packages.NEEDED) == []
    gone, real = {"jinja2", "markupsafe", "diffusers", "mdurl"}, packages._requires
    monkeypatch.setattr(packages, "_requires", lambda name: None if name in gone else real(name))
    monkeypatch.setattr(
        packages.importlib.util, "find_spec", lambda name: None if name.replace("_", "-") in gone else "here"
    )
    # Of jinja2, which cannot be asked, by a list; of rich by what markdown-it-py says.
    assert set(packages.missing_distributions(packages.NEEDED)) == gone - {"diffusers"}
    needed, wanted = packages.check_packages(cpu=True)
    assert (needed.state, wanted.state) == ("failed", "skipped")
    assert "jinja2 markupsafe" in needed.said
    assert "--wheels" in needed.said
    assert "its training step is not timed" in wanted.said


@pytest.mark.slow
def test_wheels_that_are_brought_along_work_without_an_index_and_replace_nothing(bench, tmp_path, monkeypatch):
    packages, wheels, into = bench("packages"), tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    for name, version in (("brought_along", "1.0"), ("numpy", "0.1")):
        with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", f"version = '{version}'\n")
            wheel.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    shutil.copy(wheels / "brought_along-1.0-py3-none-any.whl", wheels / f"made_for_it-1.0-{next(sys_tags())}.whl")
    (wheels / "with_code-1.0-cp27-cp27mu-win32.whl").touch()
    rows = packages.unpack(wheels, into)
    assert [(row.name, row.state) for row in rows] == [
        ("with_code-1.0-cp27-cp27mu-win32.whl", "failed"),
        ("wheels", "ok"),
    ]
    assert "made_for_it" in rows[1].said
    assert [path.name for path in into.iterdir() if path.is_dir() and "." not in path.name] == ["brought_along"]
    said = subprocess.run(
        [sys.executable, "-c", "import brought_along, numpy; print(brought_along.version, numpy.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"1\.0 [1-9].*\n", said.stdout)


def test_every_visit_has_parts_that_fit_its_minutes(bench):
    """What takes part in a visit is known, and a visit has time for all parts but the last."""
    parts = bench("parts")
    assert {name for names in parts.VISITS.values() for name in names} == {*parts.PARTS}
    for visit, names in parts.VISITS.items():
        seconds = [parts.PARTS[name].seconds for name in names]
        assert sum(seconds[:2]) < 60 * parts.MINUTES[visit], visit
        assert importlib.util.find_spec(parts.PARTS[names[0]].module)
    assert parts.VISITS["first"][:4] == ("smoke eager", "smoke captured", "smoke compiled", "values")


@pytest.fixture
def values(bench, monkeypatch):
    """Return the comparisons, and the smallest network of theirs."""
    module = bench("values")
    return module, module.cases(cpu=True)[2]


@pytest.mark.slow
def test_a_wrong_gradient_mask_or_nan_is_seen(values, monkeypatch):
    """Each bound of the part is crossed by a fault that no more than one tensor has."""
    module, case = values
    cpu, exact = torch.device("cpu"), module.reference(case)
    found = module.computed(case, cpu, "fp32")
    assert module.difference(found, exact).output < 1e-5
    assert module.difference(found, exact).gradient < 1e-4
    name = "patches.weight" if "patches.weight" in found.gradients else next(iter(found.gradients))
    for spoilt in (found.gradients[name] * 1.01, found.gradients[name] * float("nan")):
        seen = module.difference(found._replace(gradients=found.gradients | {name: spoilt}), exact)
        assert seen.worst == name
        assert not seen.gradient < 2e-4
    lacking = {key: value for key, value in found.gradients.items() if key != name}
    assert module.difference(found._replace(gradients=lacking), exact).gradient == float("inf")
    # An EMA that follows an update which was left out.
    from unfog.training.ema import Ema
    from unfog.training.settings import AdamW

    assert module.masked_update(case, AdamW(), cpu, torch.float32).unchanged
    monkeypatch.setattr(Ema, "update_unless", lambda self, skip: self.update(5))
    assert not module.masked_update(case, AdamW(), cpu, torch.float32).unchanged


def test_memory_that_a_kernel_leaves_out_shows_as_nan(values):
    module, _ = values
    with module.poisoned(torch.device("cpu")):
        assert torch.empty(8).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_host_draws_the_same_numbers_for_every_device(values):
    """A device without hardware gets the shapes; the CPU gets its own numbers, in their usual order."""
    module, _ = values
    torch.manual_seed(0)
    plain = torch.rand(3), torch.randn_like(torch.zeros(4, 5))
    torch.manual_seed(0)
    with module.HostDraws():
        drawn = torch.rand(3, device="cpu"), torch.randn_like(torch.zeros(4, 5))
        assert torch.rand(2, device="meta").is_meta
    assert all(map(torch.equal, plain, drawn))


@pytest.mark.slow
def test_a_bare_step_and_diffusers_step_train_the_network_that_ours_is(bench, monkeypatch):
    """diffusers' U-Net has our weights and answers the same."""
    networks, steps = bench("networks"), bench("steps")
    config = networks.settings_of("cifar10", cpu=True)
    ours = steps.build.build_network(config)
    x, t = torch.randn(2, *config.input_shape), torch.tensor([3.0, 700.0])
    for tensor in ours.parameters():
        torch.nn.init.normal_(tensor, std=0.05)
    monkeypatch.setattr(steps.build, "build_network", lambda config: ours)
    theirs, call = steps._counterpart(config)
    with torch.no_grad():
        assert (call(theirs.eval(), x, t) - ours.eval()(x, t)).abs().max() < 1e-4
    before = [tensor.clone() for tensor in ours.parameters()]
    assert steps.bare(config, torch.device("cpu"))(2) > 0
    assert all(not torch.equal(a, b) for a, b in zip(before, ours.parameters()))
    assert steps.diffusers(config, torch.device("cpu"))(1) > 0


def test_what_matters_most_comes_first(bench, tmp_path, monkeypatch):
    """A part that is killed keeps its rows: a resume before repeats, ways without a compiler before the others."""
    exact, device, rows = bench("part_exact"), bench("part_device"), bench("rows")
    setting = bench("parts").Setting(True, tmp_path, 60)
    monkeypatch.setattr(exact, "resumed", lambda setting: iter([rows.Row("exact", "a run resumed", "equal")]))
    assert next(exact.measure(setting)).name == "a run resumed"

    def checks(config, stop, compiled):
        assert not compiled
        yield importlib.import_module("unfog.reporting.findings").Finding("gpu.build", "info", "torch has code for it")
        raise RuntimeError("the next check is never finished")

    monkeypatch.setattr(device, "iter_gpu_checks", checks)
    assert next(device.measure(setting)).name == "build"

    steps = bench("part_steps")
    plain, compiled = steps.ways(bench("networks").settings_of("tiny", cpu=True), torch.device("cpu"))
    assert "unfog captured" in [way.name for way in plain]
    assert not any(way.compiled or "compiled" in way.name for way in plain)
    assert all(way.compiled for way in compiled)
    assert compiled[0].name == "unfog compiled, captured"


@pytest.fixture
def timer(bench, monkeypatch):
    """Return the part that times ways of training, and a timer of a network whose FLOPs are not counted."""
    steps, config = bench("part_steps"), bench("networks").settings_of("tiny", cpu=True)
    monkeypatch.setattr(steps.NetworkCost, "of", lambda build, shape: NetworkCost(1e6, 3e6, 10))
    return steps, steps._Timer("steps", config, torch.device("cpu"), seconds=60, compiling=75)


def test_a_way_of_training_leaves_the_flags_of_torch_to_the_next(timer, monkeypatch):
    """Ours is deterministic; a bare step, or one of diffusers, that comes after it is not."""
    (steps, timer), cudnn, seen = timer, torch.backends.cudnn, []
    monkeypatch.setattr("unfog.process.torch_flags._products_repeat", lambda device: True)  # without a GPU

    def ours():
        set_repeatable(torch.device("cuda"), True)
        assert torch.are_deterministic_algorithms_enabled()
        return steps.StepTime(1, 0.1)

    def bare():
        seen.append((torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark))
        return steps.StepTime(1, 0.1)

    fastest = functools.partial(steps.torch_flags, False, True)
    with steps.torch_flags(False, False):
        for way in (steps._Way("ours", ours), steps._Way("bare", bare), steps._Way("fast", bare, flags=fastest)):
            assert timer.time(way).state == "ok"
    assert seen == [(False, False, False), (False, False, True)]


def test_flags_of_a_baseline_are_its_own(bench):
    flags, cudnn = bench("flags"), torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    try:
        flags.set_flags(True, True, False)
        with flags.torch_flags(deterministic=False, benchmark=True):
            assert not torch.are_deterministic_algorithms_enabled()
            assert (cudnn.deterministic, cudnn.benchmark) == (False, True)
        assert torch.are_deterministic_algorithms_enabled()
        assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    finally:
        flags.set_flags(*before)


def test_ways_get_copies_of_one_network_and_constants_are_put_back(bench):
    build, flags, networks = importlib.import_module("unfog.pipeline.build"), bench("flags"), bench("networks")
    config, real = networks.settings_of("tiny", cpu=True), build.build_network
    with flags.built_once():
        one, other = build.build_network(config), build.build_network(config)
    assert one is not other
    assert all(a is not b and torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
    assert build.build_network is real
    with flags.constant(build, "_WEIGHTS_CHANNELS_LAST_ON", ()):
        assert not build._WEIGHTS_CHANNELS_LAST_ON
    assert build._WEIGHTS_CHANNELS_LAST_ON


def test_a_compiled_way_needs_less_time_once_its_code_is_stored(timer):
    steps, timer = timer
    ours, bare = (steps._Way(name, lambda: None, compiled=True) for name in ("unfog compiled", "bare compiled"))
    assert timer.least_seconds(ours) == steps._LEAST  # where the rehearsal does not compile
    timer.device = torch.device("cuda")
    assert (timer.least_seconds(ours), timer.least_seconds(bare)) == (75, 75)
    timer.found["unfog compiled, captured"] = steps.StepTime(60, 0.1)
    assert (timer.least_seconds(ours), timer.least_seconds(bare)) == (steps._STORED, 75)


@pytest.mark.slow
def test_a_step_that_is_silently_not_captured_is_a_failure(bench):
    """On a CPU nothing can be captured; training goes on without, and says why."""
    networks, capture, timing = bench("networks"), bench("capture"), importlib.import_module("unfog.planning.timing")
    config = networks.settings_of("tiny", cpu=True)
    config = replace(config, training=replace(config.training, capture=True))
    trial = timing.TrialTraining(config, timing.random_images(config, 8), torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"no step was captured.*cpu has none"), capture.must_capture():
        trial.run(1)
    with capture.must_capture(wanted=False):
        trial.run(1)
    with capture.must_capture():
        timing.TrainingHooks().on_capture("each step is one CUDA graph from here on")


STEPS = {"unfog eager", "unfog eager, NCHW", "unfog captured", "unfog eager, not deterministic", "unfog compiled"}
STEPS |= {"bare eager", "bare captured", "bare compiled", "unfog compiled, captured", "memory of a step"}
NAMES = {
    "first": {
        "smoke captured": {"12 steps"},
        "values": {"U-Net in bf16", "mpunet in fp32", "DiT in bf16", "autoencoder in fp32", "update of Muon in bf16"}
        | {"a checkpoint there and back", "losses of 20 steps in fp32", "dpmpp in bf16, DiT", "features: texture"},
        "exact": {"a run resumed", "resume --verify", "4 steps twice, small in fp32"},
        "device": {"build", "matmul", "step", "repeat"},
        "commands": {"train", "resume --verify", "sample", "evaluate", "train-autoencoder", "train --autoencoder"},
    },
    "second": {
        "smoke eager": {"12 steps"},
        "steps cifar10": STEPS,
        "steps dit-latents": STEPS,
        "steps unet-64": {name for name in STEPS if "compiled" not in name},
        "profile cifar10": {"waits", "kernels of cifar10 eager", "kinds of cifar10 eager", "kernel 12"},
        "ranks": {"all-reduce, gloo", "FSDP2, gloo"},
    },
    "quality": {"quality": {"train", "texture", "pixels"}},
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("visits", [("first", "second"), ("quality",)], ids=" and ".join)
def test_rehearsal_of_visits_on_the_cpu(visits, tmp_path):
    """No part fails; what is skipped is what only CUDA has. Visits go side by side, each on a core of its own."""
    environment = os.environ | {"PYTHON": sys.executable}
    words = ["bash", str(FOLDER / "run.sh"), "--cpu", "--minutes", "20"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {}
    for visit in visits:
        command = [*words, "--visit", visit, "--out", str(tmp_path / visit)]
        running[visit] = subprocess.Popen(command, env=environment, **pipes)
    with ThreadPoolExecutor() as threads:  # each visit has pipes that somebody has to read
        said = dict(zip(visits, threads.map(lambda one: one.communicate(timeout=1400), running.values())))
    for visit in visits:
        assert running[visit].returncode == 0, said[visit][0][-3000:] + said[visit][1][-3000:]
        check_rehearsal(visit, tmp_path / visit, *said[visit])


def check_rehearsal(visit, out, printed, progress):
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert {row["state"] for row in rows} <= {"ok", "skipped"}
    assert all("CUDA" in row["said"] or row["part"] == "packages" for row in rows if row["state"] == "skipped")
    by_part = {part: {row["name"] for row in rows if row["part"] == part} for part in {row["part"] for row in rows}}
    for part, names in NAMES[visit].items():
        assert names <= by_part[part], part
    # Rows are printed as they come, then all of them, and last a summary.
    assert "ok: 12 steps" in progress
    summary = (out / "summary.txt").read_text().splitlines()
    assert len(summary) <= 30
    assert printed.splitlines()[-len(summary) :] == summary
    assert {path.name for path in out.iterdir()} == {
        *("summary.txt", "table.md", "gpu.json", "gpu.png", "results.tar.gz"),
    }
    with tarfile.open(out / "results.tar.gz") as archive:
        names = {name.removeprefix("results/") for name in archive.getnames()}
        head = archive.extractfile("results/parts/smoke-eager.log").read().decode()
    assert {"environment.txt", "ledger.toml", "table.md", "summary.txt", "gpu.png", "parts/smoke-eager.jsonl"} <= names
    assert f"torch {torch.__version__}" in head
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in head


# What a part of a visit has to yield on a device without values.
FAKE = {
    "smoke captured": {"5 steps"},
    "values": NAMES["first"]["values"] - {"a checkpoint there and back"} | {"group norm, channels last, bfloat16"},
    "exact": {"2 steps twice, small in fp32", "steps plain and captured, dit-256 in bf16"},
    "steps cifar10": STEPS
    | {
        *("unfog eager, weights in NCHW", "unfog eager, verdict at once", "unfog eager, weights cast at each use"),
        *("unfog eager, batch 1", "drawing"),
    },
    "profile cifar10": {"waits", "kernels of cifar10 eager", "kernels of cifar10 captured"},
    "ranks": {"all-reduce, fake", "FSDP2, fake"},
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_parts_of_a_visit_run_on_fake_cuda(tmp_path):
    """Each row is there, and no error is among them. Nothing is computed, so values differ, and are not looked at."""
    try:
        library = compile_device(tmp_path / "device.so")
    except FileNotFoundError:
        pytest.skip("needs g++")
    environment = os.environ | {"FAKE_CUDA": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FAKES / "visit.py"), *FAKE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1400)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [row for row in rows if row["figures"].get("error") is True], done.stderr[-3000:]
    for part, names in FAKE.items():
        assert names <= {row["name"] for row in rows if row["part"] == part}, part


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_visit_that_is_stopped_writes_what_it_has(tmp_path):
    out, environment = tmp_path / "out", os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(FOLDER / "run.sh"), "--cpu", "--parts", "values", "--out", str(out)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    line = next(line for line in process.stderr if line.startswith("  ok: "))
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does
    process.communicate(timeout=300)
    assert process.returncode
    with tarfile.open(out / "results.tar.gz") as archive:
        assert "results/parts/values.log" in archive.getnames()
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert line.split(": ")[1] in {row["name"] for row in rows}


def test_the_recipe_of_cifar10_is_captured_compiled_and_drawn_in_16_bits(bench, tmp_path, monkeypatch):
    """The rehearsal on the CPU trains a tiny network instead, so the words of the recipe are read here."""
    script, called = bench("cifar10"), []
    monkeypatch.setattr(script, "within", lambda words, deadline: called.append(words) or len(called) // 2)
    assert script.main([str(tmp_path), "--source", "fashion", "--fid", "inception.pt"]) == 1
    (command, *words), evaluation = called
    for words_of in called:
        assert words_of[words_of.index("--device") + 1] == "cuda"
    words[words.index("cuda")] = "auto"  # as this build of torch may have no CUDA
    settings = read_request(command, words).settings.training
    assert (settings.compile, settings.capture, settings.images) == (True, True, script.IMAGES)
    assert evaluation[evaluation.index("--precision") + 1] == "bf16"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_cifar10_goes_on_in_slices_until_the_distance_is_there(bench, tmp_path, monkeypatch, capfd):
    """A slice that is too short for all of it saves and says so; the next ones go on from what it kept."""
    script = bench("cifar10")
    real, started, statuses = script.within, [], []

    def begin(*words, **settings):
        started.append(subprocess.Popen(*words, **settings))
        return started[-1]

    def stop_once_it_trains(run):
        while not started or started[0].poll() is None:
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
                started[0].terminate()
                return
            time.sleep(0.05)

    def within(words, deadline):
        """Stop the training once it trains, and the first evaluation after a second; all else has its time."""
        if words[0] == "train":
            run = Path(words[words.index("--out") + 1])
            threading.Thread(target=stop_once_it_trains, args=(run,)).start()
        early = words[0] == "evaluate" and len(statuses) < 3
        statuses.append(real(words, time.monotonic() + (0 if early else 300)))
        return statuses[-1]

    fake = types.SimpleNamespace(Popen=begin, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(script, "subprocess", fake)
    monkeypatch.setattr(script, "within", within)
    words = [str(tmp_path / "state"), "--cpu", "--images", "800"]
    assert script.main(words) == 3
    assert list((tmp_path / "state/run/checkpoints").glob("[0-9]*"))
    assert not (tmp_path / "state/trained").exists()
    assert [script.main(words) for _ in range(2)] == [3, 0]
    assert statuses == [3, 0, 3, 0]
    said = capfd.readouterr().out
    assert re.search(r"fd [\d.]+ \[[\d.]+, [\d.]+\], 128 samples", said)
