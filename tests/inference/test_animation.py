"""Animations of the denoising: a frame for each step, and the finished samples last."""

import numpy as np
import pytest
import torch
from PIL import Image

from unfog.cli.read_request import REQUESTS
from unfog.diffusion.noise import VE, Flow
from unfog.diffusion.steps import SamplingStep
from unfog.errors import RequestError
from unfog.pipeline import denoising_pictures
from unfog.pipeline.denoising_pictures import DenoisingAnimation
from unfog.runs import sample
from unfog.runs.sample import check_animation, observe_all
from unfog.values.image_format import ImageFormat

SAMPLES = np.random.default_rng(0).integers(0, 256, (20, 9, 9, 3), dtype=np.uint8)


def animated(steps=5, path=Flow()):  # noqa: B008 - frozen
    observer = DenoisingAnimation(path, steps, ImageFormat(3, 9, 9).to_view)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        logsnr = -8.0 + 16 * step / steps
        _, sigma = path(torch.tensor(logsnr))
        x_t, x0 = sigma * torch.randn(20, 3, 9, 9, generator=generator), torch.zeros(20, 3, 9, 9)
        observer(SamplingStep(step, logsnr, x_t, x0))
        observer(SamplingStep(step, logsnr, x_t, x0, first=20))  # later batches are not part of it
    return observer


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_every_step_is_a_frame_and_the_samples_are_the_last(tmp_path, suffix):
    file = tmp_path / f"denoising{suffix}"
    animated().save(file, SAMPLES)
    with Image.open(file) as image:
        assert (image.format, image.n_frames) == (suffix[1:].upper(), 6)
        times = []
        for number in range(6):
            image.seek(number)
            image.load()
            times.append(image.info["duration"])
        last = np.asarray(image.convert("RGB")).astype(float)
    assert times == [200] * 5 + [1500]
    expected = denoising_pictures.grid(SAMPLES[:16])
    assert last.shape == expected.shape
    assert np.abs(last - expected).mean() < 25  # 256 colours, or a lossy format


@pytest.mark.slow
def test_an_mp4_can_be_decoded(tmp_path):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    animated().save(tmp_path / "denoising.mp4", SAMPLES)
    frames = imageio_ffmpeg.read_frames(str(tmp_path / "denoising.mp4"))
    width, height = next(frames)["size"]
    pictures = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames]
    assert len(pictures) == 6 + 8
    expected = denoising_pictures.grid(SAMPLES[:16])
    assert (height, width) == tuple(side + side % 2 for side in expected.shape[:2])
    assert np.abs(pictures[-1][: expected.shape[0], : expected.shape[1]].astype(float) - expected).mean() < 25


def test_noise_is_as_strong_on_every_path_and_long_runs_leave_steps_out():
    for path in (VE(), Flow()):
        first = animated(5, path)._frames[0].astype(float) / 127.5 - 1
        assert 0.6 < first.std() < 0.8  # of noise clipped to [-1, 1]
    assert len(animated(1000)._frames) == 112


def test_a_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    kind = REQUESTS["sample"]
    with pytest.raises(RequestError, match=r"a\.avi must end in \.gif"):
        kind(run=tmp_path, animate=tmp_path / "a.avi")
    (tmp_path / "a.gif").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="exists"):
        check_animation(tmp_path / "a.gif")
    with pytest.raises(RequestError, match="is not a folder"):
        check_animation(tmp_path / "nowhere" / "a.gif")
    monkeypatch.setattr(sample, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install .*\[video\]"):
        check_animation(tmp_path / "a.mp4")


def test_several_observers_see_the_same_steps():
    seen = []
    both = observe_all(None, lambda step: seen.append(("one", step)), lambda step: seen.append(("two", step)))
    both("step")
    assert seen == [("one", "step"), ("two", "step")]
    assert observe_all(None, None) is None
