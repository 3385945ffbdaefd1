"""Checks before the routes: host, API key, content type, size. Each test fails without the line that it tests."""

import asyncio
import gzip
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.http_client import HttpClient
from paceline import AsyncEngine, ConfigError
from paceline.server import middleware
from paceline.server.app import create_app
from paceline.server.settings import ServerSettings, keys_in, read_keys

CHAT = "/v1/chat/completions"
KEYS = ("first-key-of-the-test", "second-key-of-the-test")
FIELDS = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
Served = Callable[..., HttpClient]
Messages = list[dict[str, Any]]


def visit(engine: AsyncEngine, settings: ServerSettings, received: Sequence[dict[str, Any]], **headers: str) -> Messages:
    """What is sent back where a client sends these messages and then nothing more."""
    sent: Messages = []
    pending = list(received)

    async def receive() -> dict[str, Any]:
        if pending:
            return pending.pop(0)
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1", "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "root_path": "",
    }
    asyncio.run(asyncio.wait_for(create_app(engine, settings)(scope, receive, send), 30))  # type: ignore[arg-type]
    return sent


def test_each_api_key_is_accepted_and_other_keys_are_status_401(served: Served) -> None:
    client = served(api_keys=KEYS)
    for key in KEYS:
        for headers in ({"Authorization": f"Bearer {key}"}, {"Authorization": f"bearer {key}"}, {"x-api-key": key}):
            assert client.post(CHAT, FIELDS, headers=headers).status_code == 200
    wrong = [{}, {"Authorization": f"Basic {KEYS[0]}"}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {KEYS[0][:-1]}"}]
    for headers in [*wrong, {"x-api-key": f"{KEYS[0]}x"}, {"Authorization": b"Bearer \xff\xfe"}]:
        for path in (CHAT, "/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            answer = client.ask("GET", path, headers=headers)  # also of a path that does not exist, or takes no GET
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
            assert answer.headers["www-authenticate"] == "Bearer"


def test_health_and_ready_need_no_api_key(served: Served) -> None:
    client = served(api_keys=KEYS)
    assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_api_keys_are_compared_in_constant_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are compared with `compare_digest`, by hashes of one length, also after a match."""
    compared: list[tuple[int, int]] = []
    import hmac

    real = hmac.compare_digest
    monkeypatch.setattr("paceline.server.middleware.hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    client = served(api_keys=KEYS)
    for key in ("x", KEYS[0], "y" * 1000):
        client.get("/v1/models", headers={"x-api-key": key})
    assert compared == [(32, 32)] * 6


SPLIT = [
    "localhost:1@evil",
    "localhost:x",
    "localhost:123456",
    "[::1",
    "[::1]evil",
    "::1",
    "127.0.0.1/",
    "localhost evil",
    "localhost,evil",
]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]", "localhost.evil.example", *SPLIT]
)
def test_loopback_server_refuses_foreign_host_headers(client: HttpClient, host: str) -> None:
    answer = client.post(CHAT, FIELDS, headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "mine.example"])
def test_localhost_and_allowed_hosts_are_accepted_host_headers(served: Served, host: str) -> None:
    assert served(allowed_hosts=("Mine.example",)).get("/health", headers={"Host": host}).status_code == 200


def test_server_on_a_public_address_accepts_any_host_header(served: Served) -> None:
    assert served(host="0.0.0.0", insecure=True).get("/health", headers={"Host": "some.example"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "my.example"])
def test_public_listen_address_requires_an_api_key_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        ServerSettings(host=host)
    ServerSettings(host=host, insecure=True)
    ServerSettings(host=host, api_keys=KEYS)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_listen_address_needs_no_api_key(host: str) -> None:
    assert ServerSettings(host=host).is_loopback


def test_default_listen_address_is_127_0_0_1() -> None:
    assert ServerSettings().host == "127.0.0.1"


def test_request_body_over_the_size_limit_is_status_413(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.1)
    settings = ServerSettings(max_body_mb=0.001)
    announced = visit(engine, settings, [], content_length="1001")  # not a byte of it comes
    part = {"type": "http.request", "body": b" " * 400, "more_body": True}
    counted = visit(engine, settings, [part] * 3)
    for start, body, *_ in (announced, counted):
        assert start["status"] == 413
        assert json.loads(body["body"])["error"]["code"] == "body_too_large"


def test_request_body_that_stops_arriving_is_status_408(engine: AsyncEngine) -> None:
    start, body, *_ = visit(engine, ServerSettings(body_timeout_s=0.05), [{"type": "http.request", "body": b"{", "more_body": True}])
    assert (start["status"], json.loads(body["body"])["error"]["code"]) == (408, "body_timeout")


def test_client_that_disconnects_while_sending_gets_no_response(engine: AsyncEngine) -> None:
    assert visit(engine, ServerSettings(), [{"type": "http.disconnect"}]) == []


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"])
def test_content_types_of_cross_site_forms_are_status_415(client: HttpClient, kind: str) -> None:
    """A browser sends these types to any server without asking it first."""
    answer = client.ask("POST", CHAT, content=json.dumps(FIELDS).encode(), headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
def test_compressed_request_body_is_status_415(client: HttpClient, encoding: str) -> None:
    content = gzip.compress(json.dumps(FIELDS).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = client.ask("POST", CHAT, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert answer.headers["accept-encoding"] == "identity"
    plain = client.ask("POST", CHAT, content=json.dumps(FIELDS).encode(), headers={**headers, "Content-Encoding": "identity"})
    assert plain.status_code == 200


def test_cross_origin_requests_get_no_cors_headers_by_default(client: HttpClient) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for answer in (client.ask("OPTIONS", CHAT, headers=headers), client.post(CHAT, FIELDS, headers=headers), client.get("/v1/models")):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert client.ask("OPTIONS", CHAT, headers=headers).status_code == 405


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


def test_allowed_origin_gets_cors_headers_and_preflight(served: Served) -> None:
    """Also if it is refused: a page must be able to read why. A preflight has no key."""
    origin = "http://localhost:3000"
    client = served(allow_origin=(origin,), api_keys=KEYS)
    preflight = client.ask("OPTIONS", CHAT, headers={"Origin": origin, **PREFLIGHT})
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    private = {"Access-Control-Request-Private-Network": "true"}
    preflight = client.ask("OPTIONS", CHAT, headers={"Origin": origin, **PREFLIGHT, **private})
    assert (preflight.status_code, preflight.headers["access-control-allow-private-network"]) == (200, "true")
    assert client.ask("OPTIONS", CHAT, headers={"Origin": "http://other.example", **PREFLIGHT, **private}).status_code == 400
    for headers, status in (({}, 401), ({"x-api-key": KEYS[0]}, 200)):
        answer = client.post(CHAT, FIELDS, headers={"Origin": origin, **headers})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)
    refused = client.post(CHAT, FIELDS, headers={"Origin": origin, "x-api-key": KEYS[0], "Host": "evil.example"})
    assert refused.status_code == 403
    other = {"Origin": "http://evil.example"}
    assert "access-control-allow-origin" not in client.post(CHAT, FIELDS, headers={**other, "x-api-key": KEYS[0]}).headers
    assert client.ask("OPTIONS", CHAT, headers={**other, **PREFLIGHT}).status_code == 400
    anywhere = served(allow_origin=("*",)).post(CHAT, FIELDS, headers=other)
    assert anywhere.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["localhost:3000", "http://a/b", "", "http://a b", "null"])
def test_invalid_allow_origin_setting_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allow_origin is"):
        ServerSettings(allow_origin=(origin,))


def test_responses_have_a_request_id_and_security_headers(client: HttpClient) -> None:
    answers = [client.get("/health"), client.post(CHAT, FIELDS), client.post(CHAT, {**FIELDS, "stream": True}), client.get("/nowhere")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert answer.headers["cache-control"] == "no-store"


LIMITS: list[tuple[str, int, dict[str, Any], str]] = [
    ("max_messages", 2, {"messages": FIELDS["messages"] * 3}, "messages"),
    ("max_prompt_chars", 9, {"messages": [{"role": "user", "content": "x" * 10}]}, "messages"),
    ("max_n", 2, {"n": 3, "temperature": 1}, "n"),
    ("max_stop", 2, {"stop": ["a", "b", "c"]}, "stop"),
    ("max_stop_chars", 5, {"stop": "x" * 6}, "stop"),
    (
        "max_grammar_chars",
        60,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 60}}}},
        "response_format",
    ),
]


@pytest.mark.parametrize(("limit", "value", "more", "name"), LIMITS, ids=[limit for limit, *_ in LIMITS])
def test_server_limit_setting_refuses_larger_request_values(
    served: Served, limit: str, value: int, more: dict[str, Any], name: str
) -> None:
    assert served(**{limit: value}).refusal(CHAT, {**FIELDS, **more})["param"] == name
    served(**{limit: 1000}).json(CHAT, {**FIELDS, **more})


def test_more_than_1024_logit_biases_or_stop_token_ids_are_refused(client: HttpClient) -> None:
    assert client.refusal(CHAT, {**FIELDS, "logit_bias": {str(token_id): 0 for token_id in range(1025)}})["param"] == "logit_bias"
    assert client.refusal(CHAT, {**FIELDS, "stop_token_ids": [5] * 1025})["param"] == "stop_token_ids"


def test_request_over_the_request_timeout_is_status_504(served: Served) -> None:
    client = served(request_timeout_s=0.05)
    endless = {**FIELDS, "max_tokens": 1500, "ignore_eos": True}
    assert client.refusal(CHAT, endless, 504)["code"] == "timeout"
    streamed = client.post(CHAT, {**endless, "stream": True})
    if streamed.status_code == 200:
        *_, last, rest = streamed.text.split("\n\n")
        assert (json.loads(last.removeprefix("data: "))["error"]["code"], rest) == ("timeout", "")
    else:
        assert streamed.status_code == 504


def test_request_contents_and_api_keys_are_never_logged(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "the-secret-of-this-test"
    client = served(headers={"Authorization": f"Bearer {KEYS[0]}"}, api_keys=KEYS)
    hidden = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2, "user": secret}
    client.post(CHAT, hidden)
    client.post(CHAT, {**hidden, "metadata": {secret: secret}})  # names of fields are logged, and nothing within them
    client.post(CHAT, {**hidden, "model": secret})
    client.ask("GET", f"/{secret}?a={secret}", headers={"User-Agent": secret})
    client.get("/v1/models", headers={"Authorization": f"Bearer {secret}-{secret}"})

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(f"cannot use {secret}")

    monkeypatch.setattr("paceline.server.openai_chat.conversation", fail)
    answer = client.post(CHAT, hidden)
    assert answer.status_code == 500
    assert secret not in answer.text
    lines = [
        record.getMessage() + str(record.exc_info or "") for record in caplog.records if record.name.startswith(("paceline", "uvicorn"))
    ]
    assert sum('"route": "/v1/chat/completions"' in line for line in lines) == 4
    assert any(line.startswith("ValueError at ") for line in lines)
    assert not [line for line in lines if secret in line or KEYS[0] in line]


def test_api_key_file_is_read_one_key_per_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\n\n{KEYS[0]}  \n{KEYS[1]}\n")
    assert read_keys(path) == KEYS
    assert KEYS[0] not in repr(ServerSettings(api_keys=KEYS))


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "with a space in the middle\n", "umläut-umläut-umläut\n", "x" * 600])
def test_api_key_file_without_valid_keys_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert not text.strip() or text.strip() not in str(caught.value)
    with pytest.raises(ConfigError, match="read"):
        read_keys(tmp_path / "absent")


def test_empty_api_key_variable_gives_no_key() -> None:
    assert keys_in("", "of nothing") == ()


def test_invalid_api_key_error_names_its_line_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# two\n{KEYS[0]}\n\nshort-1\n")
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert str(caught.value).startswith(f"line 4 of the key file {path} holds a key of 7 characters")
    assert "short-1" not in str(caught.value)
    with pytest.raises(ConfigError, match="line 2 of PACELINE_API_KEYS"):
        keys_in(f"{KEYS[0]}\nshort-1", "of PACELINE_API_KEYS")


def test_short_api_key_is_accepted_with_a_notice() -> None:
    assert ServerSettings(api_keys=(KEYS[0],)).notices == []
    (notice,) = ServerSettings(api_keys=(KEYS[0], "eight-ch")).notices
    assert notice == "a key has 8 characters: use 16 or more where others can reach the server"


def test_openapi_json_is_served_but_docs_and_redoc_are_not(client: HttpClient) -> None:
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
    assert [client.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]


@pytest.mark.parametrize(
    ("body", "problem"),
    [(b"[" * 100_000, "nested"), (b'{"seed": ' + b"9" * 5000 + b"}", "more than 4300 digits"), (b'{"prompt": "\xff"}', "UTF-8")],
    ids=["nested", "digits", "bytes"],
)
def test_malformed_json_body_error_names_the_problem(served: Served, body: bytes, problem: str) -> None:
    answer = served().ask("POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_value", "invalid_json")
    assert problem in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/v1/models", "/models", "/props", "/api/tags", "/", "/openapi.json", "/nowhere", CHAT]
)
def test_head_request_has_the_status_and_type_of_get_without_body(served: Served, path: str) -> None:
    head, get = served().ask("HEAD", path), served().get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
