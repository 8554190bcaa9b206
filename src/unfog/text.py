"""Text for messages: sizes, counts, and words from outside: credentials in URLs, control characters, file names."""

from __future__ import annotations

import codecs
import difflib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

MARK = "Unfog"
"""Text "Software" of a PNG file, and comment of a GIF file, that Unfog has written; see `data.sources.folder`."""

LEAST_SHOWN = 1e5
"""Bytes below which `format_bytes` does not say how many."""
# A scheme of any length would take the square of the length of a long word.
# `Path` leaves one slash, which is taken for that of a URL after these alone: /usr/bin:/home is a list of folders.
_SCHEME = r"(?:[a-z][a-z0-9+]{0,30}://|(?:https?|ftps?|sftp|ssh|s3a?|gs|gcs|az|abfss?|hf|webdavs?):/)"
# A host that is known as one by its look: a domain, localhost or an address, and perhaps a port.
_HOST = r"""(?:[\w-]+(?:\.[\w-]+)+\.?|localhost|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?(?=[/?#\s'",;)\]]|$)"""
# A password may hold / ? # and @ that should be escaped. Where it is unclear what is the host, everything up to the
# last @ of the word is taken for a secret: a part of an address is missed less than a password is.
_SECRET = (
    rf"(?:[^/\s?#]*@(?={_HOST})"  # up to a host
    rf"|(?!{_HOST})(?=[^/\s?#]*[:@]|(?:(?<=http://)|(?<=https://)|(?<=ftp://))[^/\s?#])(?:(?!{_SCHEME})\S)*@"
    # A password with spaces; digits alone are a port.
    rf"|(?!{_HOST})[^/\s?#:@]+:(?![0-9]{{1,5}}(?:[\s/]|$))"
    rf"(?:(?!{_SCHEME})[^\s@])*(?: (?:(?!{_SCHEME})[^\s@])+){{1,5}}@)?"
)
# A word such as user:password@host. A user name of one letter is a drive, as in C:\x@y; `hf:` and the others name
# sources and parts.
_WITHOUT_SCHEME = re.compile(
    rf"""(?<![^\s='"(,\[])(?!(?:python|hf|custom):)[a-z_][\w.+-]+:(?![/\\]|[0-9]{{1,5}}\s)"""
    r"""[^\s/\\]{1,256}(?: [^\s/\\@]{1,256}){0,5}@"""
    rf"""(?={_HOST}|[\w-]+(?::[0-9]{{1,5}})?(?=[/?#\s'",;)\]]|$))""",
    re.IGNORECASE,
)
_URL = re.compile(
    # Scheme, user name and password, host and path up to the next URL, query; quotes may be part of all of them.
    rf"""({_SCHEME}){_SECRET}((?:(?!{_SCHEME})[^\s?])*)(?:\?\S*?(?=['"),;.\]]{{0,3}}(?:\s|$)))?""",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
_LONGEST_WORD = 100  # characters that are compared with what is known
# Characters that act on a terminal, or reverse the direction of the text behind them.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def suggest(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" or, if nothing is similar, the list of all that is known."""
    known = sorted(set(known))
    # Shortened, as the comparison takes the square of the length.
    close = difflib.get_close_matches(str(word)[:_LONGEST_WORD], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; give one of {', '.join(known)}"


def without_secrets(text: str) -> str:
    """Remove from each URL in a text its query, which may be a signature, and its user name and password.

    Of words such as user:password@host, without a scheme, the host is left.
    """
    return _WITHOUT_SCHEME.sub("", _URL.sub(r"\1\2", text))


def is_address(text: str) -> bool:
    """Return True for an address such as s3://bucket, of which `Path` would make folders such as `s3:`."""
    return _ADDRESS.match(text) is not None


def valid_text(name: str) -> str:
    """Return a file's name as valid Unicode: bytes that are not UTF-8 are spelt \\xff."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and no name of a file
        return name.encode("utf-8", "backslashreplace").decode()


def sanitize(name: str) -> str:
    """Return a file's name or URL as one printable line: control characters escaped, credentials removed."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], valid_text(without_secrets(name)))


def format_bytes(count: float) -> str:
    """Return bytes as text: "under 0.1 MB", "0.2 MB", "340 MB", "1.6 GB"."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    if count < LEAST_SHOWN:
        return "under 0.1 MB" if count > 0 else "0 MB"
    return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:,.1f} MB"


def plural(number: int, thing: str = "image") -> str:
    """Return a count with its noun: "1 image", "2,000 classes"."""
    plural = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def quote_words(words: Iterable[str]) -> str:
    """Return words as one command; those with spaces as `quote_word` has them."""
    return " ".join(quote_word(word) if re.search(r"\s", word) else shlex.quote(word) for word in words)


def quote_word(word: str) -> str:
    """Return a word in double quotes, which all shells read, or as a POSIX shell needs it if it has signs of one."""
    return shlex.quote(word) if re.search(r'["$`!]|\\\\|\\$', word) else f'"{word}"'


def encoding_of_mark(content: bytes) -> str:
    """Return the codec that the byte order mark of a text names, and that leaves it out; "" without a mark."""
    if content.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # the first begins like that of UTF-16
        return "utf-32"
    return "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the problem with a file that cannot be decoded, where it is, and the remedy."""
    encoding = error.encoding[: len("utf-16")].upper()  # without the order of the bytes
    line = error.object[: error.start].decode(error.encoding, "replace").count("\n") + 1
    return f"is not text in {encoding} (line {line:,}, byte {error.start + 1:,}); save it as UTF-8"


def manual(page: str) -> str:
    """Return the command that opens a page of the documentation, such as docs/metrics.md, or its path on this machine.

    The path is of a package or checkout in which the site is not built.
    """
    package, name = Path(__file__).parent, page.removeprefix("docs/").removesuffix(".md")
    if (package / "site" / name / "index.html").is_file():
        return f"`unfog docs {name}`"
    return next((str(root / page) for root in (package, package.parents[1]) if (root / page).is_file()), page)
