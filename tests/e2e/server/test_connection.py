"""Connections that are silent, slow, too many, or speak something that only looks like HTTP."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from harness.live_server import LiveServer, head_of, live_server, post_of, read_all, statuses, until
from paceline import AsyncEngine
from paceline.server import middleware

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
FIELDS = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}
LONG = {"messages": MESSAGES, "max_tokens": 1900, "ignore_eos": True, "stream": True}
KEY = "key-of-this-test"
HEALTH = head_of("/health")
SECRET = b"a-secret-of-this-test"
CHUNKED = {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}


@pytest.fixture(scope="module")
def server(engine: AsyncEngine) -> Iterator[LiveServer]:
    with live_server(engine, head_timeout_s=0.5) as server:
        yield server


@pytest.fixture(scope="module")
def closed_server(engine: AsyncEngine) -> Iterator[LiveServer]:
    """One that takes a key."""
    with live_server(engine, api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def small_server(engine: AsyncEngine) -> Iterator[LiveServer]:
    """One that takes bodies of a megabyte."""
    with live_server(engine, max_body_mb=1.0, body_timeout_s=30) as server:
        yield server


def body_of(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode()


def is_ended_now(connection: socket.socket) -> bool:
    """Whether the other side has ended a connection that brings nothing else."""
    connection.setblocking(False)
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


def is_ended(connection: socket.socket, drip: bytes = b"") -> bool:
    """Whether the other side ends, soon, a connection to which a byte comes every tenth of a second."""
    connection.settimeout(0.1)
    for place in range(30):  # turns, not seconds: both sides may be stopped together
        try:
            if drip:
                connection.sendall(drip[place : place + 1])
            if not connection.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("drip", [b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: " + b"x" * 100], ids=["silent", "slow"])
def test_connection_without_a_complete_request_head_times_out(server: LiveServer, drip: bytes) -> None:
    with server.connect() as connection:
        assert is_ended(connection, drip)


def test_connection_with_an_incomplete_second_request_head_times_out(server: LiveServer) -> None:
    """Where uvicorn alone stops its clock at the first byte."""
    with server.connect() as connection:
        connection.sendall(HEALTH)
        assert b"200 OK" in connection.recv(1 << 16)
        assert is_ended(connection, b"GET /health HTTP/1.1\r\n" + b"x" * 100)


def test_request_longer_than_the_head_timeout_is_answered(server: LiveServer) -> None:
    with server.connect() as connection:
        whole = post_of(CHAT, body_of(FIELDS), Connection="close")
        connection.sendall(whole[:-5])
        time.sleep(0.8)
        connection.sendall(whole[-5:])
        assert statuses(read_all(connection)) == [200]


def test_oldest_idle_connection_is_closed_beyond_the_limit(engine: AsyncEngine) -> None:
    """The oldest one is closed: silent clients without a key must not make the server look dead."""
    with live_server(engine, max_connections=3, api_keys=(KEY,)) as server:
        opened = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
        try:
            opened[0].sendall(HEALTH[:20])  # an incomplete head is idle too
            time.sleep(0.4)
            for _ in range(5):
                assert httpx.get(server.url + "/health", timeout=10).status_code == 200
            until(lambda: sum(map(is_ended_now, opened)) >= 9)
        finally:
            for connection in opened:
                connection.close()


def test_recently_used_connection_survives_the_connection_limit(engine: AsyncEngine) -> None:
    """Its client may have sent the next request already."""
    with live_server(engine, max_connections=1) as server, server.connect() as first:
        for _ in range(3):
            first.sendall(HEALTH)
            answer = b""
            while not answer.endswith(b"}"):
                received = first.recv(1 << 16)
                assert received, "the connection was closed"
                answer += received
            assert statuses(answer) == [200]
            assert statuses(server.sent(b"")) == [503]


def test_connection_beyond_the_limit_is_refused_if_all_are_busy(engine: AsyncEngine) -> None:
    with live_server(engine, max_connections=2) as server:
        with server.connect() as first, server.connect() as second:
            for connection in (first, second):
                connection.sendall(post_of(CHAT, body_of(LONG))[:-5])
            time.sleep(0.2)
            refused = server.sent(b"")
            assert statuses(refused) == [503]
            assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "busy"
        until(lambda: statuses(server.sent(head_of("/health", Connection="close"))) == [200])


@pytest.mark.parametrize("num_sent", [0, 50_000, 1_500_000])
@pytest.mark.parametrize("kind", ["length", "chunked"])
def test_request_body_beyond_the_limit_is_refused_at_once(small_server: LiveServer, kind: str, num_sent: int) -> None:
    """Whether its size is announced, passed, or only that of a chunk is known."""
    with small_server.connect() as connection:
        length = {"Content_Length": "2000000"} if kind == "length" else {"Transfer_Encoding": "chunked"}
        head = head_of(CHAT, method="POST", Content_Type="application/json", **length)
        connection.sendall(head + (b"" if kind == "length" else b"%x\r\n" % 2_000_000) + b" " * num_sent)
        started_s = time.monotonic()
        assert statuses(connection.recv(1 << 16)) == [413]
        assert time.monotonic() - started_s < 5


def test_client_that_sends_a_refused_body_to_its_end_reads_status_413(small_server: LiveServer) -> None:
    for _ in range(3):
        answer = small_server.sent(post_of(CHAT, b" " * 20_000_000))
        assert (statuses(answer), b"body_too_large" in answer) == ([413], True)


def test_idle_connections_time_out(server: LiveServer) -> None:
    opened = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        assert httpx.post(server.url + CHAT, json=FIELDS, timeout=30).status_code == 200
        for connection in opened:
            connection.settimeout(10)
            assert connection.recv(1) == b""
    finally:
        for connection in opened:
            connection.close()


def test_client_that_stops_reading_a_stream_is_disconnected(engine: AsyncEngine) -> None:
    """Its place and its cache are free again, although the socket never failed."""
    with live_server(engine, send_timeout_s=0.5, send_bytes=4096) as server, server.connect(receive_bytes=4096) as connection:
        connection.sendall(post_of(CHAT, body_of({**LONG, "n": 4})))
        until(lambda: server.num_open == 4)
        until(lambda: server.num_open == 0, 60)
        assert not read_all(connection).endswith(b"0\r\n\r\n"), "the answer did not end"


def test_client_that_does_not_read_answers_is_disconnected(engine: AsyncEngine) -> None:
    with live_server(engine, send_timeout_s=0.5, send_bytes=4096) as server, server.connect(receive_bytes=4096) as connection:
        asked = 200
        connection.sendall(head_of("/openapi.json") * asked)
        begin = connection.recv(1)  # there is a connection
        until(lambda: not server.connections)
        assert len(statuses(begin + read_all(connection))) < asked


def test_slow_reading_client_gets_the_whole_response(engine: AsyncEngine) -> None:
    with live_server(engine, send_timeout_s=0.5, send_bytes=4096) as server, server.connect(receive_bytes=4096) as connection:
        connection.sendall(head_of("/openapi.json") * 2 + head_of("/openapi.json", Connection="close"))
        answer, started_s = b"", time.monotonic()
        while part := connection.recv(8192):
            answer += part
            time.sleep(0.03)
        assert time.monotonic() - started_s > 1.0, "twice what a client may read nothing"
        assert statuses(answer) == [200] * 3


def test_pipelined_requests_are_answered_once_and_in_order(server: LiveServer) -> None:
    asked = [HEALTH, post_of(CHAT, body_of(FIELDS)), head_of("/nowhere"), post_of(CHAT, body_of({**FIELDS, "stream": True}))]
    answer = server.sent(b"".join([*asked, head_of("/v1/models", Connection="close"), HEALTH]))
    assert statuses(answer) == [200, 200, 404, 200, 200]


@pytest.mark.parametrize("more", [{"X_Long": "x" * 20_000}, {f"X-{place}": "x" for place in range(200)}], ids=["long", "many"])
def test_too_long_http_headers_are_refused(server: LiveServer, more: dict[str, str]) -> None:
    """However they come: h11 alone counts only what it has not understood yet."""
    assert statuses(server.sent(head_of("/health", **more) + HEALTH)) == [431]
    with server.connect() as connection:
        head = head_of("/health", **more)
        for place in range(0, len(head), 5000):
            connection.sendall(head[place : place + 5000])
            time.sleep(0.02)
        assert statuses(read_all(connection)) in ([400], [431])


def test_too_long_request_target_is_refused(server: LiveServer) -> None:
    assert statuses(server.sent(head_of("/health?" + "x" * 20_000) + HEALTH)) == [431]


BODY = body_of(FIELDS)
SMUGGLED: dict[str, bytes] = {
    "two lengths": head_of(CHAT, method="POST", Content_Type="application/json", Content_Length="4", Transfer_Encoding="chunked")
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "lengths that differ": head_of(CHAT, method="POST", Content_Type="application/json").replace(
        b"\r\n\r\n", b"\r\nContent-Length: 3\r\nContent-Length: 30\r\n\r\n"
    ),
    "a list of lengths": head_of(CHAT, method="POST", Content_Type="application/json", Content_Length="3, 30"),
    "a signed length": head_of(CHAT, method="POST", Content_Type="application/json", Content_Length="+3"),
    "a length in hexadecimal": head_of(CHAT, method="POST", Content_Type="application/json", Content_Length="0x3"),
    "another encoding": head_of(CHAT, method="POST", Content_Type="application/json", Transfer_Encoding="gzip, chunked"),
    "an encoding misspelt": head_of(CHAT, method="POST", Content_Type="application/json", Transfer_Encoding="xchunked"),
    "a space in front of the colon": head_of("/health").replace(b"Host:", b"Transfer-Encoding : chunked\r\nHost:"),
    "a chunk's length that is none": head_of(CHAT, method="POST", **CHUNKED) + b"-1\r\n",
    "a chunk longer than it says": head_of(CHAT, method="POST", **CHUNKED) + b"1\r\n{}\r\n0\r\n\r\n",
    "a line of no request": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "two hosts": head_of("/health").replace(b"\r\n\r\n", b"\r\nHost: evil.example\r\n\r\n"),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a zero in a header": head_of("/health", X_Zero="a\0b"),
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_request_smuggling_framing_is_refused(server: LiveServer, name: str) -> None:
    (status,) = statuses(server.sent(SMUGGLED[name] + HEALTH))
    assert status in (400, 501)


def test_unauthorised_client_cannot_send_an_endless_body(closed_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a refused request nothing more is read: the connection ends, and what follows is no request either."""
    monkeypatch.setattr(middleware, "LINGER_S", 0.3)
    for head in (head_of(CHAT, method="POST", Content_Length="100000000"), head_of("/v1/models", **CHUNKED)):
        with closed_server.connect() as connection:
            connection.sendall(head)
            assert is_ended(connection, b"1" * 100)
    smuggled = head_of("/v1/models", Content_Length=str(len(HEALTH))) + HEALTH
    assert statuses(closed_server.sent(smuggled)) == [401]
    kept = head_of("/v1/models") + head_of("/health", Connection="close")
    assert statuses(closed_server.sent(kept)) == [401, 200], "without a body it stays"


def test_invalid_http_is_neither_logged_nor_an_error(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for rest in (
        SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + SECRET + b"\r\n\r\n",
        head_of(CHAT, method="POST", **CHUNKED) + SECRET + b"\r\n",
    ):
        server.sent(rest)
    with server.connect() as connection:  # answered before its body comes, which then is none
        connection.sendall(head_of(CHAT, method="POST", Host="evil.example", **CHUNKED))
        connection.sendall(SECRET + b"\r\n")
        assert statuses(read_all(connection))[0] in (400, 403)
    assert not [record for record in caplog.records if SECRET.decode() in record.getMessage() + str(record.exc_info)]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "openai"), ("/v1/messages", "anthropic"), ("/api/chat", "ollama")])
def test_protocol_errors_have_the_format_of_the_api(server: LiveServer, path: str, kind: str) -> None:
    wrong = {
        400: head_of(path).replace(b"\r\n\r\n", b"\r\nHost: evil.example\r\n\r\n"),
        431: head_of(path, X_Long="x" * 40_000).removesuffix(b"\r\n\r\n"),
        501: head_of(path, method="POST", Content_Type="application/json", Transfer_Encoding="gzip, chunked"),
    }
    for status, request in wrong.items():
        answer = server.sent(request)
        assert statuses(answer) == [status]
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head.lower()
        error = json.loads(body)
        shapes = {"openai": {"error"}, "anthropic": {"type", "error"}, "ollama": {"error"}}
        assert set(error) == shapes[kind]
        assert isinstance(error["error"], str) == (kind == "ollama")
        late = head_of(path, method="POST", **CHUNKED) + b"-1\r\n"  # its head was fine
    assert json.loads(server.sent(late).partition(b"\r\n\r\n")[2]).keys() == shapes[kind]


def test_absolute_request_target_with_a_known_host_is_served(server: LiveServer, closed_server: LiveServer) -> None:
    for target in (f"http://127.0.0.1:{server.port}/health", "HTTP://localhost/health", "https://[::1]:1/health"):
        assert statuses(server.sent(head_of(target, Connection="close"))) == [200]
    assert statuses(server.sent(head_of("http://127.0.0.1", Connection="close"))) == [200], "the page"
    for target, host in (("http://evil.example/health", "127.0.0.1"), ("http://127.0.0.1/health", "evil.example"), ("http:///health", "a")):
        assert statuses(server.sent(head_of(target, Host=host, Connection="close"))) == [403]
    assert statuses(closed_server.sent(head_of("http://127.0.0.1/v1/models", Connection="close"))) == [401]
    assert statuses(closed_server.sent(head_of("http://127.0.0.1/v1/models", Connection="close", x_api_key=KEY))) == [200]


@pytest.mark.parametrize("path", ["//health", "/health/", "ftp://127.0.0.1/health", "/%2e%2e/health"])
def test_path_similar_to_a_public_path_needs_the_api_key(closed_server: LiveServer, path: str) -> None:
    assert statuses(closed_server.sent(head_of(path, Connection="close"))) == [401]
    assert statuses(closed_server.sent(head_of(path, Connection="close", x_api_key=KEY))) == [404], "and leads nowhere"


def test_server_with_open_connections_can_shut_down(engine: AsyncEngine) -> None:
    ended: Callable[[], object]
    with live_server(engine) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        ended = connection.close
        connection.sendall(HEALTH[:10])
    ended()
