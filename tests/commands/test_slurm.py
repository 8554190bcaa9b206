"""`unfog slurm`: the file that it writes, as bash reads it and as a cluster of stand-ins runs it."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command import exit_status
from conftest import few_images
from launches import (
    SETTINGS,
    ended,  # noqa: F401  a fixture
    largest_difference,
    launched,
    output,
    rows,
    started,
    wait_for_steps,
    weights,
)
from unfog.cli.main import main
from unfog.commands import slurm
from unfog.config.requests.slurm import SlurmRequest
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.custom import consent
from unfog.process import child
from unfog.process.slurm_job import batch_script

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ended")]
DOCS = Path(__file__).parents[2] / "docs" / "distributed.md"
# Runs the words on two nodes, and hands a signal to every process of the step.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
from pathlib import Path

def below(pid):
    for child in Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split():
        yield from (int(child), *below(child))

def pass_on(number, frame):
    for pid in list(below(os.getpid())):
        os.kill(pid, number)

signal.signal(signal.SIGUSR1, pass_on)
words = sys.argv[2:]
assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
nodes = [subprocess.Popen(words) for _ in range(2)]
sys.exit(max(node.wait() for node in nodes))
"""
SCONTROL = """#!/bin/bash
case "$*" in
"show hostnames two") printf 'localhost\\nlocalhost\\n' ;;
"requeue 41") echo "$*" >> requeued ;;
*) exit 9 ;;
esac
"""


def asked(*words):
    return exit_status("slurm", *words)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A job is given all consent of its command, which other tests of this process have added to.
    monkeypatch.setattr(consent, "_given", set())
    monkeypatch.setattr(consent, "_imported", set())
    return tmp_path


ODD = "it's 5 o'clock & \"late\" $(touch owned)"


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (("--", "train", "fashion"), "fashion"),
        (("--nodes", 4, "--gpus-per-node", 8, "--time", "2-00", "--", "train", "fashion", "--out", "a/b"), "b"),
        (("--account", "us", "--partition", "gpu,big", "--", "train", "fashion", "--out", ODD), ODD),
        (("--container", "nvcr.io#nvidia/pytorch:26.10-py3", "--", "train", "fashion", "--config", ODD), "fashion"),
        (("--container", "unfog.sif", "--gpus-per-node", 0, "--", "train", "fashion"), "fashion"),
    ],
)
def test_bash_reads_what_is_written(here, words, run):
    if ODD in words[-1:] and run != ODD:
        (here / ODD).write_text("")  # settings
    assert asked(*words) == 0
    file = here / f"{run}.sbatch"
    subprocess.run(["bash", "-n", file], check=True)
    # Up to the first program that only a cluster has, with what the words of the run are.
    head = file.read_text().partition("export OMP")[0]
    said = subprocess.run(["bash", "-c", head + 'printf "%s\\n" "$run" "${words[@]}"'], capture_output=True, text=True)
    place, command, *rest = said.stdout.splitlines()
    assert (Path(place).name, command) == (run, "train")
    assert rest[rest.index("--out") + 1] == place
    assert not (here / "owned").exists()


def test_a_container_has_the_folder_of_the_images_however_they_are_named(here):
    other = here.parent / f"{here.name} images"
    (other / "cells").mkdir(parents=True)
    for name in ("a.zarr/deep", "cut=1", "[0]"):
        (other / name).mkdir(parents=True)
    for name in ("a.h5", "a.zarr/.zgroup", "cells/0.tif", "0.tar", "1.tar"):
        (other / name).write_bytes(b"")
    (here / "photos").symlink_to(other / "cells")
    for source, place in {
        f"{other}/a.h5:deep/x": other,
        f"{other}/a.zarr:deep/x": other / "a.zarr",
        f"tiff:{other}/cells": other / "cells",
        f"{other}/{{0..1}}.tar": other,
        f"{other}/cells": other / "cells",
        f"file://{other}/cells": other / "cells",
        f"{other}/cut=1": other / "cut=1",
        f"{other}/[0]": other / "[0]",
        "photos": other / "cells",
        "tiff:photos/": other / "cells",
        "fashion": None,
    }.items():
        script = batch_script(SlurmRequest(command=("train",), run=here / "run", source=source, container="a.sif"))
        bound = shlex.split(script.partition("--bind ")[2])[0].split(",")
        assert bound == sorted(str(one) for one in (here, place) if one), source


def test_a_container_has_the_folders_of_all_paths_in_the_command(here):
    other = here.parent / f"{here.name}-more"
    for name in ("depth", "tables", "weights"):
        (other / name).mkdir(parents=True)
    (other / "tables/labels.csv").touch()
    named = f"depth={other}/depth:image,{other}/tables/labels.csv:age"
    words = ("train", "fashion", "--condition", named, f"--init={other}/weights", "--note", "/nowhere/x", "s3://a/b")
    script = batch_script(SlurmRequest(command=words, run=here / "run", source="fashion", container="a.sif"))
    bound = shlex.split(script.partition("--bind ")[2])[0].split(",")
    assert bound == sorted(map(str, (here, other / "depth", other / "tables", other / "weights")))


@pytest.mark.parametrize("image", ["a.sif", "nvcr.io#pytorch"])
def test_a_container_has_the_parent_of_what_the_command_will_make(here, capsys, image):
    mount = here.parent / f"{here.name}-bucket"
    (mount / "runs").mkdir(parents=True)
    paths = (
        "--mirror",
        f"{mount}/runs/new",
        f"--evaluate.features={mount}/odd=1/net.pt",
        "--note",
        "/nowhere/in/x",
        "--init",
        "/other",
    )
    request = SlurmRequest(command=("train", "fashion", *paths), run=here / "run", source="fashion", container=image)
    script = batch_script(request)
    mounts = script.partition("--bind " if image == "a.sif" else "--container-mounts=")[2]
    assert {one.split(":")[0] for one in shlex.split(mounts)[0].split(",")} == {str(here), str(mount)}
    slurm.main(request)
    said = capsys.readouterr().err
    for folder in ("/nowhere", "/other"):
        assert f"mount {folder} in the container (this machine does not have it, or may not look)" in said
    assert f"{mount}/runs" not in said  # it is there


def test_a_secret_of_an_address_is_no_folder_to_mount(here, capsys):
    source = "https://host/a.tar?Signature=/SECRETabc/def&x=1"
    slurm.main(SlurmRequest(command=("train", source), run=Path("run"), source=source, container="a.sif"))
    assert "SECRET" not in capsys.readouterr().err + (here / "run.sbatch").read_text()


def test_a_batch_file_that_cannot_be_made_leaves_none(here, monkeypatch):
    def fails(request):
        raise PermissionError("locked")

    monkeypatch.setattr(slurm, "batch_script", fails)
    with pytest.raises(PermissionError):
        slurm.main(SlurmRequest(command=("train", "fashion"), run=Path("run"), source="fashion"))
    assert not (here / "run.sbatch").exists()


def test_a_folder_that_may_not_be_entered_has_its_nearest_parent_mounted(here, monkeypatch):
    stat = os.stat

    def locked(path, *args, **words):
        if "locked/" in str(path):
            raise PermissionError(13, "locked")
        return stat(path, *args, **words)

    monkeypatch.setattr(os, "stat", locked)
    words = ("train", "fashion", "--mirror", f"{here}/locked/x/y")
    (here / "locked").mkdir()
    script = batch_script(SlurmRequest(command=words, run=here / "run", source="fashion", container="a.sif"))
    assert f"--bind {here} " in script  # which has the locked folder in it


@pytest.mark.parametrize(("source", "shared"), [("fashion", "it and the images"), ("s3://bucket/{0..3}.tar", "it")])
def test_what_all_nodes_have_to_reach_is_said(here, capsys, source, shared):
    slurm.main(SlurmRequest(command=("train", source), run=Path("run"), source=source))
    assert f"run ({shared} must be on a disk that all nodes share)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", 2), "needs the command to run; give train or resume"),
        (("--account", "train"), "needs the command to run; give train or resume: unfog slurm --nodes 2 train SOURCE"),
        (("--nodes", 2, "train", "fashion", "--steps", "x"), "--steps got 'x'"),
        (("--nodes", 2, "fashion"), "unfog slurm takes only flags; 'fashion' is not one"),
        (("--", "sample", "x"), "needs the command to run, which 'sample' is not"),
        (("--", "train", "nowhere"), "nowhere is neither"),
        (("--", "train", "fashion", "--steps", "x"), "--steps got 'x'"),
        (("--", "train", "fashion", "--autoencoder", "nowhere"), "nowhere"),
        (("--", "resume", "nowhere"), "nowhere is not a run"),
        (("--gpus", 8, "--", "train", "fashion"), "did you mean --gpus-per-node"),
        (("--time", "soon", "--", "train", "fashion"), "not a time that Slurm knows"),
        (("--time", "0:59", "--", "train", "fashion"), "at least 2 minutes"),
        (("--nodes", 0, "--", "train", "fashion"), "nodes = 0"),
        (("--account", "a\nb", "--", "train", "fashion"), "account = "),
    ],
)
def test_what_is_refused_writes_nothing(here, capsys, words, said):
    assert asked(*words) == 2
    assert said in capsys.readouterr().err
    assert not list(here.iterdir())


def test_a_run_that_is_here_has_a_name(here, monkeypatch, capsys):
    (here / "photos-2").mkdir()
    (here / "photos-2/config.toml").write_text(to_toml(Config(source="fashion")))
    monkeypatch.chdir(here / "photos-2")
    with pytest.raises(SystemExit, match="0"):
        main(["slurm", "--", "resume", "."])
    assert "#SBATCH --job-name=photos-2\n" in (here / "photos-2/photos-2.sbatch").read_text()


def test_credentials_are_taken_from_the_environment(here, capsys):
    url = "https://me:SECRET@host/it's/s-{000..009}.tar?signature=SECRET"
    assert asked("train", url, "--out", "run") == 0
    file = here / "run.sbatch"
    assert file.stat().st_mode & 0o077 == 0
    out, said = capsys.readouterr()
    assert "SECRET" not in file.read_text() + out + said
    assert "export UNFOG_URL_1='https://host/" in said
    head = file.read_text().partition("export OMP")[0] + 'printf "%s\\n" "${words[@]}"'
    for given, words in (({"UNFOG_URL_1": url}, ["train", "@UNFOG_URL_1", "--out", "run"]), ({}, [])):
        ran = subprocess.run(["bash", "-c", head], capture_output=True, text=True, env=os.environ | given)
        assert ran.stdout.splitlines() == words
        assert ("export it before sbatch" in ran.stderr) == (not given)


def test_no_file_is_written_over(here, capsys):
    (here / "fashion.sbatch").write_text("mine")
    assert asked("--", "train", "fashion") == 2
    assert asked("train", "fashion") == 2, "-- may be left out"
    assert "--file" in capsys.readouterr().err
    assert (here / "fashion.sbatch").read_text() == "mine"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("12:00:00", 43200), ("2-00", 172800), ("1-02:03", 93780), ("1-02:03:04", 93784)],
)
def test_times_are_slurms(time, seconds):
    assert SlurmRequest(time=time).seconds == seconds


def test_the_documented_file_is_the_one_that_is_written(here):
    text = DOCS.read_text()
    command = text[text.index("unfog slurm ") :].partition("\n```")[0].replace("\\\n", " ").split()[2:]
    shown = text[text.index("#!/bin/bash") :].partition("```")[0]
    words = command[command.index("train") :]
    place = {"run": Path("/shared/runs/photos"), "source": "/data/photos"}
    job = SlurmRequest(2, 8, time="12:00:00", words=tuple(command), command=tuple(words), **place)
    script = batch_script(job)
    assert script.replace(str(here), "/home/me").replace(sys.executable, "/home/me/.venv/bin/python") == shown


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for srun looks into /proc")
def test_a_job_that_comes_back_ends_as_if_it_had_never_left(here, monkeypatch):
    programs, calm, run = here / "bin", here / "calm", here / "run"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    settings = ("--steps", 24, *SETTINGS)
    nodes = ("--nodes", 2, "--gpus-per-node", 0, "--cpus-per-task", 1)
    assert asked(*nodes, "--", "train", few_images(), "--out", run, *settings) == 0
    slurm = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "two", "SLURM_TMPDIR": str(here)}
    for name, value in ({"PATH": f"{programs}:{os.environ['PATH']}"} | slurm).items():
        monkeypatch.setenv(name, value)
    first = started("bash", "run.sbatch")
    wait_for_steps(run, 6, first)
    first.send_signal(signal.SIGUSR1)
    output(first)
    assert (here / "requeued").read_text() == "requeue 41\n"
    left = max(int(one.name) for one in (run / "checkpoints").glob("[0-9]*"))
    assert 6 <= left < 24
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert f"steps {left} to 24" in output(started("bash", "run.sbatch"))
    assert (here / "requeued").read_text() == "requeue 41\n"  # it is finished
    output(launched(2, "train", calm, *settings))
    assert largest_difference(weights(calm), weights(run)) == 0
    assert [row["loss"] for row in rows(calm)] == [row["loss"] for row in rows(run)]


def test_consent_that_a_flag_gives_holds_for_the_restarts_of_the_job(here, monkeypatch):
    (here / "mine.py").write_text("")
    assert asked("train", "fashion", "--out", "run", "--network", "custom:path=mine.Net") == 0
    head = (here / "run.sbatch").read_text().partition("export OMP")[0] + 'env | grep "^UNFOG_TRUST\\|^PYTHONSAFE"'
    for given, trusted in (({}, "mine.Net"), ({"UNFOG_TRUST": "other.Net"}, "mine.Net,other.Net")):
        ran = subprocess.run(["bash", "-c", head], capture_output=True, text=True, env=os.environ | given)
        assert sorted(ran.stdout.split()) == ["PYTHONSAFEPATH=1", f"UNFOG_TRUST={trusted}"]


def test_words_with_credentials_are_read_from_the_environment(here, monkeypatch, capsys):
    words = ["plan", "https://me:SECRET@host/a.tar", "--size", "16", "https://me:SECRET@host/a.tar"]
    shown, variables = child.hide_secrets(words)
    assert shown == ["plan", "@UNFOG_URL_1", "--size", "16", "@UNFOG_URL_1"]
    with pytest.raises(SystemExit, match="2"):
        main(shown)
    assert "UNFOG_URL_1" in capsys.readouterr().err
    monkeypatch.setattr(os, "environ", os.environ | variables)
    assert child.reveal_secrets(shown) == words
    assert "UNFOG_URL_1" not in os.environ
