"""One `LLM` in several threads, in its own step, in forked processes: the tokens are those it gives alone, or one clear error."""

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from harness.engine_targets import Open, assert_clean
from harness.forked import needs_fork, run_forked
from paceline import ConfigError, RequestError, SamplingParams
from paceline.outputs import RequestOutput
from paceline.runtimes.base import ForwardOutput

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.2, seed=4, logprobs=1)
PROMPTS = [[5, 6, 7], [9] * 40, [30, 31], [8] * 100, [11, 12] * 20]
PATIENCE_S = 60


@pytest.fixture(scope="module")
def solo(open_llm: Open) -> dict[int, list[RequestOutput]]:
    llm = open_llm(80)
    return {index: [llm.generate([prompt], params)[0] for prompt in PROMPTS] for index, params in enumerate((GREEDY, SAMPLED))}


def in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns; none may take longer than our patience."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(work) for work in works]]


def test_requests_of_several_threads_share_steps(open_llm: Open) -> None:
    """A second caller need not wait until the first one is served."""
    llm = open_llm(80)
    long = replace(GREEDY, max_tokens=400)
    in_threads([lambda: llm.generate([5, 6], long)] * 3)
    assert llm.stats().num_steps < 3 * 400


def test_dropped_stream_frees_blocks_while_another_thread_steps(open_llm: Open) -> None:
    llm = open_llm(80)
    busy = threading.Thread(target=lambda: llm.generate([5], replace(GREEDY, max_tokens=700)))
    busy.start()
    for _ in range(20):
        stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=500))
        next(stream)
        del stream
        gc.collect()
    busy.join(PATIENCE_S)
    assert not busy.is_alive()
    assert_clean(llm)
    assert (llm.stats().num_aborted, llm.stats().num_finished) == (20, 1)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_generate_called_within_a_step_fails_that_request(open_llm: Open, call: str) -> None:
    llm = open_llm(80)

    def greedy_caller(token_ids: Sequence[int], scores: Any) -> Any:
        list(getattr(llm, call)([5], GREEDY))
        return scores

    with pytest.raises(RequestError, match="called from within its own step"):
        llm.generate([PROMPTS[0]], replace(GREEDY, processors=[greedy_caller]))
    assert llm.generate([PROMPTS[0]], GREEDY)[0].finish_reason == "length"
    assert_clean(llm)


@needs_fork
def test_forked_process_can_use_an_idle_model(open_llm: Open, solo: dict[int, list[RequestOutput]]) -> None:
    llm = open_llm(80, "ngram")
    llm.generate(PROMPTS[:2], GREEDY)

    def generate() -> None:
        assert llm.generate([PROMPTS[0]], SAMPLED)[0].token_ids == solo[1][0].token_ids

    assert run_forked(generate) == 0
    generate()


@needs_fork
def test_forked_process_runs_no_requests_of_other_threads(open_llm: Open, solo: dict[int, list[RequestOutput]]) -> None:
    llm = open_llm(80)
    streams: list[Any] = []
    thread = threading.Thread(target=lambda: (streams.append(llm.stream(PROMPTS[1], GREEDY)), next(streams[0])))
    thread.start()
    thread.join(PATIENCE_S)
    mine = llm.stream(PROMPTS[0], GREEDY)
    tokens = list(next(mine).token_ids)

    def finish_mine() -> None:
        assert sum((chunk.token_ids for chunk in mine), tokens) == solo[0][0].token_ids

    def go_on_alone() -> None:
        finish_mine()
        assert llm.stats().num_aborted == 1
        assert llm.engine.is_idle

    assert run_forked(go_on_alone) == 0
    finish_mine()
    streams[0].close()
    assert_clean(llm)


def test_requantize_while_another_thread_prepares_a_call_is_refused(open_llm: Open, solo: dict[int, list[RequestOutput]]) -> None:
    llm = open_llm(80, "ngram")
    is_preparing, may_go_on = threading.Event(), threading.Event()

    class Slow(list[SamplingParams]):
        def __iter__(self) -> Any:
            is_preparing.set()
            may_go_on.wait(PATIENCE_S)
            return super().__iter__()

    def exchange() -> None:
        is_preparing.wait(PATIENCE_S)
        with pytest.raises(ConfigError, match="cannot be requantized while a request is running"):
            llm.requantize("int8")
        may_go_on.set()

    for call in (lambda: llm.generate([PROMPTS[0]], Slow([GREEDY])), lambda: [list(llm.stream(PROMPTS[0], Slow([GREEDY])))[-1].output]):
        is_preparing.clear()
        may_go_on.clear()
        (output,), _ = in_threads([call, exchange])
        assert output.token_ids == solo[0][0].token_ids
    assert llm.engine.is_idle


@needs_fork
def test_llm_used_after_a_fork_during_a_step_raises(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(80)
    real, is_inside, may_go_on = llm.runtime.forward, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> ForwardOutput:
        is_inside.set()
        may_go_on.wait(PATIENCE_S)
        return real(*arguments)

    def check_refused() -> None:
        for call in (lambda: llm.generate([5], GREEDY), lambda: next(llm.stream([5], GREEDY)), llm.stats):
            with pytest.raises(ConfigError, match="forked while another thread used the model"):
                call()

    monkeypatch.setattr(llm.runtime, "forward", slow)
    thread = threading.Thread(target=lambda: llm.generate([5], GREEDY))
    thread.start()
    is_inside.wait(PATIENCE_S)
    assert run_forked(check_refused) == 0
    may_go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert_clean(llm)
