"""Pictures that Unfog has written are not images to train on, wherever they lie among those."""

import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import unfog
from conftest import TRANSFORMER
from unfog.data.sources.folder import is_own
from unfog.data.sources.registry import open_source
from unfog.reporting.image_grids import save_png

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Two classes; a run on them, its samples, an animation, an export and copies of its pictures among them."""
    photos = tmp_path_factory.mktemp("photos")
    for i in range(24):
        (photos / "ab"[i % 2]).mkdir(exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(photos / "ab"[i % 2] / f"{i:06}.png")  # named as Unfog's own are
    settings = {"network": TRANSFORMER, "size": 16, "steps": 1, "batch": 4, "device": "cpu", "sampler": {"steps": 2}}
    run = unfog.train(photos, out=photos / "run", **settings)
    run.export(photos / "export")
    from unfog.cli.main import main

    for name in ("denoising.gif", "denoising.webp"):
        words = ["sample", str(photos / "run"), "-n", "4", "--steps", "2", "--strip", "--device", "cpu"]
        with pytest.raises(SystemExit) as ended:
            main([*words, "--out", str(photos / name.partition(".")[2]), "--animate", str(photos / name)])
        assert ended.value.code == 0
    shutil.copytree(photos / "run" / "samples", photos / "previews")
    shutil.copy(photos / "run" / "contact-sheet.png", photos)
    return photos


def pack(kind: str, photos: Path, out: Path) -> Path:
    if kind == "folder":
        return photos
    files = [path for path in sorted(photos.rglob("*")) if path.is_file()]
    if kind == "zip":
        with zipfile.ZipFile(out / "a.zip", "w") as archive:
            for path in files:
                archive.write(path, path.relative_to(photos))
        return out / "a.zip"
    with tarfile.open(out / "a.tar", "w") as archive:
        for path in files:
            archive.add(path, path.relative_to(photos))
    return out / "a.tar"


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_what_unfog_wrote_among_the_images_is_left_out_and_counted(photos, tmp_path, kind):
    source = open_source(pack(kind, photos, tmp_path))
    assert len(source.names) == 24
    assert {name.removeprefix("a.tar/")[0] for name in source.names} == {"a", "b"}
    written = [path for path in photos.rglob("*") if path.suffix in (".png", ".gif", ".webp")]
    of_run = [path for path in written if photos / "run" in path.parents]
    assert source.ignored["made by Unfog"] == len(written) - len(of_run) - 24
    assert source.ignored["a run's folder"] == 1


def test_a_run_resumes_after_samples_were_written_among_its_images(photos):
    run = unfog.resume(photos / "run", steps=2)
    assert run.classes == ("a", "b")


def test_a_folder_that_unfog_wrote_can_be_measured(photos):
    assert len(open_source(photos / "gif").names) == 6  # four samples, the grid and the strip
    assert len(open_source(pack("zip", photos / "gif", photos.parent)).names) == 6


def test_a_mark_is_in_each_kind_of_file(photos, tmp_path):
    save_png(tmp_path / "a.png", tmp_path, np.zeros((4, 4, 3), np.uint8), {"Class": "x"})
    for path in (tmp_path / "a.png", photos / "denoising.gif", photos / "denoising.webp"):
        assert is_own(path.read_bytes())
    assert not is_own((photos / "a" / "000000.png").read_bytes())
