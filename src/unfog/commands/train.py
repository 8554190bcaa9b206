"""`unfog train`, `train-autoencoder` and `resume`: train a run to its end, and print its folder and what to do next."""

from __future__ import annotations

import os
import shlex

from unfog.config.requests.train import ResumeRequest, TrainAutoencoderRequest, TrainRequest
from unfog.process.run_folder import RunFolder
from unfog.runs.start import resume_run, start_autoencoder, start_run


def main(request: TrainRequest | TrainAutoencoderRequest | ResumeRequest) -> int:
    """Train, or verify; print the run folder, or what was compared. Return the exit status."""
    if isinstance(request, TrainRequest):
        return _report_end(*start_run(request))
    if isinstance(request, TrainAutoencoderRequest):
        return _report_end(*start_autoencoder(request))
    if not request.verify:
        return _report_end(*resume_run(request))
    from unfog.reporting.progress import say
    from unfog.runs.replay import verify  # only now, as torch takes seconds

    say(verify(RunFolder(request.run)))
    return 0


def _report_end(folder: RunFolder, done: bool) -> int:
    """Print the run folder on stdout, and what to do next on stderr. Return the exit status."""
    from unfog.reporting.progress import print_result, say

    say(f"  previews  {folder.newest_preview}\n  report    {folder.path / 'report.html'}")
    command = folder.read_config().task.next_command if done else "resume"
    say(f"  next      unfog {command} {shlex.quote(str(folder.path))}")
    print_result(str(folder.path))
    # torchrun takes anything but 0 for a failure, and would start again what was to stop.
    return 0 if done or "TORCHELASTIC_RUN_ID" in os.environ else 3
