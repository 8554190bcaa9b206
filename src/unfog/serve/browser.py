"""Open the page in the browser, and give its address to no process as a word: everybody can read those.

The browser gets the name of a private file, which leads to an address that works once.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from unfog.files.safe_files import write_atomic
from unfog.serve.address import Address


def open_page(address: Address, runs: Path) -> Callable[[], None]:
    """Open the page in the browser, if there is one. Return a function that removes the file of it."""
    try:
        webbrowser.get()  # on a machine without a browser no file is written
    except webbrowser.Error:
        return lambda: None
    place = _private_folder(runs)
    if place is None:
        return lambda: None
    remove = partial(shutil.rmtree, place, ignore_errors=True)
    file = (place / "open.html").absolute()
    try:
        _write(file, address.one_time(remove))
    except OSError:  # a full disk; the address was printed
        return remove
    # In a thread, as some browsers are waited for until they end.
    threading.Thread(target=webbrowser.open, args=[file.as_uri()], daemon=True).start()
    return remove


def _write(file: Path, address: str) -> None:
    refresh = f'<meta http-equiv="refresh" content="0; url={address}">'
    text = f'<!doctype html><meta charset="utf-8">{refresh}<title>Unfog</title>\n'
    write_atomic(file, text.encode(), file.parent, private=True)


def _private_folder(runs: Path) -> Path | None:
    """Return a new folder that its owner alone can read; None if none can be made.

    It is in the folder of the runs if possible: a browser in a sandbox (snap, flatpak) reads files of the home folder,
    but no temporary ones.
    """
    for parent in (runs, None):
        with suppress(OSError):
            place = Path(tempfile.mkdtemp(prefix=".open-", dir=parent))
            if not place.stat().st_mode & 0o077:
                return place
            place.rmdir()  # the file system has no permissions
    return None
