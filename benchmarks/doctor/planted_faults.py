"""Does the doctor find what is wrong with a folder, and nothing where nothing is? Prints fault x finding.

    python benchmarks/doctor/planted_faults.py WORK --data cifar10=FOLDER --data emoji=FOLDER

Each FOLDER is a clean set with a sub-folder for each class; the built-in `fashion` is always among them. From 2,000
images of each, a copy is made in WORK for each fault, with that one fault planted, and examined. A fault is found when
the finding that is to name it does so, and lists nine in ten of the planted files where it lists files. Any other
warning is a false alarm, but for what follows from the fault and for what is true of the set itself (TRUE). The sets
themselves are examined whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

from unfog.checks.images.image_checks import check_images
from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.builtin_fashion import FashionSource
from unfog.data.sources.registry import open_source
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.target import EdmF
from unfog.reporting.findings import Finding
from unfog.values.image_format import to_pillow

import numpy as np
from PIL import Image

COUNT = 2000
TRUE = {
    "emoji": {
        "data.balance": "people_body has 4,522 images, component 10",
        "data.leakage": "four in ten held-out emoji differ from one trained on by a skin's colour or less",
    }
}
"""Warnings that are no false alarms, by the name of the set: looked at by eye."""

ALARMS = ("warning", "fatal")


@dataclass
class Folder:
    """A copy of a clean set, to be spoilt."""

    path: Path
    prepared: Dataset
    """The clean set, as it would be trained on."""

    random: np.random.Generator

    def some(self, share: float) -> list[str]:
        """Names of so many training images, at least two."""
        names = self.prepared.train.names
        chosen = self.random.choice(len(names), max(2, round(share * len(names))), replace=False)
        return [names[i] for i in sorted(chosen)]

    def all(self) -> list[str]:
        """Names of all images."""
        return [*self.prepared.train.names, *self.prepared.held_out.names]

    def change(self, names: Sequence[str], how: Callable[[Image.Image], Image.Image]) -> set[str]:
        """Save these images changed, under their own names."""
        for name in names:
            with Image.open(self.path / name) as image:
                changed = how(image.convert("L" if image.mode == "L" else "RGB"))
            (self.path / name).unlink()  # it is a link to the clean one
            changed.save(self.path / name, "PNG")
        return set(names)

    def copy(self, name: str, mark: str, data: bytes | None = None) -> str:
        """Another file beside it."""
        copied = f"{name.removesuffix('.png')}-{mark}.png"
        (self.path / copied).write_bytes(data or (self.path / name).read_bytes())
        return copied


@dataclass(frozen=True)
class Fault:
    """What is planted, and what is to be said of it."""

    name: str
    code: str
    severity: str
    plant: Callable[[Folder], set[str]]
    """Spoils the folder; returns the files that the finding is to list, or nothing."""

    follows: tuple[str, ...] = ()
    """Other warnings that are true of a folder with this fault."""

    data: Data = Data(cache="memory")
    diffusion: Diffusion = field(default_factory=Diffusion)
    colour: bool = False
    """Whether it makes no sense of a grey set."""


def encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    data = BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def tones(scale: float, shift: float = 0) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.point(lambda value: int(value * scale + shift))


def exact_copies(folder: Folder) -> set[str]:
    return {folder.copy(name, "copy") for name in folder.some(0.03)}


def saved_again(folder: Folder) -> set[str]:
    copies = set()
    for i, name in enumerate(folder.some(0.03)):
        with Image.open(folder.path / name) as file:
            image = file.convert("L" if file.mode == "L" else "RGB")
        if i % 2:  # a JPEG, whatever its suffix
            copies.add(folder.copy(name, "saved", encoded(image, "JPEG", quality=75)))
        else:
            larger = image.resize((image.width * 3 // 2, image.height * 3 // 2), Image.Resampling.BICUBIC)
            copies.add(folder.copy(name, "saved", encoded(larger, "PNG")))
    return copies


def across_the_split(folder: Folder) -> set[str]:
    held_out = folder.prepared.held_out.names
    return {folder.copy(name, "again") for name in held_out[: max(2, len(held_out) // 10)]}


def one_image_only(folder: Folder) -> set[str]:
    names = folder.all()
    data = (folder.path / names[0]).read_bytes()
    for name in names[len(names) // 50 :]:
        (folder.path / name).unlink()
        (folder.path / name).write_bytes(data)
    return set()


def truncated(folder: Folder) -> set[str]:
    names = folder.some(0.015)
    for name in names:
        data = (folder.path / name).read_bytes()
        (folder.path / name).unlink()
        (folder.path / name).write_bytes(data[: len(data) // 2])
    return set(names)


def held_out_only(folder: Folder, names: list[str]) -> Sequence[str]:
    return [name for name in names if name in folder.prepared.held_out.names]


def cut_class(keep: Callable[[Folder, list[str]], Sequence[str]]) -> Callable[[Folder], set[str]]:
    """Of one class, of which some images are held out, remove those images that are not to be kept."""

    def plant(folder: Folder) -> set[str]:
        held_out = [name.split("/")[0] for name in folder.prepared.held_out.names]
        one = max(sorted(set(held_out)), key=held_out.count)
        names = [name for name in folder.all() if name.split("/")[0] == one]
        for name in set(names) - set(keep(folder, names)):
            (folder.path / name).unlink()
        return set()

    return plant


def beside_the_classes(folder: Folder) -> set[str]:
    name = folder.some(0)[0]
    (folder.path / "loose.png").write_bytes((folder.path / name).read_bytes())
    (folder.path / name).unlink()
    return set()


def as_a_split(folder: Folder) -> set[str]:
    for i, name in enumerate(folder.all()):
        to = folder.path / ("train" if i % 5 else "test") / name.replace("/", "-")
        to.parent.mkdir(exist_ok=True)
        (folder.path / name).rename(to)
    return set()


def keep(count: int) -> Callable[[Folder], set[str]]:
    """Images of one class only, as so few would be no classes."""

    def plant(folder: Folder) -> set[str]:
        kept = [name for name in folder.all() if name.split("/")[0] == folder.all()[0].split("/")[0]][:count]
        for name in set(folder.all()) - set(kept):
            (folder.path / name).unlink()
        return set()

    return plant


def nothing(folder: Folder) -> set[str]:
    return set()


def grey(image: Image.Image) -> Image.Image:
    return image.convert("L").convert("RGB")


def transparent(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def sixteen_bit(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def coloured(image: Image.Image) -> Image.Image:
    one = image.getchannel(0)
    return Image.merge("RGB", [one, tones(0.5)(one), tones(0.3)(one)])


def smaller(image: Image.Image) -> Image.Image:
    return image.resize((image.width // 3, image.height // 3), Image.Resampling.BOX)


def wider(image: Image.Image) -> Image.Image:
    return image.resize((4 * image.width, image.height))


def each(how: Callable[[Image.Image], Image.Image]) -> Callable[[Folder], set[str]]:
    """Change every image; none is to be listed."""

    def plant(folder: Folder) -> set[str]:
        folder.change(folder.all(), how)
        return set()

    return plant


def part(share: float, how: Callable[[Image.Image], Image.Image], first: object = None) -> Callable[[Folder], set[str]]:
    """Change a share of the images, after something else was planted."""

    def plant(folder: Folder) -> set[str]:
        if callable(first):
            first(folder)
        return folder.change(folder.some(share), how)

    return plant


FAINT = ("data.near_duplicates", "data.exposure")  # what differs by a shade or a colour hardly differs then
AGAIN = ("data.leakage", "data.upscaled")  # larger files among small ones suggest a larger size
NARROW = Diffusion(target=EdmF(), sigma_data=0.2)
FAULTS = (
    Fault("3% exact copies", "data.duplicates", "warning", exact_copies, ("data.leakage",)),
    Fault("3% saved again: JPEG 75, 1.5 x", "data.near_duplicates", "warning", saved_again, AGAIN),
    Fault("10% of the held-out trained on", "data.leakage", "warning", across_the_split),
    Fault("98% one image", "data.equal", "fatal", one_image_only),
    Fault("1.5% truncated files", "data.ledger", "warning", truncated),
    Fault("1% blank", "data.blank", "warning", part(0.01, tones(0, 255))),
    Fault("3% nearly black", "data.exposure", "warning", part(0.03, tones(0.12))),
    Fault("3% nearly white", "data.exposure", "warning", part(0.03, tones(0.1, 225))),
    Fault("all dark", "data.channels", "warning", each(tones(0.3)), FAINT),
    Fault("all pale", "data.channels", "warning", each(tones(0.3, 175)), FAINT),
    Fault("all without contrast", "data.channels", "warning", each(tones(0.3, 90)), FAINT),
    Fault("values 0 to 1", "data.range", "fatal", each(tones(1 / 128))),
    Fault("values of 4 bits", "data.range", "warning", each(tones(1 / 16)), FAINT),
    Fault("all grey, as RGB", "data.grey_as_rgb", "hint", each(grey), FAINT, data=Data(channels=3)),
    Fault("3% grey", "data.grey_as_rgb", "hint", part(0.03, grey), colour=True),
    Fault("1% in colour", "data.grey_as_rgb", "hint", part(0.01, coloured, first=each(grey)), FAINT),
    Fault("classes 50 : 1", "data.balance", "warning", cut_class(lambda f, names: names[: max(1, len(names) // 50)])),
    Fault("a class held out only", "data.label_bounds", "warning", cut_class(held_out_only), ("data.balance",)),
    Fault("10% of a third of the side", "data.upscaled", "warning", part(0.1, smaller), data=Data(size=28)),
    Fault("all of a third of the side", "data.upscaled", "warning", each(smaller), data=Data(size=28)),
    Fault("3% four times as wide", "data.crop", "warning", part(0.03, wider), data=Data(size=28)),
    Fault("an image beside the classes", "data.layout", "hint", beside_the_classes),
    Fault("folders train and test", "data.layout", "hint", as_a_split),
    Fault("3 images", "data.count", "fatal", keep(3)),
    Fault("60 images", "data.count", "warning", keep(60)),
    Fault("sigma_data 0.2, EDM target", "data.sigma_data", "warning", nothing, diffusion=NARROW),
    Fault("5% transparent", "data.converted", "hint", part(0.05, transparent), colour=True),
    Fault("5% of 16 bits", "data.converted", "hint", part(0.05, sixteen_bit)),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A row of the table."""

    set: str
    fault: str
    found: str
    """The severity and code that found it, "missed" or, of clean sets, ""."""

    listed: str
    """How many of the planted files it lists."""

    alarms: tuple[str, ...]
    """False ones, with what they say."""

    true: tuple[str, ...] = ()
    """Codes of other warnings, which are true."""

    hints: tuple[str, ...] = ()
    seconds: float = 0.0


def plain_copy(source: Path, folder: Path, count: int) -> None:
    """`count` images of a folder with classes, evenly spread, as PNG files of "L" or "RGB"."""
    names = sorted(path.relative_to(source) for path in source.glob("[!.]*/*.png"))
    for i in sorted({k * len(names) // count for k in range(count)}):
        (folder / names[i]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / names[i], folder / names[i])


def fashion_copy(folder: Path, count: int) -> None:
    """`count` images of the built-in set as files."""
    source = FashionSource()
    for i in range(0, len(source.names), len(source.names) // count):
        path = folder / f"{source.names[i]}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        to_pillow(source.read(i)).save(path)


def examined(folder: str | Path, data: Data, diffusion: Diffusion) -> tuple[list[Finding], float]:
    """What the doctor says, and the seconds that took once the images were prepared."""
    config = Config(data=data, diffusion=diffusion)
    prepared = prepare(open_source(folder), data)
    started = time.perf_counter()
    findings = check_images(prepared, config)
    return findings, time.perf_counter() - started


def texts(value: object) -> Iterator[str]:
    """Every string in a finding's facts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from texts(one)


def judged(name: str, fault: Fault, planted: set[str], findings: Sequence[Finding]) -> Verdict:
    """Compare what was planted with what was found."""
    said = next((f for f in findings if f.code == fault.code), None)
    listing = [f.facts for f in findings if f.code in (fault.code, *fault.follows)]
    here = planted & set(texts(listing))
    grave = said and (said.severity == fault.severity or (said.severity in ALARMS and fault.severity == "hint"))
    found = f"{said.severity} {said.code}" if said and grave and len(here) >= 0.9 * len(planted) else "missed"
    others = [f for f in findings if f.severity in ALARMS and f.code != fault.code]
    known = {*fault.follows, *TRUE.get(name, {})}
    return Verdict(
        name,
        fault.name,
        found,
        f"{len(here)} of {len(planted)}" if planted else "",
        tuple(f"{f.code}: {f.evidence}" for f in others if f.code not in known),
        tuple(f.code for f in others if f.code in known),
    )


def planted_verdicts(
    work: Path, name: str, clean: Path, faults: Sequence[Fault], prepared: Dataset
) -> Iterator[Verdict]:
    """Plant each fault in a copy of a clean folder, which is `prepared` as well, and examine that."""
    for number, fault in enumerate(faults):
        if fault.colour and prepared.settings.channels == 1:
            continue
        spoilt = work / f"{name}-{number}"
        shutil.copytree(clean, spoilt, copy_function=os.link)
        planted = fault.plant(Folder(spoilt, prepared, np.random.default_rng(number)))
        findings, seconds = examined(spoilt, replace(fault.data, cache="memory"), fault.diffusion)
        yield replace(judged(name, fault, planted, findings), seconds=seconds)
        shutil.rmtree(spoilt)


def clean_verdict(name: str, source: str | Path) -> Verdict:
    """Examine a clean set as it is."""
    findings, seconds = examined(source, Data(), Diffusion())
    alarms = [f for f in findings if f.severity in ALARMS]
    known = TRUE.get(name, {})
    return Verdict(
        name,
        "none, the whole set",
        "",
        "",
        tuple(f"{f.code}: {f.evidence}" for f in alarms if f.code not in known),
        tuple(f.code for f in alarms if f.code in known),
        tuple(f.code for f in findings if f.severity == "hint"),
        seconds,
    )


def line(verdict: Verdict) -> str:
    """A row of the table in Markdown."""
    notes = [*(f"FALSE ALARM {alarm}" for alarm in verdict.alarms), *(f"true: {code}" for code in verdict.true)]
    notes += [f"hint: {code}" for code in verdict.hints]
    cells = (verdict.set, verdict.fault, verdict.found, verdict.listed, "; ".join(notes), f"{verdict.seconds:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    arguments = parser.parse_args()
    os.environ["UNFOG_CACHE"] = str(arguments.work / "cache")
    print("| set | fault | found by | files listed | besides | s |\n|---|---|---|---|---|---|", flush=True)
    verdicts = []
    sets: dict[str, Path | None] = {"fashion": None}
    sets |= {name: Path(folder) for name, folder in (data.split("=", 1) for data in arguments.data)}
    for name, source in sets.items():
        verdicts.append(clean_verdict(name, source or "fashion"))
        print(line(verdicts[-1]), flush=True)
        clean = arguments.work / name
        if source:
            plain_copy(source, clean, COUNT)
        else:
            fashion_copy(clean, COUNT)
        prepared = prepare(open_source(clean), Data(cache="memory"))
        for verdict in planted_verdicts(arguments.work, name, clean, FAULTS, prepared):
            verdicts.append(verdict)
            print(line(verdict), flush=True)
    planted = [verdict for verdict in verdicts if verdict.found]
    missed, alarms = sum(v.found == "missed" for v in planted), sum(len(v.alarms) for v in verdicts)
    print(f"\n{len(planted) - missed} of {len(planted)} planted faults found, {missed} missed; {alarms} false alarms")


if __name__ == "__main__":
    main()
