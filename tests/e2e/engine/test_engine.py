"""Who runs when on a real cache, and that whoever waits, fails, goes away or takes guesses never costs another request a thing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint
from harness.engine_targets import Open, assert_clean, make, record_rows, run_to_end
from paceline import LLM, CapacityError, CheckpointError, RequestError, SamplingParams
from paceline.runtimes.base import ForwardOutput
from paceline.speculation import step as step_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.1, seed=3, frequency_penalty=0.3, logprobs=1)
PROMPTS = [[5, 6, 7], [9] * 30, [30, 31], [8] * 31, [11, 12] * 40]
NAN_ID = 96


class BushyDrafter(Drafter):
    """A path that is known to be right, and many wrong tokens next to its first one, which take further blocks."""

    name = "bushy"

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._answers = answers

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> DraftTree:
        known = self._answers[tuple(request.token_ids[: request.num_prompt_tokens])][request.num_output_tokens :][:2]
        return DraftTree.from_nodes(request.token_ids[-1], [*known, *range(40, 60)], [*range(len(known)), *[0] * 20], self.name)


@pytest.fixture(scope="module")
def solo(open_llm: Open) -> list[list[int]]:
    llm = open_llm(40)
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[Request]]:
    """The requests of every step."""
    seen: list[list[Request]] = []
    real = step_module.step

    def remembering(requests: Sequence[Request], *args: object, **options: object) -> None:
        seen.append(list(requests))
        real(requests, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("paceline.engine.engine.step", remembering)
    return seen


def spare(llm: LLM, count: int) -> LLM:
    """The same with so many blocks kept for each request that runs: with none they preempt one another all the time."""
    llm.engine.scheduler.limits = replace(llm.engine.scheduler.limits, spare_blocks=count)
    return llm


def test_max_num_seqs_limits_running_requests(open_llm: Open, solo: list[list[int]], steps: list[list[Request]]) -> None:
    llm = open_llm(40, max_num_seqs=2)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == solo
    assert max(map(len, steps)) == 2
    assert llm.stats().num_preemptions == 0


def test_preempted_request_reuses_its_cached_blocks_without_counting_a_hit(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(40)
    request = make(llm, [7] * 100, LONG)
    llm.engine.add_request(request)
    for _ in range(31):
        llm.engine.step()
    assert len(request.token_ids) == 131
    llm.engine.scheduler.preempt(request)
    assert request.cached_sequence.committed_len == 0
    rows = record_rows(llm, monkeypatch)
    run_to_end(llm)
    assert rows[0] == 131 - 128, "four blocks were full"
    assert request.num_cached_tokens == 0, "what it had computed itself is no hit"


@pytest.mark.parametrize("num_blocks", [4, 6, 9, 40])
def test_drafts_never_take_blocks_of_committed_tokens(open_llm: Open, solo: list[list[int]], num_blocks: int) -> None:
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, solo, strict=True)}
    llm = open_llm(num_blocks, BushyDrafter(answers), max_model_len=110)
    llm.engine.speculator.policy = FixedDraftLength(4, max_rows=24)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == solo
    assert (sum(output.speculation.num_dropped_tokens for output in outputs) > 20) == (num_blocks <= 9)
    # it is the branches that go: the first path, which is right, stays but for a step or two at the border of a block
    assert sum(output.speculation.skip_counts[SkipReason.NO_MEMORY] for output in outputs) <= 3
    assert all(output.speculation.mean_acceptance_length > 2.2 for output in outputs)
    assert_clean(llm)


def test_waiting_prompt_is_counted_once_in_cache_statistics(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = spare(open_llm(9, max_model_len=200), 2)
    prompts = [[5] * 64 + [6], [5] * 64 + [7, *range(20, 50)], [9] * 3, [5] * 64 + [8]]
    refusals = []
    refuse = llm.engine.scheduler._blocks.release_prefix
    monkeypatch.setattr(llm.engine.scheduler._blocks, "release_prefix", lambda request: (refusals.append(request), refuse(request)))
    outputs = llm.generate(prompts, replace(GREEDY, max_tokens=50))
    stats = llm.engine.cache.prefix_stats
    assert len(refusals) > 1
    assert llm.stats().num_preemptions == 0
    assert stats.num_looked_up_tokens == sum(map(len, prompts))
    assert stats.num_hit_tokens == llm.stats().num_cached_tokens == sum(output.usage.num_cached_tokens for output in outputs) > 0
    assert_clean(llm)


def test_prompts_fill_a_pass_next_to_decoding_requests(open_llm: Open, steps: list[list[Request]], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(200)
    rows = record_rows(llm, monkeypatch)
    llm.generate([[7], [8] * 300, [9] * 300, [10] * 300], GREEDY)
    short = steps[0][0]
    assert short.num_prompt_tokens == 1
    assert all(short in requests for requests in steps[:24])
    # prompts have 256 rows of a pass, whatever decodes next to them
    assert rows[:5] == [256, 1 + 256, 1 + 1 + 256, 1 + 1 + 1 + 133, 4]
    assert sum(rows) == 1 + 3 * 300 + 4 * 23


@pytest.mark.parametrize("max_num_batched_tokens", [5, 9, 14])
def test_drafts_take_the_rows_left_in_a_pass(
    open_llm: Open, directory: Path, solo: list[list[int]], max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(40, str(directory), max_num_batched_tokens=max_num_batched_tokens)
    llm.engine.speculator.policy = FixedDraftLength(4)
    rows = record_rows(llm, monkeypatch)
    outputs = llm.generate(PROMPTS[:1] + PROMPTS[2:3] + [[40], [50], [60]], GREEDY)
    assert [output.token_ids for output in outputs[:2]] == [solo[0], solo[2]]
    assert max(rows) <= max_num_batched_tokens
    assert sum(output.speculation.skip_counts[SkipReason.PASS_FULL] for output in outputs) == 0 or max_num_batched_tokens < 14
    assert all(output.speculation.num_draft_tokens > 0 for output in outputs) or max_num_batched_tokens == 5


def test_request_is_a_capacity_error_if_other_sequences_hold_the_blocks(open_llm: Open) -> None:
    llm = open_llm(4)
    (expected,) = llm.generate([[8] * 40], GREEDY)
    held = llm.engine.cache.new_sequence()
    llm.engine.cache.reserve_rows(held, range(-1, 95))
    with pytest.raises(CapacityError, match=r"40 rows of a request do not fit in the cache: 1 of 4 blocks are free"):
        llm.generate([[8] * 40], GREEDY)
    assert llm.generate([[8]], replace(GREEDY, max_tokens=4))[0].finish_reason == "length"
    llm.engine.cache.release_sequence(held)
    assert llm.generate([[8] * 40], GREEDY)[0].token_ids == expected.token_ids
    assert_clean(llm)


@pytest.mark.parametrize("num_prompt", [1, 100, 127])
def test_output_ends_with_length_when_the_cache_is_full(open_llm: Open, num_prompt: int) -> None:
    llm = open_llm(4, "ngram")
    (expected,) = open_llm(40).generate([[5] * num_prompt], replace(GREEDY, max_tokens=128 - num_prompt))
    (output,) = llm.generate([[5] * num_prompt], replace(GREEDY, max_tokens=400))
    assert (output.token_ids, output.finish_reason) == (expected.token_ids, "length")
    assert_clean(llm)


# Aborts


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 9])
def test_abort_frees_blocks_and_leaves_other_requests(open_llm: Open, solo: list[list[int]], num_steps: int) -> None:
    llm = open_llm(40, "ngram", max_num_seqs=2)
    requests = [make(llm, prompt, GREEDY) for prompt in PROMPTS]
    victims = [make(llm, [7] * 300, GREEDY), make(llm, [9, 9, 9], GREEDY)]
    llm.engine.add_request(victims[0])  # runs; the other one waits to the last
    for request in (*requests, victims[1]):
        llm.engine.add_request(request)
    for _ in range(num_steps):
        llm.engine.step()
    for victim in (*victims, *victims):
        llm.engine.abort_request(victim)
    assert [victim.finish_reason for victim in victims] == [FinishReason.ABORT] * 2
    llm.engine.cache.check_consistency()
    run_to_end(llm)
    assert [list(request.output_token_ids) for request in requests] == solo
    assert (llm.stats().num_aborted, llm.stats().num_finished) == (2, len(PROMPTS))
    output = llm._loaded.make_output(victims[0])
    assert (output.finish_reason, output.usage.completion_tokens) == ("abort", len(output.token_ids))
    assert output.timing.prompt_s >= 0
    assert_clean(llm)


def test_abort_during_a_step_takes_effect_after_the_step(open_llm: Open, solo: list[list[int]]) -> None:
    llm = open_llm(40)
    requests: list[Request] = []

    def leave(token_ids: Sequence[int], scores: np.ndarray) -> np.ndarray:
        if len(token_ids) == 8:
            for request in requests:
                llm.engine.abort_request(request)
        return scores

    requests += [make(llm, PROMPTS[0], replace(GREEDY, processors=[leave])), make(llm, [4, 4], GREEDY)]
    other = make(llm, PROMPTS[1], GREEDY)
    for request in (*requests, other):
        llm.engine.add_request(request)
    run_to_end(llm)
    assert [len(request.output_token_ids) for request in requests] == [6, 6]
    assert [(request.finish_reason, request.error) for request in requests] == [(FinishReason.ABORT, None)] * 2
    assert llm.stats().num_aborted == 2
    assert list(other.output_token_ids) == solo[1]
    assert_clean(llm)


# Requests and passes that fail


def fail_processor(token_ids: Sequence[int], scores: np.ndarray) -> np.ndarray:
    if len(token_ids) > 6:
        raise ValueError("no more")
    return scores


def test_failing_request_ends_alone_with_its_error(open_llm: Open, solo: list[list[int]]) -> None:
    llm = open_llm(40, "ngram")
    other = llm.stream(PROMPTS[1], GREEDY)
    tokens = next(other).token_ids
    with pytest.raises(RequestError, match="fail_processor raised ValueError: no more") as caught:
        llm.generate([PROMPTS[0], PROMPTS[2]], replace(GREEDY, processors=[fail_processor]))
    assert caught.value.parameter == "processors"
    for chunk in other:
        tokens += chunk.token_ids
    assert tokens == solo[1]
    assert (llm.stats().num_failed, llm.stats().num_aborted) == (1, 1), "the second of the two was given up"
    assert_clean(llm)


def test_failing_stream_raises_although_another_call_ran_the_step(open_llm: Open) -> None:
    llm = open_llm(40)
    stream = llm.stream(PROMPTS[0], replace(GREEDY, processors=[fail_processor]))
    assert len(next(stream).token_ids) == 1
    llm.generate(PROMPTS[1], GREEDY)
    with pytest.raises(RequestError, match="no more"):
        list(stream)
    assert_clean(llm)


def test_request_with_nan_logits_fails_and_its_blocks_are_not_reused(tmp_path: Path, open_llm: Open) -> None:
    from safetensors.numpy import load_file, save_file

    directory = write_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_ID] = np.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(directory), threads=2, device="cpu", drafter="none", kv_cache_gb=0.001)
    params = replace(GREEDY, banned_token_ids=[NAN_ID])
    (expected,) = llm.generate([PROMPTS[1]], params)
    bad, good = make(llm, [NAN_ID] * 300, params), make(llm, PROMPTS[1], params)
    llm.engine.add_request(bad)
    llm.engine.add_request(good)
    run_to_end(llm)
    assert isinstance(bad.error, CheckpointError)
    assert list(good.output_token_ids) == expected.token_ids
    again = make(llm, [NAN_ID] * 300, params)
    llm.engine.add_request(again)
    run_to_end(llm)
    assert again.num_cached_tokens == 0
    assert_clean(llm)


def test_failed_allocation_in_a_pass_preempts_the_youngest_request(
    open_llm: Open, solo: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(40)
    real, num_calls = llm.runtime.forward, 0

    def full_now_and_then(*arguments: Any) -> ForwardOutput:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (5, 11):
            raise CapacityError("full")
        return real(*arguments)

    monkeypatch.setattr(llm.runtime, "forward", full_now_and_then)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == solo
    assert llm.stats().num_preemptions == 2
    assert_clean(llm)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("drafter", ["none", "ngram", "self", ["ngram", "suffix"]], ids=str)
@pytest.mark.parametrize("params", [GREEDY, LONG], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_behind_pass", [False, True])
def test_interrupt_during_a_forward_pass_does_not_end_other_streams(
    is_behind_pass: bool, params: SamplingParams, drafter: Any, open_llm: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams are open; one is interrupted, and other calls are before that."""
    params = replace(params, max_tokens=80)  # however many guesses are kept, nobody ends before that
    alone = open_llm(40)
    expected = [alone.generate([prompt], params)[0] for prompt in PROMPTS[:2]]
    llm = open_llm(40, str(directory) if drafter == "self" else drafter)
    streams = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
    real = llm.runtime.forward

    def interrupted(*arguments: Any) -> ForwardOutput:
        if is_behind_pass:
            real(*arguments)
        raise KeyboardInterrupt

    taken: list[list[int]] = [[], []]
    for turn in range(6):
        for stream, tokens in zip(streams, taken, strict=True):
            tokens.extend(next(stream).token_ids)
        with monkeypatch.context() as patch:
            patch.setattr(llm.runtime, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS[2 + turn % 2], params) if turn < 5 else [*streams[1]]
        llm.engine.cache.check_consistency()
    assert next(streams[1], None) is None, "its requests are given up"
    for chunk in streams[0]:
        taken[0].extend(chunk.token_ids)
    assert chunk.output is not None
    assert (taken[0], chunk.output.text, chunk.output.logprobs) == (expected[0].token_ids, expected[0].text, expected[0].logprobs)
    assert taken[1] == expected[1].token_ids[: len(taken[1])]
    assert (llm.stats().num_finished, llm.stats().num_aborted, llm.stats().num_failed) == (1, 6, 0)
    assert_clean(llm)


@pytest.mark.parametrize("function", ["commit", "reserve_rows", "assemble_pass"])
def test_interrupt_outside_the_forward_pass_ends_all_its_requests(function: str, open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(40)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(step_module, function, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], GREEDY)
    with pytest.raises(Exception, match="interrupted"):
        next(stream)
    assert_clean(llm)
