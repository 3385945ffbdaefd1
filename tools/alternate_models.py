"""Serve several models with room for one, and let clients alternate between them: count lost and wrong answers, and measure the memory.

    python tools/alternate_models.py MODEL MODEL --seconds 600 --clients 6

Every answer is compared with that of `LLM` to the same request. The memory is the server's resident memory after each answer; it is flat if
the second half of a run has no more of it than the first.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from paceline import LLM, SamplingParams
from paceline.server.model_pool import served_model_name
from reporting import describe_machine

PROMPTS = ["Once there was a", "The sea is", "def add(a, b):", "A lighthouse"]
SAMPLINGS: Sequence[Mapping[str, Any]] = ({"temperature": 0, "max_tokens": 24}, {"temperature": 0.8, "seed": 7, "max_tokens": 40})
Case = tuple[str, int, int]
"""Name of a model, indices of a prompt and of the sampling."""


@dataclass(slots=True)
class Alternation:
    """What was found.

    Attributes:
        statuses: of the answers; 0 = the connection was lost.
        num_wrong: answers whose text differs from that of `LLM`.
        latencies_s: of answers.
        resident_mb: the server's resident memory after each answer, by model.
        num_loads: of each model.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    num_wrong: int = 0
    latencies_s: list[float] = field(default_factory=list)
    resident_mb: dict[str, list[float]] = field(default_factory=dict)
    num_loads: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Its numbers."""
        ranked = sorted(self.latencies_s)
        return {
            "answers": dict(self.statuses),
            "lost": sum(count for status, count in self.statuses.items() if status != 200),
            "wrong": self.num_wrong,
            "loads": self.num_loads,
            "latency_s": {f"p{share}": round(ranked[len(ranked) * share // 100], 2) for share in (50, 95, 99)},
            "resident_mb": {model: _by_half(found) for model, found in self.resident_mb.items()},
        }


def _by_half(found: Sequence[float]) -> dict[str, list[int]]:
    """Median and maximum of the first and the second half."""
    middle = len(found) // 2
    halves = {"first half": sorted(found[:middle]), "second half": sorted(found[middle:])}
    return {name: [round(half[len(half) // 2]), round(half[-1])] for name, half in halves.items() if half}


def expected_texts(models: Sequence[str], arguments: Mapping[str, Any]) -> dict[Case, str]:
    """Return the texts of all cases by direct generation, one model after the other."""
    found: dict[Case, str] = {}
    for model in models:
        llm = LLM(model, **arguments)
        for index, given in enumerate(SAMPLINGS):
            outputs = llm.generate(PROMPTS, SamplingParams(**given))
            found |= {(served_model_name(model), prompt, index): output.text for prompt, output in enumerate(outputs)}
    return found


async def alternate(url: str, process_id: int, texts: Mapping[Case, str], *, seconds: float, num_clients: int) -> Alternation:
    """Let clients send requests one by one, each for any of the models."""
    found, cases, start_s = Alternation(), list(texts), time.monotonic()

    async def keep_asking(client: httpx.AsyncClient, seed: int) -> None:
        random = Random(seed)
        while (began_s := time.monotonic()) < start_s + seconds:
            case = random.choice(cases)
            model, prompt, sampling = case
            fields = {"model": model, "prompt": PROMPTS[prompt], **SAMPLINGS[sampling]}
            try:
                answer = await client.post("/v1/completions", json=fields)
            except httpx.TransportError:
                found.statuses[0] += 1
                continue
            found.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                found.latencies_s.append(time.monotonic() - began_s)
                found.num_wrong += answer.json()["choices"][0]["text"] != texts[case]
                pages = int(Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1])
                found.resident_mb.setdefault(model, []).append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(keep_asking(client, seed) for seed in range(num_clients)))
        metrics = (await client.get("/metrics")).text
    for name, count in re.findall(r'^paceline:model_loads_total\{.*model_name="([^"]+)".*\} (\S+)$', metrics, re.MULTILINE):
        found.num_loads[name] = int(float(count))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    arguments = {"max_model_len": 1024, **({} if given.threads is None else {"threads": given.threads})}
    texts = expected_texts(given.models, arguments)
    options = [text for name, value in arguments.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "paceline", "serve", *given.models, "--max-loaded", "1", "--port", "0", "--quiet", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(match[1] for line in server.stderr if (match := re.search(r"answers at (http://[^/\s]+)/v1", line)))
        try:
            found = asyncio.run(alternate(url, server.pid, texts, seconds=given.seconds, num_clients=given.clients))
        finally:
            server.terminate()
    print(json.dumps({"machine": describe_machine(), **found.as_dict()}, indent=1))


if __name__ == "__main__":
    main()
