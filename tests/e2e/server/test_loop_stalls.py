"""Attacks next to a running stream: no request blocks the event loop, and with it every other client, for longer than 50 ms."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import httpx
import pytest

from harness.live_server import head_of, post_of
from harness.server_process import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_STALL_S = 0.05
MAX_WAIT_S = 0.5  # of a gap in which the server uses no processor: a busy machine has such gaps too
NUM_TRIES = 3  # a stall is only counted if every try has it
USER = {"role": "user", "content": "Hello"}
MB = 1_000_000


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], "max_tokens": 1, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hello", "max_tokens": 1, **fields}).encode()


def tool(index: int) -> dict[str, Any]:
    properties = {f"field_{place}": {"type": "string", "description": "x" * 60} for place in range(100)}
    return {"type": "function", "function": {"name": f"tool_{index}", "parameters": {"type": "object", "properties": properties}}}


def schema(num_properties: int) -> dict[str, Any]:
    properties = {f"field_{place}": {"type": "array", "items": {"enum": ["a", "b", place]}} for place in range(num_properties)}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": properties}}}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (7 * MB)}}
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "blanks in a message": (CHAT, lambda: chat(messages=[{**USER, "content": " " * 3_900_000}])),
    "blanks in a prompt": (TEXT, lambda: text(prompt=" " * 3_900_000)),
    "blanks between fields": (CHAT, lambda: chat().replace(b", ", b"," + b" " * (7 * MB), 1)),
    "words in a prompt": (TEXT, lambda: text(prompt="word " * 700_000)),
    "100,000 messages": (CHAT, lambda: chat(messages=[USER] * 100_000)),
    "4,000 messages": (CHAT, lambda: chat(messages=[USER] * 4000)),
    "100,000 wrong messages": (CHAT, lambda: chat(messages=[1] * 100_000)),
    "100,000 parts of a message": (CHAT, lambda: chat(messages=[{**USER, "content": [{"type": "text", "text": "a"}] * 100_000}])),
    "40,000 parts of a message": (CHAT, lambda: chat(messages=[{**USER, "content": [{"type": "text", "text": "a"}] * 40_000}])),
    "a million wrong parts": (CHAT, lambda: chat(messages=[{**USER, "content": [1] * MB}])),
    "nested lists": (CHAT, lambda: b"[" * MB),
    "nested objects": (CHAT, lambda: b'{"a":' * 200_000),
    "nested lists in a tool": (CHAT, lambda: chat(tools=[{**tool(0), "x": 0}]).replace(b'"x": 0', b'"x":' + b"[" * 900 + b"]" * 900)),
    "empty lists": (CHAT, lambda: b'{"messages":[' + b"[]," * (2 * MB) + b"1]}"),
    "long numbers": (CHAT, lambda: b'{"messages":[' + (b"9" * 4300 + b",") * 1700 + b"1]}"),
    "too long a number": (CHAT, lambda: b'{"seed":' + b"9" * (7 * MB) + b"}"),
    "256 tools": (CHAT, lambda: chat(tools=[tool(index) for index in range(256)])),
    "a schema": (CHAT, lambda: chat(response_format=schema(50))),
    "a large schema": (CHAT, lambda: chat(response_format=schema(1000))),
    "a huge schema": (CHAT, lambda: chat(response_format=schema(50_000))),
    "long stop texts": (CHAT, lambda: chat(stop=["x" * 1000 + str(index) for index in range(16)])),
    "many stop texts": (CHAT, lambda: chat(stop=[str(index) for index in range(500_000)])),
    "many stop ids": (CHAT, lambda: chat(stop_token_ids=list(range(MB)))),
    "many biases": (CHAT, lambda: chat(logit_bias={str(index): 1 for index in range(100_000)})),
    "64 prompts": (TEXT, lambda: text(prompt=["word " * 10_000] * 64)),
    "token ids": (TEXT, lambda: text(prompt=[5] * (2 * MB))),
    "tokenize": ("/tokenize", lambda: json.dumps({"prompt": "word " * 200_000}).encode()),
    "tokenize 3.5 MB": ("/tokenize", lambda: json.dumps({"prompt": "word " * 700_000, "with_pieces": True}).encode()),
    "detokenize": ("/detokenize", lambda: json.dumps({"tokens": [5] * 400_000}).encode()),
    "too much to detokenize": ("/detokenize", lambda: json.dumps({"tokens": [5] * (2 * MB)}).encode()),
    "log-probabilities": (TEXT, lambda: text(prompt=[5] * 1900, prompt_logprobs=20)),
    "streamed log-probabilities": (TEXT, lambda: text(prompt=[5] * 1900, echo=True, logprobs=20, stream=True)),
    "count_tokens": ("/v1/messages/count_tokens", lambda: json.dumps({"model": "mini", "messages": [USER] * 50_000}).encode()),
    "a large image": (CHAT, lambda: chat(messages=[{**USER, "content": [IMAGE]}])),
    "unicode escapes": (CHAT, lambda: chat(messages=[{**USER, "content": "\U0001f600" * 600_000}])),
    "repeated keys": (CHAT, lambda: b"{" + b'"messages":[],' * 500_000 + b'"n":1}'),
    "1,000 unknown fields": (CHAT, lambda: chat(**{f"field_{index}": index for index in range(1000)})),
    "100,000 unknown fields": (CHAT, lambda: chat(**{f"field_{index}": index for index in range(100_000)})),
}

ORDINARY = ("blanks in a message", "40,000 parts of a message", "a schema", "tiny chunks")


class Moment(NamedTuple):
    """When an event arrived, and the processor time that the server had used by then."""

    wall_s: float
    cpu_s: float


class Stream:
    """An endless stream and the moments of its events; begun again when it ends."""

    def __init__(self, server: Server) -> None:
        self._url, self._is_over = server.url, threading.Event()
        self._cpu_clock = ~server.process.pid << 3 | 2  # CLOCK_PROCESS_CPUTIME_ID of another process, as clock_getcpuclockid(3) makes it
        self.arrivals: list[Moment | None] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        fields = {"messages": [USER], "max_tokens": 1900, "ignore_eos": True, "temperature": 1.0, "stream": True}
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._is_over.is_set():
                with client.stream("POST", CHAT, json=fields) as answer:
                    for _ in answer.iter_raw():
                        self.arrivals.append(Moment(time.monotonic(), time.clock_gettime(self._cpu_clock)))
                        if self._is_over.is_set():
                            break
                self.arrivals.append(None)  # the gap to the next stream does not count

    def gaps(self, since: int) -> list[Moment]:
        """Lengths of the gaps between events, and the processor time of the server in them."""
        found = [(before, after) for before, after in pairwise(self.arrivals[since:]) if before is not None and after is not None]
        return [Moment(after.wall_s - before.wall_s, after.cpu_s - before.cpu_s) for before, after in found]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with closing(Server("--max-num-seqs", "4")) as server:
        yield server


@pytest.fixture(scope="module")
def stream(server: Server) -> Iterator[Stream]:
    with closing(Stream(server)) as stream:
        while len(stream.arrivals) < 50:
            time.sleep(0.01)
        yield stream


def check_stalls(stream: Stream, attack: Callable[[], object]) -> None:
    """Check that no gap between the stream's events is longer than `MAX_STALL_S` beyond a step during an attack.

    A gap counts with the processor time that the server used in it: on a busy machine every process has gaps in which it does not run.
    """
    stalls, waits = [], []
    for _ in range(NUM_TRIES):
        begin = len(stream.arrivals)
        time.sleep(0.3)
        step_s = median(gap.wall_s for gap in stream.gaps(begin))
        begin = len(stream.arrivals)
        attacking = threading.Thread(target=attack)
        attacking.start()
        attacking.join(60)
        time.sleep(0.2)
        assert not attacking.is_alive(), "the attack is not answered"
        gaps = stream.gaps(begin)
        stalls.append(max(min(gap) for gap in gaps) - step_s)
        waits.append(max(gap.wall_s for gap in gaps))
        if stalls[-1] <= MAX_STALL_S and waits[-1] <= MAX_WAIT_S:
            return
    raise AssertionError(f"in {NUM_TRIES} tries the server held the stream for {stalls} s, and it had gaps of {waits} s")


def attacks(names: Iterable[str]) -> list[Any]:
    """All of them; a few are run each time."""
    return [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", attacks(BODIES))
def test_parsing_a_large_body_does_not_stall_a_stream(server: Server, stream: Stream, name: str) -> None:
    path, make = BODIES[name]
    body = make()
    assert len(body) < 8 * MB, "the size is not what it is refused for"
    status = 0

    def attack() -> None:
        nonlocal status
        headers = {"Content-Type": "application/json"}
        status = httpx.post(server.url + path, content=body, headers=headers, timeout=60).status_code

    check_stalls(stream, attack)
    assert status in (200, 400)


def raw(server: Server, parts: list[bytes], wait_s: float = 0.0) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as connection, suppress(OSError):
        for part in parts:
            connection.sendall(part)
            time.sleep(wait_s)


CHUNKED = {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}
TRAFFIC: dict[str, Callable[[Server], None]] = {
    "model list": lambda server: raw(server, [head_of("/v1/models") * 300]),
    "tiny chunks": lambda server: raw(server, [head_of(CHAT, method="POST", **CHUNKED) + b"1\r\n1\r\n" * 100_000 + b"0\r\n\r\n"]),
    "slow bodies": lambda server: [raw(server, [post_of(CHAT, chat())[:-20], b" "], 0.05) for _ in range(8)] and None,
    "disconnects": lambda server: [raw(server, [post_of(CHAT, chat(stream=True, max_tokens=500))], 0.01) for _ in range(20)] and None,
    "wrong hosts": lambda server: raw(server, [head_of("/v1/models", Host="evil.example") * 300]),
    "no HTTP": lambda server: [raw(server, [b"\x16\x03\x01" + b"x" * 200_000]) for _ in range(10)] and None,
    "idle connections": lambda server: [raw(server, []) for _ in range(300)] and None,
}


@pytest.mark.parametrize("name", attacks(TRAFFIC))
def test_hostile_traffic_does_not_stall_another_stream(server: Server, stream: Stream, name: str) -> None:
    check_stalls(stream, lambda: TRAFFIC[name](server))
    assert httpx.get(server.url + "/health").status_code == 200
