"""Request of `unfog explain`: the name of a setting to explain."""

from __future__ import annotations

from dataclasses import dataclass, field

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
