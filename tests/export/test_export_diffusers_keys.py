"""Our U-Net against diffusers' UNet2DModel, an independent implementation of the same function."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unfog.errors import RequestError
from unfog.export.diffusers_unet import (  # both directions of the map of names
    Network,
    _from_unet2d_state,
    _to_unet2d_state,
)
from unfog.models.settings import SIZES, UNet
from unfog.models.unet import UNetModel
from unfog.values.condition_format import ConditionFormat

PLAIN = {"block_out_channels": (32, 64), "down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
CONFIGS = {
    "diffusers' defaults, narrow": {"block_out_channels": (32, 64, 96, 128)},
    "ddpm-cifar10, narrow": {
        "block_out_channels": (32, 64, 64, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": None,
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
    },
    "scale and shift, grey": {
        **PLAIN,
        "in_channels": 1,
        "out_channels": 1,
        "resnet_time_scale_shift": "scale_shift",
        "attn_norm_num_groups": 32,
    },
    "classes": {**PLAIN, "num_class_embeds": 11, "layers_per_block": 1},
    "no attention in the middle": {**PLAIN, "add_attention": False, "layers_per_block": 3},
    "odd channels": {
        "block_out_channels": (9, 15),
        "norm_num_groups": 3,
        "down_block_types": ("AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D"),
        "attention_head_dim": 3,
        "layers_per_block": 1,
    },
    "one level": {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)},
}
# google/ddpm-cifar10-32, config.json.
DDPM_CIFAR10 = {
    "act_fn": "silu",
    "attention_head_dim": None,
    "block_out_channels": [128, 256, 256, 256],
    "center_input_sample": False,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "in_channels": 3,
    "layers_per_block": 2,
    "mid_block_scale_factor": 1,
    "norm_eps": 1e-06,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 32,
    "time_embedding_type": "positional",
    "up_block_types": ["UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
}


def scatter_(model: torch.nn.Module) -> None:
    """Move every weight off its initial value, so that no two norms are alike and no branch is silent."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5


def build(network: Network) -> UNetModel:
    model = UNetModel(network.settings, network.image_channels, ConditionFormat.numbered(network.num_classes))
    model.load_state_dict(network.state, strict=True)
    return model


def inputs(network: Network, height: int, width: int, dtype: torch.dtype = torch.float32):
    x = torch.randn(3, network.image_channels, height, width, dtype=dtype)
    timestep = torch.tensor([0.0, 371.25, 999.0])
    label = torch.tensor([0, network.num_classes // 2, network.num_classes]) if network.num_classes else None
    return x, timestep, label


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request) -> tuple[UNet2DModel, UNetModel, Network]:
    torch.manual_seed(0)
    theirs = UNet2DModel(**request.param)
    scatter_(theirs)
    network = Network.from_unet2d(request.param, theirs.state_dict())
    return theirs.eval(), build(network).eval(), network


@pytest.mark.slow
def test_outputs_equal_at_square_and_other_sizes(pair):
    theirs, ours, network = pair
    factor = 2 ** (len(network.settings.channels) - 1)
    for height, width in ((2 * factor, 2 * factor), (factor, 3 * factor)):
        x, timestep, label = inputs(network, height, width)
        with torch.no_grad():
            expected = theirs(x, timestep, class_labels=label).sample
            torch.testing.assert_close(ours(x, timestep, label), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_gradients_equal(pair):
    # In float64, so that a gradient that is wrong by little cannot hide behind rounding.
    theirs, ours, network = pair
    theirs, ours = theirs.double(), ours.double()
    factor = 2 ** (len(network.settings.channels) - 1)
    x, timestep, label = inputs(network, 2 * factor, factor, torch.float64)
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_theirs = theirs(x_theirs, timestep, class_labels=label).sample
    y_ours = ours(x_ours, timestep, label)
    weight = torch.randn_like(x)
    (y_theirs * weight).sum().backward()
    (y_ours * weight).sum().backward()
    torch.testing.assert_close(x_ours.grad, x_theirs.grad, atol=1e-9, rtol=1e-9)
    gradients = _to_unet2d_state({name: p.grad for name, p in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        scale = parameter.grad.abs().max()
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-9 * scale + 1e-11, name


@pytest.mark.slow
def test_round_trip_is_exact_and_strict(pair):
    theirs, ours, network = pair
    config, state = network.to_unet2d(size=16)
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())
    again = UNet2DModel(**config)
    again.load_state_dict(state, strict=True)
    x, timestep, label = inputs(network, 16, 16)
    with torch.no_grad():
        expected = theirs(x, timestep, class_labels=label).sample
        assert torch.equal(again.eval()(x, timestep, class_labels=label).sample, expected)
    back = Network.from_unet2d(again.config, state)
    assert back[:3] == network[:3]
    assert all(torch.equal(back.state[name], tensor) for name, tensor in ours.state_dict().items())


@st.composite
def unets(draw) -> UNet:
    groups = draw(st.sampled_from([1, 2, 4]))
    channels = tuple(8 * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return UNet(
        channels=channels,
        blocks=draw(st.integers(1, 2)),
        attention=tuple(draw(st.booleans()) for _ in channels),
        mid_attention=draw(st.booleans()),
        head_channels=draw(st.sampled_from([0, 2, 8])),
        norm_groups=groups,
        norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        scale_shift=draw(st.booleans()),
        freq_shift=draw(st.integers(0, 1)),
        flip_sin_to_cos=draw(st.booleans()),
        downsample_padding=draw(st.sampled_from([0, 1])),
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(unets(), st.sampled_from([1, 3, 4]), st.sampled_from([0, 1, 10]))
def test_any_settings_export_to_the_same_function(unet: UNet, image_channels: int, num_classes: int):
    torch.manual_seed(0)
    model = UNetModel(unet, image_channels, ConditionFormat.numbered(num_classes)).eval()
    scatter_(model)
    network = Network(unet, image_channels, num_classes, model.state_dict())
    config, state = network.to_unet2d(size=8)
    theirs = UNet2DModel(**config).eval()
    theirs.load_state_dict(state, strict=True)
    x, timestep, label = inputs(network, 8, 4)
    with torch.no_grad():
        expected = theirs(x, timestep, class_labels=label).sample
        torch.testing.assert_close(model(x, timestep, label), expected, atol=1e-5, rtol=1e-5)
    assert Network.from_unet2d(config, state)[:3] == network[:3]


@pytest.mark.slow
def test_no_label_is_the_last_class_of_the_export():
    torch.manual_seed(0)
    model = UNetModel(SIZES["tiny"], 1, ConditionFormat.numbered(10)).eval()
    scatter_(model)
    config, state = Network(SIZES["tiny"], 1, 10, model.state_dict()).to_unet2d(size=28)
    assert config["num_class_embeds"] == 11
    theirs = UNet2DModel(**config).eval()
    theirs.load_state_dict(state)
    x, timestep = torch.randn(2, 1, 28, 28), torch.tensor([3.0, 500.0])
    with torch.no_grad():
        expected = theirs(x, timestep, class_labels=torch.tensor([10, 10])).sample
        torch.testing.assert_close(model(x, timestep), expected, atol=1e-5, rtol=1e-5)


def test_classes_without_a_null_class_get_one():
    theirs = UNet2DModel(**PLAIN, num_class_embeds=10)
    config, state = {**PLAIN, "num_class_embeds": 10}, theirs.state_dict()
    assert Network.from_unet2d(config, state).num_classes == 9
    network = Network.from_unet2d(config, state, null_class=False)
    assert network.num_classes == 10
    rows = build(network).class_embedding.weight
    assert torch.equal(rows[:10], state["class_embedding.weight"])
    torch.testing.assert_close(rows[10], state["class_embedding.weight"].mean(dim=0))
    with pytest.raises(RequestError, match="null_class=False"):
        Network.from_unet2d({**PLAIN, "num_class_embeds": 1}, {})


def test_cifar10_is_the_published_network():
    config, _ = Network(SIZES["cifar10"], 3, 0, {}).to_unet2d(size=32)
    published = {**DDPM_CIFAR10, "dropout": 0.1}  # the paper's; a published file is for sampling and leaves it out
    assert {key: config[key] for key in published if key in config} == {
        k: published[k] for k in published if k in config
    }
    assert Network.from_unet2d(published, {}).settings == SIZES["cifar10"]


def test_exported_weights_share_no_memory():
    # safetensors refuses to write tensors that overlap.
    model = UNetModel(SIZES["tiny"], 1, ConditionFormat())
    state = _to_unet2d_state(model.state_dict())
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    assert all(tensor.is_contiguous() for tensor in state.values())


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("act_fn", "mish", "'silu'"),
        ("time_embedding_type", "fourier", "'positional'"),
        ("time_embedding_dim", 512, "None"),
        ("mid_block_type", None, "UNetMidBlock2D"),
        ("downsample_type", "resnet", "'conv'"),
        ("class_embed_type", "timestep", "None"),
        ("center_input_sample", True, "False"),
        ("resnet_time_scale_shift", "spatial", "'scale_shift'"),
        ("resnet_time_scale_shift", "scale_shift", "attn_norm_num_groups"),
        ("attn_norm_num_groups", 16, "norm_num_groups = 32"),
        ("down_block_types", ("SkipDownBlock2D", "DownBlock2D"), "AttnDownBlock2D"),
        ("up_block_types", ("AttnUpBlock2D", "UpBlock2D"), "mirror"),
        ("out_channels", 6, "in_channels = 3"),
        ("a_setting_of_tomorrow", 1, "a_setting_of_tomorrow"),
        ("block_out_channels", 32, "like (224, 448, 672, 896)"),
        ("block_out_channels", [32, "x"], "like (224, 448, 672, 896)"),
        ("layers_per_block", None, "like 2"),
        ("layers_per_block", "2", "like 2"),
        ("down_block_types", None, "like ('DownBlock2D'"),
        ("dropout", "x", "like 0.0"),
        ("norm_eps", [1e-5], "like 1e-05"),
        ("attention_head_dim", [8, 8], "like 8"),
        ("add_attention", "yes", "like True"),
        ("num_class_embeds", "10", "like 2"),
    ],
)
def test_refuses_configurations_without_equivalent(key, value, rule):
    with pytest.raises(RequestError, match="no equivalent") as refused:
        Network.from_unet2d({**PLAIN, key: value}, {})
    assert rule in str(refused.value)


def test_refuses_a_scaled_condition():
    with pytest.raises(RequestError, match=r"time_scale = 1000.* has no equivalent"):
        Network(UNet(time_scale=1000.0), 3, 0, {}).to_unet2d(size=32)


def test_refuses_unknown_weights():
    for name in (
        "mid_block.attentions.0.query.weight",
        "mid_block.attentions.0.q.weight",
        "conv_in.weight.extra",
        "conv_in",
    ):
        with pytest.raises(RequestError, match="save it again"):
            _from_unet2d_state({name: torch.zeros(1)})


def test_what_tells_of_an_augmentation_is_left_out_as_samples_have_none():
    torch.manual_seed(0)
    model = UNetModel(SIZES["tiny"], 1, ConditionFormat.numbered(augment_inputs=9)).eval()
    torch.nn.init.normal_(model.conv_out.weight)
    config, state = Network(SIZES["tiny"], 1, 0, model.state_dict()).to_unet2d(size=16)
    theirs = UNet2DModel(**config).eval()
    theirs.load_state_dict(state)
    x, t = torch.randn(2, 1, 16, 16), torch.tensor([3, 800])
    with torch.no_grad():
        torch.testing.assert_close(theirs(x, t).sample, model(x, t.float()), rtol=1e-4, atol=1e-4)
