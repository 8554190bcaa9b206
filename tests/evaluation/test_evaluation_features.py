import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unfog.errors import RequestError
from unfog.evaluation import feature_networks
from unfog.evaluation.feature_networks import (  # compared with the resize of TensorFlow 1
    INCEPTION_FILE,
    _antialiased,
    _tf1_bilinear,
    inception_path,
    parse_network_file,
)
from unfog.evaluation.features import open_features
from unfog.evaluation.metrics import is_inception

INCEPTION = inception_path()
"""Of whoever runs the tests, which have a cache of their own later."""


def pixels(n: int = 4, channels: int = 3, side: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, channels, side, side), generator=torch.Generator().manual_seed(seed)).byte()


def one_by_one(image: np.ndarray, size: int) -> np.ndarray:
    """TensorFlow 1's bilinear resize of [H, W] in plain Python: no half-pixel centres, the last pixel repeated."""
    height, width = image.shape
    out = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            y, x = i * height / size, j * width / size
            top, left = math.floor(y), math.floor(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            across = [(1 - x + left) * image[k, left] + (x - left) * image[k, right] for k in (top, bottom)]
            out[i, j] = (1 - y + top) * across[0] + (y - top) * across[1]
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("side", "size"), [(32, 299), (28, 299), (31, 40), (64, 50), (400, 299), (5, 5)])
def test_the_resize_is_that_of_tensorflow_1(side, size):
    image = pixels(1, 1, side).float()
    expected = one_by_one(image[0, 0].numpy(), size)
    assert np.abs(_tf1_bilinear(image, size)[0, 0].numpy() - expected).max() < 255 * 4e-5


def test_the_resize_repeats_the_end_and_has_no_half_pixel():
    ramp = torch.tensor([0.0, 10, 20, 30]).expand(1, 1, 4, 4)
    assert _tf1_bilinear(ramp, 8)[0, 0, 0].tolist() == [0, 5, 10, 15, 20, 25, 30, 30]
    wide = torch.tensor([0.0, 10, 20, 30]).expand(1, 1, 2, 4)
    assert _tf1_bilinear(wide, 2)[0, 0, 0].tolist() == [0, 20]


class Net(nn.Module):
    """Says what it saw: mean and extremes of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean((2, 3)), x.amin((2, 3)), x.amax((2, 3))], 1)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    torch.jit.script(Net()).save(tmp_path / "net.pt")
    return tmp_path / "net.pt"


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [("unit", 0, 1), ("symmetric", -1, 1), ("inception", -1, 127 / 128), ("bytes", 0, 255)],
)
def test_a_torchscript_file_is_fed_as_its_options_say(net, values, low, high):
    x = torch.zeros(1, 3, 6, 6, dtype=torch.uint8)
    x[:, :, :3] = 255
    y = open_features(f"{net}:range={values},size=0")(x)
    assert y.dtype == torch.float32
    assert y[0, 3:].tolist() == pytest.approx([low] * 3 + [high] * 3, abs=1e-6)
    assert y[0, :3].tolist() == pytest.approx([(low + high) / 2] * 3, abs=1e-6)


def test_imagenet_scaling_is_by_channel(net):
    y = open_features(f"{net}:range=imagenet,size=0")(torch.full((1, 3, 4, 4), 255, dtype=torch.uint8))
    expected = [(1 - m) / s for m, s in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]
    assert y[0, :3].tolist() == pytest.approx(expected, abs=1e-5)


def test_features_have_names_that_tell_them_apart(net):
    one, two = open_features(f"{net}:size=16"), open_features(f"{net}:size=24,resize=tf1")
    moved = net.rename(net.with_name("moved.pt"))
    again = open_features(f"{moved}:size=16")
    assert again.digest == one.digest != two.digest
    assert one.name.startswith("net@")
    assert one.name.split("@")[1] == again.name.split("@")[1]
    assert (one.resize, two.resize) == ("bicubic antialiased 16", "TF1 bilinear 24")
    assert not is_inception(one)


def test_a_network_is_in_evaluation_mode_and_in_full_precision(tmp_path):
    torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Dropout(0.5))).save(tmp_path / "net.pt")
    features, x = open_features(f"{tmp_path}/net.pt:size=0"), pixels(side=4)
    plain = features(x)
    with torch.autocast("cpu", torch.bfloat16):
        inside = features(x)
    assert torch.equal(plain, inside)
    for _ in range(3):  # a profiling executor would fuse by now
        assert torch.equal(plain, features(x))


def test_grey_is_the_rgb_of_it(net):
    grey = pixels(channels=1)
    for features in (open_features("pixels"), open_features("texture"), open_features(str(net))):
        assert torch.equal(features(grey), features(grey.expand(-1, 3, -1, -1)))


def test_pixels_are_means_over_parts():
    x = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    x[0, 1, :2, :2] = 255
    y = open_features("pixels")(x).view(3, 8, 8)
    assert y[1, 0, 0] == 1
    assert y.sum() == 1
    assert open_features("pixels")(pixels(side=5)).shape == (4, 192)


def test_texture_sees_every_scale_and_nothing_of_a_flat_picture():
    flat = torch.full((1, 3, 32, 32), 128, dtype=torch.uint8)
    y = open_features("texture")(torch.cat([flat, flat, flat]))
    assert y.shape == (3, 33 * 4)
    assert y.unique().numel() < 10
    stripes = flat.clone()
    stripes[:, :, :, ::2] = 160
    coarse = flat.clone()
    coarse[:, :, :16] = 160
    moved = open_features("texture")(torch.cat([flat, stripes, coarse])) - y
    fine, across = slice(3, 33), slice(3, 6)  # of luma, the three directions of the pixels' own scale
    assert moved[1, across].tolist() == pytest.approx([math.log(32 / 255 * 512 + 1), 0, 0], abs=1e-3)
    assert moved[1, 36:].abs().max() < 1e-3  # means over two pixels see no stripes
    assert moved[2, fine].abs().max() > 0.5
    assert moved[2, 102:].abs().max() > 3
    assert open_features("texture")(pixels(side=28)).shape == (4, 33 * 3)
    assert open_features("texture")(pixels(side=4)).shape == (4, 33)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 2, 8, 8), (1, 4, 8, 8)])
def test_what_is_no_picture_is_refused(shape):
    with pytest.raises(RequestError, match="give uint8"):
        open_features("pixels")(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(RequestError, match="give uint8"):
        open_features("pixels")(torch.zeros(1, 3, 8, 8))


def test_a_network_that_gives_no_row_a_picture_is_refused(tmp_path):
    torch.jit.script(nn.AvgPool2d(2)).save(tmp_path / "net.pt")
    with pytest.raises(RequestError, match=r"must be \[N, D\]"):
        open_features(f"{tmp_path}/net.pt")(pixels())


def test_inception_that_is_not_there_says_where_it_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path))
    assert inception_path() == tmp_path / INCEPTION_FILE
    with pytest.raises(RequestError, match=f"needs {tmp_path / INCEPTION_FILE}"):
        open_features("inception")
    monkeypatch.setenv("UNFOG_INCEPTION", str(tmp_path / "elsewhere.pt"))
    assert inception_path() == tmp_path / "elsewhere.pt"


@pytest.mark.slow
@pytest.mark.skipif(not INCEPTION.is_file(), reason="there is no Inception network in the cache folder")
def test_inception_sees_what_tensorflow_would_have_given_it(monkeypatch):
    monkeypatch.setenv("UNFOG_INCEPTION", str(INCEPTION))
    features, x = open_features("inception"), pixels(2, side=32)
    resized = [[one_by_one(channel.numpy().astype(float), 299) for channel in image] for image in x]
    network = torch.jit.load(inception_path()).eval()
    with torch.inference_mode():
        expected = network((torch.tensor(np.array(resized)).float() - 128) / 128)
    found = features(x)
    assert found.shape == (2, 2048)
    assert is_inception(features)
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert open_features(str(inception_path()), only_known=True).digest == features.digest


def test_another_network_does_not_pass_for_inception(monkeypatch, net):
    monkeypatch.setenv("UNFOG_INCEPTION", str(net))
    with pytest.raises(RequestError, match="SHA-256"):
        open_features("inception")


def test_a_file_is_not_run_where_only_the_known_one_may_be(net):
    with pytest.raises(RequestError, match="give it yourself"):
        open_features(str(net), only_known=True)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("inceptoin", "not inception, texture"),
        ("{}/none.pt", "cannot be read"),
        ("{}/net.pt:sise=3", "no option 'sise'"),
        ("{}/net.pt:size=big", "number of pixels"),
        ("{}/net.pt:range=bright", "one of unit"),
        ("{}/net.pt:resize=nearest", "bicubic or tf1"),
        ("{}/net.pth", "ends in .pt"),
    ],
)
def test_a_name_that_is_none_is_refused(net, text, match):
    with pytest.raises(RequestError, match=match):
        open_features(text.format(net.parent))


def test_options_stand_after_the_path():
    found = parse_network_file("C:/nets/a.pt.b.pt:size=96,range=unit,resize=tf1")
    assert (found.path, found.size, found.range, found.resize) == ("C:/nets/a.pt.b.pt", 96, "unit", "tf1")


def test_shrinking_smooths_first():
    stripes = torch.zeros(1, 1, 64, 64)
    stripes[..., ::2] = 255
    assert (_antialiased(stripes, 13)[..., 2:-2] - 127.5).abs().max() < 5


@pytest.mark.parametrize(("device", "last"), [("cpu", True), ("cuda", False)])
def test_a_feature_network_gets_channels_last_on_a_cpu_alone(device, last, monkeypatch):
    """In fp32 without TF32 it is the slower way of cuDNN."""
    seen = []

    def network(x):
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return x.mean((2, 3))

    # What the device is called is all that is asked of it.
    monkeypatch.setattr(feature_networks, "_CHANNELS_LAST_ON", {"cpu": ("cpu",), "cuda": ()}[device])
    settings = feature_networks._NetworkInput("", 0, "inception", "tf1")
    feature_networks._TorchScriptNetwork(network, "", "", settings)(torch.zeros(2, 3, 8, 8))
    assert seen == [last]
    monkeypatch.undo()
    assert feature_networks._CHANNELS_LAST_ON == ("cpu",)
