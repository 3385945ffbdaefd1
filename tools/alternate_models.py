"""Serve several models with room for one, and let clients alternate between them: count lost and wrong answers, and measure the memory.

    python tools/alternate_models.py MODEL MODEL --seconds 600 --clients 6

Half of the requests are streamed. Some clients disconnect before the end of their answer. The token ids of the other answers are compared
with those from a server of that model alone, without drafts. The memory is the server's resident memory; it holds one model at a time, so
its maximum over a minute is compared with those of later minutes.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from paceline.server.model_pool import served_model_name
from reporting import REPOSITORY, describe_machine

sys.path.insert(0, str(REPOSITORY / "tests"))
from harness.http_client import events_in
from harness.server_process import Server

PROMPTS = ["Once there was a", "the sea the sea the", "def add(a, b):", "A lighthouse"]
SAMPLINGS: Sequence[Mapping[str, Any]] = ({"temperature": 0, "max_tokens": 24}, {"temperature": 0.8, "seed": 7, "max_tokens": 40})
LEAVING = 0.15
"""Share of the requests whose client disconnects."""
MAX_PATIENCE_S = 1.0
"""Until it does so, at most."""
MEMORY_INTERVAL_S = 0.25
NUM_SWITCHES = 5
PATH = "/v1/completions"
Case = tuple[str, int, int]
"""Name of a model, indices of a prompt and of the sampling."""


@dataclass(slots=True)
class Alternation:
    """What was found.

    Attributes:
        counts: what became of the requests: "sent", "answered", "left" (its client disconnected), "refused" (429 or 503 with a
            Retry-After), "lost" (anything else), and "wrong" of the answered ones.
        faults: one text for each lost or wrong answer.
        latencies_s: of answers.
        memory: seconds since the start, and bytes of resident memory.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Its numbers."""
        ranked = sorted(self.latencies_s) or [0.0]
        return {
            "requests": {name: self.counts[name] for name in ("sent", "answered", "left", "refused", "lost", "wrong")},
            "faults": self.faults[:3],
            "latency_s": {f"p{share}": round(ranked[len(ranked) * share // 100], 2) for share in (50, 95, 99)},
            "resident_mb": self.memory_by_minute(),
        }

    def memory_by_minute(self) -> dict[int, list[int]]:
        """Minimum, median and maximum of each minute in megabytes."""
        found: dict[int, list[int]] = {}
        for second, num_bytes in self.memory:
            found.setdefault(int(second // 60) + 1, []).append(num_bytes)
        return {
            minute: [round(value / 1e6) for value in (min(values), statistics.median(values), max(values))]
            for minute, values in found.items()
        }


def fields_of(case: Case) -> dict[str, Any]:
    """Return the request of a case."""
    model, prompt, sampling = case
    return {"model": model, "prompt": PROMPTS[prompt], **SAMPLINGS[sampling], "speculation": {"origins": True}}


def token_ids_of(answer: httpx.Response, *, is_streamed: bool) -> list[int]:
    """Return the token ids of an answer.

    Raises:
        ValueError: it is no answer, or its stream has no end.
    """
    if answer.status_code != 200 or (is_streamed and not answer.text.endswith("data: [DONE]\n\n")):
        raise ValueError(f"{answer.status_code} {answer.text[-300:]}")
    if not is_streamed:
        found: list[int] = answer.json()["speculation"]["token_ids"][0]
        return found
    return [token_id for event in events_in(answer.text) for token_id in (event.get("speculation") or {}).get("token_ids", [])]


def expected_token_ids(models: Sequence[str], options: Sequence[str]) -> dict[Case, list[int]]:
    """Return the token ids of all cases from a server of each model alone, without drafts."""
    found: dict[Case, list[int]] = {}
    for model in models:
        name = served_model_name(model)
        with closing(Server(model, *options, "--drafter", "none")) as server, server.client() as client:
            for case in ((name, prompt, sampling) for prompt in range(len(PROMPTS)) for sampling in range(len(SAMPLINGS))):
                found[case] = token_ids_of(client.post(PATH, json=fields_of(case), timeout=600), is_streamed=False)
    return found


async def alternate(
    url: str, expected: Mapping[Case, Sequence[int]], resident_bytes: Callable[[], int], *, seconds: float, num_clients: int, seed: int
) -> Alternation:
    """Let clients send requests one by one, each for any of the models."""
    found, start_s = Alternation(), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server may just be ending an idle one
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        watching = asyncio.ensure_future(_watch_memory(found, resident_bytes))

        async def keep_asking(random: Random) -> None:
            while time.monotonic() < start_s + seconds:
                await _ask(client, random, expected, found)

        await asyncio.gather(*(keep_asking(Random(seed + number)) for number in range(num_clients)))
        watching.cancel()
    return found


async def _watch_memory(found: Alternation, resident_bytes: Callable[[], int]) -> None:
    start_s = time.monotonic()
    while True:
        found.memory.append((time.monotonic() - start_s, resident_bytes()))
        await asyncio.sleep(MEMORY_INTERVAL_S)


async def _ask(client: httpx.AsyncClient, random: Random, expected: Mapping[Case, Sequence[int]], found: Alternation) -> None:
    """Send one request, and count what became of it."""
    case, is_streamed = random.choice(sorted(expected)), random.random() < 0.5
    request = client.post(PATH, json={**fields_of(case), "stream": is_streamed})
    found.counts["sent"] += 1
    began_s = time.monotonic()
    if random.random() < LEAVING:
        with suppress(TimeoutError, httpx.HTTPError):
            await asyncio.wait_for(request, random.random() * MAX_PATIENCE_S)
        found.counts["left"] += 1
        return
    try:
        answer = await request
        if answer.status_code in (429, 503) and answer.headers.get("retry-after", "").isdecimal():
            found.counts["refused"] += 1
            await asyncio.sleep(0.1)
            return
        token_ids = token_ids_of(answer, is_streamed=is_streamed)
    except (httpx.HTTPError, ValueError) as error:
        found.counts["lost"] += 1
        found.faults.append(f"{case}: {error!r}")
        return
    found.counts["answered"] += 1
    found.latencies_s.append(time.monotonic() - began_s)
    if token_ids != expected[case]:
        found.counts["wrong"] += 1
        found.faults.append(f"{case}: {token_ids} instead of {expected[case]}")


def switch_seconds(url: str, models: Sequence[str]) -> dict[str, float]:
    """Return the median seconds to the answer of one token from each model, when another one is loaded, and when it is loaded itself."""
    found: dict[str, list[float]] = {}
    with httpx.Client(base_url=url, timeout=600) as client:
        for _ in range(NUM_SWITCHES + 1):
            for model in models:
                for state in ("switch to", "loaded"):
                    began_s = time.monotonic()
                    client.post(PATH, json={"model": model, "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0}).raise_for_status()
                    found.setdefault(f"{state} {model}", []).append(time.monotonic() - began_s)
    return {name: round(statistics.median(seconds[1:]), 3) for name, seconds in found.items()}  # the first ones measure the machine too


def num_loads(url: str) -> dict[str, int]:
    """Return how many times each model was loaded."""
    metrics = httpx.get(url + "/metrics").text
    found = re.findall(r'^paceline:model_loads_total\{.*model_name="([^"]+)".*\} (\S+)$', metrics, re.MULTILINE)
    return {name: int(float(count)) for name, count in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    names = [served_model_name(model) for model in given.models]
    options = ["--max-model-len", "1024", "--threads", str(given.threads), "--quiet"]
    expected = expected_token_ids(given.models, options)
    with closing(Server(*given.models, "--max-loaded", "1", "--drafter", "auto", *options)) as server:
        report = {"machine": describe_machine(), "seconds": switch_seconds(server.url, names)}
        running = alternate(server.url, expected, server.resident_bytes, seconds=given.seconds, num_clients=given.clients, seed=given.seed)
        report |= {**asyncio.run(running).as_dict(), "loads": num_loads(server.url)}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
