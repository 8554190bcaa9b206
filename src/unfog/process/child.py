"""Python processes that Unfog starts: no current folder on their import path, no credentials in their words."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from unfog.errors import RequestError
from unfog.text import without_secrets

_NAME = "UNFOG_URL_"
_HIDDEN = re.compile(rf"@({_NAME}[0-9]{{1,4}})")


def python_command(module: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs a module with this Python.

    `python -m` puts the current folder first on the import path, and that may be a stranger's: -P leaves it out.
    """
    return sys.executable, "-P", "-m", module, *words


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of this process with these variables, for a process whose own children need no -P."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **more}


def hide_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return words with `@UNFOG_URL_1` in place of one with credentials, and the environment variables with these.

    Every user of a machine can list the words of all processes, and only their owner the environment.
    """
    secret = dict.fromkeys(word for word in words if without_secrets(word) != word)
    names = {word: f"{_NAME}{number}" for number, word in enumerate(secret, 1)}
    shown = [f"@{names[word]}" if word in names else word for word in words]
    return shown, {name: word for word, name in names.items()}


def reveal_secrets(words: Sequence[str]) -> list[str]:
    """Return the words from those of `hide_secrets`, and remove the variables from the environment.

    RequestError if a variable is not set.
    """
    found = [_HIDDEN.fullmatch(word) for word in words]
    names = {match[1] for match in found if match}
    if missing := names - os.environ.keys():
        raise RequestError(f"@{min(missing)} stands for an environment variable of that name, which is not set; set it")
    revealed = [os.environ[match[1]] if match else word for word, match in zip(words, found)]
    for name in names:
        del os.environ[name]  # children of this process need no credentials
    return revealed
