"""The benchmark for a machine with a GPU: its counting, what becomes of parts that fail, and a rehearsal on the CPU."""

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from PIL import Image

from unfog.models.network_settings import build_model
from unfog.models.settings import DiT
from unfog.planning.flops import NetworkCost

FOLDER = Path(__file__).parents[1] / "benchmarks/gpu"
MODULES = ("rows", "parts", "run", "pieces", "networks", "steps", "part_profile", "cifar10")


@pytest.fixture
def bench(monkeypatch):
    """Return a module of the benchmark by name; none of them stays imported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_flops_of_a_transformer_block_are_those_of_its_products(bench):
    """A block of width w on N tokens: 12 w^2 weights in products, twice N each, and 4 N^2 w for attention."""
    width, side, patch = 64, 16, 2
    tokens = (side // patch) ** 2

    def cost(depth):
        return NetworkCost.of(lambda: build_model(DiT(width=width, depth=depth, patch=patch), 3), (3, side, side))

    one, two = cost(1), cost(2)
    block = build_model(DiT(width=width, depth=1, patch=patch), 3).blocks[0]
    weights = sum(p.numel() for p in block.parameters() if p.ndim == 2 and width in p.shape)
    products, attention = 2 * tokens * weights, 4 * tokens**2 * width
    assert two.forward - one.forward == products + attention
    # Backward takes two products for each of the forward pass; attention's computes its scores anew, so 5 for 2.
    assert two.training - one.training == 3 * products + 3.5 * attention
    mfu = bench("rows").mfu
    assert mfu(two.training, images_per_second=1000.0, peak=two.training * 4000) == pytest.approx(0.25)


def test_the_time_in_which_a_kernel_runs_counts_overlaps_once(bench):
    rows, profile = bench("rows"), bench("part_profile")
    assert rows.busy([]) == 0
    assert rows.busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.0, 1.5)]) == 4
    assert [profile.is_kernel(name, False) for name in ("ampere_gemm", "Optimizer.step#Muon.step")] == [True, False]
    assert [profile.is_kernel(name, True) for name in ("aten::add", "profiled range")] == [True, False]
    events = [("conv", 0.0, 3e5), ("add", 2e5, 4e5), ("conv", 9e5, 1e6)]
    total, first, second = profile.kernels("net", events, seconds=1.0)
    assert total.figures == {"launches": 1.0, "idle": pytest.approx(0.5)}
    assert first.said.startswith("66.7%, 0.666667 a step: conv")
    assert second.figures["share"] == pytest.approx(1 / 3)


def test_rows_become_a_table_a_ledger_row_and_a_picture(bench, tmp_path):
    rows = bench("rows")
    rate = {"images_per_second": 120.0}
    found = [
        rows.Row("steps a", "unfog eager", "120 images/s | 3 x diffusers", figures=rate),
        rows.Row("steps a", "bare eager", "140 images/s", figures={"images_per_second": 140.0}),
        rows.Row("ranks", "FSDP2", "it did\nnot work", "failed"),
        rows.Row("packages", "diffusers", "not installed", "skipped"),
    ]
    table = rows.table(found)
    assert len(table) == 6
    assert all(line.count("|") == 4 for line in table)
    assert table[4] == "| ranks | FSDP2 | **failed**: it did not work |"
    assert rows.summary(found) == "2 ok, 1 failed (ranks: FSDP2), 1 skipped"
    ledger = rows.ledger_row("2026-01-01", "H100", "run.sh", found)
    assert ledger.count("|") == 5
    assert "steps a, unfog eager: 120 images/s" in ledger
    aside = [
        rows.Row("commands", "train", "1 s", figures={"s": 1}),
        rows.Row("profile", "kernel 1", "9%", figures=rate),
    ]
    assert rows.ledger_row("2026-01-01", "H100", "run.sh", aside).endswith("| . 2 ok |")
    assert "1 failed (ranks: FSDP2)" in ledger
    rows.picture(tmp_path / "gpu.png", "H100", found)
    with Image.open(tmp_path / "gpu.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=100_000)}
    assert {(31, 111, 139), (185, 185, 185)} <= colours
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(row.to_json() for row in found) + '\n{"part": "cut')
    assert rows.Row.read(file) == found
    with pytest.raises(ValueError, match="ok, failed, skipped"):
        rows.Row("a", "b", "c", "fine")


PARTS = {
    "good": "yield Row('good', 'a', 'well')",
    "raises": "yield Row('raises', 'a', 'well')\n    raise RuntimeError('the device is gone')",
    "dies": "yield Row('dies', 'a', 'well')\n    import os\n    os.abort()",
    "hangs": "yield Row('hangs', 'a', 'well')\n    import subprocess\n    subprocess.run(['sleep', '60'])",
    "silent": "return\n    yield",
}


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_a_row_and_keeps_those_that_it_had(bench, tmp_path, monkeypatch):
    parts = bench("parts")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    found = {}
    for name, body in PARTS.items():
        (tmp_path / f"{name}.py").write_text(f"from rows import Row\n\ndef measure(setting):\n    {body}\n")
        started = time.monotonic()
        found[name] = parts.run_part(parts.Part(name, name, 9, needs=()), True, tmp_path / "out", 4)
        assert time.monotonic() - started < 20
    assert [(row.said, row.state) for row in found["good"]] == [("well", "ok")]
    for name in ("raises", "dies", "hangs"):
        assert [row.state for row in found[name]] == ["ok", "failed"], name
    assert "RuntimeError: the device is gone" in found["raises"][1].said
    assert "exit status -6" in found["dies"][1].said
    assert found["hangs"][1].said == "not finished after 4 s"
    assert [(row.said, row.state) for row in found["silent"]] == [("yielded nothing", "failed")]
    lacking = parts.run_part(parts.Part("x", "good", 9, needs=("no_such_module", "json")), True, tmp_path / "out", 4)
    assert [(row.said, row.state) for row in lacking] == [("needs no_such_module", "skipped")]


def test_missing_packages_are_told_with_what_they_cost(bench, monkeypatch):
    parts = bench("parts")
    assert parts.missing(["json", "no_such_module"]) == ["no_such_module"]
    monkeypatch.setattr(parts, "missing", lambda names: [name for name in names if name in ("tyro", "diffusers")])
    needed, wanted = parts.check_packages(cpu=False)
    assert (needed.state, wanted.state) == ("failed", "skipped")
    assert "tyro: README.md says how" in needed.said
    assert "its training step is not timed" in wanted.said


def test_a_folder_travels_in_pieces_and_damage_is_noticed(bench, tmp_path):
    pieces = bench("pieces")
    folder, out = tmp_path / "state", tmp_path / "pieces"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "large").write_bytes(bytes(range(250)))
    (folder / "empty").touch()
    assert pieces.split(folder, out, size=100) == 3
    assert max(path.stat().st_size for path in out.glob("*.piece")) == 100
    pieces.join(out, tmp_path / "back")
    assert (tmp_path / "back/a/large").read_bytes() == bytes(range(250))
    assert (tmp_path / "back/empty").read_bytes() == b""
    # Fewer files the next time leave nothing of the old ones behind.
    (folder / "a" / "large").unlink()
    assert pieces.split(folder, out, size=100) == 0
    assert [path.name for path in out.iterdir()] == ["index.json"]
    (folder / "b").write_bytes(b"good")
    pieces.split(folder, out)
    next(out.glob("*.piece")).write_bytes(b"evil")
    with pytest.raises(ValueError, match="pieces of b are damaged"):
        pieces.join(out, tmp_path / "other")
    (out / "index.json").write_text(json.dumps({"../escaped": {"sha256": "", "pieces": []}}))
    with pytest.raises(ValueError, match="outside of"):
        pieces.join(out, tmp_path / "other")


@pytest.mark.slow
def test_a_bare_step_and_diffusers_step_train_the_network_that_ours_is(bench, monkeypatch):
    """diffusers' U-Net has our weights and answers the same."""
    networks, steps = bench("networks"), bench("steps")
    config = networks.settings_of("cifar10", cpu=True)
    ours = steps.build_network(config)
    x, t = torch.randn(2, *config.input_shape), torch.tensor([3.0, 700.0])
    for tensor in ours.parameters():
        torch.nn.init.normal_(tensor, std=0.05)
    monkeypatch.setattr(steps, "build_network", lambda config: ours)
    theirs, call = steps._counterpart(config)
    with torch.no_grad():
        assert (call(theirs.eval(), x, t) - ours.eval()(x, t)).abs().max() < 1e-4
    before = [tensor.clone() for tensor in ours.parameters()]
    assert steps.bare(config, torch.device("cpu"))(2) > 0
    assert all(not torch.equal(a, b) for a, b in zip(before, ours.parameters()))
    assert steps.diffusers(config, torch.device("cpu"))(1) > 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_rehearsal_of_everything_on_the_cpu(tmp_path):
    """No part fails; what is skipped is what only CUDA has."""
    command = ["bash", str(FOLDER / "run.sh"), "--cpu", "--out", str(tmp_path / "out"), "--minutes", "20"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    whole = json.loads((tmp_path / "out/gpu.json").read_text())
    rows = whole["rows"]
    assert {row["state"] for row in rows} == {"ok", "skipped"}
    assert all("CUDA" in row["said"] for row in rows if row["state"] == "skipped")
    by_part = {part: [row["name"] for row in rows if row["part"] == part] for part in {row["part"] for row in rows}}
    commands = {"train", "resume", "resume --verify", "sample", "evaluate", "report", "export", "plan", "doctor"}
    assert commands <= set(by_part["commands"])
    for network in ("unet-64", "cifar10", "dit-latents"):
        ways = {f"{who} {how}" for who in ("unfog", "bare", "diffusers") for how in ("eager", "compiled")}
        assert ways < set(by_part[f"steps {network}"])
        assert {"unfog captured", "unfog compiled, captured"} < set(by_part[f"steps {network}"])
    assert sum("plain and captured" in name for name in by_part["exact"]) == 4
    assert len([name for name in by_part["profile"] if name.startswith("kernel ")]) == 20
    assert {"a run resumed", "resume --verify"} < set(by_part["exact"])
    assert {"all-reduce", "FSDP2"} == set(by_part["ranks"])
    assert (tmp_path / "out/ledger.md").read_text().count("|") == 5
    assert (tmp_path / "out/gpu.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_cifar10_goes_on_in_slices_until_the_distance_is_there(bench, tmp_path, monkeypatch, capfd):
    """A slice that is too short for all of it saves and says so; the next ones go on from its pieces."""
    script, pieces = bench("cifar10"), bench("pieces")
    real, started, statuses = script.within, [], []

    def begin(*words, **settings):
        started.append(subprocess.Popen(*words, **settings))
        return started[-1]

    def stop_once_it_trains(run):
        while not started or started[0].poll() is None:
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
                started[0].terminate()
                return
            time.sleep(0.05)

    def within(words, deadline):
        """Stop the training once it trains, and the first evaluation after a second; all else has its time."""
        if words[0] == "train":
            run = Path(words[words.index("--out") + 1])
            threading.Thread(target=stop_once_it_trains, args=(run,)).start()
        early = words[0] == "evaluate" and len(statuses) < 3
        statuses.append(real(words, time.monotonic() + (0 if early else 300)))
        return statuses[-1]

    fake = types.SimpleNamespace(Popen=begin, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(script, "subprocess", fake)
    monkeypatch.setattr(script, "within", within)
    words = [str(tmp_path / "state"), "--cpu", "--images", "800"]
    assert script.main(words) == 3
    index = json.loads((tmp_path / "state/index.json").read_text())
    assert any(name.startswith("run/checkpoints/") for name in index)
    assert "trained" not in index
    assert [script.main(words) for _ in range(2)] == [3, 0]
    assert statuses == [3, 0, 3, 0]
    said = capfd.readouterr().out
    assert re.search(r"fd [\d.]+ \[[\d.]+, [\d.]+\], 128 samples", said)
    assert all(path.stat().st_size <= pieces.PIECE for path in (tmp_path / "state").iterdir())
