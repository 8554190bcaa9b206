"""`unfog resume`."""

from __future__ import annotations

from unfog.commands.train import report_end
from unfog.config.requests import ResumeRequest
from unfog.config.resume_rules import check_changes
from unfog.process.run_folder import RunFolder


def resume(request: ResumeRequest) -> tuple[RunFolder, bool]:
    """Continue a run. Return its folder, and False if a signal stopped it; then it is saved.

    Raises:
        RequestError: a setting cannot change, or the images are not those of the run.
        RunError: no checkpoint is whole, or training could not continue.
    """
    folder = RunFolder(request.run)
    check_changes(folder.read_config(), request.settings, request.force)  # before torch is imported
    from unfog.runs.resume import resume as continue_run

    return continue_run(folder, request.settings, request.force)


def main(request: ResumeRequest) -> int:
    """Continue the run or verify it, print the result, and return the exit status."""
    if not request.verify:
        return report_end(*resume(request))
    from unfog.commands.verify import verify
    from unfog.reporting.progress import say

    say(verify(RunFolder(request.run)))
    return 0
