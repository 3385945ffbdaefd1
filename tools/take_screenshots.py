"""Takes the pictures of docs/page.md from a server that is running: python tools/take_screenshots.py http://127.0.0.1:8000

It needs Playwright (`pip install playwright`) and a Chromium of the system. The pictures are to be looked at before they are committed.
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WIDE = {"width": 1240, "height": 800}
NARROW = {"width": 390, "height": 780}
QUESTIONS = ("I need a taxi to the airport.", "Write a Python function that adds two numbers.")


@contextmanager
def opened(browser: Any, url: str, viewport: dict[str, int], scheme: str) -> Iterator[Any]:
    """The page with two chats, the second of which is open."""
    with browser.new_context(viewport=viewport, color_scheme=scheme, service_workers="block") as context:
        page = context.new_page()
        page.goto(url)
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Close settings").click()
        for question in QUESTIONS:
            page.get_by_label("Message", exact=True).fill(question)
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Retry").wait_for()
            if question != QUESTIONS[-1]:
                page.get_by_role("button", name="New chat").click()
        yield page


def open_tree(page: Any) -> None:
    """Show the tokens by step, and of these the step with the most accepted drafts."""
    page.locator(".tokens > summary").click()
    steps = page.locator(".strip .step")
    steps.first.wait_for()
    accepted = steps.evaluate_all("nodes => nodes.map(node => node.querySelectorAll('.accepted').length)")
    steps.nth(accepted.index(max(accepted))).click()


def compare(page: Any) -> None:
    """Race against plain decoding to the end."""
    page.get_by_role("button", name="Compare without drafts").click()
    page.locator(".verdict.same").wait_for()


def open_settings(page: Any) -> None:
    """Show the settings next to an answer with its tokens."""
    page.get_by_role("button", name="Settings", exact=True).click()
    page.locator(".tokens > summary").click()


PICTURES = {
    "page-tree.png": (WIDE, "light", open_tree),
    "page-comparison.png": (WIDE, "light", compare),
    "page-dark.png": (WIDE, "dark", open_settings),
    "page-narrow.png": (NARROW, "light", compare),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where a server answers")
    parser.add_argument("--to", type=Path, default=IMAGES, help="the folder of the pictures")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (viewport, scheme, show) in PICTURES.items():
            with opened(browser, arguments.url, viewport, scheme) as page:
                show(page)
                page.wait_for_timeout(300)  # the list of chats and the scrolling follow
                page.screenshot(path=arguments.to / name)
        browser.close()


if __name__ == "__main__":
    main()
