"""The kind of conditions that are captions. Imports no torch at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from unfog.errors import RequestError
from unfog.values.columns import Column
from unfog.values.condition_kinds import ColumnFacts, ConditionKind
from unfog.values.kinds.condition_words import SHOWN
from unfog.values.tokenizer import BYTES, MOST_CHARACTERS, MOST_TOKENS, tokenizer_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

LONGEST_TEXT = 512
"""Most tokens of a caption that a run may have."""


class TextKind(ConditionKind):
    """A caption as its tokens, int [N, L]; -1 after its end, and all of them -1 where it is not known.

    [N, K, L] are up to K captions of each image, those that it has first.
    The categories of its facts are the merges of its `Tokenizer`, and the statistics the size of the vocabulary and L.
    """

    name = "text"
    field = "tokens"

    def check(self, facts: ColumnFacts) -> None:
        right = False
        with suppress(ValueError, OverflowError):
            vocabulary, length = map(int, facts.statistics)
            whole = all(each == int(each) for each in facts.statistics) and 1 <= length <= LONGEST_TEXT
            right = whole and vocabulary == tokenizer_of(facts.categories).vocabulary <= MOST_TOKENS
        if not right:
            raise RequestError(
                f"column {facts.name!r} of kind text needs the merges of its tokens, their number and 1 to "
                f"{LONGEST_TEXT} tokens a caption; start a new run, which finds them"
            )

    def facts(self, column: Column) -> ColumnFacts:
        sizes = tokenizer_of(column.categories).vocabulary, column.values.shape[-1]
        return ColumnFacts(column.name, column.kind, column.categories, tuple(map(float, sizes)))

    def inputs(self, facts: ColumnFacts) -> int:
        return 0  # a text has layers of its own

    def is_one_value(self, facts: ColumnFacts, text: str) -> bool:
        return True

    def summary(self, facts: ColumnFacts) -> str:
        digest = hashlib.sha256("\n".join(facts.categories).encode()).hexdigest()
        return f"{facts.statistics[0]:,.0f} tokens, {digest[:8]}"

    def width(self, facts: ColumnFacts) -> int:
        return int(facts.statistics[1])

    def pick(self, values: NDArray[Any], turn: NDArray[np.int64] | None) -> NDArray[Any]:
        import numpy as np

        if values.ndim == 2:
            return values
        if turn is None:
            return values[:, 0]
        count = (values[:, :, 0] >= 0).sum(1)
        return np.asarray(values[np.arange(len(values)), turn % np.maximum(count, 1)])

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        (tokens,) = columns
        return torch.from_numpy(np.asarray(tokens, np.int64))

    def evidence(self, facts: ColumnFacts) -> str:
        vocabulary, length = map(int, facts.statistics)
        return f"captions of up to {length} tokens, in {vocabulary - BYTES:,} words or parts of words, and bytes"

    def parse(self, facts: ColumnFacts, word: object) -> tuple[int, ...]:
        """Return the tokens of a prompt; "" is one that is not told. RequestError if it is too long, or no text."""
        if not isinstance(word, str):
            raise RequestError(f"{facts.name} = {word!r:.60} must be a text, such as 'a red heart'")
        tokenizer, length = tokenizer_of(facts.categories), self.width(facts)
        text = word.strip()
        tokens = tokenizer.encode(text)
        # The tokens of a longer text are not known, as its end is not read.
        is_read = len(text) <= MOST_CHARACTERS
        if len(tokens) > length or not is_read:
            size = f"{len(tokens):,} tokens" if is_read else f"{len(word):,} characters"
            fits = tokenizer.decode(tokens[:length])
            raise RequestError(
                f"a prompt of {size} is longer than the {length} tokens of this run; shorten it: what fits is "
                f"{fits[-60:]!r}"
            )
        return (*tokens, *[-1] * (length - len(tokens)))

    def usual(self, facts: ColumnFacts) -> tuple[tuple[int, ...], ...]:
        return ((-1,) * self.width(facts),)

    def show(self, facts: ColumnFacts, value: Sequence[int]) -> str:
        return tokenizer_of(facts.categories).decode(value)

    def concern(self, facts: ColumnFacts, value: Sequence[int]) -> str:
        words = self.rare_words(facts, self.show(facts, value))
        rare = "or not at all, in the captions that the run was trained on"
        return f"{', '.join(map(repr, words[:SHOWN]))}: seldom, {rare}; samples may not show it" * bool(words)

    def rare_words(self, facts: ColumnFacts, text: str) -> list[str]:
        """Return the words of a text that the training captions have at most once."""
        return tokenizer_of(facts.categories).split_words(text) if facts.categories else []
