"""The front of several replicas, in one process: the same checks and answers as one server, and one clear error where a replica ends."""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

import httpx
import pytest

from harness.http_client import BASE, HttpClient, events_in
from paceline import AsyncEngine
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.server.app import create_app
from paceline.server.asgi_client import ForwardedRequest, batched_parts, call_app
from paceline.server.replicas import front as front_module
from paceline.server.replicas.front import create_front
from paceline.server.replicas.ray_batch import lines_per_block
from paceline.server.replicas.ray_serve import actor_options, ray_cluster
from paceline.server.replicas.replica import Replica, ReplicaLostError, ReplicaPool, ResponseHead, replica_settings
from paceline.server.replicas.routing import choose_replica
from paceline.server.replicas.settings import ClusterSettings
from paceline.server.settings import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FIELDS = {"messages": [{"role": "user", "content": "I need a taxi to the airport."}], "temperature": 0, "max_tokens": 24}
KEY = "a-key-for-the-front"


@dataclass
class LocalPool(ReplicaPool):
    """Applications of one engine in place of replicas. `lost_after` parts of an answer the one that gives it is gone."""

    engine: AsyncEngine
    settings: ServerSettings
    lost_after: int | None = None
    replicas: int = 2
    asked: list[ForwardedRequest] = field(default_factory=list)
    chosen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.apps = {f"replica-{index}": create_app(self.engine, replica_settings(self.settings)) for index in range(self.replicas)}

    async def forward(self, forwarded: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        self.asked.append(forwarded)
        name = forwarded.replica or choose_replica(dict.fromkeys(self.apps, 0), forwarded.key or 0)
        self.chosen[name] += 1
        async with call_app(self.apps[name], forwarded) as answer:
            if self.lost_after == 0:
                raise ReplicaLostError
            head = ResponseHead(answer.status, answer.headers)
            if not head.is_stream and self.lost_after is None:
                yield replace(head, body=await answer.body())
                return
            yield head
            num_parts = 0
            async for part in answer.parts:
                yield part
                num_parts += 1
                if num_parts == self.lost_after:
                    raise ReplicaLostError

    async def num_running(self) -> int:
        return len(self.apps)

    async def names(self) -> list[str]:
        return list(self.apps)

    async def close(self) -> None:
        pass


Front = Callable[..., tuple[HttpClient, LocalPool]]


@pytest.fixture
def front(engine: AsyncEngine) -> Front:
    """A client of a front, and its replicas."""

    def made(headers: dict[str, str] | None = None, lost_after: int | None = None, replicas: int = 2, **settings: object):  # type: ignore[no-untyped-def]
        server = ServerSettings(**settings)
        pool = LocalPool(engine, server, lost_after, replicas)
        return HttpClient(create_front(pool, server, "mini", 16), headers), pool

    return made


def test_front_answers_equal_those_of_a_single_server(front: Front, client: HttpClient) -> None:
    fronted, pool = front()
    for path, fields in (
        (CHAT, FIELDS),
        (CHAT, {**FIELDS, "n": 2, "seed": 1, "temperature": 0.8}),
        (COMPLETIONS, {"prompt": "x", "seed": 2}),
    ):
        assert fronted.json(path, fields)["choices"] == client.json(path, fields)["choices"]
    one, other = fronted.events(CHAT, FIELDS), client.events(CHAT, FIELDS)
    assert [event["choices"] for event in one] == [event["choices"] for event in other]
    assert fronted.get("/v1/models").json()["data"][0]["id"] == "mini"
    assert fronted.post("/tokenize", {"prompt": "x"}).json() == client.post("/tokenize", {"prompt": "x"}).json()
    assert "/v1/chat/completions" in fronted.get("/openapi.json").json()["paths"]
    assert fronted.refusal(CHAT, {**FIELDS, "temprature": 1})["code"] == "unknown_parameter"
    assert fronted.refusal("/v1/nothing", {}, 404)["code"] == "not_found"
    assert len(pool.asked) == 9


def test_front_forwards_query_and_headers_but_no_credentials(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fronted, pool = front({"Authorization": f"Bearer {KEY}", "x-api-key": KEY, "Cookie": "a=b"}, api_keys=(KEY,))
    answer = fronted.post(f"{CHAT}?beta=true&a=%20b", FIELDS, headers={"x-request-id": "mine", "anthropic-beta": "x"})
    (forwarded,) = pool.asked
    assert forwarded.query == b"beta=true&a=%20b"
    assert {(b"x-request-id", b"mine"), (b"anthropic-beta", b"x")} <= set(forwarded.headers)
    assert not [value for _, value in forwarded.headers if KEY.encode() in value or value == b"a=b"]
    assert not {b"host", b"content-length", b"content-type"} & {name for name, _ in forwarded.headers}
    logged = [json.loads(record.getMessage())["id"] for record in caplog.records if '"route"' in record.getMessage()]
    assert logged == [answer.headers["x-request-id"]] * 2, "the replica's line of log and the front's have one id"


def test_later_turns_of_a_chat_reach_the_same_replica(front: Front) -> None:
    fronted, pool = front(replicas=5)
    turns = [*FIELDS["messages"], {"role": "assistant", "content": "Where?"}, {"role": "user", "content": "Here."}]
    for num_turns in (1, 3, 3, 1):
        fronted.json(CHAT, {**FIELDS, "messages": turns[:num_turns], "max_tokens": 2})
    assert len(pool.chosen) == 1


def test_front_authenticates_and_limits_as_a_single_server(front: Front) -> None:
    fronted, pool = front(api_keys=(KEY,), max_body_mb=0.001)
    assert fronted.refusal(CHAT, FIELDS, 401)["code"] == "invalid_api_key"
    headers = {"Authorization": f"Bearer {KEY}"}
    assert fronted.post(CHAT, FIELDS, headers={**headers, "Host": "elsewhere"}).status_code == 403
    assert fronted.post(CHAT, {**FIELDS, "user": "x" * 2000}, headers=headers).status_code == 413
    assert fronted.ask("POST", CHAT, content="{}", headers={**headers, "Content-Type": "text/plain"}).status_code == 415
    assert pool.asked == []
    answer = fronted.post(CHAT, FIELDS, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].count("req-") == 1
    assert answer.headers["content-length"] == str(len(answer.content))
    assert KEY not in repr(replica_settings(ServerSettings(api_keys=(KEY,)))) + str(
        replica_settings(ServerSettings(api_keys=(KEY,))).api_keys
    )


@pytest.mark.parametrize("lost_after", [0, 1])
def test_lost_replica_is_status_503_with_retry_advice(front: Front, lost_after: int) -> None:
    fronted, _ = front(lost_after=lost_after)
    answer = fronted.post(CHAT, FIELDS)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "replica_lost"
    assert "send the request again" in answer.json()["error"]["message"]


def test_stream_of_a_lost_replica_ends_with_an_error_event(front: Front) -> None:
    fronted, _ = front(lost_after=3)
    answer = fronted.post(CHAT, {**FIELDS, "stream": True})
    *events, last, rest = answer.text.split("\n\n")
    assert (answer.status_code, len(events), rest) == (200, 3, "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert front(lost_after=0)[0].refusal(CHAT, {**FIELDS, "stream": True}, 503)["code"] == "replica_lost"


def test_request_without_replicas_is_503_with_retry_after(front: Front) -> None:
    fronted, _ = front(replicas=0)
    assert fronted.refusal(CHAT, FIELDS, 503)["code"] == "no_replica"
    assert (fronted.get("/health").status_code, fronted.get("/ready").status_code) == (200, 503)


def test_front_counts_open_streams_until_they_end(front: Front) -> None:
    fronted, _ = front(max_queue=0)
    admission = fronted.app.state.service.admission

    async def both() -> tuple[int, int, int]:
        transport = httpx.ASGITransport(fronted.app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            answering = asyncio.ensure_future(client.post(CHAT, json={**FIELDS, "stream": True}))
            while not admission.num_open:
                await asyncio.sleep(0.001)
            num_open, draining = admission.num_open, asyncio.ensure_future(admission.drain(30))
            await asyncio.sleep(0)
            refused = await client.post(CHAT, json=FIELDS)
            answer = await answering
            assert await draining
            assert events_in(answer.text)
            assert (await client.get("/ready")).status_code == 503
            return num_open, refused.status_code, admission.num_open

    assert asyncio.run(both()) == (1, 503, 0)


def test_disconnected_client_frees_its_replica(front: Front, engine: AsyncEngine) -> None:
    fronted, _ = front()
    endless = json.dumps({**FIELDS, "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()

    async def leave() -> None:
        async with call_app(fronted.app, ForwardedRequest("POST", CHAT, endless)) as answer:
            assert answer.status == 200
            await anext(answer.parts)
            assert fronted.app.state.service.admission.num_open == 1
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)
        assert fronted.app.state.service.admission.num_open == 0

    asyncio.run(asyncio.wait_for(leave(), 20))


def test_front_merges_the_metrics_of_all_replicas(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    fronted, pool = front()
    fronted.json(CHAT, FIELDS)
    page = fronted.get("/metrics").text
    assert page.count("# TYPE paceline:num_requests_running gauge") == 1
    for name in pool.apps:
        assert f'paceline:num_requests_running{{engine="{name}",model_name="mini"}} 0.0' in page
    pool.lost_after = 0
    assert fronted.get("/metrics").text == ""
    monkeypatch.setattr(front_module, "METRICS_S", 0.0)
    assert fronted.get("/metrics").status_code == 200


def test_replica_yields_status_and_headers_before_the_body() -> None:
    replica = Replica({"model": "mini", "drafter": "none", "threads": 1, "max_num_seqs": 2}, ServerSettings())

    async def answers() -> tuple[list[ResponseHead | bytes], dict[str, object]]:
        await replica.check_health()
        (head,) = [part async for part in replica.forward(ForwardedRequest("POST", CHAT, json.dumps(FIELDS).encode()), key=3)]
        stream = ForwardedRequest("POST", CHAT, json.dumps({**FIELDS, "stream": True}).encode())
        streamed = [part async for part in replica.forward(stream)]
        described = await replica.describe()
        await replica._engine.close()
        with pytest.raises(ConfigError):
            await replica.check_health()
        return [head, *streamed], described

    (head, begin, *parts), described = asyncio.run(answers())
    assert isinstance(head, ResponseHead)
    assert isinstance(begin, ResponseHead)
    assert (head.status, json.loads(head.body)["object"]) == (200, "chat.completion")
    assert (begin.is_stream, begin.body) == (True, b"")
    text = b"".join(part for part in parts if isinstance(part, bytes)).decode()
    told = "".join(choice["delta"].get("content", "") for event in events_in(text) for choice in event["choices"])
    assert told == json.loads(head.body)["choices"][0]["message"]["content"]
    assert (described["model"], described["max_num_seqs"]) == ("mini", 2)


@pytest.mark.parametrize("fails", [False, True])
def test_stream_chunks_close_in_time_are_joined_without_loss(fails: bool) -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        for index in range(30):
            yield b"%d " % index
            await asyncio.sleep(0.001)
        if fails:
            raise ValueError

    async def read() -> list[bytes]:
        parts = []
        with pytest.raises(ValueError) if fails else contextlib.nullcontext():
            async for part in batched_parts(source(), 0.02):
                parts.append(part)
        return parts

    parts = asyncio.run(read())
    assert b"".join(parts) == b"".join(b"%d " % index for index in range(30))
    assert parts[0] == b"0 ", "the first one does not wait"
    assert len(parts) < 20


def test_ray_import_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "0")  # the command sets it if it is unset; monkeypatch restores it
    with (
        pytest.raises(BackendUnavailableError, match=r"need ray: pip install .*ray\]"),
        ray_cluster(ClusterSettings(), {"threads": 1}, part="serve"),
    ):
        pass


def test_replicas_of_one_machine_share_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.server.replicas import settings

    monkeypatch.setattr(settings, "usable_processors", lambda: 9)
    cluster = ClusterSettings(replicas=4)
    assert actor_options(cluster.engine_arguments({"threads": None})) == {"num_cpus": 2, "num_gpus": 0}
    assert cluster.engine_arguments({"threads": 3}) == {"threads": 3}
    with pytest.raises(ConfigError, match="give --threads"):
        replace(cluster, ray_address="auto").engine_arguments({"threads": None})


@pytest.mark.parametrize("name", ["replicas", "max_lead"])
@pytest.mark.parametrize("value", [-1, 10_001, 1.5, True])
def test_cluster_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        ClusterSettings(**{name: value})


def test_batch_block_size_is_large_but_gives_every_replica_some_lines() -> None:
    assert [lines_per_block(*sizes) for sizes in ((1, 2, 8), (80, 2, 8), (10_000, 2, 8), (10_000, 1000, 8))] == [1, 10, 64, 2]
