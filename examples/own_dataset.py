"""Train on a dataset of your own: any torch `Dataset`, a list of PIL images, an array, or a generator.

python own_dataset.py --steps 2000
"""

import argparse

import numpy as np
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

import unfog

SHAPES = ("circle", "square")


class Shapes(Dataset):
    """Pictures of one circle or square, with its label."""

    def __init__(self, count: int, size: int = 32):
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        if not 0 <= index < self.count:
            raise IndexError(index)  # ends a loop over the dataset
        random = np.random.default_rng(index)
        image = Image.new("RGB", (self.size, self.size), "white")
        label = SHAPES[index % 2]
        x, y = random.integers(self.size // 4, 3 * self.size // 4, 2)
        r = random.integers(self.size // 8, self.size // 4)
        colour = tuple(random.integers(0, 200, 3).tolist())
        draw = ImageDraw.Draw(image)
        (draw.ellipse if label == "circle" else draw.rectangle)((x - r, y - r, x + r, y + r), fill=colour)
        return image, label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--out", default="runs/shapes")
    asked = parser.parse_args()

    # The images are read once and stored, so the run can be resumed without this script.
    run = unfog.train(Shapes(asked.images), steps=asked.steps, network="tiny", out=asked.out)
    run.sample(8, label=["circle", "square"]).pil()[0].save(run.path / "circle.png")
    print(run.classes, run.path)


if __name__ == "__main__":
    main()
