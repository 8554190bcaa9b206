"""`unfog slurm`: a batch file for a command that is checked as if it were given."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from unfog.cli.parsed_requests import HELP_FLAGS, given_to, resuming_asked_for, training_asked_for
from unfog.cli.requests import Slurm
from unfog.config.paths import reason_of
from unfog.config.toml import update
from unfog.config.values import sanitize
from unfog.errors import RequestError
from unfog.process.run_folder import next_folder
from unfog.reporting.progress import print_result, say


def slurm(words: Sequence[str]) -> int:
    """`unfog slurm`."""
    if "--" not in words and {"train", "resume"} & set(words) and not set(HELP_FLAGS) & set(words):
        raise no_command("and there is no --")
    at = words.index("--") if "--" in words else len(words)
    given = given_to("slurm", words[:at], Slurm())
    job = update(Slurm(), given.table, "")
    run, source, command = to_repeat(words[at + 1 :])
    file = job.file or Path(f"{run.resolve().name}.sbatch")
    script = job.script(words, run, command, source)
    try:
        with file.open("x") as batch:
            batch.write(script)
    except FileExistsError:
        raise RequestError(f"{sanitize(str(file))[1:-1]} is there already; give another --file, or remove it") from None
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{sanitize(str(file))} cannot be written: {reason_of(error)}; give another --file"
        ) from None
    say(f"  run       {run}, which must be on a disk that all nodes share, as the images must")
    say(f"  next      look at the file, then: sbatch {shlex.quote(str(file))}")
    print_result(str(file))
    return 0


def to_repeat(command: Sequence[str]) -> tuple[Path, str, list[str]]:
    """The run and the images that a command names, and its words such that they name the same run each time.

    RequestError if they will not do.
    """
    name, words = next(iter(command), ""), list(command[1:])
    if name == "train":
        config, out = training_asked_for(words)
        run = out or next_folder(config.source)
        return run, config.source, ["train", *([] if out else ["--out", str(run)]), *words]
    if name == "resume":
        folder, config, given = resuming_asked_for(words)
        if given.table.get("verify"):
            raise RequestError("--verify trains nothing that would be worth a place in the queue; run it here")
        if config.training.budget and "budget" in given.table["settings"]["training"]:
            raise RequestError("a --budget would begin anew with each job; give --steps or --images")
        return folder.path, config.source, ["resume", *words]
    raise no_command(f"not {sanitize(name)}" if name else "and there is none")


def no_command(what: str) -> RequestError:
    """What to say where no command of ours stands where it has to."""
    return RequestError(f"train or resume has to follow --, {what}; write unfog slurm --nodes 2 -- train SOURCE")
