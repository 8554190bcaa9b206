"""Seconds of a training step in fp32 and in bf16, by network: the measurement behind the rule of `precision = auto`.

    OMP_NUM_THREADS=1 python benchmarks/speed/precision.py [--steps 6] [--rounds 3] [--only TEXT]

Each precision runs in the memory format that it gets by rule. Seconds are of the processor, the least of the rounds'
medians, so that other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from unfog.config.schema import Config
from unfog.models.settings import SIZES, Architecture, UNet
from unfog.training.precision import default_memory_format
from unfog.training.settings import PrecisionName

import torch
from growth import CPU, settings, step


def unet(*channels: int) -> UNet:
    """A U-Net without attention."""
    none = (False,) * len(channels)
    return UNet(channels=channels, attention=none, mid_attention=False, norm_groups=8)


NETWORKS: dict[str, Architecture] = {
    "unet 8/16": unet(8, 16),
    "unet 16/32": unet(16, 32),
    "unet 24/48": unet(24, 48),
    "unet 32/64": unet(32, 64),
    "unet 48/96": unet(48, 96),
    **{name: SIZES[name] for name in ("tiny", "small", "mp-tiny", "mp-small", "dit-tiny")},
}
SHAPES = ((28, 8), (28, 64), (64, 8))  # side in pixels, images of a batch


def case(network: Architecture, size: int, batch: int, precision: PrecisionName) -> Config:
    """The settings of a run at this precision, as the automatic ones would have them."""
    config = settings(batch, size)
    form = "contiguous"
    if network.prefers_channels_last:
        form = default_memory_format(CPU, precision)[0]
    training = replace(config.training, precision=precision, memory_format=form)
    return replace(config, network=network, training=training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="networks whose name contains this")
    asked = parser.parse_args()
    print(f"{torch.get_num_threads()} thread(s), {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'network':12} {'parameters':>11} {'side':>5} {'batch':>5} {'fp32 ms':>9} {'bf16 ms':>9} {'fp32/bf16':>9}")
    for name, network in NETWORKS.items():
        for size, batch in SHAPES if asked.only in name else ():
            times: dict[str, list[float]] = {"fp32": [], "bf16": []}
            for _ in range(asked.rounds):
                for precision in times:  # in turns, so that a change of the machine's speed meets both
                    seconds, parameters = step(case(network, size, batch, precision), asked.steps)  # type: ignore[arg-type]
                    times[precision].append(seconds)
            fp32, bf16 = (min(times[precision]) * 1e3 for precision in ("fp32", "bf16"))
            row = f"{name:12} {parameters:11,} {size:5} {batch:5} {fp32:9.1f} {bf16:9.1f} {fp32 / bf16:9.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
