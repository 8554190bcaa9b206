"""Request of `unfog slurm`: nodes, time limit and container of the jobs, and the command that they run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from unfog.config.spec_strings import quote
from unfog.errors import RequestError
from unfog.settings import is_auto, setting

_CORES_PER_GPU = 8
_TIME = re.compile(r"(?:(?P<days>\d{1,4})-)?(?P<rest>\d{1,6}(?::\d{1,2}){0,2})")
_NAME = re.compile(r"[\w.,:/@#+=-]*")


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

    The folders of the run, of the images and of all paths in the command are mounted. A folder that does not exist
    yet, such as a new mirror, is reached by its nearest parent that does. Paths that stand only in a --config file or
    in a resumed run are not mounted: add them to the batch file.
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
