"""HTML pages from templates: everything that is put in is escaped, and a name that a template lacks is an error."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import jinja2


def render_template(template: str, **values: Any) -> str:
    """The template of this name with these values, and `written`, when that was."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("unfog.reporting"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(written=now, **values)
