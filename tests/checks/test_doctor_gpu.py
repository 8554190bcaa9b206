"""The doctor on a device: the same code on the CPU, with faults planted, and what follows from names and times."""

import json
import warnings

import pytest
import torch
from torch import _dynamo as dynamo

import unfog
from unfog.checks import gpu_checks  # each check is given tensors of its own
from unfog.checks.gpu_checks import StepChecks, check_gpu
from unfog.cli.main import main
from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.errors import RequestError
from unfog.planning.flops import Device, NetworkCost
from unfog.planning.timing import StepTime, TrialTraining, differing_tensors, random_images, waits_for_device
from unfog.process.device import has_code_for
from unfog.process.signals import StopSignals

TINY = "unet:channels=8/8,attention=0/0,mid_attention=0,norm_groups=4,head_channels=8"
SMALL = {"network": TINY, "data": {"size": 8, "channels": 3}, "training": {"batch": 2, "device": "cpu"}}
CPU = torch.device("cpu")
MEASURE = StepTime.measure.__func__


@pytest.fixture
def config():
    return update(preset("default"), SMALL, "")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Time few steps, and multiply and copy little."""
    monkeypatch.setattr(StepTime, "measure", classmethod(lambda cls, run: MEASURE(cls, run, 0.05)))
    monkeypatch.setattr(gpu_checks, "_SIDE", {"cpu": 64})
    monkeypatch.setattr(gpu_checks, "_COPIED", {"cpu": 2**12})


def by_code(findings):
    return {finding.code.removeprefix("gpu."): finding for finding in findings}


@pytest.mark.slow
def test_the_command_prints_every_verdict_on_one_screen(tmp_path, capsys):
    words = ["--gpu", "--device", "cpu", "--network", TINY, "--size", "8", "--batch", "2", "--out", tmp_path / "page"]
    with pytest.raises(SystemExit) as left:
        main(["doctor", *map(str, words)])
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (0, f"{tmp_path / 'page' / 'report.html'}\n")
    found = json.loads((tmp_path / "page" / "findings.json").read_text())["findings"]
    codes = {"build", "memory", "matmul", "rounding", "copies", "step", "repeat"}
    assert {one["code"] for one in found} == {f"gpu.{code}" for code in codes}
    assert all(one["evidence"] in said.err for one in found)
    assert len(said.err.splitlines()) < 24


def test_a_machine_without_a_gpu_is_told_in_a_sentence(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with (
        StopSignals(saves=False) as stop,
        pytest.raises(RequestError, match=r"no GPU to check.*--device cpu") as raised,
    ):
        check_gpu(update(config, {"training": {"device": "auto"}}, ""), stop)
    assert "\n" not in str(raised.value)
    with pytest.raises(RequestError, match="give a source to check, or gpu=True"):
        unfog.doctor()
    with pytest.raises(RequestError, match="give a source to check, or gpu=True"):
        unfog.doctor("photos", gpu=True)


@pytest.mark.parametrize(("words", "said"), [([], "SOURCE|RUN is missing"), (["x", "--gpu"], "omit 'x', or --gpu")])
def test_a_source_or_the_gpu(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_each_planted_fault_is_found(config, monkeypatch):
    """Bytes lost on the way back, wrong sums, an optimiser that varies, and a device that cannot multiply."""
    product, run, runs = torch.Tensor.__matmul__, TrialTraining.run, []

    def varies(trial, steps):
        runs.append(trial)
        next(trial.state.model.parameters()).data[0] += len(runs)
        return run(trial, steps)

    def cannot(*_):
        raise RuntimeError("no kernel image is available for execution on the device\nand more")

    def wrong(a, b):
        return product(a, b) * (1.1 if a.dtype == torch.bfloat16 else 1)

    with StopSignals(saves=False) as stop:
        repeat = StepChecks(config, CPU, stop).check_repeat
        faults = (
            ("fatal", lambda: gpu_checks._check_copies(CPU), gpu_checks, "to_host", lambda tensor: tensor.roll(1)),
            ("fatal", lambda: gpu_checks._check_rounding(CPU), torch.Tensor, "__matmul__", wrong),
            ("warning", repeat, TrialTraining, "run", varies),
        )
        for severity, check, owner, name, fault in faults:
            assert check().severity == "fine"
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(owner, name, fault)
                assert check().severity == severity
    monkeypatch.setattr(gpu_checks, "matmul_seconds", cannot)
    found = gpu_checks._attempt("matmul", lambda: gpu_checks._check_matmul(CPU))
    assert found.severity == "fatal"
    assert found.evidence.endswith("RuntimeError: no kernel image is available for execution on the device")
    assert gpu_checks._attempt("compile", cannot).severity == "warning"


@pytest.mark.slow
@dynamo.config.patch(disable=True)  # pytest's monkeypatch would delete the option at the end
def test_a_compiled_step_is_judged_by_what_it_gains(config, monkeypatch):
    """With the compiler off, so that nothing is gained; then with times that are given."""
    monkeypatch.setattr(NetworkCost, "of", lambda *_: NetworkCost(1e6, 3e6, 100))
    with StopSignals(saves=False) as stop:
        checks = StepChecks(config, CPU, stop)
        assert "not timed" in checks.check_compiled().evidence
        checks.check_eager()
        times = iter([StepTime(1.0, 0.4), StepTime(41.0, 0.2), StepTime(41.0, 0.39)])
        monkeypatch.setattr(StepTime, "measure", lambda run: next(times))
        checks.check_eager()
        pays, does_not = checks.check_compiled(), checks.check_compiled()
    assert pays.severity == "fine"
    assert "2.00 times as fast" in pays.evidence
    assert "from step 200 on" in pays.evidence
    assert does_not.severity == "hint"
    assert "--compile" in does_not.remedy


def test_steps_are_timed_after_the_first_and_compiling_pays_once_it_is_made_up_for():
    counts = []

    def run(steps):
        counts.append(steps)
        return 9.0 if len(counts) == 1 else 0.5 * steps

    found = MEASURE(StepTime, run, 3.0)
    assert (found.first, found.step) == (9.0, 0.5)
    assert counts == [1, 1, 2, 2, 2]
    # Both have taken 1 + 0.5 n and 9 + 0.3 n seconds after n more steps: equal at n = 40.
    assert StepTime(9.0, 0.3).pays_from(StepTime(1.0, 0.5)) == pytest.approx(40)
    assert StepTime(9.0, 0.5).pays_from(StepTime(1.0, 0.5)) == float("inf")
    assert StepTime(0.5, 0.3).pays_from(StepTime(1.0, 0.5)) == 0


@pytest.mark.parametrize(
    ("capability", "built_for", "fits"),
    [
        ((9, 0), "sm_80 sm_90", True),
        ((8, 9), "sm_80 sm_90", True),  # machine code of the same major number
        ((7, 0), "sm_80 sm_90", False),  # a GPU that newer builds have dropped
        ((12, 0), "sm_80 sm_90", False),  # a GPU newer than the build
        ((12, 0), "sm_80 sm_90 compute_90", True),  # which the driver translates
        ((8, 0), "sm_86", False),
        ((10, 0), "sm_90a", False),
        ((9, 0), "sm_90a", True),
        ((12, 1), "sm_120", True),
        ((9, 0), "gfx942 nonsense", False),
    ],
)
def test_code_for_a_gpu(capability, built_for, fits):
    assert has_code_for(capability, built_for.split()) == fits


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100")),
        *(("NVIDIA A100-PCIE-40GB", "a100-40"), ("NVIDIA GeForce RTX 4090", "4090"), ("Tesla T4", "t4")),
        *(("NVIDIA H100 PCIe", ""), ("NVIDIA A10G", ""), ("NVIDIA GeForce RTX 4090 Laptop GPU", "")),
        *(("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""), ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "")),
        *(("NVIDIA GeForce RTX 3060 Ti", ""), ("AMD Instinct MI300X", ""), ("NVIDIA GeForce RTX 4090 D", "")),
    ],
)
def test_data_sheets_are_those_of_the_card_that_the_driver_names(name, key):
    assert Device.of_gpu(name) is (Device.find(key) if key else None)


def test_waits_are_counted_by_place_where_torch_tells_of_them(monkeypatch):
    assert waits_for_device(lambda: None, CPU) is None
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work():
        warnings.warn("Synchronization debug mode is a prototype", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally ...)", stacklevel=1)

    found = waits_for_device(work, torch.device("cuda"))
    assert list(found.values()) == [3]
    assert next(iter(found)).startswith("checks/test_doctor_gpu.py:")
    assert modes == ["warn", "default"]


@pytest.mark.slow
def test_trials_train_on_what_a_run_trains_on(config):
    """Two of one seed are equal to the bit, another seed is not; latents and classes are of a run's formats."""
    config = gpu_checks.trial_settings(config, CPU, lambda: False)
    trials = [TrialTraining(config, random_images(config), CPU) for _ in range(2)]
    other = TrialTraining(update(config, {"training": {"seed": 1}}, ""), random_images(config), CPU)
    for trial in (*trials, other):
        assert trial.run(1) > 0
        assert trial.state.updates == 1
    assert differing_tensors(*trials) == []
    assert len(differing_tensors(trials[0], other)) > 10
    latents = {"autoencoder_folder": "/nowhere", "latents": {"channels": 4, "factor": 8, "mean": (0.0,) * 4}}
    changes = latents | {"latents": latents["latents"] | {"deviation": (1.0,) * 4}, "classes": ("a", "b")}
    images = random_images(update(config, changes | {"data": {"size": 64, "flip": True}}, ""), 5)
    assert (images.pixels.shape, images.pixels.dtype.name) == ((5, 2, 4, 8, 8), "float16")
    assert [*images.labels] == [0, 1, 0, 1, 0]
