"""Usual names of settings and arguments, understood from Python."""

import pytest

from unfog.config.aliases import EPOCHS, OUT, SAMPLING, USUAL
from unfog.config.requests.sample import SamplingRequest
from unfog.config.schema import SHORT, Config, nest_settings
from unfog.config.toml import update
from unfog.errors import RequestError
from unfog.from_python import out_path


def test_usual_names_lead_to_settings():
    made = update(Config(), nest_settings({"learning_rate": 1e-4, "batch_size": 8, "image_size": 32}), "")
    assert (made.optimizer.lr, made.training.batch, made.data.size) == (1e-4, 8, 32)
    made = update(Config(), nest_settings({"max_train_steps": 7, "model": "small", "log_every": 5}), "")
    assert (made.training.steps, made.log.every) == (7, 5)
    assert made.network == update(Config(), nest_settings({"network": "small"}), "").network
    mixed = nest_settings({"warmup_steps": 3, "optimizer": {"lr": 1e-3}})
    assert mixed == {"optimizer": {"warmup": 3, "lr": 1e-3}}


@pytest.mark.parametrize("name", USUAL)
def test_every_usual_name_is_one_of_a_setting_and_hides_none(name):
    here = Config()
    for part in USUAL[name].split("."):
        here = getattr(here, part)  # AttributeError if there is no such setting
    assert name not in SHORT
    assert not hasattr(Config(), name)
    assert all(hasattr(SamplingRequest(), target) or target == "label" for target in SAMPLING.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": 1, "lr": 1}, "optimizer.lr is given twice, once as lr"),
        ({"lr": 1, "learning_rate": 1}, "optimizer.lr is given twice, once as learning_rate"),
        ({"batch_size": 1, "training": {"batch": 2}}, "training.batch is given twice, once by its short name"),
        ({"learning_rat": 1}, "unknown setting learning_rat; did you mean 'learning_rate'"),
        ({"xyzzy": 1}, "unknown setting xyzzy; give one of aspect, augment, autoencoder"),
        *(({name: 3}, f"{name} is not a setting; give steps, images") for name in EPOCHS),
    ],
)
def test_what_is_given_twice_or_unknown_is_refused(settings, said):
    with pytest.raises(RequestError, match=said.replace("(", r"\(")):
        nest_settings(settings)


def test_the_folder_has_usual_names_too(tmp_path):
    for name in OUT:
        settings = {name: str(tmp_path), "lr": 1}
        assert out_path(None, settings) == tmp_path
        assert settings == {"lr": 1}
    assert out_path(None, {}) is None
    with pytest.raises(RequestError, match="out is given twice, once as output_dir"):
        out_path("a", {"output_dir": "b"})


def test_an_unknown_setting_lists_each_known_one_once():
    with pytest.raises(RequestError, match="give one of") as refused:
        nest_settings({"qqqq": 1})
    names = str(refused.value).partition("give one of ")[2].split(", ")
    assert len(names) == len(set(names))


def test_words_of_other_trainers_are_answered_in_python_too():
    with pytest.raises(RequestError, match="fixed:decay_max"):
        nest_settings({"ema_decay": 0.999})
