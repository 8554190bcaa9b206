"""One dataclass for each other command: report, runs, watch, serve, cache, export and slurm."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unfog.config.run_requests import check_one_checkpoint
from unfog.config.values import quote
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.settings import argument, setting


@dataclass(frozen=True)
class ReportRequest:
    """Write report.html of RUN: one file with settings, curves and samples that opens anywhere."""

    run: Path = field(metadata=argument("RUN"))
    """Folder of the run."""


@dataclass(frozen=True)
class CacheRequest:
    """List what the cache folder holds, or make room in it. UNFOG_CACHE names the folder.

    UNFOG_CACHE_LIMIT limits it, in GB (default 50). When it is full, the least recently used entries go first. No
    command removes an entry that a process uses.

    Keep the 20 GB that were used last: unfog cache --limit 20
    """

    clear: bool = False
    """Remove all entries that are not in use, also Hugging Face sets; images from Python only if no run has them."""
    limit: float | None = None
    """Remove the least recently used entries until at most so many GB are left."""

    def __post_init__(self) -> None:
        # `not`, rather than below 0: a NaN, of which no comparison is true, is refused too.
        if self.limit is not None and not self.limit >= 0:
            raise RequestError(f"limit = {self.limit} must be at least 0 GB")
        if self.clear and self.limit is not None:
            raise RequestError(f"--clear removes everything, so it cannot be combined with --limit {self.limit:g}")


@dataclass(frozen=True)
class RunsRequest:
    """List the runs in FOLDER, and in the folders in it: state, step, best metric, disk space and age.

    Age is the time since the run last wrote. Checkpoints that were set aside as broken are listed below their run.
    """

    folder: Path = field(default=Path("runs"), metadata=argument("FOLDER"))
    """Folder that holds runs, or one run."""
    json: bool = False
    """Print JSON instead of a table."""
    remove_broken: bool = False
    """Delete the checkpoints that were set aside as broken. They are never read again."""
    finished: bool = False
    """Exit with status 3 unless all of them are finished, for job managers. torchrun ends a saved stop with 0."""


@dataclass(frozen=True)
class WatchRequest:
    """Show RUN in the terminal while it trains: state, time left, and charts. q or Ctrl-C ends it, and not the run.

    The charts are text, so they work over ssh. Where there is no terminal, one frame is printed.
    """

    run: Path = field(metadata=argument("RUN"))
    """Folder of the run."""
    once: bool = False
    """Print one frame and exit."""
    interval: float = 2.0
    """Seconds between two refreshes."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 3600:
            raise RequestError(f"interval = {self.interval:g} must be from 0.1 to 3600 seconds")


@dataclass(frozen=True)
class ServeRequest:
    """Show the runs in RUNS on a page in the browser: live curves, samples, and buttons to stop, resume and start runs.

      unfog serve                          the runs in runs/
      unfog serve runs --source photos/    also to start runs on photos/

    The address that it prints holds a secret: whoever has it can do on the page what you can. Only this machine is
    served. From another one, forward the port: ssh -L 8642:127.0.0.1:8642 MACHINE
    """

    runs: Path = field(default=Path("runs"), metadata=argument("RUNS"))
    """Folder that holds runs, or one run."""
    port: int = 8642
    """Port of the page. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Another than this machine's own makes the page reachable from outside, unencrypted."""
    source: tuple[str, ...] = setting((), metavar="SOURCE …")
    """Images that runs may be started on, beside the built-in ones and those of the runs."""
    browser: bool = True
    """Open the page in the browser."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError(f"port = {self.port} must be from 0 to 65535")


_ExportFormat = Literal["diffusers", "safetensors", "onnx", "pt2"]


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `unfog export` and of `Run.export`."""

    format: _ExportFormat = "safetensors"
    """diffusers: a pipeline folder; safetensors: weights, JSON and the network in plain torch; onnx, pt2: its graph."""
    sampler: Kind | None = None
    """Sampler whose noise levels are stored. Default: the run's."""
    steps: int | None = None
    """Sampling steps. Default: the run's."""
    license: str = ""
    """Licence in the model card, by the Hub's identifier, such as cc-by-4.0. Default: left open."""
    push_to_hub: str = ""
    """Also upload OUT to this repository of the Hugging Face Hub, NAME or OWNER/NAME, which is private."""
    public: bool = False
    """With --push-to-hub: the repository may be public; a new one becomes public."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,62}|", self.license):
            raise RequestError(
                f"license = {quote(self.license)} is no identifier of the Hub, such as mit, cc-by-4.0 or other"
            )
        if self.public and not self.push_to_hub:
            raise RequestError("public needs a repository: give --push-to-hub NAME, or omit it")


@dataclass(frozen=True)
class ExportRequest(ExportSettings):
    """Write the network of RUN into a new folder OUT, for programs that do not know Unfog.

      unfog export runs/photos photos-diffusers --format diffusers
      unfog export runs/photos photos-onnx --format onnx --steps 10
      unfog export runs/photos photos-hub --format diffusers --push-to-hub me/photos

    The folder is loaded again and compared with the run. Its README.md shows how to load it.
    """

    run: Path = field(kw_only=True, metadata=argument("RUN"))
    """Folder of the run."""
    out: Path = field(kw_only=True, metadata=argument("OUT"))
    """New folder, written as a whole or not at all."""
    weights: Literal["ema", "raw"] = "ema"
    """EMA weights, or the raw weights of the last step."""
    ema: float | None = None
    """Width of an EMA to rebuild from snapshots, such as 0.07, at any --checkpoint. Default: the run's EMA."""
    checkpoint: int | None = None
    """Step of the checkpoint. Default: the newest whole one."""
    best: bool = False
    """Use the best checkpoint that was kept, by held-out loss or the run's evaluate.best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_checkpoint(self.best, self.checkpoint)


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
    cpus_per_task: int = 0
    """CPU cores of each node. 0: 8 for each GPU."""
    time: str = "24:00:00"
    """Time limit of one job: minutes, hours:minutes:seconds or days-hours:minutes:seconds. A run may take many jobs."""
    partition: str = ""
    """Partition of the cluster. Default: the cluster's."""
    account: str = ""
    """Account to charge. Default: yours."""
    container: str = ""
    """Image to run in: an Apptainer file (.sif), or any other with pyxis. Default: this Python environment."""
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
        return self.cpus_per_task or _CORES_PER_GPU * max(1, self.gpus_per_node)
