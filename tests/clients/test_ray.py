"""Replicas in a Ray of this machine's own (make test-clients): answers are those of one engine, also while a replica is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.http_client import HttpClient, events_in
from paceline import AsyncEngine
from paceline.server.app import create_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ["I need a taxi to the airport.", "def add(a, b):", "Once upon a time", "The old fisherman", '{"name":']
NUM_REQUESTS, AT_ONCE, KILLED_AFTER = 200, 12, 60
OPTIONS = ["--replicas", "2", "--threads", "1", "--max-num-seqs", "8"]
SERVING, ANSWERING = "ray::ServeReplica:", "ray::MapWorker("
START_S = 240


def request(index: int, *, num_tokens: int = 24) -> tuple[str, dict[str, Any]]:
    """One of many: greedy and sampled, chats and completions."""
    text = f"{index}. {TEXTS[index % len(TEXTS)]}"
    how: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "n": 1 + index % 4 // 2}
    how |= {"max_tokens": num_tokens, "ignore_eos": True}
    if index % 3:
        return CHAT, {"messages": [{"role": "user", "content": text}], **how}
    return COMPLETIONS, {"prompt": text, **how}


class Command:
    """A `paceline` of Ray's environment in a process; what it writes to stderr is kept."""

    def __init__(self, clients: Path, *arguments: str) -> None:
        python = clients / "ray" / "bin" / "python"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.process = subprocess.Popen([python, "-m", "paceline", *arguments], stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        """Where it answers."""
        until(lambda: "answers at" in self.stderr or self.process.poll() is not None, START_S, lambda: self.stderr)
        found = re.search(r"answers at (http://\S+)/v1", self.stderr)
        assert found is not None, self.stderr
        return found[1]

    def processes(self, kind: str) -> set[int]:
        """Its descendants of a kind; Ray writes what they are over their command lines."""
        parents, kinds = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                kinds[int(folder.name)] = (folder / "cmdline").read_text()
            except (OSError, ValueError):  # it has ended
                continue
        return {number for number in parents if kinds.get(number, "").startswith(kind) and self._is_below(number, parents)}

    def _is_below(self, number: int, parents: dict[int, int]) -> bool:
        while number in parents and number != self.process.pid:
            number = parents[number]
        return number == self.process.pid

    def wait(self) -> int:
        code = self.process.wait(120)
        self._reader.join(10)
        return code

    def close(self) -> None:
        assert self.process.stderr is not None
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self.process.stderr.close()


def until(holds: Callable[[], bool], timeout_s: float, says: Callable[[], str] = lambda: "") -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, says()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def solo() -> Iterator[HttpClient]:
    """One engine that gets one request after another."""
    import asyncio

    engine = AsyncEngine.open("mini", threads=1)
    yield HttpClient(create_app(engine))
    asyncio.run(engine.close())


def told(body: dict[str, Any]) -> Any:
    """What of an answer does not depend on when and where it was made."""
    return body["choices"], body["usage"]["completion_tokens"]


def streamed(text: str) -> str:
    """The text of a chat's only sample."""
    return "".join(choice["delta"].get("content", "") for event in events_in(text) for choice in event["choices"])


def test_killed_replica_fails_only_its_own_requests(clients: Path, solo: HttpClient, tally: "Counter[str]") -> None:
    with closing(Command(clients, "serve", "--port", "0", *OPTIONS)) as server:
        url = server.url()
        before = server.processes(SERVING)
        assert len(before) == 2
        num_done, killed = [0], threading.Event()

        def ask(index: int) -> httpx.Response:
            path, fields = request(index)
            is_streamed = path == CHAT and fields.get("n", 1) == 1
            answer = httpx.post(url + path, json={**fields, "stream": is_streamed}, timeout=120)
            num_done[0] += 1
            if num_done[0] >= KILLED_AFTER and not killed.is_set():
                killed.set()
                os.kill(min(before), signal.SIGKILL)
            return answer

        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(ask, range(NUM_REQUESTS)))
        lost = [index for index, answer in enumerate(answers) if is_lost(answer)]
        assert 0 < len(lost) <= AT_ONCE
        until(lambda: len(server.processes(SERVING)) == 2, START_S)
        assert server.processes(SERVING) - before, "another one is started"
        until(lambda: httpx.get(f"{url}/ready").json()["replicas"] == 2, START_S)
        again = {index: ask(index) for index in lost}
    for index, answer in enumerate(answers):
        check_answer(again.get(index, answer), solo, *request(index))
    tally["requests of a killed replica, told so"] += len(lost)
    tally["answers of two replicas, one of them killed, that are one engine's"] += NUM_REQUESTS


def is_lost(answer: httpx.Response) -> bool:
    """Whether an answer is the error of a replica that ended, by its status or by its last event."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.rstrip().split("\n\n")[-1].removeprefix("data: ")
        return last != "[DONE]" and bool(json.loads(last)["error"]["code"] == "replica_lost")
    return answer.status_code == 503 and bool(answer.json()["error"]["code"] == "replica_lost")


def check_answer(answer: httpx.Response, solo: HttpClient, path: str, fields: dict[str, Any]) -> None:
    assert answer.status_code == 200, answer.text
    alone = solo.json(path, fields)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert streamed(answer.text) == alone["choices"][0]["message"]["content"]
    else:
        assert told(answer.json()) == told(alone)


def test_chats_hit_the_prefix_cache_of_their_replica_and_sigterm_drains(clients: Path) -> None:
    with closing(Command(clients, "serve", "--port", "0", *OPTIONS)) as server:
        url = server.url()
        num_cached = 0
        for index in range(20):
            turns: list[dict[str, str]] = [{"role": "user", "content": f"Chat {index}. " + "I need a taxi to the airport, please. " * 4}]
            for _ in range(2):
                answer = httpx.post(url + CHAT, json={"messages": turns, "temperature": 0, "max_tokens": 8}, timeout=60).json()
                turns += [answer["choices"][0]["message"], {"role": "user", "content": "And back."}]
                turns[-2] = {name: turns[-2][name] for name in ("role", "content")}
            num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert num_cached == 20
        pages = httpx.get(f"{url}/metrics").text
        counts = {name: float(count) for name, count in re.findall(r'prompt_tokens_total{engine="(\w+)"[^}]*} (\S+)', pages)}
        assert len(counts) == 2
        assert min(counts.values()) > 0, "both have chats"
        fields = {"messages": turns, "max_tokens": 600, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + CHAT, json=fields, timeout=60) as stream:
            parts = stream.iter_text()
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        assert events_in(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0, server.stderr
        assert "airport" not in server.stderr


def write_requests(path: Path, count: int) -> Path:
    lines = (
        {"custom_id": f"r{index}", "method": "POST", "url": url, "body": body} for index in range(count) for url, body in [request(index)]
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers_in(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    assert all(line["response"]["status_code"] == 200 for line in lines)
    return {line["id"]: told(line["response"]["body"]) for line in lines}


def test_batch_loses_no_answer_when_a_replica_or_the_command_is_killed(clients: Path, tmp_path: Path, tally: "Counter[str]") -> None:
    source, target = write_requests(tmp_path / "in", NUM_REQUESTS), tmp_path / "out"
    command = ["batch", str(source), str(target), *OPTIONS]
    with closing(Command(clients, *command)) as batch:
        until(lambda: target.exists() and target.read_bytes().count(b"\n") > 0, START_S, lambda: batch.stderr)
        batch.process.kill()
    num_kept = target.read_bytes().count(b"\n")
    assert 0 < num_kept < NUM_REQUESTS
    with closing(Command(clients, *command)) as batch:
        until(lambda: target.read_bytes().count(b"\n") > num_kept, START_S, lambda: batch.stderr)
        os.kill(min(batch.processes(ANSWERING)), signal.SIGKILL)
        assert batch.process.wait(START_S) == 0, batch.stderr
    alone = tmp_path / "alone"
    subprocess.run([sys.executable, "-m", "paceline", "batch", str(source), str(alone), "--threads", "1"], capture_output=True, check=True)
    assert answers_in(target) == answers_in(alone)
    tally["answers of a batch, killed once, with a replica killed, that are one engine's"] += NUM_REQUESTS
