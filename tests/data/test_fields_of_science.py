"""From files to samples: the commands of the pages on satellites and simulations, and one set of each format."""

import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unfog
from conftest import QUIET, TRANSFORMER
from scientific_files import WRITERS, fits, h5py, nibabel, tifffile, xarray
from unfog.cli.main import main
from unfog.data.sources.base import ImageError
from unfog.data.sources.registry import open_source
from unfog.errors import RunError

DOCS = Path(unfog.__file__).parents[2] / "docs"
TINY = ["--network", TRANSFORMER, "--size", "12", "--batch", "4", "--steps", "1", "--device", "cpu", *QUIET]
RNG = np.random.default_rng(0)
FIELDS = (RNG.gamma(2, 300, (20, 12, 16, 4)) + 1).astype(np.float32)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DOCS.exists(), reason="installed without its repository")]


def command(*words: object) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*map(str, words)])


def make_satellites() -> None:
    for folder in ("tiles", "cloudy"):
        Path(folder).mkdir()
        for i, image in enumerate(FIELDS.astype(np.uint16)):
            image[: 3 * (folder == "cloudy"), : i % 7] = 0
            tifffile.imwrite(f"{folder}/{i}.tif", image, photometric="minisblack", planarconfig="contig")
    clouds = np.where(RNG.random(FIELDS.shape[:3])[..., None] < 0.2, np.nan, FIELDS / 10_000).astype(np.float32)
    optical = xarray.Dataset({"reflectance": (("time", "y", "x", "band"), clouds)})
    optical.to_netcdf("optical.nc", engine="h5netcdf")


def make_simulations() -> None:
    np.save("fields.npy", FIELDS)
    with h5py.File("snapshots.h5", "w") as file:
        file["density"] = FIELDS[..., 0] ** 4
    xarray.Dataset({"t2m": (("time", "lat", "lon"), FIELDS[..., 0])}).to_netcdf("weather.nc", engine="h5netcdf")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("page", "make", "samples"),
    [("satellites.md", make_satellites, "*.tif"), ("simulations.md", make_simulations, "*.npy")],
    ids=["satellites", "simulations"],
)
def test_the_commands_of_a_page_run(
    page: str, make: Any, samples: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make()
    lines = (DOCS / page).read_text("utf-8").partition("```bash\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 5
    for line in lines:
        verb, *words = shlex.split(line, comments=True)[1:]
        few = {
            "train": TINY,
            "sample": ["--steps", "1", "--device", "cpu"],
            "evaluate": ["--device", "cpu", "-n", "20"],
        }
        command(verb, *words, *few[verb])
    assert len(list(tmp_path.glob(f"runs/*/pictures*/{samples}"))) == 4
    assert "spectrum_0" in next(tmp_path.glob("runs/*/evaluations/*.json")).read_text()


def write(kind: str) -> str:
    """Write a set of a format with `FIELDS`, or one channel of them, and return its SOURCE."""
    one = FIELDS[..., :1]
    return WRITERS[kind](Path(), {"nifti": one, "fits": one, "dicom": one.astype(np.uint16)}.get(kind, FIELDS))


def read(path: Path) -> np.ndarray:
    """Return a sample as an array [H, W] or [H, W, C]."""
    match path.name.partition(".")[2]:
        case "tif":
            return np.moveaxis(tifffile.imread(path), 0, -1)
        case "nii.gz":
            return np.asarray(nibabel.load(path).get_fdata()[..., 0]).T
        case "fits":
            return np.asarray(fits.getdata(path))
    return np.load(path)


SAMPLES = {
    **dict.fromkeys(WRITERS, (".npy", 4)),
    **dict.fromkeys(("tiff", "ome"), (".tif", 4)),
    "dicom": (".npy", 1),
    "nifti": (".nii.gz", 0),
    "fits": (".fits", 0),
}


@pytest.mark.parametrize(
    "kind", [one if one in ("netcdf3", "tiff") else pytest.param(one, marks=pytest.mark.exhaustive) for one in SAMPLES]
)
def test_a_set_of_each_format_goes_from_file_to_sample(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suffix, channels = SAMPLES[kind]
    words = ["--network", TRANSFORMER, "--size", "16x12", "--data.dtype", "float32"]
    rest = ["--batch", "2", "--steps", "1", "--device", "cpu", "--preview.images", "2", "--evaluate.every", "-1"]
    command("train", write(kind), "--out", "run", *words, *rest)
    assert (tmp_path / "run/channels/00000001.png").exists()  # channels for the page
    command("sample", "run", "-n", "2", "--steps", "1", "--device", "cpu", "--out", "drawn")
    found = sorted(Path("drawn").glob(f"0*{suffix}"))
    assert len(found) == len(list(Path("drawn").glob("0*.png"))) == 2
    values = read(found[1])
    assert values.shape == ((12, 16, channels) if channels else (12, 16))
    assert values.std() > 10  # in the units of the source


@pytest.mark.parametrize("kind", ["npy", "tiff", "hdf5", "netcdf3", "netcdf4", "fits"])
@pytest.mark.parametrize("looked", [False, True])
def test_a_file_that_shrinks_while_it_is_read_gives_no_wrong_values(
    kind: str, looked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = write(kind)
    if kind == "tiff":  # pages of which half are a whole file, too
        tifffile.imwrite("b.tif", FIELDS.transpose(0, 3, 1, 2), imagej=True, metadata={"axes": "TCYX"})
        place = "b.tif"
    source = open_source(str(tmp_path / place))
    if looked:
        source.read(0)
    path = tmp_path / place.partition(":")[0]
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises((ImageError, RunError, ValueError), match=r"truncated|changed|cut off|array of size 0"):
        source.read(len(source.names) - 1)
