"""Unfog against diffusers on one set of weights: a training step and drawing pictures, in turns in one process.

    python benchmarks/speed/diffusers_unet.py [--batch 16] [--rounds 4] [--steps 4] [--draw 10,20]   # unfog[export]

The network is diffusers' UNet2DModel with channels 64, 128, 128, 256, two layers a block and attention at 8x8 (17.2M
parameters) at 32x32, with random weights; ours is built from them, and must answer the same. In alternating rounds, so
that a slow moment of the machine hits all:

- bare: forward, mean squared error and backward of diffusers' network; nothing else.
- diffusers: the step of its train_unconditional.py with --use_ema (noise, AdamW, cosine, clipping, EMA), as
  benchmarks/quality/peers/huggingface.py has it, on images that are tensors already; in fp32 and under bf16 autocast.
- unfog: the loop of `unfog train` (data, noise, clipping, guard, fused AdamW, EMA) in fp32 and bf16, in both formats.

Sampling: DDIM without randomness, by diffusers' pipeline in fp32 and ours, in bf16 too where that is asked for.
Reported: medians over the rounds, and ratios of these medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.dataset import ImageSet
from unfog.data.settings import Data
from unfog.data.stream import ImageStream
from unfog.diffusion.sampler import Sampler
from unfog.export.diffusers_unet import Network
from unfog.pipeline.build import build_loss, build_state
from unfog.pipeline.generate import GenerationSettings, generate_images
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.settings import AdamW, Optimizer, Training

import numpy as np
import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from steps import diffusers_step

SIZE = 32
Steps = Callable[[int], float]  # number of steps -> seconds a step


def theirs() -> UNet2DModel:
    """The network of the comparison, none of whose layers begins as zero."""
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=SIZE,
        layers_per_block=2,
        block_out_channels=(64, 128, 128, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )


def main() -> None:
    """Training, then drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="in each round")
    parser.add_argument("--draw", default="10", help="steps of the sampler, with commas between; '' draws nothing")
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="also in bf16")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    weights, config = {k: v.clone() for k, v in theirs().state_dict().items()}, config_of(asked.batch)
    check_alike(config, weights)
    print(
        f"{sum(map(Tensor.numel, weights.values())) / 1e6:.2f}M parameters, {torch.get_num_threads()} threads, ", end=""
    )
    print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    ways: dict[str, Steps] = {
        "bare": bare(weights, asked.batch),
        "diffusers fp32": script(weights, asked.batch, "fp32"),
    }
    for precision in ("fp32", "bf16") if asked.bf16 else ("fp32",):
        if precision == "bf16":
            ways["diffusers bf16"] = script(weights, asked.batch, precision)
        for form in ("contiguous", "channels_last"):
            ways[f"unfog {precision} {form}"] = ours(config, weights, precision, form)
    table(measured(ways, asked.rounds, asked.steps), "ms a training step", 1e3)
    for steps in filter(None, asked.draw.split(",")):
        drawing = {"diffusers": pipeline(weights, asked.pictures, int(steps))}
        for name in ("fp32", "bf16") if asked.bf16 else ("fp32",):
            drawing[f"unfog {name}"] = our_pictures(weights, config, asked.pictures, int(steps), name)
        table(measured(drawing, asked.rounds, 1), f"seconds for {asked.pictures} pictures in {steps} steps", 1)


def config_of(batch: int) -> Config:
    """Ours, of the same kind: the noise is guessed, the weights move by AdamW."""
    base, network = preset("ddpm"), Network.from_unet2d(dict(theirs().config), theirs().state_dict()).settings
    return replace(
        base,
        network=network,
        data=Data(size=SIZE, channels=3, flip=True),
        training=Training(images=10**9 * batch, batch=batch, precision="fp32", device="cpu"),
        optimizer=Optimizer(lr=1e-4, warmup=500, method=AdamW()),
    )


def our_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in our names."""
    return Network.from_unet2d(dict(theirs().config), {k: v.clone() for k, v in weights.items()}).state


def check_alike(config: Config, weights: dict[str, Tensor]) -> None:
    """Both networks answer the same, in both memory formats."""
    x, t = torch.randn(2, 3, SIZE, SIZE), torch.tensor([3.0, 700.0])
    network = theirs().eval()
    network.load_state_dict(weights)
    with torch.no_grad():
        wanted = network(x, t).sample
        for form in ("contiguous", "channels_last"):
            training = replace(config.training, memory_format=form)
            state = build_state(replace(config, training=training), torch.device("cpu"), our_weights(weights))
            worst = (state.model.eval()(x, t) - wanted).abs().max() / wanted.abs().max()
            assert worst < 1e-5, f"{form}: {worst}"


def bare(weights: dict[str, Tensor], batch: int) -> Steps:
    """Forward and backward of theirs."""
    network = theirs().train()
    network.load_state_dict(weights)
    x, t = torch.randn(batch, 3, SIZE, SIZE), torch.rand(batch) * 1000

    def step() -> None:
        F.mse_loss(network(x, t).sample, x).backward()
        network.zero_grad(set_to_none=True)

    return timed(step)


def script(weights: dict[str, Tensor], batch: int, precision: str) -> Steps:
    """The loop of train_unconditional.py."""
    network = theirs().train()
    network.load_state_dict(weights)
    clean = torch.rand(batch, 3, SIZE, SIZE) * 2 - 1
    return timed(
        diffusers_step(
            network,
            lambda network, noisy, timesteps: network(noisy, timesteps).sample,
            clean,
            lambda: torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        )
    )


class Some(TrainingHooks):
    """A run that ends after so many steps."""

    left = 0

    def on_step_end(self, step: int) -> None:
        """Count."""
        self.left -= 1

    def stop_requested(self) -> bool:
        """After the last."""
        return self.left <= 0


def ours(config: Config, weights: dict[str, Tensor], precision: Any, form: Any) -> Steps:
    """The loop of `unfog train`."""
    config = replace(config, training=replace(config.training, precision=precision, memory_format=form))
    state = build_state(config, torch.device("cpu"), our_weights(weights))
    pixels = np.random.default_rng(0).integers(0, 256, (2000, 3, SIZE, SIZE), dtype=np.uint8)
    images = ImageSet(pixels, [str(i) for i in range(len(pixels))])
    stream, augment, loss, run = ImageStream(images, 0), Augment.from_settings(config.data), build_loss(config), Some()

    def steps(count: int) -> float:
        run.left, started = count, time.perf_counter()
        train(LoopSettings(config.training, config.optimizer), state, Task(stream, augment, loss), run)
        return (time.perf_counter() - started) / count

    return steps


def pipeline(weights: dict[str, Tensor], n: int, steps: int) -> Steps:
    """Theirs."""
    network = theirs().eval()
    network.load_state_dict(weights)
    drawer = DDIMPipeline(unet=network, scheduler=DDIMScheduler(num_train_timesteps=1000, beta_schedule="linear"))
    drawer.set_progress_bar_config(disable=True)
    return timed(lambda: drawer(batch_size=n, num_inference_steps=steps, output_type="np"))


def our_pictures(weights: dict[str, Tensor], config: Config, n: int, steps: int, precision: Any) -> Steps:
    """Ours, in the memory format that `unfog sample` takes for the precision."""
    state = build_state(config, torch.device("cpu"), our_weights(weights))
    drawing = GenerationSettings(n, Sampler(kind="ddim", steps=steps), batch=n, precision=precision)
    with torch.inference_mode():
        return timed(lambda: generate_images(state.model, config, drawing))


def timed(step: Callable[[], object]) -> Steps:
    """Seconds a step of so many."""

    def steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - started) / count

    return steps


def measured(ways: dict[str, Steps], rounds: int, steps: int) -> dict[str, list[float]]:
    """Each in turn, over and over; the first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            seconds = way(steps if number else 1)
            if number:
                found[name].append(seconds)
    return found


def table(found: dict[str, list[float]], unit: str, scale: float) -> None:
    """Medians, and how many times as fast as diffusers in fp32."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    reference = medians.get("diffusers fp32", medians.get("diffusers", 0.0))
    print(f"\n| {unit} | median | least | times as fast as diffusers |\n|---|---|---|---|")
    for name, value in medians.items():
        print(
            f"| {name} | {value * scale:.3g} | {min(found[name]) * scale:.3g} | {reference / value:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
