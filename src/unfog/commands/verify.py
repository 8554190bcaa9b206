"""`unfog resume RUN --verify`: train the newest part of a run again, and check that it comes out the same."""

from __future__ import annotations

from unfog.errors import RequestError, RunError
from unfog.pipeline.load_data import load_images
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.runs.replay import find_replayable, replay_newest
from unfog.text import sanitize


def verify(folder: RunFolder) -> str:
    """Train again from the checkpoint before the newest, and compare with the newest bit by bit. Changes nothing.

    Returns:
        A line about what was compared.

    Raises:
        RequestError: there is nothing to replay, settings were changed on the way, or another process is training.
        RunError: it came out differently.
        Interrupted: a signal came.
    """
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
