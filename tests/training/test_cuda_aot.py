"""Training steps compiled for a GPU (sm_90) without one: see fake_cuda/compiled.py for what is real about it.

The budget holds what several versions of torch made of them, the newest first; any other version is held against the
last one before it. For a new version, add the figures that `python fake_cuda/compiled.py NAME ...` prints.
"""

import json
import pkgutil
import sys
from pathlib import Path

import pytest
import torch

from test_fake_cuda import compiled, run

BUDGET = json.loads(Path(__file__).parents[1].joinpath("cuda_aot_budget.json").read_text())
TORCH = next((version for version in BUDGET if torch.__version__ >= version), [*BUDGET][-1])
# What fake_cuda/compiled.py replaces or calls, and no version of torch promises to have.
PRIVATE = (
    *("torch._dynamo.device_interface:CudaInterface.Worker", "torch._dynamo.utils:counters"),
    "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder._deduce_value",
    "torch._inductor.config:force_layout_optimization",
    *(f"torch._inductor.runtime.triton_heuristics:CachingAutotuner.{name}" for name in ("precompile", "run")),
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner._precompile_config",
    *(f"torch._C:_dynamo.guards.{name}" for name in ("_empty_strided_cuda", "_reinterpret_tensor", "assert_alignment")),
)
TRITON = ("triton.backends.compiler:GPUTarget", "triton.backends.nvidia.driver:CudaDriver")
NONE = ("convolutions in NCHW", "attention by the math kernel", "sums by time", "waits", "graph breaks")
FEWER = ("launches", "kernels of Triton", *NONE)
PLANTED = {
    "planted layout": ("unet", "convolutions in NCHW"),
    "planted time": ("unet", "sums by time"),
    "planted break": ("dit", "graph breaks"),
}

needs_cuda_build = pytest.mark.skipif(
    not sys.platform.startswith("linux") or torch.version.cuda is None,
    reason=f"needs a CUDA build of torch on Linux, and no GPU; this one is {torch.__version__}: see docs/devices.md",
)


def worse(figures, budget):
    """Return what is worse than the budget: more of what should be few, or any other number of the rest."""
    return {
        name: f"{figures[name]}, budget {most}"
        for name, most in budget.items()
        if (figures[name] > most if name in FEWER else figures[name] != most)
    }


def missing(names):
    """Return those of some names of modules and attributes that are not there."""
    found = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            found.append(name)
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if gone := missing([*PRIVATE, *TRITON]):
        pytest.skip(f"torch {torch.__version__} differs, so nothing is counted: it has no {', '.join(gone)}")
    return compiled("device.cpp", tmp_path_factory.mktemp("cuda_aot") / "device.so")


def figures_of(library, name):
    figures = run(library, [name], "compiled.py", timeout=3000)[name]
    assert "error" not in figures, figures["error"] + figures["where"]
    return figures


@needs_cuda_build
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", BUDGET[TORCH])
def test_a_compiled_step_is_within_its_budget(library, name):
    assert not worse(figures_of(library, name), BUDGET[TORCH][name]), f"torch {torch.__version__}, budget of {TORCH}"


@needs_cuda_build
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "network", "what"), [(name, *of) for name, of in PLANTED.items()])
def test_planted_mistake_is_found(library, name, network, what):
    assert what in worse(figures_of(library, name), BUDGET[TORCH][network])


def test_what_the_counting_stands_on_is_looked_for():
    assert missing(PRIVATE) == []
    assert missing(["torch.nn:Linear", "torch.nn:Linear.no_such", "torch.no_such:x"]) == [
        *("torch.nn:Linear.no_such", "torch.no_such:x"),
    ]


@pytest.mark.parametrize("name", BUDGET[TORCH]["unet"])
def test_each_figure_of_the_budget_is_compared(name):
    budget = BUDGET[TORCH]["unet"]
    assert not worse(budget, budget)
    assert list(worse(budget | {name: budget[name] + 1}, budget)) == [name]


def test_the_budget_allows_no_break_no_flat_convolution_and_no_math_kernel():
    for version, figures in ((version, figures) for version, budget in BUDGET.items() for figures in budget.values()):
        # Inductor of torch 2.11 takes the gradient of a convolution's output in the format that it was traced in.
        free = ("convolutions in NCHW",) if version.startswith("2.11.") else ()
        assert not any(figures[name] for name in NONE if name not in free)
        # The network, its weights to 16 bits and back, and noise levels, noise, error, verdict and sums of the log.
        assert figures["graphs"] <= 8
