"""Order of writes for a power cut: a file is flushed before it is renamed into place, or before another vouches for it.

A power cut cannot be tried here. Instead, calls to flush and to rename are watched, and what was flushed is compared
with what is there: the same size and the same time of change.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from test_checkpoint import trained, write
from unfog.config.schema import Config
from unfog.data.packs import pack_writer
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.files import safe_files
from unfog.process.run_folder import RunFolder
from unfog.reporting import records
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.runs.saver import Saver
from unfog.training.checkpoints import posthoc_ema
from unfog.training.ema import Ema
from unfog.training.settings import PowerEma


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


class Disk:
    """Watches flushes and renames in this process."""

    def __init__(self, monkeypatch):
        self.flushed: dict[int, tuple[int, int]] = {}  # inode -> size and time of change, as flushed
        self.order: list[str] = []  # names of flushed files
        self.renamed: list[str] = []
        self.early: list[str] = []  # renamed before all of it was flushed
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def watched_fsync(descriptor):
            fsync(descriptor)
            found = os.fstat(descriptor)
            self.flushed[found.st_ino] = (found.st_size, found.st_mtime_ns)
            self.order.append(path_of(descriptor).name)

        def watched(move):
            def call(source, target, **options):
                self.renamed.append(os.path.basename(target))
                within = options.get("src_dir_fd")  # a name is relative to an open folder, if there is one
                moved = Path(source) if within is None else path_of(within) / source
                parts = [moved, *(moved.iterdir() if moved.is_dir() else ())]
                if moved.parent.name.startswith(".partial-"):  # what lies there is flushed before the folder has a name
                    parts = []
                self.early += [str(part) for part in parts if not self.holds(part)]
                return move(source, target, **options)

            return call

        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(os, "rename", watched(rename))
        monkeypatch.setattr(os, "replace", watched(replace))

    def holds(self, path: Path) -> bool:
        """Return whether the file or folder was flushed after its last change."""
        found = path.stat()
        return self.flushed.get(found.st_ino) == (found.st_size, found.st_mtime_ns)


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, disk):
    for _ in range(2):  # the second one replaces the first
        write(trained(), tmp_path)
        assert not disk.early
        assert disk.holds(tmp_path), "the rename itself"
    assert disk.renamed.count("00000003") == 2
    flushed = {name.removesuffix(".partial") for name in disk.order}
    assert flushed >= {"model.safetensors", "state.json", "manifest.json"}


def test_an_ema_snapshot_is_on_disk_before_it_has_its_name(tmp_path, disk):
    state = trained()
    state.second_ema = Ema(state.model, PowerEma(0.05))
    posthoc_ema._write_snapshot(posthoc_ema.take_ema_snapshot(state, 3), tmp_path / "averages")
    assert disk.renamed == ["00000003.safetensors"]
    assert not disk.early
    assert disk.holds(tmp_path / "averages")


def test_a_file_is_on_disk_before_it_replaces_another(tmp_path, disk):
    safe_files.write_atomic(tmp_path / "config.toml", b"content", tmp_path)
    assert disk.renamed == ["config.toml"]
    assert not disk.early


def test_an_event_is_on_disk_once_it_is_written(tmp_path, disk):
    events = records.Events(tmp_path / "events.jsonl")
    events.write("rolled_back", 3, {})
    assert disk.holds(tmp_path / "events.jsonl")
    events.close()


def test_metrics_are_on_disk_before_the_checkpoint_that_covers_them(tmp_path, disk):
    heartbeat = SimpleNamespace(activity="", during=lambda what: nullcontext())
    folder = RunFolder(tmp_path)
    context = SimpleNamespace(folder=folder, stop=lambda: False, heartbeat=heartbeat, callbacks=(), lock=None)
    with Recorder(tmp_path, Log(), 10) as recorder:
        saver = Saver(context, Config(), recorder)
        recorder.log(1, 8, loss=0.5)
        assert not disk.holds(tmp_path / "metrics.jsonl"), "each line would cost time"
        saver.prepare()
        assert disk.holds(tmp_path / "metrics.jsonl")
        saver.close()


def test_pixels_of_a_pack_are_on_disk_before_its_journal_tells_of_them(tmp_path, disk, monkeypatch):
    rng = np.random.default_rng(0)
    (tmp_path / "set").mkdir()
    for i in range(3):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / f"set/{i}.png")
    append, seen = pack_writer.append, []

    def watched(file, data):
        written = path_of(file.fileno())
        if written.name == pack_writer.JOURNAL:
            seen.extend(disk.holds(written.parent / name) for name in ("pixels.u8", pack_writer.FACTS_FILE))
        append(file, data)

    monkeypatch.setattr("unfog.data.packs.pack_writer.append", watched)
    prepare(open_source(tmp_path / "set"), Data(size=8, cache="disk"))
    assert seen == [True, True]
