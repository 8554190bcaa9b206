"""Latents in place of pixels: encoded once, kept, normalised, mirrored, and trained on to the bit."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import without_clock
from random_weights import random_autoencoder
from unfog.cli.read_request import read_request
from unfog.config.presets import preset
from unfog.config.resume_rules import settings_digests
from unfog.config.schema import nest_settings
from unfog.config.toml import update
from unfog.data.augmentation import Augment
from unfog.data.cache import remove_stale_entries
from unfog.data.dataset import ImageSet
from unfog.data.packs import latent_cache
from unfog.data.packs.latent_cache import EncodeJob, Normalise
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import cache_folder
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import Autoencoder, AutoencoderFolder, Latents
from unfog.pipeline.build import build_network
from unfog.pipeline.latents import (  # the autoencoder itself is compared with another one
    _encode_pixels,
    _load_autoencoder,
    _statistics,
    apply_autoencoder_settings,
    save_autoencoder,
)
from unfog.pipeline.load_data import load_images
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.runs.replay import verify
from unfog.runs.resume import resume
from unfog.values.image_format import BYTES

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SETTINGS = {
    "network": "unet:channels=8/16,attention=0/0,mid_attention=0,norm_groups=4",
    "precision": "fp32",
    "device": "cpu",
    "batch": 8,
    "size": 16,
    "flip": True,
    "data": {"held_out": 0.2},
    "preview": {"every": 6, "images": 2},
    "evaluate": {"every": 6, "images": 4, "levels": 2},
    "log": {"every": 3},
    "checkpoint": {"every": 6},
    "sampler": {"steps": 2},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """120 pictures of noise, none symmetric."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for i in range(120):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"{i:03}.png")
    return folder


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    return random_autoencoder(tmp_path_factory.mktemp("codec") / "mine")


def images(count=10, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, 16, 16), np.uint8)
    return ImageSet.labelled(pixels, np.arange(count) % 2, [str(i) for i in range(count)], ("a", "b"))


def wanted(autoencoder, sets, copies=2, batch=4, calls=None):
    network = _load_autoencoder(autoencoder, CPU)

    def encode(pixels):
        if calls is not None:
            calls.append(len(pixels))
        return _encode_pixels(network, BYTES, CPU, pixels)

    return EncodeJob(sets, (3, 4, 4), copies, encode, batch)


def quiet(done, total):
    pass


def test_a_linked_autoencoder_in_a_run_is_not_read(autoencoder, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copytree(autoencoder.folder, tmp_path / "run/codec")
    assert AutoencoderFolder.open(str(tmp_path / "run")).sha256() == autoencoder.sha256()
    (tmp_path / "run/codec").rename(tmp_path / "outside")
    (tmp_path / "run/codec").symlink_to(tmp_path / "outside")
    with pytest.raises(RequestError, match="holds no config"):
        AutoencoderFolder.open(str(tmp_path / "run"))
    (tmp_path / "run/codec").unlink()
    (tmp_path / "run/codec").mkdir()
    shutil.copy(tmp_path / "outside/config.json", tmp_path / "run/codec")
    (tmp_path / "run/codec/codec.safetensors").symlink_to(tmp_path / "outside/codec.safetensors")
    with pytest.raises(RequestError, match="link"):
        _load_autoencoder(AutoencoderFolder.open(str(tmp_path / "run")), CPU)


def test_the_copies_are_the_codes_of_the_image_and_of_its_mirror(autoencoder):
    sets = [images(10), images(3, 1)]
    stored = wanted(autoencoder, sets).load_or_encode("k", quiet)
    assert stored.latents.shape == (13, 2, 3, 4, 4)
    assert stored.latents.dtype == np.float16
    assert isinstance(stored.latents, np.memmap)
    network = _load_autoencoder(autoencoder, CPU)
    for number, part in enumerate(sets):
        x = BYTES.to_model(torch.from_numpy(part.pixels))
        mine = torch.tensor(stored.latents[[slice(10), slice(10, None)][number]])
        for copy, expected in enumerate((network.encode(x), network.encode(x.flip(-1)))):
            torch.testing.assert_close(mine[:, copy].float(), expected, rtol=1e-3, atol=1e-4)
    assert not np.allclose(stored.latents[:, 0], stored.latents[:, 1], atol=0.05)
    made = stored.image_sets(sets, "k")
    assert [len(part) for part in made] == [10, 3]
    assert np.array_equal(made[1].labels, sets[1].labels)
    assert made[0].fingerprint != made[1].fingerprint


def test_an_entry_is_read_again_gone_on_with_and_made_anew(autoencoder):
    sets, calls = [images(10)], []
    first = np.array(
        wanted(autoencoder, sets, calls=calls).load_or_encode("k", quiet).latents
    )  # whose file is damaged below
    bytes_of = (cache_folder() / "latents-k" / "latents.f16").read_bytes()
    assert calls == [4, 4, 4, 4, 2, 2]
    again = wanted(autoencoder, sets, calls=calls).load_or_encode("k", quiet)
    assert len(calls) == 6
    assert np.array_equal(first, again.latents)

    class Stopped(Exception):
        pass

    def stop(done, total):
        if done >= 8:
            raise Stopped

    # What nobody goes on with is gone after a week.
    with pytest.raises(Stopped):
        wanted(autoencoder, sets).load_or_encode("0" * 32, stop)
    abandoned = cache_folder() / f"latents-{'0' * 32}.partial"
    for path in abandoned.iterdir():
        os.utime(path, (0, 0))
    remove_stale_entries(cache_folder())
    assert not abandoned.exists()

    # What was written after the last line on how far it is, is not counted on.
    with pytest.raises(Stopped):
        wanted(autoencoder, sets).load_or_encode("l", stop)
    partial = cache_folder() / "latents-l.partial"
    (partial / "done.json").write_text(json.dumps({"done": 4}))
    calls.clear()
    wanted(autoencoder, sets, calls=calls).load_or_encode("l", quiet)
    assert calls == [4, 4, 2, 2]
    assert (cache_folder() / "latents-l" / "latents.f16").read_bytes() == bytes_of
    assert not partial.exists()

    for damage in ("latents.f16", "latents.json"):
        (cache_folder() / "latents-k" / damage).write_bytes(b"{}")
        assert np.array_equal(wanted(autoencoder, sets).load_or_encode("k", quiet).latents, first)
    other = wanted(autoencoder, sets, copies=1).load_or_encode(
        "k", quiet
    )  # what is asked for decides, not what is there
    assert np.array_equal(other.latents[:, 0], first[:, 0])


def test_an_interruption_is_gone_on_with_where_the_rest_fits(autoencoder, monkeypatch):
    sets, calls = [images(200)], []
    needed = 2 * 200 * 2 * 3 * 4 * 4

    def room():
        return needed + 100 - sum(path.stat().st_size for path in cache_folder().glob("latents-k*/latents.f16"))

    def stop(done, total):
        if done >= 160:
            raise KeyboardInterrupt

    monkeypatch.setattr("unfog.data.packs.latent_cache.free_bytes", room)
    monkeypatch.setattr("unfog.data.packs.latent_cache._IN_MEMORY", 0)
    with pytest.raises(KeyboardInterrupt):
        wanted(autoencoder, sets).load_or_encode("k", stop)
    assert room() < needed
    wanted(autoencoder, sets, calls=calls).load_or_encode("k", quiet)
    assert sum(calls) == 2 * (200 - 128)  # 32 batches are on the disk for certain


def test_what_another_process_finishes_at_that_moment_is_taken(autoencoder, monkeypatch):
    """Between the look at the folder and the claim."""
    mine, other, claim = [], [], latent_cache.work_folder

    def late(folder, rest):
        monkeypatch.setattr(latent_cache, "work_folder", claim)
        wanted(autoencoder, [images(10)], calls=other).load_or_encode("k", quiet)
        return claim(folder, rest)

    monkeypatch.setattr(latent_cache, "work_folder", late)
    stored = wanted(autoencoder, [images(10)], calls=mine).load_or_encode("k", quiet)
    assert (len(mine), len(other), len(stored.rows)) == (0, 6, 10)
    assert {path.name for path in cache_folder().iterdir()} - {".used"} == {"latents-k"}


def test_two_do_not_encode_the_same(autoencoder, monkeypatch):
    monkeypatch.setattr(latent_cache, "_WAIT", 0)

    def waits(done, total):
        raise KeyboardInterrupt

    def other(done, total):
        calls = []
        with pytest.raises(KeyboardInterrupt):
            wanted(autoencoder, [images(10)], calls=calls).load_or_encode("k", waits)
        assert not calls

    wanted(autoencoder, [images(10)]).load_or_encode("k", other)
    assert {path.name for path in (cache_folder() / "latents-k").iterdir()} == {
        *("latents.f16", "rows.i64", "latents.json")
    }


@pytest.fixture
def damaged(photos, tmp_path):
    """Those pictures, one of them cut off."""
    folder = shutil.copytree(photos, tmp_path / "damaged")
    (folder / "007.png").write_bytes((folder / "007.png").read_bytes()[:40])
    return folder


def of(damaged):
    return prepare(open_source(damaged), Data(size=16, channels=3, cache="none", held_out=0)).train


def test_whoever_finds_latents_can_name_the_images_that_are_not_in_them(damaged, autoencoder):
    first, second, calls = of(damaged), of(damaged), []
    rows = wanted(autoencoder, [first]).load_or_encode("k", quiet).rows
    assert rows[7] == 8
    assert np.array_equal(wanted(autoencoder, [second], calls=calls).load_or_encode("k", quiet).rows, rows)
    assert not calls
    assert [one.name for one in second.pixels.skipped] == ["007.png"]
    assert second.pixels.skipped == first.pixels.skipped


def test_an_interruption_is_gone_on_with_and_names_what_is_not_in_its_beginning(damaged, autoencoder):
    def stop(done, total):
        if done >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wanted(autoencoder, [of(damaged)], batch=1).load_or_encode("k", stop)
    train, calls = of(damaged), []
    stored = wanted(autoencoder, [train], batch=1, calls=calls).load_or_encode("k", quiet)
    assert len(calls) == 2 * (120 - 32)
    assert stored.rows[7] == 8
    assert [one.name for one in train.pixels.skipped] == ["007.png"]


def test_without_a_cache_they_are_kept_in_memory(autoencoder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "file/cache"))
    stored = wanted(autoencoder, [images(3)]).load_or_encode("k", quiet)
    assert not isinstance(stored.latents, np.memmap)
    monkeypatch.setattr("unfog.data.packs.latent_cache._IN_MEMORY", 10)
    with pytest.raises(RequestError, match="cannot be written; set UNFOG_CACHE"):
        wanted(autoencoder, [images(3)]).load_or_encode("k", quiet)


def test_latents_that_are_no_numbers_are_refused():
    for value, said in ((1e5, "beyond what float16 holds"), (np.nan, "not finite")):
        bad = EncodeJob([images(2)], (1, 1, 1), 1, lambda x, v=value: np.full((len(x), 1, 1, 1), v, np.float32), 2)
        with pytest.raises(RunError, match=said):
            bad.load_or_encode("k", quiet)


def test_statistics_are_those_of_numpy_and_the_inverse_is_one(autoencoder):
    rng = np.random.default_rng(0)
    latents = (rng.normal(size=(600, 2, 3, 4, 4)) * [[[[2.0]], [[0.1]], [[30.0]]]] + 5).astype(np.float16)
    mean, deviation = _statistics(latents)
    plain = latents[:, 0].astype(np.float64)
    np.testing.assert_allclose(mean, plain.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(deviation, plain.std((0, 2, 3)), rtol=1e-12)
    normalise = Normalise(mean, deviation, sigma_data=0.5)
    x0 = normalise.forward(torch.from_numpy(latents[:, 0])).double()
    torch.testing.assert_close(x0.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(x0.std((0, 2, 3), correction=0), torch.full((3,), 0.5, dtype=torch.float64))
    back = normalise.inverse(x0.float())
    torch.testing.assert_close(back, torch.from_numpy(latents[:, 0]).float(), rtol=1e-5, atol=1e-5)
    dead = latents.copy()
    dead[:, :, 1] = 7
    assert _statistics(dead)[1][1] == pytest.approx(1e-3 * deviation[2])


def test_the_coin_is_the_one_that_flips_pixels():
    pixels = torch.randint(0, 256, (64, 3, 4, 4), dtype=torch.uint8)
    torch.manual_seed(3)
    expected, _ = Augment(flip=True)(pixels)
    torch.manual_seed(3)
    both = torch.stack([BYTES.to_model(pixels), BYTES.to_model(pixels.flip(-1))], dim=1)
    x0, told = Normalise((0.0,) * 3, (1.0,) * 3, 1.0, flip=True)(both)
    assert told is None
    assert torch.equal(x0, expected)
    before = torch.get_rng_state()
    assert torch.equal(Normalise((0.0,) * 3, (1.0,) * 3, 1.0)(both)[0], both[:, 0])
    assert torch.equal(before, torch.get_rng_state())


def configured(photos, autoencoder, **settings):
    table = SETTINGS | {"source": str(photos), "codec": str(autoencoder.folder), "steps": 12} | settings
    table["data"] = {**table["data"], "channels": 3}
    return update(preset("default"), nest_settings(table), "")


def test_the_network_sees_latents(photos, autoencoder):
    config = apply_autoencoder_settings(configured(photos, autoencoder))
    assert config.input_shape == (3, 4, 4)
    assert build_network(config).image_channels == 3
    assert replace(config, autoencoder_folder="").input_shape == (3, 16, 16)
    with StopSignals() as stop:
        prepared, facts = load_images(config, stop)
        config = config.adopt(facts)
        entries = set(cache_folder().iterdir())
        load_images(config, stop)
        assert set(cache_folder().iterdir()) == entries
        unflipped, other = load_images(configured(photos, autoencoder, flip=False), stop)
        assert len(set(cache_folder().iterdir()) - entries) == 1
    assert prepared.train.pixels.shape[1:] == (3, 16, 16)
    assert prepared.as_network_input.train.pixels.shape[1:] == (2, 3, 4, 4)
    assert unflipped.as_network_input.train.pixels.shape[1:] == (1, 3, 4, 4)
    assert len(prepared.as_network_input.held_out) == len(prepared.held_out) > 0
    assert prepared.as_network_input.train.names == prepared.train.names
    assert other.latents.mean == config.latents.mean  # measured without the mirrored copies


@pytest.fixture(scope="module")
def trained(photos, autoencoder, tmp_path_factory):
    """A run on latents, 12 steps, with a codec that is gone when it has ended."""
    place = tmp_path_factory.mktemp("runs")
    gone = shutil.copytree(autoencoder.folder, place / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNFOG_CACHE", str(place / "cache"))
        run = unfog.train(photos, out=place / "run", codec=gone, steps=12, **SETTINGS)
    shutil.rmtree(gone)
    return run


def test_a_run_holds_its_autoencoder_and_draws_pictures(trained, tmp_path):
    assert {path.name for path in (trained.path / "codec").iterdir()} == {"config.json", "codec.safetensors"}
    pictures = trained.sample(3, seed=1)
    assert pictures.shape == (3, 16, 16, 3)
    assert len(np.unique(pictures)) > 20
    moved = shutil.copytree(trained.path, tmp_path / "moved")
    assert np.array_equal(unfog.load(moved).sample(3, seed=1), pictures)
    weights = moved / "codec" / "codec.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(RequestError, match="sha256 differs"):
        unfog.load(moved).sample(1)


def test_interrupted_is_uninterrupted_whatever_became_of_the_cache(trained, tmp_path):
    run = RunFolder(shutil.copytree(trained.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "00000012")
    _, done = resume(run)  # in a cache of its own, so that latents are encoded anew
    assert done
    for path in (trained.path / "checkpoints" / "00000012").glob("*.safetensors"):
        assert path.read_bytes() == (run.checkpoints / "00000012" / path.name).read_bytes(), path.name
    assert without_clock(run.metrics) == without_clock(trained.path / "metrics.jsonl")
    assert "equal to the bit" in verify(run)


def test_another_autoencoder_is_refused_on_resume(trained, autoencoder, tmp_path):
    run = RunFolder(shutil.copytree(trained.path, tmp_path / "run"))
    torch.manual_seed(9)
    other = save_autoencoder(tmp_path / "other", AutoencoderModel(Autoencoder(4, 3, (8, 8), norm_groups=4), 3))
    with pytest.raises(RequestError, match="not the one that this run began with"):
        unfog.resume(run.path, codec=str(other.folder), steps=14)
    with pytest.raises(RequestError, match=r"autoencoder_folder is .* and cannot become ''"):
        unfog.resume(run.path, codec="", steps=14)
    shutil.rmtree(run.path / "codec")
    text = run.config_file.read_text()
    assert str(trained.path / "codec") in text
    run.config_file.write_text(text.replace(str(trained.path / "codec"), "/nowhere"))
    with pytest.raises(RequestError, match=r"holds no config\.json"):
        unfog.resume(run.path, steps=14)
    unfog.resume(run.path, codec=str(autoencoder.folder), steps=14)  # the same, from where it was
    assert (run.path / "codec" / "codec.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"jitter": 0.1, "held_out": 0.2}}, "data.jitter = 0.1 changes pixels"),
        ({"augment": 0.1}, "data.augment = 0.1 changes pixels"),
        ({"data": {"channels": 1}}, "is for images of 3"),
        ({"size": 18}, "try size = 16"),
        ({"size": 4}, "network of 2 levels.*these are latents, of 4 pixels each: 4 pixels"),
        ({"codec": "/nowhere"}, "holds no config.json"),
    ],
)
def test_what_latents_cannot_have_is_refused_before_any_work(photos, autoencoder, tmp_path, changes, said):
    with pytest.raises(RequestError, match=said):
        unfog.train(
            photos, out=tmp_path / "run", **(SETTINGS | {"codec": str(autoencoder.folder), "steps": 1} | changes)
        )
    assert not (tmp_path / "run").exists()


def test_settings_of_another_run_bring_its_autoencoder_and_not_its_statistics(trained, photos, tmp_path):
    words = [str(photos), "--config", str(trained.path / "config.toml"), "--out", str(tmp_path / "new")]
    config = read_request("train", words).settings
    assert trained.config.latents.mean
    assert (config.autoencoder_folder, config.latents) == (str(trained.path / "codec"), Latents())


def test_digests_of_settings_know_of_latents_only_where_there_are_some():
    plain, sizes = preset("default"), Latents("x", 4, 1, (0.0,), (1.0,))
    assert settings_digests(replace(plain, latents=sizes)) == settings_digests(plain)  # as an earlier version made them
    one = settings_digests(replace(plain, autoencoder_folder="a", latents=sizes))
    assert settings_digests(replace(plain, autoencoder_folder="b", latents=sizes)) == one
    other = settings_digests(replace(plain, autoencoder_folder="a", latents=replace(sizes, mean=(0.1,))))
    assert all(other[purpose] != one[purpose] for purpose in ("training", "repeat", "measure"))


@pytest.mark.exhaustive
def test_plan_counts_latents(photos, autoencoder):
    settings = {k: v for k, v in SETTINGS.items() if k not in ("precision", "device")}
    planned = unfog.plan(photos, codec=str(autoencoder.folder), steps=10, device="4090", **settings)
    pixels = unfog.plan(photos, steps=10, device="4090", **settings)
    assert planned.work.forward < pixels.work.forward / 8
    assert planned.memory.peak < pixels.memory.peak


def test_doctor_rehearses_a_run_on_latents(photos, autoencoder, tmp_path):
    findings = unfog.doctor(photos, out=tmp_path / "page", codec=str(autoencoder.folder), steps=12, **SETTINGS)
    by_code = {finding.code: finding for finding in findings}
    for part in ("training", "reload", "repeat", "resume", "sample"):
        assert by_code[f"rehearsal.{part}"].severity == "fine", by_code[f"rehearsal.{part}"]
    assert not [finding for finding in findings if finding.severity == "fatal"]


def test_doctor_examines_a_run_on_latents(trained, tmp_path):
    codes = {finding.code for finding in unfog.doctor(trained.path, out=tmp_path / "page", device="cpu")}
    assert {"run.state", "run.tint"} <= codes
