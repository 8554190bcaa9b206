"""Shards in a bucket that fail while they are read: a real S3-compatible server on this machine (moto)."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shard_server import EACH, shard
from unfog.data import decode_pool as bulk
from unfog.data.dataset import ImageSet
from unfog.data.lazy import remote_shards_of
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources import storage
from unfog.data.sources.base import RemotePolicy
from unfog.data.sources.registry import open_source
from unfog.errors import RunError

pytestmark = pytest.mark.slow

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

URL, SHARDS = "s3://album/s-{000..003}.tar", 4


class Bucket:
    """A server with a bucket of shards. `system` writes to it."""

    def __init__(self) -> None:
        self.port = 0
        self.start()
        where = {"endpoint_url": f"http://127.0.0.1:{self.port}", "key": "somebody", "secret": "something"}
        self.system: Any = s3fs.S3FileSystem(**where, skip_instance_cache=True)
        if not self.system.exists("album"):
            self.system.mkdir("album")
        for k in range(SHARDS):
            self.system.pipe(f"album/s-{k:03}.tar", shard(range(k * EACH, (k + 1) * EACH)))

    def start(self) -> None:
        """Begin to serve; what was in the bucket is in it again."""
        self.server = moto.ThreadedMotoServer("127.0.0.1", port=self.port, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(bulk, "_FIRST_PAUSE", 0.05)
    made = Bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    s3fs.S3FileSystem.clear_instance_cache()  # which remembers the environment of before
    yield made
    made.server.stop()


def opened(lost: float = 0.5, begun: dict[str, str] | None = None) -> ImageSet:
    source = open_source(URL, policy=RemotePolicy(max_failed=lost, failed_before=begun))
    return prepare(source, Data(size=8, channels=3, cache="none", held_out=0)).train


def test_one_deleted_and_one_written_over_are_given_up_and_so_after_a_resume(bucket: Bucket) -> None:
    images, strict = opened(), opened(lost=0.25)
    bucket.system.rm("album/s-001.tar")
    bucket.system.pipe("album/s-002.tar", b"<html>busy</html>" * 1000)
    rows = images.take(np.arange(len(images))).rows
    shards = remote_shards_of(images)
    assert shards is not None
    assert shards.failed == {"s-001.tar": "is not there", "s-002.tar": "is not the file that was indexed"}
    kept = [*range(EACH), *range(3 * EACH, 4 * EACH)]
    assert [row for i, row in enumerate(rows.tolist()) if i in kept] == kept
    assert set(rows.tolist()) == set(kept)
    again = opened(begun=shards.failed)
    assert again.fingerprint == images.fingerprint
    assert again.take(np.arange(len(images))).rows.tolist() == rows.tolist()
    with pytest.raises(RunError, match=r"2 of 4 shards of s3://album.* cannot be used"):
        strict.take(np.arange(len(images)))
    assert opened(begun={}).fingerprint != images.fingerprint, "what is written over is taken for other images"


def test_a_server_that_restarts_is_waited_for(bucket: Bucket) -> None:
    images = opened()
    assert images.take(np.arange(4)).rows.tolist() == [0, 1, 2, 3]
    bucket.server.stop()
    timer = threading.Timer(0.5, bucket.start)
    timer.start()
    assert images.take(np.arange(len(images))).rows.tolist() == list(range(SHARDS * EACH))
    timer.join()
