"""Adapters are selected as models in every API, and loaded by requests where that is enabled."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.adapter_files import write_adapter_of
from harness.http_client import BASE, HttpClient
from paceline import LLM, AsyncEngine, SamplingParams
from paceline.errors import ConfigError
from paceline.server.app import create_app
from paceline.server.settings import ServerSettings

KEY = "k" * 20
ALLOWED = {"adapter_loading": True, "api_keys": (KEY,)}
PROMPT = "The quick brown"
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """The mini with one adapter, `first`; the directory of another is `folder / "second"`."""
    engine = AsyncEngine.open("mini", drafter="ngram", threads=1)
    folder = tmp_path_factory.mktemp("adapters")
    asyncio.run(engine.load_adapter("first", write_adapter_of(engine.loaded.engine.runtime.config, folder / "first", seed=1)))
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def second(engine: AsyncEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter_of(engine.loaded.engine.runtime.config, tmp_path_factory.mktemp("second"), seed=2)


MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, **GREEDY}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY}),
    "responses": ("/v1/responses", {"input": "Hello", "temperature": 0, "max_output_tokens": NUM_TOKENS}),
    "messages": ("/v1/messages", {"messages": MESSAGES, **GREEDY}),
    "ollama-chat": ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"temperature": 0, "num_predict": NUM_TOKENS}}),
    "ollama": ("/api/generate", {"prompt": PROMPT, "stream": False, "options": {"temperature": 0, "num_predict": NUM_TOKENS}}),
}


def text_of(answer: dict[str, Any]) -> str:
    """What was written, without what is another one with every answer."""
    for name in ("choices", "output", "content", "message", "response"):
        if name in answer:
            found = answer[name]
            return str([{**one, "id": None} for one in found] if isinstance(found, list) else found)
    raise AssertionError(answer)


@pytest.mark.parametrize("name", REQUESTS)
def test_adapter_is_selected_as_the_model_in_every_api(name: str, client: HttpClient) -> None:
    path, fields = REQUESTS[name]
    base, adapted = (client.json(path, {"model": model, **fields}) for model in ("mini", "first"))
    assert (base["model"], adapted["model"]) == ("mini", "first")
    assert text_of(base) != text_of(adapted)
    assert text_of(client.json(path, {"model": "first", **fields})) == text_of(adapted)
    assert text_of(client.json(path, {"model": "mini", **fields})) == text_of(base)


@pytest.mark.parametrize("name", REQUESTS)
def test_unknown_model_is_refused_with_the_known_names(name: str, client: HttpClient) -> None:
    path, fields = REQUESTS[name]
    answer = client.post(path, {"model": "second", **fields})
    assert answer.status_code == 404
    assert "send 'mini', or its adapter 'first'" in answer.text


@pytest.mark.parametrize("name", REQUESTS)
def test_adapter_removed_during_a_request_is_not_found(name: str, client: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncEngine, "adapters", ("first", "second"))  # what the request saw
    path, fields = REQUESTS[name]
    assert client.post(path, {"model": "second", **fields}).status_code == 404


def test_models_list_names_the_parent_model_of_an_adapter(client: HttpClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("mini", None), ("first", "mini")]
    assert client.get("/v1/models/first").json()["parent"] == "mini"
    of_ollama = client.get("/api/tags").json()["models"]
    assert [(one["name"], one["details"]["parent_model"]) for one in of_ollama] == [("mini", ""), ("first", "mini")]
    assert client.json("/api/show", {"model": "first:latest"})["details"]["parent_model"] == "mini"


def test_metrics_count_finished_requests_by_adapter(served: Callable[..., HttpClient]) -> None:
    client = served()
    for model in ("mini", "first", "first"):
        client.json("/v1/completions", {"model": model, "prompt": PROMPT, **GREEDY})
    counted = [line for line in client.get("/metrics").text.splitlines() if line.startswith("paceline:adapter_requests_total")]
    assert counted == ['paceline:adapter_requests_total{adapter="first",engine="0",finished_reason="length",model_name="mini"} 2.0']


def test_adapters_are_loaded_and_unloaded_over_http_if_allowed(served: Callable[..., HttpClient], second: Path) -> None:
    client = served({"Authorization": f"Bearer {KEY}"}, **ALLOWED)
    fields = {"lora_name": "second", "lora_path": str(second), "lora_int_id": 2, "load_inplace": False}
    answer = client.post("/v1/load_lora_adapter", fields)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["mini", "first", "second"]
    fields = {"prompt": PROMPT, **GREEDY}
    texts = [client.json("/v1/completions", {"model": model, **fields})["choices"][0]["text"] for model in ("mini", "first", "second")]
    assert len(set(texts)) == 3
    again = client.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": str(second)})
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_loaded")
    answer = client.post("/v1/unload_lora_adapter", {"lora_name": "second", "lora_int_id": 2})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    assert client.post("/v1/completions", {"model": "second", **fields}).status_code == 404


def test_second_load_of_an_adapter_name_is_refused(
    served: Callable[..., HttpClient], engine: AsyncEngine, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = engine.load_adapter

    async def slower(name: str, directory: str) -> None:
        await load(name, directory)
        await load(name, directory)

    monkeypatch.setattr(engine, "load_adapter", slower)
    client = served({"Authorization": f"Bearer {KEY}"}, **ALLOWED)
    answer = client.post("/v1/load_lora_adapter", {"lora_name": "third", "lora_path": str(second)})
    asyncio.run(engine.unload_adapter("third"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_loaded")
    assert answer.json()["error"]["param"] == "lora_name"


def test_adapter_loading_is_off_by_default(client: HttpClient, second: Path) -> None:
    for path, fields in (("load", {"lora_name": "second", "lora_path": str(second)}), ("unload", {"lora_name": "first"})):
        assert client.post(f"/v1/{path}_lora_adapter", fields).status_code == 404
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["mini", "first"]


def test_adapter_loading_without_api_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter_loading lets requests read directories of this machine and needs a key"):
        ServerSettings(adapter_loading=True)


WRONG: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "own-name": ("load", {"lora_name": "mini", "lora_path": "/x"}, 400, "lora_name"),
    "no-name": ("load", {"lora_name": " ", "lora_path": "/x"}, 400, "lora_name"),
    "no-path": ("load", {"lora_name": "x", "lora_path": ""}, 400, "lora_path"),
    "nowhere": ("load", {"lora_name": "x", "lora_path": "/nowhere/at/all"}, 400, "lora_path"),
    "zero": ("load", {"lora_name": "x", "lora_path": "a\0b"}, 400, "lora_path"),
    "more": ("load", {"lora_name": "x", "lora_path": "/x", "lora_nam": 4}, 400, "lora_nam"),
    "own-tag": ("load", {"lora_name": "mini:latest", "lora_path": "/x"}, 400, "lora_name"),
    "in-place": ("load", {"lora_name": "x", "lora_path": "/x", "load_inplace": True}, 400, "load_inplace"),
    "unknown": ("unload", {"lora_name": "second"}, 404, "lora_name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_adapter_request_has_status_and_parameter_name(name: str, served: Callable[..., HttpClient]) -> None:
    path, fields, status, parameter = WRONG[name]
    answer = served({"x-api-key": KEY}, **ALLOWED).post(f"/v1/{path}_lora_adapter", fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, parameter)


def test_adapter_larger_than_memory_is_status_507(served: Callable[..., HttpClient], second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, fields = served({"x-api-key": KEY}, **ALLOWED), {"lora_name": "second", "lora_path": str(second)}
    with monkeypatch.context() as patch:
        patch.setattr("paceline.engine.loader.available_memory_bytes", lambda: 100)
        answer = client.post("/v1/load_lora_adapter", fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (507, "server_error", "out_of_memory")
    assert "GB while it is read, 1e-07 GB are free: use an adapter of a lower rank, remove others" in error["message"]
    assert client.post("/v1/load_lora_adapter", fields).status_code == 200
    assert client.post("/v1/unload_lora_adapter", fields).status_code == 200


def test_adapter_loading_without_the_api_key_is_status_401(served: Callable[..., HttpClient], second: Path) -> None:
    answer = served(**ALLOWED).post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": str(second)})
    assert answer.status_code == 401


@pytest.mark.parametrize("name", ["first", "first:latest"])
def test_adapter_with_the_served_model_name_is_refused(name: str, engine: AsyncEngine) -> None:
    with pytest.raises(ConfigError, match="an adapter is called 'first', as the model is"):
        create_app(engine, ServerSettings(served_model_name=name))


@pytest.mark.parametrize(("drain_s", "status"), [(30.0, 200), (0.05, 503)])
def test_drain_waits_for_a_loading_adapter(
    drain_s: float, status: int, engine: AsyncEngine, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, goes_on = create_app(engine, ServerSettings(**ALLOWED)), asyncio.Event()

    async def load(name: str, directory: str) -> None:
        await goes_on.wait()

    async def work() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=BASE, headers={"x-api-key": KEY}) as client:
            fields = {"lora_name": "second", "lora_path": str(second)}
            loading = asyncio.ensure_future(client.post("/v1/load_lora_adapter", json=fields))
            await asyncio.sleep(0.2)
            draining = asyncio.ensure_future(app.state.service.admission.drain(drain_s))
            await asyncio.sleep(0.2)
            assert draining.done() == (status == 503)
            if status == 200:
                goes_on.set()
            answer = await asyncio.wait_for(loading, 10)
            assert (answer.status_code, await draining) == (status, status == 200)
            assert status == 200 or answer.json()["error"]["code"] == "shutting_down"

    monkeypatch.setattr(engine, "load_adapter", load)
    asyncio.run(work())


def test_invalid_adapter_path_or_name_is_refused(second: Path) -> None:
    with LLM("mini", drafter="none", threads=1) as llm:
        for path in (None, 3, "", b""):
            with pytest.raises(ConfigError, match="the adapter's directory is "):
                llm.load_adapter("q", path)  # type: ignore[arg-type]
        for name in (None, ["q"], ""):
            with pytest.raises(ConfigError, match="the adapter's name is"):
                llm.load_adapter(name, second)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="there is no adapter"):
                llm.unload_adapter(name)  # type: ignore[arg-type]


def test_adapter_given_at_load_answers_as_the_merged_model(second: Path) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    with LLM("mini", drafter="none", threads=1, dtype="f32", adapters={"second": second}) as llm:
        beside = llm.generate(PROMPT, params, adapter="second")[0].token_ids
        assert llm.adapters == ("second",)
    with LLM("mini", drafter="none", threads=1, dtype="f32", merge_adapter=second) as llm:
        assert llm.generate(PROMPT, params)[0].token_ids == beside
        assert any("is merged into the weights: tokens may differ" in notice for notice in llm.notices)
