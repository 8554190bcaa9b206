"""Captions in an export: from a prompt to the tokens that the network takes, in plain Python.

In a file with `given_values`, whose `read` it adds the kind "text" to, and with the tokenizer.
"""

import warnings
from functools import lru_cache

from unfog.export.given_values import _READERS
from unfog.values.tokenizer import Tokenizer


@lru_cache(8)
def _tokenizer(merges):
    return Tokenizer(merges)


def _text(one, word):
    """Return the tokens of a prompt, and -1 after its end; all are -1 for None. ValueError if it is too long."""
    length = int(one["statistics"][1])
    if word is not None and not isinstance(word, str):
        raise ValueError(f"{one['name']} = {str(word)[:60]!r} is not a text, such as 'a red heart'")
    tokenizer = _tokenizer(tuple(one["categories"]))
    tokens = [] if word is None else tokenizer.encode(word)
    if len(tokens) > length:
        fits = tokenizer.decode(tokens[:length])[-60:]
        raise ValueError(f"a prompt of {len(tokens)} tokens is longer than {length}; what fits ends in {fits!r}")
    if words := tokenizer.split_words(word or "") if one["categories"] else []:
        said = f"{', '.join(map(repr, words[:9]))}: seldom, or not at all, in the captions of the training images"
        warnings.warn(said, stacklevel=4)
    return tokens + [-1] * (length - len(tokens))


_READERS["text"] = _text
