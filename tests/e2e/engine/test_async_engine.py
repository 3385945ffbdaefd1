"""Many callers at once: each gets its own tokens and its own errors, and nothing stays of those who leave."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engine_targets import Open
from paceline import AsyncEngine, CapacityError, ConfigError, RequestError, SamplingParams
from paceline.outputs import RequestOutput
from paceline.speculation.draft_length.policy import FixedDraftLength

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.2, seed=4)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40, [30, 31], [8] * 100]
Serve = Callable[..., AsyncEngine]


@pytest.fixture
def serve(open_llm: Open) -> Serve:
    return lambda num_blocks=60, drafter="ngram", **options: AsyncEngine(open_llm(num_blocks, drafter, **options)._loaded)


@pytest.fixture(scope="module")
def solo(open_llm: Open) -> dict[str, list[RequestOutput]]:
    llm = open_llm(60)
    return {name: [llm.generate([prompt], params)[0] for prompt in PROMPTS] for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))}


def run(engine: AsyncEngine, work: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Work with an engine, then see that it holds nothing and its thread has ended."""

    async def all_of_it() -> None:
        async with engine:
            await asyncio.wait_for(work(engine), 60)

    asyncio.run(all_of_it())
    assert not engine._worker.thread.is_alive()
    cache = engine.loaded.engine.cache
    cache.check_consistency()
    assert cache.pool.num_free == cache.pool.num_blocks
    assert engine.loaded.engine.is_idle
    assert engine._worker._listeners == {}


async def until_idle(engine: AsyncEngine) -> None:
    while (stats := await engine.stats()).num_running + stats.num_waiting:
        await asyncio.sleep(0.001)


async def collect(stream: Any) -> tuple[str, list[int], RequestOutput]:
    text, tokens, output = "", [], None
    async for chunk in stream:
        text, tokens, output = text + chunk.text, tokens + chunk.token_ids, chunk.output
    assert output is not None
    return text, tokens, output


def test_concurrent_async_requests_equal_each_request_alone(serve: Serve, solo: dict[str, list[RequestOutput]]) -> None:
    async def work(engine: AsyncEngine) -> None:
        engine.loaded.engine.speculator.policy = FixedDraftLength(4)
        streams = [collect(engine.stream(prompt, SAMPLED)) for prompt in PROMPTS]
        whole = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
        *streamed, outputs = await asyncio.gather(*streams, asyncio.gather(*whole))
        for (text, tokens, output), alone in zip(streamed, solo["sampled"], strict=True):
            assert (text, tokens, output.token_ids, output.finish_reason) == (alone.text, alone.token_ids, alone.token_ids, "length")
        assert [one.token_ids for (one,) in outputs] == [alone.token_ids for alone in solo["greedy"]]
        several = await engine.generate([PROMPTS[0], PROMPTS[2]], replace(SAMPLED, n=2))
        assert [one.sample_index for one in several] == [0, 1, 0, 1]
        assert [several[0].token_ids, several[2].token_ids] == [solo["sampled"][0].token_ids, solo["sampled"][2].token_ids]
        stats = await engine.stats()
        assert (stats.num_finished, stats.completion_tokens) == (12, 12 * 20)
        assert stats.num_steps < 12 * 20, "they ran together"

    run(serve(), work)


def test_async_chat_and_stream_chat_give_the_same_answer(serve: Serve) -> None:
    messages = [{"role": "user", "content": "the cat"}]

    async def work(engine: AsyncEngine) -> None:
        (answer,) = await engine.chat(messages, GREEDY)
        text, _, output = await collect(engine.stream_chat(messages, GREEDY))
        assert (text, output.token_ids) == (answer.text, answer.token_ids)

    run(serve(), work)


@pytest.mark.parametrize("how", ["close", "cancel", "garbage", "timeout"])
def test_cancelled_async_request_is_aborted_and_frees_its_blocks(serve: Serve, solo: dict[str, list[RequestOutput]], how: str) -> None:
    async def leave(engine: AsyncEngine) -> None:
        stream = engine.stream([7] * 80, ENDLESS)
        await anext(stream)
        if how == "close":
            await stream.aclose()  # type: ignore[attr-defined]
        elif how == "garbage":
            del stream
            gc.collect()
        elif how == "cancel":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(engine.generate([[7], [8] * 90], ENDLESS), 0.01)
            await stream.aclose()  # type: ignore[attr-defined]

    async def work(engine: AsyncEngine) -> None:
        other = asyncio.create_task(engine.generate(PROMPTS[1], replace(GREEDY, max_tokens=100)))
        await leave(engine)
        await until_idle(engine)
        assert (await other)[0].token_ids[:20] == solo["greedy"][1].token_ids
        assert (await engine.stats()).num_aborted == (3 if how == "timeout" else 1)

    run(serve(), work)


def fail_processor(token_ids: Sequence[int], scores: np.ndarray) -> np.ndarray:
    if len(token_ids) > 6:
        raise ValueError("no more")
    return scores


def test_error_of_one_async_request_does_not_reach_others(serve: Serve, solo: dict[str, list[RequestOutput]]) -> None:
    async def work(engine: AsyncEngine) -> None:
        other = asyncio.create_task(engine.generate(PROMPTS[1], GREEDY))
        with pytest.raises(RequestError, match="no more"):
            await engine.generate([PROMPTS[0], [4]], replace(GREEDY, processors=[fail_processor]))
        with pytest.raises(RequestError, match="no more"):
            await collect(engine.stream(PROMPTS[0], replace(GREEDY, processors=[fail_processor])))
        with pytest.raises(RequestError, match="the prompt is empty"):
            await engine.generate([[5], []], GREEDY)
        with pytest.raises(RequestError, match="drafter is 'eagle', which is not loaded; loaded: ngram"):
            await anext(engine.stream(PROMPTS[0], GREEDY, speculation={"drafter": "eagle"}))
        engine.loaded.engine._num_blocks_for = lambda request: 1000  # type: ignore[method-assign]
        with pytest.raises(CapacityError, match="do not fit the cache"):
            await engine.generate(PROMPTS[0], GREEDY)
        del engine.loaded.engine._num_blocks_for
        assert (await other)[0].token_ids == solo["greedy"][1].token_ids
        await until_idle(engine)

    run(serve(), work)


def test_async_engine_close_ends_open_requests_and_refuses_new_ones(serve: Serve) -> None:
    async def work(engine: AsyncEngine) -> None:
        stream = engine.stream([7] * 40, ENDLESS)
        await anext(stream)
        waiting = asyncio.create_task(engine.generate([[8], [9]], ENDLESS))
        while (stats := await engine.stats()).num_running + stats.num_waiting < 3:
            await asyncio.sleep(0.01)
        await engine.close()
        assert [output.finish_reason for output in await waiting] == ["abort"] * 2
        _, tokens, output = await collect(stream)
        assert output.finish_reason == "abort"
        assert output.token_ids[-len(tokens) :] == tokens or not tokens
        await engine.close()
        for late in (engine.generate([5], GREEDY), anext(engine.stream([5], GREEDY)), engine.stats()):
            with pytest.raises(ConfigError, match="the engine is closed"):
                await late

    run(serve(), work)


@pytest.mark.filterwarnings("ignore:coroutine method 'aclose':RuntimeWarning")  # Python 3.13; the closed loop is intended
def test_async_engine_can_be_used_from_different_event_loops(serve: Serve, solo: dict[str, list[RequestOutput]]) -> None:
    """A loop that was closed over an open stream takes its request with it."""
    engine = serve()

    async def begin() -> None:
        await anext(engine.stream([7] * 40, ENDLESS))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()

    async def work(engine: AsyncEngine) -> None:
        assert (await engine.generate(PROMPTS[0], GREEDY))[0].token_ids == solo["greedy"][0].token_ids
        await until_idle(engine)

    run(engine, work)


def test_async_engine_takes_the_options_of_llm(directory: Any) -> None:
    options: dict[str, Any] = {"threads": 2, "device": "cpu", "kv_cache_gb": 0.01}
    engine = AsyncEngine.open(directory, drafter=["ngram", "suffix"], max_num_seqs=3, **options)
    assert engine.loaded.drafter_name == "ngram+suffix"
    assert engine.loaded.config.max_num_seqs == 3
    asyncio.run(engine.close())
    with pytest.raises(ConfigError, match=r"max_seqs is no argument of LLM: did you mean max_num_seqs\?"):
        AsyncEngine.open(directory, max_seqs=3)


def test_stream_batch_chunks_contain_their_prompt_index(serve: Serve, solo: dict[str, list[RequestOutput]]) -> None:
    async def work(engine: AsyncEngine) -> None:
        texts: dict[tuple[int, int], str] = {}
        ended: dict[tuple[int, int], RequestOutput] = {}
        async for index, chunk in engine.stream_batch(PROMPTS, replace(SAMPLED, n=2)):
            key = index, chunk.sample_index
            texts[key] = texts.get(key, "") + chunk.text
            if chunk.output is not None:
                ended[key] = chunk.output
        assert sorted(ended) == [(index, sample) for index in range(len(PROMPTS)) for sample in range(2)]
        assert all(texts[key] == output.text for key, output in ended.items())
        assert [ended[index, 0].token_ids for index in range(len(PROMPTS))] == [one.token_ids for one in solo["sampled"]]
        with pytest.raises(RequestError, match="stream_batch"):
            await anext(engine.stream_batch(PROMPTS, temprature=1))  # type: ignore[call-arg]

    run(serve(), work)


def test_async_engine_check_open_raises_after_close(serve: Serve) -> None:
    engine = serve()
    engine.check_open()
    asyncio.run(engine.close())
    with pytest.raises(ConfigError, match="closed"):
        engine.check_open()


def test_too_long_prompt_has_an_error_code(serve: Serve) -> None:
    async def work(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError) as caught:
            await engine.generate([1] * engine.loaded.input_processor.max_model_len)
        assert caught.value.code == "context_length_exceeded"

    run(serve(), work)
