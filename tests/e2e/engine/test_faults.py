"""An exception anywhere ends only the request that it belongs to; all others continue, and none waits forever."""

import asyncio
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.engine_targets import Open, assert_clean
from harness.forked import needs_fork, run_forked
from paceline import AsyncEngine, ConfigError, PacelineError, RequestError, SamplingParams
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40]
PATIENCE_S = 60


class PanicException(BaseException):
    """What panics of Rust libraries are raised as."""


FAULTS = [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, PanicException, MemoryError, RecursionError]
FOR_THE_PROGRAM = (KeyboardInterrupt,)


@pytest.fixture(scope="module")
def solo(open_llm: Open) -> list[list[int]]:
    return [output.token_ids for output in open_llm(60).generate(PROMPTS, GREEDY)]


def failing(kind: type[BaseException]) -> SamplingParams:
    """A request whose own code raises, a few tokens in."""

    def processor(token_ids: Sequence[int], scores: Any) -> Any:
        if len(token_ids) > 8:
            raise kind("out of a request")
        return scores

    return replace(GREEDY, processors=[processor])


class FaultyDrafter(Drafter):
    """Raises in the given methods."""

    name = "faulty"

    def __init__(self, kind: type[BaseException], where: str) -> None:
        self._kind, self._where = kind, where

    def _reach(self, where: str) -> None:
        if where == self._where:
            raise self._kind("out of a drafter")

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        self._reach("propose")
        return [None] * len(requests)

    def observe(self, rows: Sequence[Any]) -> None:
        self._reach("observe")

    def prefill_s(self, request: Request) -> float:
        self._reach("prefill_s")
        return 0.0

    def has_candidates(self, request: Request) -> bool:
        self._reach("has_candidates")
        return True

    def release(self, request: Request) -> None:
        self._reach("release")


class FaultyPolicy(FixedDraftLength):
    """Raises in the given methods."""

    def __init__(self, kind: type[BaseException], where: str) -> None:
        super().__init__(4)

        def fail(*_: Any) -> Any:
            raise kind("out of a policy")

        assert hasattr(self, where)
        setattr(self, where, fail)


def serve(open_llm: Open, drafter: str | Drafter = "none", policy: FixedDraftLength | None = None) -> AsyncEngine:
    llm = open_llm(60, drafter)
    if policy is not None:
        llm.engine.speculator.policy = policy
    return AsyncEngine(llm._loaded)


def run(engine: AsyncEngine, work: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Work with an engine within our patience; its thread ends."""

    async def all_of_it() -> None:
        try:
            await asyncio.wait_for(work(engine), PATIENCE_S)
        finally:
            await asyncio.wait_for(engine.close(), PATIENCE_S)

    asyncio.run(all_of_it())
    assert not engine._worker.thread.is_alive()


@pytest.mark.parametrize("kind", FAULTS)
def test_failing_request_in_the_engine_thread_ends_alone(open_llm: Open, solo: list[list[int]], kind: type) -> None:
    async def work(engine: AsyncEngine) -> None:
        other = asyncio.create_task(engine.generate(PROMPTS[1], GREEDY))
        for _ in range(2):
            with pytest.raises(RequestError, match=f"processors: .* raised {kind.__name__}: out of a request"):
                await engine.generate(PROMPTS[0], failing(kind))
        assert (await other)[0].token_ids == solo[1]
        assert (await engine.generate(PROMPTS[0], GREEDY))[0].token_ids == solo[0]
        assert (await engine.stats()).num_failed == 2

    run(serve(open_llm), work)


@pytest.mark.parametrize("kind", FAULTS)
def test_generate_raises_exits_as_they_are_and_faults_as_request_error(open_llm: Open, solo: list[list[int]], kind: type) -> None:
    llm = open_llm(60)
    with pytest.raises(kind if kind in FOR_THE_PROGRAM else RequestError, match="out of a request"):
        llm.generate([PROMPTS[0]], failing(kind))
    assert_clean(llm)
    assert llm.generate([PROMPTS[0]], GREEDY)[0].token_ids == solo[0]


def test_system_exit_of_a_signal_handler_leaves_generate(open_llm: Open, solo: list[list[int]]) -> None:
    llm = open_llm(60)

    def leave(*_: object) -> None:
        sys.exit(7)

    def processor(token_ids: Sequence[int], scores: Any) -> Any:
        if len(token_ids) > 3:
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # type: ignore[operator, misc]  # a real one could come anywhere
        return scores

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit, match="7"):
            llm.generate([PROMPTS[0]], replace(GREEDY, processors=[processor]))
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        with pytest.raises(RequestError, match="out of a request"):
            llm.generate([PROMPTS[0]], failing(SystemExit))
        assert sum((chunk.token_ids for chunk in stream), solo[0][:1])[-5:] == solo[0][-5:]  # of another library
    finally:
        signal.signal(signal.SIGTERM, before)
    assert_clean(llm)


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("is_chosen", [True, False], ids=["as much as pays", "four tokens"])
@pytest.mark.parametrize("where", ["propose", "observe", "prefill_s", "has_candidates", "release"])
@pytest.mark.parametrize("kind", FAULTS)
def test_drafter_failures_leave_the_text_unchanged(open_llm: Open, solo: list[list[int]], kind: type, where: str, is_chosen: bool) -> None:
    async def work(engine: AsyncEngine) -> None:
        outputs = await engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == solo

    run(serve(open_llm, FaultyDrafter(kind, where), None if is_chosen else FixedDraftLength(4)), work)


@pytest.mark.parametrize(
    "where",
    [
        "begin_step",
        "skip_reason",
        "plan_drafts",
        "is_better_draft",
        "prune_drafts",
        "observe_verified",
        "observe_draft_time",
        "observe_step_time",
        "release",
    ],
)
def test_policy_failures_leave_the_text_unchanged(open_llm: Open, solo: list[list[int]], where: str) -> None:
    """A bug of paceline there costs drafts, no request."""

    async def work(engine: AsyncEngine) -> None:
        outputs = await engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == solo
        assert (await engine.stats()).num_failed == 0

    run(serve(open_llm, "ngram", FaultyPolicy(ZeroDivisionError, where)), work)


@pytest.mark.parametrize("kind", FAULTS)
def test_failed_pass_ends_its_requests_only(open_llm: Open, solo: list[list[int]], kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: AsyncEngine) -> None:
        real = engine.loaded.engine.runtime.forward

        def broken(*arguments: object) -> None:
            raise kind("out of a pass")

        with monkeypatch.context() as patch:
            patch.setattr(engine.loaded.engine.runtime, "forward", broken)
            with pytest.raises(Exception, match="out of a pass"):
                await engine.generate(PROMPTS, GREEDY)
        assert engine.loaded.engine.runtime.forward == real
        assert (await engine.generate(PROMPTS[0], GREEDY))[0].token_ids == solo[0]

    run(serve(open_llm), work)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("function", ["assemble_pass", "commit"])
def test_exception_in_a_step_does_not_end_the_engine_thread(
    open_llm: Open, solo: list[list[int]], kind: type, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kind("out of a step")

    async def work(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(f"paceline.speculation.step.{function}", broken)
            with pytest.raises(Exception, match="out of a step"):
                await engine.generate(PROMPTS, GREEDY)
        assert (await engine.generate(PROMPTS[0], GREEDY))[0].token_ids == solo[0]

    run(serve(open_llm), work)


@pytest.mark.parametrize("kind", FAULTS)
def test_end_of_the_engine_thread_wakes_all_callers(open_llm: Open, kind: type) -> None:
    """Even what is there to keep the thread alive may fail."""

    async def work(engine: AsyncEngine) -> None:
        def broken(*_: object) -> None:
            raise kind("out of the thread")

        stream = engine.stream(PROMPTS[0], replace(GREEDY, max_tokens=400))
        await anext(stream)
        waiting = [asyncio.create_task(engine.generate(PROMPTS[1], GREEDY)), asyncio.create_task(engine.stats())]
        await asyncio.sleep(0)
        engine._worker._send_updates = broken  # type: ignore[method-assign]
        with pytest.raises(PacelineError, match=f"the engine's thread ended .{kind.__name__}: out of the thread"):
            async for _ in stream:
                pass
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(ended, PacelineError) or not isinstance(ended, BaseException)
        for late in (engine.generate(PROMPTS[0], GREEDY), anext(engine.stream(PROMPTS[0], GREEDY)), engine.stats()):
            with pytest.raises(PacelineError, match="the engine's thread ended"):
                await asyncio.wait_for(late, 5)

    run(serve(open_llm), work)


def test_error_in_async_stats_reaches_its_caller(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("paceline.engine.engine.deepcopy", FaultyDrafter(PanicException, "release").release)
            with pytest.raises(PacelineError, match="PanicException: out of a drafter"):
                await engine.stats()
        assert (await engine.stats()).num_running == 0

    run(serve(open_llm), work)


@pytest.mark.parametrize("is_used", [False, True])
def test_unreferenced_engine_ends_its_thread(open_llm: Open, is_used: bool) -> None:
    engine = serve(open_llm)
    thread, worker = engine._worker.thread, weakref.ref(engine._worker)
    if is_used:
        asyncio.run(engine.generate(PROMPTS[0], GREEDY))
    del engine
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    del thread
    deadline = time.monotonic() + PATIENCE_S
    while worker() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert worker() is None, "the model's memory is held"


def test_closed_async_engine_is_held_by_no_call_in_another_thread(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the event loop's pool may keep its last call for longer than the call takes, and with it the model's memory."""
    to_thread, calls = asyncio.to_thread, list[object]()

    async def keep(function: Callable[..., Any], *arguments: Any) -> Any:
        calls.append((function, arguments))
        return await to_thread(function, *arguments)

    engine = serve(open_llm)
    asyncio.run(engine.generate(PROMPTS[0], GREEDY))
    monkeypatch.setattr(asyncio, "to_thread", keep)
    worker = weakref.ref(engine._worker)
    asyncio.run(engine.close())
    del engine
    gc.collect()
    assert len(calls) == 1
    assert worker() is None, "the model's memory is held"


@needs_fork
@pytest.mark.parametrize("is_busy", [False, True])
def test_async_engine_used_in_a_forked_process_raises(open_llm: Open, is_busy: bool) -> None:
    engine = serve(open_llm)

    async def check_refused() -> None:
        for call in (engine.generate([5], GREEDY), anext(engine.stream([5], GREEDY)), engine.stats()):
            with pytest.raises(ConfigError, match=r"opened in process \d+, .* open one in each process"):
                await asyncio.wait_for(call, 10)
        await asyncio.wait_for(engine.close(), 10)

    def in_child() -> None:
        asyncio.events._set_running_loop(None)
        asyncio.run(check_refused())

    async def work(engine: AsyncEngine) -> None:
        busy = asyncio.create_task(engine.generate([7] * 80, replace(GREEDY, max_tokens=300))) if is_busy else None
        await asyncio.sleep(0.05)
        assert run_forked(in_child) == 0
        if busy is not None:
            assert len((await busy)[0].token_ids) == 300

    run(engine, work)
    assert threading.active_count() < 50
