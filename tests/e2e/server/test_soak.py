"""Minutes at twice the capacity of a server, in all APIs, whole and streamed, with clients that leave: no answer is lost or wrong."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from harness.live_server import until
from harness.server_process import Server
from harness.tool_model import write_tool_model

SECONDS = {False: 8.0, True: 240.0}
"""By whether the counts are large."""
FACTOR = 2.0
NUM_SEQS, MAX_QUEUE = 4, 16
MAX_CLIENTS = 256
"""Well below the connections of a server, which closes the oldest ones without a request beyond that."""
LEAVING = 0.15
QUESTIONS = ["I need a taxi to the airport.", "Tell me of the sea.", "Repeat: one two three one two three", "What is a lighthouse?"]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}, "tall": {"type": "boolean"}},
    "required": ["age", "tall"],
    "additionalProperties": False,
}
FUNCTION = {"name": "note", "description": "", "parameters": SCHEMA}
CALLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"
MAX_GROWTH_BYTES = 40_000_000
SMALL_CACHE = ("--kv-cache-gb", "0.03")  # its memory grows until it is first written


def requests(model: str, num_questions: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, question in enumerate(QUESTIONS[:num_questions]):
        messages = [{"role": "user", "content": question}]
        sampled = {"seed": number, "temperature": 0.8}
        yield CHAT, {"messages": messages, "max_tokens": 40, **sampled}
        yield CHAT, {"messages": messages, "max_tokens": 60, "temperature": 0.0, **CALLS}
        yield TEXT, {"prompt": question, "max_tokens": 30, "ignore_eos": True, **sampled}
        yield RESPONSES, {"input": question, "max_output_tokens": 40, "temperature": 0.0}
        yield MESSAGES, {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0.0}
        calls = {"tools": [{"name": "note", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
        yield MESSAGES, {"model": model, "messages": messages, "max_tokens": 60, "temperature": 0.0, **calls}
        yield OLLAMA, {"model": model, "messages": messages, "options": {"num_predict": 40, **sampled}}


def content_of(path: str, body: str, *, is_streamed: bool) -> str:
    """Texts and calls of a complete answer.

    Raises:
        ValueError: it ends too early, or with an error.
    """
    if path == OLLAMA:
        found = [json.loads(one) for one in body.split("\n") if one]
    else:
        found = [json.loads(one[6:]) for one in body.split("\n") if one.startswith("data: {")] if is_streamed else [json.loads(body)]
    if any("error" in one and one["error"] for one in found):
        raise ValueError(body[-300:])
    ends = {CHAT: "[DONE]", TEXT: "[DONE]", RESPONSES: "response.completed", MESSAGES: "message_stop", OLLAMA: '"done":true'}
    if is_streamed and ends[path] not in body and not (path == RESPONSES and "response.incomplete" in body):
        raise ValueError(f"the stream has no end: {body[-300:]}")
    return "".join(_texts(found))


def _texts(value: Any) -> Iterator[str]:
    """The text of an answer, which each API has in other fields."""
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict) and value.get("type") not in _REPEATED:
        for name, inner in value.items():
            if name in ("text", "content", "arguments", "partial_json", "delta") and isinstance(inner, str):
                yield inner
            elif name == "input" and inner:
                yield json.dumps(inner)
            elif name == "name" and inner:
                yield f"\n{inner} "
            elif name not in ("speculation", "usage", "tools", "input"):
                yield from _texts(inner)


_REPEATED = (
    "response.created",
    "response.in_progress",
    "response.output_text.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_item.added",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
)


def num_open(metrics: str) -> int:
    """Samples that run or wait."""
    found = re.findall(r"^paceline:num_requests_(?:running|waiting){[^}]*} (\S+)$", metrics, re.MULTILINE)
    return sum(int(float(count)) for count in found)


@dataclass(frozen=True, slots=True)
class Case:
    path: str
    fields: dict[str, Any]
    content: str


class Soak:
    """Clients of one server.

    Attributes:
        counts: what became of requests: "compared", "left", "wrong", "lost", or a status.
        faults: the first of what is wrong or lost.
        max_open: most samples that ran or waited at any time.
    """

    def __init__(self, url: str, model: str, num_questions: int) -> None:
        self._url, self._random = url, Random(7)
        self._kinds = list(requests(model, num_questions))
        self.cases: list[Case] = []
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.max_open = 0

    async def run(self, seconds: float) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server may just be ending an idle one
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:
            for path, fields in self._kinds:
                for streams in (False, True):
                    given = {**fields, "stream": streams}
                    answer = await client.post(path, json=given)
                    assert answer.status_code == 200, answer.text
                    self.cases.append(Case(path, given, content_of(path, answer.text, is_streamed=streams)))
            started_s = time.monotonic()
            per_client = 3 * len(self._kinds) // 7
            await asyncio.gather(*(self._some(client, per_client) for _ in range(NUM_SEQS)))
            rate = FACTOR * per_client * NUM_SEQS / (time.monotonic() - started_s)
            self.counts.clear()
            watching = asyncio.ensure_future(self._watch(client))
            asking, due_s = set[asyncio.Task[None]](), time.monotonic()
            end_s = due_s + seconds
            while due_s < end_s and time.monotonic() < end_s:
                await asyncio.sleep(max(0.01, due_s - time.monotonic()))
                if len(asking) >= MAX_CLIENTS:  # this process is too slow to read its answers
                    continue
                task = asyncio.ensure_future(self._one(client))
                asking.add(task)
                task.add_done_callback(asking.discard)
                due_s += self._random.expovariate(rate)
            burst = 2 * (NUM_SEQS + MAX_QUEUE)  # at once: more than the queue holds, however few came in time
            await asyncio.gather(*asking, *(self._one(client) for _ in range(burst)))
            watching.cancel()

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while True:
            self.max_open = max(self.max_open, num_open((await client.get("/metrics")).text))
            await asyncio.sleep(0.25)

    async def _some(self, client: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            await self._one(client)

    async def _one(self, client: httpx.AsyncClient) -> None:
        case = self._random.choice(self.cases)
        self.counts["requests"] += 1
        if self._random.random() < LEAVING:
            with suppress(TimeoutError, httpx.HTTPError):
                await asyncio.wait_for(client.post(case.path, json=case.fields), self._random.random() * 0.3)
            self.counts["left"] += 1
            return
        try:
            answer = await client.post(case.path, json=case.fields)
            if answer.status_code != 200:
                self.counts[str(answer.status_code)] += 1
                if not 1 <= int(answer.headers.get("retry-after", 0)) <= 60:
                    self.faults.append(f"{case}: {answer.status_code} without a time to retry after")
                return
            content = content_of(case.path, answer.text, is_streamed=case.fields["stream"])
        except (httpx.HTTPError, ValueError) as error:
            self.counts["lost"] += 1
            self.faults.append(f"{case}: {error!r}")
            return
        self.counts["compared"] += 1
        if content != case.content:
            self.counts["wrong"] += 1
            self.faults.append(f"{case}: {content!r}")


@pytest.mark.long
def test_overloaded_server_refuses_some_requests_and_answers_the_rest(
    mini_dir: Path, tmp_path: Path, large_counts: bool, tally: "Counter[str]"
) -> None:
    model = write_tool_model(mini_dir, tmp_path / "talking")
    limits = ("--max-num-seqs", str(NUM_SEQS), "--max-queue", str(MAX_QUEUE))
    with closing(Server("--model", str(model), "--drafter", "ngram", *limits, *SMALL_CACHE)) as server:
        soak = Soak(server.url, "talking", num_questions=len(QUESTIONS) if large_counts else 1)
        asyncio.run(soak.run(SECONDS[False]))
        before = server.resident_bytes()
        if large_counts:
            asyncio.run(soak.run(SECONDS[True]))
        assert httpx.get(server.url + "/health").status_code == 200
        until(lambda: num_open(httpx.get(server.url + "/metrics").text) == 0)
        assert server.resident_bytes() - before < MAX_GROWTH_BYTES
    tally.update({f"soak: {name}": count for name, count in soak.counts.items()})
    assert not soak.faults, soak.faults[:3]
    assert [(case.path, case.fields) for case in soak.cases if len(case.content) < 4] == []
    assert set(soak.counts) <= {"requests", "compared", "left", "429"}
    assert soak.counts["compared"] > 10
    assert soak.counts["429"] > 0, "the server is not busy"
    assert 0 < soak.max_open <= NUM_SEQS + MAX_QUEUE
