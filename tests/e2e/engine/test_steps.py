"""Step records on request: the draft tree, its accepted tokens, and the tokens that the step emitted."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from harness.answer_drafters import ChaosDrafter, OracleDrafter
from harness.checkpoints import VOCAB_SIZE
from harness.engine_targets import Open, assert_clean
from paceline import AsyncEngine, RequestError, RequestOutput, SamplingParams, SpeculationOptions
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.rejection import Acceptance
from paceline.speculation.request import TokenOrigin
from paceline.speculation.stats import StepRecord

PROMPTS = [[5, 6, 7, 8], [9, 10], [11] * 40]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.2, seed=4)
TREES = {"trees": True}


def check_steps(output: RequestOutput) -> None:
    """That the steps of an output are the output, and that each tree holds what was kept of it."""
    steps, stats = output.steps, output.speculation
    assert steps is not None
    assert [token_id for step in steps for token_id in step.token_ids] == output.token_ids
    assert [origin for step in steps for origin in origins_of(step)] == output.origins
    assert len(steps) == stats.steps
    assert sum(len(step.draft_token_ids) for step in steps) == stats.num_draft_tokens
    assert sum(len(step.accepted_nodes) for step in steps) == stats.num_accepted_tokens
    assert sum(step.skip_reason is not None for step in steps) == stats.plain_steps
    start = 0
    for step in steps:
        assert step.start == start
        start += len(step.token_ids)
        check_tree(step)


def check_tree(step: StepRecord) -> None:
    """That parents come before their children, and that the accepted nodes are a path whose tokens were emitted."""
    size = len(step.draft_token_ids)
    assert len(step.parents) == len(step.sources) == size
    assert all(0 <= parent <= place for place, parent in enumerate(step.parents))
    assert (size == 0) == (step.skip_reason is not None)
    node = 0
    for accepted in step.accepted_nodes:
        assert step.parents[accepted - 1] == node
        node = accepted
    kept = tuple(step.draft_token_ids[accepted - 1] for accepted in step.accepted_nodes)
    assert step.token_ids[: len(kept)] == kept
    assert len(step.token_ids) == len(kept) + 1


def origins_of(step: StepRecord) -> Iterator[TokenOrigin]:
    for place in range(len(step.token_ids)):
        if place < len(step.accepted_nodes):
            yield TokenOrigin.ACCEPTED
        else:
            yield TokenOrigin.PLAIN if step.skip_reason is not None else TokenOrigin.BONUS


def answers(open_llm: Open, params: Sequence[SamplingParams]) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """What plain decoding answers, by prompt and seed."""
    llm = open_llm(60)
    outputs = [output for one in params for output in llm.generate(PROMPTS, one)]
    return {(tuple(output.prompt_token_ids), output.seed): output.token_ids for output in outputs}


@pytest.mark.parametrize("num_blocks", [60, 6])
def test_step_records_contain_the_accepted_nodes_and_bonus_token(open_llm: Open, num_blocks: int, seed: int) -> None:
    """Random trees, with end tokens, ids out of range and exceptions; with six blocks trees are pruned and requests preempted."""
    params = [replace(GREEDY, seed=1), SAMPLED, replace(SAMPLED, max_tokens=17, stop_token_ids=[12, 20, 33])]
    known = answers(open_llm, params[:2])
    llm = open_llm(num_blocks, ChaosDrafter(known, VOCAB_SIZE, seed=seed, eos=12))
    llm.engine.speculator.policy = FixedDraftLength(6)
    shapes: set[bool] = set()
    for one in params:
        outputs = llm.generate(PROMPTS, one, speculation=TREES)
        for output in outputs:
            check_steps(output)
            shapes |= {step.parents != tuple(range(len(step.parents))) for step in output.steps or () if step.draft_token_ids}
        plain = llm.generate(PROMPTS, one)
        assert [output.steps for output in plain] == [None] * 3
        assert [output.token_ids for output in plain] == [output.token_ids for output in outputs]
    assert shapes == {True, False}, "chains and trees with branches were drafted"
    assert_clean(llm)


def test_step_record_may_end_with_an_accepted_token(open_llm: Open) -> None:
    known = answers(open_llm, [SAMPLED])
    llm = open_llm(60, OracleDrafter(known))
    llm.engine.speculator.policy = FixedDraftLength(4)
    outputs = llm.generate(PROMPTS, replace(SAMPLED, max_tokens=13), speculation=TREES)
    for output in outputs:
        check_steps(output)
        assert output.speculation.acceptance_rate > 0.9
        assert len(output.token_ids) == 13


def test_step_records_of_rejection_sampling_contain_the_accepted_nodes(open_llm: Open, directory: object) -> None:
    llm = open_llm(60, str(directory), acceptance="rejection")
    assert isinstance(llm.drafter, DraftModelDrafter)
    assert llm.engine.speculator.acceptance is Acceptance.REJECTION
    llm.engine.speculator.policy = FixedDraftLength(4)
    for output in llm.generate(PROMPTS, SAMPLED, speculation=TREES):
        check_steps(output)
        assert {source for step in output.steps or () for source in step.sources} == {"draft_model"}


def test_stream_chunks_contain_each_step_record_once(open_llm: Open) -> None:
    known = answers(open_llm, [SAMPLED])
    llm = open_llm(60, ChaosDrafter(known, VOCAB_SIZE, eos=12, raises=False))
    llm.engine.speculator.policy = FixedDraftLength(4)
    chunks = list(llm.stream(PROMPTS[0], SAMPLED, speculation=TREES))
    for chunk in chunks:
        assert [token_id for step in chunk.steps for token_id in step.token_ids] == chunk.token_ids
    last = chunks[-1].output
    assert last is not None
    assert [step for chunk in chunks for step in chunk.steps] == last.steps
    check_steps(last)
    assert all(chunk.steps == [] for chunk in llm.stream(PROMPTS[0], SAMPLED))


def test_samples_streamed_by_async_engine_have_separate_step_records(directory: object) -> None:
    async def ask() -> None:
        async with AsyncEngine.open(str(directory), drafter="ngram", threads=1, kv_cache_gb=0.02) as engine:
            steps: dict[int, list[StepRecord]] = {0: [], 1: []}
            async for chunk in engine.stream(PROMPTS[2], replace(SAMPLED, n=2), speculation=TREES):
                steps[chunk.sample_index] += chunk.steps
                if chunk.output is not None:
                    check_steps(chunk.output)
                    assert chunk.output.steps == steps[chunk.sample_index]
            assert steps[0] != steps[1]

    asyncio.run(ask())


def test_step_records_are_json_serialisable() -> None:
    record = StepRecord(3, (7, 8), (7, 9), (0, 0), ("ngram", "ngram"), (1,))
    assert record.as_dict() == {
        "start": 3,
        "token_ids": [7, 8],
        "draft_token_ids": [7, 9],
        "parents": [0, 0],
        "sources": ["ngram", "ngram"],
        "accepted_nodes": [1],
        "skip_reason": None,
        "expected_tokens": None,
        "expected_speedup": None,
    }


def test_speculation_trees_option_must_be_true_or_false() -> None:
    with pytest.raises(RequestError, match="trees is 1: use true or false"):
        SpeculationOptions.parse({"trees": 1})
