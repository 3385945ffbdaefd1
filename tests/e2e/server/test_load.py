"""Hundreds of requests at a time, of all kinds, with clients that leave: nothing is lost, nothing stays, and every text is its own."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.http_client import HttpClient
from harness.live_server import LiveServer, live_server, until
from harness.server_traffic import KINDS, Case, ServerTraffic, call
from harness.tool_model import write_tool_model
from paceline import LLM, AsyncEngine
from paceline.server.app import create_app

MAX_GROWTH_BYTES = 40_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_idle(server: LiveServer, engine: AsyncEngine) -> None:
    """Nothing of any request is left."""
    until(lambda: server.num_open == 0)
    inner = engine.loaded.engine
    until(lambda: inner.is_idle)
    inner.cache.check()
    assert inner.cache.pool.num_free == inner.cache.pool.num_blocks
    assert inner.cache._sequences == {}


@pytest.fixture
def talking(mini_dir: Path, tmp_path: Path) -> Path:
    """A model that may be asked for calls."""
    return write_tool_model(mini_dir, tmp_path / "talking")


@pytest.fixture
def drafting(talking: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.open(str(talking), drafter=["prediction", "ngram"], max_num_seqs=8, threads=1)
    yield engine
    asyncio.run(engine.close())


def cases_of(model: Path, random: np.random.Generator, count: int) -> list[Case]:
    """So many of each kind, with what each gets alone and undrafted."""
    with LLM(str(model), drafter="none", threads=1) as llm:
        cases = [kind(llm, random) for kind in KINDS for _ in range(count)]
    plain = AsyncEngine.open(str(model), drafter="none", threads=1)
    try:
        calls = [call(HttpClient(create_app(plain)), random) for _ in range(2 * count)]
    finally:
        asyncio.run(plain.close())
    assert sum("\nnote {" in text for case in calls for text in case.texts) > len(calls) / 2, "some are cut before they call"
    return cases + calls


def test_answers_of_a_busy_server_equal_those_of_an_idle_one(
    drafting: AsyncEngine, talking: Path, seed: int, large_counts: bool, tally: "Counter[str]"
) -> None:
    random, engine = np.random.default_rng(seed), drafting
    cases = cases_of(talking, random, 8 if large_counts else 2)
    count, at_a_time = (1000, 64) if large_counts else (24, 12)
    with live_server(engine, max_queue=256) as server:
        traffic = ServerTraffic(server.url, cases, random)
        traffic.run(count // 2, at_a_time)
        check_idle(server, engine)
        before = resident_bytes()
        traffic.run(count // 2, at_a_time)
        check_idle(server, engine)
        assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert sum(traffic.met.values()) == count
    assert set(traffic.met) == {"refused", "left", "streamed", "whole"}
    tally["answers of a busy server compared"] += traffic.met["streamed"] + traffic.met["whole"]
