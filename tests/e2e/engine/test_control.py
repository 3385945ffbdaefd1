"""Options of one request: cached prompts, samples, log-probabilities, drafting; none of them changes another token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from harness.engine_targets import Open, assert_clean, make, record_rows, run_to_end
from paceline import LLM, RequestError, SamplingParams, SpeculationOptions
from paceline.drafters.ngram import NgramDrafter
from paceline.runtimes.base import assemble_pass
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.2, top_p=0.9, seed=4)
PROMPT = [5, 6, 7, 8] * 20


class Spy(Drafter):
    """Drafts given tokens; records the requests for which `propose` and `observe` were called."""

    def __init__(self, name: str = "spy", draft_ids: Sequence[int] = (40, 41, 42, 43, 44, 45)) -> None:
        self.name = name
        self._draft_ids = draft_ids
        self.asked: list[tuple[Request, DraftBudget]] = []
        self.told: list[Request] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        self.asked += zip(requests, budgets, strict=True)
        return [DraftTree.chain(request.token_ids[-1], self._draft_ids, self.name) for request in requests]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self.told += [one.request for one in rows]


# Cached prompts


def test_prompts_are_shared_in_the_cache_only_under_one_salt(open_llm: Open) -> None:
    llm = open_llm(40)
    found = [llm.generate([PROMPT], GREEDY, cache_salt=salt)[0].usage.num_cached_tokens for salt in (None, "a", "a", b"a", "b", None)]
    assert found == [0, 0, 64, 64, 0, 64]
    with pytest.raises(RequestError, match="cache_salt is 5"):
        llm.generate([PROMPT], GREEDY, cache_salt=5)  # type: ignore[arg-type]


# Samples


def test_samples_share_the_prompt_blocks_and_equal_each_sample_alone(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = open_llm(40, enable_prefix_caching=False)
    expected = alone.generate([PROMPT], replace(SAMPLED, n=4))
    llm = open_llm(40)
    rows = record_rows(llm, monkeypatch)
    outputs = llm.generate([PROMPT, [9]], replace(SAMPLED, n=4))
    assert [output.sample_index for output in outputs] == [0, 1, 2, 3] * 2
    assert [output.token_ids for output in outputs[:4]] == [output.token_ids for output in expected]
    assert len({tuple(output.token_ids) for output in outputs[:4]}) == 4
    assert outputs[0].token_ids == alone.generate([PROMPT], SAMPLED)[0].token_ids
    assert [output.usage.num_cached_tokens for output in outputs] == [0, 64, 64, 64, 0, 0, 0, 0]
    assert rows[0] == 80 + 1, "the first of each prompt's samples"
    assert rows[1] >= 3 * 16, "the others' rows behind the shared blocks"
    assert_clean(llm)


def test_unseeded_samples_report_a_shared_seed_that_repeats_them(open_llm: Open) -> None:
    llm = open_llm(40)
    outputs = llm.generate(["the cat", "the cat"], replace(SAMPLED, seed=None, n=2))
    seeds = [output.seed for output in outputs]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    again = llm.generate("the cat", replace(SAMPLED, seed=seeds[0], n=2))
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs[:2]]


def test_aborting_the_first_sample_keeps_the_others(open_llm: Open) -> None:
    llm = open_llm(40)
    expected = [output.token_ids for output in llm.generate([PROMPT], replace(SAMPLED, n=3))]
    samples = llm._loaded.make_requests([PROMPT], replace(SAMPLED, n=3), {}, is_streamed=False)
    for sample in samples:
        llm.engine.add_request(sample)
    llm.engine.abort_request(samples[0])
    run_to_end(llm)
    assert [list(sample.output_token_ids) for sample in samples[1:]] == expected[1:]
    assert_clean(llm)


def test_stream_chunks_contain_their_sample_index(open_llm: Open) -> None:
    llm = open_llm(40)
    expected = [output.token_ids for output in llm.generate([PROMPT], replace(SAMPLED, n=3))]
    tokens: list[list[int]] = [[], [], []]
    ended = []
    for chunk in llm.stream(PROMPT, replace(SAMPLED, n=3)):
        tokens[chunk.sample_index] += chunk.token_ids
        ended += [chunk.output] if chunk.output is not None else []
    assert tokens == expected
    assert sorted(output.sample_index for output in ended) == [0, 1, 2]
    with pytest.raises(RequestError, match="give a list") as caught:
        llm.chat([{"role": "user", "content": "the cat"}], replace(SAMPLED, n=3))
    assert caught.value.parameter == "n"
    assert len(llm.chat([[{"role": "user", "content": "the cat"}]], replace(SAMPLED, n=3))) == 3


# Log-probabilities


def _rows(llm: LLM, token_ids: list[int]) -> np.ndarray:
    """[len(token_ids), V] float64 log-probabilities of a pass of its own."""
    cache = llm.engine.cache
    sequence = cache.new_sequence()
    plan = cache.reserve_rows(sequence, range(-1, len(token_ids) - 1))
    logits = (
        llm.runtime.forward(*assemble_pass([plan], [token_ids], [range(len(token_ids))])).logits[:, : llm.vocab_size].astype(np.float64)
    )
    cache.release_sequence(sequence)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("prompt", [[5], [5, 6], PROMPT, [11, 12, 13] * 70], ids=len)
def test_prompt_logprobs_come_from_the_rows_before_each_token(open_llm: Open, prompt: list[int]) -> None:
    llm = open_llm(40)
    llm.generate([prompt], GREEDY)  # its rows are in the cache, but these must run
    (output,) = llm.generate([prompt], replace(GREEDY, prompt_logprobs=2))
    found = output.prompt_logprobs
    assert output.usage.num_cached_tokens == 0
    assert found[0] is None
    assert [one.token_id for one in found[1:]] == prompt[1:]
    rows = _rows(llm, prompt)
    for index, one in enumerate(found[1:], start=1):
        assert one.logprob == pytest.approx(rows[index - 1, prompt[index]], abs=1e-5)
        assert [token for token, _ in one.top] == np.argsort(-rows[index - 1], kind="stable")[:2].tolist()
    assert output.token_ids == llm.generate([prompt], GREEDY)[0].token_ids


# How a request is drafted for


def test_request_without_speculation_calls_no_drafter(open_llm: Open) -> None:
    spy = Spy()
    llm = open_llm(40, spy)
    expected = open_llm(40).generate([[5], [6]], GREEDY)
    for off in ({"enabled": False}, {"num_speculative_tokens": 0}, SpeculationOptions(enabled=False)):
        (output,) = llm.generate([[5]], GREEDY, speculation=off)
        assert (spy.asked, spy.told) == ([], [])
        assert output.speculation.skip_counts == {SkipReason.PROMPT: 1, SkipReason.OFF: 23}
    off, on = make(llm, [5], GREEDY, speculation={"enabled": False}), make(llm, [6], GREEDY)
    llm.engine.speculator.policy = FixedDraftLength(4)
    for request in (off, on):
        llm.engine.add_request(request)
    run_to_end(llm)
    assert {request for request, _ in spy.asked} == {on} == set(spy.told)
    assert (off.stats.num_draft_tokens, on.stats.num_draft_tokens > 40) == (0, True)
    assert [off.output_token_ids, on.output_token_ids] == [output.token_ids for output in expected]
    assert_clean(llm)


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_num_speculative_tokens_of_a_request_limits_its_drafts(open_llm: Open, limit: int) -> None:
    spy = Spy()
    llm = open_llm(40, spy)
    llm.engine.speculator.policy = FixedDraftLength(4)
    limited, free = make(llm, [5], GREEDY, speculation={"num_speculative_tokens": limit}), make(llm, [6], GREEDY)
    for request in (limited, free):
        llm.engine.add_request(request)
    run_to_end(llm)
    assert max(budget.max_depth for request, budget in spy.asked if request is limited) == min(limit, 4)
    assert max(budget.max_depth for request, budget in spy.asked if request is free) == 4
    assert len(limited.stats.num_draft_tokens_by_position) == min(limit, 4)


def test_request_can_select_one_of_several_drafters(open_llm: Open) -> None:
    first, second = Spy("first"), Spy("second")
    llm = open_llm(40, [first, second])
    llm.engine.speculator.policy = FixedDraftLength(4)
    outputs = llm.generate([[5]], GREEDY, speculation={"drafter": "second"})
    assert first.asked == []
    assert len(second.asked) > 10
    assert outputs[0].token_ids == llm.generate([[5]], GREEDY)[0].token_ids
    assert len(first.asked) > 10
    named, anybody = make(llm, [5], GREEDY, speculation={"drafter": "second"}), make(llm, [6], GREEDY)
    for request in (named, anybody):
        llm.engine.add_request(request)
    first.asked.clear()
    run_to_end(llm)
    assert {request for request, _ in first.asked} == {anybody}
    assert_clean(llm)


def test_has_candidates_is_called_only_for_the_named_drafter(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    members, looked_at = [Spy("first"), Spy("second")], list[str]()
    for one in members:
        monkeypatch.setattr(one, "has_candidates", lambda request, name=one.name: looked_at.append(name) or name == "first")
    llm = open_llm(40, members)
    llm.engine.speculator.policy = FixedDraftLength(4)
    llm.generate([[5]], GREEDY, speculation={"drafter": "second"})
    assert set(looked_at) == {"second"}
    assert members[1].asked == [], "it cannot draft"
    assert_clean(llm)


def test_a_drafter_that_is_not_loaded_is_refused_by_name(open_llm: Open) -> None:
    llm = open_llm(40, [NgramDrafter(), Spy()])
    for wanted, loaded in (("eagle", "ngram, spy"), ("", "ngram, spy")):
        with pytest.raises(RequestError, match=f"drafter is {wanted!r}, which is not loaded; loaded: {loaded}") as caught:
            llm.generate([[5], [6]], GREEDY, speculation={"drafter": wanted})
        assert caught.value.parameter == "speculation.drafter"
    with pytest.raises(RequestError, match="loaded: none"):
        open_llm(40).generate([5], GREEDY, speculation={"drafter": "ngram"})
    assert_clean(llm)


WRONG = [
    ({"enabled": 1}, "speculation.enabled"),
    ({"drafter": 5}, "speculation.drafter"),
    ({"num_speculative_tokens": -1}, "speculation.num_speculative_tokens"),
    ({"num_speculative_tokens": 65}, "speculation.num_speculative_tokens"),
    ({"num_speculative_tokens": True}, "speculation.num_speculative_tokens"),
    ({"on": True}, "speculation"),
    ("off", "speculation"),
]


@pytest.mark.parametrize(("wrong", "name"), WRONG, ids=str)
def test_invalid_speculation_option_is_refused(wrong: object, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        SpeculationOptions.parse(wrong)  # type: ignore[arg-type]
    assert caught.value.parameter == name


def test_acceptance_rule_is_reported(open_llm: Open) -> None:
    (output,) = open_llm(40, "ngram").generate([5], GREEDY)
    assert output.speculation.as_dict()["acceptance"] == output.speculation.acceptance == "match"
