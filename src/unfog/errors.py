"""Exceptions of Unfog, whose messages give the value, the rule that it breaks, and the remedy."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit


class UnfogError(Exception):
    """Base class; `exit_status` is the exit status of the command line."""

    exit_status = 1


class RequestError(UnfogError):
    """A request that cannot be met: a wrong setting, path or combination. Raised before any work is done."""

    exit_status = 2


class RunError(UnfogError):
    """A run that had started failed."""


class LostProcess(RunError):
    """Another rank of the run ended or does not answer."""


class Interrupted(KeyboardInterrupt):
    """A stop was requested, and the current work was left undone. Raised in the main thread."""

    exit_status = 3


class NothingSaved(Interrupted):
    """A stop was requested before there was anything to save: the command has to be given again."""

    exit_status = 130


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this installation: from the package index, or from its checkout.

    Its double quotes are understood by every shell, those of Windows among them.
    """
    from urllib.request import url2pathname  # slow to import

    from unfog.text import quote_word  # not needed by `--help`

    try:
        origin = json.loads(distribution("unfog").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        # Neither installed nor in an index, such as a checkout on PYTHONPATH.
        checkout = Path(__file__).parents[2]
        origin = {"url": checkout.as_uri(), "dir_info": {"editable": True}} if checkout.name != "site-packages" else {}
    if "dir_info" not in origin:
        return f'pip install "unfog[{extra}]"'
    place = f"{url2pathname(urlsplit(origin['url']).path)}[{extra}]"
    return f"pip install {'-e ' if origin['dir_info'].get('editable') else ''}{quote_word(place)}"
