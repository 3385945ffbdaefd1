"""Promise 1: token ids are the same with speculation off or on, whatever drafts, alone or in a batch, greedy or sampled."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import draft_always
from harness.answer_drafters import ChaosDrafter, OracleDrafter
from harness.exact_targets import EVERYTHING, HYBRIDS, skip_without_kernels
from harness.spread import mark_cases
from paceline import LLM, SamplingParams
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter, SuffixStore
from paceline.kv_cache.recurrent_state import RecurrentStateCache
from paceline.kv_cache.row_plan import RowPlan, path_to
from paceline.proof.exactness.adversaries import WrongDrafter
from paceline.runtimes.base import Pass
from paceline.sampling.processors import EditedRow, LogitsProcessor
from paceline.speculation import speculator as speculator_module
from paceline.speculation import step as step_module
from paceline.speculation import verify as verify_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter

Directory = Callable[[str], Path]
PlainOf = Callable[[str, str], "Plain"]
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
DRAFTERS = ["none", "ngram", "suffix", "suffix_tree", "prediction", "draft_model", "draft_tree", "several", "oracle", "wrong", "chaos"]
IN_A_NORMAL_RUN = {  # a third of the drafters each, and each with at least two targets
    (target, kind)
    for number, target in enumerate(SAMPLE)
    for place, kind in enumerate(DRAFTERS)
    if (kind == "draft_model" if target == "mini-bf16" else (place + number) % 3 == 0)
}
TREES = ("chaos", "draft_tree", "suffix_tree", "several")  # get rows for branches


@dataclass
class Plain:
    """A target decoded plainly, one request at a time: prompts, and the answer to each under each sampling."""

    directory: Path
    dtype: str
    prompts: list[list[int]]
    answers: dict[tuple[str, int], list[int]]
    max_tokens: int
    vocab_size: int

    def by_prompt(self, names: Sequence[str]) -> dict[tuple[tuple[int, ...], int], list[int]]:
        """Outputs given to the adversaries, by prompt and seed. Greedy requests share a seed."""
        known = {}
        for name in names:
            for index, prompt in enumerate(self.prompts):
                known[tuple(prompt), seed_of(name)] = self.answers[name, index]
        return known

    def open(self, drafter: str | Drafter, num_speculative_tokens: int = 4, **options: object) -> LLM:
        return open_llm(self.directory, self.dtype, drafter, num_speculative_tokens, **options)


def seed_of(name: str) -> int:
    """Each sampling gets a seed, by which adversaries distinguish requests."""
    return 100 + sorted(SAMPLINGS).index(name)


def params(name: str, max_tokens: int) -> SamplingParams:
    return replace(SAMPLINGS[name], seed=seed_of(name), max_tokens=max_tokens, ignore_eos=True)


def open_llm(directory: Path, dtype: str, drafter: str | Drafter, num_speculative_tokens: int = 4, **options: object) -> LLM:
    given = {
        "backend": "native",
        "threads": 2,
        "max_model_len": 512,
        "kv_cache_gb": 0.2,
        "num_speculative_tokens": num_speculative_tokens,
        **options,
    }
    return LLM(str(directory), dtype=dtype, drafter=drafter, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain_of(checkpoint: Directory, large_counts: bool, seed: int) -> PlainOf:
    made: dict[tuple[str, str], Plain] = {}

    def make(name: str, dtype: str) -> Plain:
        skip_without_kernels()
        if (name, dtype) not in made:
            llm = open_llm(checkpoint(name), dtype, "none")
            assert llm.numerics == "exact"
            max_tokens = (96 if name != "mini" else 48) if large_counts else (24 if name != "mini" else 12)
            random = np.random.default_rng(seed)
            prompts = [random.integers(1, llm.vocab_size, int(length)).tolist() for length in (1, 31, 33, 70)]
            answers = {}
            for sampling in SAMPLINGS:
                for index, prompt in enumerate(prompts):
                    answers[sampling, index] = llm.generate([prompt], params(sampling, max_tokens))[0].token_ids
            made[name, dtype] = Plain(checkpoint(name), dtype, prompts, answers, max_tokens, llm.vocab_size)
        return made[name, dtype]

    return make


def make_drafter(kind: str, plain: Plain, draft: Path, seed: int) -> str | Drafter | list[Drafter]:
    answers = plain.by_prompt(list(SAMPLINGS))
    match kind:
        case "oracle":
            return OracleDrafter(answers)
        case "wrong":
            return WrongDrafter(answers, plain.vocab_size)
        case "chaos":
            return ChaosDrafter(answers, plain.vocab_size, seed=seed)
        case "draft_model" | "draft_tree":
            return str(draft)
        case "suffix_tree":
            return SuffixDrafter(1, store=SuffixStore())
        case "several":
            adversaries = [ChaosDrafter(answers, plain.vocab_size, seed=seed), WrongDrafter(answers, plain.vocab_size)]
            return [PredictionDrafter(), *adversaries, SuffixDrafter(1), NgramDrafter()]
        case _:
            return kind


def predictions(llm: LLM, plain: Plain, name: str) -> list[list[int]] | None:
    """The answers with a token here and there replaced, left out or added, where a drafter reads predictions."""
    if not llm.engine.speculator.uses_predicted_outputs:
        return None
    edits: list[Callable[[int], list[int]]] = [lambda token: [5], lambda token: [], lambda token: [token, 6, token]]
    answers = [plain.answers[name, index] for index in range(len(plain.prompts))]
    return [[new for at, token in enumerate(answer) for new in (edits[at % 3](token) if at % 7 == 5 else [token])] for answer in answers]


def compare(llm: LLM, plain: Plain, samplings: Sequence[str]) -> int:
    """Tokens compared: each prompt alone under every other sampling, then all prompts as one batch."""
    count = 0
    for number, name in enumerate(samplings):
        wanted = params(name, plain.max_tokens)
        expected_texts = predictions(llm, plain, name)
        outputs = []
        if number % 2 == 0:
            for index, prompt in enumerate(plain.prompts):
                outputs += llm.generate([prompt], wanted, prediction=expected_texts and expected_texts[index], namespace="one")
        outputs += llm.generate(plain.prompts, wanted, prediction=expected_texts, namespace="one")
        for index, output in enumerate(outputs):
            expected = plain.answers[name, index % len(plain.prompts)]
            assert output.token_ids == expected, f"{name}, prompt {index}: {output.speculation.as_dict()}"
            assert output.speculation.num_emitted_tokens == len(expected) == output.usage.completion_tokens
            count += len(expected)
        llm.engine.cache.check()
        assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks
    return count


@pytest.mark.parametrize(("target", "kind"), mark_cases(product(map("-".join, EVERYTHING), DRAFTERS), IN_A_NORMAL_RUN))
def test_drafts_of_every_drafter_change_no_token(
    target: str,
    kind: str,
    plain_of: PlainOf,
    checkpoint: Directory,
    large_counts: bool,
    seed: int,
    tally: "Counter[str]",
) -> None:
    name, dtype = target.split("-")
    plain = plain_of(name, dtype)
    random = np.random.default_rng(seed + sum(map(ord, target + kind)))
    embedded = plain.directory / "draft"
    draft = embedded if embedded.is_dir() else plain.directory
    half = (SAMPLE.index(target) // 2 + DRAFTERS.index(kind)) % 2 if not large_counts else 0  # a drafter has both
    samplings = list(SAMPLINGS)[half :: 1 if large_counts else 2]
    for num_speculative_tokens in random.permutation(np.arange(1, 13))[: 2 if large_counts else 1].tolist():
        width = 3 if kind == "draft_tree" else 1
        llm = plain.open(make_drafter(kind, plain, draft, seed), num_speculative_tokens, tree_width=width)
        llm.engine.speculator.policy = FixedDraftLength(num_speculative_tokens, max_rows=12 if kind in TREES else None)
        before = llm.runtime.num_passes
        tally["token ids compared with plain decoding"] += compare(llm, plain, samplings)
        assert llm.runtime.num_passes > before


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_every_step_runs_one_target_forward_pass(plain_of: PlainOf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    plain = plain_of(name, "f32")
    llm = plain.open(OracleDrafter(plain.by_prompt(list(SAMPLINGS))))
    before = llm.runtime.num_passes
    (output,) = llm.generate([plain.prompts[0]], params("greedy", plain.max_tokens))
    assert llm.runtime.num_passes - before == output.speculation.steps
    assert output.speculation.mean_acceptance_length > 3


@pytest.mark.parametrize("name", HYBRIDS)
def test_rejections_run_no_pass_and_copy_no_state(plain_of: PlainOf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_of(name, "f32")
    llm = plain.open(WrongDrafter(plain.by_prompt(list(SAMPLINGS)), plain.vocab_size), enable_prefix_caching=False)
    llm.engine.speculator.policy = FixedDraftLength(4)
    made, real = [], RecurrentStateCache._new_state
    monkeypatch.setattr(RecurrentStateCache, "_new_state", lambda memory, **given: made.append(given) or real(memory, **given))
    before = llm.runtime.num_passes
    (output,) = llm.generate([plain.prompts[0]], params("greedy", plain.max_tokens))
    assert output.speculation.num_accepted_tokens == 0
    assert output.speculation.num_draft_tokens >= plain.max_tokens
    assert llm.runtime.num_passes - before == output.speculation.steps == plain.max_tokens
    assert len(made) == 1, "the state of the request"


def test_correct_prediction_is_accepted_almost_everywhere(plain_of: PlainOf) -> None:
    plain = plain_of("llama", "f32")
    llm = plain.open("prediction")
    llm.engine.speculator.policy = FixedDraftLength(4)
    wanted = params("free", plain.max_tokens)
    outputs = llm.generate(plain.prompts, wanted, prediction=[plain.answers["free", index] for index in range(len(plain.prompts))])
    for index, output in enumerate(outputs):
        assert output.token_ids == plain.answers["free", index]
        assert output.speculation.acceptance_rate == 1.0
        assert output.speculation.steps <= 2 + plain.max_tokens / 5


def test_draft_model_runs_one_pass_per_draft_token(plain_of: PlainOf) -> None:
    plain = plain_of("llama", "f32")
    llm = plain.open(str(plain.directory))
    llm.engine.speculator.policy = FixedDraftLength(4)
    drafter = llm.drafter
    (output,) = llm.generate([plain.prompts[2]], params("greedy", plain.max_tokens))
    assert drafter.runtime.num_passes == output.speculation.num_draft_tokens  # type: ignore[union-attr]


def test_masked_tree_differs_from_plain_decoding_only_at_near_ties(plain_of: PlainOf, seed: int) -> None:
    """With fast numerics: where a token differs, its logit and the other's are the same but for rounding."""
    pytest.importorskip("torch")
    plain = plain_of("llama", "f32")
    answers = plain.by_prompt(["greedy"])
    llm = LLM(
        str(plain.directory),
        dtype="f32",
        backend="torch",
        device="cpu",
        max_model_len=512,
        kv_cache_gb=0.2,
        drafter=ChaosDrafter(answers, plain.vocab_size, seed=seed, raises=False),
    )
    llm.engine.speculator.policy = FixedDraftLength(6, max_rows=12)
    for index, output in enumerate(llm.generate(plain.prompts, params("greedy", plain.max_tokens))):
        expected = plain.answers["greedy", index]
        assert output.numerics == "fast"
        different = next((i for i, (one, other) in enumerate(zip(output.token_ids, expected, strict=True)) if one != other), None)
        if different is not None:
            assert margin(llm, plain.prompts[index] + expected[:different], output.token_ids[different], expected[different]) < 1e-4


def margin(llm: LLM, context: list[int], one: int, other: int) -> float:
    from paceline.runtimes.base import assemble_pass

    cache = llm.engine.cache
    sequence = cache.new_sequence()
    plan = cache.reserve(sequence, range(-1, len(context) - 1))
    row = llm.runtime.forward(*assemble_pass([plan], [context], [[len(context) - 1]])).logits[0]
    cache.release(sequence)
    return abs(float(row[one] - row[other]))


# Planted faults: each must make the comparison above fail.


@pytest.fixture
def faulty(plain_of: PlainOf, seed: int) -> Faulty:
    """The comparison on a runtime."""

    def run() -> None:
        plain = plain_of("llama", "f32")
        llm = plain.open(ChaosDrafter(plain.by_prompt(list(SAMPLINGS)), plain.vocab_size, seed=seed, raises=False), 6)
        llm.engine.speculator.policy = FixedDraftLength(6, max_rows=12)
        compare(llm, plain, list(SAMPLINGS))

    return run


def test_token_comparison_passes_without_a_fault(faulty: Faulty) -> None:
    faulty()


def test_fault_of_a_kept_sibling_path_is_found(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowPlan.commit

    def sibling_path(plan: RowPlan, node: int) -> object:
        as_deep = [other for other in range(len(plan.parents)) if len(path_to(plan.parents, other)) == len(path_to(plan.parents, node))]
        return real(plan, as_deep[-1] if as_deep[0] == node else as_deep[0])

    monkeypatch.setattr(RowPlan, "commit", sibling_path)
    with pytest.raises(Exception):  # noqa: B017  # wrong tokens, or a table that no longer fits
        faulty()


def test_fault_of_an_ignored_tree_mask_in_decoding_is_found(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    real = step_module.assemble_pass

    def without_masks(*args: Any) -> Pass:
        made = real(*args)
        return made._replace(batch=replace(made.batch, ranges=tuple(one._replace(mask=None) for one in made.batch.ranges)))

    monkeypatch.setattr(step_module, "assemble_pass", without_masks)
    with pytest.raises(AssertionError):
        faulty()


def test_fault_of_unmoved_rows_of_a_masked_tree_is_found(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowPlan.commit
    monkeypatch.setattr(RowPlan, "commit", lambda plan, node: real(plan, node)._replace(moves=()))
    with pytest.raises(AssertionError):
        faulty()


def test_fault_of_a_rejected_draft_in_history_is_found(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache continues after the whole first path instead of after the accepted tokens."""
    real = verify_module.verify

    def keeps_a_draft(tree: object, logits: object, request: object, walked: object = None) -> object:
        result = real(tree, logits, request, walked)  # type: ignore[arg-type]
        if len(tree.token_ids) > 1:  # type: ignore[attr-defined]
            request.processor.commit(tree.token_ids[1])  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(speculator_module, "verify", keeps_a_draft)
    with pytest.raises(AssertionError):
        faulty()


def test_fault_of_reused_noise_is_found(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EditedRow.draw
    first: dict[int, int] = {}

    def same_noise_in_a_step(row: EditedRow, seed: int, sample_index: int, position: int) -> int:
        return real(row, seed, sample_index, first.setdefault(position // 2, position))

    monkeypatch.setattr(EditedRow, "draw", same_noise_in_a_step)
    with pytest.raises(AssertionError):
        faulty()


def test_fault_of_penalties_without_the_draft_path_is_found(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = LogitsProcessor.edit
    monkeypatch.setattr(LogitsProcessor, "edit", lambda self, logits, path=(): edit(self, logits))
    with pytest.raises(AssertionError):
        faulty()
