"""The program on a CUDA device that is not there: see fake_cuda/fakes.py for what is real about it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from unfog.training.distributed import process_group

FOLDER = Path(__file__).parents[1] / "fake_cuda"
sys.path.insert(0, str(FOLDER))

from compile_device import compile_device  # noqa: E402

THE_WAIT = "training/distributed/coordination.py"  # where a step reads its loss and the norm of its gradient
AT_ONCE = ("unet adaptive",)  # before it is taken
CAPTURED = ("captured unet", "captured dit", "captured fp16", "captured recomputed")
NOT_CAPTURED = {
    "not captured": "several micro-batches",
    "not captured adaptive": "noise levels or weights follow the losses",
    "not captured, dropout recomputed": "gradient checkpointing",
    "capture refused": "Cannot call this during a capture",
}
LOST = ("capture invalidated",)
MORE = ("snapshot", "snapshot, pageable", "unet bf16, weights converted")
STEPS = ("unet bf16", "unet fp16", "latents", "autoencoder", "kept images", "kept latents")
KEPT = ("kept images", "captured dit")  # on the device
SAMPLERS = ("sampler ddpm", "sampler guided within")
PLANTED = {
    "planted item": "item @",
    "planted bool": "__bool__ @",
    "planted copy": "copy cpu to cuda, blocking",
    "planted generator": "generator of the CPU",
    "planted average": "cpu",
    "planted norm": "convolution of NCHW",
    "planted capture": "captured cpu to cuda",
}
CHANNELS_LAST = ("unet fp16", "unet bf16", "unet accumulated", "unet recomputed", "sampler bf16", "planted norm")
OTHERS = (
    *("unet accumulated", "unet bf16 adamw", "unet fp32", "unet fp16 adamw", "unet recomputed"),
    *("unet classes", "unet augmented", "unet learned variance", "unet adaptive"),
    *("mp bf16", "mp fp16", "dit bf16", "dit fp32 adamw"),
    *("sampler dpmpp", "sampler edm", "sampler guided", "sampler ddim", "sampler heun", "sampler dpmpp-sde"),
    *("sampler unipc", "sampler bf16", "sampler ddpm, learned variance", "sampler edit", "sampler inpaint"),
    *("measured held-out loss", "measured bits", "measured bits by a table"),
    *("measured features texture", "measured features pixels", "resume", "resume fp16 adamw"),
    *("measured features tf1", "measured features bicubic"),
    *("captured unet adamw", "captured fp32", "captured mp", "captured classes", "captured latents"),
)


def compiled(source, made):
    """Compile a device against the torch that is installed, and return the path of the library."""
    try:
        return compile_device(made, source)
    except FileNotFoundError:
        pytest.skip("needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled("device.cpp", tmp_path_factory.mktemp("fake_cuda") / "device.so")


def run(library, names, script="cases.py", timeout=900):
    """Return the results of cases by name, from one process."""
    environment = os.environ | {"FAKE_CUDA": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return {result["name"]: result for result in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def results(library):
    return run(library, [*STEPS, *SAMPLERS, *CAPTURED, *NOT_CAPTURED, *LOST, *MORE])


@pytest.fixture(scope="module")
def planted(library):
    return run(library, PLANTED)


def check_kernels(result):
    """No attention by the math kernel; in 16 bits no convolution of a U-Net that would convert what it is given."""
    assert "math" not in result["attention"]
    if result["name"] in CHANNELS_LAST:
        assert "NHWC" in json.dumps(result["layouts"])
        assert "NCHW" not in json.dumps(result["layouts"]), result["layouts"]
        assert "weights converted" not in result["named"] or result["name"].startswith("sampler")
    if result["name"] == "unet bf16":  # 298 with the casts of autocast; five for each norm are left, and a few others
        assert result["named"]["_to_copy"] < 140
        assert result["named"]["_foreach_copy_"] == 2
    if result["name"].startswith("mp"):
        # That of the verdict, and that to the host; in fp16 those of the loss scale and of its count of steps.
        most = 2 + 2 * ("fp16" in result["name"])
        assert result["named"].get("copy_", 0) <= most, "weights were projected one by one"


def check_step(result):
    """No wait in a step, no copy from pageable memory, no tensor or generator on the wrong device, no slow kernel.

    Where the host decides on a step, it waits once; else it reads a verdict for each step, for which the device is not
    idle but at the end.
    """
    assert "error" not in result, result
    if result["name"] in AT_ONCE:
        assert sum(result["waits"].values()) == result["steps"], result["waits"]
        assert all(wait.startswith(f"tolist @ {THE_WAIT}") for wait in result["waits"])
    else:
        assert result["waits"] == {}
        # A run as a whole is watched once a step is launched, so the verdict on that is seen too.
        before = result["name"].startswith("captured")
        read = [result["named"].get(name, 0) for name in ("late read", "read at the end")]
        assert read == [result["steps"] - 1 + before, 1]
    assert result["faults"] == {}
    images = [copy for copy in result["copies"] if copy.startswith("cpu to cuda")]  # the verdict goes the other way
    if result["name"] in KEPT:
        assert not images, "the images were copied"
    elif result["name"] != "kept latents":
        assert images, "the images of the step were not seen"
        assert result["named"]["read ahead"] >= 1, "the next images were not read before the wait"
    check_kernels(result)


def check_captured(result):
    """As of any step, and one launch for it beside a few to hand over the batch and to count the step before."""
    check_step(result)
    assert result["said"] == "each step is one CUDA graph from here on"
    assert result["named"]["replay"] == result["steps"]
    assert result["operations"] < 50 < 300 < result["named"]["captured"]


def check_sampler(result):
    """No wait between the steps, and no blocking copy."""
    assert "error" not in result, result
    assert result["waits"] == {}
    assert result["faults"] == {}
    assert result["operations"] > 0
    check_kernels(result)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs ELF")]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.exhaustive
def test_step(results, name):
    check_step(results[name])


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.exhaustive
def test_captured_step(results, name):
    check_captured(results[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "why"), NOT_CAPTURED.items())
def test_what_cannot_be_captured_trains_and_says_why(results, name, why):
    assert why in results[name]["said"]
    assert "replay" not in results[name]["named"]
    assert results[name]["operations"] > 300


@pytest.mark.exhaustive
def test_a_capture_that_cuda_invalidates_leaves_the_process_as_it_was(results):
    """torch itself leaves the stream of the capture, and an allocator and a generator that believe in one."""
    result = results["capture invalidated"]
    assert "error" not in result, result
    assert result["said"] == "lost after 3 steps: operation not permitted when stream is capturing"
    free = {"default stream": True, "generator is free": True, "pools of captures": 0, "gradients": 0}
    assert result["left"] == free
    assert "replay" not in result["named"]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.exhaustive
def test_sampler(results, name):
    check_sampler(results[name])


@pytest.mark.parametrize(("name", "evidence"), PLANTED.items())
@pytest.mark.exhaustive
def test_planted_fault_is_found(planted, name, evidence):
    result = planted[name]
    assert evidence in json.dumps([result.get("error"), *(result.get(what) for what in ("waits", "faults", "layouts"))])
    with pytest.raises(AssertionError):
        check_step(result)


@pytest.mark.exhaustive
def test_weights_that_are_kept_in_channels_last_are_not_converted(results):
    """Launches of each convolution of 3x3: of the weight forward and backward, and of its gradient."""
    kept, converted = results["unet bf16"], results["unet bf16, weights converted"]
    assert converted["named"]["weights converted"] == 38
    assert converted["operations"] - kept["operations"] >= 19
    assert kept["converted bytes"] == 0 < converted["converted bytes"]


@pytest.mark.exhaustive
def test_snapshot_goes_through_pinned_memory(results):
    copies = results["snapshot"]["copies"]
    assert sum(copies.values()) > 20
    assert all(copy.startswith("cuda to cpu, pinned") for copy in copies)
    assert not any(wait.startswith("copy") for wait in results["snapshot"]["waits"])
    assert results["snapshot"]["named"]["pinned"] <= 2  # blocks: each is a call of the driver, and rounded up
    assert not results["snapshot, pageable"]["copies"]
    assert sum(wait.startswith("copy cuda to cpu") for wait in results["snapshot, pageable"]["waits"])


def test_ranks_that_share_a_gpu_are_found_by_its_identity(monkeypatch):
    """A scheduler may show each process one GPU, its own or that of all."""
    monkeypatch.setattr(process_group, "_sharing", 0)
    for identities, sharing in ((("a", "b"), 1), (("a", "a"), 2)):
        store = dist.HashStore()
        store.set("gpu/1", identities[1])
        monkeypatch.setattr(process_group, "_gpu_identity", lambda own=identities[0]: own)
        process_group.agree_on_gpus(store, 0, 2)
        assert process_group.processes_per_gpu() == sharing


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_other_cases(library, part):
    for name, result in run(library, OTHERS[part::4]).items():
        checks = {"sampler": check_sampler, "measured": check_sampler, "captured": check_captured}
        checks.get(name.partition(" ")[0], check_step)(result)
