"""Captions of images: read from text files, and made a column of tokens whose tokenizer is learned from them."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.columns.kinds import cell_value
from unfog.data.data_report import CAPTION_FILES
from unfog.data.sources.base import ImageError, Source
from unfog.data.sources.image_files import os_error_reason
from unfog.errors import RequestError
from unfog.text import encoding_of_mark, sanitize
from unfog.values.columns import Column
from unfog.values.condition_format import TEXT
from unfog.values.tokenizer import Tokenizer, learn_merges, normalize_caption

SUFFIX = ".txt"
"""Ending of the file with the caption of an image, beside it."""
MOST_LENGTH = 64
"""Most tokens of a caption, unless a run says otherwise."""
MOST_CAPTIONS = 8
"""Most captions of an image."""
_FILE_BYTES = 2**16  # of a text file that are read
_LEARNED = 200_000  # captions, evenly spaced, that the tokenizer is learned from
# Share of captions that are not cut; and what the length is a multiple of, so that a prompt may have some more words.
_COVERED, _ROUNDED = 0.99, 16
_NAMED = 3  # images of each peculiarity


@dataclass
class _Findings:
    """Counts of the images whose captions have each peculiarity, and the names of the first of them."""

    counts: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, image: str) -> None:
        self.counts[what] += 1
        if self.counts[what] <= _NAMED:
            self.named.setdefault(what, []).append(image)

    def line(self, name: str) -> str:
        """Return one line on all of them; "" if there is nothing to say."""
        parts = [
            f"{count:,} {what} (such as {', '.join(map(sanitize, self.named[what]))})"
            for what, count in self.counts.items()
        ]
        return f"{sanitize(name)}: {', '.join(parts)}" if parts else ""


def caption_column(
    name: str,
    cells: Sequence[Any],
    names: Sequence[str],
    training: Callable[[], NDArray[np.int64]],
    warn: Callable[[str], None] = lambda line: None,
) -> Column:
    """Return the column of the captions in `cells`: their tokens, -1 after the end and where they are unknown.

    The values are int16 [N, L], or [N, K, L] if an image has up to K captions. The tokenizer and L are found from the
    training images.

    Args:
        name: of the column.
        cells: a text for each image, or a list of texts; bytes of a file with a caption a line, or the error of reading
            it; None if unknown.
        names: of the images.
        training: returns the indices of the training images.
        warn: called with one line on what is remarkable.

    Raises:
        RequestError: no image has a caption, or all have the same.
    """
    findings = _Findings()
    texts = [_captions(cell, image, findings) for cell, image in zip(cells, names)]
    rows = training().tolist()
    learned = [text for i in rows for text in texts[i]]
    if len({*learned}) < 2:
        if line := findings.line(name):
            warn(line)
        why = "is one text for all images" if learned else "is empty for all images"
        raise RequestError(f"the column {sanitize(name)} {why}: it cannot be a condition; leave it out")
    merges = learn_merges(learned[:: -(-len(learned) // _LEARNED)])
    tokenizer = Tokenizer(merges)
    tokens = [[np.array(tokenizer.encode(text), np.int16) for text in each] for each in texts]
    length = _length(np.array([len(each) for i in rows for each in tokens[i]]))
    values = np.full((len(texts), max(map(len, tokens)), length), -1, np.int16)
    for i, several in enumerate(tokens):
        for k, each in enumerate(several):
            values[i, k, : len(each)] = each[:length]
            if len(each) > length:
                findings.add(f"longer than {length} tokens, and cut there", names[i])
    if line := findings.line(name):
        warn(line)
    return Column(name, TEXT, values if values.shape[1] > 1 else values[:, 0], merges)


def _length(lengths: NDArray[np.int64]) -> int:
    """Return the tokens of the longest caption that is not cut."""
    covered = int(np.quantile(lengths, _COVERED, method="higher"))
    return min(MOST_LENGTH, -(-covered // _ROUNDED) * _ROUNDED)


def caption_files(source: Source) -> list[bytes | ImageError | None] | None:
    """Return the content of the text file beside each image, None if it has none; None if no image has one.

    A file that cannot be read is the error that says why.
    """
    found = list[bytes | ImageError | None]()
    for i in range(len(source.names)):
        try:
            found.append(source.read_beside(i, SUFFIX, _FILE_BYTES + 1))
        except (OSError, ImageError) as error:
            found.append(ImageError(os_error_reason(error)) if isinstance(error, OSError) else error)
    return None if all(each is None for each in found) else found


def captions_counted(ignored: Mapping[str, int], cells: Mapping[str, Sequence[Any]]) -> Mapping[str, int]:
    """Return `Source.ignored`, in which text files that gave captions to these cells count as CAPTION_FILES."""
    read = sum(isinstance(cell, bytes) for each in cells.values() for cell in each)
    # Captions inside shards are not among the files that were counted.
    if not (count := min(read, ignored.get(SUFFIX, 0))):
        return ignored
    return Counter(ignored) - Counter({SUFFIX: count}) + Counter({CAPTION_FILES: count})


def has_caption_files(source: Source) -> bool:
    """Return True if most of a few images have a text file beside them."""
    count = len(source.names)
    if source.remote or 2 * source.ignored.get(SUFFIX, 0) < count:
        return False
    some = range(0, count, max(1, count // 8))
    return 2 * sum(_is_beside(source, i) for i in some) > len(some)


def _is_beside(source: Source, i: int) -> bool:
    try:
        return source.read_beside(i, SUFFIX, 1) is not None
    except (OSError, ImageError):
        return True  # there is one, which cannot be read


def _captions(cell: Any, image: str, findings: _Findings) -> list[str]:
    """Return the captions of a cell, [] if it is empty."""
    if isinstance(cell, ImageError):
        findings.add(f"with a text file {cell}", image)
        return []
    if isinstance(cell, bytes):
        value: Any = tuple(line.strip() for line in _decoded(cell, image, findings).splitlines())
    else:
        value = cell_value(cell)
        value = value if isinstance(value, tuple) else (value,)
    written = [
        str(int(each) if isinstance(each, float) and each.is_integer() else each) for each in value if each is not None
    ]
    if cell is not None and not any(map(normalize_caption, written)):
        findings.add("empty", image)
    if any("\0" in text for text in written):
        findings.add("with NUL bytes, which are spaces", image)
    if len(texts := [text for text in written if normalize_caption(text)]) > MOST_CAPTIONS:
        findings.add(f"with more than {MOST_CAPTIONS} captions, of which the first are learned", image)
    return texts[:MOST_CAPTIONS]


def _decoded(content: bytes, image: str, findings: _Findings) -> str:
    """Return a file of text, in whatever usual encoding it has."""
    if cut := len(content) > _FILE_BYTES:
        findings.add(f"larger than {_FILE_BYTES // 1024} KB, of which the beginning counts", image)
        content = content[:_FILE_BYTES]
    if marked := encoding_of_mark(content):
        return content.decode(marked, "replace")
    for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if 3 * content[first::2].count(0) > len(content):
            return content.decode(encoding, "replace")
    try:
        # Of a file that is cut, the end may be in the middle of a letter.
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=not cut)
    except UnicodeDecodeError:
        findings.add("not in UTF-8, and read as Windows-1252", image)
        return content.decode("cp1252", "replace")
