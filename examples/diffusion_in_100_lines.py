"""Diffusion in a hundred lines: train, average and sample with the parts of Unfog in a plain loop.

    python diffusion_in_100_lines.py

Trains on small pictures of clothes that come with Unfog, and saves six samples of each of ten kinds as clothes.png, in
about two minutes on two cores. The docstring of each part has its formula: `help(unfog.diffusion.steps.ddim)`.
"""

import argparse

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
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions

SIZE, BATCH = 16, 64
# x_t = (1 - t) x0 + t eps, where logit t ~ N(0, 1); the network predicts the velocity eps - x0 (rectified flow).
# Choose another path, schedule, target or weighting here, and everything below follows.
DIFFUSION = Diffusion(path=Flow(), schedule=LogitNormal(), target=FlowVelocity(), weighting=Plain())
NETWORK = UNet(channels=(16, 32, 80), mid_attention=False, head_channels=16, norm_groups=8)  # a million parameters
OPTIMIZER = Optimizer(lr=6e-3, warmup=30, schedule="cosine", method=Muon(), betas=(0.9, 0.99), weight_decay=0.0)


def train(network: nn.Module, stream: ImageStream, steps: int) -> Ema:
    """Train the network in place. Return the running average of its weights, which makes better samples."""
    # For each image: draw t and eps, mix x_t, and compare the output of the network with eps - x0.
    # One image in ten comes without its class, so that sampling can be guided.
    objective = Objective(DIFFUSION, dropout=0.1)
    optimizer = build_optimizer(network, OPTIMIZER)
    ema = Ema(network, PowerEma(width=0.1))  # averages over about a tenth of the training so far
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
            print(f"step {step:4}  loss {loss.item():.3f}")
    return ema


@torch.no_grad()
def sample(network: nn.Module, label: Tensor) -> Tensor:
    """Return a sample of each class in `label` [N], float32 [N, 1, H, W] in [-1, 1]."""
    network.eval()
    # E[x0 | x_t] from the output of the network, and guidance: away from what it expects without a class.
    guided = Guided(Denoiser(network, DIFFUSION), scale=2.0)

    def denoise(x_t: Tensor, logsnr: Tensor) -> Tensor:
        return guided(x_t, logsnr, Conditions(label))

    # From pure noise through 20 falling noise levels to the image.
    noise = NoiseSource(seed=0, indices=range(len(label)), shape=(1, SIZE, SIZE))
    return Sampler("dpmpp", steps=20)(denoise, DIFFUSION.path, DIFFUSION.schedule, noise.draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="clothes.png")
    asked = parser.parse_args()

    torch.manual_seed(0)
    images = prepare(open_source("fashion"), Data(size=SIZE)).train
    network = build_model(NETWORK, channels=1, conditions=ConditionFormat.numbered(10))
    ema = train(network, ImageStream(images, seed=0), asked.steps)
    with ema.swapped_into(network):  # sample with the average of the weights
        samples = sample(network, torch.arange(10).repeat(6))
    pixels = ((samples + 1) * 127.5).round().clamp(0, 255).byte()
    grid = pixels.view(6, 10, SIZE, SIZE).permute(0, 2, 1, 3).reshape(6 * SIZE, 10 * SIZE)  # a kind in each column
    Image.fromarray(grid.numpy()).resize((60 * SIZE, 36 * SIZE)).save(asked.out)
    print(f"samples: {asked.out}")


if __name__ == "__main__":
    main()
