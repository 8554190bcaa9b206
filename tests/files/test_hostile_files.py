"""Each reader of files against each kind of damage: it reads what was written, or refuses in a line."""

import functools
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hostile import DAMAGES, PICKLES, clear, peak_memory, snapshot
from unfog.config.presets import preset
from unfog.config.requests.pack import PackRequest
from unfog.config.schema import Config
from unfog.config.toml import read_toml, to_toml
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError
from unfog.data.sources.labels import apply_label_table
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError, RunError
from unfog.evaluation.features import open_features
from unfog.export.foreign_weights import read_model
from unfog.inference.evaluation_files import Evaluation
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import Autoencoder, AutoencoderFolder
from unfog.models.settings import UNet
from unfog.pipeline.build import build_state
from unfog.pipeline.latents import save_autoencoder
from unfog.pipeline.pack import pack
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.image_grids import png_data_uri, read_png, save_png
from unfog.reporting.records import read_events, read_metrics
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import load_weights
from unfog.training.checkpoints.posthoc_ema import METADATA_KEY, EmaSnapshotFile
from unfog.training.checkpoints.snapshot import take_snapshot, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")]

SETTINGS = replace(
    preset("default"),
    source="fashion",
    network=UNet(channels=(8, 8), attention=(False, False), mid_attention=False, head_channels=0, norm_groups=4),
    data=Data(size=8, channels=1),
    training=replace(preset("default").training, precision="fp32"),
)
IMAGES = Data(size=16, cache="memory", held_out=0)
RGB = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8)  # with fewer, two classes would be too many
SECONDS, BYTES = 4.0, 250e6  # of the processor, and of memory, for one file


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def make_all(place: Path) -> None:
    """Write a sound file of every kind that is read."""
    run, photos = place / "run", place / "photos"
    for folder in (run, photos):
        folder.mkdir()
    (run / "config.toml").write_text(to_toml(SETTINGS))
    state = build_state(SETTINGS, torch.device("cpu"))
    write_checkpoint(take_snapshot(state, 1, anchor=True), run / "checkpoints")
    (run / "averages").mkdir()
    facts = json.dumps({"step": 2, "updates": 2, "widths": [0.05]})
    save_file({"0/a": torch.zeros(1)}, run / "averages/00000002.safetensors", {METADATA_KEY: facts})
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 50)))
    (run / "events.jsonl").write_text("".join(f'{{"step": {step}, "kind": "warning"}}\n' for step in range(1, 50)))
    with StopSignals() as stop, Heartbeat(run, stop):
        pass
    save_png(run / "samples/00000001.png", run, RGB[0])
    Evaluation(4, {"reference": "fashion"}, ()).write(run / "evaluations/one.json", b"key")
    for number, image in enumerate(RGB):
        Image.fromarray(image).save(photos / f"{number}.png")
    (photos / "metadata.csv").write_text("file_name,label\n" + "".join(f"{n}.png,{n % 2}\n" for n in range(len(RGB))))
    np.save(place / "images.npy", RGB)
    np.savez(place / "images.npz", x=RGB)
    with zipfile.ZipFile(place / "images.zip", "w") as archive:
        for path in sorted(photos.glob("*.png")):
            archive.write(path, path.name)
    shutil.make_archive(str(place / "images"), "tar", photos)
    pack(PackRequest(str(photos), place / "pack", replace(IMAGES, cache="auto")))
    torch.jit.script(Net()).save(place / "net.pt")
    torch.save({"a": torch.zeros(3)}, place / "weights.pt")
    save_file({"a": torch.zeros(3)}, place / "weights.safetensors")
    codec_settings = Autoencoder(factor=4, latent_channels=3, channels=(8, 8), norm_groups=4)
    save_autoencoder(place / "codec", AutoencoderModel(codec_settings, 3))


def same(value: Any, sound: Any) -> bool:
    return bool(value == sound)


def usual(value: Any, sound: Any) -> bool:
    """Whether these are the settings that were written, or the usual ones, as an empty file has them."""
    return value in (sound, Config())


def rows(value: Any, sound: Any) -> bool:
    """Whether each line that was kept is an object; a line may hold any value."""
    return all(isinstance(row, dict) for row in value)


def some(value: Any, sound: Any) -> bool:
    """Whether what was read is a part of what was written, perhaps nothing."""
    return value.items() <= sound.items() if isinstance(value, dict) else {*value} <= {*sound}


def all_but_one(value: dict[str, bytes], sound: dict[str, bytes]) -> bool:
    return sum(value.get(name) != pixels for name, pixels in sound.items()) <= 1 and value.keys() <= sound.keys()


class Reader(NamedTuple):
    """A function that reads a file, given its path among sound ones."""

    file: str
    read: Callable[[Path], Any]
    holds: Callable[[Any, Any], bool] = same
    """Whether (value read, value of the sound file) is a right answer for a damaged file, beside None and an error."""
    follows: bool = False
    """A link is followed, as to a file that a person names."""
    errors: tuple[type[Exception], ...] = (RequestError, RunError, ImageError)


def decoded(path: Path) -> dict[str, bytes]:
    """Decode images with the usual reader, which leaves out those that cannot be used."""
    prepared = prepare(open_source(path), IMAGES)
    return {Path(name).name: pixels.tobytes() for name, pixels in zip(prepared.train.names, prepared.train.pixels)}


@functools.cache
def network() -> torch.nn.Module:
    return build_state(SETTINGS, torch.device("cpu")).model


def weights(path: Path) -> list[bytes]:
    model = network()
    load_weights(path.parent, path.stem, model)
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


def newest(path: Path) -> int | None:
    """Return the step of the newest checkpoint; None if it is damaged. Damage is never "cannot be read now"."""
    found, broken = checkpoint.newest_intact(path.parents[1])
    assert found or broken
    return found.step if found else None


def labels(path: Path) -> list[str]:
    source = apply_label_table(open_source(path.parent), path.name)
    assert source.labels is not None
    return [source.classes[label] for label in source.labels]


def packed(path: Path) -> dict[str, Any]:
    opened, trouble = Pack.open(path.parent), Pack.verify(path.parent)
    if trouble:
        raise RequestError(trouble[0])
    return opened.manifest


PACK = ("pack.json", "chunks.json", "pixels.u8", "labels.npy", "names.npy", "names.bin", "sides.npy", "treatment.npy")
STEP = "run/checkpoints/00000001"
PICTURE = "run/samples/00000001.png"
READERS = {
    "settings": Reader("run/config.toml", lambda path: read_toml(path, Config()), usual, True),
    "config of a run": Reader("run/config.toml", lambda path: RunFolder(path.parent).read_config(), follows=True),
    "metrics": Reader("run/metrics.jsonl", read_metrics, rows, errors=(OSError,)),
    "events": Reader("run/events.jsonl", read_events, rows, errors=(OSError,)),
    "heartbeat": Reader("run/heartbeat.json", lambda path: (Heartbeat.read(path.parent) or {}).get("doing")),
    "evaluation": Reader("run/evaluations/one.json", lambda path: Evaluation.read(path, b"key")),
    "picture of a run": Reader(
        PICTURE, lambda path: read_png(path, path.parents[1]).tobytes(), errors=(OSError, ValueError)
    ),
    "width of a picture": Reader(PICTURE, lambda path: (png_data_uri(path, path.parents[1], 64) or (0, None))[1]),
    **{
        f"{name} of a checkpoint": Reader(f"{STEP}/{name}", newest, errors=())
        for name in ("manifest.json", *sorted(checkpoint.FILES))
    },
    **{f"{name} as weights": Reader(f"{STEP}/{name}.safetensors", weights) for name in ("model", "ema")},
    "snapshot of averages": Reader(
        "run/averages/00000002.safetensors",
        lambda path: [one.step for one in EmaSnapshotFile.read_all(path.parent)],
        some,
    ),
    "image": Reader("photos/3.png", lambda path: decoded(path.parent), all_but_one, True),
    "table of labels": Reader("photos/metadata.csv", labels, follows=True),
    **{kind: Reader(f"images.{kind}", decoded, some, True) for kind in ("zip", "tar", "npy", "npz")},
    **{f"{name} of a pack": Reader(f"pack/{name}", packed) for name in PACK},
    "network of features": Reader("net.pt", lambda path: open_features(str(path), only_known=True).name, follows=True),
    **{name: Reader(name, read_model) for name in ("weights.pt", "weights.safetensors")},
    "config of an autoencoder": Reader(
        "codec/config.json", lambda path: AutoencoderFolder.open(str(path.parent)).config, follows=True
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sound")
    make_all(place)
    return place


def outcome(reader: Reader, damage: str, place: Path, expected: Any) -> str:
    """Read a damaged file; return what is wrong with the answer, or "" if it is right."""
    try:
        value = reader.read(place / reader.file)
    except reader.errors as error:
        said = str(error)
        if len(said) > 700 or "\n" in said or not said.isprintable():
            return f"an error that is not a short line: {said[:300]!r}"
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if damage == "link" and not reader.follows and value is not None and value == expected:
        return "followed"
    return "" if value is None or reader.holds(value, expected) else f"read as {str(value)[:100]}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_as_it_was_or_refused(name: str, sound: Path, tmp_path: Path) -> None:
    """Nothing is unpickled, written or waited for, in any state of the file."""
    reader, failed, sprung = READERS[name], [], tmp_path / "sprung"
    place, top = tmp_path / "place", reader.file.split("/")[0]
    place.mkdir()
    (shutil.copytree if (sound / top).is_dir() else shutil.copy)(sound / top, place / top)
    try:
        expected = reader.read(sound / reader.file)
    except RequestError as error:  # weights of a network that is not known
        expected = error
    for damage in DAMAGES:
        if reader.holds is rows and damage.startswith("sparse"):
            continue  # a record may have a gigabyte
        DAMAGES[damage](place / reader.file, sprung)
        before, used, peak = snapshot(place), time.process_time(), peak_memory()
        wrong = outcome(reader, damage, place, expected)
        if sprung.exists():
            wrong += " unpickled"
            sprung.unlink()
        if snapshot(place) != before:
            wrong += " written to"
        if (seconds := time.process_time() - used) > SECONDS:
            wrong += f" took {seconds:.1f} s"
        if (grown := peak_memory() - peak) > BYTES:
            wrong += f" took {grown / 1e6:.0f} MB"
        if wrong:
            failed.append(f"{damage}: {wrong}")
        clear(place / reader.file)
        shutil.copy(sound / reader.file, place / reader.file)
    assert not failed, "\n".join(failed)


def test_traps_spring_where_a_pickle_is_loaded(tmp_path: Path) -> None:
    load = {"pickle": pickle.load, "pickle of torch": functools.partial(torch.load, weights_only=False)}
    for name, damage in PICKLES.items():
        path, sprung = tmp_path / name, tmp_path / f"{name} sprung"
        path.touch()
        damage(path, sprung)
        if name in load:
            with path.open("rb") as file:
                load[name](file)
            assert sprung.exists(), name
