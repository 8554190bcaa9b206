"""From words to a frozen dataclass: tyro, short names, and parts that are named by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from unfog.config import kinds
from unfog.config.tree import SHORT
from unfog.errors import RequestError

T = TypeVar("T")

_registry = ConstructorRegistry()


@_registry.primitive_rule
def _part_by_kind(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read a schedule, target, network, … from one word such as `min-snr:gamma=3`."""
    words = kinds.words_of(info.type)
    if words is None:
        return None

    def read(arguments: list[str]) -> Any:
        try:
            return kinds.parse(words, arguments[0])
        except RequestError as error:
            raise ValueError(str(error)) from None  # what tyro expects, to say which flag it was

    classes = tuple({type(part) for part in words.values()})
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + "|".join(words) + "}[:…]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, classes),
        str_from_instance=lambda value: [kinds.spell(value)],
    )


def expand(words: Sequence[str]) -> list[str]:
    """Write short names out: `--lr 1e-4` becomes `--optimizer.lr 1e-4`."""
    result = []
    for word in words:
        flag, equals, value = word.partition("=")
        name = flag[2:] if flag.startswith("--") else ""
        if name.startswith("no-") and name[3:] in SHORT:
            section, _, field = SHORT[name[3:]].partition(".")
            flag = f"--{section}.no-{field}"
        elif name in SHORT:
            flag = f"--{SHORT[name]}"
        result.append(flag + equals + value)
    return result


def parse(kind: type[T], words: Sequence[str], prog: str, default: T) -> T:
    """An instance of `kind`, from `default` and the words. Prints help or a refusal, and exits 0 or 2, as asked."""
    with _registry:
        return tyro.cli(kind, prog=prog, args=list(words), default=default, config=(tyro.conf.AvoidSubcommands,))
