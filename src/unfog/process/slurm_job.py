"""Batch file of a Slurm job that trains a run on several nodes, and requeues itself until the run is finished."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import combinations, islice, pairwise
from pathlib import Path

from unfog.config.requests.slurm import SlurmRequest
from unfog.custom.consent import TRUST, given_paths
from unfog.process.child import hide_secrets
from unfog.text import without_secrets

_SAVE_SECONDS = 300  # before the limit, a run saves and ends; Slurm may be a minute early
_RESTARTS = 3  # times that torchrun starts all processes anew within one job
_MOST_BORDERS = 64  # of a word that are looked at

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


def missing_folders(request: SlurmRequest) -> list[str]:
    """Return the outermost folders of paths of the command that cannot be seen here, such as mounts of nodes.

    A path whose parent is here, such as that of a new mirror, names none, unless the parent is the root.
    """
    found = set()
    for path in _named_paths(request):
        missing = [one for one in (path, *path.parents) if not os.path.exists(one)]
        if missing and (len(missing) > 1 or path.parent == Path("/")):
            found.add(str(missing[-1]))
    return sorted(found)


def _named_paths(request: SlurmRequest) -> Iterator[Path]:
    """Yield the paths that the source and the command name: those that exist, and absolute ones that may be made."""
    for word in (request.source, *request.command):
        text = word.replace("file://", "")
        borders = [-1, *(match.start() for match in islice(re.finditer("[=:,]", text), _MOST_BORDERS)), len(text)]
        found = [place for start, end in combinations(borders, 2) for place in _places(text[start + 1 : end])]
        yield from found
        if "://" in text:  # an address: what follows a "=" in it may be secret, and is not a path
            continue
        for start, end in pairwise(borders):
            part = os.path.expanduser(text[start + 1 : end])
            # A name with such a border in it exists as a whole.
            if part.startswith("/") and part[1:2] != "/" and not any(str(one).startswith(part) for one in found):
                yield Path(os.path.abspath(re.split(r"[^/]*[*?{\[]", part, maxsplit=1)[0]))


def _places(text: str) -> set[Path]:
    """Return the existing file or folder that a part of a word names, as in NAME=PATH:KIND, and where it leads.

    A pattern of shards names its folder. A part without a path, such as the URL of images, names nothing.
    """
    part = os.path.expanduser(text)
    if not part or part.startswith("//"):  # // begins the host of a URL
        return set()
    before, pattern, _ = re.split(r"([*?{\[]|$)", part, maxsplit=1)
    # A file may have such characters in its name.
    place = os.path.dirname(before) if pattern and not os.path.exists(part) else part
    return {Path(os.path.abspath(place)), Path(place).resolve()} if place and os.path.exists(place) else set()


def _container_prefix(request: SlurmRequest) -> str:
    """Return the words that make srun run in a container, with the folders of the job mounted at the same paths."""
    if not (image := request.container):
        return ""
    places = [Path.cwd(), request.run.absolute(), *_named_paths(request)]
    folders = {next(one for one in (place, *place.parents) if os.path.isdir(one)) for place in places} - {Path("/")}
    # Only the outermost: a folder inside another is there already.
    outer = sorted(str(one) for one in folders if folders.isdisjoint(one.parents))
    if image.endswith(".sif"):
        return f'apptainer exec --nv --pwd "$PWD" --bind {shlex.quote(",".join(outer))} {image} '
    mounts = shlex.quote(",".join(f"{one}:{one}" for one in outer))
    return f'--container-image={image} --container-mounts={mounts} --container-workdir="$PWD" '
