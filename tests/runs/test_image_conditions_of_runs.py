"""Images as conditions, from training to samples: networks, resume, guidance, files that are given."""

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES, NETWORK
from tiny_networks import NETWORKS
from unfog.cli.main import main
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.models.network_settings import build_model
from unfog.models.settings import SIZES
from unfog.pipeline.load_data import check_image_conditions
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, conditions_of, facts_of
from unfog.values.condition_kinds import kind_of
from unfog.values.conditions import Conditions

NEVER = {"every": -1}
TINY = {"network": NETWORK, "batch": 8, "device": "cpu", "evaluate": NEVER, "size": "16x8", **FEW_PICTURES}


def grey_values(shape):
    return type("Values", (), {"shape": shape, "factor": 0})


@pytest.fixture
def pairs(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(120):
        mask = np.repeat(rng.integers(0, 2, (8, 1)), 16, 1).astype(np.uint8)
        Image.fromarray(mask).save(tmp_path / "masks" / f"{i:03}.png")
        image = np.stack([200 * mask, *rng.integers(0, 255, (2, 8, 16))], -1).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / "images" / f"{i:03}.png")
    return tmp_path


def shaken(network):
    """Weights that begin at zero show no condition."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return network


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_see_images_and_that_they_are_not_known(name):
    columns = [
        Column("age", "number", np.array([1.0, 2.0])),
        Column("grey", "grey", grey_values((2, 1, 8, 8))),
        Column("mask", "mask", np.zeros((2, 1, 8, 8), np.int8), ("a", "b")),
    ]
    format = ConditionFormat(columns=facts_of(columns))
    network = shaken(build_model(NETWORKS[name], 3, format)).eval()
    assert format.input_channels == network.image_input.channels == 2 + 3
    x, noise = torch.randn(2, 3, 8, 8), torch.zeros(2)
    image = torch.rand(2, 2, 8, 8).round()
    told = Conditions(numbers=torch.ones(2, 1), image=image)

    def output(conditions):
        with torch.no_grad():
            return network(x, noise, conditions)

    assert output(told).isfinite().all()
    for k in range(2):
        other = image.clone()
        other[:, k, 4:] = 1 - other[:, k, 4:]
        assert not torch.equal(output(told), output(told._replace(image=other)))
    hidden = told.dropped(torch.tensor([True, False]))
    assert torch.equal(output(told)[1], output(hidden)[1]) or torch.allclose(output(told)[1], output(hidden)[1])
    assert torch.allclose(output(hidden)[0], output(Conditions())[0], atol=1e-5)
    each = told.dropped_each(torch.tensor([[False, True, False], [False, False, True]]), format.spans)
    assert each.image.isnan().flatten(2).all(2).tolist() == [[True, False], [False, True]]
    with pytest.raises(RequestError, match="pixels"):
        output(told._replace(image=image[..., :4]))


def test_a_network_without_such_an_input_refuses_images():
    network = build_model(SIZES["tiny"], 3)
    with pytest.raises(RequestError, match="an image was given"):
        network(torch.zeros(1, 3, 8, 8), torch.zeros(1), Conditions(image=torch.zeros(1, 1, 8, 8)))


@pytest.mark.slow
def test_a_run_learns_from_images_and_resumes_to_the_bit(pairs, capsys):
    condition = f"degrade:factor=4,grey,hole,mask={pairs / 'masks'}"
    options = TINY | {"condition": condition, "flip": True}
    whole = unfog.train(pairs / "images", out=pairs / "whole", steps=3, **options)
    said = "".join(capsys.readouterr())
    assert "degrade: 4x2 of 16x8" in said
    assert "mask: mask, 16x8, 2 labels: 0, 1" in said
    unfog.train(pairs / "images", out=pairs / "part", steps=2, **options)
    resumed = unfog.resume(pairs / "part", steps=3)
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, resumed.network.state_dict()[name]), name
    masks = sorted((pairs / "masks").glob("*"))
    contents = [path.read_bytes() for path in masks]
    for path, content in zip(masks, [contents[-1], *contents[:-1]]):
        path.write_bytes(content)
    with pytest.raises(RequestError, match="not those"):
        unfog.resume(pairs / "part", steps=4)


@pytest.mark.slow
def test_samples_follow_pictures_that_are_given(pairs):
    run = unfog.train(
        pairs / "images",
        out=pairs / "run",
        steps=1,
        **TINY,
        condition=f"degrade:factor=4,grey,hole,mask={pairs / 'masks'}",
    )
    shaken(run.network)
    picture = np.asarray(Image.open(pairs / "images" / "000.png"))

    def drawn(given, n=1, **settings):
        return np.asarray(run.sample(n, given=given, steps=2, **{"guidance": 1, **settings}))

    nothing = drawn({})
    holed = np.dstack([picture, np.full((8, 16), 255, np.uint8)])
    holed[2:5, 3:9, 3] = 0
    missing = picture / 255.0
    missing[2:5, 3:9] = np.nan
    given = {
        "degrade": [picture, picture[:2, :4], pairs / "images" / "000.png"],
        "grey": [picture, picture[..., 0], Image.open(pairs / "images" / "000.png")],
        "mask": [picture[..., 0] > 100, (picture[..., 0] > 100).astype(int), pairs / "masks" / "000.png"],
        "hole": [holed, missing, Image.fromarray(holed)],
    }
    for name, pictures in given.items():
        for one in pictures if name != "mask" else pictures[1:]:
            assert not np.array_equal(nothing, drawn({name: one})), name
    assert np.array_equal(drawn({"grey": picture}), drawn({"grey": pairs / "images" / "000.png"}))
    assert np.array_equal(drawn({"hole": holed}), drawn({"hole": Image.fromarray(holed)}))
    assert not np.array_equal(drawn({"grey": picture}), drawn({"grey": picture}, guidance=2))
    folder = drawn({"mask": pairs / "masks"}, 3)
    assert np.array_equal(
        folder[1:2], drawn({"mask": [pairs / "masks" / "000.png", pairs / "masks" / "001.png"]}, 2)[1:]
    )
    bad = [
        ({"mask": np.full((8, 16), 9)}, "has the value 9"),
        ({"mask": picture / 300}, "whole numbers"),
        ({"hole": picture}, "nothing of the picture"),
        ({"grey": "nowhere.png"}, "nowhere"),
        ({"grey": np.zeros((1, 2, 3, 4, 5))}, "give a file"),
        ({"grey": 3}, "give a file"),
        ({"grey": []}, "no picture"),
        ({"gray": picture}, "grey"),
    ]
    for wrong, word in bad:
        with pytest.raises(RequestError, match=word):
            run.sample(1, given=wrong, steps=2)
    with pytest.raises(RequestError, match="omit --size"):
        run.sample(1, size=16)


@pytest.mark.slow
def test_the_command_line_writes_what_was_given(pairs):
    unfog.train(pairs / "images", out=pairs / "run", steps=1, **TINY, condition="grey")
    out = pairs / "out"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "sample",
                str(pairs / "run"),
                "-n",
                "3",
                "--steps",
                "2",
                "--out",
                str(out),
                "--given",
                f"grey={pairs / 'images'}",
            ]
        )
    assert ended.value.code in (None, 0)
    assert Image.open(next(out.glob("000002*"))).text["Given"] == "grey=002"


@pytest.mark.slow
def test_grids_and_tables_take_files(pairs):
    condition = f"mask={pairs / 'masks'},grey"
    run = unfog.train(pairs / "images", out=pairs / "run", steps=1, **TINY, condition=condition)
    shaken(run.network)
    greys, masks = ([str(pairs / name / f"00{i}.png") for i in range(3)] for name in ("images", "masks"))
    (pairs / "rows.csv").write_text("file_name,grey,mask\na,images/000.png,masks/001.png\nb,,masks/002.png\n")
    asked = {"steps": 2, "guidance": {"mask": 2, "grey": 1.5}}
    drawn = run.sample(given_table=pairs / "rows.csv", **asked)
    by_hand = run.sample(2, given={"grey": [greys[0], None], "mask": masks[1:]}, **asked)
    assert np.array_equal(np.asarray(drawn), np.asarray(by_hand))
    cells = run.sample(grid={"mask": ",".join(masks[:2]), "grey": greys}, **asked)
    alone = run.sample(1, given={"mask": masks[0], "grey": greys[0]}, **asked)
    assert len(cells) == 6
    assert np.allclose(np.asarray(cells)[:1].astype(int), np.asarray(alone), atol=1)
    words = ["--steps", "2", "--out", str(pairs / "out"), "--grid", f"mask={masks[0]},{masks[1]}"]
    with pytest.raises(SystemExit) as ended:
        main(["sample", str(pairs / "run"), *words])
    assert ended.value.code in (None, 0)
    (pairs / "wrong.csv").write_text("grey\nnowhere.png\n")
    for wrong, word in [
        ({"given_table": pairs / "wrong.csv"}, "row 1: grey = nowhere.png is not a file"),
        ({"grid": {"mask": "all"}}, "all"),
        ({"grid": {"mask": [masks[0], masks[0]]}}, "twice"),
    ]:
        with pytest.raises(RequestError, match=word):
            run.sample(steps=2, **wrong)


def test_other_sizes_are_refused():
    facts = facts_of([Column("grey", "grey", grey_values((2, 1, 8, 16)))])
    with pytest.raises(RequestError, match="16x8, and the images are 8x8"):
        check_image_conditions(Data(size=8), facts)


def test_which_images_are_known_of_none_and_of_some():
    masks = np.array([[[[-1, 0]]], [[[-1, -1]]]], np.int8)
    depth = np.array([[[[np.nan, 0.5]]], [[[np.nan, np.nan]]]], np.float32)
    for kind, values in (("mask", masks), ("image", depth)):
        assert kind_of(kind).known(values).tolist() == [True, False]
        assert kind_of(kind).known(values[:0]).tolist() == []


def test_blank_conditions_have_the_shape_of_those_of_images():
    columns = [
        Column("grey", "grey", grey_values((2, 1, 8, 16))),
        Column("mask", "mask", np.zeros((2, 1, 8, 16), np.int8), ("a", "b")),
    ]
    format = ConditionFormat(columns=facts_of(columns))
    assert format.blank(3).image.shape == (3, 2, 8, 16)
    assert conditions_of(columns[1:]).image.shape == (2, 1, 8, 16)
