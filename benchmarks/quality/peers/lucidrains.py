"""denoising-diffusion-pytorch by its own code: its Trainer, with all defaults but the width of the network.

    PEERS/bin/python lucidrains.py train IMAGES FOLDER COUNT SEED
    PEERS/bin/python lucidrains.py draw IMAGES FOLDER N SEED OUT STEPS

Left out is what takes its time beside training: its FID, and the pictures it draws every 1,000 steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
from shared import Log, draw_all

DIM = 20  # 3.72M parameters; its README has 64, which makes 35.7M


def trainer(images: str, folder: Path, steps: int, sampling: int = 1000) -> Trainer:
    """As its README builds it; fewer than 1,000 sampling steps make its sampler DDIM."""
    diffusion = GaussianDiffusion(Unet(dim=DIM), image_size=32, sampling_timesteps=sampling)
    # Never at a step that comes: no pictures meanwhile.
    quiet = {"calculate_fid": False, "save_and_sample_every": steps + 1}
    return Trainer(diffusion, images, train_num_steps=steps, results_folder=str(folder), **quiet)


def main(what: str, images: str, folder: Path, count: int, seed: int, *out: str) -> None:
    """Train, or draw."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if what == "train":
        training = trainer(images, folder, -(-count // 16))
        log = Log(folder, training.batch_size)
        training.opt.optimizer.register_step_post_hook(lambda *_: log.step())
        training.train()
        training.save("last")
    else:
        steps = int(out[1])
        training = trainer(images, folder, 1, steps)
        training.load("last")
        model = training.ema.ema_model.eval()
        name = f"{'DDPM' if steps == 1000 else 'DDIM'}, {steps} steps"
        draw_all(Path(out[0]), model.model, lambda n: model.sample(batch_size=n), count, seed, name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
