"""A network that is given as an object: it trains, resumes and loads; and what is said where its contract is broken."""

import numpy as np
import pytest
import torch
from torch import nn

import unfog
from unfog.cli.main import main
from unfog.errors import RequestError
from unfog.models import given_network  # a process that was given no network
from unfog.models.given_network import SOURCE_FILE, GivenNetwork

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
LABELS = [i % 3 for i in range(12)]
SETTINGS = {"size": 8, "batch": 4, "learning_rate": 1e-3, "preview": {"images": 1}}


class Net(nn.Module):
    """A layer, with a batch norm whose state no check may change."""

    def __init__(self, channels=3, width=4, classes=0):
        super().__init__()
        self.inner, self.norm = nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)
        self.outer = nn.Conv2d(width, channels, 3, padding=1)
        self.label = nn.Embedding(classes + 1, width) if classes else None
        self.scale = torch.full((1,), 0.001)  # neither a parameter nor a buffer

    def forward(self, x, noise, label=None):
        assert noise.shape == (len(x),)
        h = self.norm(self.inner(x)) * torch.exp(-noise * self.scale)[:, None, None, None]
        if self.label is not None:
            h = h + self.label(label)[:, :, None, None]
        return self.outer(h)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    network = Net(classes=3)
    before = {name: values.clone() for name, values in network.state_dict().items()}
    place = tmp_path_factory.mktemp("given") / "run"
    run = unfog.train(IMAGES, labels=LABELS, out=place, steps=2, network=network, **SETTINGS)
    assert all(torch.equal(values, network.state_dict()[name]) for name, values in before.items())  # a copy was trained
    return run


@pytest.mark.slow
def test_it_trains_samples_and_is_noted(run):
    assert type(run.network) is Net
    assert run.sample(4, num_inference_steps=2, label=1).shape == (4, 8, 8, 3)
    source = (run.path / SOURCE_FILE).read_text()
    assert "class Net(nn.Module):" in source
    assert "#     (inner): Conv2d(3, 4" in source
    assert "class Conv2d" not in source
    assert f'path = "{__name__}.Net"' in (run.path / "config.toml").read_text()


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_the_object(tmp_path):
    network = Net()
    run = unfog.train(IMAGES, out=tmp_path / "run", steps=1, network=network, **{**SETTINGS, "learning_rate": 1e-12})
    for name, values in run.network.named_parameters():
        assert torch.allclose(values, network.get_parameter(name), atol=1e-6)


@pytest.mark.slow
def test_load_and_resume_need_an_object_like_it(run, monkeypatch):
    monkeypatch.setattr(given_network, "_given", {})  # as in another process
    said = rf"given from Python, as an object of {__name__}.Net; .*unfog.load\(run, network=Net\(\.\.\.\)\)"
    for call in (unfog.load, unfog.resume):
        with pytest.raises(RequestError, match=said):
            call(run.path)
    with pytest.raises(RequestError, match="has other weights than the network of the run"):
        unfog.load(run.path, network=Net(width=8))
    with pytest.raises(RequestError, match="network = 3 is no"):
        unfog.load(run.path, network=3)
    loaded = unfog.load(run.path, network=Net(classes=3))
    assert np.array_equal(loaded.sample(2, steps=2), run.sample(2, steps=2))
    monkeypatch.setattr(given_network, "_given", {})
    longer = unfog.resume(run.path, steps=3, network=Net(classes=3))
    assert longer.checkpoint.step == 3


def test_the_command_line_says_that_python_is_needed(run, monkeypatch, capsys):
    monkeypatch.setattr(given_network, "_given", {})
    with pytest.raises(SystemExit) as left:
        main(["sample", str(run.path)])
    assert left.value.code == 2
    assert "the network of this run was given from Python" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_a_network_of_its_own_takes_none(tmp_path):
    from conftest import NETWORK

    run = unfog.train(IMAGES, out=tmp_path / "run", steps=1, network=NETWORK, **SETTINGS)
    with pytest.raises(RequestError, match=r"network unet.*leave network"):
        unfog.load(run.path, network=Net())


class Named(Net):
    """A network whose parameters are named as conditions."""

    def __init__(self):
        super().__init__(classes=2)
        self.age, self.marks = nn.Linear(1, 4, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x, noise, age, stain, **others):
        assert {*others} == {"marks"}
        h = super().forward(x, noise, stain)
        told = self.age(torch.nan_to_num(age)[:, None] / 100) + self.marks(torch.nan_to_num(others["marks"]))
        return h * (1 + told.mean(1))[:, None, None, None]


def pixels(run, **given):
    return run.sample(2, given=given, guidance=1, steps=2)


@pytest.mark.slow
def test_conditions_reach_the_parameters_that_are_named_as_they(tmp_path):
    conditions = {"age": range(20, 32), "stain": ["a", "b"] * 6, "marks": [["x", "y"], ["x"], []] * 4}
    settings = SETTINGS | {"evaluate": {"every": 1}, "microbatch": 2}
    run = unfog.train(IMAGES, out=tmp_path / "run", conditions=conditions, steps=2, network=Named(), **settings)
    run = unfog.resume(run.path, steps=3, network=Named())
    usual = pixels(run, age=60, stain="a", marks="x")
    assert np.array_equal(usual, pixels(run, age=60, stain="a", marks="x"))
    for other in ({"age": 90}, {"stain": "b"}, {"marks": "y"}, {"marks": "x;y"}):
        assert not np.array_equal(usual, pixels(run, **{"age": 60, "stain": "a", "marks": "x", **other}))
    for lacks, said in (({"age", "stain", "marks"} - {"age"}, "needs age"), ({"age", "marks"}, "needs stain")):
        some = {name: values for name, values in conditions.items() if name in lacks}
        with pytest.raises(RequestError, match=said):
            unfog.train(IMAGES, out=tmp_path / said, conditions=some, steps=1, network=Named(), **SETTINGS)
    conditions = {"age": range(12), "more": range(12)}
    with pytest.raises(RequestError, match="the images have more: add a parameter"):
        unfog.train(IMAGES, out=tmp_path / "more", conditions=conditions, steps=1, network=Age(), **SETTINGS)


class Age(Net):
    def forward(self, x, noise, age=None):
        return super().forward(x, noise) + 0 * age.mean()


class Only(Net):
    """A network whose conditions are keywords alone."""

    def forward(self, x, noise, *, age):
        return super().forward(x, noise) * (1 + torch.nan_to_num(age))[:, None, None, None]


class Every(Net):
    def forward(self, x, noise, **columns):
        return super().forward(x, noise) * (1 + torch.nan_to_num(columns["age"]))[:, None, None, None]


MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, out_channels, **others):
        super().__init__()
        self.layer = nn.Conv2d(channels, out_channels, 3, padding=1)

    def forward(self, x, noise, age):
        if len(x) == 7:
            raise TypeError("seven")
        return self.layer(x) * (1 + torch.nan_to_num(age))[:, None, None, None]
"""


@pytest.mark.slow
def test_conditions_are_planned_for_and_passed_as_keywords_to_objects_and_classes(tmp_path, monkeypatch, capsys):
    conditions, settings = {"age": range(12)}, SETTINGS | {"steps": 1}
    for kind in (Only, Every):
        unfog.train(IMAGES, out=tmp_path / kind.__name__, conditions=conditions, network=kind(), **settings)
        planned = unfog.plan(IMAGES, conditions=conditions, network=kind(), **settings)
        assert planned.work.training > planned.work.forward > 0
    (tmp_path / "named_columns.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    named = settings | {"network": "custom:path=named_columns.Net"}
    run = unfog.train(IMAGES, out=tmp_path / "custom", conditions=conditions, **named)
    # Hidden and not absent, where no condition is asked for: None is no number.
    problem = {"measure": lambda x: x[..., :2], "observed": torch.full((3, 8, 2), 99.0)}
    assert np.array_equal(run.sample(1, steps=2, **problem), run.sample(1, steps=2, given={"age": None}, **problem))
    with pytest.raises(SystemExit):
        main(["sample", str(run.path), "-n", "7", "--out", str(tmp_path / "out")])
    assert "TypeError: seven\n(named_columns.py, line 12, in Net.forward; " in capsys.readouterr().err
    both = {"label": [0.5 * i for i in range(12)]}
    with pytest.raises(RequestError, match="a column is called label"):
        unfog.train(IMAGES, out=tmp_path / "twice", conditions=both, labels=[0, 1] * 6, network=Every(), **settings)


@pytest.mark.slow
def test_a_network_that_lets_unknown_values_through_is_refused_before_training(tmp_path):
    with pytest.raises(RequestError, match="not finite"):
        unfog.train(IMAGES, out=tmp_path / "run", conditions={"age": range(12)}, steps=1, network=Age(), **SETTINGS)


class Returns(Net):
    """A network that returns something else."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x, noise, label=None):
        return self.change(super().forward(x, noise, label))


class TwoArguments(Net):
    def forward(self, x, noise):
        return x


BROKEN = [
    (
        lambda: Returns(lambda y: y[:, :, 1:]),
        {},
        r"returns torch.float32 \[2, 3, 7, 8\] for x .*, and float \[2, 3, 8, 8\]",
    ),
    (lambda: Returns(lambda y: y.mean(0, keepdim=True)), {}, r"returns torch.float32 \[1, 3, 8, 8\]"),
    (lambda: Returns(lambda y: {"sample": y}), {}, r"returns a dict, and a tensor \[2, 3, 8, 8\] is needed"),
    (lambda: Returns(lambda y: y.detach()), {}, "returns a tensor without a gradient"),
    (lambda: Returns(lambda y: y / 0), {}, "returns values that are not finite"),
    (lambda: Returns(lambda y: y.long()), {}, "returns torch.int64"),
    (lambda: Net(channels=1), {}, r"fails for x \[2, 3, 8, 8\], noise \[2\] and label None: RuntimeError: .* channels"),
    (
        lambda: Net(classes=2),
        {"labels": LABELS},
        "The label 3 stands for no class, so an embedding has 4 rows",
    ),
    (TwoArguments, {}, "cannot be called with three arguments .too many positional arguments."),
    (lambda: Net().half(), {}, r"has parameters of torch.float16, .* network.float\(\), and precision='bf16'"),
    (lambda: nn.Identity(), {}, "has no parameter to train"),
    (lambda: nn.LazyConv2d(3, 3), {}, "has lazy layers without a shape"),
    (Net, {"augment": 0.1}, "data.augment needs a network with an input for it"),
]


@pytest.mark.parametrize(("make", "settings", "said"), BROKEN, ids=[said[:30] for _, _, said in BROKEN])
def test_a_broken_contract_is_explained_before_training(make, settings, said, tmp_path):
    with pytest.raises(RequestError, match=said) as caught:
        unfog.train(IMAGES, out=tmp_path / "run", steps=1, network=make(), **SETTINGS, **settings)
    assert "forward(x, noise, label=None)" in str(caught.value) or "network = " in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_compiled_network_is_that_network():
    compiled = torch.compile(Net())
    assert GivenNetwork.of(compiled).path == f"{__name__}.Net"
    assert GivenNetwork.accepts(compiled)
    assert not any(map(GivenNetwork.accepts, (Net, None, "tiny", torch.zeros(1))))
    with pytest.raises(RequestError, match="stands for an object from Python"):
        unfog.train(IMAGES, network="given", **SETTINGS)


@pytest.mark.slow
def test_plan_takes_one_too():
    plan = unfog.plan(IMAGES, steps=2, network=Net(), device="h200", **SETTINGS)
    assert plan.parameters == pytest.approx(sum(p.numel() for p in Net().parameters()), rel=0.1)  # it counts buffers


class _Three(nn.Module):
    """A network for images of three channels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x, noise, label=None):
        return self.layer(x)


@pytest.mark.slow
def test_grey_images_and_a_network_of_three_channels_have_a_remedy_that_works(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)
    settings = {"out": tmp_path / "run", "steps": 1, "batch": 4, "size": 8, "device": "cpu", "preview.every": -1}
    with pytest.raises(RequestError, match=r"data.channels = 3 makes them RGB"):
        unfog.train(images, network=_Three(), **settings)
    unfog.train(images, network=_Three(), **settings, **{"data.channels": 3})
