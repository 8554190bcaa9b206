"""A batch file for Slurm: trains a run on several nodes, and again in the queue until it is finished."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unfog.config.values import sanitize
from unfog.errors import RequestError

LEAD = 300
"""Seconds before the limit at which a run saves and ends; Slurm may be a minute early."""
CORES = 8
"""Of a GPU, or of a node without one, unless told otherwise."""
RESTARTS = 3
"""Times that torchrun starts all processes anew within one job."""

_TIME = re.compile(r"(?:(?P<days>\d{1,4})-)?(?P<rest>\d{1,6}(?::\d{1,2}){0,2})")
_WORD = re.compile(r"[\w.,:/@#+=-]*")

SCRIPT = """\
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

export OMP_NUM_THREADS={threads}
export SRUN_CPUS_PER_TASK={cores}  # as srun does not take it from sbatch
export UNFOG_CACHE="${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}/unfog-$(id -un)"  # decoded images, on each node's own disk
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# On each node torchrun, which leaves USR1 to the processes that it starts: these save and end.
srun --kill-on-bad-exit=1 {container}bash -c 'trap "" USR1; exec "$@"' unfog \\
    {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node {processes} --max-restarts {restarts} \\
    --rdzv-backend c10d --rdzv-endpoint "$head:$((10000 + SLURM_JOB_ID % 20000))" \\
    --rdzv-id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" -m unfog "${{words[@]}}" &
job=$!
until wait "$job"; status=$?; ! kill -0 "$job" 2>/dev/null; do :; done  # a trap ends `wait`, not the job
if [ -n "$again" ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""

ONCE = """\
# A job that comes back goes on with its run.
if [ -f "$run/config.toml" ]; then words=(resume "$run"); else words=({words}); fi"""


@dataclass(frozen=True)
class Job:
    """What Slurm is asked for. Names and meanings are sbatch's."""

    nodes: int = 1
    """Machines."""
    gpus_per_node: int = 1
    """GPUs of each, with a process for each of them. 0: one process a node, on its CPU."""
    cpus_per_task: int = 0
    """CPU cores of each node. 0: 8 for each GPU."""
    time: str = "24:00:00"
    """Limit of one job: minutes, hours:minutes:seconds or days-hours:minutes:seconds; the run may take many jobs."""
    partition: str = ""
    """Where in the cluster. Left open: the cluster's default."""
    account: str = ""
    """Who pays. Left open: yours."""
    container: str = ""
    """Image to run in: an Apptainer file (.sif), or any other, by pyxis. Left open: this Python environment."""

    def __post_init__(self) -> None:
        for name, least, most in (("nodes", 1, 10_000), ("gpus_per_node", 0, 64), ("cpus_per_task", 0, 4096)):
            if not least <= (value := getattr(self, name)) <= most:
                raise RequestError(f"{name} = {value} must be from {least} to {most}")
        if self.seconds < 120:
            raise RequestError(f"time = {sanitize(self.time)} is too short to start in; give at least 2 minutes")
        for name in ("partition", "account", "container"):
            if not _WORD.fullmatch(value := getattr(self, name)):
                raise RequestError(f"{name} = {sanitize(value)} has characters that Slurm takes no name with")

    @property
    def seconds(self) -> int:
        """The limit. RequestError if it is none."""
        match = _TIME.fullmatch(self.time)
        if not match:
            raise RequestError(f"time = {sanitize(self.time)} is no time for Slurm; write 90, 12:00:00 or 2-00:00:00")
        parts = [int(part) for part in match["rest"].split(":")]
        if match["days"] or len(parts) == 3:  # hours come first, and else minutes
            hours, minutes, seconds = (*parts, 0, 0)[:3]
            return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        return 60 * parts[0] + sum(parts[1:])

    @property
    def cores(self) -> int:
        """CPU cores of each node."""
        return self.cpus_per_task or CORES * max(1, self.gpus_per_node)

    def script(self, request: Sequence[str], run: Path, words: Sequence[str], source: str) -> str:
        """The batch file.

        Args:
            request: the words that asked for it, noted at its top.
            run: folder of the run, on a disk that all nodes share.
            words: the command that begins: `train …` with its --out, or `resume …`.
            source: where the images are.
        """
        command = shlex.join(words)
        processes = max(1, self.gpus_per_node)
        options = {"partition": self.partition, "account": self.account}
        return SCRIPT.format(
            request=" ".join(shlex.join(["unfog", "slurm", *request]).split()),
            name=re.sub(r"[^\w.-]", "-", run.resolve().name),
            nodes=self.nodes,
            gpus=f"--gpus-per-node={self.gpus_per_node} " if self.gpus_per_node else "",
            cores=self.cores,
            time=self.time,
            lead=min(LEAD, self.seconds // 4),
            options="".join(f"#SBATCH --{name}={value}\n" for name, value in options.items() if value),
            here=shlex.quote(str(Path.cwd())),
            run=shlex.quote(str(run)),
            # The settings of a resume are the run's own from then on, and may be said again.
            words=ONCE.format(words=command) if words[0] == "train" else f"words=({command})",
            threads=max(1, self.cores // processes),
            container=_contained(self.container, [Path.cwd(), run.absolute(), Path(source).absolute()]),
            python="python" if self.container else shlex.quote(sys.executable),
            processes=processes,
            restarts=RESTARTS,
        )


def _contained(image: str, places: Sequence[Path]) -> str:
    """Words that have srun run in a container, in which the folders that hold these places are where they are here."""
    if not image:
        return ""
    folders = {next(one for one in (place, *place.parents) if one.is_dir()) for place in places}
    outer = sorted(str(one) for one in folders if folders.isdisjoint(one.parents))
    if image.endswith(".sif"):
        return f'apptainer exec --nv --pwd "$PWD" --bind {shlex.quote(",".join(outer))} {image} '
    mounts = shlex.quote(",".join(f"{one}:{one}" for one in outer))
    return f'--container-image={image} --container-mounts={mounts} --container-workdir="$PWD" '
