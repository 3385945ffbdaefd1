"""Drives the page from a test: typed input, requests to the server, and handwritten streams that replace its answers."""

import json
from collections.abc import Callable, Sequence
from typing import Any

TAXI = "I need a taxi to the airport."
CHAT = "**/v1/chat/completions"
STORED = """async () => {
  const opened = indexedDB.open("paceline");
  const database = await new Promise(resolve => { opened.onsuccess = () => resolve(opened.result) });
  const stores = [...database.objectStoreNames].map(name => {
    const request = database.transaction(name).objectStore(name).getAll();
    return new Promise(resolve => { request.onsuccess = () => resolve(request.result) });
  });
  const found = JSON.stringify(await Promise.all(stores));
  database.close();
  return found;
}"""
"""Code that returns everything that the database of the page holds."""
Step = tuple[Sequence[str], Sequence[str], int]
"""(texts it emitted, texts it drafted in a chain, how many of these were accepted)"""


def scripted_stream(steps: Sequence[Step], *, first_id: int = 100, finish_reason: str | None = "stop", numerics: str = "exact") -> str:
    """The body of an answer. Token ids count up from `first_id`; without a finish reason it breaks off."""
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
    start = 0
    for emitted, drafted, num_accepted in steps:
        ids = list(range(first_id + start, first_id + start + len(emitted)))
        tree = {
            "start": start,
            "token_ids": ids,
            "draft_token_ids": [*ids[:num_accepted], *range(9000, 9000 + len(drafted) - num_accepted)],
            "draft_texts": list(drafted),
            "parents": list(range(len(drafted))),
            "sources": ["scripted"] * len(drafted),
            "accepted_nodes": list(range(1, num_accepted + 1)),
            "skip_reason": None if drafted else "no_match",
        }
        own = "bonus" if drafted else "plain"
        origins = ["accepted"] * num_accepted + [own] * (len(emitted) - num_accepted)
        shown = {"token_ids": ids, "texts": list(emitted), "origins": origins, "trees": [tree]}
        choice = {"index": 0, "delta": {"content": "".join(emitted)}, "finish_reason": None}
        events.append({"choices": [choice], "speculation": shown})
        start += len(emitted)
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    if finish_reason is None:
        return text
    stats = {"timing": {"prompt_s": 0.01, "decode_s": 0.5}, "numerics": numerics, "acceptance": "match", "drafter": "scripted"}
    end = [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
        {"choices": [], "usage": {"completion_tokens": start}, "speculation": stats},
    ]
    return text + "".join(f"data: {json.dumps(event)}\n\n" for event in end) + "data: [DONE]\n\n"


def send(page: Any, text: str = TAXI) -> None:
    """Type a message and send it; its answer has begun."""
    num_answers = page.locator(".answer").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    until(page, lambda: page.locator(".answer").count() > num_answers)


def open_settings(page: Any) -> None:
    """Show the settings with all their parts."""
    page.get_by_role("button", name="Settings", exact=True).click()
    for summary in page.locator("#settings summary").all():
        summary.click()


def show_tokens(page: Any) -> None:
    """Open the tokens of the newest answer, as soon as it has one."""
    page.locator(".answer details.tokens > summary").last.click()
    page.locator(".answer details.tokens").last.locator(".strip").wait_for()


def wait(page: Any) -> None:
    """Wait until every answer has ended, well or not."""
    until(page, lambda: page.get_by_role("button", name="Retry").count() == page.locator(".answer").count() > 0)


def ask(page: Any, text: str = TAXI) -> None:
    """Send a message and wait until its answer has ended."""
    send(page, text)
    wait(page)


def compare(page: Any) -> None:
    """Compare the newest answer with one without drafts, which is the same."""
    page.get_by_role("button", name="Compare without drafts").click()
    page.locator(".verdict.same").wait_for()


def script(page: Any, *bodies: str) -> list[dict[str, Any]]:
    """Have these streams answer, one after the other; returns where the fields of requests will be."""
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(body=bodies[min(len(asked), len(bodies)) - 1], content_type="text/event-stream")

    page.route(CHAT, answer)
    return asked


def script_slowly(page: Any, body: str, *, pause_ms: int) -> None:
    """Have this stream answer event by event; a route of Playwright's answers all at once."""
    page.evaluate(
        """([body, pauseMs]) => {
          const encoder = new TextEncoder();
          const start = async controller => {
            for (const event of body.split("\\n\\n").slice(0, -1)) {
              controller.enqueue(encoder.encode(event + "\\n\\n"));
              await new Promise(resolve => setTimeout(resolve, pauseMs));
            }
            controller.close();
          };
          window.fetch = async () => new Response(new ReadableStream({start}));
        }""",
        [body, pause_ms],
    )


def record(page: Any) -> list[dict[str, Any]]:
    """Where the fields of requests will be."""
    asked: list[dict[str, Any]] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    return asked


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Wait until something holds. The page's policy forbids Playwright's own way, which evaluates a text in the page."""
    for _ in range(400):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it never became true")
