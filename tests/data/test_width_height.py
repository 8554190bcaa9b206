"""Width and height that differ, in every reader and writer: a red top, green bottom, blue left and yellow right."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES, QUIET, TRANSFORMER
from launches import AGENT, ended, forked, output, weights  # noqa: F401 (fixture)
from shard_server import serving
from unfog.checks.images.dataset_checks import short_sides, size_with_short_side
from unfog.checks.images.image_scan import thumbnails
from unfog.config.schema import Config
from unfog.data.decode import decode
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.scan import common_size, read_size
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.sources.stored_images import StoredImages
from unfog.data.stream import ImageStream
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective
from unfog.errors import RequestError
from unfog.evaluation.features import open_features
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import Autoencoder
from unfog.models.network_settings import build_model
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.pipeline.edit_images import build_edit
from unfog.pipeline.latents import save_autoencoder
from unfog.pipeline.load_data import load_images
from unfog.process.signals import StopSignals
from unfog.serve.playground.images import at_run_size, sheet
from unfog.training.settings import Training
from unfog.values.conditions import NO_CONDITIONS
from unfog.values.image_format import ImageFormat

TOP, BOTTOM, LEFT, RIGHT = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)
WIDE, TALL = ImageFormat(3, 16, 24), ImageFormat(3, 24, 16)
WHITE = (255, 255, 255)


def framed(width: int, height: int, band: int = 4) -> np.ndarray:
    """A picture [H, W, 3] whose four edges have four colours."""
    pixels = np.full((height, width, 3), 128, np.uint8)
    pixels[:, :band], pixels[:, -band:] = LEFT, RIGHT
    pixels[:band, band:-band], pixels[-band:, band:-band] = TOP, BOTTOM
    return pixels


def edges(pixels: np.ndarray) -> list[tuple[int, ...]]:
    """The colours in the middle of the four edges of a picture [H, W, 3], each channel dark or bright."""
    height, width = pixels.shape[:2]
    places = ((0, width // 2), (-1, width // 2), (height // 2, 0), (height // 2, -1))
    return [tuple(int(level) for level in np.where(pixels[place] > 127, 255, 0)) for place in places]


def is_upright(pixels: np.ndarray) -> bool:
    return edges(pixels) == [TOP, BOTTOM, LEFT, RIGHT]


def encoded(width: int, height: int, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(framed(width, height)).save(file, kind, **options)
    return file.getvalue()


def turned(kind: str, width: int, height: int) -> bytes:
    """A file whose pixels lie on their side, and whose EXIF says so."""
    image, file = Image.fromarray(framed(width, height)).transpose(Image.Transpose.ROTATE_90), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(file, kind, exif=exif, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))
    return file.getvalue()


# Decoding


@pytest.mark.parametrize("format", [WIDE, TALL, ImageFormat(3, 16, 16)], ids=str)
@pytest.mark.parametrize("original", [(24, 16), (16, 24), (48, 32), (200, 40), (40, 200), (31, 33)], ids=str)
def test_the_largest_part_of_the_shape_is_kept_from_the_centre(format, original):
    width, height = original
    pixels, facts = decode(lambda: Image.fromarray(framed(width, height)), format, WHITE)
    assert pixels.shape == format.shape
    assert (facts.width, facts.height) == original
    found, exact = edges(pixels.transpose(1, 2, 0)), width * format.height / (height * format.width)
    if exact >= 1:  # no row is lost
        assert found[:2] == [TOP, BOTTOM]
    if exact <= 1:
        assert found[2:] == [LEFT, RIGHT]
    assert ("cropped" in facts.actions) == (abs(exact - 1) > 0.05)


def test_a_transposed_image_becomes_the_transposed_result():
    noise = np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8)
    wide, _ = decode(lambda: Image.fromarray(noise), WIDE, WHITE)
    tall, _ = decode(lambda: Image.fromarray(noise.transpose(1, 0, 2).copy()), TALL, WHITE)
    # Pillow resizes columns after rows, and rounds and clips in between.
    assert np.abs(wide.transpose(0, 2, 1).astype(int) - tall).mean() < 0.5


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize(("width", "height"), [(96, 64), (64, 96), (960, 640)])
def test_a_picture_on_its_side_is_fitted_upright(kind, width, height):
    data, format = turned(kind, width, height), ImageFormat.of(3, f"{width // 4}x{height // 4}")
    pixels, facts = decode(lambda: Image.open(io.BytesIO(data)), format, WHITE)
    assert (facts.width, facts.height) == (width, height)
    assert is_upright(pixels.transpose(1, 2, 0))
    assert "cropped" not in facts.actions
    assert read_size(lambda: Image.open(io.BytesIO(data))) == (width, height)


@pytest.mark.parametrize(("width", "height"), [(1920, 1280), (1280, 1920), (3000, 500)])
def test_a_large_jpeg_is_read_as_the_picture_itself(width, height):
    data = encoded(width, height, "JPEG", quality=95)
    format = ImageFormat.of(3, "48x32")
    found = [
        decode(lambda d=one: Image.open(io.BytesIO(d)), format, WHITE)[0].astype(int)
        for one in (data, encoded(width, height))
    ]
    assert np.abs(found[0] - found[1]).mean() < 4


# Sources


def _folder(path: Path) -> str:
    path.mkdir()
    for i in range(6):
        (path / f"{i}.png").write_bytes(encoded(48, 32))
    return str(path)


def _jpegs_on_their_side(path: Path) -> str:
    path.mkdir()
    for i in range(6):
        (path / f"{i}.jpg").write_bytes(turned("JPEG", 48, 32))
    return str(path)


def _zip(path: Path) -> str:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for i in range(6):
            archive.writestr(f"{i}.png", encoded(48, 32))
    return str(path.with_suffix(".zip"))


def _tar(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i in range(6):
            info = tarfile.TarInfo(f"{i}.png")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _shard(path: Path) -> str:
    path.with_suffix(".tar").write_bytes(_tar(encoded(48, 32)))
    return str(path.with_suffix(".tar"))


def _npy(path: Path) -> str:
    np.save(path.with_suffix(".npy"), np.stack([framed(48, 32)] * 6))
    return str(path.with_suffix(".npy"))


def _npz(path: Path) -> str:
    np.savez(path.with_suffix(".npz"), images=np.stack([framed(48, 32)] * 6))
    return str(path.with_suffix(".npz"))


def _deep(path: Path) -> str:
    np.save(path.with_suffix(".npy"), np.stack([framed(48, 32).astype(np.uint16) * 257] * 6))
    return str(path.with_suffix(".npy"))


def _objects(make: Callable[[np.ndarray], Any]) -> Callable[[Path], str]:
    return lambda path: StoredImages.store([make(framed(48, 32)) for _ in range(6)], None, None)


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _pack(path: Path) -> str:
    unfog.pack(_folder(path), path.with_suffix(".pack"), size="48x32")
    return str(path.with_suffix(".pack"))


def _zip_of_pictures_on_their_side(path: Path) -> str:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for i in range(6):
            archive.writestr(f"{i}.jpg", turned("JPEG", 48, 32))
    return str(path.with_suffix(".zip"))


def _table(saved: bool, data: bytes) -> Callable[[Path], str]:
    """A set of the datasets library, as parquet or as its own arrow files."""

    def write(path: Path) -> str:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(image=datasets.Image())
        rows = datasets.Dataset.from_dict({"image": [{"bytes": data, "path": None}] * 6}, features=features)
        if saved:
            rows.save_to_disk(str(path))
        else:
            path.mkdir()
            rows.to_parquet(str(path / "a.parquet"))
        return str(path)

    return write


READERS = {
    "folder": _folder,
    "JPEGs on their side": _jpegs_on_their_side,
    "zip": _zip,
    "zip of JPEGs on their side": _zip_of_pictures_on_their_side,
    "arrow": _table(True, encoded(48, 32)),
    "parquet": _table(False, encoded(48, 32)),
    "parquet of JPEGs on their side": _table(False, turned("JPEG", 48, 32)),
    "shard": _shard,
    "npy": _npy,
    "npz": _npz,
    "16 bits": _deep,
    "PIL images": _objects(Image.fromarray),
    "arrays": _objects(lambda pixels: pixels),
    "tensors": _objects(_tensor),
    "floating point": _objects(lambda pixels: _tensor(pixels).float() / 255),
    "pack": _pack,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_source_gives_wide_images_upright(read, tmp_path):
    source = read(tmp_path / "set")
    for size in ("24x16", "48x32", 16):
        data = Data(size=size, cache="memory")
        dataset = prepare(open_source(source), data)
        pixels = dataset.train.pixels[0].transpose(1, 2, 0)
        assert dataset.settings.size == size
        assert dataset.train.pixels.shape[1:] == dataset.settings.image_format.shape
        assert is_upright(pixels) if size != 16 else edges(pixels)[:2] == [TOP, BOTTOM]


@pytest.mark.parametrize("data", [encoded(48, 32), turned("JPEG", 48, 32)], ids=["png", "on its side"])
def test_remote_shards_give_wide_images_upright(data):
    pytest.importorskip("aiohttp")
    with serving() as server:
        server.files = {"s-0.tar": _tar(data), "s-1.tar": _tar(data)}
        url = server.url.rpartition("/")[0] + "/s-{0..1}.tar"
        source = open_source(url)
        assert common_size(source) == "48x32"
        images = prepare(source, Data(size="24x16", channels=3, cache="none")).train
        batch = ImageStream(images, 0).batch(0, 4)
    assert batch.pixels.shape == (4, 3, 16, 24)
    assert all(is_upright(one) for one in batch.pixels.permute(0, 2, 3, 1).numpy())


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_wide_images_are_the_same_wherever_they_are_kept(cache, tmp_path):
    dataset = prepare(open_source(_folder(tmp_path / "set")), Data(size="24x16", cache=cache))
    assert dataset.train.pixels.shape == (6, 3, 16, 24)
    assert dataset.settings.size == "24x16"
    assert is_upright(np.asarray(dataset.train.pixels[0]).transpose(1, 2, 0))
    assert "24x16" in dataset.report.line()


def test_a_pack_of_wide_images_keeps_its_size_and_is_fitted_to_others(tmp_path):
    pack = _pack(tmp_path / "set")
    assert json.loads((Path(pack) / "pack.json").read_text())["settings"]["size"] == "48x32"
    assert Pack.open(Path(pack)).images.pixels.shape == (6, 3, 32, 48)
    assert Pack.verify(Path(pack)) == []
    assert prepare(open_source(pack), Data()).settings.size == "48x32"
    assert prepare(open_source(pack), Data(size="32x32")).train.pixels.shape == (6, 3, 32, 32)
    with pytest.raises(RequestError, match="48x32"):
        prepare(open_source(pack), Data(size="32x48"))  # it is not as tall
    manifest = Path(pack) / "pack.json"
    manifest.write_text(manifest.read_text().replace('"48x32"', '"32x48"'))
    with pytest.raises(RequestError, match="damaged"):
        Pack.open(Path(pack))


def test_a_pack_says_why_it_has_a_size_that_was_left_open(tmp_path, capsys):
    photos = _folder(tmp_path / "set")
    unfog.pack(photos, tmp_path / "open.pack")
    assert "data.size = 48x32" in capsys.readouterr().err
    unfog.pack(photos, tmp_path / "given.pack", size=32)  # as that line says
    assert Pack.open(tmp_path / "given.pack").images.pixels.shape == (6, 3, 32, 32)
    assert "data.size" not in capsys.readouterr().err


def test_the_size_that_all_images_have_is_upright(tmp_path):
    assert common_size(open_source(_folder(tmp_path / "a"))) == "48x32"
    assert common_size(open_source(_jpegs_on_their_side(tmp_path / "b"))) == "48x32"


@pytest.mark.parametrize(
    ("originals", "size"),
    [
        ([(300, 200)] * 9 + [(200, 300)], "96x64"),
        ([(200, 300)] * 9 + [(300, 300)], "64x96"),
        ([(1920, 1080), (1280, 720), (640, 360)], "112x64"),
        ([(48, 36)] * 4, "48x36"),
        ([(90, 60)] * 4, "48x32"),
        ([(4000, 100)] * 4, "256x64"),
        ([(300, 200)] * 6 + [(200, 300)] * 4, 64),  # mixed
        ([(300, 260)] * 9, 64),  # nearly square
        ([(40, 36)] * 4, 32),
        ([(48, 48)] * 4, 48),
    ],
)
def test_a_size_left_open_keeps_the_shape_that_most_images_share(originals, size, tmp_path, capsys):
    for i, sides in enumerate(originals):
        Image.new("RGB", sides, "red").save(tmp_path / f"{i}.png")
    config = Config(source=str(tmp_path), training=Training(batch=1))
    with StopSignals() as stop:
        dataset, facts = load_images(config, stop)
    assert facts.data.size == dataset.settings.size == size
    assert ("most images have about this shape; --size" in capsys.readouterr().err) == isinstance(size, str)


def test_the_doctor_measures_what_the_crop_keeps():
    sides = np.array([[300, 200], [200, 300], [300, 300]], np.int32)
    assert short_sides(sides, ImageFormat(3, 64, 96)).tolist() == [200, 133, 200]
    assert short_sides(sides, ImageFormat(3, 96, 64)).tolist() == [133, 200, 200]
    assert short_sides(sides, ImageFormat(3, 64, 64)).tolist() == [200, 200, 300]
    assert size_with_short_side(128, ImageFormat(3, 64, 96)) == "192x128"
    assert size_with_short_side(128, ImageFormat(3, 96, 64)) == "128x192"
    assert size_with_short_side(128, ImageFormat(3, 64, 64)) == 128
    assert thumbnails(np.zeros((1, 3, 20, 30), np.uint8), 4, 6).shape == (1, 3, 4, 6)


# Networks and training

UNET = UNet(channels=(8, 16), attention=(False, True), norm_groups=4, head_channels=8)
MPUNET = MPUNet(channels=(8, 16), attention=(False, True), head_channels=8)
DIT = DiT(width=32, depth=1, head_channels=8)


@pytest.mark.parametrize("settings", [UNET, MPUNET], ids=lambda settings: settings.kind)
def test_training_on_transposed_images_is_the_transposed_training(settings):
    """Of convolutions that are transposed too. So no step takes a width for a height."""
    torch.manual_seed(0)
    first, other = build_model(settings, 3), build_model(settings, 3)
    with torch.no_grad():
        for mine, its in zip(first.parameters(), other.parameters()):
            mine.normal_(std=0.2)
            its.copy_(mine.transpose(2, 3) if mine.ndim == 4 else mine)
    x0, noise, u = torch.randn(4, 3, 8, 16), torch.randn(4, 3, 8, 16), torch.rand(4)
    objective = Objective(Diffusion())
    one = objective(first, x0, NO_CONDITIONS, u=u, noise=noise)
    two = objective(other, x0.transpose(2, 3), NO_CONDITIONS, u=u, noise=noise.transpose(2, 3))
    assert torch.allclose(one.measured, two.measured, rtol=1e-4)
    for loss in (one, two):
        loss.measured.mean().backward()
    for mine, its in zip(first.parameters(), other.parameters()):
        if mine.grad is not None and its.grad is not None:
            expected = mine.grad.transpose(2, 3) if mine.ndim == 4 else mine.grad
            assert torch.allclose(its.grad, expected, rtol=1e-2, atol=1e-4 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("settings", [UNET, MPUNET, DIT], ids=lambda settings: settings.kind)
def test_a_network_takes_wide_and_tall_images_and_refuses_sides_that_do_not_fit(settings):
    network = build_model(settings, 3)
    denoiser = Denoiser(network, Diffusion())
    for shape in ((8, 16), (16, 8)):
        settings.check(shape)
        assert denoiser(torch.randn(2, 3, *shape), torch.zeros(2), NO_CONDITIONS).shape == (2, 3, *shape)
    with pytest.raises(RequestError, match=r"size = 16x9: both sides must be .*; try size = 16x(8|10)"):
        settings.check((9, 16))


def test_features_of_wide_and_tall_images_differ_but_not_in_number():
    pixels = torch.from_numpy(np.stack([framed(24, 16)] * 2)).permute(0, 3, 1, 2)
    for name in ("pixels", "texture"):
        features = open_features(name)
        wide, tall = features(pixels), features(pixels.transpose(2, 3))
        assert wide.shape == tall.shape


# What a run writes

SETTINGS: dict[str, Any] = {
    "network": "unet:channels=8/16,attention=0/0,mid_attention=0,norm_groups=4",
    "precision": "fp32",
    "device": "cpu",
    "batch": 8,
    "steps": 2,
    "size": "24x16",
    "data": {"held_out": 0.2},
    "preview": {"every": 2, "images": 2},
    "evaluate": {"every": 2, "images": 4, "levels": 2},
    "sampler": {"steps": 2},
}

BARE = SETTINGS | {"evaluate": {"every": -1}} | FEW_PICTURES


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(120):
        noisy = framed(48, 32).astype(int) + rng.integers(-30, 30, (32, 48, 3))
        (folder / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / "ab"[i % 2] / f"{i:03}.png")
    return folder


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNFOG_CACHE", str(tmp_path_factory.mktemp("cache")))
        return unfog.train(photos, out=tmp_path_factory.mktemp("run") / "wide", **SETTINGS)


@pytest.mark.slow
def test_a_run_on_wide_images_samples_edits_and_shows_them(run, photos):
    assert run.config.data.size == "24x16"
    assert 'size = "24x16"\n' in (run.path / "config.toml").read_text()
    assert run.sample(3).shape == (3, 16, 24, 3)
    assert "24x16 RGB" in repr(run)
    width, height = Image.open(max(run.path.glob("samples/*.png"))).size
    assert width > height
    picture = framed(48, 32)
    mask = np.zeros((32, 48), bool)
    mask[:, 24:] = True  # the right half is drawn anew
    drawn = run.sample(2, image=picture, mask=mask)
    assert drawn.shape == (2, 16, 24, 3)
    kept = decode(lambda: Image.fromarray(picture), WIDE, WHITE)[0].transpose(1, 2, 0)
    assert (drawn[:, :, :11] == kept[:, :11]).all()
    assert not (drawn[:, :, 13:] == kept[:, 13:]).all()
    with pytest.raises(RequestError, match="size of the image"):
        run.sample(1, image=picture, mask=mask.T)


@pytest.mark.slow
def test_a_run_on_wide_images_is_resumed_and_evaluated(run, photos, tmp_path):
    found = run.evaluate(["kid", "detail"], 16, features="pixels")
    assert {one.metric for one in found.measured} >= {"kid", "detail"}
    more = unfog.resume(run.path, steps=3)
    assert more.checkpoint.step == 3
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    for i, one in enumerate(more.sample(24)):
        Image.fromarray(one).save(drawn / f"{i}.png")
    compared = unfog.evaluate(drawn, photos, ["kid"], features="pixels")
    assert compared.drawn["size"] == "24x16"


@pytest.mark.slow
def test_a_run_on_wide_images_is_tuned_and_measured_in_bits_and_its_rate_found(run, photos):
    (bits,) = run.evaluate("bits", 16).measured
    assert 0 < bits.value < 50
    assert unfog.tune(run.path, steps=2, pictures=2, tries=2, store=False, device="cpu").reference > 0
    assert unfog.find_lr(photos, seconds=2, **BARE).usual > 0


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_two_processes_train_on_wide_images_as_one(photos, tmp_path):
    unfog.train(photos, out=tmp_path / "one", **BARE)
    words = [f"--{name}={BARE[name]}" for name in ("network", "precision", "device", "batch", "steps", "size")]
    words += ["--data.held-out", "0.2", *QUIET]
    output(
        forked(
            [2, 0, Path(unfog.__file__).with_name("__main__.py"), "train", photos, "--out", tmp_path / "two", *words],
            AGENT,
        )
    )
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", ["mpunet:channels=8/16,attention=0/1,head_channels=8", TRANSFORMER], ids=["mpunet", "dit"]
)
def test_other_networks_train_on_wide_images_from_square_weights(network, photos, tmp_path):
    unfog.train(photos, out=tmp_path / "square", **BARE | {"network": network, "size": 16})
    settings = {name: value for name, value in BARE.items() if name != "network"}
    tuned = unfog.train(photos, out=tmp_path / "tuned", init=str(tmp_path / "square"), **settings)
    assert tuned.sample(1).shape == (1, 16, 24, 3)


@pytest.mark.slow
def test_wide_latents_are_encoded_trained_on_and_decoded(photos, tmp_path):
    torch.manual_seed(0)
    network = AutoencoderModel(Autoencoder(factor=2, latent_channels=4, channels=(8,)), 3)
    save_autoencoder(tmp_path / "autoencoder", network)
    trained = unfog.train(photos, out=tmp_path / "run", autoencoder=str(tmp_path / "autoencoder"), **SETTINGS)
    assert trained.config.input_shape == (4, 8, 12)
    assert trained.sample(2).shape == (2, 16, 24, 3)
    with pytest.raises(RequestError, match=r"size = 24x15: both sides must be a multiple of 2 "):
        unfog.train(
            photos, out=tmp_path / "x", autoencoder=str(tmp_path / "autoencoder"), **SETTINGS | {"size": "24x15"}
        )


def test_an_edit_and_an_upload_are_brought_to_the_shape_of_the_run():
    config = Config(data=Data(size="24x16", channels=3))
    mask = np.zeros((32, 48), bool)
    mask[:, :24] = True
    edit = build_edit(config, framed(48, 32), mask, None, None)
    assert edit is not None
    assert edit.unknown is not None
    assert edit.image.shape == (3, 16, 24)
    assert is_upright(WIDE.to_pictures(edit.image[None])[0])
    assert edit.unknown.shape == (1, 16, 24)
    assert edit.unknown[0, :, :11].all()
    assert not edit.unknown[0, :, 13:].any()
    upload = at_run_size(framed(48, 32), WIDE)
    assert is_upright(upload)
    shown = np.asarray(Image.open(io.BytesIO(sheet([upload, None, upload], 3))))
    assert shown.shape == (16, 72, 3)
    assert is_upright(shown[:, 48:])


@pytest.mark.slow
def test_a_plan_and_the_doctor_take_wide_images(photos):
    words = {name: SETTINGS[name] for name in ("precision", "batch", "steps", "size")} | {"network": TRANSFORMER}
    assert "24x16" in str(unfog.plan(photos, **words))
    findings = {one.code: one for one in unfog.doctor(photos, **words)}
    assert "24x16" in findings["data.sizes"].evidence
    assert findings["data.crop"].evidence == "the images are of the shape of 24x16"
    findings = {one.code: one for one in unfog.doctor(photos, quick=True, **words | {"size": "16x24"})}
    assert "crop those to the shape of 16x24" in findings["data.crop"].remedy
