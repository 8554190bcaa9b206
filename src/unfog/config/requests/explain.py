"""Requests of `unfog explain`, the name of a setting, and of `unfog docs`, the pages in the browser."""

from __future__ import annotations

from dataclasses import dataclass, field

from unfog.errors import RequestError
from unfog.settings import argument


@dataclass(frozen=True)
class ExplainRequest:
    """Explain a setting: what it does, its default and why, its bounds, whether a resume can change it, and more.

      unfog explain               all sections and settings
      unfog explain optimizer     the settings of a section
      unfog explain lr            a setting
      unfog explain min-snr       a kind that a setting can have

    Measured effects and publications are named if there are any.
    """

    setting: str = field(default="", metadata=argument("SETTING"))
    """Name of a setting, a section or a kind. Default: list all."""


@dataclass(frozen=True)
class DocsRequest:
    """Show the documentation of this version in the browser.

      unfog docs               the first page
      unfog docs conditions    a page

    It is served on this machine alone and needs no network. Ctrl-C ends it.
    """

    page: str = field(default="", metadata=argument("PAGE"))
    """Page to open, such as sampling or reference/settings."""
    port: int = 0
    """Port of the server on this machine. 0: any that is free."""
    browser: bool = True
    """Open the page in the browser. The address is printed in any case."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError(f"port = {self.port} must be from 0 to 65535")
