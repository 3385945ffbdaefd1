"""Two models under concurrent load on a server with room for one: no answer is lost or wrong, and memory stays flat."""

import asyncio
import time
from collections import Counter
from contextlib import closing
from itertools import count
from pathlib import Path

import httpx

from harness.alternating_clients import alternate, expected_token_ids, num_loads
from harness.live_server import until
from harness.server_process import Server
from harness.two_models import write_two_models

SECONDS = {False: 2.0, True: 600.0}
"""By whether the counts are large."""
SECONDS_PER_ROUND = 1.0
NUM_CLIENTS = 6
MAX_QUEUE = 3
"""So that some requests are refused."""
MAX_GROWTH = 1.15
"""Of the memory between two rounds, when no model is loaded, since the warm-up: 1.06 after 212 loads. glibc has eight heaps a core."""
WARM_UP_ROUNDS = 10
MIN_ROUNDS = {False: 2, True: 2 * WARM_UP_ROUNDS}


def test_models_that_switch_under_load_answer_exactly_in_flat_memory(
    mini_dir: Path, tmp_path: Path, seed: int, large_counts: bool, tally: "Counter[str]"
) -> None:
    names = write_two_models(mini_dir, tmp_path)
    options = ("--max-model-len", "256", "--quiet")
    expected = expected_token_ids(names, options)
    assert len({tuple(token_ids) for token_ids in expected.values()}) == len(expected), "a wrong model would not be noticed"
    counts, faults, rounds = Counter[str](), list[str](), list[int]()
    settings = ("--max-loaded", "1", "--max-queue", str(MAX_QUEUE), "--max-num-seqs", "1", "--unload-after", "200ms", "--drafter", "ngram")
    with closing(Server(*names, *settings, *options)) as server:
        end_s = time.monotonic() + SECONDS[large_counts]
        for number in count():
            size = {"seconds": SECONDS_PER_ROUND, "num_clients": NUM_CLIENTS}
            found = asyncio.run(alternate(server.url, expected, **size, seed=seed + number * NUM_CLIENTS))
            counts.update(found.counts)
            faults += found.faults
            until(lambda: set(httpx.get(server.url + "/health").json()["models"].values()) == {"unloaded"})
            rounds.append(server.resident_bytes())
            if faults or (time.monotonic() >= end_s and len(rounds) >= MIN_ROUNDS[large_counts]):
                break
        loads = num_loads(server.url)
    tally.update({f"switching models: {name}": value for name, value in counts.items()})
    tally.update({"switching models: loads": sum(loads.values()), "switching models: MB at the end": rounds[-1] // 10**6})
    assert not faults, faults[:3]
    assert set(counts) <= {"sent", "answered", "left", "refused"}
    assert counts["sent"] == counts["answered"] + counts["left"] + counts["refused"]
    assert counts["answered"] > len(rounds)
    assert min(loads.values()) >= len(rounds), "both were loaded again in each round"
    if large_counts:
        assert counts["left"] > 0
        assert counts["refused"] > 0
        assert rounds[-1] <= MAX_GROWTH * rounds[WARM_UP_ROUNDS], rounds
