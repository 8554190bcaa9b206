"""The doctor's look at data: each planted fault is found, nothing is made up, and every file is accounted for."""

import importlib.util
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from test_hostile_corpus import corpus  # noqa: F401
from unfog.checks.images import image_scan
from unfog.checks.images.dataset_checks import (  # shapes of all kinds, which no folder has to hold
    _crop_less,
    check_dataset,
    recommended_side,
)
from unfog.checks.images.image_checks import check_images, quick_check_images
from unfog.checks.images.image_scan import ImageScan
from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.builtin_fashion import FashionSource
from unfog.data.sources.registry import open_source
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.target import EdmF
from unfog.models.autoencoder_settings import Autoencoder
from unfog.reporting.findings import Finding, write_findings
from unfog.training.settings import Training
from unfog.values.columns import of_labels
from unfog.values.image_format import ImageFormat

SCRIPT = Path(__file__).parents[2] / "benchmarks/doctor/planted_faults.py"
IN_MEMORY = Data(cache="memory")


def planted_faults():
    spec = importlib.util.spec_from_file_location("planted_faults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = planted_faults()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """400 clothes in ten classes, each class of a colour of its own."""
    folder, source = tmp_path_factory.mktemp("clean"), FashionSource()
    for i in range(0, 10_000, 25):
        name, tint = source.names[i], np.array([255, 160 + 9 * (i // 1000), 250 - 12 * (i // 1000)])
        path = folder / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = source.tiles[i][..., None] * tint // 255
        Image.fromarray(pixels.astype(np.uint8)).save(path, compress_level=1)
    return folder, prepare(open_source(folder), IN_MEMORY)


def by_code(findings: list[Finding]) -> dict[str, Finding]:
    found = {finding.code: finding for finding in findings}
    assert len(found) == len(findings), "a code was used twice"
    return found


def with_train(prepared: Dataset, **changed: object) -> Dataset:
    return replace(prepared, train=replace(prepared.train, **changed))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_clean_set_raises_no_alarm(clean: tuple[Path, Dataset], tmp_path: Path) -> None:
    findings = check_images(clean[1], Config())
    assert {f.code: str(f) for f in findings if f.severity in ("warning", "fatal")} == {}
    looked_at = {"count", "ledger", "converted", "sizes", "upscaled", "crop", "label_bounds", "balance", "equal"}
    looked_at |= {"range", "blank", "exposure", "grey_as_rgb", "channels", "sigma_data", "duplicates"}
    assert set(by_code(findings)) == {f"data.{name}" for name in looked_at | {"near_duplicates", "leakage"}}
    assert "<svg" in write_findings(tmp_path, "clean", findings).read_text()


@pytest.mark.parametrize("fault", BENCHMARK.FAULTS, ids=lambda fault: fault.name)
@pytest.mark.slow
def test_each_planted_fault_is_found_and_no_other(
    clean: tuple[Path, Dataset], tmp_path: Path, fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    def presentable(prepared: Dataset, config: Config) -> list[Finding]:
        findings = check_images(prepared, config)
        write_findings(tmp_path / "page", fault.name, findings)  # whose facts are to be plain values
        assert all(str(finding).isprintable() for finding in findings)
        return findings

    monkeypatch.setattr(BENCHMARK, "check_images", presentable)
    (verdict,) = BENCHMARK.planted_verdicts(tmp_path, "clothes", clean[0], [fault], clean[1])
    assert verdict.found == f"{fault.severity} {fault.code}", verdict
    assert verdict.alarms == ()


@pytest.mark.slow
def test_the_benchmark_can_tell_that_a_fault_is_missed(clean: tuple[Path, Dataset], tmp_path: Path) -> None:
    harmless = BENCHMARK.Fault("nothing", "data.blank", "warning", lambda folder: set())
    listed = BENCHMARK.Fault("blank, listed wrongly", "data.ledger", "fine", lambda folder: {"a.png"})
    other = BENCHMARK.Fault("blank", "data.ledger", "fine", BENCHMARK.part(0.05, BENCHMARK.tones(0, 255)))
    verdicts = list(BENCHMARK.planted_verdicts(tmp_path, "clothes", clean[0], [harmless, listed, other], clean[1]))
    assert [verdict.found for verdict in verdicts] == ["missed"] * 3
    assert [len(verdict.alarms) for verdict in verdicts] == [0, 0, 1]


@pytest.mark.slow
def test_every_file_of_the_hostile_corpus_is_accounted_for(corpus, tmp_path: Path) -> None:  # noqa: F811
    folder, expected = corpus
    prepared = prepare(open_source(folder), Data(size=16, cache="memory"))
    found = by_code(check_images(prepared, Config()))
    lost = {name: said for name, said in expected.items() if isinstance(said, str)}
    facts = found["data.ledger"].facts
    assert {name.encode("utf-8", "surrogateescape"): why for name, why in facts["quarantined"]} == {
        name.encode("utf-8", "surrogateescape"): why for name, why in lost.items()
    }
    assert facts["found"] == facts["used"] + facts["quarantined_in_all"] == len(expected)
    done: dict[str, int] = {}
    for said in expected.values():
        for phrase in () if isinstance(said, str) else said:
            done[phrase] = done.get(phrase, 0) + 1
    actions = {prepared.report.phrase(key): count for key, count in found["data.converted"].facts["actions"].items()}
    assert actions == done
    equal = [set(group) for group in found["data.duplicates"].facts["groups"]]
    plain = {name for name in prepared.train.names if name.startswith(("plain", "exif", "linked"))}
    assert any(plain <= group for group in equal)
    assert any("thin.png" in names for names in [found["data.blank"].facts["names"]])
    assert all(str(finding).isprintable() for finding in found.values())
    assert write_findings(tmp_path / "page", "hostile", list(found.values())).stat().st_size > 10_000


@pytest.mark.slow
def test_glance_is_quick_and_sees_what_a_sample_shows() -> None:
    """40,000 images; what is wrong with half of them does not need all of them."""
    pixels = np.random.default_rng(0).integers(0, 256, (40_000, 3, 32, 32), np.uint8)
    pixels[::2] = 7
    ledger = prepare(open_source("fashion"), IN_MEMORY).report
    images = ImageSet(pixels, tuple(f"{i}.png" for i in range(len(pixels))))
    prepared = Dataset(Data(size=32, channels=3), images, replace(images, pixels=pixels[:0], names=()), ledger)
    started = time.process_time()
    found = by_code(quick_check_images(prepared, Config()))
    assert time.process_time() - started < 1  # measured 0.1
    assert found["data.blank"].severity == "warning"
    assert found["data.blank"].facts["looked_at"] == 1000
    assert found["data.blank"].facts["images"] > 400
    assert "data.duplicates" not in found


@pytest.mark.slow
def test_glance_at_a_small_set_is_the_whole_examination(clean: tuple[Path, Dataset]) -> None:
    assert [str(f) for f in quick_check_images(clean[1], Config())] == [
        str(f) for f in check_images(clean[1], Config())
    ]


@pytest.mark.slow
def test_images_may_be_decoded_on_the_fly(clean: tuple[Path, Dataset], tmp_path: Path) -> None:
    """What is decoded only now is seen the same; a file that then turns out to be damaged is named, and no copy."""
    folder = tmp_path / "clothes"
    shutil.copytree(clean[0], folder)
    lazy = prepare(open_source(folder), Data(cache="none"))
    found, expected = by_code(check_images(lazy, Config())), by_code(check_images(clean[1], Config()))
    for code in ("data.near_duplicates", "data.leakage", "data.channels", "data.blank", "data.balance"):
        assert str(found[code]) == str(expected[code])
    damaged = sorted(folder.rglob("*.png"))[5:8]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:200])
    lazy = prepare(open_source(folder), Data(cache="none", size=28, channels=3))
    assert "data.duplicates" not in by_code(quick_check_images(lazy, Config()))  # 64 images, as decoding takes time
    found = by_code(check_images(lazy, Config()))
    names = [name for name, _ in found["data.ledger"].facts["quarantined"]]
    assert names == [path.relative_to(folder).as_posix() for path in damaged]
    assert found["data.ledger"].facts["used"] == 397
    assert found["data.duplicates"].severity == "fine"


@pytest.mark.slow
def test_how_much_is_read_at_a_time_changes_nothing(
    clean: tuple[Path, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = ImageScan.create(clean[1])
    monkeypatch.setattr(image_scan, "_PIECE_BYTES", 7 * 3 * 28 * 28)
    calls: list[tuple[int, int]] = []
    pieces = ImageScan.create(clean[1], progress=lambda done, total: calls.append((done, total)))
    for a, b in zip(once.statistics, pieces.statistics):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(once.histogram, pieces.histogram)
    assert calls[0] == (7, 400)
    assert calls[-1] == (400, 400)


@pytest.mark.slow
def test_measured_moments_are_those_of_the_pixels(clean: tuple[Path, Dataset]) -> None:
    x = clean[1].train.pixels / 127.5 - 1
    facts = by_code(check_images(clean[1], Config()))
    np.testing.assert_allclose(facts["data.channels"].facts["mean"], x.mean((0, 2, 3)), atol=1e-9)
    np.testing.assert_allclose(facts["data.channels"].facts["std"], x.std((0, 2, 3)), atol=1e-9)
    centred = x - x.mean((0, 2, 3), keepdims=True)
    assert facts["data.sigma_data"].facts["sigma_data"] == pytest.approx(np.sqrt((centred**2).mean()))


@pytest.mark.slow
def test_latents_have_the_deviation_that_is_configured(clean: tuple[Path, Dataset]) -> None:
    config = replace(Config(), diffusion=Diffusion(target=EdmF(), sigma_data=3.0))
    assert by_code(quick_check_images(clean[1], config))["data.sigma_data"].severity == "warning"
    assert (
        by_code(quick_check_images(clean[1], replace(config, autoencoder_folder="somewhere")))[
            "data.sigma_data"
        ].severity
        == "fine"
    )


@pytest.mark.slow
def test_labels_outside_the_classes_are_fatal(clean: tuple[Path, Dataset]) -> None:
    train = clean[1].train
    labels = train.labels.copy()  # type: ignore[union-attr]
    labels[[3, 5]] = 10, -1
    found = by_code(quick_check_images(with_train(clean[1], columns=of_labels(labels, train.classes)), Config()))
    assert found["data.label_bounds"].severity == "fatal"
    assert found["data.label_bounds"].facts == {"outside": 2}


@pytest.mark.parametrize(
    ("sides", "size"),
    [
        ([(28, 28)] * 9, 28),  # their own
        ([(500, 375)] * 9, 256),
        ([(100, 80)] * 9, 64),
        ([(100, 80)] * 96 + [(20, 20)] * 4, 64),  # under 5% may be enlarged
        ([(100, 80)] * 90 + [(20, 20)] * 10, 16),
        ([(100, 100)] * 9, 96),
        ([(128, 200)] * 9, 128),
        ([(5, 9)] * 9, 16),
    ],
)
def test_recommended_size(sides: list[tuple[int, int]], size: int) -> None:
    originals = np.array(sides, np.int32)
    assert recommended_side(originals, originals.min(1)) == size


def test_crop_is_measured_on_the_originals(clean: tuple[Path, Dataset]) -> None:
    sides = np.tile(np.int32([[40, 30]]), (len(clean[1].train), 1))
    sides[7] = 30, 120
    prepared = with_train(clean[1], sides=sides)
    prepared = replace(prepared, held_out=replace(prepared.held_out, sides=sides[10 : 10 + len(prepared.held_out)]))
    facts = by_code(quick_check_images(prepared, Config()))["data.crop"].facts
    assert facts["worst"] == pytest.approx(0.75)
    assert facts["mean"] == pytest.approx((399 * 0.25 + 0.75) / 400)
    assert facts["over_half"] == 1


@pytest.mark.parametrize(
    ("size", "original", "first"),
    [
        (64, (600, 400), "give --size 96x64, which has the shape of most images; or give --aspect keep"),
        (64, (400, 600), "give --size 64x96, which"),
        ("96x64", (630, 410), "give --aspect keep, which trains on several shapes, or crop"),  # it has that shape
    ],
)
def test_a_crop_of_images_of_one_shape_is_avoided_by_their_shape(
    size: int | str, original: tuple[int, int], first: str
) -> None:
    format = ImageFormat.of(3, size)
    assert f"{_crop_less(np.int32([original] * 9), format, True)}, or crop".startswith(first)
    mixed = np.int32([(600, 400), (400, 600), (500, 500)] * 3)
    assert _crop_less(mixed, ImageFormat.of(3, 64), True).startswith("give --aspect keep")


def test_kept_aspects_are_advised_only_where_they_are_possible(clean: tuple[Path, Dataset], tmp_path: Path) -> None:
    prepared = with_train(clean[1], sides=np.tile(np.int32([[60, 30], [30, 60]]), (len(clean[1].train) // 2, 1)))
    (tmp_path / "pack.json").write_text("{}")
    of_one_size = {
        "latents": Config(autoencoder_folder="runs/autoencoder"),
        "autoencoder": Config(autoencoder=Autoencoder(factor=2, channels=(8,))),
        "wrapped": Config(data=Data(wrap="x")),
        "pack": Config(source=str(tmp_path)),
        "compiled": Config(training=Training(compile=True)),
        "captured": Config(training=Training(capture=True)),
    }
    remedies = {
        name: by_code(check_dataset(ImageScan.create(prepared), config))["data.crop"].remedy
        for name, config in {"usual": Config(), **of_one_size}.items()
    }
    assert remedies.pop("usual").startswith("give --aspect keep, which trains on several shapes, or crop those to")
    assert set(remedies.values()) == {"crop those to a square around their subject, or remove them"}


def test_captions_and_pictures_of_editors_are_told_apart_from_other_files(tmp_path: Path) -> None:
    for i in range(6):
        Image.new("L", (8, 8), 40 * i).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"drawing number {i}")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "0.psd").touch()
    (tmp_path / "broken.png").write_bytes(b"no picture")

    def ledger(condition: str) -> Finding:
        prepared = prepare(open_source(str(tmp_path)), replace(IN_MEMORY, condition=condition, size=8))
        return by_code(quick_check_images(prepared, Config()))["data.ledger"]

    told = {condition: ledger(condition) for condition in ("text", "")}
    assert "; 2 other files ignored (" in told["text"].evidence
    assert "caption" not in told["text"].evidence  # which is no fault
    assert told["text"].facts["captions"] == 6
    assert "; 8 other files ignored (" in told[""].evidence
    assert ".psd are read once they are saved as PNG" in told[""].evidence
    assert told["text"].remedy.startswith("repair, convert or remove the image files that cannot be used")
    (tmp_path / "broken.png").unlink()
    assert ledger("text").evidence.startswith("each of 6 image files is used; 6 captions; 2 other files ignored (")


@pytest.mark.slow
def test_few_images_are_graded() -> None:
    whole = prepare(open_source("fashion"), IN_MEMORY)
    for count, severity in ((1, "fatal"), (4, "fatal"), (5, "warning"), (99, "warning"), (100, "hint"), (999, "hint")):
        images = replace(whole.train, pixels=whole.train.pixels[:count], columns={}, names=whole.train.names[:count])
        images = replace(images, sides=images.sides[:count], grey=images.grey[:count])
        none = replace(images, pixels=images.pixels[:0], names=(), sides=images.sides[:0], grey=images.grey[:0])
        found = by_code(quick_check_images(replace(whole, train=images, held_out=none), Config()))
        assert found["data.count"].severity == severity, count


def test_white_ink_on_nothing_is_seen_on_another_background(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for i in range(8):
        ink = random.integers(0, 256, (8, 8), np.uint8)
        Image.merge("LA", (Image.new("L", (8, 8), 255), Image.fromarray(ink))).save(tmp_path / f"{i}.png")
    found = {}
    for background in ("white", "black"):
        images = prepare(open_source(tmp_path), replace(IN_MEMORY, background=background))
        found[background] = by_code(quick_check_images(images, Config()))["data.equal"]
    assert found["white"].severity == "fatal"
    assert "--data.background" in found["white"].remedy
    assert found["black"].severity == "fine"
