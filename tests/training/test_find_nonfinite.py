"""Finding what made a step not finite: a weight, a layer, an image, a gradient; and that looking changes nothing."""

import math

import pytest
import torch
from torch import nn

from conftest import NETWORK
from unfog.config.spec_strings import parse_spec
from unfog.device.sharded_rng import seed_generators
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Loss, Objective
from unfog.models.settings import UNet
from unfog.models.unet import UNetModel
from unfog.training.batches import split_range
from unfog.training.precision import Precision
from unfog.training.settings import Optimizer, PowerEma
from unfog.training.stability.nan_debug import NanReport
from unfog.training.state import TrainState
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import NO_CONDITIONS
from unfog.values.image_format import BYTES

PASSES = list(split_range(100, 8, 3))  # of 3, 3 and 2 images
WHITE = 104  # the second image of the second pass; all others are between -0.5 and 0.5
UNKNOWN = NanReport("unknown", "", (), (), False)


def photos(first, count, white=WHITE):
    generator = torch.Generator().manual_seed(first)
    pixels = torch.randint(64, 192, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    pixels[
        [
            position in white if isinstance(white, tuple) else position == white
            for position in range(first, first + count)
        ]
    ] = 255
    return pixels


def is_white(x):
    """bool [B, 1, 1, 1]"""
    return (x.detach() > 0.99).all((1, 2, 3), keepdim=True)


def infinity(x):
    """0 for all images but the white one, [B, 1, 1, 1]; adding it lets gradients through."""
    return torch.zeros(len(x), 1, 1, 1).masked_fill(is_white(x), math.inf)


def unet():
    torch.manual_seed(0)
    model = UNetModel(parse_spec({"unet": UNet()}, NETWORK), 1, ConditionFormat())
    for parameter in model.parameters():  # where a fresh network has zeros, no gradient would pass
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def straight(channels, *after):
    """A layer that copies its image into channels, and what follows."""
    first = nn.Conv2d(1, channels, 1)
    nn.init.ones_(first.weight)
    nn.init.zeros_(first.bias)
    return nn.Sequential(first, *after)


def state(model, precision="fp32"):
    return TrainState(model, Optimizer(lr=1e-3), PowerEma(), Precision(precision, torch.device("cpu")))


OBJECTIVE = Objective(Diffusion())


def answer(model, x0, conditions):
    """The mean of what the network answers: no noise, no mixing of images."""
    u = (torch.arange(len(x0)) + torch.rand(len(x0))) / len(x0)
    return Loss(model(x0).float().mean((1, 2, 3)), u, torch.ones(len(x0)))


def replay(into, loss_function=answer, augment=lambda pixels: pixels, white=WHITE):
    """A pass as the training loop makes it."""

    def forward(first, count):
        pixels = photos(first, count, white)
        seed_generators(7, first)
        x0 = BYTES.to_model(augment(pixels))
        with into.precision.autocast():
            return loss_function(into.model, x0, NO_CONDITIONS)

    return forward


def poison(pixels):
    """An augmentation that breaks one image."""
    return pixels.float().masked_fill(is_white(pixels / 255), math.nan)


def level(forward, position=WHITE, passes=PASSES):
    first, count = next((f, c) for f, c in passes if f <= position < f + c)
    return forward(first, count).u[position - first].item()


class At(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.white = is_white(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.masked_fill(ctx.white, math.nan)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_broken_image(precision):
    into = state(unet(), precision)
    forward = replay(into, OBJECTIVE, poison)
    found = NanReport.find(into, forward, PASSES)
    assert found == NanReport("forward", "input", (WHITE,), (level(forward),), False)
    assert level(forward) == pytest.approx(0.5, abs=1 / 6)  # the second of three levels


def test_a_broken_image_in_a_network_that_mixes_images():
    """Batch normalisation spoils every loss of the pass, and its own statistics."""
    into = state(straight(4, nn.BatchNorm2d(4)))
    forward = replay(into, augment=poison)
    assert not forward(*PASSES[1]).per_image.isfinite().any()
    assert not into.model[1].running_mean.isfinite().any()
    found = NanReport.find(into, forward, PASSES)
    assert found == NanReport("forward", "input", (WHITE,), (level(forward),), False)


@pytest.mark.slow
def test_an_infinite_loss_of_one_image():
    def loss(model, x0, conditions):
        found = OBJECTIVE(model, x0, conditions)
        return found._replace(per_image=found.per_image + infinity(x0).flatten())

    into = state(unet())
    forward = replay(into, loss)
    assert NanReport.find(into, forward, PASSES) == NanReport("loss", "", (WHITE,), (level(forward),), False)


def test_poisoned_weights():
    into = state(unet())
    into.model.register_buffer("table", torch.tensor([1.0, math.nan]))
    with torch.no_grad():
        into.model.mid[0].residual.conv1.bias[0] = math.nan
        into.model.up[0].blocks[0].residual.conv2.weight[0, 0, 0, 0] = -math.inf
    found = NanReport.find(into, replay(into, OBJECTIVE), PASSES)
    assert found == NanReport("weights", "mid.0.residual.conv1.bias", (), (), True, more=2)


def test_a_poisoned_buffer():
    model = straight(1)
    model.register_buffer("shift", torch.tensor(math.nan), persistent=False)
    model.register_forward_hook(lambda module, args, output: output + module.shift)
    into = state(model)
    assert NanReport.find(into, replay(into), PASSES) == NanReport("weights", "shift", (), (), True)


@pytest.mark.parametrize(
    ("precision", "large"),
    [("fp16", 4e4), ("bf16", 2e38), ("fp32", 2e38)],
)
def test_the_layer_that_overflows_for_one_image(precision, large):
    into = state(straight(2, nn.Identity(), nn.Conv2d(2, 1, 1, bias=False), nn.Sigmoid()), precision)
    nn.init.constant_(into.model[2].weight, large)
    forward = replay(into, lambda model, x0, conditions: answer(lambda x: model[:3](x).float() / large, x0, conditions))
    found = NanReport.find(into, forward, PASSES)
    assert found == NanReport("forward", "2", (WHITE,), (level(forward),), False)


@pytest.mark.slow
def test_the_layer_of_the_unet_that_overflows_for_every_image():
    into = state(unet(), "fp16")
    with torch.no_grad():
        into.model.down[1].blocks[0].attention.qkv.weight *= 1e6
    found = NanReport.find(into, replay(into, OBJECTIVE), PASSES)
    assert found == NanReport("forward", "down.1.blocks.0.attention.qkv", (), (), True)


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda x: x.mul_(math.inf), "1"),  # in place: its input is bad too, once it is done
        (lambda x: [x, {"and": x * math.nan}][1]["and"], "1"),
        (lambda x: x, "network"),
    ],
)
def test_the_first_layer_is_named_in_order_of_execution(spoil, where):
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x).float() * (math.nan if where == "network" else 1)

    into = state(Net(nn.Conv2d(1, 2, 1), At(spoil), nn.Conv2d(2, 1, 1)))
    assert NanReport.find(into, replay(into), PASSES) == NanReport("forward", where, (), (), True)


def test_a_layer_is_not_blamed_for_what_its_surroundings_do():
    """White is lost between two layers, and the others in the second, which was not well given."""

    class Surroundings(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = At(lambda x: x / 0)

        def forward(self, x):
            return self.inner(x + infinity(x))

    into = state(straight(1, Surroundings(), nn.Identity()))
    assert NanReport.find(into, replay(into), PASSES[1:2]) == NanReport("forward", "1", (), (), True)


def test_layers_may_return_anything():
    class Odd(nn.Module):
        def forward(self, x):
            nothing, whole, constant = x[:, :0], x.mean(), x.detach()
            return [nothing, whole, constant, None, "text", (x.shape, {"spoilt": x / 0})]

    into = state(straight(1, Odd(), At(lambda odd: odd[0].sum() + odd[1] + odd[2] + odd[-1][1]["spoilt"])))
    assert NanReport.find(into, replay(into), PASSES) == NanReport("forward", "1", (), (), True)


@pytest.mark.parametrize("spoil", [NanBackward.apply, lambda x: (1 - x).sqrt()])
def test_a_backward_that_fails_for_one_image(spoil):
    """The root has an infinite slope at white: times the zeros that come from the others it is NaN."""
    into = state(straight(1, At(spoil), nn.Conv2d(1, 1, 1)))
    forward = replay(into)
    found = NanReport.find(into, forward, PASSES)
    # The layer after it comes first on the way back, and is well.
    assert found == NanReport("backward", found.where, (WHITE,), (level(forward),), False, more=1)
    assert found.where in ("0.weight", "0.bias")


def test_parameters_are_named_in_order_of_the_backward_pass():
    into = state(nn.Sequential(straight(1), nn.Conv2d(1, 1, 1, bias=False), straight(1, At(NanBackward.apply))))
    nn.init.ones_(into.model[1].weight)
    found = NanReport.find(into, replay(into), PASSES)
    assert found.where.startswith("2.0.")
    assert found.more == 4


def sums(weight_of):
    """Losses whose gradients at each pixel are finite, and whose sum over the pixels may not be."""

    def loss(model, x0, conditions):
        found = answer(model, x0, conditions)
        return found._replace(per_image=(model(x0) * weight_of(is_white(x0)) * 8).sum((1, 2, 3)))

    return loss


def zero_layer():
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Identity())
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    return model


def test_a_gradient_that_overflows_in_the_sum_over_the_pixels_of_one_image():
    into = state(zero_layer())
    forward = replay(into, sums(lambda white: torch.where(white, 1e38, 1.0)))
    found = NanReport.find(into, forward, PASSES)
    assert found == NanReport("backward", found.where, (WHITE,), (level(forward),), False, more=1)


def test_a_gradient_that_overflows_only_in_the_sum_over_images_blames_none():
    into = state(zero_layer(), "fp16")
    into.precision.scaler = torch.amp.GradScaler("cpu", init_scale=1)
    into.model[0].weight.requires_grad_(False)
    # 64 pixels of 470 are less than the 65,504 that fp16 reaches, and three such images are more.
    forward = replay(into, sums(lambda white: torch.full(white.shape, 470.0)))
    assert NanReport.find(into, forward, PASSES) == NanReport("backward", "0.bias", (), (), False)


def test_a_norm_that_overflows_though_no_number_does():
    into = state(zero_layer())
    forward = replay(into, sums(lambda white: torch.where(white, 1e25, 1.0)))
    for each in PASSES:
        into.precision.backward(forward(*each).per_image.sum() / 8)
    gradients = [p.grad for p in into.model.parameters()]
    assert all(g.isfinite().all() for g in gradients)
    assert torch.nn.utils.get_total_norm(gradients).isinf()
    assert NanReport.find(into, forward, PASSES).images == (WHITE,)


def test_an_unscaled_gradient_is_finite_where_the_scaled_one_is_not():
    found = []
    for scale in (1.0, 2.0**13):
        into = state(zero_layer(), "fp16")
        into.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        found.append(NanReport.find(into, replay(into, sums(lambda white: torch.where(white, 1.0, 1e-3))), PASSES))
    assert found[0] == UNKNOWN
    assert (found[1].phase, found[1].images) == ("backward", (WHITE,))


def test_the_norm_that_counts_is_that_of_the_unscaled_gradient():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x * self.gain  # float32, also in fp16

    into = state(Gain(), "fp16")
    forward = replay(into, sums(lambda white: torch.full(white.shape, 1e16)))
    assert NanReport.find(into, forward, PASSES) == UNKNOWN


def test_gradients_that_no_image_can_be_blamed_for():
    """An infinite slope within a layer's own arithmetic: zeros that come from the other images become NaN there."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (1 - x * self.gain).sqrt()

    into = state(Root())
    assert NanReport.find(into, replay(into), PASSES) == NanReport("backward", "gain", (), (), False)


def test_an_infinite_output_that_does_no_harm_is_not_blamed():
    into = state(straight(1, At(lambda x: x - math.inf), At(lambda x: x.exp()), nn.Conv2d(1, 1, 1)))
    assert NanReport.find(into, replay(into), PASSES) == UNKNOWN


def test_an_infinite_output_is_blamed_for_the_gradient():
    spoil = At(lambda x: x + infinity(x))
    into = state(straight(1, spoil, At(lambda x: 1 / (1 + x.square())), nn.Conv2d(1, 1, 1)))
    forward = replay(into)
    assert all(forward(*each).per_image.isfinite().all() for each in PASSES)
    assert NanReport.find(into, forward, PASSES) == NanReport("forward", "1", (WHITE,), (level(forward),), False)


@pytest.mark.parametrize("microbatch", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("white", [100, 104, 107])
def test_however_the_batch_is_cut_the_image_is_found(microbatch, white):
    passes = list(split_range(100, 8, microbatch))
    for model, augment in ((straight(1), poison), (straight(1, At(NanBackward.apply)), lambda x0: x0)):
        into = state(model)
        forward = replay(into, augment=augment, white=white)
        found = NanReport.find(into, forward, passes)
        assert (found.images, found.levels, found.every) == ((white,), (level(forward, white, passes),), False)


@pytest.mark.parametrize("microbatch", [1, 3, 8])
@pytest.mark.parametrize("spoil", [lambda x: x / 0, lambda x: NanBackward.apply(x * 0 + 1)])
def test_a_network_is_blamed_for_what_hits_every_image(microbatch, spoil):
    into = state(straight(1, At(spoil)))
    found = NanReport.find(into, replay(into), list(split_range(100, 8, microbatch)))
    assert (found.images, found.levels, found.every) == ((), (), True)


def test_at_most_eight_images_are_named_in_order():
    into = state(straight(1))
    white = tuple(range(101, 120))
    found = NanReport.find(into, replay(into, augment=poison, white=white), [(100, 20)])
    assert found.images == white[:8]
    assert len(found.levels) == 8
    assert not found.every


@pytest.mark.slow
def test_a_step_that_is_finite_when_replayed():
    into = state(unet())
    assert NanReport.find(into, replay(into, OBJECTIVE), PASSES) == UNKNOWN


@pytest.mark.slow
def test_compiled_networks_are_searched_too():
    into = state(straight(1, At(lambda x: x + infinity(x)), nn.Conv2d(1, 1, 1)))
    into.model.compile(backend="eager")
    forward = replay(into)
    forward(*PASSES[0])
    found = NanReport.find(into, forward, PASSES)
    assert found == NanReport("forward", "1", (WHITE,), (level(forward),), False)
    into.model = torch.compile(into.model, backend="eager")
    forward(*PASSES[0])
    assert NanReport.find(into, forward, PASSES) == found


def snapshot(into):
    model = into.model
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    hooks = [
        dict(owner)
        for module in model.modules()
        for owner in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ] + [dict(p._backward_hooks or {}) for p in model.parameters()]
    return (
        [id(t) for t in tensors],
        [t.detach().numpy().tobytes() for t in tensors],
        hooks,
        [module.training for module in model.modules()],
        into.precision.scaler.state_dict(),
        into.optimizer.state_dict()["param_groups"],
        into.seen,
    )


class Shared(nn.Module):
    """Gives out a parameter of its own, which outlives the search."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self):
        return self.gain


class Fragile(nn.Module):
    """Batch normalisation, in part not trained and not training, and a buffer that is replaced at every call."""

    def __init__(self, spoil):
        super().__init__()
        self.body = straight(4, nn.BatchNorm2d(4), At(spoil), nn.BatchNorm2d(4).eval(), nn.Conv2d(4, 1, 1))
        self.body[1].bias.requires_grad_(False)
        self.shared = Shared()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.body(x) * self.shared().mean()


def fail(error):
    def spoil(x):
        if len(x) == 2:  # in the last pass
            raise error
        return x

    return spoil


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda x: x, "unknown"),
        (lambda x: x / 0, "forward"),
        (lambda x: NanBackward.apply(x * 0 + 1), "backward"),
        (fail(torch.OutOfMemoryError("no memory left")), "unknown"),
        (fail(KeyboardInterrupt()), None),
    ],
)
def test_nothing_is_changed(spoil, expected, precision):
    into = state(Fragile(spoil), precision)
    for parameter in into.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = snapshot(into)
    if expected is None:
        with pytest.raises(KeyboardInterrupt):
            NanReport.find(into, replay(into), PASSES)
    else:
        assert NanReport.find(into, replay(into), PASSES).phase == expected
    assert snapshot(into) == before


CAT, DOG = "photos/cat 17.png", "photos/dog.png"
BLAME = "; every image is affected, so the cause is the network or the learning rate, not an image"


@pytest.mark.parametrize(
    ("report", "names", "sentence"),
    [
        (
            NanReport("forward", "down.2.attention", (17,), (0.931,), False),
            [CAT],
            f"the loss of {CAT} (noise level 0.93 of 1) is not finite from layer down.2.attention on",
        ),
        (
            NanReport("forward", "input", (17, 19), (0.5, 1.0), False),
            [CAT, DOG],
            f"the loss of {CAT} (noise level 0.50 of 1), {DOG} (noise level 1.00 of 1) is not finite because the "
            "network's input is not",
        ),
        (
            NanReport("forward", "network", (), (), True),
            [],
            f"the loss is not finite from the network's output on{BLAME}",
        ),
        (
            NanReport("forward", "input", (), (), True),
            [],
            "the loss is not finite because the network's input is not; every image is affected, so the cause is the "
            "augmentation or the noise, not an image",
        ),
        (
            NanReport("loss", "", tuple(range(8)), (0.1,) * 8, False),
            list("abcdefgh"),
            "the loss of a (noise level 0.10 of 1), b (noise level 0.10 of 1), c (noise level 0.10 of 1) and others is "
            "not finite though the network's output is",
        ),
        (NanReport("weights", "up.0.conv.weight", (), (), True), [], "the weight up.0.conv.weight is not finite"),
        (NanReport("weights", "a", (), (), True, 1), [], "the weight a is not finite, nor is 1 more"),
        (NanReport("weights", "a", (), (), True, 5), [], "the weight a is not finite, nor are 5 more"),
        (NanReport("backward", "mid.norm.weight", (), (), False), [], "the gradient of mid.norm.weight is not finite"),
        (
            NanReport("backward", "mid.norm.weight", (), (), True, 3),
            [],
            f"the gradient of mid.norm.weight is not finite{BLAME}",
        ),
        (
            NanReport("backward", "mid.norm.weight", (17,), (0.2,), False),
            [CAT],
            f"the gradient of mid.norm.weight is not finite for {CAT} (noise level 0.20 of 1)",
        ),
        (UNKNOWN, [], "the cause was not found: a replay of the step does not show it"),
    ],
)
def test_sentences(report, names, sentence):
    assert report.describe(names) == sentence
