"""Train a network of your own: any `nn.Module` whose forward takes (x, noise, label).

python own_network.py photos/ --steps 2000
"""

import argparse

import torch
from torch import Tensor, nn

import unfog


class SmallNet(nn.Module):
    """Residual convolutions at full resolution, shifted by the noise level."""

    def __init__(self, channels: int = 3, width: int = 64, depth: int = 4):
        super().__init__()
        self.conv_in = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )
        self.level = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, depth * width))
        self.conv_out = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)  # an output of zero at the start trains best
        nn.init.zeros_(self.conv_out.bias)

    def forward(self, x: Tensor, noise: Tensor, label: Tensor | None = None) -> Tensor:
        """x: [B, C, H, W]; noise: the noise level of each image [B]; label: int64 [B], or None without classes."""
        h = self.conv_in(x)
        shifts = self.level(torch.log1p(noise.abs())[:, None]).chunk(len(self.blocks), dim=1)
        for block, shift in zip(self.blocks, shifts):
            h = h + block(h + shift[:, :, None, None])
        return self.conv_out(h)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", help="folder of images")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="runs/own-network")
    asked = parser.parse_args()

    data = {"size": 32, "channels": 3}  # grey photos become colour ones
    run = unfog.train(asked.photos, network=SmallNet(), data=data, lr=1e-3, steps=asked.steps, out=asked.out)
    print(run)

    # Another program needs the class to load the run: its source is kept beside the weights, but never run.
    again = unfog.load(run.path, network=SmallNet())
    again.sample(4, seed=0).pil()[0].save(run.path / "first.png")


if __name__ == "__main__":
    main()
