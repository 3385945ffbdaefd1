"""Promise 1: token ids are the same with speculation off or on, whatever drafts, alone or in a batch, greedy or sampled."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import draft_always
from harness.answer_drafters import ChaosDrafter, OracleDrafter
from harness.engine_jobs import TEXT_DRAFTERS, TREES, Solo, make_drafter
from harness.engine_traffic import edited
from harness.exact_targets import EVERYTHING, HYBRIDS, skip_without_kernels
from harness.planted_faults import (
    leave_kept_rows_of_a_tree_where_they_were,
    let_siblings_see_one_another,
    process_rows_without_the_path_to_them,
)
from harness.spread import mark_cases
from paceline import LLM, SamplingParams
from paceline.kv_cache.recurrent_state import RecurrentStateCache
from paceline.kv_cache.row_plan import RowPlan, path_to
from paceline.proof.exactness.adversaries import Answers, WrongDrafter
from paceline.sampling.processors import EditedRow
from paceline.speculation import speculator as speculator_module
from paceline.speculation import verify as verify_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter

Directory = Callable[[str], Path]
GivenOf = Callable[[str, str], "Given"]
Faulty = Callable[[], None]
SAMPLINGS = {
    "greedy": SamplingParams(),
    "greedy-penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4),
    "top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=11),
    "top-k-penalties": SamplingParams(temperature=1.3, top_k=20, frequency_penalty=0.5, repetition_penalty=1.1, seed=12),
    "free": SamplingParams(temperature=1.3, seed=13),
    "everything": SamplingParams(
        temperature=0.9, min_p=0.02, logit_bias={5: 2.0, 7: -3.0}, banned_token_ids=(9, 11), min_tokens=8, repetition_penalty=1.05, seed=14
    ),
    "ends": SamplingParams(temperature=1.3, stop_token_ids=(3, 17, 40, 61), min_tokens=4, seed=15),
}
SAMPLE = [
    "llama-f32",
    "qwen2-bf16",
    "qwen3-f32",
    "mini-bf16",
    "sliding-f32",
    "gemma4-f32",
    "gpt_oss-bf16",
    "qwen3_5-f32",
    "gemma3n-bf16",
]  # of `make test`
IN_A_NORMAL_RUN = {  # a third of the drafters each, and each with at least two targets
    (target, kind)
    for number, target in enumerate(SAMPLE)
    for place, kind in enumerate(TEXT_DRAFTERS)
    if (kind == "draft_model" if target == "mini-bf16" else (place + number) % 3 == 0)
}


@dataclass(frozen=True)
class Given:
    """A target decoded plainly, one request at a time, and its prompts."""

    solo: Solo
    prompts: list[list[int]]
    max_tokens: int

    def params(self, name: str) -> SamplingParams:
        """Each sampling gets a seed, by which adversaries distinguish requests."""
        return replace(SAMPLINGS[name], seed=100 + sorted(SAMPLINGS).index(name), max_tokens=self.max_tokens, ignore_eos=True)

    def answers(self, name: str) -> list[list[int]]:
        return [self.solo.answer(prompt, self.params(name))[0].token_ids for prompt in self.prompts]

    def known(self) -> Answers:
        """Outputs given to the adversaries, by prompt and seed."""
        return {
            (tuple(prompt), self.params(name).seed or 0): answer
            for name in SAMPLINGS
            for prompt, answer in zip(self.prompts, self.answers(name), strict=True)
        }

    def open(self, drafter: str | Drafter | list[Drafter], num_speculative_tokens: int = 4, **options: Any) -> LLM:
        return self.solo.open(drafter, num_blocks=80, num_speculative_tokens=num_speculative_tokens, **options)


@pytest.fixture(scope="module")
def given_of(checkpoint: Directory, large_counts: bool, seed: int) -> GivenOf:
    @cache
    def make(name: str, dtype: str) -> Given:
        skip_without_kernels()
        solo, random = Solo(checkpoint(name), dtype), np.random.default_rng(seed)
        assert solo.llm.numerics == "exact"
        max_tokens = (96 if name != "mini" else 48) if large_counts else (24 if name != "mini" else 12)
        return Given(solo, [random.integers(1, solo.vocab_size, length).tolist() for length in (1, 31, 33, 70)], max_tokens)

    return make


def predictions(llm: LLM, given: Given, name: str) -> list[list[int]] | None:
    """Predictions that are mostly right, where a drafter reads them."""
    if not llm.engine.speculator.uses_predicted_outputs:
        return None
    return [edited(answer) for answer in given.answers(name)]


def compare(llm: LLM, given: Given, samplings: Sequence[str]) -> int:
    """Tokens compared: each prompt alone under every other sampling, then all prompts as one batch."""
    count = 0
    for number, name in enumerate(samplings):
        wanted = given.params(name)
        expected_texts = predictions(llm, given, name)
        outputs = []
        if number % 2 == 0:
            for index, prompt in enumerate(given.prompts):
                outputs += llm.generate([prompt], wanted, prediction=expected_texts and expected_texts[index], namespace="one")
        outputs += llm.generate(given.prompts, wanted, prediction=expected_texts, namespace="one")
        for index, output in enumerate(outputs):
            expected = given.answers(name)[index % len(given.prompts)]
            assert output.token_ids == expected, f"{name}, prompt {index}: {output.speculation.as_dict()}"
            assert output.speculation.num_emitted_tokens == len(expected) == output.usage.completion_tokens
            count += len(expected)
        llm.engine.cache.check_consistency()
        assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks
    return count


@pytest.mark.parametrize(("target", "kind"), mark_cases(product(map("-".join, EVERYTHING), TEXT_DRAFTERS), IN_A_NORMAL_RUN))
def test_drafts_of_every_drafter_change_no_token(
    target: str,
    kind: str,
    given_of: GivenOf,
    checkpoint: Directory,
    large_counts: bool,
    seed: int,
    tally: "Counter[str]",
) -> None:
    name, dtype = target.split("-")
    given = given_of(name, dtype)
    random = np.random.default_rng(seed + sum(map(ord, target + kind)))
    embedded = given.solo.directory / "draft"
    draft = embedded if embedded.is_dir() else given.solo.directory
    half = (SAMPLE.index(target) // 2 + TEXT_DRAFTERS.index(kind)) % 2 if not large_counts else 0  # a drafter has both
    samplings = list(SAMPLINGS)[half :: 1 if large_counts else 2]
    for num_speculative_tokens in random.permutation(np.arange(1, 13))[: 2 if large_counts else 1].tolist():
        width = 3 if kind == "draft_tree" else 1
        drafter = make_drafter(kind, given.known(), given.solo.vocab_size, draft, seed)
        llm = given.open(drafter, num_speculative_tokens, tree_width=width)
        llm.engine.speculator.policy = FixedDraftLength(num_speculative_tokens, max_rows=12 if kind in TREES else None)
        before = llm.runtime.num_passes
        tally["token ids compared with plain decoding"] += compare(llm, given, samplings)
        assert llm.runtime.num_passes > before


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_every_step_runs_one_target_forward_pass(given_of: GivenOf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    given = given_of(name, "f32")
    llm = given.open(OracleDrafter(given.known()))
    before = llm.runtime.num_passes
    (output,) = llm.generate([given.prompts[0]], given.params("greedy"))
    assert llm.runtime.num_passes - before == output.speculation.steps
    assert output.speculation.mean_acceptance_length > 3


@pytest.mark.parametrize("name", HYBRIDS)
def test_rejections_run_no_pass_and_copy_no_state(given_of: GivenOf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_of(name, "f32")
    llm = given.open(WrongDrafter(given.known(), given.solo.vocab_size), enable_prefix_caching=False)
    llm.engine.speculator.policy = FixedDraftLength(4)
    made, real = [], RecurrentStateCache._new_state
    monkeypatch.setattr(RecurrentStateCache, "_new_state", lambda memory, **given: made.append(given) or real(memory, **given))
    before = llm.runtime.num_passes
    (output,) = llm.generate([given.prompts[0]], given.params("greedy"))
    assert output.speculation.num_accepted_tokens == 0
    assert output.speculation.num_draft_tokens >= given.max_tokens
    assert llm.runtime.num_passes - before == output.speculation.steps == given.max_tokens
    assert len(made) == 1, "the state of the request"


def test_correct_prediction_is_accepted_almost_everywhere(given_of: GivenOf) -> None:
    given = given_of("llama", "f32")
    llm = given.open("prediction")
    llm.engine.speculator.policy = FixedDraftLength(4)
    wanted = given.params("free")
    outputs = llm.generate(given.prompts, wanted, prediction=given.answers("free"))
    for index, output in enumerate(outputs):
        assert output.token_ids == given.answers("free")[index]
        assert output.speculation.acceptance_rate == 1.0
        assert output.speculation.steps <= 2 + given.max_tokens / 5


def test_draft_model_runs_one_pass_per_draft_token(given_of: GivenOf) -> None:
    given = given_of("llama", "f32")
    llm = given.open(str(given.solo.directory))
    llm.engine.speculator.policy = FixedDraftLength(4)
    drafter = llm.drafter
    (output,) = llm.generate([given.prompts[2]], given.params("greedy"))
    assert drafter.runtime.num_passes == output.speculation.num_draft_tokens  # type: ignore[union-attr]


def test_masked_tree_differs_from_plain_decoding_only_at_near_ties(given_of: GivenOf, seed: int) -> None:
    """With fast numerics: where a token differs, its logit and the other's are the same but for rounding."""
    pytest.importorskip("torch")
    given = given_of("llama", "f32")
    answers = given.known()
    llm = LLM(
        str(given.solo.directory),
        dtype="f32",
        backend="torch",
        device="cpu",
        max_model_len=512,
        kv_cache_gb=0.2,
        drafter=ChaosDrafter(answers, given.solo.vocab_size, seed=seed, raises=False),
    )
    llm.engine.speculator.policy = FixedDraftLength(6, max_rows=12)
    for index, output in enumerate(llm.generate(given.prompts, given.params("greedy"))):
        expected = given.answers("greedy")[index]
        assert output.numerics == "fast"
        different = next((i for i, (one, other) in enumerate(zip(output.token_ids, expected, strict=True)) if one != other), None)
        if different is not None:
            assert margin(llm, given.prompts[index] + expected[:different], output.token_ids[different], expected[different]) < 1e-4


def margin(llm: LLM, context: list[int], one: int, other: int) -> float:
    from paceline.runtimes.base import assemble_pass

    cache = llm.engine.cache
    sequence = cache.new_sequence()
    plan = cache.reserve_rows(sequence, range(-1, len(context) - 1))
    row = llm.runtime.forward(*assemble_pass([plan], [context], [[len(context) - 1]])).logits[0]
    cache.release_sequence(sequence)
    return abs(float(row[one] - row[other]))


# Planted faults: each must make the comparison above fail.


@pytest.fixture
def faulty(given_of: GivenOf, seed: int) -> Faulty:
    """The comparison on a runtime."""
    given = given_of("llama", "f32")
    known = given.known()  # here, so that a fault does not get into the answers that tokens are compared with

    def run() -> None:
        llm = given.open(ChaosDrafter(known, given.solo.vocab_size, seed=seed, raises=False), 6)
        llm.engine.speculator.policy = FixedDraftLength(6, max_rows=12)
        compare(llm, given, list(SAMPLINGS))

    return run


def test_token_comparison_passes_without_a_fault(faulty: Faulty) -> None:
    faulty()


def keep_a_sibling_path(patch: pytest.MonkeyPatch) -> None:
    real = RowPlan.committed_path

    def sibling_path(plan: RowPlan, node: int) -> object:
        as_deep = [other for other in range(len(plan.parents)) if len(path_to(plan.parents, other)) == len(path_to(plan.parents, node))]
        return real(plan, as_deep[-1] if as_deep[0] == node else as_deep[0])

    patch.setattr(RowPlan, "committed_path", sibling_path)


def keep_a_rejected_draft_in_history(patch: pytest.MonkeyPatch) -> None:
    """The cache continues after the whole first path instead of after the accepted tokens."""
    real = verify_module.verify

    def keeps_a_draft(tree: Any, logits: Any, request: Any, walked: object = None) -> object:
        result = real(tree, logits, request, walked)
        if len(tree.token_ids) > 1:
            request.processor.commit(tree.token_ids[1])
        return result

    patch.setattr(speculator_module, "verify", keeps_a_draft)


def reuse_noise_in_a_step(patch: pytest.MonkeyPatch) -> None:
    real = EditedRow.draw
    first: dict[int, int] = {}

    def same_noise_in_a_step(row: EditedRow, seed: int, sample_index: int, position: int) -> int:
        return real(row, seed, sample_index, first.setdefault(position // 2, position))

    patch.setattr(EditedRow, "draw", same_noise_in_a_step)


FAULTS = (
    keep_a_sibling_path,
    let_siblings_see_one_another,
    leave_kept_rows_of_a_tree_where_they_were,
    keep_a_rejected_draft_in_history,
    reuse_noise_in_a_step,
    process_rows_without_the_path_to_them,
)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_token_faults_are_found(plant: Callable[[Any], None], faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception if plant is keep_a_sibling_path else AssertionError):  # or a table that no longer fits
        faulty()
