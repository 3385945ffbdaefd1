"""Clients that alternate between several models of a server: what became of their requests.

Half of the requests are streamed. Some clients disconnect before the end of their answer. The token ids of the other answers are compared
with those from a server of that model alone, without drafts.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import httpx

from harness.http_client import events_in
from harness.server_process import Server
from paceline.server.model_pool import served_model_name

PROMPTS = ["Once there was a", "the sea the sea the", "def add(a, b):", "A lighthouse"]
SAMPLINGS: Sequence[Mapping[str, Any]] = ({"temperature": 0, "max_tokens": 24}, {"temperature": 0.8, "seed": 7, "max_tokens": 40})
LEAVING = 0.15
"""Share of the requests whose client disconnects."""
MAX_PATIENCE_S = 1.0
"""Until it does so, at most."""
PATH = "/v1/completions"
Case = tuple[str, int, int]
"""Name of a model, indices of a prompt and of the sampling."""


@dataclass(slots=True)
class Answers:
    """What became of the requests.

    Attributes:
        counts: "sent", "answered", "left" (its client disconnected), "refused" (429 or 503 with a Retry-After), "lost" (anything else),
            and "wrong" of the answered ones.
        faults: one text for each lost or wrong answer.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


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


async def alternate(url: str, expected: Mapping[Case, Sequence[int]], *, seconds: float, num_clients: int, seed: int) -> Answers:
    """Let clients send requests one by one, each for any of the models."""
    found, end_s = Answers(), monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server may just be ending an idle one
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def keep_asking(random: Random) -> None:
            while monotonic() < end_s:
                await _ask(client, random, expected, found)

        await asyncio.gather(*(keep_asking(Random(seed + number)) for number in range(num_clients)))
    return found


async def _ask(client: httpx.AsyncClient, random: Random, expected: Mapping[Case, Sequence[int]], found: Answers) -> None:
    """Send one request, and count what became of it."""
    case, is_streamed = random.choice(sorted(expected)), random.random() < 0.5
    request = client.post(PATH, json={**fields_of(case), "stream": is_streamed})
    found.counts["sent"] += 1
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
    if token_ids != expected[case]:
        found.counts["wrong"] += 1
        found.faults.append(f"{case}: {token_ids} instead of {expected[case]}")


def num_loads(url: str) -> dict[str, int]:
    """Return how many times each model was loaded."""
    metrics = httpx.get(url + "/metrics").text
    found = re.findall(r'^paceline:model_loads_total\{.*model_name="([^"]+)".*\} (\S+)$', metrics, re.MULTILINE)
    return {name: int(float(count)) for name, count in found}
