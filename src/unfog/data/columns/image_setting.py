"""Images in `data.condition`: "degrade:factor=4", "grey", "hole", and NAME=SOURCE or NAME=SOURCE:mask."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from unfog.errors import RequestError
from unfog.values.columns import name_problem
from unfog.values.kinds.image_kinds import MADE

SECOND_KINDS = ("image", "mask")
"""Kinds of the images of a second source."""
_FACTOR = re.compile(r"degrade(?::factor=([0-9]{1,4}))?")
_LARGEST_FACTOR = 64


@dataclass(frozen=True)
class ImageConditions:
    """Conditions of a run that are images."""

    made: dict[str, int] = field(default_factory=dict)
    """Those made of the image: kind -> factor of "degrade", or 0."""
    second: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Those of a second source: name -> (text of the source, kind, "" to find it)."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, first of those made of the image."""
        return (*self.made, *self.second)


def split_images(condition: str) -> tuple[ImageConditions, str]:
    """Return the images that `data.condition` names, and the rest of the text.

    RequestError if one is named twice, has a wrong name, or a wrong factor.
    """
    found, rest = ImageConditions(), list[str]()
    for word in condition.split(",") if condition else ():
        text = word.strip()
        name, equals, source = text.partition("=")
        if text.startswith("degrade:") and not _FACTOR.fullmatch(text):
            raise RequestError(f"condition = {text!r}: give degrade:factor=4, with the factor that you want")
        if (match := _FACTOR.fullmatch(text)) or text in MADE:
            name = "degrade" if match else text
            _check_new(name, found)
            found.made[name] = _factor(match[1] or "4") if match else 0
        elif equals and not re.search(r"[/\\:.]", name):  # a path may have a "=" too
            _check_new(name.strip(), found)
            found.second[name.strip()] = _source_and_kind(name.strip(), source.strip())
        else:
            rest.append(word)
    return found, ",".join(rest)


def _check_new(name: str, found: ImageConditions) -> None:
    if name in found.names:
        raise RequestError(f"condition names {name!r} twice; name it once")
    if problem := name_problem(name, "mask"):
        raise RequestError(f"condition = {name[:60]!r}=SOURCE: {problem}")


def _factor(text: str) -> int:
    if not 2 <= (factor := int(text)) <= _LARGEST_FACTOR:
        raise RequestError(f"degrade:factor={text}: the factor is 2 to {_LARGEST_FACTOR}")
    return factor


def _source_and_kind(name: str, text: str) -> tuple[str, str]:
    if name in MADE:
        raise RequestError(f"condition = {name}=SOURCE: {name!r} is made of the image; give the source another name")
    source, colon, kind = text.rpartition(":")
    if not colon or kind not in SECOND_KINDS:
        source, kind = text, ""
    if not source or source in SECOND_KINDS:
        raise RequestError(f"condition = {name}={text} has no source; give {name}=FOLDER or {name}=FOLDER:mask")
    if source.startswith("python:"):
        raise RequestError(f"condition = {name}={text}: a source in Python cannot be a condition; save it as files")
    return source, kind


def check_conditions_of_images(condition: str, settings: dict[str, object]) -> None:
    """Raise RequestError if the images in `data.condition` do not suit other settings of the data.

    `settings` has `unknown` and `channels`; 0 channels are not known yet.
    """
    images, _ = split_images(condition)
    if images.made and settings["unknown"] != "none":
        raise RequestError(
            f"condition = {', '.join(images.made)} is made of whole images, and data.unknown = {settings['unknown']} "
            "says that pixels are unknown; omit one of them"
        )
    if "grey" in images.made and settings["channels"] not in (0, 3):
        raise RequestError(
            f"condition = grey is the brightness of images in colour, and data.channels = {settings['channels']}; "
            "omit it"
        )
