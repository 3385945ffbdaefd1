"""Sends requests to a server application within this process, without a socket."""

import asyncio
import json
from typing import Any

import httpx
from fastapi import FastAPI

BASE = "http://127.0.0.1:8000"


class HttpClient:
    """Sends requests one by one, each in an event loop of its own."""

    def __init__(self, app: FastAPI, headers: dict[str, str] | None = None) -> None:
        self.app, self.headers = app, headers or {}

    def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=BASE, timeout=60) as client:
                headers = {**self.headers, **arguments.pop("headers", {})}
                return await client.request(method, path, headers=headers, **arguments)

        return asyncio.run(send())

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.ask("GET", path, **arguments)

    def post(self, path: str, fields: Any, **arguments: Any) -> httpx.Response:
        return self.ask("POST", path, json=fields, **arguments)

    def json(self, path: str, fields: Any) -> dict[str, Any]:
        """The answer to a request that is right."""
        answer = self.post(path, fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def refusal(self, path: str, fields: Any, status: int = 400) -> dict[str, Any]:
        """The error to a request that is wrong."""
        answer = self.post(path, fields)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def events(self, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, in front of [DONE]."""
        answer = self.post(path, {**fields, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_in(answer.text)


def events_in(text: str) -> list[dict[str, Any]]:
    """The events in a stream's text, which ends with [DONE]."""
    *lines, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]
