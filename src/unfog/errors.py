"""Exceptions of Unfog. Their messages give the value, the rule that it breaks, and the remedy."""


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
    """A stop was requested, and the current work was left undone. Raised in the main thread; exit status 3."""
