"""Threads, forks, panics, interrupts of requests and callers that leave, all at once and for minutes: nothing hangs, no token is wrong."""

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint
from harness.engine_targets import assert_clean, open_small
from harness.forked import needs_fork, run_forked
from paceline import LLM, AsyncEngine, ConfigError, RequestError, SamplingParams
from paceline.speculation.draft_length.policy import FixedDraftLength

PATIENCE_S = 60.0  # for any single call
REFUSED = 3  # exit code of a child
FAULTS = [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException, MemoryError, RecursionError]
PROMPTS = [[5, 6, 7], [9] * 40, [30, 31], [8] * 70, [11, 12] * 20]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.1, seed=7)


def failing(kind: type[BaseException], at: int) -> SamplingParams:
    def processor(token_ids: Sequence[int], scores: Any) -> Any:
        if len(token_ids) > at:
            raise kind("soak")
        return scores

    return replace(GREEDY, processors=[processor])


@dataclass
class Soak:
    """What the threads share.

    Attributes:
        answers: by whether it is sampled and prompt, what the target says alone.
    """

    llm: LLM
    engine: AsyncEngine
    answers: dict[tuple[bool, int], list[int]]
    deadline: float
    seed: int
    met: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, tokens: int = 0) -> None:
        with self.lock:
            self.met[what] += 1
            self.met["tokens"] += tokens

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def check(self, is_sampled: bool, index: int, token_ids: Sequence[int]) -> None:
        assert list(token_ids) == self.answers[is_sampled, index][: len(token_ids)]
        self.count("answers", len(token_ids))


def generate(soak: Soak, random: np.random.Generator) -> None:
    is_sampled, indices = bool(random.integers(2)), random.integers(0, len(PROMPTS), int(random.integers(1, 4))).tolist()
    outputs = soak.llm.generate([PROMPTS[index] for index in indices], SAMPLED if is_sampled else GREEDY)
    for index, output in zip(indices, outputs, strict=True):
        assert len(output.token_ids) == 20
        soak.check(is_sampled, index, output.token_ids)


def stream(soak: Soak, random: np.random.Generator) -> None:
    """Often left early: closed, or dropped for the garbage collector."""
    index, stop_at, tokens = int(random.integers(len(PROMPTS))), int(random.integers(1, 30)), list[int]()
    chunks = soak.llm.stream(PROMPTS[index], SAMPLED)
    for chunk in chunks:
        tokens += chunk.token_ids
        if len(tokens) >= stop_at:
            break
    if random.random() < 0.5:
        chunks.close()  # type: ignore[attr-defined]
    del chunks
    if random.random() < 0.1:
        gc.collect()
    soak.check(True, index, tokens)


def fail(soak: Soak, random: np.random.Generator) -> None:
    kind = FAULTS[int(random.integers(len(FAULTS)))]
    with pytest.raises(RequestError, match="soak"):
        soak.llm.generate([PROMPTS[0]], failing(kind, int(random.integers(3, 20))))
    soak.count("faults of requests")


def call_from_within(soak: Soak, random: np.random.Generator) -> None:
    def processor(token_ids: Sequence[int], scores: Any) -> Any:
        soak.llm.generate([5], GREEDY)

    with pytest.raises(RequestError, match="from within its own step"):
        soak.llm.generate([PROMPTS[2]], replace(GREEDY, processors=[processor]))
    soak.count("calls from within")


def fork(soak: Soak, random: np.random.Generator) -> None:
    """The child continues, or raises an error that states why not; it never waits forever."""
    time.sleep(float(random.random()) * 0.05)

    def go_on() -> int:
        with pytest.raises(ConfigError, match="opened in process"):
            soak.engine._worker.check_open()
        try:
            assert soak.llm.generate([PROMPTS[0]], SAMPLED)[0].token_ids == soak.answers[True, 0]
        except ConfigError:
            return REFUSED
        return 0

    code = run_forked(go_on)
    assert code in (0, REFUSED)
    soak.count("forks that went on" if code == 0 else "forks that were told")


async def call_engine(soak: Soak, random: np.random.Generator) -> None:
    """One caller of the asynchronous engine: it waits, streams, leaves, or fails."""
    index, kind = int(random.integers(len(PROMPTS))), int(random.integers(4))
    if kind == 0:
        (output,) = await asyncio.wait_for(soak.engine.generate(PROMPTS[index], GREEDY), PATIENCE_S)
        soak.check(False, index, output.token_ids)
    elif kind == 1:
        tokens = list[int]()
        async for chunk in soak.engine.stream(PROMPTS[index], SAMPLED):
            tokens += chunk.token_ids
        soak.check(True, index, tokens)
    elif kind == 2:
        task = asyncio.create_task(soak.engine.generate(PROMPTS, replace(GREEDY, max_tokens=200)))
        await asyncio.sleep(float(random.random()) * 0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        soak.count("callers that left")
    else:
        fault = FAULTS[int(random.integers(len(FAULTS)))]
        with pytest.raises(RequestError, match="soak"):
            await asyncio.wait_for(soak.engine.generate(PROMPTS[0], failing(fault, 6)), PATIENCE_S)
        soak.count("faults of requests")


def call_engine_at_once(soak: Soak, random: np.random.Generator) -> None:
    async def several() -> None:
        seeds = random.integers(0, 1 << 30, 5).tolist()
        await asyncio.gather(*(call_engine(soak, np.random.default_rng(seed)) for seed in seeds))

    asyncio.run(several())


WORKS: list[tuple[Callable[[Soak, np.random.Generator], None], ...]] = [
    (generate, stream), (generate, stream, fail), (fail, call_from_within, stream), (fork,), (call_engine_at_once,),
]  # fmt: skip


def work(soak: Soak, number: int) -> None:
    random = np.random.default_rng([soak.seed, number])
    while not soak.is_over():
        WORKS[number][int(random.integers(len(WORKS[number])))](soak, random)
        soak.count("calls")


@needs_fork
def test_random_load_neither_hangs_nor_changes_a_token(tmp_path: Path, seed: int, large_counts: bool, tally: "Counter[str]") -> None:
    directory = write_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    alone = open_small(directory, 80)
    answers = {
        (is_sampled, index): alone.generate([prompt], SAMPLED if is_sampled else GREEDY)[0].token_ids
        for is_sampled in (False, True) for index, prompt in enumerate(PROMPTS)
    }  # fmt: skip
    llm, other = (open_small(directory, 80, ["ngram", "suffix"]) for _ in range(2))
    for one in (llm, other):
        one.engine.speculator.policy = FixedDraftLength(3)
    engine = AsyncEngine(other._loaded)
    soak = Soak(llm, engine, answers, time.monotonic() + (600.0 if large_counts else 3.0), seed)
    with ThreadPoolExecutor(len(WORKS)) as pool:
        futures = [pool.submit(work, soak, number) for number in range(len(WORKS))]
        wait(futures, soak.deadline - time.monotonic() + 2 * PATIENCE_S, FIRST_EXCEPTION)
        soak.deadline = 0.0  # where one thread met something the others need not go on
        for future in futures:
            future.result(2 * PATIENCE_S)
    asyncio.run(asyncio.wait_for(engine.close(), PATIENCE_S))
    for one in (llm, other):
        assert_clean(one)
    for name in ("answers", "faults of requests", "callers that left", "calls from within"):
        assert soak.met[name] > 0, soak.met
    # in which moment a process forks is chance: in a few seconds all may fall while a step runs
    assert soak.met["forks that went on"] + (0 if large_counts else soak.met["forks that were told"]) > 0, soak.met
    for name, count in soak.met.items():
        tally[f"soak: {name}"] += count
