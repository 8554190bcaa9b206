"""Numbers, categories, several and vectors of a table, from training to samples."""

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES, NETWORK
from launches import ended, kill_after_checkpoint, launched, output  # noqa: F401  a fixture
from unfog.cli.main import main
from unfog.errors import RequestError
from unfog.inference.run import Run
from unfog.models.condition_embedding import ColumnEmbedding, column_inputs
from unfog.models.network_settings import build_model
from unfog.models.settings import SIZES
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, conditions_of, facts_of
from unfog.values.conditions import Conditions

NAN = float("nan")
NEVER = {"every": -1}
TINY = {"size": 16, "network": NETWORK, "batch": 4, "device": "cpu", "evaluate": NEVER, **FEW_PICTURES}
COLUMNS = [
    Column("age", "number", np.array([20.0, 60.0, NAN])),
    Column("mass", "number", np.array([1.0, 2.0, 3.0])),
    Column("stain", "category", np.array([0, 1, -1]), ("HE", "PAS")),
    Column("marks", "several", np.array([[1, 0], [1, 1], [-1, -1]], np.int8), ("red", "round")),
    Column("place", "vector", np.array([[0.0, 5], [1, 5], [NAN, NAN]])),
]
FORMAT = ConditionFormat(("a", "b"), columns=facts_of(COLUMNS))
TOLD = conditions_of(COLUMNS)._replace(label=torch.tensor([0, 1, 0]))


def main_status(words):
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code


@pytest.fixture
def cells(tmp_path):
    path = tmp_path / "cells"
    path.mkdir()
    rows = ["file_name,age,stain,marks,place"]
    for i in range(30):
        Image.new("L", (16, 16), 8 * i).save(path / f"{i:02}.png")
        rows.append(
            f"{i:02}.png,{'' if i == 7 else i},{'HE' if i % 2 else 'PAS'},{'red;round' if i % 3 else ';'},{i};{-i}"
        )
    (path / "metadata.csv").write_text("\n".join(rows))
    return path


def shift(path):
    """Shift the column `age` by one row."""
    head, *rows = (line.split(",") for line in (path / "metadata.csv").read_text().splitlines())
    ages = [row[1] for row in rows]
    shifted = [[row[0], age, *row[2:]] for row, age in zip(rows, [ages[-1], *ages[:-1]])]
    (path / "metadata.csv").write_text("\n".join(map(",".join, [head, *shifted])))


@pytest.mark.slow
def test_a_table_is_trained_resumed_and_drawn_from(cells, tmp_path, capsys):
    run = unfog.train(cells, out=tmp_path / "run", condition="age,stain,marks,place", steps=1, **TINY)
    said = "".join(capsys.readouterr())
    assert "condition age: number, 0 to 29" in said
    assert "not known for 1 of the 30 training images" in said
    assert {one.name: one.kind for one in run.config.columns} == {
        "age": "number",
        "marks": "several",
        "place": "vector",
        "stain": "category",
    }
    unfog.resume(tmp_path / "run", steps=2)
    words = ["sample", str(run.path), "-n", "4", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main_status([*words, "--given", "age=3,90", "stain=HE", "marks=red", "place=1;2", "--guidance", "2"]) in (
        None,
        0,
    )
    assert "age = 90 is outside" in "".join(capsys.readouterr())
    second = next((tmp_path / "out").glob("000001*"))
    assert Image.open(second).text["Given"] == "age=90 marks=red place=1;2 stain=HE"
    run.export(tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text()
    assert all(f"| {one.name} | {one.kind} |" in card for one in run.config.columns)
    assert "| condition stain | category, 2 values: HE, PAS |" in card
    assert "| condition age | number, 0 to 29" in card
    for given, hint in (
        ({"agee": 1}, "did you mean 'age'"),
        ({"stain": "HES"}, "did you mean 'HE'"),
        ({"place": 1}, "has 2"),
    ):
        with pytest.raises(RequestError, match=hint):
            run.sample(given=given)
    shift(cells)
    with pytest.raises(RequestError, match="columns with other values: age"):
        unfog.resume(tmp_path / "run", steps=3)


@pytest.mark.slow
def test_a_pack_holds_conditions_of_which_a_run_may_use_some(cells, tmp_path):
    assert main_status(["pack", str(cells), str(tmp_path / "pack"), "--size", "16", "--condition", "age,stain"]) in (
        None,
        0,
    )
    run = unfog.train(tmp_path / "pack", out=tmp_path / "run", condition="stain", steps=1, **TINY)
    assert [one.name for one in run.config.columns] == ["stain"]
    unfog.resume(tmp_path / "run", steps=2)
    with pytest.raises(RequestError, match="no column 'marks'"):
        unfog.train(tmp_path / "pack", out=tmp_path / "other", condition="marks", steps=1, **TINY)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_samples_have_the_known_conditional_mean_and_deviation(tmp_path):
    """Images age * pattern + 0.3 noise: given an age, their mean is age * pattern, and their deviation 0.3."""
    draw, pattern = np.random.default_rng(0), np.linspace(-1, 1, 64).reshape(8, 8)
    ages = draw.uniform(-1, 1, 2000)
    images = (ages[:, None, None] * pattern + 0.3 * draw.normal(size=(2000, 8, 8))).astype(np.float32)[..., None]
    settings = TINY | {"size": 8, "network": "dit:depth=2,width=64,patch=4", "batch": 64, "steps": 300}
    data = {"dtype": "float32", "held_out": 0}
    run = unfog.train(images, out=tmp_path / "run", conditions={"age": ages}, data=data, **settings)
    for age in (-0.8, 0.0, 0.8):
        found = run.sample(128, given={"age": age}, guidance=1, steps=20)[..., 0]
        slope = float((found.mean(0) * pattern).sum() / (pattern**2).sum())
        assert abs(slope - age) < 0.15  # the error of the mean of 128 samples is 0.005
        assert abs(found.std(0).mean() - 0.3) < 0.06


def test_columns_of_a_kind_lie_side_by_side_by_their_names():
    assert FORMAT.spans == (
        ("label", 0, 1),
        ("numbers", 0, 1),
        ("several", 0, 2),
        ("numbers", 1, 2),
        ("vectors", 0, 2),
        ("categories", 0, 1),
    )
    assert TOLD.numbers[:2].tolist() == [[20, 1], [60, 2]]
    assert TOLD.several[2].isnan().all()


def test_each_condition_is_hidden_by_itself():
    for k, (field, start, stop) in enumerate(FORMAT.spans):
        hidden = torch.zeros(3, len(FORMAT.spans), dtype=torch.bool)
        hidden[1, k] = True
        changed = TOLD.dropped_each(hidden, FORMAT.spans)
        for name in TOLD._fields:
            before, after = getattr(TOLD, name), getattr(changed, name)
            if before is None:
                continue
            expected = before.clone().reshape(3, -1)
            if name == field:
                expected[1, start:stop] = NAN if before.is_floating_point() else -1
            torch.testing.assert_close(after.reshape(3, -1), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("network", ["tiny", "small"])
def test_what_is_hidden_is_embedded_as_what_is_not_known(network):
    model = build_model(SIZES[network], 1, FORMAT)
    layer = model.column_embedding
    assert isinstance(layer, ColumnEmbedding)
    assert "column_embedding" in model.embeddings, "weights without it would be refused"
    known, other, unknown = layer(TOLD, 3, torch.float32)
    hidden = layer(TOLD.dropped(), 3, torch.float32)
    none = layer(TOLD._replace(numbers=None, categories=None, several=None, vectors=None), 3, torch.float32)
    assert torch.isfinite(hidden).all()
    torch.testing.assert_close(none, hidden)
    assert not torch.equal(known, other)
    assert not torch.equal(unknown, hidden[2]), "its mass is known"


def test_a_network_without_columns_refuses_them():
    with pytest.raises(RequestError, match="columns were given"):
        build_model(SIZES["tiny"], 1)(torch.zeros(3, 1, 16, 16), torch.ones(3), TOLD._replace(label=None))


def test_words_of_a_command_become_values():
    given = FORMAT.parse(FORMAT.read_words(["age=20,1e3", "marks=;", "place=1;2"]))
    assert dict(given)["age"] == (20, 1000)
    assert dict(given)["marks"] == ((0, 0),)
    assert FORMAT.untold(given) == ["mass", "stain"]
    assert any("age = 1000 is outside" in line for line in FORMAT.concerns(given))
    assert FORMAT.names(given, 2)[1] == "class=b age=1000 marks=; place=1;2"
    told = FORMAT.conditions(given, range(2))
    assert told.vectors.tolist() == [[1, 2], [1, 2]]
    assert told.categories.tolist() == [[-1], [-1]]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("ended")
def test_two_ranks_with_conditions_that_are_killed_end_as_if_nothing_had_happened(cells, tmp_path):
    words = [
        "--condition",
        "age,stain,marks,place",
        "--size",
        "16",
        "--network",
        "tiny",
        "--batch",
        "4",
        "--steps",
        "12",
    ]
    words += ["--checkpoint.every", "3", "--checkpoint.keep", "9", "--preview.every", "-1", "--evaluate.every", "-1"]
    words += ["--device", "cpu", "--microbatch", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert output(launched(2, "train", whole, *words, images=cells)).count("condition age: number") == 1
    process = launched(2, "train", killed, *words, images=cells)
    kill_after_checkpoint(killed, 3, process)
    output(launched(2, "resume", killed))
    for name in ("model.safetensors", "ema.safetensors"):
        first, second = (run / "checkpoints" / "00000012" / name for run in (whole, killed))
        assert first.read_bytes() == second.read_bytes()
    shift(cells)
    said = launched(2, "resume", killed, "--steps", "13").communicate(timeout=300)[0]
    assert "columns with other values: age" in said


def outputs(network, told):
    x = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return network.eval()(x, torch.tensor([1.0, 400.0, 900.0]), told)


@pytest.mark.slow
def test_a_condition_that_is_added_to_a_trained_run_begins_at_zero(cells, tmp_path, capsys):
    settings = TINY | {"lr": 1e-2}
    old = unfog.train(cells, out=tmp_path / "old", condition="age", steps=4, data={"labels": "none"}, **settings)
    new = unfog.train(cells, out=tmp_path / "new", condition="age,stain", init=old.path, steps=2, **settings)
    assert "stain begins at zero" in "".join(capsys.readouterr())
    first = Run(new.path, step=0).network
    ages = Conditions(numbers=torch.tensor([[3.0], [25.0], [NAN]]))
    before = outputs(old.network, ages)
    assert not torch.allclose(before[0], outputs(old.network, ages.dropped())[0]), "the age has an effect"
    for stain in ([0, 1, -1], [1, -1, 0]):
        torch.testing.assert_close(outputs(first, ages._replace(categories=torch.tensor(stain)[:, None])), before)
    weight = new.network.column_embedding.linear.weight
    assert float(weight[:, 12:].abs().max()) > 0, "the layer of the stain is trained"
    other = unfog.train(cells, out=tmp_path / "other", condition="stain", init=old.path, steps=1, **settings)
    assert "stain begins at zero" in "".join(capsys.readouterr())
    assert float(Run(other.path, step=0).network.column_embedding.linear.weight.abs().max()) == 0


def test_places_of_columns_in_the_layer_are_those_that_it_computes():
    embedding = build_model(SIZES["tiny"], 1, FORMAT).column_embedding
    places = column_inputs(FORMAT.columns)
    assert sum(place.stop - place.start for place in places.values()) == embedding.linear.in_features
    for one in FORMAT.columns:
        (column,) = (each for each in COLUMNS if each.name == one.name)
        other = TOLD._replace(
            **conditions_of([*(each for each in COLUMNS if each is not column), column.rows([1, 0, 2])])._asdict()
        )
        with torch.no_grad():
            embedding.linear.weight.zero_()
            embedding.linear.weight[:, places[one.name]] = 1 + torch.arange(
                places[one.name].stop - places[one.name].start
            )
        assert not torch.equal(embedding(TOLD, 3, torch.float32), embedding(other, 3, torch.float32))
        with torch.no_grad():
            embedding.linear.weight.fill_(1.0)
            embedding.linear.weight[:, places[one.name]] = 0
        torch.testing.assert_close(embedding(TOLD, 3, torch.float32), embedding(other, 3, torch.float32))
