"""Find the run folder that a command names."""

from __future__ import annotations

import difflib
from pathlib import Path

from unfog.config.paths import reason_of
from unfog.config.values import sanitize
from unfog.errors import RequestError
from unfog.process.run_folder import RunFolder


def open_run(path: Path) -> RunFolder:
    """Return the run folder at `path`. Raise RequestError with the most similar name of a run if there is none."""
    folder = RunFolder(path)
    try:
        folder.check_is_run()
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be entered
        raise RequestError(
            f"{sanitize(str(path))} cannot be read: {reason_of(error)}; give the folder of a run"
        ) from None
    except RequestError as error:
        raise RequestError(
            f"{sanitize(str(path))[1:-1]} is not a run{_near(path) or ': it has no config.toml'}"
        ) from error
    return folder


def _near(path: Path) -> str:
    try:
        places = [path.parent, Path("runs")]
        runs = [str(run.parent) for place in places if place.is_dir() for run in place.glob("*/config.toml")]
    except (OSError, ValueError):
        return ""
    by_name = {Path(run).name: run for run in runs}
    close = difflib.get_close_matches(path.name, by_name, n=1)
    return f"; did you mean {by_name[close[0]]}?" if close else ""
