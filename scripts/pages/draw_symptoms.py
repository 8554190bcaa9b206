"""Draw the pictures of docs/fix-it.md, and write what `unfog doctor` says of each bad run into the page:

    python scripts/pages/draw_symptoms.py FOLDER [--only NAME …]

Each symptom has a run with one fault. Its picture has eight samples with the fault on the left. On the right are eight
of the remedy, or real images. All of it happens in FOLDER, where a run that is finished is not trained again. The
drawings are those of tutorial_images.py; the fashion runs begin with zoo/fashion or are compared with it. `--quick`
trains four steps and changes no file of the docs: it is the test that every command still works.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from draw_pictures import CELL, GAP, INK, PAPER, PICTURES, ROOT, TOP
from PIL import Image, ImageDraw, ImageFont
from record_tutorials import COLUMNS, recorded, run, shorten
from tutorial_images import code_points, drawing, drawing_font, openmoji

PAGE = ROOT / "docs" / "fix-it.md"
COUNT, ACROSS = 8, 4  # images on each side of a picture, and those of a row
FACES = ((0x1F600, 0x1F644), (0x1F910, 0x1F917), (0x1F920, 0x1F92F), (0x1F970, 0x1F97A))
WORDS = ("AT", "BE", "GO", "HE", "IN", "ME", "NO", "UP", "WE")
# A network and records that take little time, beside which each training has the settings that matter.
SMALL = "--network unet:channels=32/64,attention=0/0"
RECORDS = "--preview.every -1 --preview.images 4 --evaluate.every -1 --checkpoint.every -1"


def text_image(text: str, width: int, rng: np.random.Generator) -> Image.Image:
    """Return dark letters of a size and place of their own on white, 16 pixels high."""
    image = Image.new("L", (width, 16), 255)
    x, y = width / 2 + rng.uniform(-1.5, 1.5), 8 + rng.uniform(-1, 1)
    font, ink = ImageFont.load_default(int(rng.integers(13, 18))), int(rng.integers(0, 60))
    ImageDraw.Draw(image).text((x, y), text, ink, font, anchor="mm")
    return image


def letters() -> Iterator[tuple[str, Image.Image]]:
    """Yield 800 letters of eight classes, none of which is its own mirror image."""
    rng = np.random.default_rng(0)
    for letter in "BEFGJKLR":
        for i in range(100):
            yield f"{letter}/{letter}{i:03}", text_image(letter, 16, rng)


def white() -> Iterator[tuple[str, Image.Image]]:
    """Yield the letters as white ink on a transparent background."""
    for name, image in letters():
        seen = Image.new("LA", image.size, (255, 0))
        seen.putalpha(Image.eval(image, lambda value: 255 - value))
        yield Path(name).name, seen


def words() -> Iterator[tuple[str, Image.Image]]:
    """Yield 400 words of two letters, twice as wide as high."""
    rng = np.random.default_rng(0)
    for i in range(400):
        yield f"{WORDS[i % len(WORDS)]}{i:03}", text_image(WORDS[i % len(WORDS)], 32, rng)


def faces() -> Iterator[tuple[str, Image.Image]]:
    """Yield the faces among the drawings, 16 pixels wide."""
    folder = openmoji()
    font = drawing_font(folder)
    for code in code_points(folder):
        if any(low <= code <= high for low, high in FACES):
            yield f"{code:05x}", drawing(code, font).resize((16, 16), Image.Resampling.LANCZOS)


def masked() -> Iterator[tuple[str, Image.Image]]:
    """Yield the faces, and beside each a mask of what is not white."""
    for name, image in faces():
        yield name, image
        yield f"{name}_mask", image.convert("L").point(lambda value: 255 * (value < 250))


def few() -> Iterator[tuple[str, Image.Image]]:
    """Yield every ninth of the faces."""
    yield from list(faces())[::9]


SETS: dict[str, Callable[[], Iterable[tuple[str, Image.Image]]]] = {
    "letters": letters,
    "white": white,
    "words": words,
    "faces": faces,
    "masked": masked,
    "few": few,
}


class Symptom(NamedTuple):
    """What a person sees, and what it is compared with."""

    bad: str
    """The words above the left side."""
    good: str
    """The words above the right side."""
    trained: tuple[str, ...]
    """Commands that train, less what only makes them fast."""
    left: str
    """A command that samples."""
    right: str
    """A command that samples, or `SET` or `SET nearest`: images, or those nearest to the samples of the left side."""
    asked: str
    """The command of the doctor."""
    codes: tuple[str, ...]
    """The findings that the page has; none where the doctor cannot know."""


ZOO = "unfog sample zoo/fashion"
SYMPTOMS = {
    "noise": Symptom(
        "--preset ddpm, 2,000 images seen",
        "the default, 30 minutes",
        ("unfog train fashion --preset ddpm --steps 60 --batch 32 --out runs/noise",),
        "unfog sample runs/noise",
        ZOO,
        "unfog doctor runs/noise",
        ("run.blank_samples", "run.loss"),
    ),
    "blots": Symptom(
        "2,000 images seen",
        "123,000 images seen",
        ("unfog train fashion --steps 60 --batch 32 --out runs/blots",),
        "unfog sample runs/blots",
        ZOO,
        "unfog doctor runs/blots",
        ("run.loss",),
    ),
    "rate": Symptom(
        "--lr 0.5",
        "the automatic rate, as long",
        (
            "unfog train fashion --lr 0.5 --steps 60 --batch 32 --out runs/rate",
            "unfog train fashion --steps 60 --batch 32 --out runs/blots",
        ),
        "unfog sample runs/rate",
        "unfog sample runs/blots",
        "unfog doctor runs/rate",
        ("run.lr_high", "run.not_learning", "run.unstable"),
    ),
    "guidance": Symptom(
        "--guidance 12",
        "--guidance 1.5, the default",
        ("unfog train fashion --init zoo/fashion --steps 10 --batch 16 --guidance 12 --out runs/guidance",),
        "unfog sample runs/guidance",
        ZOO,
        "unfog doctor runs/guidance",
        ("settings.guidance",),
    ),
    "steps": Symptom(
        "--steps 2",
        "--steps 20, the default",
        ("unfog train fashion --init zoo/fashion --steps 10 --batch 16 --sampler.steps 2 --out runs/steps",),
        "unfog sample runs/steps",
        ZOO,
        "unfog doctor runs/steps",
        ("settings.sampler", "run.detail"),
    ),
    "average": Symptom(
        "--ema power:width=0.28",
        "--weights raw, the same run",
        (f"unfog train letters {SMALL} --ema power:width=0.28 --steps 200 --batch 16 --out runs/average",),
        "unfog sample runs/average",
        "unfog sample runs/average --weights raw",
        "unfog doctor runs/average",
        ("run.ema_behind",),
    ),
    "mirrored": Symptom(
        "--flip",
        "without --flip",
        (
            f"unfog train letters {SMALL} --steps 400 --batch 32 --out runs/letters",
            f"unfog train letters {SMALL} --init runs/letters --flip --steps 150 --batch 32 --out runs/mirrored",
        ),
        "unfog sample runs/mirrored",
        "unfog sample runs/letters",
        "unfog doctor runs/mirrored",
        (),
    ),
    "cut": Symptom(
        "--size 16 of images of 32x16",
        "the images",
        (f"unfog train words {SMALL} --size 16 --steps 250 --batch 16 --out runs/cut",),
        "unfog sample runs/cut",
        "words",
        "unfog doctor words --size 16 --quick",
        ("data.crop",),
    ),
    "white": Symptom(
        "white ink on a transparent background",
        "--data.background black",
        (
            f"unfog train white {SMALL} --steps 40 --batch 16 --out runs/white",
            f"unfog train white {SMALL} --data.background black --steps 300 --batch 16 --out runs/ink",
        ),
        "unfog sample runs/white",
        "unfog sample runs/ink",
        "unfog doctor white --quick",
        ("data.equal", "data.converted"),
    ),
    "masks": Symptom(
        "masks among the images",
        "without the masks, as long",
        (
            f"unfog train masked {SMALL} --steps 200 --batch 16 --out runs/masks",
            f"unfog train faces {SMALL} --steps 200 --batch 16 --out runs/faces",
        ),
        "unfog sample runs/masks",
        "unfog sample runs/faces",
        "unfog doctor masked --quick",
        ("data.grey_as_rgb",),
    ),
    "colours": Symptom(
        "--data.jitter 0.9",
        "without it, as long",
        (
            f"unfog train faces {SMALL} --data.jitter 0.9 --steps 200 --batch 16 --out runs/colours",
            f"unfog train faces {SMALL} --steps 200 --batch 16 --out runs/faces",
        ),
        "unfog sample runs/colours",
        "unfog sample runs/faces",
        "unfog doctor runs/colours",
        ("run.tint", "run.contrast", "run.saturated"),
    ),
    "copies": Symptom(
        "samples: 12 images, 500 steps",
        "the nearest training image of each",
        (
            f"unfog train faces {SMALL} --steps 200 --batch 16 --out runs/faces",
            f"unfog train few {SMALL} --init runs/faces --steps 500 --batch 16 --out runs/copies",
        ),
        "unfog sample runs/copies",
        "few nearest",
        "unfog doctor few --batch 8 --quick",
        ("data.count",),
    ),
}


def write_sets(folder: Path, commands: Iterable[str]) -> None:
    """Write the sets that the commands name, and the link to the zoo."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    if not (folder / "zoo").exists():
        (folder / "zoo").symlink_to(ROOT / "zoo")
    named = {word for command in commands for word in command.split()}
    for name in SETS.keys() & named:
        if not (folder / name).exists():
            for file, image in SETS[name]():
                path = folder / name / f"{file}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)


def images(files: Iterable[Path]) -> list[Image.Image]:
    """Return the pictures of files in RGB."""
    return [Image.open(file).convert("RGB") for file in files]


def sampled(command: str, folder: Path, out: str, quick: bool) -> list[Image.Image]:
    """Run a command that samples, and return its images."""
    shutil.rmtree(folder / out, ignore_errors=True)
    command = f"{command} -n {COUNT} --out {out}"
    run(shorten(command) if quick else command, folder)
    return images(sorted((folder / out).glob("0*.png"))[:COUNT])


def nearest(samples: Iterable[Image.Image], real: list[Image.Image]) -> list[Image.Image]:
    """Return for each sample the image with the smallest sum of squared differences."""
    all_of_them = np.stack([np.asarray(image, np.float64) for image in real])
    distances = (np.square(all_of_them - np.asarray(sample, np.float64)).sum((1, 2, 3)) for sample in samples)
    return [real[int(each.argmin())] for each in distances]


def sheet(sides: Iterable[tuple[str, list[Image.Image]]]) -> Image.Image:
    """Return images below their titles, one side beside the other, each image as large as its cell permits."""
    sides, step = list(sides), CELL + GAP
    wide = ACROSS * step + 4 * GAP
    page = Image.new("RGB", (len(sides) * wide - 5 * GAP, TOP + COUNT // ACROSS * step - GAP), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(15)
    for side, (title, shown) in enumerate(sides):
        draw.text((side * wide + 2, TOP / 2), title, INK, font, anchor="lm")
        for i, image in enumerate(shown):
            scale = CELL / max(image.size)
            cell = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.NEAREST)
            x, y = side * wide + i % ACROSS * step, TOP + i // ACROSS * step
            page.paste(cell, (x + (CELL - cell.width) // 2, y + (CELL - cell.height) // 2))
            draw.rectangle((x, y, x + CELL - 1, y + CELL - 1), outline=(221, 221, 221))
    return page


def findings(symptom: Symptom, folder: Path, out: str) -> list[str]:
    """Run the doctor, and return the command, its warnings and its findings as lines of at most COLUMNS letters."""
    shutil.rmtree(folder / out, ignore_errors=True)
    printed = run(f"{symptom.asked} --out {out}", folder, statuses=(0, 2))  # 2: a finding is fatal
    found = json.loads((folder / out / "findings.json").read_text(encoding="utf-8"))["findings"]
    said = [line for line in printed.splitlines() if line.startswith("warning: ")]
    for one in found:
        if one["code"] in symptom.codes and one["severity"] != "fine":
            said.append(f"{one['severity']}: {one['evidence']}" + f"; {one['remedy']}" * bool(one["remedy"]))
    wrapped = partial(textwrap.wrap, width=COLUMNS, initial_indent="  ", subsequent_indent="    ")
    lines = [f"$ {symptom.asked}"]
    for each in said:
        lines += wrapped(each, break_on_hyphens=False, break_long_words=False)
    return lines


def with_findings(text: str, name: str, lines: Iterable[str]) -> str:
    """Return a page with these lines in the block behind `<!-- doctor: NAME -->`."""
    head = f"<!-- doctor: {name} -->\n```console\n"
    new = head + "\n".join(lines) + "\n```"
    return re.sub(re.escape(head) + r".*?^```$", lambda _: new, text, flags=re.M | re.S)


def draw(name: str, folder: Path, quick: bool) -> tuple[Image.Image, list[str]]:
    """Train, sample and ask the doctor. Returns the picture of a symptom, and what the doctor says."""
    symptom = SYMPTOMS[name]
    write_sets(folder, (*symptom.trained, symptom.right, symptom.asked))
    for command in symptom.trained:
        print(f"$ {command}", flush=True)
        if recorded(command, folder) is None:
            command = f"{command} {RECORDS}"
            run(shorten(command) if quick else command, folder)
    left = sampled(symptom.left, folder, f"{name}-left", quick)
    if symptom.right.startswith("unfog"):
        right = sampled(symptom.right, folder, f"{name}-right", quick)
    else:
        files = sorted((folder / symptom.right.split()[0]).rglob("*.png"))
        right = (
            nearest(left, images(files))
            if symptom.right.endswith(" nearest")
            else images(files[:: len(files) // COUNT])
        )
    said = findings(symptom, folder, f"{name}-doctor") if symptom.codes else []
    return sheet([(symptom.bad, left), (symptom.good, right[:COUNT])]), said


def main(given: list[str]) -> int:
    """Draw the symptoms that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SYMPTOMS), choices=SYMPTOMS)
    parser.add_argument("--quick", action="store_true", help="train a few steps, and change no file of the docs")
    options = parser.parse_args(given)
    for name in options.only:
        picture, said = draw(name, options.folder.resolve(), options.quick)
        if options.quick:
            continue
        path = PICTURES / f"fix-{name}.png"
        picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
        if said:
            PAGE.write_text(with_findings(PAGE.read_text(encoding="utf-8"), name, said), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
