"""The layer of columns at its start: how much each column has to say."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from unfog.models.condition_embedding import ColumnEmbedding, column_inputs
from unfog.values.columns import Column
from unfog.values.condition_format import conditions_of, facts_of

ROWS, WIDTH = 600, 1024


def columns():
    draw = np.random.default_rng(0)
    names = tuple(map(str, range(300)))
    return [
        Column("age", "number", draw.standard_normal(ROWS) * 7 + 3),
        Column("mass", "number", draw.standard_normal(ROWS)),
        Column("kind", "category", np.arange(ROWS) % 300, names),
        Column("marks", "several", draw.integers(0, 2, (ROWS, 40)).astype(np.int8), names[:40]),
        Column("place", "vector", draw.standard_normal((ROWS, 50)) * 9),
    ]


def fresh(told):
    torch.manual_seed(0)
    return ColumnEmbedding(facts_of(told), partial(nn.Linear, out_features=WIDTH, bias=False))


@pytest.mark.parametrize("names", [("kind",), ("age", "kind"), ("age", "mass", "kind", "marks", "place")])
def test_a_column_begins_with_the_same_power_whatever_others_there_are(names):
    told = [one for one in columns() if one.name in names]
    layer, places = fresh(told), column_inputs(facts_of(told))
    weight, powers = layer.linear.weight.detach().clone(), {}
    for name, place in places.items():
        with torch.no_grad():
            layer.linear.weight.zero_()[:, place] = weight[:, place]
            powers[name] = float(layer(conditions_of(told), ROWS, torch.float32).square().mean())
    # Of 12 inputs of a number, 6 in mean square, and of 51 of a vector, 50, with weights of variance 1 / (3 inputs).
    alone = {"age": 6 / 36, "mass": 6 / 36, "kind": 1, "marks": 1, "place": 50 / 153}
    # 12 inputs of a number have 12 * 1024 weights, whose mean square is known to 1%, and 600 values with it to 3%.
    assert powers == pytest.approx({name: alone[name] for name in names}, rel=0.1)


@pytest.mark.parametrize("place", [0, 4])
def test_a_number_or_vector_alone_is_drawn_as_torch_draws_it(place):
    layer = fresh(columns()[place : place + 1])
    torch.manual_seed(0)
    assert torch.equal(layer.linear.weight, nn.Linear(layer.linear.in_features, WIDTH, bias=False).weight)
