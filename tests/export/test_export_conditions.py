"""Exports of runs with columns and with unknown pixels: loaded without Unfog, they give what the run gives."""

import ast
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch

from test_export import COUNT, CPU, DIT, MPUNET, UNET, inputs, run_card_code, run_of, shown
from unfog.data.settings import Data
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.noise import NoiseSource
from unfog.errors import RequestError, RunError
from unfog.export.given_values import read
from unfog.inference.exports.conditions import describe_columns
from unfog.models.network_settings import CustomNetwork, take_conditions
from unfog.pipeline.generate import GenerationSettings, conditional_denoiser
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.unknown import mask_to_text

# By names that a graph of ONNX has too, and that are no arguments of Python.
COLUMNS = (
    ColumnFacts("age", "number", statistics=(50.0, 20.0, 20.0, 89.0)),
    ColumnFacts("cell size", "number", statistics=(1e-3, 2e-4, 5e-4, 2e-3)),
    ColumnFacts("linear", "several", ("red", "round", "thin")),
    ColumnFacts("place", "vector", statistics=(1.0, 2.0, 1.0, 3.0, 0.0, 0.0, 5.0, 6.0)),
    ColumnFacts("x", "category", ("HE", "PAS")),
)
GIVEN = {
    "age": [20, None, 88.5],
    "cell size": np.array([1e-3, 5e-4, math.nan]),
    "linear": ["red;thin", ";", None],
    "place": [[1, 2], "0;5", None],
    "x": ["HE", "PAS", None],
}
TOLD = [
    [20.0, math.nan, 88.5],
    [1e-3, 5e-4, math.nan],
    [[1.0, 0.0, 1.0], [0.0] * 3, [math.nan] * 3],
    [[1.0, 2.0], [0.0, 5.0], [math.nan] * 2],
    [0, 1, -1],
]
SHAPE = 4, 8, 8
UNKNOWN = np.random.default_rng(0).random(SHAPE) < 0.3
SCALE = {"low": -1.0, "high": 4.0}


def with_columns(network=DIT, classes=3, **changes):
    return run_of(network=network, classes=classes, columns=COLUMNS, guidance=2.0, **changes)


def masked(unknown: str = "nan", mask: np.ndarray | None = UNKNOWN, dtype: str = "float32", **changes):
    text = "" if mask is None else mask_to_text(mask)
    data = Data(size=8, channels=4, dtype=dtype, unknown=unknown, unknown_mask=text, range=(0.0, 4095.0))
    return run_of(network=changes.pop("network", DIT), classes=0, data=data, **changes)


@torch.inference_mode()
def drawn(run, told: bool = True) -> torch.Tensor:
    """Samples of a run as `unfog sample` draws them, with the conditions of `TOLD`."""
    config = run.config
    settings = GenerationSettings.default(config, COUNT, COUNT)
    if told:
        columns = [(one.name, (*values,)) for one, values in zip(config.columns, TOLD)]
        # Several categories are stored as -1 where they are not known.
        columns[2] = (columns[2][0], ((1, 0, 1), (0, 0, 0), (-1, -1, -1)))
        label = (("class", (0, 1, 2)),) if config.classes else ()
        settings = replace(settings, given=(*label, *columns))
    conditions = settings.conditions(config, range(COUNT), CPU)
    denoise = conditional_denoiser(Denoiser(run.network, config.diffusion), config, settings, conditions)
    draw = NoiseSource(0, range(COUNT), config.input_shape).draw
    sampler = config.representation.sampler(config.sampler)
    x = run.decode(sampler(denoise, config.diffusion.path, config.diffusion.schedule, draw))
    return x if conditions.known is None else x.masked_fill(conditions.known == 0, math.nan)


def same(found: torch.Tensor, expected: torch.Tensor, limit: float = 1e-3) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and float((found - expected).nan_to_num(0).abs().max()) < limit


@pytest.mark.parametrize("network", [UNET, MPUNET, DIT], ids=lambda network: network.kind)
@pytest.mark.slow
def test_a_safetensors_export_draws_what_the_run_draws_under_conditions(tmp_path, network):
    run = with_columns(network)
    run.export(tmp_path / "out")
    code = shown("safetensors")
    model, rebuilt = code.load(tmp_path / "out")
    columns = run_path(str(tmp_path / "out/given.py"))["read"](model["conditions"], GIVEN, COUNT)
    noise, label = inputs(run)
    samples = code.sample(model, rebuilt, noise, label, columns)
    assert same(samples, drawn(run))
    # Each column counts.
    for i in range(len(columns)):
        other = [*columns]
        other[i] = other[i][::-1]
        assert not same(code.sample(model, rebuilt, noise, label, other), samples)
    for name in ("network.py", "given.py", "sample.py"):
        assert "unfog" not in re.sub(r'""".*?"""', "", (tmp_path / "out" / name).read_text(), flags=re.DOTALL)
    found = run_card_code(tmp_path / "out", (8, 8))
    assert found["x"].isfinite().all()
    card = (tmp_path / "out/README.md").read_text()
    assert re.search(r"\| age \| number \| 20 to 89, ", card)
    assert "| linear | several | any of red, round, thin |" in card


@pytest.mark.parametrize("format", ["onnx", "pt2"])
@pytest.mark.slow
def test_a_graph_has_an_input_for_each_condition_and_leaves_the_same_pixels_unknown(tmp_path, format):
    run = with_columns(data=masked().config.data)
    run.export(tmp_path / "out", format=format)
    model = json.loads((tmp_path / "out/model.json").read_text())
    columns = read(model["conditions"], GIVEN, COUNT)
    noise, label = inputs(run)
    if format == "pt2":
        code = shown("safetensors")
        samples = code.sample(*code.load(tmp_path / "out"), noise, label, columns)
    else:
        code = shown("onnx")
        model, sessions = code.load(tmp_path / "out")
        samples = torch.from_numpy(code.sample(model, sessions, noise.numpy(), label.numpy(), columns))
        found = {each.name: (each.type, each.shape[1:]) for each in sessions["model"].get_inputs()}
        assert found["age"] == ("tensor(float)", [])
        assert found["linear"] == ("tensor(float)", [3])
        assert found["x_"] == ("tensor(int64)", [])
        assert [*found] == ["x", "c_noise", "label", "age", "cell size", "linear", "place", "x_"]
        assert "x\\_: int64 \\[B\\]" in (tmp_path / "out/README.md").read_text()
    assert torch.equal(samples.isnan()[0], torch.from_numpy(UNKNOWN))
    assert same(samples, drawn(run))
    run_card_code(tmp_path / "out", (8, 8))


@pytest.mark.parametrize("case", [(UNET, 3), (DIT, 0)], ids=["unet", "dit without classes"])
@pytest.mark.slow
def test_a_pipeline_takes_conditions_as_arguments(tmp_path, case):
    from diffusers import DiffusionPipeline

    run = with_columns(*case)
    run.export(tmp_path / "out", format="diffusers")
    for file in (tmp_path / "out").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "unfog" not in ast.unparse(node)
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True, low_cpu_mem_usage=False)
    pipe.set_progress_bar_config(disable=True)
    noise = NoiseSource(0, range(COUNT), run.config.input_shape)
    expected = drawn(run).clamp(-1, 1)
    of = {"batch_size": COUNT, "num_inference_steps": run.config.sampler.steps, "output_type": "np"}
    named = {name: value for name, value in GIVEN.items() if name.isidentifier()}
    for given in ({"given": GIVEN}, {"given": {"cell size": GIVEN["cell size"]}, **named}):
        images = pipe(**of, generator=noise.generators, **given).images
        noise = NoiseSource(0, range(COUNT), run.config.input_shape)
        assert same(2 * torch.from_numpy(images).permute(0, 3, 1, 2) - 1, expected)
    with pytest.raises(ValueError, match=r"age = 'old' is not a number; it is 20 to 89"):
        pipe(age="old")
    with pytest.raises(ValueError, match="'ago' is not a condition of this model, which has age, cell size"):
        pipe(ago=3)
    with pytest.raises(ValueError, match="age is in given, and an argument"):
        pipe(age=3, given={"age": 3})
    run_card_code(tmp_path / "out", (8, 8))


def written_denoiser(run, out):
    run.export(out, format="denoiser")
    return run_path(str(out / "denoiser.py"))["load"](out / "denoiser.safetensors")


def estimate(run, x, sigma, told):
    """The clean images by the network of the run itself."""
    logsnr = torch.full((len(x),), -2 * math.log(sigma))
    alpha = run.config.diffusion.path(logsnr)[0][:, None, None, None]
    return Denoiser(run.network, run.config.diffusion)(alpha * x, logsnr, told)


@pytest.mark.slow
def test_a_denoiser_takes_conditions_by_name(tmp_path):
    run = with_columns()
    denoiser = written_denoiser(run, tmp_path / "out")
    x, label = torch.randn(3, *denoiser.shape), torch.tensor([0, 2, 3])
    told = run.config.conditions.conditions(
        tuple(zip(("age", "cell size", "place", "x"), map(tuple, [TOLD[0], TOLD[1], TOLD[3], TOLD[4]]))), range(3)
    )
    given = {name: values for name, values in GIVEN.items() if name != "linear"}
    with torch.no_grad():
        expected = estimate(run, x, 0.7, told._replace(label=label))
    assert (denoiser(x, 0.7, label, given) - expected).abs().max() < 1e-5 * expected.abs().max()
    # A field of several columns that is told of none of them.
    assert told.several is None
    torch.testing.assert_close(denoiser.score(x, 0.7, label, given), (expected - x) / 0.49, atol=1e-3, rtol=1e-4)
    with pytest.raises(ValueError, match=r"x = 'H&E' is not a value of this condition; give one of HE, PAS"):
        denoiser(x, 0.7, given={"x": "H&E"})
    run_card_code(tmp_path / "out", (8, 8))


NONSENSE = {
    "text": ({"age": "old"}, "age = 'old' is not a number; it is 20 to 89"),
    "truth": ({"age": True}, "age = 'True' is not a number"),
    "huge": ({"age": 10**400}, "is not a number"),
    "beyond float32": ({"age": 1e39}, "is not a number"),
    "number in a vector": ({"place": [["a", 1]]}, "number 1 of place = 'a' is not a number; it is 0 to 5"),
    "short vector": ({"place": [[1]]}, "has 1 numbers, and a vector here has 2"),
    "vector as images": ({"place": [1, 2]}, "has 1 numbers, and a vector here has 2"),
    "category": ({"x": 0}, "x = '0' is not a value of this condition; give one of HE, PAS"),
    "one of several": ({"linear": "red;blue"}, "linear = 'blue' is not a value"),
    "name": ({"stain": "HE"}, "'stain' is not a condition of this model, which has age, "),
}


@pytest.mark.parametrize(("given", "message"), NONSENSE.values(), ids=NONSENSE)
def test_what_is_no_value_is_refused_by_name_value_and_range(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(describe_columns(run_of(columns=COLUMNS).config), given, 2)


def test_values_are_read_as_by_unfog():
    format = ConditionFormat(columns=COLUMNS)
    described = describe_columns(run_of(columns=COLUMNS).config)
    for given in (
        {"age": 60},
        {"age": [20, 40, 60], "x": "PAS"},
        {"linear": [["red"], [], ["red", "thin"]], "place": np.array([[0.5, 1.5]])},
        {"linear": "round;thin", "place": "1;2", "cell size": torch.tensor(1e-3)},
    ):
        ours = format.conditions(format.parse(given), range(4))
        columns = [torch.tensor(values) for values in read(described, given, 4)]
        found = [torch.stack(columns[:2], 1), columns[4][:, None], columns[2], columns[3]]
        for one, other in zip((ours.numbers, ours.categories, ours.several, ours.vectors), found):
            assert one.dtype == other.dtype
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    with pytest.warns(UserWarning, match="age = 200 is outside of the training images, which have 20 to 89"):
        read(described, {"age": 200}, 1)
    assert read([], None, 2) == []
    open_values = read(described, {"age": math.nan, "x": [math.nan, "PAS"], "linear": math.nan, "place": math.nan}, 2)
    assert str(open_values) == str(read(described, {"x": [None, "PAS"]}, 2))


def test_no_name_of_the_code_of_an_export_is_defined_twice(tmp_path):
    for network in (UNET, MPUNET, DIT):
        run = with_columns(network)
        run.export(tmp_path / network.kind, format="denoiser")
        body = ast.parse((tmp_path / network.kind / "denoiser.py").read_text()).body
        names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        assigned = [one for node in body if isinstance(node, ast.Assign) for one in ast.walk(node.targets[0])]
        names += [one.id for one in assigned if isinstance(one, ast.Name)]
        assert len({*names}) == len(names)


def test_conditions_of_another_kind_are_refused_in_words(tmp_path, monkeypatch):
    from unfog.values import condition_kinds

    class Sound(condition_kinds.VectorKind):
        name = "sound"

    monkeypatch.setitem(condition_kinds.KINDS, "sound", Sound())
    run = with_columns()
    facts = replace(COLUMNS[3], name="caption", kind="sound")
    run.config = replace(run.config, columns=(facts,))
    for format in ("safetensors", "denoiser", "onnx", "diffusers"):
        with pytest.raises(RequestError, match=r"no format of an export holds \(caption\)"):
            run.export(tmp_path / "out", format=format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": 10**12}, "no kind and size that Unfog writes"),
        ({"kind": "sound"}, "no kind and size that Unfog writes"),
        ({"kind": "text", "statistics": [10**9, 9]}, "no kind and size that Unfog writes"),
    ],
    ids=["size", "kind", "text"],
)
def test_a_description_that_was_edited_builds_nothing(tmp_path, change, message):
    run = with_columns()
    run.export(tmp_path / "out")
    model = json.loads((tmp_path / "out/model.json").read_text())
    model["conditions"][0] |= change
    with pytest.raises(ValueError, match=message):
        run_path(str(tmp_path / "out/network.py"))["build"](model)


def test_names_of_anybody_are_text_on_the_card(tmp_path):
    names = ("a|b", "`c`", "<i>d</i>", '"]); print(1)', "[e](f)")
    run = run_of(network=DIT, classes=0, columns=(ColumnFacts("x", "category", names),))
    run.export(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "a\\|b" in card
    assert "<i>" not in card
    run_card_code(tmp_path / "out", (8, 8))


# Unknown pixels.


@pytest.mark.parametrize("network", [UNET, MPUNET, DIT], ids=lambda network: network.kind)
@pytest.mark.slow
def test_an_export_leaves_the_same_pixels_unknown(tmp_path, network):
    run = masked(network=network)
    run.export(tmp_path / "out")
    code = shown("safetensors")
    samples = code.sample(*code.load(tmp_path / "out"), inputs(run)[0])
    assert torch.equal(samples.isnan()[0], torch.from_numpy(UNKNOWN))
    assert same(samples, drawn(run, told=False))
    found = run_card_code(tmp_path / "out", (8, 8))
    stored = np.load(tmp_path / "samples.npy")
    assert np.array_equal(stored, run.config.image_format.to_pictures(found["x"]), equal_nan=True)


class Convolutions(torch.nn.Module):
    """A network of somebody's own, which reads x beside the mask, and so hands on any NaN of x."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Conv2d(i, 4, 3, padding=1) for i in (8, 4, 4)))

    def forward(self, x, c_noise, known, label=None):
        return self.layers(torch.cat([x, known], 1)) + c_noise[:, None, None, None] / 1000


def own(kind: str = "ddim"):
    run = masked()
    torch.manual_seed(0)
    run.network = Convolutions().eval()
    take_conditions(run.network, run.config.conditions)
    sampler = replace(run.config.sampler, kind=kind)
    run.config = replace(run.config, network=CustomNetwork(path="mine.Convolutions"), sampler=sampler)
    return run


@pytest.mark.parametrize(("format", "kind"), [("pt2", "dpmpp"), ("onnx", "heun"), ("onnx", "dpmpp")])
@pytest.mark.slow
def test_unknown_pixels_do_not_spread_in_a_network_of_somebodys_own(tmp_path, format, kind):
    run = own(kind)
    run.export(tmp_path / "out", format=format)
    code = run_path(str(tmp_path / "out/sample.py"))
    noise = inputs(run)[0]
    samples = code["sample"](*code["load"](tmp_path / "out"), noise if format == "pt2" else noise.numpy())
    assert same(torch.as_tensor(samples), drawn(run, told=False))


@pytest.mark.slow
def test_an_export_that_draws_nan_where_values_are_known_is_refused(tmp_path):
    run = own()
    run.network.layers.append(torch.nn.Threshold(math.inf, math.nan))
    with pytest.raises(RunError, match=r"100% of the values that the export draws are NaN, and 2.% are unknown"):
        run.export(tmp_path / "out", format="pt2")
    assert not (tmp_path / "out").exists()


def test_a_mask_that_varies_is_all_known_in_samples(tmp_path):
    run = masked(mask=None)
    run.export(tmp_path / "out")
    code = shown("safetensors")
    samples = code.sample(*code.load(tmp_path / "out"), inputs(run)[0])
    assert samples.isfinite().all()
    assert same(samples, drawn(run, told=False))


@pytest.mark.parametrize(("unknown", "dtype"), [("-9999", "float32"), ("65535", "uint16"), ("0", "uint16")])
def test_the_number_that_stands_for_unknown_pixels_is_written(tmp_path, unknown, dtype):
    run = masked(unknown, dtype=dtype)
    run.export(tmp_path / "out")
    values = json.loads((tmp_path / "out/model.json").read_text())["values"]
    maps = run_path(str(tmp_path / "out/values.py"))
    numpy = run_path(str(Path(__file__).parents[2] / "src/unfog/export/values_numpy.py"))
    ours = run.config.image_format.values
    x0 = drawn(run, told=False).clone()
    x0[1, 0, 0, :2] = torch.tensor([-50.0, 50.0])
    expected = ours.to_stored(x0)
    assert expected[0, torch.from_numpy(UNKNOWN)].unique().tolist() == [float(unknown)]
    for one in (maps, numpy):
        found = torch.as_tensor(one["rounded"](values, one["to_stored"](values, x0.numpy())))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-6, atol=1e-6)
        back = torch.as_tensor(one["to_model"](values, found.numpy()))
        assert torch.equal(back.isnan(), ours.to_model(expected).isnan())
        torch.testing.assert_close(back, ours.to_model(expected), equal_nan=True)
    run_card_code(tmp_path / "out", (8, 8))


@pytest.mark.slow
def test_a_denoiser_is_0_where_nothing_is_known_and_has_gradients(tmp_path):
    run = masked()
    denoiser = written_denoiser(run, tmp_path / "out")
    x = torch.randn(2, *denoiser.shape, requires_grad=True)
    sigma = torch.tensor(0.5, requires_grad=True)
    found = denoiser(x, sigma)
    settings = GenerationSettings.default(run.config, 2, 2)
    expected = estimate(run, x, 0.5, settings.conditions(run.config, range(2), CPU))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (found[:, torch.from_numpy(UNKNOWN)] == 0).all()
    found.square().sum().backward()
    assert x.grad.isfinite().all()
    assert sigma.grad.isfinite()
    run_card_code(tmp_path / "out", (8, 8))


def test_a_pipeline_of_pictures_refuses_unknown_pixels(tmp_path):
    with pytest.raises(RequestError, match="give --format denoiser, safetensors"):
        masked().export(tmp_path / "out", format="diffusers")
