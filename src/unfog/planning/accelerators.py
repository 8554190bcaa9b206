"""Data sheets of common accelerators, for plans of a machine that is not at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unfog.config.values import suggest
from unfog.errors import RequestError

GB = 10**9
TFLOPS = 10**12


@dataclass(frozen=True)
class Device:
    """Memory and rates of an accelerator; rates are dense, with accumulation in fp32."""

    name: str
    memory: int
    """Bytes."""
    half: float
    """FLOP/s of matrix products in its 16-bit type."""
    full: float
    """FLOP/s in fp32 without TF32, which unfog leaves off."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Its native training precision."""


DEVICES = {
    "b200": Device("NVIDIA B200", 180 * GB, 2250 * TFLOPS, 75 * TFLOPS),
    "h200": Device("NVIDIA H200", 141 * GB, 989 * TFLOPS, 67 * TFLOPS),
    "h100": Device("NVIDIA H100 SXM", 80 * GB, 989 * TFLOPS, 67 * TFLOPS),
    "a100": Device("NVIDIA A100 80GB", 80 * GB, 312 * TFLOPS, 19.5 * TFLOPS),
    "a100-40": Device("NVIDIA A100 40GB", 40 * GB, 312 * TFLOPS, 19.5 * TFLOPS),
    "l40s": Device("NVIDIA L40S", 48 * GB, 362 * TFLOPS, 91.6 * TFLOPS),
    "a10": Device("NVIDIA A10", 24 * GB, 125 * TFLOPS, 31.2 * TFLOPS),
    "l4": Device("NVIDIA L4", 24 * GB, 121 * TFLOPS, 30.3 * TFLOPS),
    "5090": Device("NVIDIA RTX 5090", 32 * GB, 209 * TFLOPS, 105 * TFLOPS),
    "4090": Device("NVIDIA RTX 4090", 24 * GB, 165 * TFLOPS, 82.6 * TFLOPS),
    "3090": Device("NVIDIA RTX 3090", 24 * GB, 71 * TFLOPS, 35.6 * TFLOPS),
    "3060": Device("NVIDIA RTX 3060", 12 * GB, 25.6 * TFLOPS, 12.7 * TFLOPS),
    "v100": Device("NVIDIA V100 32GB", 32 * GB, 125 * TFLOPS, 15.7 * TFLOPS, "fp16"),
    "t4": Device("NVIDIA T4", 16 * GB, 65 * TFLOPS, 8.1 * TFLOPS, "fp16"),
}


def find_device(name: str) -> Device:
    """Return the device of a name such as "H100" or "rtx 4090". Raises `RequestError` if it is unknown."""
    plain = name.lower().replace("nvidia", "").replace("rtx", "").strip(" -_").replace(" ", "-").replace("_", "-")
    if plain not in DEVICES:
        raise RequestError(
            f"for = {name!r} is not a known device{suggest(plain, DEVICES)}; there is {', '.join(DEVICES)}; "
            "leave --for away for the machine at hand"
        )
    return DEVICES[plain]
