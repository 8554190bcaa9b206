"""What happens around a run: clocks that jump, streams and homes that are missing, folders that move or vanish."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from faults.harness import (
    USUAL,
    Recipe,
    as_json,
    assert_same,
    events,
    long_form,
    lost_steps,
    resume,
    step_reached,
    steps_saved,
    train,
)
from faults.mounts import SmallDisk

# Every look at the wall clock is off by up to a month, either way.
WILD_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) { static unsigned n; n = n * 1664525u + 1013904223u; return (long)(n >> 8) % 5000000 - 2500000; }
int clock_gettime(clockid_t id, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += jump();
  return status;
}
time_t time(time_t *p) { struct timespec t; clock_gettime(CLOCK_REALTIME, &t); if (p) *p = t.tv_sec; return t.tv_sec; }
int gettimeofday(struct timeval *v, void *zone) {
  struct timespec t; clock_gettime(CLOCK_REALTIME, &t);
  v->tv_sec = t.tv_sec; v->tv_usec = t.tv_nsec / 1000; return 0;
}
"""


@long_form
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_clock_jumps(whole, tmp_path, faults, monkeypatch):
    (tmp_path / "clock.c").write_text(WILD_CLOCK)
    library, run = tmp_path / "clock.so", tmp_path / "run"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    with faults.tried("wall clock jumps by weeks") as attempt:
        monkeypatch.setenv("LD_PRELOAD", str(library))
        job = train(USUAL, run)
        job.until(lambda: len(steps_saved(run)) > 4)
        job.kill()
        attempt.lost.append(lost_steps(run))
        resume(run).ends()
        times = [event["time"] for event in events(run, "checkpoint")]
        assert times != sorted(times), "the clock did not jump"
        assert_same(run, whole)


@long_form
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("streams", ["> /dev/full", "2> /dev/full", "> /dev/full 2>&1", "1>&- 2>&- 0>&-"])
def test_nowhere_to_print_to(whole, tmp_path, faults, streams):
    run = tmp_path / "run"
    with faults.tried(f"streams: {streams}") as attempt:
        shell = ["sh", "-c", f'exec "$@" {streams}', "sh"]
        train(USUAL, run, before=shell).ends()
        assert_same(run, whole)
        attempt.lost.append(0)


@long_form
@pytest.mark.parametrize("home", [None, "/proc/nowhere"])
def test_no_home(whole, tmp_path, faults, monkeypatch, home):
    run = tmp_path / "run"
    monkeypatch.delenv("UNFOG_CACHE")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    with faults.tried("HOME unset or not writable") as attempt:
        train(USUAL, run, *([] if home else ["--data.cache", "memory"])).ends()
        assert_same(run, whole) if home else assert_trained(run, USUAL)
        attempt.lost.append(0)


def assert_trained(run: Path, recipe: Recipe) -> None:
    """It came to its end, and saved that."""
    assert (step_reached(run), steps_saved(run)[-1]) == (recipe.steps, recipe.steps)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Some pictures, which are this test's own."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(60):
        noise = np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i}.png")
    return folder


def own(photos: Path, **flags: object) -> Recipe:
    """The usual run on those pictures."""
    return USUAL._replace(source=str(photos), flags={"--evaluate.every": -1, "--size": 16, **flags})


@long_form
@pytest.mark.parametrize("cache", ["auto", "disk"])
@pytest.mark.parametrize("values", [False, True], ids=["pictures", "values"])
def test_the_cache_cannot_be_written(photos, tmp_path, faults, monkeypatch, cache, values):
    """It does without where that is possible, and refuses with a remedy where a cache is insisted on."""
    recipe = own(photos, **{"--data.cache": cache})
    if values:  # floating point with unknown pixels
        fields = np.random.default_rng(0).normal(0, 100, (200, 16, 16, 4)).astype(np.float32)
        fields[:, 2, 3] = np.nan
        np.savez(tmp_path / "fields.npz", images=fields)
        flags = {**recipe.flags, "--data.jitter": 0, "--data.unknown": "nan"}
        recipe = recipe._replace(source=str(tmp_path / "fields.npz"), flags=flags)
    disk = SmallDisk(tmp_path / "full", "size=1m")
    try:
        disk.fill()
        for place, name in ((disk.path / "cache", "cache's disk full"), (Path("/proc/cache"), "cache not writable")):
            monkeypatch.setenv("UNFOG_CACHE", str(place))
            run = tmp_path / f"run {name}"
            with faults.tried(name):
                job = train(recipe, run)
                if cache == "auto":
                    job.ends()
                    assert_trained(run, USUAL)
                else:
                    # A disk that is full is found while it is written to; that, the run could not know before.
                    assert "UNFOG_CACHE" in job.ends(status=1 if place.parent == disk.path else 2)
                    assert not run.exists()
    finally:
        disk.remove()


@long_form
def test_the_pictures_are_deleted_while_it_trains(photos, tmp_path, faults):
    recipe, run, whole = own(photos), tmp_path / "run", tmp_path / "whole"
    train(recipe, whole).ends()
    with faults.tried("source deleted while training") as attempt:
        job = train(recipe, run)
        assert job.until(lambda: len(steps_saved(run)) > 3)
        photos.rename(tmp_path / "gone")
        job.ask("SIGTERM", run)
        job.ends(status=3)
        attempt.lost.append(lost_steps(run))
        kept = steps_saved(run)
        assert str(photos) in resume(run).ends(status=2)
        assert steps_saved(run) == kept
        (tmp_path / "gone").rename(photos)
        resume(run).ends()
        assert_same(run, whole)


@long_form
@pytest.mark.parametrize("back", [False, True])
def test_the_run_is_renamed_while_it_trains(whole, tmp_path, faults, back):
    """It need not go on, but what there is stays whole, wherever it is, and resumes."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with faults.tried("run folder renamed while training") as attempt:
        job = train(USUAL, run)
        assert job.until(lambda: len(steps_saved(run)) > 3)
        run.rename(elsewhere)
        back = back and job.outlives(0.5)
        if back:
            shutil.rmtree(run, ignore_errors=True)  # what it may have begun anew
            elsewhere.rename(run)
        job.process.wait(60)
        assert "defect" not in job.said
        home = run if back else elsewhere
        if job.process.returncode == 0 and back:
            assert_same(home, whole, pictures=False)
            return
        attempt.lost.append(lost_steps(home))
        resume(home).ends()
        assert_same(home, whole, pictures=False)


@long_form
def test_the_checkpoints_are_deleted_while_it_trains(whole, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("checkpoints deleted while training") as attempt:
        job = train(USUAL, run)
        assert job.until(lambda: len(steps_saved(run)) > 3)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        job.process.wait(60)
        assert "defect" not in job.said
        if job.process.returncode == 0:
            assert_same(run, whole, pictures=False)
        attempt.lost.append(0)


@long_form
def test_stopped_for_a_while_by_the_system(whole, tmp_path, faults):
    """SIGSTOP and SIGCONT, as by a laptop's lid."""
    run = tmp_path / "run"
    with faults.tried("suspended and woken") as attempt:
        job = train(USUAL, run)
        assert job.until(lambda: len(steps_saved(run)) > 2)
        job.ask("SIGSTOP", run)
        job.outlives(1)
        job.ask("SIGCONT", run)
        job.ends()
        assert_same(run, whole)
        assert as_json(run / "heartbeat.json")["doing"] == "finished"
        attempt.lost.append(0)
