"""Image-to-image and inpainting, against the exact conditional distribution of a Gaussian and from the outside."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from command import exit_status
from conftest import TRANSFORMER
from unfog.diffusion.editing import Edit, renoise
from unfog.diffusion.noise import VE, VP, Cosine, Flow, LogitNormal, LogNormal, NoiseSource
from unfog.diffusion.sampler import Level, Sampler
from unfog.errors import RequestError
from unfog.pipeline.edit_images import build_edit
from unfog.pipeline.generate import interpolate_noise
from unfog.serve.run_files import decode_picture

PATHS = [(VP(), Cosine()), (VE(), LogNormal()), (Flow(), LogitNormal())]
MEAN, COVARIANCE = torch.tensor([0.1, -0.2]).double(), torch.tensor([[0.25, 0.2], [0.2, 0.25]]).double()
KNOWN = 0.6


def exact(path):
    """E[x0 | x_t] of a Gaussian of two correlated pixels, [N, 1, 1, 2]."""

    def denoise(x, logsnr):
        alpha, sigma = map(float, path(logsnr[:1].double()))
        gain = alpha * COVARIANCE @ torch.linalg.inv(alpha**2 * COVARIANCE + sigma**2 * torch.eye(2))
        return (MEAN + (x.flatten(1) - alpha * MEAN) @ gain.T).view_as(x)

    return denoise


def painted(path, schedule, kind, repeats, n=3000):
    """The second pixel, [N], painted beside the first one."""
    generator = torch.Generator().manual_seed(0)
    edit = Edit(torch.tensor([[[KNOWN, 0.9]]]), torch.tensor([[[False, True]]]), repeats=repeats)
    draw = lambda: torch.randn(n, 1, 1, 2, generator=generator, dtype=torch.float64)  # noqa: E731
    x0 = edit(Sampler(kind, 20, clip=False), exact(path), path, schedule, draw)
    assert (x0[..., 0] == torch.tensor(KNOWN)).all()
    return x0[:, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "schedule"), PATHS, ids=["vp", "ve", "flow"])
@pytest.mark.parametrize("kind", ["ddpm", "ddim", "heun", "dpmpp"])
def test_painted_beside_a_pixel_is_its_conditional_distribution(path, schedule, kind):
    gain = float(COVARIANCE[0, 1] / COVARIANCE[0, 0])
    mean = float(MEAN[1]) + gain * (KNOWN - float(MEAN[0]))
    deviation = math.sqrt(float(COVARIANCE[1, 1]) - gain * float(COVARIANCE[0, 1]))
    drawn = painted(path, schedule, kind, repeats=20)
    # Twenty steps are few, so 0.2 of the deviation; of the mean without the known pixel, it is 2 deviations away.
    assert abs(float(drawn.mean()) - mean) < 0.2 * deviation
    assert 0.75 * deviation < float(drawn.std()) < 1.2 * deviation


@pytest.mark.slow
def test_repeats_are_what_makes_it_fit():
    gaps = [abs(float(painted(*PATHS[2], "dpmpp", repeats).mean()) - 0.2) for repeats in (1, 4, 20)]
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]


def test_forward_process_between_two_levels():
    now, noisier = (Level(logsnr, *map(float, Flow()(torch.tensor(logsnr).double()))) for logsnr in (2.0, -1.0))
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(200_000, generator=generator).double() for _ in range(2)]
    x = renoise(now.alpha * 0.7 + now.sigma * noise[0], now, noisier, lambda: noise[1])
    assert float(x.mean()) == pytest.approx(noisier.alpha * 0.7, abs=5e-3)
    assert float(x.std()) == pytest.approx(noisier.sigma, rel=5e-3)


def stub(x, logsnr):
    return 0.8 * torch.tanh(x) + 0.1


@pytest.mark.parametrize(("path", "schedule"), PATHS, ids=["vp", "ve", "flow"])
def test_strength_goes_from_the_image_to_none_of_it(path, schedule):
    image = torch.rand(3, 4, 4) * 2 - 1
    parts = (stub, path, schedule)
    noise = lambda: NoiseSource(3, range(2), (3, 4, 4)).draw  # noqa: E731
    sampler = Sampler("dpmpp", 10)
    none = Edit(image, strength=0.0)(sampler, *parts, noise())
    assert torch.equal(none, image.expand(2, 3, 4, 4))
    whole = Edit(image, strength=1.0)(sampler, *parts, noise())
    assert torch.equal(whole, sampler(*parts, noise()))
    everywhere = torch.ones(1, 4, 4, dtype=torch.bool)
    assert torch.equal(Edit(image, everywhere, repeats=1)(replace(sampler, kind="ddim"), *parts, noise()),
                       replace(sampler, kind="ddim")(*parts, noise()))  # fmt: skip


def test_settings_that_are_none():
    for changes in ({"strength": 1.5}, {"strength": math.nan}, {"repeats": 0}):
        with pytest.raises(RequestError, match=next(iter(changes))):
            Edit(torch.zeros(1, 2, 2), **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(24):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")
    settings = {"network": TRANSFORMER, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"images": 4}}
    return unfog.train(folder, out=folder.with_name("run"), steps=2, sampler={"steps": 4}, **settings)


@pytest.fixture
def files(tmp_path):
    """An upright photograph of 12 x 8 that lies on its side in its file, and a mask that does not."""
    upright = np.random.default_rng(1).integers(0, 256, (8, 12, 3), np.uint8)
    lying = Image.fromarray(upright).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    lying.save(tmp_path / "photo.png", exif=exif)
    mask = np.zeros((8, 12), np.uint8)
    mask[:, 6:] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    return tmp_path, upright[:, 2:10], mask[:, 2:10]


@pytest.mark.slow
def test_known_pixels_stay_to_the_bit_and_files_as_they_are(run, files):
    folder, square, mask = files
    before = {path: path.read_bytes() for path in folder.iterdir()}
    drawn = run.sample(3, image=folder / "photo.png", mask=folder / "mask.png", repeats=2)
    assert (drawn[:, mask == 0] == square[mask == 0]).all()
    assert (drawn[:, mask == 255] != square[mask == 255]).mean() > 0.9
    assert len(np.unique(drawn, axis=0)) == 3
    again = run.sample(2, image=str(folder / "photo.png"), mask=folder / "mask.png", repeats=2, batch=1)
    assert np.abs(again.astype(int) - drawn[:2]).max() <= 1  # of floating-point sums
    other = run.sample(1, image=folder / "photo.png", mask=folder / "mask.png", repeats=2, seed=1)
    assert (other != drawn[:1]).any()
    arrays = run.sample(3, image=square, mask=mask == 255, repeats=2)
    assert np.array_equal(arrays, drawn)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "white",
    [
        *(np.uint8(1), np.uint16(1), np.uint16(255), np.uint16(40000), np.uint16(65535), np.int16(32767), np.int64(1)),
        *(np.uint32(2**32 - 1), np.float32(1), np.float32(255)),
    ],
    ids=lambda white: f"{white.dtype} {white}",
)
def test_a_mask_of_any_type_is_white_where_it_is_drawn(run, files, white):
    _, square, mask = files
    drawn = build_edit(run.config, square, (mask > 0) * white, None, None)
    assert np.array_equal(drawn.unknown[0], mask > 0)


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("white", [1, 255, 40000, 65535])
def test_a_mask_of_16_bits_in_a_file_or_upload_is_white_where_it_is_drawn(run, files, tmp_path, white, suffix):
    _, square, mask = files
    Image.fromarray(((mask > 0) * white).astype(np.uint16)).save(tmp_path / f"deep.{suffix}")
    drawn = build_edit(run.config, square, tmp_path / f"deep.{suffix}", None, None)
    assert np.array_equal(drawn.unknown[0], mask > 0)
    upload = np.asarray(decode_picture((tmp_path / f"deep.{suffix}").read_bytes(), "the upload"))
    assert np.array_equal(upload[..., 0] >= 128, mask > 0)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_a_mask_of_two_values_may_have_transparency_that_hides_nothing(run, files, tmp_path, mode):
    _, square, mask = files
    Image.fromarray((mask > 0).astype(np.uint8)).convert(mode).save(tmp_path / "mask.png")
    drawn = build_edit(run.config, square, tmp_path / "mask.png", None, None)
    assert np.array_equal(drawn.unknown[0], mask > 0)


@pytest.mark.parametrize("white", [np.nan, np.inf])
def test_a_mask_that_is_not_finite_is_refused(run, files, white):
    _, square, mask = files
    with pytest.raises(RequestError, match=r"mask .* floating point with (NaN|NaN or infinity) in it; give"):
        build_edit(run.config, square, np.where(mask > 0, white, 0), None, None)


def test_a_mask_of_many_values_is_white_from_half_of_its_range_on(run, files):
    _, square, _ = files
    ramp = np.linspace(0, 65535, 64).reshape(8, 8)
    for values in (ramp.astype(np.uint16), (ramp / 65535).astype(np.float32), (ramp / 257).astype(np.uint8)):
        assert build_edit(run.config, square, values, None, None).unknown.sum() == 32
    with pytest.raises(RequestError, match="32768"):
        build_edit(run.config, square, (ramp / 257).astype(np.uint16), None, None)


def test_strength_of_a_run(run, files):
    folder, square, _ = files
    photo = folder / "photo.png"
    assert (run.sample(2, image=photo, strength=0) == square).all()
    assert np.array_equal(run.sample(2, image=photo, strength=1.0), run.sample(2))
    assert np.array_equal(run.sample(2, image=photo, strength=0.6), run.sample(2, image=photo))


def test_command_draws_image_mask_and_pictures(run, files, capsys):
    folder, square, mask = files
    words = ["--image", folder / "photo.png", "--mask", folder / "mask.png", "-n", 2, "--repeats", 1]
    assert exit_status("sample", run.path, *words, "--out", folder / "out") == 0
    grid = np.asarray(Image.open(folder / "out" / "grid.png"))
    cell = 8 * 16
    grid = grid[-2 * cell - 2 :]  # without its caption
    assert (grid[:cell:16, :cell:16] == square).all()
    assert (grid[:cell:16, cell + 2 : 2 * cell + 2 : 16] == mask[..., None]).all()
    drawn = np.asarray(Image.open(folder / "out" / "000000.png"))
    assert (grid[cell + 2 :: 16, :cell:16][:8] == drawn).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mask", "mask.png"], "needs an image to edit"),
        (["--strength", "0.5"], "needs an image to edit"),
        (["--image", "nowhere.png"], "there is no such file"),
        (["--image", "words.txt"], "cannot be used"),
        (["--image", "photo.png", "--repeats", "3"], "give a mask"),
        (["--image", "photo.png", "--strength", "2"], "from 0"),
        (["--image", "photo.png", "--strength", "0.1", "--strip"], "strength = 0.1 leaves none of 4 steps to show"),
        (["--image", "photo.png", "--strength", "0", "--animate", "a.gif"], "leaves none of 4 steps to show"),
        (["--image", "photo.png", "--mask", "small.png"], "size of the image"),
        (["--image", "photo.png", "--mask", "black.png"], "no part of the mask is white: its brightest is 0 of 255"),
    ],
)
def test_what_cannot_be_edited(run, files, capsys, monkeypatch, words, said):
    folder, *_ = files
    monkeypatch.chdir(folder)
    (folder / "words.txt").write_text("no image")
    Image.new("L", (5, 5), 255).save("small.png")
    Image.new("L", (12, 8), 0).save("black.png")
    assert exit_status("sample", run.path, *words) == 2
    assert said in capsys.readouterr().err
    assert not (run.path / "pictures").exists()


def test_paint_that_is_no_white_is_named_with_its_brightness(run):
    """A layer with red on transparency: the mask is not "black everywhere"."""
    layer = np.zeros((8, 8, 4), np.uint8)
    layer[2:5] = 255, 0, 0, 255
    with pytest.raises(RequestError, match=r"its brightest is 76 of 255; .* transparent parts count as black"):
        run.sample(1, image=np.zeros((8, 8, 3), np.uint8), mask=layer)


def known_steps(kind, edit=None, until=None, images=3):
    """Steps seen of a batch of `images`, and what came out; stopped at the step `until`."""
    path, schedule = PATHS[2]
    draw = NoiseSource(0, range(images), (1, 2, 4)).draw
    seen = []

    def observe(step):
        seen.append(step)
        return step.number == until

    parts = (lambda x, logsnr: 0.5 * stub(x, logsnr), path, schedule, draw)
    return seen, (edit(Sampler(kind, 5), *parts, observe) if edit else Sampler(kind, 5)(*parts, observe))


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "heun", "edm", "dpmpp", "dpmpp-sde", "unipc", "adaptive"])
def test_sampling_ends_at_the_step_whose_observer_returns_true(kind):
    all_steps, _ = known_steps(kind)
    assert [step.number for step in all_steps] == list(range(len(all_steps)))
    assert len(all_steps) == 5 or kind == "adaptive"
    some, x = known_steps(kind, until=2)
    assert len(some) == 3
    assert (x == some[-1].x0).all()  # the last guess
    for a, b in zip(some, all_steps):
        assert (a.x_t == b.x_t).all()


def test_steps_of_edits_are_seen_and_end_too():
    image, unknown = torch.full((1, 2, 4), 0.25), torch.arange(8).reshape(1, 2, 4) > 3
    edit = Edit(image, strength=0.6)
    seen, drawn = known_steps("dpmpp", edit)
    assert [step.number for step in seen] == [0, 1, 2] == list(range(edit.steps(5)))
    assert (
        drawn
        == edit(Sampler("dpmpp", 5), lambda x, s: 0.5 * stub(x, s), *PATHS[2], NoiseSource(0, range(3), (1, 2, 4)).draw)
    ).all()
    painting = Edit(image, unknown, repeats=3)
    seen, drawn = known_steps("dpmpp", painting)
    assert [step.number for step in seen] == list(range(painting.steps(5))) == list(range(15))
    assert all((step.x0[..., ~unknown[0]] == 0.25).all() for step in seen)
    seen, stopped = known_steps("dpmpp", painting, until=7)
    assert len(seen) == 8
    assert (stopped[..., ~unknown[0]] == 0.25).all()
    assert (stopped != drawn).any()


def test_a_run_shows_each_step_of_each_batch_and_returns_finished_batches_when_it_is_stopped(run, files):
    _, square, mask = files
    seen = []
    whole = run.sample(5, batch=2, observe=seen.append)
    assert [(step.first, step.number, len(step.x_t)) for step in seen] == [
        (first, number, min(2, 5 - first)) for first in (0, 2, 4) for number in range(4)
    ]
    some = run.sample(5, batch=2, observe=lambda step: (step.first, step.number) == (4, 1))
    assert np.array_equal(some, whole[:4])
    none = run.sample(5, observe=lambda step: True, image=square, mask=mask)
    assert none.shape == (0, 8, 8, 3)
    assert run.calls == 0
    with pytest.raises(ZeroDivisionError):  # an observer that fails stops nothing
        run.sample(1, observe=lambda step: 1 / 0)


def test_samples_between_two_seeds(run):
    between = run.sample(5, seed=1, to_seed=2, batch=2)
    assert np.abs(between[0].astype(int) - run.sample(1, seed=1)[0]).max() <= 1
    assert np.abs(between[4].astype(int) - run.sample(1, seed=2)[0]).max() <= 1
    a, b = (torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    noise = interpolate_noise(a, b, [0, 0.25, 0.5, 1])
    assert (noise[0] == a).all()
    assert (noise[3] == b).all()
    assert noise.flatten(1).norm(dim=1).sub(a.norm()).abs().max() < abs(a.norm() - b.norm()) + 0.1
    assert (interpolate_noise(a, a, [0.3]) == a).all()


def test_noise_levels_of_a_drawing(run):
    levels = (1.0, 0.7, 0.4, 0.1)
    seen = []
    run.sample(1, levels=levels, observe=lambda step: seen.append(1 / (1 + math.exp(step.logsnr / 2))))
    assert seen == pytest.approx(levels)
    assert (run.sample(1, grid="karras") != run.sample(1)).any()
    with pytest.raises(RequestError, match="omit steps and grid"):
        run.sample(1, levels=levels, steps=3)
    with pytest.raises(RequestError, match="heun in 2 steps on this grid explodes"):
        run.sample(1, sampler="heun", grid="karras", steps=2)
