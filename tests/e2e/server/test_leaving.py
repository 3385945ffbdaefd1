"""Clients that disconnect, full queues, servers that shut down: no request hangs and no resource leaks."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from harness.apis import APIS
from harness.http_client import BASE, events_in
from paceline import AsyncEngine
from paceline.server import answering
from paceline.server.app import create_app
from paceline.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1900, "ignore_eos": True}
SHORT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


class Visitor:
    """A client as the application sees it, which disconnects on command."""

    def __init__(self, app: FastAPI, path: str, fields: dict[str, Any]) -> None:
        self._body: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]
        self.is_gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.got_text = asyncio.Event()
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": ""}
        self.visit = asyncio.ensure_future(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_text.set()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


async def until_running(engine: AsyncEngine, count: int) -> None:
    while (await engine.stats()).num_running != count:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_disconnected_client_is_aborted_within_a_step(engine: AsyncEngine, path: str, is_streamed: bool) -> None:
    prompt = {"prompt": "Hello"} if path == "/v1/completions" else {}
    fields = {name: value for name, value in ENDLESS.items() if name != "messages" or not prompt} | prompt

    async def work() -> None:
        app = create_app(engine)
        visitor = Visitor(app, path, {**fields, "stream": is_streamed, "n": 2, "temperature": 1})
        await (visitor.got_text.wait() if is_streamed else until_running(engine, 2))
        steps_before = (await engine.stats()).num_steps
        visitor.is_gone.set()
        await visitor.visit
        await until_running(engine, 0)
        assert (await engine.stats()).num_steps <= steps_before + 4, "the one under way, and those until it was noticed"
        assert app.state.service.admission.num_open == 0
        assert not [message for message in visitor.sent if message["type"] == "http.response.start"] or is_streamed

    run(work)
    cache = engine.loaded.engine.cache
    cache.check_consistency()
    assert cache.pool.num_free == cache.pool.num_blocks


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ["messages", "responses", "ollama"])
def test_disconnected_client_is_aborted_in_every_api(engine: AsyncEngine, name: str, is_streamed: bool) -> None:
    api = APIS[name]
    fields = api.fields(ENDLESS["messages"], max_tokens=1900, temperature=100.0, seed=1, top_p=1.0)  # it hardly ever ends by itself

    async def work() -> None:
        app = create_app(engine)
        visitor = Visitor(app, api.path, {**fields, "stream": is_streamed})
        await (visitor.got_text.wait() if is_streamed else until_running(engine, 1))
        steps_before = (await engine.stats()).num_steps
        visitor.is_gone.set()
        await visitor.visit
        await until_running(engine, 0)
        assert (await engine.stats()).num_steps <= steps_before + 4
        assert app.state.service.admission.num_open == 0

    run(work)


def test_request_of_a_client_that_disconnects_between_tokens_is_aborted(engine: AsyncEngine) -> None:
    async def work() -> None:
        app = create_app(engine)
        for _ in range(20):
            visitor = Visitor(app, "/v1/completions", {"prompt": "Hello", "max_tokens": 1900, "ignore_eos": True, "stream": True})
            await visitor.got_text.wait()
            visitor.is_gone.set()
            await visitor.visit
        assert (await engine.stats()).num_finished == num_finished

    num_finished = asyncio.run(engine.stats()).num_finished
    run(work)


def test_full_queue_is_429_with_retry_after(engine: AsyncEngine) -> None:
    async def work() -> None:
        app = create_app(engine, ServerSettings(max_queue=2))
        num_seqs = engine.loaded.config.max_num_seqs
        visitors = [Visitor(app, CHAT, ENDLESS) for _ in range(num_seqs + 2)]
        await until_running(engine, num_seqs)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as client:
            answer = await client.post(CHAT, json=SHORT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            too_many = await client.post("/v1/completions", json={"prompt": ["a"] * 11})
            assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "prompt")
            for visitor in visitors:
                visitor.is_gone.set()
            await asyncio.gather(*(visitor.visit for visitor in visitors))
            assert (await client.post(CHAT, json=SHORT)).status_code == 200

    run(work)


def test_queued_request_gets_the_same_answer_as_an_immediate_one(engine: AsyncEngine) -> None:
    async def work() -> None:
        app = create_app(engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, timeout=60) as client:
            fields = [{**SHORT, "temperature": 0.8, "seed": seed, "max_tokens": 12} for seed in range(24)]
            together = await asyncio.gather(*(client.post(CHAT, json={**one, "stream": seed % 2 == 0}) for seed, one in enumerate(fields)))
            texts = []
            for answer in together:
                is_stream = answer.headers["content-type"].startswith("text/event-stream")
                found = [choice for event in events_in(answer.text) for choice in event["choices"]] if is_stream else []
                text = "".join(choice["delta"].get("content", "") for choice in found)
                texts.append(text if is_stream else answer.json()["choices"][0]["message"]["content"])
            for one, text in zip(fields, texts, strict=True):
                assert (await client.post(CHAT, json=one)).json()["choices"][0]["message"]["content"] == text

    run(work)


def test_draining_server_finishes_and_refuses_new_requests(engine: AsyncEngine) -> None:
    async def work() -> None:
        app = create_app(engine)
        admission = app.state.service.admission
        visitor = Visitor(app, CHAT, {**ENDLESS, "max_tokens": 300, "stream": True})
        await visitor.got_text.wait()
        draining = asyncio.ensure_future(admission.drain(30))
        await asyncio.sleep(0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as client:
            refused = await client.post(CHAT, json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) > 0
            assert ((await client.get("/ready")).status_code, (await client.get("/health")).status_code) == (503, 200)
        assert await draining
        await visitor.visit
        text = b"".join(message.get("body", b"") for message in visitor.sent).decode()
        assert events_in(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert await admission.drain(0), "there is nothing left"

    run(work)


def test_drain_waits_until_finished_responses_are_sent(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_made = threading.Event(), threading.Event()

    def make_body_late(body: object) -> bytes:
        is_made.set()
        assert goes_on.wait(30)
        return large_json(body)

    async def work() -> None:
        app = create_app(engine)
        admission = app.state.service.admission
        visitor = Visitor(app, CHAT, SHORT)
        await asyncio.to_thread(is_made.wait, 30)
        assert admission.num_open == 0, "all tokens are generated"
        draining = asyncio.ensure_future(admission.drain(30))
        await asyncio.sleep(0.02)
        assert not draining.done()
        goes_on.set()
        assert await draining
        await visitor.visit
        assert visitor.sent[0]["status"] == 200

    large_json = answering.large_json
    monkeypatch.setattr(answering, "large_json", make_body_late)
    run(work)


def test_server_drain_ends_after_its_timeout(engine: AsyncEngine) -> None:
    async def work() -> None:
        app = create_app(engine)
        visitor = Visitor(app, CHAT, ENDLESS)
        await until_running(engine, 1)
        assert not await app.state.service.admission.drain(0.01)
        visitor.is_gone.set()
        await visitor.visit

    run(work)


def test_request_cut_off_by_shutdown_gets_an_error() -> None:
    own = AsyncEngine.open("mini", drafter="none", threads=1)

    async def work() -> None:
        app = create_app(own)
        whole, streamed = (Visitor(app, CHAT, {**ENDLESS, "stream": is_streamed}) for is_streamed in (False, True))
        await streamed.got_text.wait()
        await until_running(own, 2)
        await own.close()
        await asyncio.gather(whole.visit, streamed.visit)
        assert whole.sent[0]["status"] == 503
        last = [message["body"] for message in streamed.sent if message.get("body")][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as client:
            assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [503, 503]
            refused = await client.post(CHAT, json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "closed")

    run(work)
    assert not [thread for thread in threading.enumerate() if thread is own._worker.thread]
