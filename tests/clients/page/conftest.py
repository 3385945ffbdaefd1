"""The page in a real browser: Debian's Chromium, driven by Playwright. If one of them is missing, the tests are skipped with a message."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
Open = Callable[..., Any]
Serve = Callable[..., "PageServer"]


class PageServer:
    """A process that serves the mini with its draft model and n-grams."""

    def __init__(self, log: Path, *arguments: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "paceline", "serve", "--port", str(port), "--threads", "1", *arguments]
        command += ["--drafter", "auto", "--drafter", "suffix"]
        with log.open("w") as stderr:  # an unread pipe would block the server when it is full
            self.process = subprocess.Popen(command, stderr=stderr)
        while self.process.poll() is None:
            if found := re.search(r"answers at (http://\S+:(\d+))/v1", log.read_text(encoding="utf-8")):
                self.url, self.port = found[1], int(found[2])
                return
            time.sleep(0.05)
        raise AssertionError(log.read_text(encoding="utf-8"))

    def answer(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What the API itself answers."""
        whole = {name: value for name, value in fields.items() if name not in ("stream", "stream_options")}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=whole, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(scope="package")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers, and ends them after the tests."""
    with ExitStack() as stack:

        def serve(*arguments: str, port: int = 0) -> PageServer:
            server = PageServer(tmp_path_factory.mktemp("server") / "log", *arguments, port=port)
            stack.callback(server.kill)
            return server

        yield serve


@pytest.fixture(scope="package")
def chromium(clients: Path) -> str:
    """Where Chromium is; Playwright can be imported."""
    # adds the packages of the environment of the API clients to those of this one
    sys.path += map(str, clients.glob(f"servers/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"))
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed here: pip install playwright")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    return path


@pytest.fixture(scope="package")
def server(chromium: str, serve: Serve) -> PageServer:
    """One for all tests that leave it as it is."""
    return serve()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Ended with each file: while it is there no other event loop can run in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def is_problem(message: Any) -> bool:
    """Whether a line of the console is an error or a warning of the page's, not Playwright's own about what these tests forbid."""
    return message.type in ("error", "warning") and "blocked by Playwright" not in message.text


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens pages; afterwards checks that they had no errors and sent requests only to their server."""
    contexts, problems = [], []

    def open_page(url: str, *, expects_faults: bool = False, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, "service_workers": "block", **options})
        contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(f"{url}/") else problems.append(request.url))
        if not expects_faults:
            page.on("console", lambda message: problems.append(message.text) if is_problem(message) else None)
        page.goto(url)
        page.get_by_role("heading", name="paceline").wait_for()
        if not expects_faults:
            page.get_by_text(" is ready.").wait_for(state="attached")  # before that a request names no model
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(open_page: Open, server: PageServer) -> Any:
    return open_page(server.url)
