"""`unfog sample` with conditions: a table, a grid, guidance of each, from the command and from Python to the files."""

import json

import numpy as np
import pytest
from PIL import Image

import unfog
from command import exit_status
from conftest import TRANSFORMER
from unfog.errors import RequestError
from unfog.pipeline.sample_folder import SampleFolder
from unfog.serve.playground.drawing import read_request

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conditions")
    images = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), np.uint8)
    conditions = {"age": np.arange(24.0), "stain": ["HE", "PAS", "IHC"] * 8, "place": [[i, -i] for i in range(24)]}
    settings = {"size": 8, "network": TRANSFORMER, "batch": 4, "lr": 1e-3, "device": "cpu", "precision": "fp32"}
    settings |= {"preview": {"every": -1, "images": 4}, "evaluate": {"every": -1}, "sampler": {"steps": 3}}
    made = unfog.train(images, out=folder / "run", conditions=conditions, steps=3, **settings)
    stir(made)
    return made


def stir(run):
    """After three steps the weights that begin at zero are nearly zero, and no condition shows."""
    import torch

    with torch.no_grad():
        for weight in run.network.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def sample(run, *words):
    return exit_status("sample", run.path, "--device", "cpu", "--steps", 2, *words)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_guidance_of_each_by_name(run, capsys, tmp_path):
    asked = {"n": 4, "given": {"age": 60, "stain": "HE"}, "steps": 4, "seed": 1}
    plain, both = run.sample(**asked, guidance=1), run.sample(**asked, guidance=3)
    calls = []
    for guidance in ({"age": 3, "stain": 3, "place": 1}, "age=3,stain=3", (("stain", 3.0), ("age", 3.0))):
        found = run.sample(**asked, guidance=guidance, guidance_interval=(0.0, 1.0))
        calls.append(run.calls)
        assert run.sampled[4] == "guidance age=3,stain=3"
        # The place is not told, so that these are all conditions that there are.
        assert np.array_equal(found, run.sample(**asked, guidance=3, guidance_interval=(0.0, 1.0)))
    assert calls == [8, 8, 8]
    assert np.array_equal(run.sample(**asked, guidance={"age": 1}), plain)
    one, other = (run.sample(**asked, guidance={name: 3}) for name in ("age", "stain"))
    assert len({each.tobytes() for each in (plain, both, one, other)}) == 4
    run.sample(**asked, guidance="age=2,stain=3", guidance_interval=(0.0, 1.0))
    assert run.calls == 12
    within = run.sample(**asked, guidance="age=2,stain=3")
    assert run.calls == 10, "of four levels three are within the interval of the run, 0.2 to 0.8"
    assert not np.array_equal(within, plain)
    # Samples of the batches do not depend on their size.
    assert np.abs(within.astype(int) - run.sample(**asked, guidance="age=2,stain=3", batch=3)).max() <= 1
    image = run.sample(1, given={"age": 3})[0]
    edits = [run.sample(**asked, image=image, guidance=scale, strength=0.9) for scale in ({"age": 5}, 1)]
    assert not np.array_equal(*edits)


def test_guidance_that_cannot_be_is_refused(run, tmp_path, monkeypatch):
    from dataclasses import replace

    told = {"age": 60, "stain": "HE"}
    for settings, said in (
        ({"guidance": {"agee": 2}}, "did you mean 'age'"),
        ({"guidance": "place=2"}, "place = 2 has no effect"),
        ({"guidance": {"age": 2}, "guide": "auto"}, "a guide has one strength"),
        ({"guidance": {"age": 2}, "guide_every": 2}, "without a guide"),
        ({"guidance": {"age": 1}, "guidance_interval": (0.1, 0.5)}, "no effect with guidance = 1"),
        ({"guidance": {"age": 2}, "measure": lambda x: x, "observed": np.zeros((3, 8, 8))}, "changes the prior"),
    ):
        with pytest.raises(RequestError, match=said):
            run.sample(2, given=told, **settings)
    with pytest.raises(RequestError, match="one number"):
        read_request(run.path, {"guidance": "age=2"}, False, False)
    hidden = dict.fromkeys(("age", "stain", "place"), 2) | {"age": 3}
    told |= {"place": "1;2"}
    for setting, scale in (("condition_dropout", {"age": 2}), ("label_dropout", 2), ("label_dropout", hidden)):
        monkeypatch.setattr(run, "config", replace(run.config, **{setting: 0.0}))
        with pytest.raises(RequestError, match=f"needs a network trained with --{setting.replace('_', '-')}"):
            run.sample(2, given=told, guidance=scale)
        monkeypatch.undo()


def test_evaluation_is_guided_by_name_and_says_so(run):
    found = run.evaluate("sliced", n=10, steps=2, guidance={"age": 2, "stain": 1})
    assert found.drawn["guidance"] == "age=2"
    assert found.measured[0].value != run.evaluate("sliced", n=10, steps=2, guidance=1).measured[0].value


def test_a_sample_for_each_row_of_a_table(run, tmp_path, capsys):
    table = tmp_path / "rows.csv"
    table.write_text('name,age,stain,place,note\nanna.png,3,HE,"0;1",a\nx/bert.png,,PAS,,b\n,90,,,c\n')
    assert sample(run, "--given-table", table, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "no such conditions: note" in said
    assert "age = 90 is outside" in said
    assert files(tmp_path / "out") == ["000000-anna.png", "000001-bert.png", "000002-age_90.png", "grid.png"]
    given = [Image.open(path).text.get("Given") for path in sorted((tmp_path / "out").glob("0*"))]
    assert given == ["age=3 place=0;1 stain=HE", "stain=PAS", "age=90"]
    by_hand = {"age": [3, None, 90], "stain": ["HE", "PAS", None], "place": ["0;1", None, None]}
    plain = unfog.load(run.path)
    found = plain.sample(given_table=table, steps=2)
    assert np.array_equal(found, plain.sample(3, given=by_hand, steps=2))
    assert np.array_equal(found[1], np.asarray(Image.open(tmp_path / "out" / "000001-bert.png")))
    # Names of files are a part of what unfinished samples are of.
    table.write_text(table.read_text().replace("anna", "anne"))
    others = plain.prepare(given_table=table, steps=2)
    assert plain.digest(others) != plain.digest(plain.prepare(given_table=str(table), steps=2, seed=1))
    assert others.files[0] == "anne"
    for words, said in (
        (("-n", "5"), "the rows of the table are 3; omit n"),
        (("--given", "age=3"), "both have 'age'"),
        (("--grid", "age=1..2"), "both give conditions"),
        (("--given", "agee=3"), "did you mean 'age'"),
    ):
        assert sample(run, "--given-table", table, "--out", tmp_path / "none", *words) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_grid_is_one_picture_from_one_noise(run, tmp_path, capsys):
    words = ("--grid", "age=2..20:3", "stain=all", "--given", "place=1;2", "--guidance", "age=2")
    assert sample(run, *words, "--out", tmp_path / "out") == 0
    names = files(tmp_path / "out")
    assert names[:4] == [
        "000000-age_2_place_1_2_stain_HE.png",
        "000001-age_11_place_1_2_stain_HE.png",
        "000002-age_20_place_1_2_stain_HE.png",
        "000003-age_2_place_1_2_stain_IHC.png",
    ]
    assert len(names) == 10
    text = Image.open(tmp_path / "out" / "grid.png").text
    assert text["Given"].startswith("age=2 place=1;2 stain=HE, age=11")
    assert "guidance age=2, seed 0" in text["Settings"]
    picture = Image.open(tmp_path / "out" / "grid.png")
    assert picture.width > 3 * 128 + 2 * 2, "captions of rows are at the left"
    plain = unfog.load(run.path)
    asked = {"grid": {"age": "2..20:3", "stain": "all"}, "guidance": {"age": 2}, "steps": 2}
    found = plain.sample(**asked, given={"place": "1;2"})
    assert np.array_equal(found[4], np.asarray(Image.open(tmp_path / "out" / "000004-age_11_place_1_2_stain_IHC.png")))
    # Each cell is the first sample with these conditions.
    one = plain.sample(1, given={"age": 11, "stain": "IHC", "place": "1;2"}, guidance={"age": 2}, steps=2)
    assert np.abs(found[4].astype(int) - one[0]).max() <= 1
    assert found.grid().shape[1] > 3 * 128
    assert "data:image/png" in found._repr_html_()
    assert found[:2].cells is None
    assert np.array_equal(found, plain.sample(**asked, given={"place": "1;2"}, batch=9))
    assert plain.sample(grid={"age": [1, 2]}, steps=2).shape[0] == 2
    for words, said in (
        (("--grid", "age=2..20:3", "-n", "5"), "the cells of the grid are 3"),
        (("--grid", "age=2..20", "--grid", "karras"), "give one of them"),
        (("--grid", "aeg=2..20"), "did you mean 'age'"),
        (("--grid", "karas"), "did you mean karras"),
    ):
        assert sample(run, *words, "--out", tmp_path / "none") == 2
        assert said in capsys.readouterr().err


def test_a_class_that_was_never_hidden_has_to_be_given(tmp_path):
    images, labels = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), np.uint8), ["a", "b"] * 4
    settings = {"size": 8, "network": TRANSFORMER, "batch": 4, "device": "cpu", "sampler": {"steps": 2}}
    settings |= {"preview": {"every": -1, "images": 2}, "evaluate": {"every": -1}, "label_dropout": 0}
    made = unfog.train(images, labels=labels, out=tmp_path / "run", steps=1, **settings)
    for given in ({"class": None}, {"class": ["a", None]}):
        with pytest.raises(RequestError, match="never hid the class"):
            made.sample(2, given=given)
    with pytest.raises(RequestError, match="needs a network trained with --label-dropout"):
        made.sample(2, guidance={"class": 2})
    assert len(made.sample(grid={"class": "all"})) == 2


def test_a_grid_of_noise_levels_is_one_word_as_before(run, tmp_path):
    for i, words in enumerate((("--grid", "karras", run.path), (run.path, "--grid=karras"))):
        words = ("sample", *words, "--device", "cpu", "--steps", 2, "-n", 1, "--out", tmp_path / f"{i}")
        assert exit_status(*words) == 0
    assert files(tmp_path / "0") == files(tmp_path / "1") == ["000000.png", "grid.png"]
    # The run may be the last word, as after any list.
    words = ("--out", tmp_path / "2", "--steps", 2, "--grid", "stain=all", "age=1,2", run.path)
    assert exit_status("sample", "--device", "cpu", *words) == 0
    assert len(files(tmp_path / "2")) == 7


def test_a_grid_that_was_killed_goes_on(run, tmp_path, monkeypatch):
    words, write = ("--grid", "age=1..3:3", "--batch", 1, "--out", tmp_path / "out"), SampleFolder.write

    def failing(self, numbers, samples):
        if numbers.start == 2:
            raise KeyboardInterrupt
        write(self, numbers, samples)

    monkeypatch.setattr(SampleFolder, "write", failing)
    assert sample(run, *words) != 0
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("0*")}
    assert len(begun) == 2
    assert json.loads((tmp_path / "out" / "unfinished.json").read_text())["count"] == 3
    monkeypatch.setattr(SampleFolder, "write", write)
    # The same conditions from other noises are other samples.
    assert (
        exit_status("sample", run.path, "--device", "cpu", "--steps", 2, "--given", "age=1,2,3", "-n", 3, *words[2:])
        == 2
    )
    assert sample(run, *words) == 0
    assert begun.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("0*")}.items()
    assert len(files(tmp_path / "out")) == 4
