"""Promise 1 with heads, draft models and combined drafters, trained for the target or not: drafts change no token."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import set_drafters
from harness.engine_jobs import Solo
from harness.engine_traffic import check_clean, edited
from harness.exact_targets import skip_without_kernels
from harness.head_targets import KINDS, PAIRS, Pair
from harness.spread import mark_cases
from paceline import LLM, SamplingParams
from paceline.outputs import RequestOutput
from paceline.speculation import speculator as speculator_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.tree import DraftSampling, DraftTree

NUM_BLOCKS = 7  # of the cache: the first four of the texts below while they are short, or two of them at their end
SHAPES = {"chain": (4, 1), "tree": (6, 5)}  # depth and width; a tree may have 31 rows
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=21),
    "penalties": SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.3, seed=22),
    "ends": SamplingParams(temperature=1.2, stop_token_ids=(7, 19, 31, 43, 55), min_tokens=3, seed=23),
    "samples": SamplingParams(temperature=1.0, top_k=20, n=2, seed=24),
}
IN_A_NORMAL_RUN = {
    *(("random-f32", kind, "tree") for kind in ("peagle", "medusa", "draft_model", "dflash", "dflash2", "pard", "pard2", "all")),
    ("random-f32", "suffix", "chain"),
    *(("random-bf16", kind, "chain") for kind in ("eagle", "mtp-extra_layer")),
    ("random-bf16", "eagle3", "tree"),
    *(("known-f32", kind, "tree") for kind in ("mtp-mtp", "prediction")),
    ("known-f32", "eagle-deaf", "chain"),
    *(("cyclic-f32", kind, "tree") for kind in ("medusa-rows", "dspark")),
    ("experts-f32", "mtp", "tree"),
    ("gemma4-f32", "assistant", "tree"),
    ("gemma4-f32", "assistant-gguf", "chain"),
    ("experts-f32", "mtp-stacked", "chain"),
}
CASES = [
    *((f"{name}-{dtype}", kind, shape) for name in KINDS for dtype in ("f32", "bf16") for kind in KINDS[name] for shape in SHAPES),
]


@dataclass(frozen=True)
class Given:
    """A target with its drafters and its requests."""

    solo: Solo
    pairs: dict[str, Pair]
    texts: list[list[int]]
    max_tokens: int

    def params(self, name: str) -> SamplingParams:
        return replace(SAMPLINGS[name], max_tokens=self.max_tokens, ignore_eos=True)

    def answers(self, name: str, index: int) -> list[RequestOutput]:
        return self.solo.answer(self.texts[index], self.params(name))

    def open(self, kind: str, depth: int = 4, width: int = 1, **options: Any) -> LLM:
        """The target with one of its drafters, which nothing but their own budgets holds back."""
        pair = self.pairs[kind]
        solo = copy(self.solo)
        solo.directory = pair.target
        given = {"num_blocks": NUM_BLOCKS, "num_speculative_tokens": depth, "tree_width": width, **options}
        llm = solo.open(pair.drafter, **given)  # type: ignore[arg-type]
        llm.engine.speculator.policy = FixedDraftLength(depth, max_rows=1 + depth * width)
        llm.engine.scheduler.limits = replace(llm.engine.scheduler.limits, spare_blocks=0)  # begin while there is any room at all
        return llm

    def ask(self, llm: LLM, name: str, asked: Sequence[int]) -> list[RequestOutput]:
        """The answers to some of the texts as a batch, with predictions where they are read."""
        reads = llm.engine.speculator.uses_predicted_outputs
        predictions = [edited(self.answers(name, index)[0].token_ids) for index in asked] if reads else None
        return llm.generate([self.texts[index] for index in asked], self.params(name), prediction=predictions)

    def compare(self, llm: LLM, name: str, asked: Sequence[int]) -> int:
        """Tokens compared, all equal."""
        outputs = self.ask(llm, name, asked)
        expected = [answer for index in asked for answer in self.answers(name, index)]
        for output, answer in zip(outputs, expected, strict=True):
            told = f"{name}, prompt of {len(output.prompt_token_ids)}, {output.usage.num_cached_tokens} cached, {output.speculation}"
            assert output.token_ids == answer.token_ids, told
            assert output.speculation.num_emitted_tokens == len(output.token_ids), told
            assert output.finish_reason == answer.finish_reason, told
        llm.engine.cache.check_consistency()
        return sum(len(answer.token_ids) for answer in expected)


GivenOf = Callable[[str], Given]


@pytest.fixture(scope="module")
def given_of(tmp_path_factory: pytest.TempPathFactory, large_counts: bool, seed: int) -> Iterator[GivenOf]:
    pairs: dict[str, dict[str, Pair]] = {}
    made: dict[str, Given] = {}

    def make(target: str) -> Given:
        name, dtype = target.split("-")
        if target not in made:
            skip_without_kernels()
            if name not in pairs:
                pairs[name] = PAIRS[name](tmp_path_factory.mktemp(name))
                assert set(pairs[name]) == set(KINDS[name])
            plain = next(pair.target for pair in pairs[name].values() if pair.drafter != "mtp")
            solo = Solo(plain, dtype)
            assert solo.llm.numerics == "exact"
            random = np.random.default_rng(seed)
            head, *others = (random.integers(1, solo.vocab_size, length).tolist() for length in (64, 9, 12, 20))
            texts = [*others, [*head[:32], *others[0]], [*head, *others[1]]]  # of a batch that grows out of its room the longest is last
            texts += [[*head[:40], *others[2]]] if large_counts else []
            made[target] = Given(solo, pairs[name], texts, 60 if large_counts else 50)
        return made[target]

    yield make
    made.clear()


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every tree that is walked from here on, by either rule."""
    seen: list[DraftTree] = []

    def recording(real: Callable[..., Any]) -> Callable[..., Any]:
        def walk(tree: DraftTree, *others: Any) -> Any:
            if tree.num_draft_tokens > 0:
                seen.append(tree)
            return real(tree, *others)

        return walk

    for rule in ("verify", "verify_rejection"):
        monkeypatch.setattr(speculator_module, rule, recording(getattr(speculator_module, rule)))
    return seen


@pytest.mark.parametrize(("target", "kind", "shape"), mark_cases(CASES, IN_A_NORMAL_RUN))
def test_heads_of_every_kind_change_no_token(
    target: str,
    kind: str,
    shape: str,
    given_of: GivenOf,
    proposals: list[DraftTree],
    large_counts: bool,
    tally: "Counter[str]",
) -> None:
    """As a batch that does not fit, so that some are preempted, and one by one, with cached prefixes."""
    given = given_of(target)
    llm = given.open(kind, *SHAPES[shape])
    for sampling in SAMPLINGS if large_counts else ("greedy", "sampled"):
        num_preemptions = llm.stats().num_preemptions
        count = given.compare(llm, sampling, range(4))
        assert llm.stats().num_preemptions > num_preemptions or "ends" in sampling
        num_cached = llm.stats().num_cached_tokens
        for index in (3, 4, 5, 3) if large_counts else (3, 4):
            count += given.compare(llm, sampling, [index])
        assert llm.stats().num_cached_tokens > num_cached
        tally["token ids equal with heads"] += count
    assert llm.stats().drafter_failures == 0
    assert len(proposals) > 20
    if shape == "tree" and kind not in ("ngram", "suffix", "prediction"):
        largest = max(tree.num_draft_tokens for tree in proposals)
        assert largest == 3 if kind == "medusa-tgi" else largest >= 24  # it is so confident that it drafts no other candidates
    check_clean(llm)


@pytest.mark.parametrize("target", ["random-f32", "random-bf16"])
def test_collecting_hidden_states_for_a_head_changes_no_token(target: str, given_of: GivenOf, tally: "Counter[str]") -> None:
    """Nor the last bit of a row, as far as the probabilities of the tokens show it."""
    given = given_of(target)
    llm = given.open("eagle3", enable_prefix_caching=False)
    assert llm.drafter is not None
    assert len(llm.drafter.needs.layers) == 3
    set_drafters(llm)
    for sampling in ("greedy", "sampled"):
        params = replace(given.params(sampling), logprobs=2, prompt_logprobs=2)
        outputs = llm.generate(given.texts, params)
        for output, text in zip(outputs, given.texts, strict=True):
            (alone,) = given.solo.answer(text, params)
            assert output.token_ids == alone.token_ids
            assert (output.logprobs, output.prompt_logprobs) == (alone.logprobs, alone.prompt_logprobs)
            tally["token ids equal with heads"] += len(output.token_ids)


# The second rule


SAMPLED = ("eagle", "eagle3", "peagle", "medusa", "mtp-mtp", "draft_model")
DRAWN = [
    *(("random", kind, "chain", DraftSampling.SAMPLED) for kind in (*SAMPLED, "dflash", "dflash2", "dspark", "pard", "pard2")),
    *(("random", kind, "tree", DraftSampling.WITHOUT_REPLACEMENT) for kind in ("draft_model", "pard")),
    ("random", "dflash2", "tree", DraftSampling.DETERMINISTIC),
    ("random", "medusa", "tree", DraftSampling.SAMPLED),  # its heads' draws make a chain, whatever room there is
    ("known", "suffix", "tree", DraftSampling.DETERMINISTIC),
    ("known", "eagle", "chain", DraftSampling.SAMPLED),
    ("known", "eagle", "tree", DraftSampling.DETERMINISTIC),
]


@pytest.mark.spread(0.5)
@pytest.mark.parametrize(("name", "kind", "shape", "proposal"), DRAWN, ids=["-".join(case[:3]) for case in DRAWN])
def test_rejection_sampling_works_with_every_head(
    name: str, kind: str, shape: str, proposal: DraftSampling, given_of: GivenOf, proposals: list[DraftTree], tally: "Counter[str]"
) -> None:
    """Greedy texts are the plain ones; sampled ones end where they must, and are the same again for the same seed."""
    given = given_of(f"{name}-f32")
    llm = given.open(kind, *SHAPES[shape], acceptance="rejection")
    tally["token ids equal with heads"] += given.compare(llm, "greedy", range(4))
    assert {tree.draft_sampling for tree in proposals} == {DraftSampling.DETERMINISTIC}
    proposals.clear()
    sampled = given.open(kind, *SHAPES[shape], acceptance="rejection", num_blocks=40, enable_prefix_caching=False)
    params = replace(given.params("sampled"), max_tokens=24)
    for asked in (params, replace(params, stop_token_ids=(7, 19, 31, 43, 55))):
        texts: list[list[int]] = []
        for seed in (5, 5, 6):
            outputs = sampled.generate(given.texts, replace(asked, seed=seed))
            texts.append([token for output in outputs for token in output.token_ids])
            for output in outputs:
                check_rejected(output, asked)
        assert texts[0] == texts[1] != texts[2]
        if name == "random":
            assert texts[0] != [token for text in given.texts for token in given.solo.answer(text, replace(asked, seed=5))[0].token_ids]
        tally["token ids drawn by rejection"] += len(texts[0])
    assert {tree.draft_sampling for tree in proposals} == {proposal}
    check_clean(sampled)


def check_rejected(output: RequestOutput, params: SamplingParams) -> None:
    """With acceptance "rejection" a text ends as requested, and its counters add up."""
    stats, ids, stops = output.speculation, output.token_ids, set(params.stop_token_ids)
    assert stats.acceptance == stats.as_dict()["acceptance"] == "rejection"
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_bonus_tokens == len(ids)
    assert not stops & set(ids[:-1])
    assert output.finish_reason == ("stop" if ids[-1] in stops else "length")
    assert output.finish_reason == "stop" or len(ids) == params.max_tokens


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_head_with_the_target_distribution_is_accepted_by_both_rules(acceptance: str, given_of: GivenOf) -> None:
    """What both rules would do with the target's own distribution: keep every draw, but for roundings."""
    given = given_of("known-f32")
    for kind in ("eagle", "mtp-mtp"):
        llm = given.open(kind, acceptance=acceptance, num_blocks=40)
        outputs = llm.generate([[1, *text] for text in given.texts if len(text) > 30], given.params("sampled"))
        drafted, accepted = (
            sum(getattr(output.speculation, name) for output in outputs) for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        assert accepted >= 0.9 * drafted > 60
