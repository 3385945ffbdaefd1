"""Overload a server: measure how many requests are admitted and refused, and how long answers take.

    python tools/load_server.py --seconds 600 --factor 2

It starts `paceline serve`, measures its capacity with as many clients as it runs samples, and then lets requests come at `factor` times
that rate, at random times (a Poisson process), whether or not earlier ones have been answered.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from reporting import describe_machine

CHAT = "/v1/chat/completions"
QUESTIONS = ["I need a taxi to the airport.", "Tell me of the sea.", "What is a lighthouse?", "Count from one to nine."]
CAPACITY_SHARE = 0.1  # of the seconds go to measuring the capacity
LOOK_S = 0.25


@dataclass(slots=True)
class Overload:
    """What was found.

    Attributes:
        may_be_open: samples that the server takes at a time.
        capacity_per_s, asked_per_s: answers, and requests, a second.
        statuses: of the answers.
        num_without_advice: answers 429 without a Retry-After from 1 to 60.
        latencies_s, first_s: of admitted requests: to the end, to the first text.
        refusal_s: until the answer 429.
        lost_s: until a connection was lost; its status counts as 0.
        most_open: samples that ran or waited at any look.
        num_open: samples that were in the engine a second after the last answer.
        grown_bytes: of the server's resident memory, from the end of the capacity's measurement to the end.
    """

    may_be_open: int
    seconds: float
    capacity_per_s: float = 0.0
    asked_per_s: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    num_without_advice: int = 0
    latencies_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    most_open: int = 0
    num_open: int = 0
    grown_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Its numbers, times as percentiles in milliseconds."""
        times = {"latency": self.latencies_s, "first_text": self.first_s, "refusal": self.refusal_s, "lost": self.lost_s}
        return {
            "capacity_per_s": round(self.capacity_per_s, 2),
            "asked_per_s": round(self.asked_per_s, 2),
            "answers": dict(self.statuses),
            "without_advice": self.num_without_advice,
            **{
                f"{name}_ms": {f"p{share}": round(1000 * percentile(found, share)) for share in (50, 95, 99)}
                for name, found in times.items()
            },
            "most_open": self.most_open,
            "may_be_open": self.may_be_open,
            "left_open": self.num_open,
            "grown_mb": round(self.grown_bytes / 1e6, 1),
        }


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that so many of a hundred do not exceed; 0 of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, len(ranked) * share // 100)] if ranked else 0.0


def overload(
    model: str, *, seconds: float, factor: float, num_seqs: int, max_queue: int, max_tokens: int, log: Path, more: Sequence[str] = ()
) -> Overload:
    """Serve a model and ask too much of it.

    Args:
        log: what the server writes goes there.
        more: options of `paceline serve`.
    """
    command = [sys.executable, "-m", "paceline", "serve", "--model", model, "--port", "0", "--drafter", "none"]
    command += ["--max-num-seqs", str(num_seqs), "--max-queue", str(max_queue), *more]
    with log.open("w") as writing, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr)
        url = next(found[1] for line in lines if (found := re.search(r"answers at (http://[^/\s]+)/v1", line)))
        copying = subprocess.Popen(["cat"], stdin=server.stderr, stdout=writing)
        try:
            return asyncio.run(_Load(url, server.pid, seconds, factor, num_seqs, max_queue, max_tokens).run())
        finally:
            server.terminate()
            server.wait()
            copying.wait()


class _Load:
    def __init__(self, url: str, process_id: int, seconds: float, factor: float, num_seqs: int, max_queue: int, max_tokens: int) -> None:
        self._url, self._process_id, self._factor, self._num_seqs = url, process_id, factor, num_seqs
        self._fields = {"max_tokens": max_tokens, "temperature": 0.8, "ignore_eos": True, "stream": True}
        self._random = Random(7)
        self.found = Overload(num_seqs + max_queue, seconds)

    async def run(self) -> Overload:
        # no connection is used twice: the server may just be ending an idle one
        async with httpx.AsyncClient(
            base_url=self._url, timeout=600, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        ) as client:
            await self._measure_capacity(client)
            before = self._resident_bytes()
            watching = asyncio.ensure_future(self._watch(client))
            await self._ask_too_much(client)
            await asyncio.sleep(1)
            watching.cancel()
            self.found.num_open = await self._num_open(client)
            self.found.grown_bytes = self._resident_bytes() - before
        return self.found

    async def _measure_capacity(self, client: httpx.AsyncClient) -> None:
        end_s, count = time.monotonic() + max(3.0, CAPACITY_SHARE * self.found.seconds), 0
        start_s = time.monotonic()

        async def ask_again() -> None:
            nonlocal count
            while time.monotonic() < end_s:
                await self._ask(client)
                count += 1

        await asyncio.gather(*(ask_again() for _ in range(self._num_seqs)))
        self.found.capacity_per_s = count / (time.monotonic() - start_s)

    async def _ask_too_much(self, client: httpx.AsyncClient) -> None:
        rate, asking = self._factor * self.found.capacity_per_s, set[asyncio.Task[None]]()
        start_s = time.monotonic()
        due_s, count = start_s, 0
        while due_s < start_s + self.found.seconds:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.ensure_future(self._record(client))
            asking.add(task)
            task.add_done_callback(asking.discard)
            due_s += self._random.expovariate(rate)
            count += 1
        self.found.asked_per_s = count / (time.monotonic() - start_s)
        await asyncio.gather(*asking)

    async def _record(self, client: httpx.AsyncClient) -> None:
        start_s = time.monotonic()
        try:
            status, first_s, advice = await self._ask(client)
        except httpx.TransportError:  # 0: the connection was lost
            status, first_s, advice = 0, 0.0, ""
            self.found.lost_s.append(time.monotonic() - start_s)
        self.found.statuses[status] += 1
        if status == 200:
            self.found.first_s.append(first_s - start_s)
            self.found.latencies_s.append(time.monotonic() - start_s)
        elif status == 429:
            self.found.refusal_s.append(time.monotonic() - start_s)
            self.found.num_without_advice += not (advice.isdecimal() and 1 <= int(advice) <= 60)

    async def _ask(self, client: httpx.AsyncClient) -> tuple[int, float, str]:
        """Status, when the first text came, and Retry-After."""
        question = f"{self._random.choice(QUESTIONS)} {self._random.randrange(1000)}"
        fields = {**self._fields, "seed": self._random.randrange(1 << 30), "messages": [{"role": "user", "content": question}]}
        async with client.stream("POST", CHAT, json=fields) as answer:
            first_s, last = 0.0, b""
            async for part in answer.aiter_raw():
                first_s = first_s or time.monotonic()
                last = part
            if answer.status_code == 200:
                assert last.endswith(b"data: [DONE]\n\n"), last
            return answer.status_code, first_s, answer.headers.get("retry-after", "")

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while True:
            self.found.most_open = max(self.found.most_open, await self._num_open(client))
            await asyncio.sleep(LOOK_S)

    async def _num_open(self, client: httpx.AsyncClient) -> int:
        text = (await client.get("/metrics")).text
        return sum(
            int(float(count)) for count in re.findall(r"^paceline:num_requests_(?:running|waiting){[^}]*} (\S+)$", text, re.MULTILINE)
        )

    def _resident_bytes(self) -> int:
        return int(Path(f"/proc/{self._process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--num-seqs", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        found = overload(given.pop("model"), **given, log=Path(folder) / "log")
    print(json.dumps({"machine": describe_machine(), **found.as_dict()}, indent=1))


if __name__ == "__main__":
    main()
