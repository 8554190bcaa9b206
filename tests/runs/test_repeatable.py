"""The same command is the same run: automatic settings follow from rules, and not from how busy the machine is."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import NETWORK, few_images
from forked import Forked
from forked import run as run_forked
from unfog.config.presets import preset
from unfog.config.schema import Network
from unfog.config.spec_strings import parse_spec, registry_of
from unfog.data.dataset import ImageSet
from unfog.data.settings import Data
from unfog.device.cores import SPINNING_LIMITED
from unfog.planning import auto_settings
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.timing import StepTime
from unfog.runs import session
from unfog.runs.evaluation_hook import resolve_metrics
from unfog.training.precision import default_precision
from unfog.training.settings import Evaluate, Training

CPU = torch.device("cpu")
ZEN, XEON = "AMD EPYC", "Intel Xeon"
NO_METRICS = Evaluate()


@pytest.mark.parametrize(("cpu", "parameters", "name"), [
    ({"cpu_name": ZEN, "avx512_bf16": True}, 990_019, "bf16"),
    ({"cpu_name": ZEN, "avx512_bf16": True}, 44_211, "fp32"),
    ({"cpu_name": ZEN, "avx512_bf16": False}, 990_019, "fp32"),
    ({"cpu_name": XEON, "avx512_bf16": True, "amx_bf16": False}, 990_019, "fp32"),
    ({"cpu_name": XEON, "avx512_bf16": True, "amx_bf16": True}, 990_019, "bf16"),
    ({"architecture": "aarch64"}, 990_019, "fp32"),
    ({}, 990_019, "fp32"),
])  # fmt: skip
def test_precision_is_a_rule_by_hardware_and_network(cpu, parameters, name, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu, raising=False)
    assert default_precision(CPU, lambda: parameters)[0] == name


@pytest.mark.parametrize(("native", "name"), [(True, "bf16"), (False, "fp16")])
def test_precision_of_a_gpu_is_its_native_one(native, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert default_precision(torch.device("cuda"), lambda: pytest.fail("the network does not matter"))[0] == name


def resolved(evaluate=NO_METRICS, **training) -> AutoSettings:
    data, network = Data(size=16, channels=1), parse_spec(registry_of(Network), NETWORK)
    network = network if evaluate.metrics else None
    base = replace(preset("default"), data=data, network=network, evaluate=evaluate)
    config = replace(base, training=Training(**training))
    found = AutoSettings(config, None, CPU, lambda: False)
    found.resolve()
    return found


def test_no_automatic_setting_of_a_length_in_steps_is_timed(monkeypatch):
    monkeypatch.setattr(auto_settings, "measure_step", lambda *asked: pytest.fail("a step was timed"))
    fast = {"cpu_name": ZEN, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: fast, raising=False)
    found = resolved(steps=100)
    assert found.config.training.precision == "bf16"


@pytest.mark.slow
def test_metrics_are_planned_by_counting_and_not_by_the_clock(monkeypatch):
    monkeypatch.setattr(auto_settings, "measure_step", lambda *asked: pytest.fail("a step was timed"))
    clock = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock) ** 2))  # ever slower
    pixels = np.random.default_rng(0).integers(0, 256, (200, 1, 16, 16), np.uint8)
    images = ImageSet(pixels, [str(i) for i in range(200)])
    found = []
    for _ in range(2):
        auto = resolved(steps=20_000, batch=8, precision="fp32", evaluate=Evaluate(metrics=("kid", "fid", "sliced")))
        resolve_metrics(auto, images, CPU)
        found.append((auto.config.evaluate, auto.choices))
    assert found[0] == found[1]
    assert found[0][0].samples > 100


def test_a_length_by_time_is_announced_as_measured(monkeypatch):
    monkeypatch.setattr(auto_settings, "measure_step", lambda *asked: StepTime(0.5, 0.5))
    found = resolved(budget="10m")
    reason = next(choice.reason for choice in found.choices if choice.name == "images")
    assert "10m at the measured pace of 128 images/s" in reason
    assert "busy" not in reason


def test_a_length_by_time_says_that_the_machine_was_busy(monkeypatch):
    monkeypatch.setattr(auto_settings, "measure_step", lambda *asked: StepTime(0.5, 0.5, 0.25))
    reason = next(choice.reason for choice in resolved(budget="10m").choices if choice.name == "images")
    assert reason.endswith("; the machine is busy, and the steps had 25% of a core: do not trust this pace")


BUSY = "while True: sum(range(10_000))"


@pytest.mark.slow
def test_the_same_command_beside_busy_processes_trains_the_same_model(tmp_path):
    words = ["train", few_images(), "--network", NETWORK, "--size", 8, "--batch", 8, "--steps", 4]
    words += ["--preview.images", 1]
    words += ["--sampler.steps", 2, "--evaluate.every", -1, "--precision", "auto", "--device", "cpu"]

    def trained(name):
        done = run_forked([*words, "--out", tmp_path / name])
        assert done.returncode == 0, done.stderr
        (last,) = sorted((tmp_path / name / "checkpoints").glob("*4"))
        files = {file.name: file.read_bytes() for file in last.glob("*.safetensors")}
        return files | {"config.toml": (tmp_path / name / "config.toml").read_bytes()}

    quiet = trained("quiet")
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        busy = trained("busy")
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert len(quiet) > 2
    assert busy == quiet


def variables_after(code, **given):
    """What `import unfog` leaves of the variables of OpenMP, after some code."""
    names = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    code += "\nimport os, unfog, unfog.device.cores\n"
    code += f"print([os.environ.get(n) for n in {names}], unfog.device.cores.SPINNING_LIMITED)"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_idle_threads_sleep_soon_unless_somebody_has_said_how_they_wait():
    assert variables_after("") == "['1000', '1', None] True"
    assert variables_after("", OMP_WAIT_POLICY="ACTIVE") == "[None, None, 'ACTIVE'] True"
    assert variables_after("", GOMP_SPINCOUNT="7") == "['7', None, None] True"
    assert variables_after("import sys; sys.modules['torch'] = None") == "['1000', '1', None] False"


@pytest.mark.slow
def test_tests_and_the_processes_that_they_start_do_not_spin(monkeypatch):
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    assert SPINNING_LIMITED
    process = Forked([], "import os; print(os.environ['GOMP_SPINCOUNT'])", stdout=subprocess.PIPE)
    assert process.communicate()[0] == "1000\n"


def test_a_late_import_is_said_once(monkeypatch, capsys):
    session._say_that_threads_spin.cache_clear()
    for _ in range(2):
        session._say_that_threads_spin()
    assert capsys.readouterr().err.count("import unfog first") == 1
