"""Cached prompts: drafting finds as much of them as plain decoding does, finds its own rows of them too, and no token changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engine_jobs import HEADS, Solo, open_drafting, write_heads_and_target
from harness.engine_traffic import check_clean
from harness.exact_targets import HYBRIDS, skip_without_kernels
from paceline import LLM, SamplingParams
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.medusa.network import MedusaNetwork
from paceline.drafters.recurrent_heads.head import RecurrentHead
from paceline.outputs import RequestOutput
from paceline.runtimes.base import ForwardBatch
from paceline.speculation.drafter import Drafter

BLOCK = 32
DEPTH = 4
NUM_BLOCKS = 60  # nothing is evicted
SEED = 7
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True, seed=SEED)
SAMPLED = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.1, top_p=0.9, seed=SEED, logprobs=2)
TEXT_DRAFTERS = ["ngram", "suffix", "draft_model", "draft_tree", "several", "oracle", "chaos"]
CASES = [
    *(("llama", kind) for kind in TEXT_DRAFTERS),
    ("sliding", "draft_model"),
    ("sliding", "chaos"),
    ("gemma3n", "draft_model"),
    ("gemma4", "draft_model"),
    ("gpt_oss", "chaos"),
    *((name, kind) for name in HYBRIDS for kind in ("draft_model", "chaos")),
    *((target, kind) for target, kinds in HEADS.items() for kind in kinds),
]
WITH_ROWS = [(target, kind) for target, kind in CASES if kind in ("draft_model", "draft_tree", "eagle", "eagle3", "mtp", "medusa")]
OpenWith = Callable[..., LLM]
Targets = Callable[[str], tuple[Solo, dict[str, Path]]]
TalksOf = Callable[[str], "Talks"]


@pytest.fixture(scope="module")
def targets(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Targets:
    folder = tmp_path_factory.mktemp("heads")
    skip_without_kernels()

    @cache
    def make(name: str) -> tuple[Solo, dict[str, Path]]:
        directory, drafts = write_heads_and_target(folder, name) if name in HEADS else (checkpoint(name), {})
        return Solo(directory, "f32"), drafts

    return make


class Talks:
    """A target's prompts and its outputs without cached rows, computed once."""

    def __init__(self, solo: Solo) -> None:
        random = np.random.default_rng(3)
        self._solo = solo
        self._behind_hits: dict[SamplingParams, list[RequestOutput]] = {}
        self.prompt = random.integers(1, solo.vocab_size, 100).tolist()
        self.others = [random.integers(1, solo.vocab_size, length).tolist() for length in (31, 32, 33)]

    def answer(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        return self._solo.answer(prompt, params)[0]

    def sequence(self, params: SamplingParams) -> list[list[int]]:
        """Prompts in an order in which they find those before them: the same again, talks that go on, other ends, borders of blocks."""
        first, second = self.prompt, [*self.prompt[:70], *self.others[0]]
        turns = [first, first, second, second, [*self.prompt[:64]], [*self.prompt[:65]], [*self.prompt[:40]]]
        turns += [prompt for other in self.others for prompt in (other, other, [*other, 5])]
        for _ in range(3):
            first = [*first, *self.answer(first, params).token_ids, 9, 8]
            turns.append(first)
        return [*turns, *turns[-2:]]

    def behind_hits(self, params: SamplingParams) -> list[RequestOutput]:
        """Outputs of plain decoding with a prefix cache, in this order of requests."""
        if params not in self._behind_hits:
            self._behind_hits[params] = ask(
                self._solo.open("none", num_blocks=NUM_BLOCKS, state_interval=BLOCK), self.sequence(params), params
            )
        return self._behind_hits[params]

    def known(self, params: SamplingParams) -> dict[tuple[tuple[int, ...], int], list[int]]:
        return {(tuple(prompt), SEED): self.answer(prompt, params).token_ids for prompt in self.sequence(params)}


@pytest.fixture(scope="module")
def talks_of(targets: Targets) -> TalksOf:
    return cache(lambda name: Talks(targets(name)[0]))


@pytest.fixture
def open_with(targets: Targets, talks_of: TalksOf) -> OpenWith:
    """A target by name with a drafter by kind, which gets the output for `params`."""

    def open_it(name: str, kind: str, params: SamplingParams = GREEDY, **options: Any) -> LLM:
        solo, drafts = targets(name)
        draft = drafts.get(kind, solo.directory)
        options = {"state_interval": BLOCK, **options}  # a hit goes as far as there is a state
        return open_drafting(kind, solo, talks_of(name).known(params), draft, depth=DEPTH, num_blocks=NUM_BLOCKS, **options)

    return open_it


def ask(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, **asked: Any) -> list[RequestOutput]:
    """One after the other."""
    outputs = [llm.generate([prompt], params, **asked)[0] for prompt in prompts]
    check_clean(llm)
    return outputs


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.usage.num_cached_tokens for output in outputs]


@pytest.mark.spread(0.25)
@pytest.mark.parametrize(("name", "kind"), CASES, ids=map("-".join, CASES))
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_outputs_after_prefix_hits_are_equal_with_and_without_drafts(
    params: SamplingParams, name: str, kind: str, open_with: OpenWith, talks_of: TalksOf
) -> None:
    talks = talks_of(name)
    prompts = talks.sequence(params)
    plain, drafted = talks.behind_hits(params), ask(open_with(name, kind, params), prompts, params)
    expected = [talks.answer(prompt, params) for prompt in prompts]
    for outputs in (plain, drafted):
        assert [(one.token_ids, one.text, one.logprobs) for one in outputs] == [(one.token_ids, one.text, one.logprobs) for one in expected]
    assert cached(drafted) == cached(plain)
    assert cached(plain)[:7] == [0, 96, 64, 96, 32, 64, 32]
    assert cached(plain)[-2] == (len(prompts[-2]) - 1) // BLOCK * BLOCK, "the same again: all but its last block"
    assert sum(output.speculation.num_draft_tokens for output in drafted) > 0 or kind == "ngram"


@pytest.mark.parametrize(("name", "kind"), CASES, ids=map("-".join, CASES))
def test_equal_prompts_in_one_batch_share_cached_blocks(
    name: str, kind: str, open_with: OpenWith, talks_of: TalksOf, large_counts: bool
) -> None:
    if not large_counts and kind not in ("chaos", "draft_model", "eagle3", "mtp"):
        pytest.skip("left to make test-long")
    talks = talks_of(name)
    llm = open_with(name, kind)
    ask(llm, [talks.prompt], GREEDY)
    outputs = llm.generate([talks.prompt, talks.prompt[:64], *[talks.prompt] * 3], GREEDY)
    assert cached(outputs) == [96, 32, 96, 96, 96]
    assert [output.token_ids for output in outputs] == [talks.answer(output.prompt_token_ids, GREEDY).token_ids for output in outputs]
    check_clean(llm)


# What drafters compute of a prompt


@pytest.fixture
def drafter_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass of a drafter that catches up with a text; `watch` also counts those of a draft model."""
    rows: list[int] = []
    real_true, real_medusa = RecurrentHead.run_target_feature_pairs, MedusaNetwork.forward

    def run_target_feature_pairs(self: RecurrentHead, pairs: Sequence[Any], **options: Any) -> Any:
        rows.append(sum(len(one.token_ids) for one in pairs))
        return real_true(self, pairs, **options)

    def forward(self: MedusaNetwork, features: Any, *args: Any) -> Any:
        rows.append(len(features))
        return real_medusa(self, features, *args)

    monkeypatch.setattr(RecurrentHead, "run_target_feature_pairs", run_target_feature_pairs)
    monkeypatch.setattr(MedusaNetwork, "forward", forward)
    return rows


def watch(drafter: Drafter | None, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows.clear()
    if isinstance(drafter, DraftModelDrafter):
        real = drafter.runtime.forward

        def forward(inputs: Any, batch: ForwardBatch, wanted: Any) -> Any:
            rows.append(len(batch.positions))
            return real(inputs, batch, wanted)

        monkeypatch.setattr(drafter.runtime, "forward", forward)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "kind"), WITH_ROWS, ids=map("-".join, WITH_ROWS))
def test_drafter_prefills_only_the_last_block_of_a_cached_prompt(
    name: str,
    kind: str,
    params: SamplingParams,
    open_with: OpenWith,
    talks_of: TalksOf,
    drafter_rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
    large_counts: bool,
) -> None:
    if not large_counts and (params is SAMPLED) != (kind in ("draft_tree", "eagle3", "mtp")):
        pytest.skip("left to make test-long")
    prompt = talks_of(name).prompt
    llm = open_with(name, kind, params)
    watch(llm.drafter, drafter_rows, monkeypatch)
    ask(llm, [prompt], params)
    first = list(drafter_rows)
    assert kind == "medusa" or max(first) >= len(prompt) - BLOCK, "the first time it reads all of it"
    drafter_rows.clear()
    ask(llm, [prompt], params)
    behind = len(prompt) - 96  # tokens after the cached blocks
    assert 0 < max(drafter_rows) <= max(behind + 2, DEPTH + 2), drafter_rows
    assert sum(first) - sum(drafter_rows) >= 95 or kind == "medusa", "a pair joins two tokens: there is one less"
    assert len(drafter_rows) <= len(first)


@pytest.mark.spread(0.5)
@pytest.mark.parametrize(("name", "kind"), WITH_ROWS, ids=map("-".join, WITH_ROWS))
def test_drafts_after_a_prefix_hit_equal_drafts_after_prefill(
    name: str, kind: str, open_with: OpenWith, talks_of: TalksOf, large_counts: bool
) -> None:
    """Its own rows of the prompt are the ones it had: drafts and what became of them are the same."""
    talks = talks_of(name)
    llm = open_with(name, kind)
    prompts = talks.sequence(GREEDY)[:: 1 if large_counts else 3]
    outputs, fresh = ask(llm, prompts, GREEDY), ask(open_with(name, kind, enable_prefix_caching=False), prompts, GREEDY)
    assert max(cached(outputs)) >= 96
    assert max(cached(fresh)) == 0
    for output, one in zip(outputs, fresh, strict=True):
        assert abs(output.speculation.num_accepted_tokens - one.speculation.num_accepted_tokens) <= 1, len(
            output.prompt_token_ids
        )  # fast kernels may tie
        assert output.speculation.num_accepted_tokens > 0 or name == "llama"


# Salts


@pytest.mark.parametrize(("name", "kind"), WITH_ROWS, ids=map("-".join, WITH_ROWS))
def test_cached_blocks_of_another_salt_are_not_matched(
    name: str,
    kind: str,
    open_with: OpenWith,
    talks_of: TalksOf,
    drafter_rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
    large_counts: bool,
) -> None:
    if not large_counts and (name, kind) not in (("llama", "draft_model"), ("legible", "eagle3"), ("successor", "mtp")):
        pytest.skip("left to make test-long")
    talks = talks_of(name)
    llm = open_with(name, kind)
    watch(llm.drafter, drafter_rows, monkeypatch)
    found, read = [], []
    for salt in (None, "one", "other", "one", b"other", None, ""):
        drafter_rows.clear()
        (output,) = llm.generate([talks.prompt], GREEDY, cache_salt=salt)
        assert output.token_ids == talks.answer(talks.prompt, GREEDY).token_ids
        found.append(output.usage.num_cached_tokens)
        read.append(max(drafter_rows) > BLOCK)
    assert found == [0, 0, 0, 96, 96, 96, 96]
    assert kind == "medusa" or read == [True, True, True, False, False, False, False], "nor does the drafter"
    check_clean(llm)


def test_requests_with_different_salts_run_together(open_with: OpenWith, talks_of: TalksOf) -> None:
    talks = talks_of("llama")
    llm = open_with("llama", "draft_model", SAMPLED)
    expected = talks.answer(talks.prompt, SAMPLED).token_ids
    for salt in ("one", "other", "one"):
        outputs = llm.generate([talks.prompt] * 3, replace(SAMPLED, n=1), cache_salt=salt)
        assert [output.token_ids for output in outputs] == [expected] * 3
    check_clean(llm)
