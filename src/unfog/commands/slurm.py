"""`unfog slurm`: write a batch file that trains a run on several nodes, and requeues itself until it is finished."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from unfog.config.spec_strings import quote
from unfog.config.validate import reason_of
from unfog.custom.consent import TRUST, given_paths
from unfog.errors import RequestError
from unfog.files.safe_files import open_file
from unfog.process.child import hide_secrets
from unfog.reporting.progress import print_result, say
from unfog.settings import is_auto, setting
from unfog.text import is_address, without_secrets

_SAVE_SECONDS = 300  # before the limit, a run saves and ends; Slurm may be a minute early
_RESTARTS = 3  # times that torchrun starts all processes anew within one job
_CORES_PER_GPU = 8
_TIME = re.compile(r"(?:(?P<days>\d{1,4})-)?(?P<rest>\d{1,6}(?::\d{1,2}){0,2})")
_NAME = re.compile(r"[\w.,:/@#+=-]*")

_SCRIPT = """\
#!/bin/bash
# {request}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes} --ntasks-per-node=1 {gpus}--cpus-per-task={cores}
#SBATCH --time={time} --signal=B:USR1@{lead}
#SBATCH --requeue --open-mode=append
{options}
cd {here} || exit 1
run={run}
{words}

# {lead} s before the limit: save, end, and into the queue again. The file reaches the run where a signal does not.
again=
trap 'again=1; touch "$run/STOP"; kill -USR1 "$job"' USR1
trap : TERM  # scancel, or a preemption after which Slurm itself puts the job into the queue: the tasks get it too

export PYTHONSAFEPATH=1  # `python -m` would import modules of this folder in place of those that are installed
export OMP_NUM_THREADS={threads}
export SRUN_CPUS_PER_TASK={cores}  # as srun does not take it from sbatch
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# On each node torchrun, which leaves USR1 to the processes that it starts: these save and end. Decoded images go to the
# node's own disk, into a folder that no other user can name beforehand.
task='trap "" USR1; trap : TERM
export UNFOG_CACHE=$(mktemp -d "${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}/unfog-XXXXXXXX") || exit 1
"$@"; status=$?; rm -rf "$UNFOG_CACHE"; exit "$status"'
srun --kill-on-bad-exit=1 {container}bash -c "$task" unfog \\
    {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node {processes} --max-restarts {restarts} \\
    --rdzv-backend c10d --rdzv-endpoint "$head:$((10000 + SLURM_JOB_ID % 20000))" \\
    --rdzv-id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" -m unfog "${{words[@]}}" &
job=$!
until wait "$job"; status=$?; ! kill -0 "$job" 2>/dev/null; do :; done  # a trap ends `wait`, not the job
if [ -n "$again" ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""

_TRAIN_OR_RESUME = """\
# A job that comes back goes on with its run.
if [ -f "$run/config.toml" ]; then words=(resume "$run"); else words=({words}); fi"""


@dataclass(frozen=True)
class SlurmRequest:
    """Write a batch file that trains on a Slurm cluster. The command is checked as if it were run.

      unfog slurm --nodes 2 --gpus-per-node 8 train /data/photos --out /shared/photos

    The job saves before its time limit and requeues itself until the run is finished. Give other options of sbatch to
    sbatch, or add them to the file.
    """

    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 1
    """GPUs of each node, with one process for each. 0: one process per node, on its CPU."""
    cpus_per_task: int = setting(0, auto=0)
    """CPU cores of each node. 0: 8 for each GPU."""
    time: str = "24:00:00"
    """Time limit of one job: minutes, hours:minutes:seconds or days-hours:minutes:seconds. A run may take many jobs."""
    partition: str = ""
    """Partition of the cluster. Default: the cluster's."""
    account: str = ""
    """Account to charge. Default: yours."""
    container: str = ""
    """Image to run in: an Apptainer file (.sif), or any other with pyxis. Default: this Python environment.

    The folders of the run, of the images and of all paths in the command are mounted. Paths that stand only in a
    --config file or in a resumed run are not: add them to the batch file.
    """
    file: Path | None = setting(None, metavar="PATH")
    """Path of the new batch file. Default: the name of the run with .sbatch."""
    words: tuple[str, ...] = setting((), hidden=True)
    """The words of the command line after `unfog slurm`, noted in the file."""
    command: tuple[str, ...] = setting((), hidden=True)
    """The command that begins the run: `train …` with its --out, or `resume …`."""
    run: Path = setting(Path(), hidden=True)
    """Folder of the run."""
    source: str = setting("", hidden=True)
    """The images."""

    def __post_init__(self) -> None:
        for name, least, most in (("nodes", 1, 10_000), ("gpus_per_node", 0, 64), ("cpus_per_task", 0, 4096)):
            if not least <= (value := getattr(self, name)) <= most:
                raise RequestError(f"{name} = {value} must be from {least} to {most}")
        if self.seconds < 120:
            raise RequestError(f"time = {quote(self.time)} is too short; give at least 2 minutes")
        for name in ("partition", "account", "container"):
            # These go into the script unquoted.
            if not _NAME.fullmatch(value := getattr(self, name)):
                raise RequestError(f"{name} = {quote(value)} has characters that Slurm does not allow in a name")

    @property
    def seconds(self) -> int:
        """Time limit in seconds. Raises RequestError if `time` is not in a format of Slurm."""
        match = _TIME.fullmatch(self.time)
        if not match:
            raise RequestError(
                f"time = {quote(self.time)} is not a time that Slurm knows; write 90, 12:00:00 or 2-00:00:00"
            )
        parts = [int(part) for part in match["rest"].split(":")]
        if match["days"] or len(parts) == 3:  # hours come first, and else minutes
            hours, minutes, seconds = (*parts, 0, 0)[:3]
            return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        return 60 * parts[0] + sum(parts[1:])

    @property
    def cores(self) -> int:
        """Number of CPU cores of each node."""
        usual = _CORES_PER_GPU * max(1, self.gpus_per_node)
        return usual if is_auto(self, "cpus_per_task") else self.cpus_per_task


def main(request: SlurmRequest) -> int:
    """Write the batch file, print its path, and return the exit status."""
    file = request.file or Path(f"{request.run.resolve().name}.sbatch")
    try:
        with open_file(file, "xb", file.parent) as batch:  # a batch file that is there may have been edited
            os.chmod(batch.fileno(), 0o600)
            batch.write(batch_script(request).encode())
    except FileExistsError:
        raise RequestError(f"{quote(str(file))[1:-1]} exists; give another --file, or remove it") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{quote(str(file))} cannot be written: {reason_of(error)}; give another --file") from None
    shared = "it" if is_address(request.source) else "it and the images"
    say(f"  run       {request.run} ({shared} must be on a disk that all nodes share)")
    for name, word in hide_secrets(request.command)[1].items():
        say(f"  first     export {name}={shlex.quote(without_secrets(word))} with its credentials: the file has none")
    say(f"  next      check the file, then: sbatch {shlex.quote(str(file))}")
    print_result(str(file))
    return 0


def batch_script(request: SlurmRequest) -> str:
    """Return the batch file: the job with its flags, without the secrets of the command, requeued until it ends."""
    # Slurm keeps batch files, and may show them to others, as every node shows the words of its processes.
    shown, secrets = hide_secrets(request.command)
    command = shlex.join(shown)
    words = _TRAIN_OR_RESUME.format(words=command) if request.command[0] == "train" else f"words=({command})"
    needed = [f': "${{{name}:?export it before sbatch}}"\nexport {name}' for name in secrets]
    # The job resumes without the flags that gave consent, perhaps in a container without the stored one.
    paths = shlex.quote(",".join(given_paths()))
    trusted = [f'export {TRUST}={paths}"${{{TRUST}:+,${TRUST}}}"'] if given_paths() else []
    processes = max(1, request.gpus_per_node)
    options = {"partition": request.partition, "account": request.account}
    return _SCRIPT.format(
        request=" ".join(shlex.join(["unfog", "slurm", *map(without_secrets, request.words)]).split()),
        name=re.sub(r"[^\w.-]", "-", request.run.resolve().name),
        nodes=request.nodes,
        gpus=f"--gpus-per-node={request.gpus_per_node} " if request.gpus_per_node else "",
        cores=request.cores,
        time=request.time,
        # Of a short job a quarter at most, so that it trains at all.
        lead=min(_SAVE_SECONDS, request.seconds // 4),
        options="".join(f"#SBATCH --{name}={value}\n" for name, value in options.items() if value),
        here=shlex.quote(str(Path.cwd())),
        run=shlex.quote(str(request.run)),
        # The settings of a resume are the run's own from then on, and may be said again.
        words="\n".join([*needed, *trusted, words]),
        threads=max(1, request.cores // processes),
        container=_container_prefix(request),
        python="python" if request.container else shlex.quote(sys.executable),
        processes=processes,
        restarts=_RESTARTS,
    )


def _local_places(source: str) -> list[Path]:
    """Return the files or the folder of a SOURCE on this machine; [] if it has no path, as built-in sets and URLs."""
    from unfog.data.sources.registry import locate  # with NumPy and Pillow, which other commands start without

    # Not the text as a path: it may be FILE.h5:DATASET, FORMAT:PATH or a pattern.
    _, location = locate(source, began=True)
    if location.form == "folder":
        return [Path(location.resolved)]
    paths = {"file": location.paths[:1], "files": location.paths, "name": ()}[location.form]
    return [Path(path) for path in paths if not is_address(path)]


def _named_places(words: tuple[str, ...]) -> list[Path]:
    """Return the existing files and folders that a command names, by whole words or by parts as in NAME=PATH:KIND."""
    parts = {part for word in words for part in (word, *re.split("[=:,]", word)) if "/" in part}
    return [Path(os.path.abspath(part)) for part in sorted(parts) if os.path.exists(part)]


def _container_prefix(request: SlurmRequest) -> str:
    """Return the words that make srun run in a container, with the folders of the job mounted at the same paths."""
    if not (image := request.container):
        return ""
    places = [Path.cwd(), request.run.absolute(), *_local_places(request.source), *_named_places(request.command)]
    folders = {next(one for one in (place, *place.parents) if one.is_dir()) for place in places} - {Path("/")}
    # Only the outermost: a folder inside another is there already.
    outer = sorted(str(one) for one in folders if folders.isdisjoint(one.parents))
    if image.endswith(".sif"):
        return f'apptainer exec --nv --pwd "$PWD" --bind {shlex.quote(",".join(outer))} {image} '
    mounts = shlex.quote(",".join(f"{one}:{one}" for one in outer))
    return f'--container-image={image} --container-mounts={mounts} --container-workdir="$PWD" '
