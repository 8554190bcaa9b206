"""What the tuned peers share: diffusers' network at the size of our `tiny`, and its training loop with our settings.

These are what somebody who knows our settings would do without our code: the batch (64), precision (bf16 autocast),
learning rate (0.003, falling to zero by a cosine) and average (7.94 / n at step n, our power EMA of width 0.1), in the
loop of diffusers' train_unconditional.py. The optimiser is AdamW, as that loop has it: torch's own Muon takes no
convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from PIL import Image
from shared import Log, draw_all
from torch import Tensor

BATCH, RATE = 64, 3e-3


def network() -> UNet2DModel:
    """Our `tiny`, weight by weight: 0.99M parameters."""
    return UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(16, 32, 80),
        norm_num_groups=8,
        attn_norm_num_groups=8,
        attention_head_dim=16,
        add_attention=False,
        resnet_time_scale_shift="scale_shift",
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )


def images_of(folder: str) -> Tensor:
    """All images of the set, uint8 [N, 3, 32, 32]: decoded once, as decoding is no part of a recipe."""
    files = sorted(Path(folder).glob("*.png"))
    return torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files])).permute(0, 3, 1, 2)


def main(
    loss_of: Callable[[UNet2DModel, Tensor], Tensor],
    drawer: Callable[[UNet2DModel, int], tuple[Callable[[int], Tensor], str]],
    what: str,
    images: str,
    folder: Path,
    count: int,
    seed: int,
    *out: str,
) -> None:
    """Train, or draw. `drawer` takes network and calls, and returns what draws n images in [0, 1], and its name."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if what == "train":
        train(images, folder, count, loss_of)
        return
    place, calls = out
    model = UNet2DModel.from_pretrained(folder)
    draw, name = drawer(model, int(calls))
    draw_all(Path(place), model, draw, count, seed, name)


def train(images: str, folder: Path, count: int, loss_of: Callable[[UNet2DModel, Tensor], Tensor]) -> None:
    """Train on `count` images; `loss_of` takes a batch in [-1, 1]. The averaged network is left in `folder`."""
    steps, model, pixels = -(-count // BATCH), network().train(), images_of(images)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0)
    rate = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    ema = EMAModel(model.parameters(), decay=1, use_ema_warmup=True, inv_gamma=7.94, power=1.0)
    log, order = Log(folder, BATCH), torch.empty(0, dtype=torch.int64)
    optimizer.register_step_post_hook(lambda *_: log.step())
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(pixels))
        chosen, order = order[:BATCH], order[BATCH:]
        loss_of(model, pixels[chosen].float() / 127.5 - 1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    ema.copy_to(model.parameters())
    model.save_pretrained(folder)
