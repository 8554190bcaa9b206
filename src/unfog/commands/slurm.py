"""`unfog slurm`: write a batch file that trains a run on several nodes, and requeues itself until it is finished."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from unfog.config.requests.slurm import SlurmRequest
from unfog.config.spec_strings import quote
from unfog.config.validate import reason_of
from unfog.errors import RequestError
from unfog.files.safe_files import open_file
from unfog.process.child import hide_secrets
from unfog.process.slurm_job import batch_script, missing_folders
from unfog.reporting.progress import print_result, say
from unfog.text import is_address, sanitize, without_secrets


def main(request: SlurmRequest) -> int:
    """Write the batch file, print its path, and return the exit status."""
    file = request.file or Path(f"{request.run.resolve().name}.sbatch")
    script = batch_script(request).encode()  # before the file is made, so that an error leaves no empty one
    try:
        with open_file(file, "xb", file.parent) as batch:  # a batch file that is there may have been edited
            os.chmod(batch.fileno(), 0o600)
            batch.write(script)
    except FileExistsError:
        raise RequestError(f"{quote(str(file))[1:-1]} exists; give another --file, or remove it") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{quote(str(file))} cannot be written: {reason_of(error)}; give another --file") from None
    shared = "it" if is_address(request.source) else "it and the images"
    say(f"  run       {request.run} ({shared} must be on a disk that all nodes share)")
    for folder in missing_folders(request):
        where = "in the container" if request.container else "on each node"
        say(f"  first     mount {sanitize(folder)} {where} (this machine does not have it, or may not look)")
    for name, word in hide_secrets(request.command)[1].items():
        say(f"  first     export {name}={shlex.quote(without_secrets(word))} with its credentials: the file has none")
    say(f"  next      check the file, then: sbatch {shlex.quote(str(file))}")
    print_result(str(file))
    return 0
