"""Two models under concurrent load on a server with room for one: no answer is lost or wrong, and memory stays flat."""

import asyncio
import re
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from harness.http_client import events_in
from harness.live_server import until
from harness.server_process import Server
from harness.two_models import write_two_models
from paceline import LLM, SamplingParams

SECONDS = 600.0
NUM_CLIENTS, REQUESTS_PER_ROUND = 6, 40
MAX_GROWTH = 1.05
"""Of the memory between two rounds, when no model is loaded, since the second round."""
PROMPTS = ("Once there was a", "the sea the sea the", "def add(a, b):")
SAMPLED = {"temperature": 0.9, "seed": 5}
CASES = [{"prompt": prompt, "max_tokens": 12, **sampling} for prompt in PROMPTS for sampling in ({"temperature": 0.0}, SAMPLED)]
PATH = "/v1/completions"


def expected_ids(name: str) -> list[list[int]]:
    """Token ids of each of `CASES` from the model alone, without drafts."""
    llm = LLM(name, drafter="none", threads=1, max_model_len=256)
    cases = [dict(case) for case in CASES]
    return [llm.generate(case.pop("prompt"), SamplingParams(**case))[0].token_ids for case in cases]


async def ask(client: httpx.AsyncClient, fields: dict[str, Any]) -> list[int]:
    """Send a request and return the token ids of its answer.

    Raises:
        ValueError: the server refused it, or its stream has no end.
    """
    answer = await client.post(PATH, json=fields)
    if answer.status_code != 200 or (fields["stream"] and not answer.text.endswith("data: [DONE]\n\n")):
        raise ValueError(f"{answer.status_code} {answer.text[-300:]}")
    if not fields["stream"]:
        found: list[int] = answer.json()["speculation"]["token_ids"][0]
        return found
    return [token_id for event in events_in(answer.text) for token_id in (event.get("speculation") or {}).get("token_ids", [])]


async def load(url: str, random: Random, expected: dict[str, list[list[int]]], counts: "Counter[str]", faults: list[str]) -> None:
    """Send the requests of a round, each for one of the models, `NUM_CLIENTS` at a time."""
    slots = asyncio.Semaphore(NUM_CLIENTS)

    async def compare(client: httpx.AsyncClient) -> None:
        index, model = random.randrange(len(CASES)), random.choice(sorted(expected))
        fields = {**CASES[index], "model": model, "stream": random.random() < 0.5, "speculation": {"origins": True}}
        async with slots:
            try:
                ids = await ask(client, fields)
            except (httpx.HTTPError, ValueError) as error:
                counts["lost"] += 1
                faults.append(f"{fields}: {error!r}")
                return
        counts["compared"] += 1
        if ids != expected[model][index]:
            faults.append(f"{fields}: {ids}, alone {expected[model][index]}")

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(compare(client) for _ in range(REQUESTS_PER_ROUND)))


@pytest.mark.long
def test_models_that_switch_under_load_answer_exactly_in_flat_memory(
    mini_dir: Path, tmp_path: Path, seed: int, tally: "Counter[str]"
) -> None:
    names = write_two_models(mini_dir, tmp_path)
    expected = {Path(name).name: expected_ids(name) for name in names}
    assert expected["alpha"] != expected["beta"]
    random, counts, faults, rounds = Random(seed), Counter[str](), list[str](), list[int]()
    settings = ("--max-loaded", "1", "--unload-after", "200ms", "--drafter", "ngram", "--max-model-len", "256")
    with closing(Server(*names, *settings)) as server:
        end_s = time.monotonic() + SECONDS
        while not faults and (time.monotonic() < end_s or len(rounds) < 3):
            asyncio.run(load(server.url, random, expected, counts, faults))
            until(lambda: set(httpx.get(server.url + "/health").json()["models"].values()) == {"unloaded"})
            rounds.append(server.resident_bytes())
        metrics = httpx.get(server.url + "/metrics").text
    loads = [int(float(count)) for count in re.findall(r"^paceline:model_loads_total{.*} (\S+)$", metrics, re.MULTILINE)]
    tally.update({"switching models: requests": sum(counts.values()), "switching models: loads": sum(loads)})
    tally.update({"switching models: MB after two rounds": rounds[1] // 10**6, "switching models: MB at the end": rounds[-1] // 10**6})
    assert not faults, faults[:3]
    assert counts == {"compared": REQUESTS_PER_ROUND * len(rounds)}
    assert min(loads) >= len(rounds), "both were loaded again in each round"
    assert rounds[-1] <= MAX_GROWTH * rounds[1], rounds
