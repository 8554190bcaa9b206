from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forked import Forked
from unfog.errors import RequestError, RunError
from unfog.evaluation import features as store
from unfog.evaluation.distances import FeatureStatistics
from unfog.evaluation.features import (
    Features,
    Ranks,
    compute_features,
    compute_statistics,
    features_folder,
    open_features,
)


class Source:
    """Pictures by slices, which notes what was asked for, and may fail at a place."""

    def __init__(self, count: int, fails_at: int | None = None):
        self.pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 8, 8), dtype=np.uint8)
        self.asked: list[int] = []
        self.fails_at = fails_at

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, key: slice) -> np.ndarray:
        if key.start == self.fails_at:
            raise KeyboardInterrupt
        self.asked.append(key.start)
        return self.pixels[key]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(store, "CHUNK", 20)


def of(embed) -> Features:
    return Features("test", "none", "test-digest", torch.device("cpu"), embed)


def test_features_are_those_of_all_at_once():
    source, features = Source(70), open_features("pixels")
    seen = []
    found = compute_features(source, features, None, lambda done, total: seen.append((done, total)))
    assert torch.equal(found, features(torch.from_numpy(source.pixels)))
    assert seen == [(20, 70), (40, 70), (60, 70), (70, 70)]
    assert not store.cache_folder().joinpath("features").exists()


def test_what_was_interrupted_goes_on_where_it_was():
    features, plain = open_features("pixels"), compute_features(Source(70), open_features("pixels"))
    with pytest.raises(KeyboardInterrupt):
        compute_features(Source(70, fails_at=40), features, "key")
    source = Source(70)
    assert torch.equal(compute_features(source, features, "key"), plain)
    assert source.asked == [40, 60]
    again = Source(70)
    assert torch.equal(compute_features(again, features, "key"), plain)
    assert again.asked == []


def test_an_entry_is_of_these_pictures_by_this_extractor():
    features = open_features("pixels")
    kept = {
        features_folder("key", 70, features),
        features_folder("other", 70, features),
        features_folder("key", 71, features),
        features_folder("key", 70, of(features.embed)),
    }
    assert len(kept) == 4
    compute_features(Source(70), features, "key")
    source = Source(70)
    compute_features(source, of(features.embed), "key")
    assert len(source.asked) == 4


@pytest.mark.parametrize("harm", ["cut", "other shape", "not finite", "nothing"])
def test_a_damaged_chunk_is_made_again(harm):
    features = open_features("pixels")
    plain = compute_features(Source(70), features, "key")
    path = features_folder("key", 70, features) / "00000020.safetensors"
    if harm in ("cut", "nothing"):
        path.write_bytes(path.read_bytes()[: 500 if harm == "cut" else 0])
    else:
        chunk = torch.zeros(19, 192) if harm == "other shape" else torch.full((20, 192), torch.nan)
        store._write(path, {"features": chunk}, features)
    source = Source(70)
    assert torch.equal(compute_features(source, features, "key"), plain)
    assert source.asked == [20]


def test_ranks_compute_their_share_and_read_the_others():
    features, plain = open_features("pixels"), compute_features(Source(110), open_features("pixels"))
    second, seen = Source(110), []

    def barrier() -> None:  # the other rank does its part while this one waits
        with pytest.raises(RunError, match="missing"):
            compute_features(second, features, "key", ranks=Ranks(1, 3))

    first = Source(110)
    with pytest.raises(RunError, match="00000040"):
        compute_features(first, features, "key", lambda *now: seen.append(now), ranks=Ranks(0, 3, barrier))
    assert first.asked == [0, 60]
    assert second.asked == [20, 80]
    assert seen == [(20, 40), (40, 40)]
    third = Source(110)
    assert torch.equal(compute_features(third, features, "key", ranks=Ranks(2, 3)), plain)
    assert third.asked == [40, 100]


WORKER = """
import sys, numpy as np, torch, torch.distributed as dist
from safetensors.torch import save_file
from unfog.evaluation import features as store
from unfog.evaluation.features import Ranks, open_features
rank, net, rendezvous, out = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
store.CHUNK = 20
pixels = np.random.default_rng(0).integers(0, 256, (130, 3, 8, 8), dtype=np.uint8)
features = open_features(net)
found = store.compute_features(pixels, features, "key", ranks=Ranks(rank, 2, dist.barrier))
save_file({"x": found}, out)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_end_with_the_features_of_one(tmp_path: Path):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(576, 32)
    )
    torch.jit.script(layers).save(tmp_path / "net.pt")
    net = f"{tmp_path}/net.pt:size=0"
    outs = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    workers = [Forked([rank, net, tmp_path / "meet", out], WORKER) for rank, out in enumerate(outs)]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    plain = compute_features(Source(130), open_features(net))
    for out in outs:
        assert torch.equal(store.load_file(out)["x"], plain)


def test_several_processes_need_a_key():
    with pytest.raises(RequestError, match="cache_key"):
        compute_features(Source(20), open_features("pixels"), ranks=Ranks(0, 2))


def test_nothing_has_no_features():
    with pytest.raises(RequestError, match="no images"):
        compute_features(Source(0), open_features("pixels"))


def test_features_that_are_no_numbers_are_not_kept():
    def broken(x: Tensor) -> Tensor:
        y = x.mean((2, 3))
        y[3] = torch.inf
        return y

    with pytest.raises(RunError, match="not finite"):
        compute_features(Source(20), of(broken), "key")
    assert not features_folder("key", 20, of(broken)).exists()


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "file/cache"))
    features, source = open_features("pixels"), Source(30)
    assert len(compute_features(source, features, "key")) == 30
    with pytest.raises(RunError, match="set UNFOG_CACHE"):
        compute_features(source, features, "key", ranks=Ranks(0, 2))


def test_statistics_are_kept_and_read():
    features = open_features("pixels")
    x = compute_features(Source(70), features, "key")
    first, second = compute_statistics(x, features, "key"), compute_statistics(torch.zeros_like(x), features, "key")
    assert torch.equal(first.covariance, FeatureStatistics.of(x).covariance)
    assert torch.equal(first.covariance, second.covariance)
    assert torch.equal(first.mean, second.mean)
    assert second.n == 70
