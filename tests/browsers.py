"""A real Chromium on the page of runs, for tests and for the measurements of benchmarks."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium")


@contextmanager
def open_browser():
    """Start Chromium. Its sandbox needs rights that containers lack; the pages that it opens are our own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class WatchedPage:
    """A page of the browser, with all that it asked for and complained about."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(accept_downloads=True, **options)
        self.context.set_default_timeout(180_000)  # milliseconds; the machine may be busy
        self.page = self.context.new_page()
        self.troubles, self.requests = [], []
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self._note("error", str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _note(self, kind, text):
        if kind in ("error", "warning"):
            self.troubles.append(text)


@contextmanager
def serving(folder: Path, port: int = 0, *options: str):
    """Serve a folder of runs in a process of its own; gives (address, process)."""
    command = [sys.executable, "-m", "unfog", "serve", str(folder), "--no-browser", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()
