"""Fields of settings dataclasses: default, short flag, bounds, and the rules of a resume, all at the field.

To add a setting, add one field:

    lr: float = setting(0.0, short="lr", at_least=0, usual="1e-4 to 6e-3", resume="free")

A setting that may be chosen automatically names the value that means this, as config.toml and the digests hold it:
`auto=0`. `is_auto(settings, "lr")` is the question, and the word "auto" gives that value on the command line, in TOML
and from Python.

`config.schema` collects the short flags, `config.resume_rules` the rules of a resume. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from unfog.errors import RequestError

T = TypeVar("T")

# The word for a setting that is chosen automatically.
AUTO: Literal["auto"] = "auto"

# `Rules.auto` of a setting that cannot be chosen automatically. Not None, which is the value of some that can.
NO_AUTO: Any = object()

# Rule of a change on resume: allowed, allowed with --force as it makes another run, or refused.
_Resume = Literal["free", "force", "fixed"]

# What a setting changes, and so the digests that it enters (`config.resume_rules.settings_digests`). loss: the training
# loss. steps: the steps, but not the usual loss. objective: the meaning of all losses. held_out_loss: the meaning of
# the held-out loss alone. samples: metrics of samples. nothing: none of them.
Affects = Literal["loss", "steps", "objective", "held_out_loss", "samples", "nothing"]


@dataclass(frozen=True)
class Rules:
    """Metadata of a setting. A section's rules hold for its fields, unless these have their own."""

    short: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    usual: str = ""
    auto: Any = NO_AUTO
    """Value that means "chosen automatically"."""
    resume: _Resume | None = None
    affects: Affects | None = None
    added_later: bool = False
    """Not in digests while it has its default, as checkpoints exist that were made before there was this setting."""
    common: bool = False
    """Listed by `unfog train --help`. The others are listed by `--help-all`."""
    why: str = ""
    """Reason of the default, for `unfog explain`."""
    measured: str = ""
    """Effect in our measurements."""
    see: str = ""
    """File with the measurements, or with more about the setting."""
    paper: str = ""
    """Publication that the setting comes from."""
    choices: tuple[tuple[str, str], ...] = ()
    """What each choice is, of choices without settings: ("ddim", "first order, one call a step")."""
    flag: str = ""
    """Name of the flag if it is not the name of the field, such as `for`, a keyword of Python."""
    metavar: str = ""
    """Placeholder of the value in help texts, such as PATH. Default: chosen by the type."""
    positional: bool = False
    """A word without a flag, such as SOURCE."""
    hidden: bool = False
    """Without a flag and a help text, because a program fills it in."""

    def inside(self, section: Rules) -> Rules:
        """Return these rules, with what is open taken from the section around."""
        return replace(
            self,
            resume=self.resume or section.resume,
            affects=self.affects or section.affects,
            added_later=self.added_later or section.added_later,
        )

    def check(self, name: str, value: Any) -> None:
        """Raise RequestError if a number, or one of a tuple of numbers, is out of bounds."""
        for one in value if isinstance(value, tuple) else (value,):
            low = (self.at_least is None or one >= self.at_least) and (self.above is None or one > self.above)
            high = (self.at_most is None or one <= self.at_most) and (self.below is None or one < self.below)
            if not (low and high):
                usual = f"; {self.usual} is usual" if self.usual else ""
                raise RequestError(f"{name} = {value} must be {self.bounds()}{usual}")

    def bounds(self) -> str:
        """Describe the bounds: "from 0 to 1", "at least 1"; "" without any."""
        low = f"at least {_plain(self.at_least)}" if self.above is None else f"above {_plain(self.above)}"
        high = f"at most {_plain(self.at_most)}" if self.below is None else f"below {_plain(self.below)}"
        if self.at_least is not None and self.at_most is not None:
            return f"from {_plain(self.at_least)} to {_plain(self.at_most)}"
        bounds = [low] * (self.at_least is not None or self.above is not None)
        return " and ".join(bounds + [high] * (self.at_most is not None or self.below is not None))


def setting(default: T, **rules: Any) -> T:
    """Return a dataclass field with a default and `Rules`."""
    return field(default=default, metadata={"rules": Rules(**rules)})


def argument(metavar: str) -> dict[str, Rules]:
    """Return the metadata of a word without a flag: `run: Path = field(metadata=argument("RUN"))`.

    Not a field, as mypy would then take a word without a default for one with a default.
    """
    return {"rules": Rules(positional=True, metavar=metavar)}


def rules_of(f: Any) -> Rules:
    """Return the rules of a dataclass field."""
    rules: Rules = f.metadata.get("rules", _NO_RULES)
    return rules


def auto_value(settings: Any, name: str) -> Any:
    """Return the value of a field that means "chosen automatically". TypeError if the field has none."""
    value = rules_of(settings.__dataclass_fields__[name]).auto
    if value is NO_AUTO:
        raise TypeError(
            f"{type(settings).__name__}.{name} cannot be chosen automatically; declare its field with auto="
        )
    return value


def is_auto(settings: Any, *names: str) -> bool:
    """Return whether any of these fields is to be chosen automatically. TypeError if one cannot be."""
    return any(bool(getattr(settings, name) == auto_value(settings, name)) for name in names)


def check_bounds(settings: Any) -> None:
    """Raise RequestError if a field of a settings dataclass is out of its bounds."""
    for f in fields(settings):
        rules_of(f).check(f.name, getattr(settings, f.name))


_NO_RULES = Rules()


def _plain(number: float | None) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
