"""Diffusion in a hundred lines: train, average and sample with the parts of Unfog, in a loop that hides nothing.

    python diffusion_in_100_lines.py

Trains on 28x28 pictures of clothes that come with Unfog, and saves samples of each kind as clothes.png. Takes about
two minutes on two cores. Every formula is in the docstring of its part, for example `help(unfog.diffusion.steps.ddim)`.
"""

import argparse
import time

import torch
from PIL import Image
from torch import Tensor, nn

from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream
from unfog.diffusion.denoiser import Denoiser, Guided
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import Flow, LogitNormal, NoiseSource
from unfog.diffusion.objective import Objective
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.target import FlowVelocity
from unfog.diffusion.weighting import Plain
from unfog.models.network_settings import build_model
from unfog.models.settings import UNet
from unfog.training.ema import Ema
from unfog.training.optimizers import build_optimizer, set_learning_rate
from unfog.training.settings import Muon, Optimizer, PowerEma
from unfog.values.conditions import Conditions

# x_t = (1 - t) x0 + t eps, where logit t ~ N(0, 1); the network predicts the velocity eps - x0 (rectified flow).
# Choose another path, schedule, target or weighting here, and everything below follows.
DIFFUSION = Diffusion(path=Flow(), schedule=LogitNormal(), target=FlowVelocity(), weighting=Plain())
NETWORK = UNet(channels=(16, 32, 80), mid_attention=False, head_channels=16, norm_groups=8)  # a million parameters
OPTIMIZER = Optimizer(lr=6e-3, warmup=30, schedule="cosine", method=Muon(), betas=(0.9, 0.99), weight_decay=0.0)
BATCH = 64


def train(network: nn.Module, stream: ImageStream, steps: int) -> Ema:
    """Train the network in place. Return the running average of its weights, which makes better samples."""
    # For each image: draw t and eps, mix x_t, and compare the output of the network with eps - x0.
    # One image in ten comes without its class, so that sampling can be guided.
    objective = Objective(DIFFUSION, dropout=0.1)
    optimizer = build_optimizer(network, OPTIMIZER)
    ema = Ema(network, PowerEma(width=0.1))  # averages over about a tenth of the training so far
    began = time.perf_counter()
    for step in range(steps):
        batch = stream.batch(first=step * BATCH, size=BATCH)  # the position alone decides which images come
        x0 = batch.pixels.float() / 127.5 - 1  # [B, C, H, W] in [-1, 1]
        loss = objective(network, x0, batch.conditions).per_image.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        set_learning_rate(optimizer, OPTIMIZER.learning_rate(step, steps))
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step + 1)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5}  loss {loss.item():.4f}  {time.perf_counter() - began:4.0f} s")
    return ema


@torch.no_grad()
def sample(network: nn.Module, label: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return a sample of each class in `label` [N], float32 [N, *shape] in [-1, 1]."""
    network.eval()
    # E[x0 | x_t] from the output of the network, and guidance: away from what it expects without a class.
    guided = Guided(Denoiser(network, DIFFUSION), scale=2.0)

    def denoise(x_t: Tensor, logsnr: Tensor) -> Tensor:
        return guided(x_t, logsnr, Conditions(label))

    # From pure noise through 20 falling noise levels to the image.
    sampler, noise = Sampler("dpmpp", steps=20), NoiseSource(seed=0, indices=range(len(label)), shape=shape)
    return sampler(denoise, DIFFUSION.path, DIFFUSION.schedule, noise.draw)


def save_grid(images: Tensor, columns: int, file: str) -> None:
    """Save images [N, 1, H, W] in [-1, 1] as one grey picture, row by row."""
    rows = torch.cat([torch.cat([*row], 2) for row in images[:, 0, None].split(columns)], 1)
    pixels = ((rows[0] + 1) * 127.5).round().clamp(0, 255).byte()
    Image.fromarray(pixels.numpy()).resize((3 * pixels.shape[1], 3 * pixels.shape[0])).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", default="clothes.png")
    asked = parser.parse_args()

    images = prepare(open_source("fashion"), Data()).train
    torch.manual_seed(0)
    network = build_model(NETWORK, channels=1, classes=10)
    ema = train(network, ImageStream(images, seed=0), asked.steps)
    with ema.swapped_into(network):  # sample from the average
        samples = sample(network, torch.arange(10).repeat(6), shape=(1, 28, 28))
    save_grid(samples, columns=10, file=asked.out)
    print(f"ten kinds of clothes, one a column: {asked.out}")


if __name__ == "__main__":
    main()
