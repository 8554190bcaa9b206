"""Real runs with one fault each, trained to the end; the whole table of them is benchmarks/doctor/sick_runs.py."""

import time

import pytest

import unfog
from test_doctor_run import examined, picture

pytestmark = pytest.mark.slow


def pictures(folder, count):
    folder.mkdir()
    for i in range(count):
        picture(i).save(folder / f"{i:03d}.png")
    return folder


ONE_LEVEL = "unet:channels=16,attention=0,mid_attention=0,norm_groups=4"


def train(source, out, **settings):
    usual = {"network": ONE_LEVEL, "device": "cpu", "precision": "fp32", "batch": 32, "lr": 6e-3, "size": 16}
    rest = {
        "log": {"every": 5},
        "preview": {"every": -1, "images": 1},
        "evaluate": {"every": -1},
        "sampler": {"steps": 12},
    }
    return unfog.train(source, out=out, **(usual | rest | settings)).path


def test_eight_pictures_trained_long_come_back(tmp_path):
    rare = {"every": 125}
    run = train(pictures(tmp_path / "few", 8), tmp_path / "run", steps=250, lr=1e-2, batch=8, size=8, checkpoint=rare)
    found = examined(run)
    assert found["run.memorised"].severity == "warning"
    assert found["run.memorised"].facts["share"] > 0.3
    assert found["run.memorised"].facts["share_of_unseen"] < 0.2
    assert found["run.loss"].severity == "fine", "to train longer is no advice here"


# 0.3 stays finite. At 1.0 the run goes back to earlier weights, and whether it learns after that differs by machine.
@pytest.mark.parametrize(("lr", "code"), [(0.3, "run.lr_high"), (2e-5, "run.lr_low")])
def test_a_rate_that_is_far_off_is_found_by_what_comes_of_it(tmp_path, lr, code):
    run = train(pictures(tmp_path / "photos", 200), tmp_path / "run", steps=110, lr=lr, batch=8, size=8)
    found = examined(run, samples=16)
    assert found[code].severity == "warning"
    assert "--lr 0.0021" in found[code].remedy
    assert found["run.not_learning"].severity == "fatal"
    advised = [one.code for one in found.values() if "train longer" in one.remedy]
    assert advised if code == "run.lr_low" else not advised, "a rate that is too high is lowered first"


@pytest.mark.exhaustive
def test_slow_data_and_a_preview_at_every_other_step_are_found(tmp_path, monkeypatch):
    from unfog.data.stream import ImageStream

    batch = ImageStream.batch

    def slow(self, *arguments):
        time.sleep(0.1)
        return batch(self, *arguments)

    monkeypatch.setattr(ImageStream, "batch", slow)
    preview = {"every": 2, "images": 32}
    run = train(pictures(tmp_path / "photos", 200), tmp_path / "run", steps=40, preview=preview)
    found = examined(run, samples=0)
    assert found["run.data_wait"].severity == "warning"
    assert found["run.overhead"].severity in ("hint", "warning")
    assert found["run.overhead"].facts["seconds"]["preview"] > found["run.overhead"].facts["seconds"]["checkpoint"]
