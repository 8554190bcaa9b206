"""diffusers by its own classes: what its example train_unconditional.py does, as the README of the example calls it.

    PEERS/bin/python huggingface.py train IMAGES FOLDER COUNT SEED
    PEERS/bin/python huggingface.py draw IMAGES FOLDER N SEED OUT STEPS

The script is in its repository and not in its package, so the loop is written anew: --train_batch_size 16
--learning_rate 1e-4 --lr_warmup_steps 500 --use_ema --random_flip, all else at its defaults (AdamW with betas of 0.95
and 0.999 and weight decay of 1e-6, cosine over the run, clipping at 1, EMA up to 0.9999 with its warm-up, DDPM with
1,000 linear steps, noise). The network is the script's, six levels with attention at the fifth, at 3/16 of its width.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from PIL import Image
from shared import Log, draw_all
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import CenterCrop, Compose, RandomHorizontalFlip, Resize, ToTensor

WIDTH = 24  # 4.01M parameters; the script has 128, which makes 113.7M
BATCH = 16


class Images(Dataset):
    """Files as the script's transforms make them, in [-1, 1]."""

    def __init__(self, folder: str):
        self.paths = sorted(Path(folder).glob("*.png"))
        self.transform = Compose([Resize(32), CenterCrop(32), RandomHorizontalFlip(), ToTensor()])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """float32 [3, 32, 32]."""
        return self.transform(Image.open(self.paths[index]).convert("RGB")) * 2 - 1


def network() -> UNet2DModel:
    """The script's, narrower."""
    return UNet2DModel(
        sample_size=32,
        layers_per_block=2,
        block_out_channels=(WIDTH, WIDTH, 2 * WIDTH, 2 * WIDTH, 4 * WIDTH, 4 * WIDTH),
        norm_num_groups=8,  # 32 do not divide the narrower levels
        down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    )


def train(images: str, folder: Path, count: int) -> None:
    """The script's loop on one process without mixed precision, its default."""
    steps, scheduler = -(-count // BATCH), DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
    model = network().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
    rate = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=500, num_training_steps=steps)
    ema = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4)
    log = Log(folder, BATCH)
    optimizer.register_step_post_hook(lambda *_: log.step())
    done = 0
    while done < steps:
        for clean in DataLoader(Images(images), batch_size=BATCH, shuffle=True, num_workers=0):
            noise = torch.randn(clean.shape)
            timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (len(clean),)).long()
            answer = model(scheduler.add_noise(clean, noise, timesteps), timesteps).sample
            F.mse_loss(answer.float(), noise.float()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            ema.step(model.parameters())
            done += 1
            if done == steps:
                break
    ema.copy_to(model.parameters())
    DDPMPipeline(unet=model, scheduler=scheduler).save_pretrained(folder)


def main(what: str, images: str, folder: Path, count: int, seed: int, *out: str) -> None:
    """Train, or draw."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if what == "train":
        train(images, folder, count)
        return
    steps = int(out[1])
    pipeline = DDPMPipeline.from_pretrained(folder)

    def draw(n: int) -> torch.Tensor:
        pictures = pipeline(batch_size=n, num_inference_steps=steps, output_type="np").images
        return torch.from_numpy(pictures).permute(0, 3, 1, 2)

    draw_all(Path(out[0]), pipeline.unet, draw, count, seed, f"DDPM, {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
