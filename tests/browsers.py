"""A real Chromium on the page of runs, for tests and for the measurements of benchmarks."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from waiting import wait_until

CHROMIUM = shutil.which("chromium")
IN_A_BROWSER = (
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt-get install chromium"),
    pytest.mark.may_fail("a browser animates and fetches by the clock, which a busy machine delays"),
)
"""Marks of tests that need a browser."""


def in_a_browser(test):
    """Mark one test of a module as one that needs a browser."""
    for mark in IN_A_BROWSER:
        test = mark(test)
    return test


def axe_violations(page):
    """Return what axe finds, in a line each. It is evaluated by the debugger, which the page's policy does not bind."""
    page.evaluate((Path(__file__).with_name("vendored") / "axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    return [f"{one['id']}: {node['target']} {node['html'][:160]}" for one in found for node in one["nodes"][:3]]


def until(page, expression, seconds=120):
    """Wait until an expression is true. Playwright's own way evaluates text in the page, which its policy forbids."""
    wait_until(lambda: page.evaluate(expression), seconds)


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
