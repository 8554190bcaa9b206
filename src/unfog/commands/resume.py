"""`unfog resume`: continue a run, or with --verify train its newest part again and compare."""

from __future__ import annotations

from unfog.commands.train import report_end
from unfog.config.requests import ResumeRequest
from unfog.config.resume_rules import check_changes
from unfog.errors import RequestError, RunError
from unfog.process.run_folder import RunFolder
from unfog.text import sanitize


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


def verify(folder: RunFolder) -> str:
    """Train again from the checkpoint before the newest, and compare with the newest bit by bit. Changes nothing.

    Returns:
        A line about what was compared.

    Raises:
        RequestError: there is nothing to replay, settings were changed on the way, or another process is training.
        RunError: it came out differently.
        Interrupted: a signal came.
    """
    from unfog.pipeline.load_data import load_images
    from unfog.process.signals import StopSignals
    from unfog.runs.resume import find_replayable, replay_newest

    config = folder.read_config()
    with StopSignals(saves=False) as stop, folder.locked():
        first, last = find_replayable(folder, config)  # before the images are read, which may take long
        dataset, now = load_images(config, stop)
        if now.fingerprint != config.fingerprint:
            raise RequestError(
                f"the images in {sanitize(config.source)} are not those of this run, so it cannot be repeated"
            )
        different = replay_newest(folder, config, dataset, stop)
    what = f"steps {first.step:,} to {last.step:,} of {folder.path}, trained once more,"
    if different:
        raise RunError(
            f"{what} came out differently: {different[0]} and {len(different) - 1} other tensors. "
            f"They were made by {last.made_on}; another machine may round otherwise, the same one should not"
        )
    return f"{what} came out equal to the bit: weights, EMA and optimizer"


def main(request: ResumeRequest) -> int:
    """Continue the run or verify it, print the result, and return the exit status."""
    if not request.verify:
        return report_end(*resume(request))
    from unfog.reporting.progress import say

    say(verify(RunFolder(request.run)))
    return 0
