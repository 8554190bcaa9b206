"""The program on an MPS device that is not there, in fp32: see fake_cuda/mps_cases.py for what is looked for."""

import json
import sys

import pytest

from test_fake_cuda import compiled, run

CASES = (
    *("unet fp32", "unet augmented", "unet learned variance", "unet adaptive", "mp bf16", "dit fp32 adamw", "latents"),
    *("autoencoder", "snapshot", "resume", "sampler ddpm", "sampler edm", "sampler dpmpp-sde", "sampler unipc"),
    *("sampler guided within", "sampler ddpm, learned variance", "sampler inpaint", "measured held-out loss"),
)
PLANTED = {
    "planted float64": "of float64",
    "planted generator": "generator of the CPU",
    "planted average": "of tensors on cpu and mps",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs ELF"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    library = compiled("mps.cpp", tmp_path_factory.mktemp("fake_mps") / "mps.so")
    return run(library, [*CASES, *PLANTED], "mps_cases.py")


@pytest.mark.parametrize("name", CASES)
def test_no_float64_and_nothing_on_another_device(results, name):
    assert "error" not in results[name], results[name]
    assert results[name]["faults"] == {}
    assert results[name]["operations"] > 0


@pytest.mark.parametrize(("name", "evidence"), PLANTED.items())
def test_planted_fault_is_found(results, name, evidence):
    assert evidence in json.dumps(results[name]["faults"])
