"""The judge of conditions: what it reads from images of any format, and the scores of what was asked."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from unfog.evaluation.condition_worth import ALL, another_image, condition_worth
from unfog.evaluation.held_out import HeldOut, HeldOutBuckets, midpoints
from unfog.evaluation.judge import Judge
from unfog.evaluation.judged_kinds import JUDGED, Retrieval, average_precision, grid_of, main_scores, score_condition
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, conditions_of, facts_of
from unfog.values.condition_kinds import KINDS, ColumnFacts
from unfog.values.conditions import Conditions
from unfog.values.image_format import ImageFormat, StoredValues
from unfog.values.tokenizer import Tokenizer, learn_merges

NAN = float("nan")


def drawn(count: int, seed: int) -> tuple[np.ndarray, dict[str, Column]]:
    """Images float32 [N, 3, 12, 20] with unknown pixels, and columns of all kinds, which are seen in them."""
    draw = np.random.default_rng(seed)
    shade, side = draw.uniform(-1, 1, count), draw.integers(0, 2, count)
    marks, place = draw.integers(0, 2, (count, 2)), draw.uniform(0, 1, (count, 2))
    y, x = np.mgrid[:12, :20] / np.array([12, 20])[:, None, None]
    blob = np.exp(-(((y - place[:, :1, None]) ** 2 + (x - place[:, 1:, None]) ** 2) * 20))
    images = np.stack([np.broadcast_to(shade[:, None, None], blob.shape), blob, np.zeros_like(blob)], 1)
    images[:, 2] += np.where(side[:, None, None] == 0, x < 0.5, x >= 0.5)
    images[:, 0, 0] += marks[:, :1]
    images[:, 0, -1] += marks[:, 1:]
    images = (images + 0.05 * draw.normal(size=images.shape)).astype(np.float32) * 500 + 4000
    images[draw.uniform(size=images.shape) < 0.05] = np.nan
    shade[::9], side[::8] = np.nan, -1
    marks[::7], place[::6] = -1, np.nan
    columns = [
        Column("class", "class", draw.integers(0, 3, count), ("a", "b", "c")),  # not seen in them
        Column("marks", "several", marks.astype(np.int8), ("top", "bottom")),
        Column("place", "vector", place),
        Column("shade", "number", shade * 10 + 50),
        Column("side", "category", side, ("left", "right")),
    ]
    return images, {one.name: one for one in columns}


FORMAT = ImageFormat.of(3, "20x12", StoredValues("float32", 3000, 5000, unknown="nan"))


def batches(images, columns, facts, each=250):
    for first in range(0, len(images), each):
        rows = slice(first, first + each)
        yield images[rows], [columns[one.name].values[rows] for one in facts]


def trained() -> Judge:
    images, columns = drawn(600, 0)
    facts = (ColumnFacts("class", "class", columns["class"].categories), *facts_of(columns.values()))
    judge = Judge.untrained(facts, FORMAT)
    judge.train(batches(images, columns, facts))
    return judge


@pytest.mark.slow
def test_all_kinds_are_read_from_images_of_any_format_and_a_broken_model_is_noticed():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    judge = trained()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    images, columns = drawn(300, 1)
    outputs = judge.read([images[:200], images[200:]])

    def scores(asked):
        found = {}
        for one, output in zip(judge.facts, outputs, strict=True):
            known = (output, columns[one.name].values)
            found |= {(s.condition, s.measure): s for s in score_condition(one, (output, asked(known[1])), known)}
        return found

    right, broken = scores(lambda values: values), scores(lambda values: values[another_image(300)])
    assert {name for name, _ in right} == {"class", "marks", "place", "shade", "side"}
    for (name, measure), one in right.items():
        assert one.low <= one.value <= one.high
        assert one.n_real == one.n == {"class": 300, "marks": 257, "place": 250, "shade": 266, "side": 262}[name]
        if name == "class":
            assert one.obeyed == "the judge cannot see it"
            continue
        assert one.obeyed == "yes", one
        assert one.value < 1 if measure == "error" else one.value > 0.9, one
        worse = broken[name, measure]
        assert worse.obeyed == "no", worse
        assert worse.value == pytest.approx(worse.shuffled, abs=0.3 if measure != "error" else 2)
        assert worse.real == one.real
    assert [one.measure for one in main_scores([*right.values()])] == [
        "accuracy",
        "average precision",
        "R2",
        "R2",
        "accuracy",
    ]
    # The same images at another size, and a broken image, are read too.
    assert torch.cat(judge.read([np.full((2, 3, 24, 40), np.inf, np.float32)]), 1).isfinite().all()


def test_a_judge_is_the_same_each_time_and_after_it_was_stored(monkeypatch):
    monkeypatch.setattr("unfog.evaluation.judge._STEPS", (3, 3))
    judge, again = trained(), trained()
    images, _ = drawn(20, 1)
    assert all(torch.equal(a, b) for a, b in zip(judge.read([images]), again.read([images]), strict=True))
    kept = Judge.untrained(judge.facts, FORMAT)
    assert kept.load(judge.weights())
    assert all(torch.equal(a, b) for a, b in zip(judge.read([images]), kept.read([images]), strict=True))
    for wrong in (
        {},
        judge.weights() | {"mean": torch.zeros(4, 1, 1)},
        judge.weights() | {"mean": torch.full((3, 1, 1), NAN)},
    ):
        assert not Judge.untrained(judge.facts, FORMAT).load(wrong)


def test_scores_are_those_of_their_definitions():
    draw = np.random.default_rng(0)
    asked = draw.normal(50, 10, 200)
    facts = facts_of([Column("age", "number", asked)])[0]
    read = asked + draw.normal(0, 3, 200)
    mean, deviation = facts.statistics[:2]
    output = torch.from_numpy((read - mean) / deviation).float()[:, None]
    r2, error = score_condition(facts, (output, asked), (output, asked))
    assert error.value == pytest.approx(float(np.sqrt(((read - asked) ** 2).mean())), rel=1e-5)
    assert r2.value == pytest.approx(
        1 - float(((read - asked) ** 2).sum() / ((asked - asked.mean()) ** 2).sum()), rel=1e-5
    )
    # The interval is about that of the delta method: two standard errors of the mean square, through the root.
    squares = (read - asked) ** 2
    reach = 1.96 * squares.std() / math.sqrt(200) / (2 * error.value)
    assert error.high - error.low == pytest.approx(2 * reach, rel=0.3)
    assert score_condition(facts, (output[:9], asked[:9]), (output, asked)) == []
    assert (
        score_condition(facts, (output, np.full(200, 40.0)), (output, asked))[0].measure == "error"
    )  # R2 has no value


def test_average_precision_takes_equal_outputs_together():
    draw = np.random.default_rng(1)
    output, present = draw.integers(0, 6, 80), draw.integers(0, 2, 80)
    weights = draw.integers(0, 3, (4, 80)).astype(float)

    def naive(weight):
        total = 0.0
        for i in range(80):
            as_high = output >= output[i]
            total += weight[i] * present[i] * (weight * present * as_high).sum() / max(1e-9, (weight * as_high).sum())
        return total / (weight * present).sum()

    found = average_precision(torch.from_numpy(output), torch.from_numpy(present), torch.from_numpy(weights))
    assert found.tolist() == pytest.approx([naive(weight) for weight in weights])
    assert average_precision(torch.ones(5), torch.ones(5), torch.ones(1, 5).double()).isnan().all()


def test_every_kind_of_column_has_a_judge():
    assert {"class", "number", "category", "several", "vector", "text"} <= {*JUDGED} <= {*KINDS}


_COLOURS, _PLACES = ("black", "dark", "grey", "light", "white"), ("left", "middle", "right", "top", "bottom")
_SQUARES = ImageFormat.of(1, "15x15")


def captioned(count, seed, shuffled=False):
    """Squares of a shade at a place, and their captions; two of the 25 pairs are in no set of an even seed."""
    draw = np.random.default_rng(seed)
    shade, place = draw.integers(0, 5, count), draw.integers(0, 5, count)
    if seed % 2 == 0:
        shade = np.where((shade == place) & (shade < 2), shade + 2, shade)
    images = draw.integers(100, 140, (count, 1, 15, 15)).astype(np.uint8)
    for image, s, (y, x) in zip(images, shade, np.array([[5, 0], [5, 5], [5, 10], [0, 5], [10, 5]])[place]):
        image[0, y : y + 5, x : x + 5] = 60 * s
    captions = [f"a {_COLOURS[s]} square at the {_PLACES[p]}" for s, p in zip(shade, place)]
    if shuffled:
        captions = [captions[i] for i in draw.permutation(count)]
    captions[::20] = [""] * len(captions[::20])
    return images, captions


def caption_judge(captions, images):
    tokenizer = Tokenizer(learn_merges(captions))
    tokens = [tokenizer.encode(each) for each in captions]
    length = max(map(len, tokens))

    def values(texts):
        encoded = [tokenizer.encode(each) for each in texts]
        return np.array([[*each, *[-1] * (length - len(each))] for each in encoded])

    facts = ColumnFacts("text", "text", tokenizer.merges, (float(tokenizer.vocabulary), float(length)))
    judge = Judge.untrained((facts,), _SQUARES)
    judge.train([(images, [values(captions)])])
    return judge, facts, values


def test_a_judge_of_captions_is_the_same_each_time(monkeypatch):
    monkeypatch.setattr("unfog.evaluation.judge._STEPS", (3, 3))
    images, captions = captioned(60, 0)
    judge, again = (caption_judge(captions, images)[0].weights() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(judge.values(), again.values(), strict=True))


@pytest.mark.slow
def test_captions_are_found_by_images_and_shuffled_ones_are_not(monkeypatch):
    monkeypatch.setattr("unfog.evaluation.judge._STEPS", (150, 150))
    images, captions = captioned(600, 0)
    judge, facts, values = caption_judge(captions, images)
    reader = judge.reader(0)
    kind = Retrieval(reader, facts, [values(captions)])
    assert "23 captions to look for, of which chance finds 4.3% and 21.7%" in str(kind)
    (own,), (others, told) = judge.read([images]), captioned(200, 1)
    (output,) = judge.read([others])
    first, five = score_condition(facts, (output, values(told)), (own, values(captions)), kind)
    assert (first.measure, five.measure, first.n, first.n_real) == ("R@1", "R@5", 190, 570)
    assert 0.5 < first.low < first.value <= first.high <= 1
    assert five.value >= first.value > 0.8
    assert first.shuffled < 0.12
    assert (first.real > 0.9, first.obeyed) == (True, "yes")
    # Pairs of words that the judge never saw together.
    unseen = [i for i, each in enumerate(told) if each and each not in captions]
    assert len({told[i] for i in unseen}) == 2
    some = output[unseen], values([told[i] for i in unseen])
    assert score_condition(facts, (some[0], some[1]), (own, values(captions)), kind)[1].value > 0.5
    # Each image with the caption of another one teaches nothing.
    images, captions = captioned(600, 0, shuffled=True)
    judge, facts, values = caption_judge(captions, images)
    kind = Retrieval(judge.reader(0), facts, [values(captions)])
    (output,) = judge.read([others])
    broken, _ = score_condition(facts, (output, values(told)), (output, values(told)), kind)
    assert broken.low <= 1 / 23 * 1.5
    assert broken.high < 0.2
    assert broken.obeyed == "the judge cannot see it"


def test_a_caption_is_looked_for_among_as_many_others_whether_it_is_one_of_them():
    tokens = np.arange(150)[:, None] * np.ones(2, np.int64)
    facts = ColumnFacts("text", "text", (), (256.0, 2.0))

    class Exact(torch.nn.Module):  # the token is an angle on a circle
        def forward(self, target):
            embedding = torch.zeros(len(target), 64)
            angle = target[:, 0] / 256 * 2 * math.pi
            embedding[:, 0], embedding[:, 1] = angle.cos(), angle.sin()
            return torch.cat([embedding, target], 1)

    kind = Retrieval(Exact(), facts, [tokens, np.full((3, 2), -1)])
    target = kind.target(facts, np.concatenate([tokens, np.full((1, 2), -1)]))
    number = target[:150, -1]
    assert sorted(number[number >= 0].tolist()) == [*range(100)]
    assert target[150].isnan().all()
    ones = torch.ones(1, 150, dtype=torch.float64)
    assert kind.score("R@1", facts, target[:150, :-1], target[:150], ones).item() == 1
    assert kind.score("R@5", facts, -target[:150, :-1], target[:150], ones).item() == 0
    # Of outputs that say nothing, no image is found: equal scores count against it.
    assert kind.score("R@5", facts, torch.ones(150, 64) * 0, target[:150], ones).item() == 0
    assert Retrieval(Exact(), facts, [np.full((3, 2), -1)]).target(facts, tokens).shape == (150, 65)


def test_the_worth_of_a_condition_is_what_the_loss_loses_without_it():
    columns = [
        Column("age", "number", np.arange(12.0)),
        Column("place", "vector", np.stack([np.arange(12.0), np.zeros(12)], 1)),
        Column("useless", "category", np.arange(12) % 3, ("a", "b", "c")),
    ]
    format = ConditionFormat(columns=facts_of(columns))
    told = conditions_of(columns)
    x0 = torch.arange(12.0)[:, None, None, None].expand(12, 1, 4, 4)
    held_out = HeldOut(x0, told, midpoints(2))

    def loss_at(x0, conditions, u, noise):
        off = (conditions.numbers[:, 0] - x0[:, 0, 0, 0]).square().nan_to_num(100.0)
        return off + (conditions.vectors[:, 0] - x0[:, 0, 0, 0]).abs().nan_to_num(7.0), off

    found = condition_worth(held_out, loss_at, format.places, lambda name: name != "place", 5)
    assert [one.condition for one in found] == ["age", "place", "useless", ALL]
    age, place, useless, everything = found
    other = another_image(12)
    apart = (other - torch.arange(12)).double()
    assert (other != torch.arange(12)).all()
    assert sorted(other.tolist()) == [*range(12)]
    assert (age.shuffled, age.none) == (pytest.approx(float(apart.square().mean())), pytest.approx(100))
    assert age.shuffled_low < age.shuffled < age.shuffled_high
    assert (age.loss_low, age.loss_high) == (0, 0)
    assert (place.shuffled, place.none, place.none_low) == (pytest.approx(float(apart.abs().mean())), None, None)
    assert (useless.shuffled, useless.none, useless.n, useless.loss) == (0, 0, 12, 0)
    assert everything.none == pytest.approx(107)
    parts = HeldOutBuckets(tuple(HeldOut(x0[a:b], told.rows(slice(a, b)), midpoints(2)) for a, b in ((0, 1), (1, 12))))
    assert condition_worth(parts, loss_at, format.places, lambda name: True, 5)[0] == replace(age)


def test_images_of_several_sizes_are_exchanged_within_their_size():
    sizes, counts = ((4, 6), (6, 4), (2, 2)), (5, 6, 1)
    format = ConditionFormat(columns=(ColumnFacts("given", "image", (), (1.0, 4.0, 6.0, 0.0, 255.0)),))
    marks, parts = torch.arange(12.0), []
    for size, rows in zip(sizes, marks.split(counts)):
        x0 = rows[:, None, None, None].expand(-1, 1, *size)
        parts.append(HeldOut(x0, Conditions(image=x0.clone(), known=torch.ones_like(x0)), midpoints(2)))

    def loss_at(x0, conditions, u, noise):
        off = (conditions.image[:, 0, 0, 0] - x0[:, 0, 0, 0]).square().nan_to_num(9.0)
        return off, off

    (given,) = condition_worth(HeldOutBuckets(tuple(parts)), loss_at, format.places, lambda name: True, 4)
    # The single image of its size has no other, and is left out.
    apart = torch.cat([rows[another_image(len(rows))] - rows for rows in marks.split(counts)[:2]]).double()
    assert given.shuffled == pytest.approx(float(apart.square().mean()))
    assert (given.loss, given.none, given.n) == (0, 9, 12)


def test_masks_are_mirrored_with_the_images_and_read_pixel_by_pixel():
    facts = ColumnFacts("mask", "mask", ("a", "b", "c"), (1.0, 40.0, 48.0))
    kind, grid = JUDGED["mask"], grid_of(40, 48)
    assert grid[0] * grid[1] <= 1024
    masks = np.random.default_rng(0).integers(0, 3, (2, 1, 40, 48)).astype(np.int8)
    masks[1] = -1
    target = kind.target(facts, masks)
    assert target.shape == (2, grid[0] * grid[1])
    assert target[1].isnan().all()
    assert torch.equal(kind.mirrored(facts, target)[0].view(grid), target[0].view(grid).flip(1))
    output = F.one_hot(target[:1].long(), 3).float().movedim(2, 1).flatten(1)  # [1, labels, pixels]
    assert output.shape[1] == kind.outputs(facts)
    read = kind.read(facts, output)
    assert torch.equal(read.float(), target[:1])
    ones = torch.ones(1, 1, dtype=torch.float64)
    assert [float(kind.score(name, facts, read, target[:1], ones)) for name in kind.measures] == [1.0, 1.0]
    none = torch.zeros_like(read)
    share = float((target[0] == 0).double().mean())
    assert float(kind.score("pixel accuracy", facts, none, target[:1], ones)) == pytest.approx(share)
    assert float(kind.score("mean IoU", facts, none, target[:1], ones)) == pytest.approx(share / 3)
