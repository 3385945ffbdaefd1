"""Random traffic through a server: all kinds of requests, clients that leave, wrong bodies; each compared with what it gets alone."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from harness.http_client import HttpClient, events_in
from paceline import LLM, Grammar, RequestOutput, SamplingParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTIONS = ["I need a taxi to the airport.", "Hello", "Tell me of the sea.", "Repeat: one two three one two three one two"]
BEGINNINGS = ["The old fisherman", "def add(a, b):", "1 + 1 =", "Once upon a time there was"]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}, "tall": {"type": "boolean"}},
    "required": ["age", "tall"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what it must get.

    Attributes:
        texts: of its samples, as the target says them alone, decoded plainly; empty = it is refused with 400.
    """

    path: str
    fields: Mapping[str, Any]
    texts: Sequence[str]


Make = Callable[[LLM, np.random.Generator], Case]


def _case(llm: LLM, path: str, fields: Mapping[str, Any], params: SamplingParams) -> Case:
    given = fields["messages"] if path == CHAT else fields["prompt"]
    outputs: Any = llm.chat(given, params) if path == CHAT else llm.generate(given, params)
    texts = [output.text for output in ([outputs] if isinstance(outputs, RequestOutput) else outputs)]
    return Case(path, {"max_tokens": params.max_tokens, "temperature": params.temperature, **fields}, texts)


def _chat(random: np.random.Generator) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": str(random.choice(QUESTIONS))}]}


def greedy(llm: LLM, random: np.random.Generator) -> Case:
    return _case(llm, CHAT, _chat(random), SamplingParams(max_tokens=int(random.integers(1, 40))))


def sampled(llm: LLM, random: np.random.Generator) -> Case:
    seed = int(random.integers(1 << 30))
    params = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=seed)
    return _case(llm, CHAT, {**_chat(random), "seed": seed, "top_p": 0.95}, params)


def samples(llm: LLM, random: np.random.Generator) -> Case:
    params = SamplingParams(max_tokens=16, temperature=1.1, seed=5, n=3)
    return _case(llm, TEXT, {"prompt": str(random.choice(BEGINNINGS)), "seed": 5, "n": 3}, params)


def stopped(llm: LLM, random: np.random.Generator) -> Case:
    params = SamplingParams(max_tokens=40, stop=["e ", "the"])
    return _case(llm, TEXT, {"prompt": str(random.choice(BEGINNINGS)), "stop": ["e ", "the"]}, params)


def penalised(llm: LLM, random: np.random.Generator) -> Case:
    params = SamplingParams(max_tokens=30, repetition_penalty=1.2, presence_penalty=0.4)
    return _case(llm, CHAT, {**_chat(random), "repetition_penalty": 1.2, "presence_penalty": 0.4}, params)


def schema(llm: LLM, random: np.random.Generator) -> Case:
    params = SamplingParams(max_tokens=40, grammar=Grammar.json_schema(SCHEMA))
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    return _case(llm, CHAT, {**_chat(random), "response_format": wanted}, params)


def undrafted(llm: LLM, random: np.random.Generator) -> Case:
    return _case(llm, CHAT, {**_chat(random), "speculation": {"enabled": False}}, SamplingParams(max_tokens=20))


def wrong(llm: LLM, random: np.random.Generator) -> Case:
    mistakes = [{"temperature": -1}, {"messages": "x"}, {"temperatur": 1}, {"max_tokens": 0}, {"stop": [""]}, {"top_logprobs": 3}]
    return Case(CHAT, {**_chat(random), **mistakes[int(random.integers(len(mistakes)))]}, ())


def call(alone: HttpClient, random: np.random.Generator) -> Case:
    """A call of a function, required; what it must be is asked of a server that decodes plainly and answers nothing else."""
    function = {"name": "note", "parameters": SCHEMA}
    seed, temperature = int(random.integers(1 << 30)), float(random.choice([0.0, 0.8]))
    fields = {**_chat(random), "tools": [{"type": "function", "function": function}], "tool_choice": "required", "seed": seed}
    fields |= {"max_tokens": 60, "temperature": temperature}
    return Case(CHAT, fields, texts_of(alone.post(CHAT, fields).text, is_streamed=False))


KINDS: tuple[Make, ...] = (greedy, sampled, samples, stopped, penalised, schema, undrafted, wrong)
"""What is asked for; a new kind of request is one more line."""


class ServerTraffic:
    """Clients of one server.

    Args:
        url: the server's.
        cases: what they ask for, at random.
        leaving: share of requests whose client goes away before the end.

    Attributes:
        met: what happened, by name.
    """

    def __init__(self, url: str, cases: Sequence[Case], random: np.random.Generator, *, leaving: float = 0.2) -> None:
        self._url, self._cases, self._random, self._leaving = url, cases, random, leaving
        self.met: Counter[str] = Counter()

    def run(self, count: int, at_a_time: int) -> None:
        """So many requests, each compared with its case."""
        asyncio.run(self._run(count, at_a_time))

    async def _run(self, count: int, at_a_time: int) -> None:
        places = asyncio.Semaphore(at_a_time)
        limits = httpx.Limits(max_connections=at_a_time, max_keepalive_connections=0)  # the server may just be ending an idle one
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:

            async def one() -> None:
                async with places:
                    await self._ask(client, self._cases[int(self._random.integers(len(self._cases)))])

            await asyncio.gather(*(one() for _ in range(count)))

    async def _ask(self, client: httpx.AsyncClient, case: Case) -> None:
        is_streamed, leaves = bool(self._random.random() < 0.5), bool(self._random.random() < self._leaving)
        fields = {**case.fields, "stream": is_streamed}
        if not case.texts:
            answer = await client.post(case.path, json=fields)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            self.met["refused"] += 1
        elif leaves:
            await self._leave(client, case.path, fields)
            self.met["left"] += 1
        else:
            answer = await client.post(case.path, json=fields)
            assert answer.status_code == 200, answer.text
            found = texts_of(answer.text, is_streamed=is_streamed)
            assert found == list(case.texts), case.fields
            self.met["streamed" if is_streamed else "whole"] += 1

    async def _leave(self, client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
        patience_s = float(self._random.random() * 0.2)

        async def read_some() -> None:
            async with client.stream("POST", path, json=fields) as answer:
                async for _ in answer.aiter_raw():
                    if self._random.random() < 0.3:
                        return

        with suppress(asyncio.TimeoutError, httpx.HTTPError):
            await asyncio.wait_for(read_some(), patience_s)


def texts_of(body: str, *, is_streamed: bool) -> list[str]:
    """The texts of an answer with the calls behind them, in the order of their indices."""
    events = events_in(body) if is_streamed else [json.loads(body)]
    texts: dict[int, str] = {}
    calls: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            index, said = choice["index"], choice.get("delta") or choice.get("message") or {}
            texts[index] = texts.get(index, "") + (choice["text"] if "text" in choice else said.get("content") or "")
            for one in said.get("tool_calls", ()):
                name, arguments = one["function"].get("name"), one["function"].get("arguments") or ""
                calls[index] = calls.get(index, "") + (f"\n{name} " if name else "") + arguments
    return [texts[index] + calls.get(index, "") for index in sorted(texts)]
