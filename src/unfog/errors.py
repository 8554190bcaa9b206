"""The two errors that a person may see. Both say what was given, which rule it breaks, and what to do."""


class UnfogError(Exception):
    """Base of every error raised on purpose; `exit_status` is what the command line ends with."""

    exit_status = 1


class RequestError(UnfogError):
    """What was asked for is wrong or impossible: a setting, a path, a combination. Found before any work is done."""

    exit_status = 2


class RunError(UnfogError):
    """A run that started could not go on."""


class LostProcess(RunError):
    """Another process of the run is gone, or does not answer."""


class Interrupted(KeyboardInterrupt):
    """A stop was requested, and what was at hand was left; raised in the main thread. The command line ends with 3."""
