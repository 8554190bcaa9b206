"""A TOML file of settings with the text of each as a comment, as `unfog init` writes it."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from typing import Any

from unfog.config.describe import Description, describe, field_texts
from unfog.config.schema import Config
from unfog.config.spec_strings import format_spec, registry_of
from unfog.config.toml import literal
from unfog.text import sanitize

_WIDTH = 100


def commented_toml(config: Config, given: Collection[str], command: str) -> str:
    """Return the TOML of the settings `given`, such as "data.size", with the other common ones as comments.

    `command` trains with the file.
    """
    lines = [f"# Train with: {sanitize(command)}"]
    lines += ["# `unfog explain NAME` says more about a setting; `unfog train --help-all` lists all.", ""]
    shown = [each for each in describe(Config) if each.rules.common or each.setting in given]
    section: tuple[str, ...] = ()
    # Settings without a section come first: a key below the header of one would belong to it.
    for each in sorted(shown, key=lambda each: each.path[:-1]):
        if each.path[:-1] != section:
            section = each.path[:-1]
            lines += [f"[{'.'.join(section)}]"]
        about = field_texts(each.owner)[each.field.name]
        lines += textwrap.wrap(about, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines += [f"{'' if each.setting in given else '# '}{each.path[-1]} = {_value(each, config)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _value(each: Description, config: Any) -> str:
    for name in each.path:
        config = getattr(config, name)
    return literal(format_spec(config) if registry_of(each.annotation) is not None else config)
