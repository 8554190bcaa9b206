"""`Tokenizer`: a byte-level BPE of captions, learned from them and rebuilt from its merges. Imports no torch."""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from unfog.text import valid_text

BYTES = 256
"""Tokens without a merge: token b is the byte b."""
MOST_TOKENS = 4096
"""Largest vocabulary."""
MOST_CHARACTERS = 4096
"""Characters of a text that are read; 64 words of the longest kind have 2,112."""
LEAST = 2
"""Times that a pair must occur in the captions to become a token: a word that occurs once is spelled in parts."""
_MOST_WORDS = 100_000  # whose tokens are remembered
# Words of letters and digits of any script, or one mark of ASCII, with the space before it. Long ones are cut.
_WORDS = re.compile(r" ?[^ !-/:-@\[-`{-~]{1,32}| ?[!-/:-@\[-`{-~]")
# Marks of direction and of byte order say nothing, and soft hyphens are spelling.
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_CONTROLS = re.compile(r"[\0-\x1f\x7f-\x9f]")


def normalize_caption(text: str) -> str:
    """Return a text as it is learned: Unicode NFC in lower case, one space between words, without invisible marks."""
    # Cut first, as the composition of a long text of combining marks takes the square of its length.
    plain = _INVISIBLE.sub("", valid_text(text[:MOST_CHARACTERS]))
    composed = unicodedata.normalize("NFC", _CONTROLS.sub(" ", plain).lower())
    return " ".join(composed.split())


def _alphabet() -> list[str]:
    """Return a printable character for each byte, as in GPT-2: itself, or one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(others)) for b in range(BYTES)]


_LETTERS = _alphabet()


class Tokenizer:
    """Texts to tokens and back.

    Args:
        merges: pairs of tokens that are one token, in order: "A B" in the byte-level alphabet of GPT-2. Merge k makes
            the token 256 + k.

    Raises:
        ValueError: a merge is of tokens that are not there, or makes one that is there.
    """

    def __init__(self, merges: Sequence[str] = ()) -> None:
        self.merges = tuple(merges)
        number = {letter: b for b, letter in enumerate(_LETTERS)}
        self._bytes = [bytes([b]) for b in range(BYTES)]
        self._ranks = dict[tuple[int, int], int]()
        self._known = dict[str, tuple[int, ...]]()
        for merge in self.merges:
            first, space, second = merge.partition(" ")
            if not space or first not in number or second not in number or first + second in number:
                raise ValueError(f"{merge!r:.60} is not a pair of earlier tokens that is new")
            number[first + second] = token = len(self._bytes)
            self._ranks[number[first], number[second]] = token
            self._bytes.append(self._bytes[number[first]] + self._bytes[number[second]])

    @property
    def vocabulary(self) -> int:
        """Number of different tokens in the vocabulary."""
        return BYTES + len(self.merges)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, [] of one without a word."""
        return [token for word in _words_of(text) for token in self._of_word(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; a letter that is cut is left out, and so are tokens below 0."""
        text = b"".join(self._bytes[token] for token in tokens if token >= 0)
        return text.decode("utf-8", "ignore").removeprefix(" ")

    def split_words(self, text: str) -> list[str]:
        """Return the words of a text that are several tokens, as they occur at most once in the captions."""
        words = dict.fromkeys(word.strip() for word in _words_of(text) if any(map(str.isalnum, word)))
        return [word for word in words if min(len(self._of_word(word)), len(self._of_word(f" {word}"))) > 1]

    def _of_word(self, word: str) -> tuple[int, ...]:
        if (known := self._known.get(word)) is not None:
            return known
        tokens = list(word.encode())
        while len(tokens) > 1:
            merged = [self._ranks.get(pair, MOST_TOKENS) for pair in pairwise(tokens)]
            if (token := min(merged)) == MOST_TOKENS:
                break
            tokens = _merged(tokens, merged, token)
        if len(self._known) >= _MOST_WORDS:
            self._known.clear()
        self._known[word] = tuple(tokens)
        return self._known[word]


def _words_of(text: str) -> list[str]:
    # With a space before the first word, so that it is the same token as elsewhere.
    normal = normalize_caption(text)
    return _WORDS.findall(f" {normal}") if normal else []


def _merged(tokens: Sequence[int], merged: Sequence[int], token: int) -> list[int]:
    """Return tokens with each pair that becomes `token` replaced by it, from the left; `merged` is of each pair."""
    made, i = list[int](), 0
    while i < len(tokens):
        joined = i < len(merged) and merged[i] == token
        made.append(token if joined else tokens[i])
        i += 1 + joined
    return made


@lru_cache(8)
def tokenizer_of(merges: tuple[str, ...]) -> Tokenizer:
    """Return the tokenizer of these merges, made once. ValueError as `Tokenizer`."""
    return Tokenizer(merges)


def learn_merges(captions: Iterable[str], most: int = MOST_TOKENS - BYTES) -> tuple[str, ...]:
    """Return the merges of a byte-level BPE of captions: the most frequent pair, again and again.

    Pairs of the same frequency are in the order of their bytes, so that the result depends on the captions alone, and
    not on their order. Pairs that occur less than `LEAST` times stay apart.
    """
    counts = Counter(word for caption in captions for word in _words_of(caption))
    return _Learner([(list(word.encode()), count) for word, count in counts.items()]).learn(most)


class _Learner:
    """Words as lists of tokens with their counts, and the pairs in them."""

    def __init__(self, words: list[tuple[list[int], int]]) -> None:
        self._words = words
        self._bytes = [bytes([b]) for b in range(BYTES)]
        self._counts, self._places = Counter[tuple[int, int]](), defaultdict[tuple[int, int], set[int]](set)
        for i in range(len(words)):
            self._count(i, 1)
        self._queue = [self._entry(pair) for pair in self._counts]
        heapq.heapify(self._queue)

    def learn(self, most: int) -> tuple[str, ...]:
        merges, known = list[str](), {*self._bytes}
        while self._queue and len(merges) < most:
            entry = heapq.heappop(self._queue)
            pair = entry[3]
            if entry != self._entry(pair):  # its count has changed, and a newer entry is in the queue
                continue
            if self._counts[pair] < LEAST:
                break
            joined = self._bytes[pair[0]] + self._bytes[pair[1]]
            if joined not in known:
                known.add(joined)
                merges.append(" ".join("".join(_LETTERS[b] for b in self._bytes[token]) for token in pair))
                self._bytes.append(joined)
                self._merge(pair, len(self._bytes) - 1)
        return tuple(merges)

    def _merge(self, pair: tuple[int, int], token: int) -> None:
        changed = set[tuple[int, int]]()
        for i in sorted(self._places[pair]):
            tokens, count = self._words[i]
            pairs = list(pairwise(tokens))
            self._count(i, -1)
            shorter = _merged(tokens, [token if each == pair else MOST_TOKENS for each in pairs], token)
            self._words[i] = shorter, count
            self._count(i, 1)
            changed.update(pairs, pairwise(shorter))
        for each in changed:
            if self._counts[each] > 0:
                heapq.heappush(self._queue, self._entry(each))

    def _count(self, i: int, sign: int) -> None:
        """Add the pairs of word i to the counts, or take them away."""
        tokens, count = self._words[i]
        for pair in pairwise(tokens):
            self._counts[pair] += sign * count
            if sign > 0:
                self._places[pair].add(i)
            else:
                self._places[pair].discard(i)

    def _entry(self, pair: tuple[int, int]) -> tuple[int, bytes, bytes, tuple[int, int]]:
        return -self._counts[pair], self._bytes[pair[0]], self._bytes[pair[1]], pair
