"""Evaluation of images without a run: values, sizes, what is left out, what is refused, and the file of the result."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from float_fields import saved
from unfog.cli.main import main
from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.evaluation.features import open_features
from unfog.evaluation.metrics import compare_features
from unfog.pipeline.sample_folder import SampleFolder
from unfog.runs.sample import write_grid


def _blobs(count: int, seed: int, side: int = 96) -> np.ndarray:
    """Discs on a dark ground, uint8 [N, side, side, 3]."""
    rng, (y, x) = np.random.default_rng(seed), np.mgrid[:side, :side]
    centre, radius = rng.uniform(0.25, 0.75, (count, 2, 1, 1)) * side, rng.uniform(0.1, 0.3, (count, 1, 1)) * side
    inside = (y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2 < radius**2
    colour = rng.integers(100, 255, (count, 1, 1, 3))
    return np.where(inside[..., None], colour, 20).astype(np.uint8)


def _folder(path: Path, images: np.ndarray) -> Path:
    path.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(path / f"{number:06d}.png")
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("images")
    samples = _folder(place / "samples", _blobs(60, 1))
    Image.fromarray(np.zeros((400, 700, 3), np.uint8)).save(samples / "grid.png")
    return samples, _folder(place / "real", _blobs(80, 2))


@pytest.mark.slow
def test_values_are_those_of_the_pixels_at_their_own_size_without_the_grid(folders, capsys):
    found = unfog.evaluate(*folders, ["kid", "precision"], features="texture", device="cpu")
    features = open_features("texture")
    fake, real = (features(torch.from_numpy(_blobs(n, seed).transpose(0, 3, 1, 2))) for n, seed in ((60, 1), (80, 2)))
    for one, expected in zip(found.measured, compare_features(["kid", "precision"], real, fake), strict=True):
        assert one.value == pytest.approx(expected.value, abs=1e-6)
        assert (one.n, one.n_reference) == (60, 80)
        assert one.real is not None
    assert found.drawn["size"] == 96
    assert "grid.png" in capsys.readouterr().err


@pytest.mark.slow
def test_the_verdict_tells_like_images_from_others(folders, tmp_path):
    settings = {"metrics": "kid,precision,recall", "features": "texture", "device": "cpu"}

    def of_blurred(side: int):
        small = (Image.fromarray(one).resize((side, side)) for one in _blobs(60, 1))
        return unfog.evaluate([np.asarray(one.resize((96, 96))) for one in small], folders[1], **settings)

    good, bad, worst = unfog.evaluate(*folders, **settings), of_blurred(20), of_blurred(6)
    assert good.verdict.startswith("The samples look like real images")
    assert bad.verdict.startswith("Many samples do not look like real images")
    assert worst.verdict.startswith("The samples lack almost all variety of real images")
    assert good["kid"].value < bad["kid"].value < worst["kid"].value


@pytest.mark.slow
def test_other_sizes_are_resized_and_said(folders, tmp_path, capsys):
    small = _folder(tmp_path / "small", _blobs(20, 3, side=48))
    found = unfog.evaluate(small, folders[1], "sliced", device="cpu")
    assert found.drawn["size"] == 48
    assert "80 resized" in capsys.readouterr().err
    assert unfog.evaluate(small, folders[1], "sliced", size=32, n=12, device="cpu")["sliced"].n == 12


@pytest.mark.slow
def test_grey_images_are_compared_as_rgb_with_coloured_ones(folders):
    grey = _blobs(20, 3)[..., 0]
    assert unfog.evaluate(grey, folders[1], "sliced", device="cpu")["sliced"].value > 0


@pytest.mark.slow
def test_the_command_prints_and_writes_the_result(folders, tmp_path, capsys):
    out = tmp_path / "results" / "r.json"
    words = ["evaluate", *map(str, folders[:1]), "--reference", str(folders[1]), "--metrics", "sliced,kid"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--features", "pixels", "--device", "cpu", "--out", str(out)])
    assert not ended.value.code
    stored = json.loads(out.read_text())
    assert {"sliced", "kid"} <= {one["metric"] for one in stored["measured"]}
    assert stored["verdict"] in capsys.readouterr().out
    assert stored["step"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--reference SOURCE"),
        (["--reference", "REAL", "--steps", "5"], "steps needs a run"),
        (["--reference", "REAL", "--metrics", "held_out"], "held_out needs a run"),
        (["--reference", "held-out"], "held-out needs a run"),
        (["--reference", "/nowhere"], "nowhere"),
        (["--reference", "REAL", "--out", "REAL"], "is a folder"),
    ],
)
def test_what_needs_a_run_is_refused(folders, words, message, capsys):
    words = [str(folders[1]) if word == "REAL" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(folders[0]), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_too_few_images_are_refused(folders, tmp_path):
    for name in [*(f"{i}.png" for i in range(9)), "grid.png"]:  # which is not an image to count
        Image.new("RGB", (16, 16)).save(tmp_path / name)
    with pytest.raises(RequestError, match="has 9 images; at least 10"):
        unfog.evaluate(tmp_path, folders[1], device="cpu")
    with pytest.raises(RequestError, match="at least 10"):
        unfog.evaluate(_blobs(5, 0), folders[1], device="cpu")


@pytest.mark.slow
def test_a_folder_of_samples_is_of_its_arrays_and_not_of_their_views(tmp_path):
    fields = np.random.default_rng(0).normal(0, [3, 50, 400], (24, 8, 12, 3)).astype(np.float32)
    config = Config(data=Data(size="12x8", channels=3, dtype="float32", range=(-2000.0, 2000.0)))
    folder = SampleFolder(tmp_path / "drawn", "", 12, view=config.view, names=["sea", "land"])
    folder.path.mkdir()
    folder.write(range(12), fields[:12])
    folder.save("mean", fields.mean(0), config.view(fields[:1])[0])
    write_grid(folder, config)
    source = open_source(str(folder.path))
    assert np.array_equal(np.stack([source.read(i) for i in range(len(source.names))]), fields[:12])
    reference = saved(tmp_path, fields[12:], "sea.npy")
    one, other = (unfog.evaluate(images, reference) for images in (folder.path, saved(tmp_path, fields[:12])))
    assert [(found.metric, found.value) for found in one.measured] == [(m.metric, m.value) for m in other.measured]
    assert one.measured[0].value is not None
    (folder.path / "000003-land.npy").unlink()  # now a picture without an array: no folder of samples
    assert source.names != open_source(str(folder.path)).names


@pytest.mark.slow
def test_images_with_nan_need_the_run(tmp_path, capsys):
    fields = np.random.default_rng(0).normal(0, 50, (30, 8, 12, 2)).astype(np.float32)
    reference = saved(tmp_path, fields[:15], "sea.npy")
    fields[15:, 0, 0] = np.nan
    with pytest.raises(RequestError, match=r"all images of .*drawn.npy have NaN.*unfog evaluate RUN"):
        unfog.evaluate(saved(tmp_path, fields[15:], "drawn.npy"), reference)
    unfog.evaluate(saved(tmp_path, fields[3:18], "some.npy"), reference)
    assert "images with NaN are left out; `unfog evaluate RUN`" in capsys.readouterr().err
