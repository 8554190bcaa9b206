"""`Conditions` as one value, and networks of somebody's own that are called with a label instead."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from unfog.checks.run.run_checks import conditions_of_samples
from unfog.config.resume_rules import check_changes
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from unfog.data.augmentation import Augment
from unfog.data.dataset import ImageSet
from unfog.data.settings import Data
from unfog.diffusion.denoiser import Denoiser, Guided
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective
from unfog.errors import RequestError
from unfog.models.layers import ConditionalNetwork
from unfog.models.network_settings import build_model, take_conditions
from unfog.models.settings import DiT
from unfog.pipeline.generate import proportional_given, proportional_labels
from unfog.runs.previews import conditions_of_images
from unfog.training.settings import Preview
from unfog.values import condition_kinds
from unfog.values.columns import Column
from unfog.values.condition_format import (
    AUGMENT_INPUTS,
    ConditionFormat,
    conditions_of,
    facts_of,
)
from unfog.values.condition_kinds import ColumnFacts, ConditionKind
from unfog.values.conditions import NO_CONDITIONS, Conditions

LABEL, AUGMENT = torch.tensor([2, 0, 1, 2, 0]), torch.arange(45.0).reshape(5, 9)
KINDS = {"none": NO_CONDITIONS, "label": Conditions(LABEL), "both": Conditions(LABEL, AUGMENT)}


def same(a: Conditions, b: Conditions) -> bool:
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b))


@pytest.fixture(params=KINDS)
def conditions(request) -> Conditions:
    return KINDS[request.param]


def test_rows_are_those_of_each_condition(conditions):
    for index in (slice(1, 4), torch.tensor([3, 0, 0]), np.array([4, 2]), torch.arange(5) % 2 == 0):
        found = conditions.rows(index)
        for all_of_them, some in zip(conditions, found):
            assert (all_of_them is None) == (some is None)
            assert all_of_them is None or torch.equal(some, all_of_them[index])
    assert same(conditions.rows(slice(None)), conditions)


def test_parts_joined_are_the_whole(conditions):
    assert same(conditions.rows(slice(2)).cat(conditions.rows(slice(2, 5))), conditions)
    for operation in (Conditions.dropped, lambda each: each.to(torch.device("cpu"))):
        parts = [operation(conditions.rows(part)) for part in (slice(2), slice(2, 5))]
        assert same(parts[0].cat(parts[1]), operation(conditions))


def test_other_kinds_cannot_be_joined():
    with pytest.raises(ValueError, match="different kinds"):
        KINDS["both"].cat(KINDS["label"])


def test_dropped_hides_all_but_the_augmentation(conditions):
    none, every = torch.zeros(5, dtype=torch.bool), torch.ones(5, dtype=torch.bool)
    assert same(conditions.dropped(none), conditions)
    assert same(conditions.dropped(every), conditions.dropped())
    assert same(conditions.dropped().dropped(), conditions.dropped())
    assert conditions.dropped().augment is conditions.augment
    assert conditions.droppable == (() if conditions is NO_CONDITIONS else ("label",))
    for name in conditions.droppable:
        assert same(conditions.dropped(only=name), conditions.dropped())


def test_only_hidden_images_lose_their_class():
    hidden = torch.tensor([True, False, False, True, False])
    dropped = KINDS["both"].dropped(hidden)
    assert dropped.label.tolist() == [-1, 0, 1, -1, 0]
    assert dropped.label_or(3).tolist() == [3, 0, 1, 3, 0]
    assert LABEL.tolist() == [2, 0, 1, 2, 0], "the images themselves keep their class"


def test_values_are_written_into_the_tensors_of_another():
    place = KINDS["both"].apply(torch.zeros_like)
    before = [each.data_ptr() for each in place[:2]]
    place.copy_(KINDS["both"])
    assert same(place, KINDS["both"])
    assert [each.data_ptr() for each in place[:2]] == before
    NO_CONDITIONS.copy_(NO_CONDITIONS)


def test_a_tensor_stands_for_the_label():
    assert same(Conditions.of(LABEL), KINDS["label"])
    assert Conditions.of(KINDS["both"]) is KINDS["both"]
    assert Conditions.of(None) == NO_CONDITIONS
    assert same(conditions_of([Column("class", "class", LABEL.numpy())]), KINDS["label"])
    assert conditions_of([]) == NO_CONDITIONS


def test_blank_conditions_fit_their_format():
    assert ConditionFormat().blank(3) == NO_CONDITIONS
    assert ConditionFormat(("a", "b")).blank(3).label.tolist() == [0, 0, 0]
    *_, condition = Augment(augment=0.5)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    assert condition.shape == (2, AUGMENT_INPUTS)


def network(classes: int = 3, augment_inputs: int = 0) -> ConditionalNetwork:
    told = ConditionFormat.numbered(classes, augment_inputs)
    model = build_model(DiT(width=16, depth=1, head_channels=8, patch=4), 1, told).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a fresh network answers 0
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


X, LEVEL = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.linspace(1, 900, 5)


def test_no_condition_a_dropped_one_and_the_null_class_are_the_same():
    model = network()
    unconditional = model(X, LEVEL, NO_CONDITIONS)
    assert torch.equal(model(X, LEVEL, KINDS["label"].dropped()), unconditional)
    assert torch.equal(model(X, LEVEL, torch.full((5,), 3)), unconditional)
    assert torch.equal(model(X, LEVEL), unconditional)
    assert not torch.allclose(model(X, LEVEL, KINDS["label"]), unconditional)
    assert torch.equal(model(X, LEVEL, LABEL), model(X, LEVEL, KINDS["label"]))


def test_a_network_refuses_conditions_that_it_has_no_input_for():
    with pytest.raises(RequestError, match="without classes"):
        network(classes=0)(X, LEVEL, KINDS["label"])
    with pytest.raises(RequestError, match="augmentation"):
        network()(X, LEVEL, KINDS["both"])
    assert network(augment_inputs=9)(X, LEVEL, KINDS["both"]).shape == X.shape


@pytest.mark.slow
def test_networks_compile_to_one_graph_for_each_kind():
    model, graphs = network(augment_inputs=9), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=False)
    for told in (KINDS["both"], KINDS["both"].dropped(), KINDS["label"], KINDS["label"].dropped()):
        torch.testing.assert_close(compiled(X, LEVEL, told), model(X, LEVEL, told))
    assert len(graphs) == 2


class Own(nn.Module):
    """Somebody's own network, which knows a label."""

    def __init__(self, classes: int = 3):
        super().__init__()
        self.seen, self.rows, self.conv = [], nn.Embedding(classes + 1, 1), nn.Conv2d(1, 1, 1)

    def forward(self, x, noise, label=None):
        self.seen.append(label)
        return self.conv(x) if label is None else self.conv(x) + self.rows(label)[:, :, None, None]


class WithAugmentation(Own):
    def forward(self, x, noise, label, augment=None):
        self.augment = augment
        return super().forward(x, noise, label)


class Modern(Own):
    def forward(self, x, noise, conditions):
        self.conditions = conditions
        return super().forward(x, noise, conditions.label_or(3))


def adapted(own: Own) -> Own:
    take_conditions(own, ConditionFormat.numbered(3))
    return own


def test_an_own_network_is_called_with_a_label():
    own = adapted(Own())
    own(X, LEVEL, KINDS["label"])
    own(X, LEVEL, KINDS["label"].dropped())
    own(X, LEVEL, NO_CONDITIONS)
    own(X, LEVEL, LABEL)
    own(X, LEVEL)
    assert [label if label is None else label.tolist() for label in own.seen] == [
        *(LABEL.tolist(), [3] * 5, None, LABEL.tolist(), None)
    ]
    assert own.state_dict().keys() == Own().state_dict().keys(), "the names of the weights stay"
    assert torch.equal(copy.deepcopy(own)(X, LEVEL, KINDS["label"]), own(X, LEVEL, LABEL))


def test_an_own_network_gets_the_augmentation_as_fourth_argument():
    own = adapted(WithAugmentation())
    own(X, LEVEL, KINDS["both"])
    assert own.augment is AUGMENT
    own(X, LEVEL, KINDS["label"])
    assert own.augment is None


def test_an_own_network_may_ask_for_all_conditions():
    own = adapted(Modern())
    own(X, LEVEL, KINDS["both"])
    assert own.conditions is KINDS["both"]


def test_own_networks_are_trained_and_guided_alike():
    """The label 3 stands for no class, whatever way a network is told so."""
    torch.manual_seed(0)
    own, modern = adapted(Own()), adapted(Modern())
    modern.load_state_dict(own.state_dict())
    losses, guided, diffusion = [], [], Diffusion()
    for model in (own, modern):
        torch.manual_seed(0)
        losses.append(Objective(diffusion, 0.5)(model, X, KINDS["label"]).per_image)
        guided.append(Guided(Denoiser(model, diffusion), 2.0)(X, torch.zeros(5), KINDS["label"]))
    assert torch.equal(*losses)
    assert torch.equal(*guided)
    assert 3 in own.seen[0].tolist()
    assert own.seen[1].tolist() == [*LABEL.tolist(), *[3] * 5]


@pytest.mark.slow
def test_an_own_network_compiles_to_one_graph():
    class Plain(Own):
        def forward(self, x, noise, label=None):
            return self.conv(x) + self.rows(label)[:, :, None, None]

    own, graphs = adapted(Plain()), []
    expected = own(X, LEVEL, KINDS["label"])

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    own.compile(backend=count, dynamic=False)
    for _ in range(2):
        torch.testing.assert_close(own(X, LEVEL, KINDS["label"]), expected)
    assert len(graphs) == 1


class NumberKind(ConditionKind):
    """A kind as `docs/extending/condition.md` adds one, for what all kinds share."""

    name, field = "number", "augment"

    def inputs(self, facts):
        return 2

    def tensor(self, columns):
        return torch.from_numpy(np.stack(columns, 1).astype(np.float32))

    def parse(self, facts, word):
        return float(str(word))

    def usual(self, facts):
        return (0.5,)


@pytest.fixture
def two_kinds(monkeypatch):
    monkeypatch.setitem(condition_kinds.KINDS, "number", NumberKind())
    facts = (ColumnFacts("age", "number", statistics=(40.0, 1.5)), ColumnFacts("mass", "number"))
    return ConditionFormat(("cat", "dog", "a,b"), columns=facts)


def test_columns_of_a_kind_fill_one_tensor_in_the_order_of_their_names(two_kinds):
    values = {"mass": np.array([3.0, 4.0]), "age": np.array([1.0, 2.0])}
    made = conditions_of(Column(name, "number", each) for name, each in values.items())
    assert made.augment.tolist() == [[1, 3], [2, 4]]


def test_samples_cycle_through_each_column_by_itself(two_kinds):
    given = two_kinds.parse({"age": [20, "30"], "class": ["dog", 0, "cat"]})
    assert given == (("class", (1, 0, 0)), ("age", (20.0, 30.0)), ("mass", (0.5,)))
    told = two_kinds.conditions(given, range(1, 5))
    assert told.label.tolist() == [0, 0, 1, 0]
    assert told.augment.tolist() == [[30, 0.5], [20, 0.5], [30, 0.5], [20, 0.5]]
    names = two_kinds.names(given, 4)
    assert len(names) == 6
    assert names[1] == "class=cat age=30.0 mass=0.5"
    assert two_kinds.blank(3).augment.shape == (3, 2)


def test_a_run_of_classes_alone_names_them():
    format = ConditionFormat(("cat", "dog"))
    assert format.parse({}) == format.usual == (("class", (0, 1)),)
    assert format.names(format.parse({"class": "dog"}), 4) == ["dog"]
    assert ConditionFormat().names((), 4) == []
    assert ConditionFormat().parse({}) == ()
    assert format.with_label({}, np.array([1])) == {"class": [1]}


def test_words_of_a_command_are_given_by_name(two_kinds):
    assert two_kinds.read_words(["age=20,30", "class=a,b"]) == {"age": ["20", "30"], "class": ["a,b"]}
    for words, said in ((["age"], "NAME=VALUE"), (["=3"], "NAME=VALUE"), (["age=1", "age=2"], "age=VALUE,VALUE")):
        with pytest.raises(RequestError, match=said):
            two_kinds.read_words(words)


def test_what_is_given_and_unknown_is_refused(two_kinds):
    for given, said in (({"agee": 1}, "did you mean 'age'"), ({"class": "cow"}, "give one of cat, dog")):
        with pytest.raises(RequestError, match=said):
            two_kinds.parse(given)
    with pytest.raises(RequestError, match="must be a dict"):
        two_kinds.parse("age=3")
    with pytest.raises(RequestError, match="must be a dict"):
        two_kinds.parse(two_kinds.with_label(np.zeros(2), "dog"))
    with pytest.raises(RequestError, match="each its own"):
        ConditionFormat(columns=2 * two_kinds.columns)
    with pytest.raises(RequestError, match="no conditions"):
        ConditionFormat().parse({"age": 3})
    with pytest.raises(RequestError, match="are the same"):
        two_kinds.with_label({"class": "cat"}, "dog")
    with pytest.raises(RequestError, match="no classes"):
        ConditionFormat().with_label({}, "dog")
    with pytest.raises(RequestError, match="kind 'shape' of a condition is unknown"):
        facts_of([Column("form", "shape", np.zeros(3))])


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
def test_values_may_be_arrays_and_scalars_of_numpy_and_torch(two_kinds, of):
    for label, value in ((1, 2.0), ([0, 1], [2.0, 3.0])):
        given = two_kinds.with_label({"age": of(value), "mass": of(value)}, of(label))
        assert two_kinds.parse(given) == two_kinds.parse({"age": value, "mass": value, "class": label})
    with pytest.raises(RequestError, match="class = '7' is not"):
        two_kinds.parse({"class": of([7])})
    assert two_kinds.with_label(None, ()) == {}


def test_a_resume_with_other_columns_is_refused_in_words(two_kinds):
    other = ColumnFacts("size", "number", tuple("ABCDEFG"))
    config, other = Config(columns=two_kinds.columns), Config(columns=(other,))
    had, has = r"age \(number\), mass \(number\)", r"size \(number of A, B, C, D, E, \.\.\.\)"
    for old, new, said in ((config, other, f"with {had}, .* have {has}"), (Config(), config, "with no columns, ")):
        with pytest.raises(RequestError, match=said):
            check_changes(old, new, force=True)


def test_the_check_of_a_run_draws_with_conditions_of_training_images(two_kinds):
    columns = {name: Column(name, "number", np.arange(20.0)) for name in ("age", "mass")}
    images = ImageSet(np.zeros((20, 1, 4, 4), np.uint8), [str(i) for i in range(20)], columns)
    assert len({*dict(conditions_of_samples(ConditionFormat(columns=two_kinds.columns), images, 8))["age"]}) == 8
    many = ConditionFormat.numbered(100)
    assert conditions_of_samples(many, images, 3) == (("class", (0, 50, 99)),)
    assert conditions_of_samples(ConditionFormat(), images, 3) == ()


def test_facts_on_columns_are_stored_with_the_settings(two_kinds):
    assert "columns" not in to_toml(Config(classes=("cat",))), "older programs read settings without columns"
    config = Config(classes=("cat", "dog", "a,b"), columns=two_kinds.columns)
    assert from_toml(to_toml(config), Config()) == config
    assert config.conditions == two_kinds
    for text, said in (
        ("[[columns]]\nname = 3", r"columns\[0\].name"),
        ("columns = [3]", r"columns\[0\]"),
        ('[[columns]]\nname = "form"\nkind = "shape"', "kind 'shape'"),
        ('[[columns]]\nname = "other"\nkind = "class"', "the one column"),
        ("[[columns]]\nnames = []", "unknown setting"),
    ):
        with pytest.raises(RequestError, match=said):
            from_toml(text, Config())


def test_a_network_that_takes_a_label_alone_is_not_trained_with_other_conditions(two_kinds):
    class Own(nn.Module):
        def forward(self, x, noise, label=None):
            return x

    with pytest.raises(RequestError, match="age, mass"):
        take_conditions(Own(), two_kinds)


def test_samples_in_the_proportions_of_the_images_have_all_conditions_of_one_image(two_kinds):
    labels, ages = np.array([2, 0, 0, 1, 0, 0, 0, 0, 0, 0]), np.arange(10.0)
    columns = {"class": Column("class", "class", labels, two_kinds.classes)}
    columns |= {name: Column(name, "number", ages) for name in ("age", "mass")}
    images = ImageSet(np.zeros((10, 1, 4, 4), np.uint8), [str(i) for i in range(10)], columns)
    given = dict(proportional_given(two_kinds, images, 200))
    assert given["age"] == given["mass"]
    assert all(labels[int(age)] == label for age, label in zip(given["age"], given["class"], strict=True))
    assert np.abs(np.bincount(np.array(given["age"], int), minlength=10) - 20).max() <= 2
    assert given["class"] == proportional_labels(labels, 200)
    alone = proportional_given(ConditionFormat(two_kinds.classes), images, 200)
    assert alone == (("class", proportional_labels(labels, 200)),)


def test_previews_have_conditions_of_held_out_images_where_there_is_more_than_the_class(two_kinds):
    columns = {name: Column(name, "number", np.arange(20.0)) for name in ("age", "mass")}
    pixels = np.zeros((20, 1, 4, 4), np.uint8) + np.arange(20, dtype=np.uint8)[:, None, None, None]
    images = ImageSet(pixels, [str(i) for i in range(20)], columns)
    train, held_out = images.subset(slice(14)), images.subset(slice(14, None))
    config = Config(columns=two_kinds.columns, preview=Preview(images=4), data=Data(size=4, channels=1))
    shown = conditions_of_images(config, held_out, train)
    given = dict(shown.given)
    assert given["age"] == (14, 16, 17, 19)
    assert np.array_equal(shown.images[:, 0, 0, 0], given["age"])
    assert given["age"] == given["mass"]
    assert dict(conditions_of_images(config, held_out.subset(slice(0)), train).given)["age"] == (0, 4, 9, 13)
    assert conditions_of_images(Config(classes=("cat",)), held_out, train) is None
