"""What every network must do alike: begin as zero, heed what it is told, repeat itself, go on after a stop."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from unfog.config import spec_strings as kinds
from unfog.config.schema import Config, Network
from unfog.config.toml import from_toml, to_toml
from unfog.data.augmentation import Augment
from unfog.data.dataset import ImageSet
from unfog.data.settings import Data
from unfog.data.stream import ImageStream
from unfog.diffusion.objective import Objective
from unfog.errors import RequestError
from unfog.export.diffusers_unet import Network as Exported
from unfog.models import layers
from unfog.models.network_settings import build_model
from unfog.models.settings import ARCHITECTURES, SIZES, DiT, MPUNet, UNet
from unfog.pipeline import build
from unfog.pipeline.build import build_network, build_state
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.flops import NetworkCost
from unfog.planning.memory_estimate import (  # traces are compared, of which the program shows sums
    MemoryEstimator,
    _trace_step,
    _TracedStep,
)
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.load import load_checkpoint
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.learning_rate import default_learning_rate
from unfog.training.loop import LoopSettings, train
from unfog.training.settings import AdamW, Muon, Optimizer, Training
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions

CPU = torch.device("cpu")
MICRO = {
    "unet": UNet(channels=(16, 32), attention=(False, True), head_channels=8, norm_groups=4),
    "mpunet": MPUNet(channels=(8, 16), attention=(False, True), head_channels=8),
    "dit": DiT(width=32, depth=2, head_channels=8),
    "dit-block": DiT(width=32, depth=2, head_channels=8, modulation="block"),
}
NEW = [name for name in MICRO if name != "unet"]


def scattered(settings, image_channels=1, num_classes=0, augment_inputs=0, **more):
    """A network whose zeros are gone."""
    torch.manual_seed(0)
    model = build_model(settings, image_channels, ConditionFormat.numbered(num_classes, augment_inputs), **more)
    for parameter in model.parameters():
        size = max(1, parameter[0].numel() if parameter.ndim else 1)
        parameter.data += 0.3 * torch.randn_like(parameter) / size**0.5
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("mp-tiny", 1.11),
        ("mp-small", 4.14),
        ("mp-base", 34.63),
        ("dit-tiny", 0.96),
        ("dit-small", 5.38),
        ("dit-base", 34.17),
    ],
)
def test_parameter_counts(name, millions):
    with torch.device("meta"):
        model = build_model(SIZES[name], 3)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_every_size_begins_as_zero(name):
    torch.manual_seed(0)
    model = build_model(SIZES[name], 1, ConditionFormat.numbered(3, 9)).eval()
    with torch.no_grad():
        y = model(
            torch.randn(2, 1, 16, 16), torch.tensor([0.0, 900.0]), Conditions(torch.tensor([0, 3]), torch.randn(2, 9))
        )
    assert torch.equal(y, torch.zeros(2, 1, 16, 16))


@pytest.mark.slow
@pytest.mark.parametrize("settings", MICRO.values(), ids=MICRO)
def test_every_parameter_learns(settings):
    # The last layer moves in the first update, what scales a branch in the second, the rest from then on.
    torch.manual_seed(0)
    model = build_model(settings, 1, ConditionFormat.numbered(2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, c_noise, label = torch.randn(8, 1, 8, 8), torch.rand(8) * 1000, torch.arange(8) % 3
    silent = set()
    for _ in range(5):
        optimizer.zero_grad()
        (model(x, c_noise, Conditions(label, torch.randn(8, 9))) - x).square().mean().backward()
        silent = {name for name, p in model.named_parameters() if not p.grad.any()}
        optimizer.step()
    assert silent == set()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lr"), [("unet", 3e-3), *((name, 1e-2) for name in NEW)])
def test_learns_what_a_label_means(name, lr):
    torch.manual_seed(0)
    model = build_model(MICRO[name], 1, ConditionFormat.numbered(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    label = torch.tensor([0, 1, 2]).repeat(4)
    goal = torch.tensor([-1.0, 1.0, 0.0]).repeat(4)[:, None, None, None].expand(-1, 1, 8, 8)
    for _ in range(80):
        loss = (model(torch.randn(12, 1, 8, 8), torch.rand(12) * 1000, label) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1  # two thirds when the label is not seen


@pytest.mark.slow
@pytest.mark.parametrize("settings", MICRO.values(), ids=MICRO)
def test_output_depends_on_label_noise_augmentation_and_image(settings):
    model = scattered(settings, 1, 2, 9).eval()
    x, c_noise, label = torch.randn(1, 1, 8, 8), torch.tensor([3.0]), torch.tensor([0])
    told = torch.zeros(1, 9)
    with torch.no_grad():
        y = model(x, c_noise, Conditions(label, told))
        assert torch.equal(model(x, c_noise, label), y)
        for other in (
            model(x, c_noise, label + 1),
            model(x, c_noise + 1, label),
            model(x + 0.1, c_noise, label),
            model(x, c_noise, Conditions(label, told + 1)),
        ):
            assert (other - y).abs().max() > 1e-4


@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
def test_no_label_is_the_null_class_and_nothing_else_is_taken(settings):
    model = scattered(settings, 1, 2).eval()
    x, c_noise = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 4.0])
    assert torch.equal(model(x, c_noise), model(x, c_noise, torch.tensor([2, 2])))
    assert not torch.equal(model(x, c_noise), model(x, c_noise, torch.tensor([1, 1])))
    with pytest.raises(RequestError, match="without classes"):
        build_model(settings, 1)(x, c_noise, torch.tensor([0, 0]))
    with pytest.raises(RequestError, match=r"data\.augment"):
        model(x, c_noise, Conditions(augment=torch.zeros(2, 9)))


@pytest.mark.parametrize("settings", MICRO.values(), ids=MICRO)
def test_a_network_that_is_told_begins_as_one_that_is_not(settings):
    states = []
    for inputs in (0, 9):
        torch.manual_seed(0)
        states.append(build_model(settings, 1, ConditionFormat.numbered(2, inputs)).state_dict())
    states[1].pop("augment_embedding.weight")
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("settings", MICRO.values(), ids=MICRO)
def test_images_do_not_see_each_other(settings):
    model = scattered(settings).eval()
    x, c_noise = torch.randn(3, 1, 8, 8), torch.tensor([0.0, 10.0, 999.0])
    with torch.no_grad():
        together = model(x, c_noise)
        alone = torch.cat([model(x[i : i + 1], c_noise[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", MICRO.values(), ids=MICRO)
def test_output_channels_and_sides_that_differ(settings):
    model = scattered(settings, 3, out_channels=6).eval()
    x, c_noise = torch.randn(2, 3, 8, 16), torch.tensor([3.0, 4.0])
    with torch.no_grad():
        y = model(x, c_noise)
    assert y.shape == (2, 6, 8, 16)
    assert min(y[:, i].std() for i in range(6)) > 0.1 * y.std()
    assert build_model(settings, 3)(x, c_noise).shape == x.shape
    settings.check((8, 16))


@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
def test_time_scale_multiplies_the_condition(settings):
    scaled, x = scattered(replace(settings, time_scale=250.0)), torch.randn(2, 1, 8, 8)
    plain = scattered(settings)
    assert torch.equal(scaled(x, torch.tensor([1.0, -0.5])), plain(x, torch.tensor([250.0, -125.0])))


@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
def test_dropout_only_while_training(settings):
    model = scattered(replace(settings, dropout=0.5))
    x, c_noise = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 4.0])
    assert not torch.equal(model.train()(x, c_noise), model(x, c_noise))
    assert torch.equal(model.eval()(x, c_noise), model(x, c_noise))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_close_to_float32(settings, dtype):
    model = scattered(settings, 3, 4)
    x, c_noise, label = torch.randn(4, 3, 16, 16), torch.rand(4) * 1000, torch.arange(4)
    parameters = list(model.parameters())

    def answer() -> tuple[torch.Tensor, torch.Tensor]:
        y = model(x, c_noise, label)
        gradient = torch.autograd.grad(y.float().square().mean(), parameters)
        return y, torch.cat([g.flatten() for g in gradient])

    exact, gradient = answer()
    with torch.autocast("cpu", dtype):
        rough, rough_gradient = answer()
    assert rough.dtype == dtype
    assert (rough.float() - exact).square().mean() < (0.02 * exact.std()) ** 2
    assert (rough_gradient - gradient).norm() < 0.05 * gradient.norm()


def test_pixels_are_repeated_as_by_interpolation():
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    ways = layers._expand_pixels(x), layers.repeat_pixels(x)
    weights = torch.randn_like(ways[0])
    assert torch.equal(*ways)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in ways))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
def test_compiles_to_one_graph(settings):
    model = scattered(settings, 1, 2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x, c_noise, label = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 4.0]), torch.tensor([0, 2])
    assert torch.equal(compiled(x, c_noise, label), model(x, c_noise, label))


@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
@pytest.mark.parametrize("bf16", [False, True])
def test_checkpointing_changes_no_bit(settings, bf16):
    model = scattered(replace(settings, dropout=0.3), num_classes=2)

    def gradients() -> list[torch.Tensor]:
        """Of one step with dropout, and the random number that follows it."""
        model.zero_grad()
        torch.manual_seed(1)
        x, c_noise, label = torch.randn(3, 1, 8, 8), torch.rand(3) * 1000, torch.tensor([0, 1, 2])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x, c_noise, label)
        output.float().square().sum().backward()
        return [output, torch.rand(1), *(p.grad.clone() for p in model.parameters())]

    plain = gradients()
    assert all(gradient.any() for gradient in plain)
    model.checkpointing = True
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients()))


@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
def test_checkpointing_without_dropout_asks_for_no_random_state(settings, monkeypatch):
    """In a CUDA graph that is an error."""
    model, x, c_noise = scattered(replace(settings, dropout=0.0)), torch.randn(3, 1, 8, 8), torch.rand(3) * 1000
    model(x, c_noise).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.checkpointing = True
    monkeypatch.delattr(torch, "get_rng_state")
    model(x, c_noise).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters()))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("settings", [MICRO["unet"], MICRO["mpunet"]], ids=["unet", "mpunet"])
def test_channels_last_computes_the_same_in_another_order(settings, channels):
    model = scattered(settings, channels, 2)
    x, c_noise, label = torch.randn(3, channels, 8, 8), torch.rand(3), torch.tensor([0, 1, 2])
    formats = set()

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """How what a 3x3 convolution gets and gives lies in memory."""
        if output.ndim == 4 and inputs[0].shape[1] > 4:
            formats.update(t.is_contiguous(memory_format=torch.channels_last) for t in (inputs[0], output))

    for module in model.modules():
        if hasattr(module, "weight") and module.weight.ndim == 4:
            module.register_forward_hook(note)

    def gradients() -> list[torch.Tensor]:
        """The output, and the gradients of a step."""
        model.zero_grad()
        output = model(x, c_noise, label)
        output.square().sum().backward()
        return [output, *(p.grad.clone() for p in model.parameters())]

    plain = gradients()
    assert False in formats
    formats.clear()
    model.channels_last = True
    for one, other in zip(plain, gradients()):
        # What is one number is a sum over all pixels, of which much cancels.
        assert (one - other).norm() <= (1e-5 if one.ndim else 1e-4) * one.norm()
        assert other.is_contiguous()
    assert formats == {True}


@pytest.mark.parametrize(
    ("device", "precision", "wanted"),
    [
        ("cpu", "fp32", True),
        ("cpu", "bf16", False),
        ("cuda", "bf16", True),
        ("cuda", "fp32", False),
        ("mps", "fp32", False),
    ],
)
def test_memory_format_suits_device_and_precision(device, precision, wanted):
    config = config_of(MICRO["unet"], training=Training(images=48, precision=precision, device=device))
    auto = AutoSettings(config, None, torch.device(device), lambda: False)
    auto.resolve_memory_format()
    assert build_network(auto.config).channels_last == wanted
    assert [choice.name for choice in auto.choices] == ["memory_format"]
    assert not build_network(config).channels_last, "a run from before there was a choice"
    of_patches = AutoSettings(replace(config, network=MICRO["dit"]), None, torch.device(device), lambda: False)
    of_patches.resolve_memory_format()
    assert of_patches.config.training.memory_format == "contiguous"
    assert of_patches.choices == []


def config_of(settings, **changes) -> Config:
    return replace(
        Config(
            network=settings,
            data=Data(size=8, channels=1),
            classes=("a", "b"),
            training=Training(images=48, batch=8, microbatch=3, precision="bf16", device="cpu"),
            optimizer=Optimizer(lr=1e-2, schedule="cosine", warmup=2),
        ),
        **changes,
    )


def advance(config, state, steps):
    """Train until `steps` steps are taken."""

    class Until(TrainingHooks):
        step = state.seen // 8

        def on_step_end(self, step):
            self.step = step

        def stop_requested(self):
            return self.step >= steps

    pixels = torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16) % 2
    names = [str(i) for i in range(16)]
    images = ImageSet.labelled(pixels.numpy(), labels.numpy(), names, ("a", "b"))
    train(
        LoopSettings(config.training, config.optimizer),
        state,
        Task(ImageStream(images, 0), Augment.from_settings(config.data), Objective(config.diffusion, 0.2)),
        Until(),
    )
    return state


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"checkpointing": True}], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("settings", [MICRO[name] for name in NEW], ids=NEW)
def test_interrupted_is_uninterrupted(settings, changes, tmp_path):
    config = config_of(replace(settings, dropout=0.2))
    config = replace(config, training=replace(config.training, memory_format="channels_last"))
    whole = advance(config, build_state(config, CPU), 6)
    config = replace(config, training=replace(config.training, **changes))  # which changes no bit
    taken = snapshot.take_snapshot(advance(config, build_state(config, CPU), 3), 3)
    folder = snapshot.write_checkpoint(taken, tmp_path)
    again = build_state(config, CPU)
    load_checkpoint(folder, again)
    advance(config, again, 6)
    for file, tensors in whole.tensors().items():
        for name, tensor in again.tensors()[file].items():
            assert torch.equal(tensor, tensors[name]), f"{file}: {name}"
    assert again.progress() == whole.progress()
    fresh = build_network(config).state_dict()
    assert any(not torch.equal(tensor, fresh[name]) for name, tensor in whole.tensors()["model"].items())


@pytest.mark.slow
@pytest.mark.parametrize("method", [Muon(), AdamW()], ids=["muon", "adamw"])
def test_weights_kept_in_channels_last_train_alike_and_are_stored_as_any(method, tmp_path, monkeypatch):
    """As on CUDA: checkpoints hold the same values in the same order, and load into either format."""
    config = config_of(replace(MICRO["unet"], channels=(8, 16), dropout=0.2))
    training = replace(config.training, memory_format="channels_last", precision="fp32")
    config = replace(config, training=training, optimizer=replace(config.optimizer, method=method))
    usual = advance(config, build_state(config, CPU), 3)
    monkeypatch.setattr(build, "_WEIGHTS_CHANNELS_LAST_ON", ("cpu",))
    state = advance(config, build_state(config, CPU), 3)
    for tensors in state.tensors().values():
        of_kernels = [t for t in tensors.values() if t.dim() == 4 and t.shape[-1] == 3]
        assert of_kernels
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in of_kernels)
        assert not any(t.is_contiguous() for t in of_kernels if t.shape[1] > 1)
    close = [(mine, usual.tensors()[file][name]) for file, of in state.tensors().items() for name, mine in of.items()]
    assert max(float((a - b).abs().max()) for a, b in close if a.is_floating_point()) < 1e-3

    folder = snapshot.write_checkpoint(snapshot.take_snapshot(state, 3), tmp_path / "a")
    again = build_state(config, CPU)
    load_checkpoint(folder, again)
    written = snapshot.write_checkpoint(snapshot.take_snapshot(again, 3), tmp_path / "b")
    for kind in ("model", "ema", "optimizer"):
        assert (folder / f"{kind}.safetensors").read_bytes() == (written / f"{kind}.safetensors").read_bytes()
    advance(config, again, 6)
    advance(config, state, 6)
    monkeypatch.setattr(build, "_WEIGHTS_CHANNELS_LAST_ON", ())
    plain = build_state(config, CPU)
    load_checkpoint(folder, plain)
    for file, tensors in state.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again.tensors()[file][name]), f"{file}: {name}"
            assert plain.tensors()[file][name].is_contiguous()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [MICRO["dit"], MPUNet((8,), attention=(True,), head_channels=8)],
    ids=["dit", "mpunet"],
)
@pytest.mark.exhaustive  # CI compiles a run in test_resume
def test_compiled_training_learns_the_same(settings):
    plain = config_of(settings, training=Training(images=48, batch=8, precision="fp32", device="cpu"))
    compiled = replace(plain, training=replace(plain.training, compile=True))
    one, other = (advance(config, build_state(config, CPU), 6).tensors()["ema"] for config in (plain, compiled))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        pytest.param(replace(MICRO["dit"], depth=1), "cpu", marks=pytest.mark.slow),
        pytest.param(replace(MICRO["dit-block"], depth=1), "cuda", marks=pytest.mark.slow),
        pytest.param(MICRO["mpunet"], "cpu", marks=pytest.mark.exhaustive),
        pytest.param(MPUNet((8,), attention=(True,), head_channels=8), "cuda", marks=pytest.mark.slow),
    ],
)
def test_memory_is_traced(settings, device):
    config = config_of(settings, optimizer=Optimizer(lr=1e-2, method=AdamW()))  # in fewer operations than Muon
    few, more, many = (_trace_step(_TracedStep(config, device, n, 2)) for n in (2, 4, 7))
    assert few.extrapolate(7, more, 2, 4) == many
    peak = MemoryEstimator(config, device).step(8, False)
    assert peak.parts["parameters"] == sum(4 * p.numel() for p in build_network(config).parameters())
    assert MemoryEstimator(config, device).step(8, True).parts["activations"] < 0.8 * peak.parts["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mp-tiny", "dit-tiny"])
def test_work_is_counted(name):
    work = NetworkCost.of(lambda: build_model(SIZES[name], 3), (3, 32, 32))
    assert 2.7 < work.training / work.forward < 3.3


def test_words_and_toml():
    words = kinds.registry_of(Network)
    foreign = {"ddpm-pytorch", "edm", "edm2", "diffusers-dit"}
    assert {cls.kind for cls in ARCHITECTURES} | set(SIZES) | {"auto", "custom", "given"} | foreign == set(words)
    assert kinds.parse_spec(words, "dit:patch=4,modulation=block") == DiT(patch=4, modulation="block")
    assert kinds.parse_spec(words, "mp-small:dropout=0.1") == replace(SIZES["mp-small"], dropout=0.1)
    for size, settings in SIZES.items():
        assert kinds.parse_spec(words, kinds.format_spec(settings)) == settings, size
        config = Config(network=settings)
        assert from_toml(to_toml(config), Config()) == config
        assert {f.name for f in fields(settings)} >= {"dropout", "time_scale"}


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (MPUNet, {"channels": ()}, "give 1 to 12 levels"),
        (MPUNet, {"attention": (True,)}, "attention has 1 entries, but channels has 3 levels"),
        (
            MPUNet,
            {"head_channels": 50},
            "channels = 144 must be a multiple of head_channels = 50 in a level with attention",
        ),
        (MPUNet, {"dropout": 1.0}, "dropout = 1.0"),
        (DiT, {"time_scale": 0.0}, "time_scale = 0.0"),
        (DiT, {"width": 100}, "head_channels = 32 must be a multiple of 4 that divides width = 100"),
        (DiT, {"width": 48}, "divides width = 48, because rows and columns each use pairs of channels; give 24 or 48"),
        (DiT, {"width": 50}, "pairs of channels; give a width that 32 divides"),
        (DiT, {"width": 384, "head_channels": 50}, "give 48 or 64"),
        (DiT, {"head_channels": 2}, "head_channels = 2"),
        (DiT, {"depth": 0}, "depth = 0"),
        (DiT, {"patch": 0}, "patch = 0"),
    ],
)
def test_contradictions_are_refused(kind, wrong, message):
    with pytest.raises(RequestError) as refused:
        kind(**wrong)
    assert message in str(refused.value)


def test_sizes_are_checked():
    with pytest.raises(RequestError, match=r"size = 30 .*multiple of 4 .*size = 32"):
        MPUNet().check(30)
    with pytest.raises(RequestError, match=r"size = 27x28.*patch = 2.*size = 28"):
        DiT().check((28, 27))
    DiT(patch=4).check((28, 4))


def test_rates_follow_the_kind_and_decay_is_left_to_free_weights():
    rates = {}
    for name, settings in MICRO.items():
        config = config_of(settings, optimizer=Optimizer(weight_decay=0.01))
        auto = AutoSettings(config, None, CPU, lambda: False)
        auto.resolve_learning_rate()
        auto.resolve_weight_decay()
        rates[name] = auto.config.optimizer.lr
        assert auto.config.optimizer.weight_decay == (0 if name == "mpunet" else 0.01)
        assert ("optimizer.weight_decay" in [choice.name for choice in auto.choices]) == (name == "mpunet")
    assert rates["mpunet"] > 3 * rates["unet"]
    assert default_learning_rate(16 * 10**6, 64, MPUNet()) == pytest.approx(default_learning_rate(1, 64, MPUNet()) / 2)
    assert default_learning_rate(16 * 10**6, 64, DiT()) == pytest.approx(default_learning_rate(1, 64, DiT()) / 4)


@pytest.mark.parametrize("name", NEW)
def test_what_diffusers_has_no_network_for_is_said(name):
    model = build_model(MICRO[name], 1)
    with pytest.raises(RequestError, match=rf"{MICRO[name].kind} has no equivalent"):
        Exported(MICRO[name], 1, 0, model.state_dict()).to_unet2d(8)
