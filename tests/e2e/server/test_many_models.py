"""Several models in one server: loaded when they are requested, and unloaded for another or when they are idle."""

import asyncio
import gc
import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from harness.apis import APIS
from harness.http_client import BASE, HttpClient
from harness.live_server import until as wait_until
from harness.server_process import Server
from harness.two_models import write_two_models
from paceline import LLM, AsyncEngine, SamplingParams
from paceline.errors import CapacityError, ConfigError
from paceline.server import model_pool
from paceline.server.app import create_pool_app
from paceline.server.asgi_client import ForwardedRequest, call_app
from paceline.server.model_pool import ModelPool
from paceline.server.settings import ServerSettings

PROMPT = "Once there was a"
FIELDS = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
PATH = "/v1/completions"
ARGUMENTS = {"drafter": "none", "threads": 1, "max_num_seqs": 4, "max_model_len": 256}
Ask = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture(scope="module")
def names(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models with one tokenizer and different weights: the mini, and its draft model."""
    return write_two_models(mini_dir, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(names: list[str]) -> dict[str, str]:
    """The text of each model by direct generation."""
    params = SamplingParams(max_tokens=12, temperature=0)
    found = {Path(name).name: LLM(name, **ARGUMENTS).generate(PROMPT, params)[0].text for name in names}
    assert found["alpha"] != found["beta"]
    return found


@asynccontextmanager
async def serving(names: list[str], *, collects_all: bool = False, **settings: Any) -> AsyncIterator[tuple[ModelPool, Ask]]:
    """A pool, and a function that sends a request to its application.

    Args:
        collects_all: unloading collects the objects of all tests of this process too, which takes most of a second.
    """
    pool = ModelPool.of_names(names, ARGUMENTS, ServerSettings(**settings))
    transport = httpx.ASGITransport(create_pool_app(pool), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=BASE, timeout=60) as client:

        async def ask(path: str, fields: dict[str, Any] | None = None, method: str | None = None) -> httpx.Response:
            return await client.request(method or ("GET" if fields is None else "POST"), path, json=fields)

        with pytest.MonkeyPatch.context() as patch:
            if not collects_all:
                quick = SimpleNamespace(get_freeze_count=lambda: 0, unfreeze=lambda: None, collect=gc.collect)
                patch.setattr(model_pool, "gc", quick)
            try:
                yield pool, ask
            finally:
                await pool.close()


async def states(ask: Ask) -> dict[str, str]:
    found: dict[str, str] = (await ask("/health")).json()["models"]
    return found


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.02)


def test_alternating_models_in_a_pool_of_one_are_all_answered(names: list[str], expected: dict[str, str]) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            order = ["alpha", "beta", "beta", "alpha"] * 4
            answers = await asyncio.gather(*(ask(PATH, {**FIELDS, "model": name}) for name in order))
            assert [answer.status_code for answer in answers] == [200] * len(order)
            assert [answer.json()["model"] for answer in answers] == order
            assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected[name] for name in order]
            assert sorted((await states(ask)).values()) == ["loaded", "unloaded"]
            assert all(model.num_requests == 0 and not model.waiting for model in pool.models)
            assert pool.admission.num_open == 0
            metrics = (await ask("/metrics")).text
            for name in ("alpha", "beta"):
                assert f'paceline:model_loads_total{{engine="0",model_name="{name}"}} 1.0' in metrics
                assert f'paceline:request_success_total{{engine="0",finished_reason="length",model_name="{name}"}} 8.0' in metrics
                route = f'paceline:http_requests_total{{engine="0",model_name="{name}",route="{PATH}",status="200"}} 8.0'
                assert route in metrics

    asyncio.run(run())


def test_model_pool_loads_a_waiting_model_despite_requests_for_another(
    names: list[str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            facts = {id(model.engine): model.facts for model in pool.models}  # while a file's headers are read, others are answered
            monkeypatch.setattr(model_pool.ModelFacts, "read", lambda engine: facts[id(engine)])
            await ask(PATH, {**FIELDS, "model": "alpha"})
            is_over, num_after = asyncio.Event(), 0

            async def keep_asking() -> None:
                nonlocal num_after
                while not is_over.is_set():
                    answer = await ask(PATH, {**FIELDS, "model": "alpha"})
                    assert answer.json()["choices"][0]["text"] == expected["alpha"]
                    num_after += (await states(ask))["beta"] == "loading"

            workers = [asyncio.ensure_future(keep_asking()) for _ in range(4)]
            await asyncio.sleep(0.2)
            answer = await ask(PATH, {**FIELDS, "model": "beta"})
            is_over.set()
            assert answer.json()["choices"][0]["text"] == expected["beta"]
            assert num_after <= 4, "only those that ran when it came may be answered before it"
            await asyncio.gather(*workers)

    asyncio.run(run())


@pytest.mark.long
def test_model_pool_finishes_a_running_stream_before_unloading_its_model(names: list[str], expected: dict[str, str]) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            body = json.dumps({**FIELDS, "model": "alpha", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
            app = create_pool_app(pool)
            async with call_app(app, ForwardedRequest("POST", PATH, body)) as stream:
                first = await anext(stream.parts)
                asked = asyncio.ensure_future(ask(PATH, {**FIELDS, "model": "beta"}))
                await until(lambda: pool.models[0].is_closing)
                assert (await ask("/v1/models")).json()["data"][1]["status"] == {"value": "loading"}
                rest = b"".join([part async for part in stream.parts])
            events = [json.loads(line.removeprefix("data: ")) for line in (first + rest).decode().split("\n\n")[:-2]]
            text = "".join(event["choices"][0]["text"] for event in events)
            whole = await ask(PATH, {**FIELDS, "model": "alpha", "max_tokens": 200, "ignore_eos": True})
            assert text == whole.json()["choices"][0]["text"]
            assert (await asked).json()["choices"][0]["text"] == expected["beta"]

    asyncio.run(run())


def test_model_pool_keeps_serving_if_the_waiting_client_disconnects(names: list[str], expected: dict[str, str]) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            body = json.dumps({**FIELDS, "model": "alpha", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
            async with call_app(create_pool_app(pool), ForwardedRequest("POST", PATH, body)) as stream:
                await anext(stream.parts)
                asked = asyncio.ensure_future(ask(PATH, {**FIELDS, "model": "beta"}))
                await until(lambda: pool.models[0].is_closing)
                asked.cancel()
                answer = await asyncio.wait_for(ask(PATH, {**FIELDS, "model": "alpha"}), 20)  # while the stream is still open
                assert answer.json()["choices"][0]["text"] == expected["alpha"]
                assert pool.models[0].num_requests == 1

    asyncio.run(run())


def test_model_pool_keeps_two_models_loaded_within_max_loaded(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(names, max_loaded=2) as (pool, ask):
            for name in ("alpha", "beta", "alpha"):
                await ask(PATH, {**FIELDS, "model": name})
            assert set((await states(ask)).values()) == {"loaded"}
            assert [model.snapshot.num_loads for model in pool.models] == [1, 1]
            await pool.close()
        monkeypatch.setattr("paceline.server.model_pool.available_memory_bytes", lambda: 1_000_000)
        async with serving(names, max_loaded=2) as (_, ask):
            for name in ("alpha", "beta"):
                await ask(PATH, {**FIELDS, "model": name})
            assert await states(ask) == {"alpha": "unloaded", "beta": "loaded"}

    asyncio.run(run())


def test_model_pool_unloads_a_model_if_loading_runs_out_of_memory(names: list[str]) -> None:
    async def run() -> None:
        async with serving(names, max_loaded=2) as (pool, ask):
            alpha, beta = pool.models
            load = beta.open
            assert load is not None

            def open_alone() -> AsyncEngine:
                if alpha.service is not None:
                    raise CapacityError("the weights do not fit in memory: close programs")
                return load()

            beta.open = open_alone
            await ask(PATH, {**FIELDS, "model": "alpha"})
            assert (await ask(PATH, {**FIELDS, "model": "beta"})).status_code == 200
            assert await states(ask) == {"alpha": "unloaded", "beta": "loaded"}

    asyncio.run(run())


def test_model_that_is_held_a_moment_longer_is_freed_before_another_loads(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(names, collects_all=True) as (pool, ask):
            await ask(PATH, {**FIELDS, "model": "alpha"})
            alpha, beta = pool.models
            assert alpha.service is not None
            held = [alpha.service.engine.loaded.engine.runtime]
            runtime, free_memory, load, was_held = weakref.ref(held[0]), model_pool._free_memory, beta.open, list[bool]()
            assert load is not None

            def free() -> None:
                free_memory()
                held.clear()

            def open_recorded() -> AsyncEngine:
                was_held.append(runtime() is not None)
                return load()

            monkeypatch.setattr(model_pool, "_free_memory", free)
            beta.open = open_recorded
            assert (await ask(PATH, {**FIELDS, "model": "beta"})).status_code == 200
            assert was_held == [False]

    asyncio.run(run())


def test_model_pool_unloads_an_idle_model_and_loads_it_again(names: list[str], expected: dict[str, str]) -> None:
    async def run() -> None:
        async with serving(names, unload_after="300ms", collects_all=True) as (pool, ask):
            for num_loads in (1, 2):
                answer = await ask(PATH, {**FIELDS, "model": "alpha"})
                assert answer.json()["choices"][0]["text"] == expected["alpha"]
                assert pool.models[0].service is not None
                engine = weakref.ref(pool.models[0].service.engine)
                await asyncio.sleep(0.1)
                assert (await states(ask))["alpha"] == "loaded"
                await until(lambda: pool.models[0].service is None)
                await until(lambda engine=engine: engine() is None)  # type: ignore[misc]  # nothing keeps its memory
                assert pool.models[0].snapshot.num_loads == num_loads

    asyncio.run(run())


@pytest.mark.long
def test_ollama_keep_alive_sets_when_a_model_is_unloaded(names: list[str]) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            fields = {"model": "alpha:latest", "prompt": PROMPT, "options": {"num_predict": 4}, "stream": False}
            loaded = await ask("/api/generate", {"model": "alpha", "keep_alive": "5m"})
            assert (loaded.json()["done_reason"], (await states(ask))["alpha"]) == ("load", "loaded")
            (running,) = (await ask("/api/ps")).json()["models"]
            assert running["name"] == "alpha"
            assert running["expires_at"] < "9999"
            await ask("/api/generate", {**fields, "keep_alive": -1})
            assert (await ask("/api/ps")).json()["models"][0]["expires_at"].startswith("9999")
            assert (await ask("/api/generate", {**fields, "keep_alive": 0})).status_code == 200
            await until(lambda: pool.models[0].service is None)
            for path, empty in (("/api/generate", "response"), ("/api/chat", "message")):
                await ask("/api/generate", fields)
                answer = (await ask(path, {"model": "alpha", "keep_alive": "0s"})).json()
                assert (answer["done_reason"], answer["done"], empty in answer) == ("unload", True, True)
                await until(lambda: pool.models[0].service is None)
            await ask("/api/generate", {"model": "beta", "keep_alive": 0})
            assert await states(ask) == {"alpha": "unloaded", "beta": "unloaded"}, "unloading must not load"
            wrong = await ask("/api/generate", {**fields, "keep_alive": "soon"})
            assert (wrong.status_code, "keep_alive" in wrong.json()["error"]) == (400, True)

    asyncio.run(run())


def test_model_that_fails_to_load_fails_only_its_own_requests(names: list[str], expected: dict[str, str], tmp_path: Path) -> None:
    async def run() -> None:
        broken = tmp_path / "broken"
        shutil.copytree(names[1], broken)
        async with serving([names[0], str(broken)]) as (pool, ask):
            await ask(PATH, {**FIELDS, "model": "alpha"})
            weights = broken / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1000])
            answers = await asyncio.gather(*(ask(PATH, {**FIELDS, "model": "broken"}) for _ in range(3)))
            for answer in answers:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["type"]) == (500, "model_not_loaded", "server_error")
                assert "the model 'broken' cannot be loaded" in error["message"]
                assert str(tmp_path) not in error["message"]
            assert pool.models[0].snapshot.num_loads == 1
            answer = await ask(PATH, {**FIELDS, "model": "alpha"})
            assert answer.json()["choices"][0]["text"] == expected["alpha"]
            assert await states(ask) == {"alpha": "loaded", "broken": "unloaded"}, "headers are checked before another is unloaded"

            def fail() -> AsyncEngine:
                raise CapacityError("the weights do not fit in memory: close programs")

            shutil.copy(Path(names[1]) / "model.safetensors", weights)
            pool.models[1].open = fail
            full = await ask("/api/generate", {"model": "broken", "prompt": PROMPT})
            assert (full.status_code, full.json()["error"].endswith("close programs")) == (507, True)
            assert (await ask(PATH, {**FIELDS, "model": "alpha"})).status_code == 200

    asyncio.run(run())


@pytest.fixture
def slow(names: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Loading waits for this event."""
    may_load, load = threading.Event(), AsyncEngine.open

    def open_slowly(**arguments: Any) -> AsyncEngine:
        assert may_load.wait(30)
        return load(**arguments)

    monkeypatch.setattr(AsyncEngine, "open", open_slowly)
    yield may_load
    may_load.set()


def test_server_answers_other_requests_while_a_model_loads(names: list[str], slow: threading.Event) -> None:
    async def run() -> None:
        async with serving(names, max_queue=0) as (pool, ask):
            asked = [asyncio.ensure_future(ask(PATH, {**FIELDS, "model": "alpha"})) for _ in range(4)]
            await until(lambda: len(pool.models[0].waiting) == 4)
            for path in ("/health", "/ready", "/v1/models", "/api/tags", "/api/ps", "/props?model=beta", "/metrics", "/"):
                assert (await ask(path)).status_code == 200
            assert await states(ask) == {"alpha": "loading", "beta": "unloaded"}
            assert (await ask("/api/show", {"model": "beta"})).json()["template"]
            full = await ask(PATH, {**FIELDS, "model": "beta"})
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            slow.set()
            assert [(await answer).status_code for answer in asked] == [200] * 4

    asyncio.run(run())


def test_client_that_disconnects_during_model_loading_leaves_no_request(names: list[str], slow: threading.Event) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            app, body = create_pool_app(pool), json.dumps({**FIELDS, "model": "alpha"}).encode()
            gone = asyncio.ensure_future(_read(app, body))
            await until(lambda: len(pool.models[0].waiting) == 1)
            behind = asyncio.ensure_future(ask(PATH, {**FIELDS, "model": "beta"}))
            await until(lambda: len(pool.models[1].waiting) == 1)
            gone.cancel()
            await asyncio.wait([gone])
            slow.set()
            assert (await behind).status_code == 200
            assert pool.models[0].num_requests == 0
            assert pool.admission.num_open == 0

    asyncio.run(run())


def test_model_is_unloaded_if_its_client_disconnects_during_loading(names: list[str], slow: threading.Event) -> None:
    async def run() -> None:
        async with serving(names, unload_after="10ms") as (pool, _):
            app, body = create_pool_app(pool), json.dumps({**FIELDS, "model": "alpha"}).encode()
            gone = asyncio.ensure_future(_read(app, body))
            await until(lambda: len(pool.models[0].waiting) == 1)
            await asyncio.sleep(0.2)  # it is being loaded
            gone.cancel()
            await asyncio.wait([gone])
            slow.set()
            await until(lambda: pool.models[0].snapshot.num_loads == 1)
            await until(lambda: pool.models[0].state == "unloaded")

    asyncio.run(run())


def test_never_used_model_is_unloaded() -> None:
    with closing(Server("--unload-after", "10ms", "--max-model-len", "256", "--quiet")) as server:
        wait_until(lambda: httpx.get(server.url + "/health").json()["models"] == {"mini": "unloaded"})


def test_shutdown_answers_a_request_whose_model_is_being_loaded(names: list[str], slow: threading.Event) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            asked = asyncio.ensure_future(ask(PATH, {**FIELDS, "model": "alpha"}))
            await until(lambda: len(pool.models[0].waiting) == 1)
            drained = asyncio.ensure_future(pool.admission.drain(30))
            await asyncio.sleep(0)
            assert (await ask(PATH, {**FIELDS, "model": "beta"})).json()["error"]["code"] == "draining"
            slow.set()
            assert (await asked).status_code == 200
            assert await drained

    asyncio.run(run())


def test_ollama_durations_include_loading(names: list[str], slow: threading.Event) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            asked = asyncio.ensure_future(ask("/api/generate", {"model": "alpha", "prompt": PROMPT, "raw": True, "stream": False}))
            await until(lambda: len(pool.models[0].waiting) == 1)
            await asyncio.sleep(0.1)
            slow.set()
            answer = (await asked).json()
            assert answer["load_duration"] >= 0.1 * 1e9
            assert answer["total_duration"] >= answer["load_duration"] + answer["eval_duration"]
            again = (await ask("/api/generate", {"model": "alpha", "prompt": PROMPT, "raw": True, "stream": False})).json()
            assert again["load_duration"] == 0

    asyncio.run(run())


def test_info_on_a_model_whose_files_vanished_names_the_reason(mini_dir: Path, tmp_path: Path) -> None:
    async def run() -> None:
        models = write_two_models(mini_dir, tmp_path)
        async with serving(models) as (_, ask):
            shutil.rmtree(models[0])
            for answer in (await ask("/api/show", {"model": "alpha"}), await ask("/props?model=alpha")):
                assert answer.status_code == 500
                assert "'alpha' cannot be loaded" in answer.text
                assert "engine" not in answer.text

    asyncio.run(run())


async def _read(app: Any, body: bytes) -> bytes:
    async with call_app(app, ForwardedRequest("POST", PATH, body)) as answer:
        return await answer.body()


def test_closing_the_model_pool_fails_waiting_requests(names: list[str], slow: threading.Event) -> None:
    async def run() -> None:
        async with serving(names) as (pool, ask):
            asked = asyncio.ensure_future(ask(PATH, {**FIELDS, "model": "alpha"}))
            await until(lambda: len(pool.models[0].waiting) == 1)
            slow.set()
            await pool.close()
            answer = await asked
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")

    asyncio.run(run())


def test_waiting_for_a_model_counts_toward_the_request_timeout(names: list[str], slow: threading.Event) -> None:
    async def run() -> None:
        async with serving(names, request_timeout_s=0.2) as (_, ask):
            answer = await ask(PATH, {**FIELDS, "model": "alpha"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            slow.set()

    asyncio.run(run())


@pytest.mark.parametrize("name", APIS)
def test_every_api_selects_the_model_by_name(names: list[str], name: str) -> None:
    pool = ModelPool.of_names(names, ARGUMENTS, ServerSettings())
    client, api = HttpClient(create_pool_app(pool)), APIS[name]
    fields = api.fields([{"role": "user", "content": "Hi"}], max_tokens=4)
    unknown = client.post(api.path, {**fields, "model": "gamma"})
    assert unknown.status_code == 404
    assert "send 'alpha', or 'beta'" in api.message_of(unknown.json())

    async def run() -> None:
        async with serving(names) as (_, ask):
            answer = await ask(api.path, {**fields, "model": "beta", "stream": False})
            assert answer.json()["model"] == "beta"
            assert (await states(ask))["beta"] == "loaded"

    asyncio.run(run())


def test_model_list_reports_size_and_quantisation_before_loading(names: list[str]) -> None:
    client = HttpClient(create_pool_app(ModelPool.of_names(names, ARGUMENTS, ServerSettings())))
    listed = client.get("/v1/models").json()["data"]
    tags = client.get("/api/tags").json()["models"]
    for name, one, tag in zip(names, listed, tags, strict=True):
        size = os.path.getsize(Path(name) / "model.safetensors")
        assert (one["id"], one["status"], one["max_model_len"]) == (Path(name).name, {"value": "unloaded"}, 256)
        assert (one["meta"]["size"], one["meta"]["quantization"]) == (size, "bf16")
        assert 0.9 < one["meta"]["n_params"] * 2 / size <= 1
        assert (tag["name"], tag["size"]) == (one["id"], size)
        assert tag["details"]["format"] == "safetensors"
        shown = client.json("/api/show", {"model": tag["name"]})
        assert shown["model_info"]["general.parameter_count"] == one["meta"]["n_params"]
        assert client.get(f"/v1/models/{one['id']}").json() == one
        assert client.get(f"/props?model={one['id']}").json()["chat_template"] == shown["template"] != ""
    assert client.get("/api/ps").json()["models"] == []
    assert tags[0]["digest"] != tags[1]["digest"]


def test_health_of_a_server_with_api_keys_names_no_model(names: list[str]) -> None:
    client = HttpClient(create_pool_app(ModelPool.of_names(names, ARGUMENTS, ServerSettings(api_keys=("a-key-of-this-test",)))))
    assert client.get("/health").json() == {"status": "ok"}


def test_request_without_model_field_uses_the_first_model(names: list[str], expected: dict[str, str]) -> None:
    async def run() -> None:
        async with serving(names) as (_, ask):
            answer = (await ask(PATH, FIELDS)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == ("alpha", expected["alpha"])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "arguments", "text"),
    [
        ({"served_model_name": "one"}, {}, "served_model_name belongs to one model, and 2 are served"),
        ({}, {"adapters": {"sql": "somewhere"}}, "adapters belongs to one model, and 2 are served"),
        ({"adapter_loading": True, "api_keys": ("a-key-of-this-test",)}, {}, "adapter_loading belongs to one model"),
    ],
)
def test_single_model_options_are_refused_for_several_models(
    names: list[str], settings: dict[str, Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        ModelPool.of_names(names, {**ARGUMENTS, **arguments}, ServerSettings(**settings))


def test_two_models_with_the_same_name_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="two models are called 'alpha'"):
        ModelPool.of_names([names[0], names[0]], ARGUMENTS, ServerSettings())


def test_keep_alive_is_ignored_by_a_server_of_one_model(names: list[str]) -> None:
    engine = AsyncEngine.open(names[0], **ARGUMENTS)  # type: ignore[arg-type]
    pool = ModelPool.of_engine(engine, ServerSettings(), lambda: engine)
    client = HttpClient(create_pool_app(pool))
    answer = client.post("/api/generate", {"model": "alpha", "keep_alive": 0})
    assert answer.json()["done_reason"] == "load"
    assert answer.headers["X-Paceline-Ignored-Fields"] == "keep_alive"
    time.sleep(0.1)
    assert pool.models[0].state == "loaded"
    asyncio.run(pool.close())
