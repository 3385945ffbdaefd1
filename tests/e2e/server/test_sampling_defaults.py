"""Sampling parameters that requests leave open, and paths that are not served."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.sampling.params import SamplingParams
from paceline.server.app import UNSERVED, create_app
from paceline.server.generation import Generation
from paceline.server.settings import ServerSettings

USER = [{"role": "user", "content": "Hi"}]
CHATS = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "Hi", "stream": False, "options": {"num_predict": 1}},
}
TEXTS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/api/generate": {"prompt": "Hi", "raw": True, "stream": False, "options": {"num_predict": 1}},
}
RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
Params = Callable[..., SamplingParams]


@pytest.fixture(scope="module")
def advised(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpClient]:
    """A model that recommends sampling parameters, one of which no parameter may have."""
    directory = Path(shutil.copytree(mini_dir, tmp_path_factory.mktemp("advised") / "mini"))
    values = {"do_sample": True, "min_p": 7.0, **RECOMMENDED}
    (directory / "generation_config.json").write_text(json.dumps(values))
    engine = AsyncEngine.open(str(directory), drafter="ngram", threads=1)
    yield HttpClient(create_app(engine, ServerSettings(served_model_name="mini")))
    asyncio.run(engine.close())


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch) -> Params:
    """Sends a request and returns the sampling parameters that it got."""
    seen: list[Any] = []
    collect = Generation.collect

    async def note(self: Generation, request: Any) -> Any:
        seen.append(request.params)
        return await collect(self, request)

    monkeypatch.setattr(Generation, "collect", note)

    def ask(client: HttpClient, path: str, fields: dict[str, Any]) -> SamplingParams:
        answer = client.ask("POST", path, json={"model": "mini", **fields})
        assert answer.status_code == 200, answer.text
        return seen[-1]  # type: ignore[no-any-return]

    return ask


def _chosen(params: SamplingParams) -> dict[str, float]:
    plain = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}


@pytest.mark.parametrize("path", CHATS)
def test_chat_request_without_sampling_uses_recommended_values(params: Params, advised: HttpClient, client: HttpClient, path: str) -> None:
    assert _chosen(params(advised, path, CHATS[path])) == RECOMMENDED
    assert _chosen(params(client, path, CHATS[path])) == {"temperature": 0.7}


@pytest.mark.parametrize(
    ("path", "documented"), [("/v1/completions", {"temperature": 1.0}), ("/api/generate", {"temperature": 0.8, "top_k": 40, "top_p": 0.9})]
)
def test_completion_without_sampling_uses_model_or_documented_values(
    params: Params, advised: HttpClient, client: HttpClient, path: str, documented: dict[str, float]
) -> None:
    assert _chosen(params(advised, path, TEXTS[path])) == RECOMMENDED
    assert _chosen(params(client, path, TEXTS[path])) == documented


def test_sampling_parameters_of_a_request_override_recommended_ones(params: Params, advised: HttpClient) -> None:
    fields = {**CHATS["/v1/chat/completions"], "temperature": 0, "top_k": 0}
    assert _chosen(params(advised, "/v1/chat/completions", fields)) == {"top_p": 0.95, "repetition_penalty": 1.05}


@pytest.mark.parametrize("path", UNSERVED)
def test_known_but_unserved_path_is_status_501_with_advice(client: HttpClient, path: str) -> None:
    method = "DELETE" if path.endswith("delete") else "GET" if path == "/slots" else "POST"
    answer = client.ask(method, path, json={"model": "x", "input": "y"})
    assert answer.status_code == 501
    error = answer.json()["error"]
    text = error if path.startswith("/api") else error["message"]
    assert ("'mini'" in text) is (path.startswith("/api") and "embed" not in path)
    assert ("/v1/completions" in text) is ("embed" in path or path in ("/completion", "/infill"))
    assert ("/metrics" in text) is (path == "/slots")
    assert ("/v1/chat/completions" in text) is ("embed" in path)
