"""The choice of a device, and the flags of torch that a run sets; the answers of torch and nvidia-smi are made up."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

import forked
import unfog
from conftest import few_images
from unfog.config.resume_rules import check_changes, settings_digests
from unfog.config.schema import Config
from unfog.config.toml import update
from unfog.errors import RequestError, RunError
from unfog.pipeline import build, compile_network
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.microbatch import Machine
from unfog.process import device, torch_flags
from unfog.process.torch_flags import caller_flags_kept, set_repeatable
from unfog.runs.ranks import say_what_resume_promises
from unfog.training.precision import Precision

CPU, CUDA, FIRST_GPU = torch.device("cpu"), torch.device("cuda"), torch.device("cuda:0")
SMALL = "unet:channels=8/8,attention=false/true,blocks=1,norm_groups=4,head_channels=8"
H100, V100 = ("NVIDIA H100", (9, 0)), ("Tesla V100", (7, 0))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that gives torch GPUs, and an nvidia-smi that lists their free MiB, last GPU first."""
    monkeypatch.setattr(device, "check_device", lambda name: None)  # this torch may be one for CPUs
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    current = []

    def become(*cards, free=(), used=MappingProxyType({}), built_for="sm_80 sm_90"):
        found = [
            SimpleNamespace(name=name, major=major, minor=minor, uuid=f"uuid-{i}", gcnArchName="")
            for i, (name, (major, minor)) in enumerate(cards)
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device(current[-1]).index if current else 0)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: used.get(index, 0))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_arch_list", built_for.split)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: found[getattr(one, "index", one) or 0])
        # As torch's own, it refuses a GPU without a number.
        numbered = torch._utils._get_device_index
        monkeypatch.setattr(torch.cuda, "set_device", lambda one: current.append(torch.device("cuda", numbered(one))))
        lines = [f"GPU-uuid-{i}, {mib}" for i, mib in enumerate(free)][::-1]
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + ("\n".join(f"echo '{line}'" for line in lines) or "exit 9"))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        device.free_memory_of_gpus.cache_clear()
        return current

    yield become
    device.free_memory_of_gpus.cache_clear()


def settled(name, device):
    """Return the device that config.toml names, and the notes about it."""
    config = update(Config(), {"training": {"device": name}}, "")
    auto = AutoSettings(config, None, Machine(device), lambda: False)
    return auto.config.training.device, [str(choice) for choice in auto.choices]


def test_the_gpu_that_is_chosen_becomes_the_current_one_and_computes_fp32_as_such(machine):
    current = machine(H100, H100)
    assert device.choose_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_of_several_gpus_the_one_with_the_most_free_memory_is_taken_and_the_run_says_so(name, machine):
    current = machine(H100, H100, H100, free=(900, 70000, 800))
    assert device.choose_device(name) == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    stored, [note] = settled(name, torch.device("cuda:1"))
    assert stored == "cuda"  # a resume chooses anew
    assert "device = cuda:1: of 3 GPUs, with 68.4 GiB" in note


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_one_gpu_is_taken_without_a_word(name, machine):
    machine(H100, free=(900,))
    assert device.choose_device(name) == FIRST_GPU
    assert settled(name, FIRST_GPU) == ("cuda", [])


@pytest.mark.parametrize("how", ["chosen", "used"])
def test_a_gpu_that_the_process_has_chosen_or_uses_already_is_kept(how, machine):
    if how == "chosen":
        place = 1
        machine(H100, H100, free=(70000, 900)).append("cuda:1")
    else:
        place = 0
        machine(H100, H100, free=(900, 70000), used={0: 2**20})
    assert device.choose_device("auto") == torch.device("cuda", place)
    assert "uses it already" in settled("auto", torch.device("cuda", place))[1][0]


def test_without_nvidia_smi_the_first_gpu_that_torch_has_code_for_is_taken(machine):
    machine(V100, H100, H100)
    assert device.choose_device("auto") == torch.device("cuda:1")
    assert "the first that torch has code for" in settled("auto", torch.device("cuda:1"))[1][0]


def test_a_gpu_that_torch_has_no_code_for_is_not_chosen_however_much_of_it_is_free(machine):
    machine(V100, H100, free=(70000, 900))
    assert device.choose_device("auto") == torch.device("cuda:1")


def test_auto_goes_on_to_the_next_device_where_torch_has_no_code_for_the_gpu_and_says_why(machine, monkeypatch):
    current = machine(V100, free=(70000,))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device.choose_device("auto") == CPU
    assert not current
    stored, [note] = settled("auto", CPU)
    assert stored == "cpu"
    assert "no code for Tesla V100 (sm_70)" in note


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_is_named_and_that_torch_has_no_code_for_is_refused_with_a_remedy(name, machine):
    current = machine(V100)
    with pytest.raises(RequestError, match=r"Tesla V100 .*--device cpu"):
        device.choose_device(name)
    assert not current


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.unused_gpu() == ""
    (driver := tmp_path / "version").touch()
    monkeypatch.setattr(device, "_NVIDIA", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is for CPUs" in device.unused_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver may be too old for the CUDA 13.0" in device.unused_gpu()
    assert "needs 580 or newer" in device.unused_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert device.unused_gpu() == ""


def test_under_wsl_the_program_of_the_driver_is_asked(monkeypatch, tmp_path):
    """The folder of the driver is not there, and the program is in a folder that is often not on the path."""
    monkeypatch.setattr(device, "_WSL", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert device.unused_gpu() == ""
    (program := tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA GeForce RTX 4090\n")
    program.chmod(0o755)
    assert "driver may be too old" in device.unused_gpu()
    program.write_text("#!/bin/sh\nexit 9\n")  # as without a GPU
    assert device.unused_gpu() == ""


@pytest.mark.parametrize(("given", "used"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_products_repeat_from_the_import_on_unless_the_user_has_chosen(given, used):
    """torch reads the variable at the first product on a GPU, also that of the caller."""
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    asked = "import os, sys, unfog; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], 'torch' in sys.modules)"
    environment |= {"CUBLAS_WORKSPACE_CONFIG": given} if given else {}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [used, "False"]


@pytest.fixture
def flags(monkeypatch):
    """Return a function that reads the flags that a run sets; they are those of another program at first."""
    monkeypatch.setattr(torch_flags, "_products_repeat", lambda device: True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    cudnn = torch.backends.cudnn
    for name, value in (("benchmark", True), ("deterministic", False), ("allow_tf32", True)):
        monkeypatch.setattr(cudnn, name, value)

    def read():
        enabled = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory
        return *enabled, filled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32

    yield read
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", (True, False, False, False, True, True)),
        ("on", (True, False, False, False, True, True)),
        ("off", (False, False, False, True, False, True)),
    ],
)
def test_runs_on_cuda_are_deterministic_without_exception_unless_they_may_vary(setting, expected, flags, monkeypatch):
    """With warn_only, attention keeps its non-deterministic backward pass; filled tensors would cost kernels."""
    monkeypatch.setattr(build, "build_network", _stop)
    config = update(Config(), {"training": {"deterministic": setting}}, "")
    with pytest.raises(_Stop):
        build.build_state(config, CUDA)
    assert flags() == expected


class _Stop(Exception):
    pass


def _stop(config):
    raise _Stop


def test_nothing_is_set_on_a_cpu(flags):
    before = flags()
    for on in (True, False):
        set_repeatable(CPU, on)
        assert flags() == before


def test_the_caller_gets_its_flags_back_also_after_an_error(flags):
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = flags()

    @caller_flags_kept()
    def work():
        set_repeatable(CUDA, False)
        torch_flags.set_flag(torch.backends.cudnn, "allow_tf32", False)
        with caller_flags_kept():
            within = flags()
            set_repeatable(CUDA, True)
            assert flags() != within
        assert flags() == within
        set_repeatable(CUDA, True)
        raise _Stop

    for _ in range(2):
        with pytest.raises(_Stop):
            work()
        assert flags() == before
    set_repeatable(CUDA, True)  # a process that does nothing else keeps them
    assert flags()[:2] == (True, False)


@pytest.mark.slow
def test_training_puts_the_flags_of_the_caller_back(flags, tmp_path, monkeypatch):
    """A run on the CPU that sets the flags as on CUDA: it ends, goes on, is repeated, and fails."""
    real, before, seen = build.set_repeatable, flags(), []

    def as_on_cuda(device, on):
        real(CUDA, on)
        seen.append(flags())

    monkeypatch.setattr(build, "set_repeatable", as_on_cuda)
    usual = {"network": SMALL, "batch": 4, "device": "cpu", "precision": "fp32", "sampler": {"steps": 2}}
    usual |= {"preview": {"every": -1, "images": 1}, "evaluate": {"every": -1}}
    unfog.train(few_images(), out=tmp_path / "run", steps=2, **usual)
    assert flags() == before
    unfog.verify(tmp_path / "run")
    assert flags() == before
    unfog.resume(tmp_path / "run", steps=3)
    assert flags() == before
    with pytest.raises(RunError, match="too bad"):
        unfog.train(few_images(), out=tmp_path / "other", steps=2, callbacks=[_Failing()], **usual)
    assert flags() == before
    assert len(seen) >= 4
    assert all(one[0] for one in seen)


class _Failing:
    def on_log(self, event):
        raise ValueError("too bad")


def test_products_that_came_too_early_are_refused_with_the_variable_and_the_remedy(monkeypatch, flags):
    def refuse(*matrices):
        raise RuntimeError("Deterministic behavior was enabled ... set CUBLAS_WORKSPACE_CONFIG=:4096:8")

    monkeypatch.undo()
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(size))
    assert torch_flags._products_repeat(CUDA)
    monkeypatch.setattr(torch, "mm", refuse)
    with caller_flags_kept():
        with pytest.raises(RequestError, match=r"CUBLAS_WORKSPACE_CONFIG=:4096:8.*--training.deterministic off"):
            set_repeatable(CUDA, True)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        with pytest.raises(RequestError, match=r"with CUBLAS_WORKSPACE_CONFIG = ':0:0'.* to :4096:8"):
            set_repeatable(CUDA, True)
        set_repeatable(CUDA, False)  # the remedy


@pytest.mark.parametrize(
    "chosen",
    [
        "",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    ],
)
@pytest.mark.slow
def test_fp32_is_fp32_however_the_caller_chose_tf32_and_is_given_back(chosen):
    """In a process of its own, as torch's interfaces for this leave traces in each other."""
    code = f"""
import torch
from unfog.process.torch_flags import caller_flags_kept, compute_fp32_exactly
{chosen}
cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
used = lambda: [part.fp32_precision for part in (cudnn.conv, cudnn.rnn, matmul)]
before = used()
with caller_flags_kept():
    for _ in range(2):
        compute_fp32_exactly()
        assert "tf32" not in used(), used()
        # Inductor and the features of metrics read the older interface.
        assert not cudnn.allow_tf32 and not matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
assert used() == before, (used(), before)
if "medium" in {chosen!r}:
    assert torch.get_float32_matmul_precision() == "medium"
"""
    done = forked.run([], code)
    assert done.returncode == 0, done.stderr


def test_muon_iterates_in_bf16_only_where_a_gpu_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    fp16 = Precision("fp16", CPU)
    fp16.device = CUDA
    assert fp16.iteration_dtype() == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert fp16.iteration_dtype() == torch.bfloat16
    assert Precision("bf16", CPU).iteration_dtype() == torch.bfloat16
    assert Precision("fp32", CPU).iteration_dtype() == torch.float32


@pytest.mark.parametrize(
    ("where", "present", "environment", "said"),
    [
        (CUDA, "gcc", {}, ""),
        (CUDA, "clang", {}, ""),
        (CUDA, "", {}, "gcc or clang is not found"),
        (CUDA, "gcc", {"CC": "/nowhere/icc -O2"}, "/nowhere/icc is not found"),
        (CPU, "g++", {}, ""),
        (CPU, "gcc", {}, r"(g|clang)\+\+ is not found"),
    ],
)
def test_compiling_without_a_compiler_is_refused_before_the_start(
    where, present, environment, said, monkeypatch, tmp_path
):
    monkeypatch.setattr(compile_network, "find_spec", lambda name: object())
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if present:
        (tmp_path / present).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = pytest.raises(RequestError, match=rf"{said}.*--training.no-compile") if said else nullcontext()
    with refused:
        compile_network.check_can_compile(where)


def test_compiling_on_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(compile_network, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"needs Triton .*--training.no-compile"):
        compile_network.check_can_compile(CUDA)


@pytest.mark.slow
def test_a_run_without_a_compiler_leaves_no_folder_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(RequestError, match="/nowhere/g"):
        unfog.train(few_images(), out=tmp_path / "run", network="tiny", steps=1, batch=4, compile=True, device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_setting_may_change_when_a_run_goes_on_and_runs_from_before_it_are_as_they_were():
    stored, varying = (update(Config(), {"training": {"deterministic": value}}, "") for value in ("on", "off"))
    assert check_changes(stored, varying) == ["training.deterministic: 'on' -> 'off'"]
    assert settings_digests(stored)["repeat"] != settings_digests(varying)["repeat"]
    assert settings_digests(stored)["training"] == settings_digests(varying)["training"]
    before = Config()  # a file without the setting
    assert before.training.deterministic == "auto"
    auto = AutoSettings(before, None, Machine(CPU), lambda: False)
    auto.resolve_determinism()
    assert auto.config.training.deterministic == "on"
    with pytest.raises(RequestError, match="deterministic"):
        update(Config(), {"training": {"deterministic": "maybe"}}, "")


def test_a_run_on_cuda_that_may_vary_says_what_a_resume_promises(capsys):
    for setting, where, said in (("off", CUDA, True), ("off", CPU, False), ("on", CUDA, False), ("auto", CUDA, False)):
        say_what_resume_promises(update(Config(), {"training": {"deterministic": setting}}, ""), where)
        assert ("not bit-identical" in capsys.readouterr().err) == said
