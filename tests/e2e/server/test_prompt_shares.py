"""A short chat next to long prompts: it is answered long before they are."""

import asyncio
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from harness.live_server import LiveServer, live_server, until
from paceline import AsyncEngine

MAX_SHARE = 0.5
"""Of the time that the long prompts still take, until the short one's first text. Rows in order of arrival make it 1."""
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = AsyncEngine.open("mini", drafter="none", threads=1, max_num_seqs=10)
    with live_server(engine) as server:
        yield server
    asyncio.run(engine.close())


@pytest.mark.parametrize(("count", "num_tokens"), [(2, 1900), pytest.param(8, 900, marks=pytest.mark.long)])
def test_a_short_chat_begins_long_before_long_prompts_end(server: LiveServer, count: int, num_tokens: int) -> None:
    ends: list[float] = []

    def prompt(number: int) -> None:
        fields = {"prompt": [5 + number] * num_tokens, "max_tokens": 1, "cache_salt": f"{count} {number}"}
        answer = httpx.post(server.url + "/v1/completions", json=fields, timeout=120)
        assert answer.status_code == 200, answer.text
        ends.append(time.monotonic())

    threads = [threading.Thread(target=prompt, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: server.num_open == count)
    begin_s = time.monotonic()
    fields = {"messages": [{"role": "user", "content": "Tell me of the sea, " * 4}], "max_tokens": 2, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=fields, timeout=120) as answer:
        first_s = next(time.monotonic() for line in answer.iter_lines() if '"content":"' in line)
    for thread in threads:
        thread.join()
    assert len(ends) == count
    assert first_s - begin_s < MAX_SHARE * (max(ends) - begin_s)
