"""Promise 1: token ids are the same with speculation off or on, whatever drafts, alone or in a batch, greedy or sampled."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from adversaries import ChaosDrafter, OracleDrafter, WrongDrafter
from exact_targets import DTYPES, TARGETS
from paceline import LLM, SamplingParams
from paceline.kv_cache import paged
from paceline.kv_cache.row_plan import RowPlan
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation import step as step_module
from paceline.speculation import verify as verify_module
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import Drafter

pytest.importorskip("openvino")

Directory = Callable[[str], Path]
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
SAMPLE = ["llama-f32", "qwen2-bf16", "qwen3-f32", "mini-bf16"]  # the targets of `make test`
DRAFTERS = ["none", "ngram", "draft_model", "draft_tree", "oracle", "wrong", "chaos"]


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
        """What the adversaries know. A seed names the sampling, greedy ones share one."""
        known = {}
        for name in names:
            for index, prompt in enumerate(self.prompts):
                known[tuple(prompt), seed_of(name)] = self.answers[name, index]
        return known


def seed_of(name: str) -> int:
    """Every sampling gets a seed, so that the adversaries can tell them apart."""
    return 100 + sorted(SAMPLINGS).index(name)


def params(name: str, max_tokens: int) -> SamplingParams:
    return replace(SAMPLINGS[name], seed=seed_of(name), max_tokens=max_tokens, ignore_eos=True)


def open_llm(directory: Path, dtype: str, drafter: str | Drafter, num_draft_tokens: int = 4, **options: object) -> LLM:
    return LLM(
        str(directory), dtype=dtype, threads=2, max_context=512, cache_gb=0.2, drafter=drafter, num_draft_tokens=num_draft_tokens, **options
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain_of(checkpoint: Directory, large_counts: bool, seed: int) -> Callable[[str, str], Plain]:
    made: dict[tuple[str, str], Plain] = {}

    def make(name: str, dtype: str) -> Plain:
        if (name, dtype) not in made:
            llm = open_llm(checkpoint(name), dtype, "none")
            if llm.numerics != "exact":
                pytest.skip("this machine has no exact numerics")
            max_tokens = (96 if name != "mini" else 48) if large_counts else (32 if name != "mini" else 20)
            random = np.random.default_rng(seed)
            prompts = [random.integers(1, llm.vocab_size, int(length)).tolist() for length in (1, 31, 33, 70)]
            answers = {}
            for sampling in SAMPLINGS:
                for index, prompt in enumerate(prompts):
                    answers[sampling, index] = llm.generate([prompt], params(sampling, max_tokens))[0].token_ids
            made[name, dtype] = Plain(checkpoint(name), dtype, prompts, answers, max_tokens, llm.vocab_size)
        return made[name, dtype]

    return make


def make_drafter(kind: str, plain: Plain, draft: Path, seed: int) -> str | Drafter:
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
        case _:
            return kind


def compare(llm: LLM, plain: Plain, samplings: Sequence[str]) -> int:
    """Tokens compared: each prompt alone under every other sampling, then all prompts as one batch."""
    count = 0
    for number, name in enumerate(samplings):
        wanted = params(name, plain.max_tokens)
        outputs = [llm.generate([prompt], wanted)[0] for prompt in plain.prompts] if number % 2 == 0 else []
        outputs += llm.generate(plain.prompts, wanted)
        for index, output in enumerate(outputs):
            expected = plain.answers[name, index % len(plain.prompts)]
            assert output.token_ids == expected, f"{name}, prompt {index}: {output.speculation.as_dict(output.drafter)}"
            assert output.speculation.emitted == len(expected) == output.usage.completion_tokens
            count += len(expected)
        llm.engine.cache.check()
        assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks - 1
    return count


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("target", [f"{name}-{dtype}" for name in TARGETS for dtype in DTYPES])
def test_tokens_are_the_same_whatever_drafts(
    target: str,
    kind: str,
    plain_of: Callable[[str, str], Plain],
    checkpoint: Directory,
    large_counts: bool,
    seed: int,
    tally: "Counter[str]",
) -> None:
    name, dtype = target.split("-")
    if not large_counts and (target not in SAMPLE or (name == "mini" and kind in ("none", "wrong", "draft_tree"))):
        pytest.skip("left to make test-long")
    plain = plain_of(name, dtype)
    random = np.random.default_rng(seed + sum(map(ord, target + kind)))
    embedded = plain.directory / "draft"
    draft = embedded if embedded.is_dir() else plain.directory
    for num_draft_tokens in random.permutation(np.arange(1, 13))[: 2 if large_counts else 1].tolist():
        width = 3 if kind == "draft_tree" else 1
        llm = open_llm(plain.directory, dtype, make_drafter(kind, plain, draft, seed), num_draft_tokens, tree_width=width)
        llm.engine.guesser.policy = DraftLengthPolicy(num_draft_tokens, row_budget=12 if kind in ("chaos", "draft_tree") else None)
        before = llm.runtime.num_passes
        tally["token ids compared with plain decoding"] += compare(llm, plain, list(SAMPLINGS))
        assert llm.runtime.num_passes > before


def test_every_step_is_one_target_pass(plain_of: Callable[[str, str], Plain]) -> None:
    plain = plain_of("llama", "f32")
    llm = open_llm(plain.directory, plain.dtype, OracleDrafter(plain.by_prompt(list(SAMPLINGS))))
    before = llm.runtime.num_passes
    (output,) = llm.generate([plain.prompts[0]], params("greedy", plain.max_tokens))
    assert llm.runtime.num_passes - before == output.speculation.steps
    assert output.speculation.mean_acceptance_length > 3


def test_a_draft_pass_is_run_for_every_drafted_token(plain_of: Callable[[str, str], Plain]) -> None:
    plain = plain_of("llama", "f32")
    llm = open_llm(plain.directory, plain.dtype, str(plain.directory))
    llm.engine.guesser.policy = DraftLengthPolicy(4)
    drafter = llm.drafter
    (output,) = llm.generate([plain.prompts[2]], params("greedy", plain.max_tokens))
    assert drafter.runtime.num_passes == output.speculation.drafted  # type: ignore[union-attr]


def test_a_masked_tree_differs_from_plain_decoding_at_near_ties_only(plain_of: Callable[[str, str], Plain], seed: int) -> None:
    """The mask layout belongs to fast numerics: where a token differs, its logit and the other's are the same but for rounding."""
    plain = plain_of("llama", "f32")
    answers = plain.by_prompt(["greedy"])
    llm = open_llm(plain.directory, "f32", ChaosDrafter(answers, plain.vocab_size, seed=seed, raises=False), 6, numerics="fast")
    llm.engine.guesser.policy = DraftLengthPolicy(6, row_budget=12)
    for index, output in enumerate(llm.generate(plain.prompts, params("greedy", plain.max_tokens))):
        expected = plain.answers["greedy", index]
        assert output.numerics == "fast"
        different = next((i for i, (one, other) in enumerate(zip(output.token_ids, expected, strict=True)) if one != other), None)
        if different is not None:
            assert margin(llm, plain.prompts[index] + expected[:different], output.token_ids[different], expected[different]) < 1e-4


def margin(llm: LLM, context: list[int], one: int, other: int) -> float:
    from paceline.runtimes.base import assemble

    cache = llm.engine.cache
    sequence = cache.new_sequence()
    plan = cache.reserve(sequence, range(-1, len(context) - 1))
    row = llm.runtime.forward(assemble([plan], [context], [[len(context) - 1]])).logits[0]
    cache.release(sequence)
    return abs(float(row[one] - row[other]))


def test_the_target_is_the_same_graph_whatever_drafts(plain_of: Callable[[str, str], Plain]) -> None:
    plain = plain_of("llama", "f32")
    graphs = {open_llm(plain.directory, "f32", kind).runtime.graph_digest for kind in ("none", "ngram", str(plain.directory))}  # type: ignore[attr-defined]
    assert len(graphs) == 1


# Planted faults: each must make the comparison above fail.


@pytest.fixture
def faulty(plain_of: Callable[[str, str], Plain], seed: int) -> Callable[[], None]:
    def run() -> None:
        plain = plain_of("llama", "f32")
        llm = open_llm(plain.directory, "f32", ChaosDrafter(plain.by_prompt(list(SAMPLINGS)), plain.vocab_size, seed=seed, raises=False), 6)
        llm.engine.guesser.policy = DraftLengthPolicy(6, row_budget=12)
        compare(llm, plain, list(SAMPLINGS))

    return run


def test_the_comparison_passes_without_a_fault(faulty: Callable[[], None]) -> None:
    faulty()


def test_an_off_by_one_in_keep_path_changes_tokens(faulty: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowPlan.commit

    def parent_instead(plan: RowPlan, node: int) -> object:
        commit = real(plan, node)
        shorter = real(plan, max(plan.parents[node], 0))
        return replace(commit, block_table=shorter.block_table) if len(shorter.block_table) == len(commit.block_table) else commit

    def sibling_path(plan: RowPlan, node: int) -> object:
        return parent_instead(plan, node) if len(plan.paths) == 1 else real(plan, len(plan.parents) - 1)

    monkeypatch.setattr(RowPlan, "commit", sibling_path)
    with pytest.raises(Exception):  # noqa: B017  # wrong tokens, or a table that no longer fits
        faulty()


def test_a_stale_cache_row_changes_tokens(faulty: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    real = paged.plan_rows
    monkeypatch.setattr(paged, "plan_rows", lambda *args: replace(real(*args), copies=()))
    with pytest.raises(AssertionError):
        faulty()


def test_a_rejected_draft_kept_in_history_changes_tokens(faulty: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache goes on behind the whole first path instead of behind what was accepted."""
    real = verify_module.verify

    def keeps_a_draft(tree: object, logits: object, request: object) -> object:
        result = real(tree, logits, request)  # type: ignore[arg-type]
        if len(tree.token_ids) > 1:  # type: ignore[attr-defined]
            request.processor.commit(tree.token_ids[1])  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(step_module, "verify", keeps_a_draft)
    with pytest.raises(AssertionError):
        faulty()


def test_noise_reused_at_two_positions_changes_tokens(faulty: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify_module.draw
    first: dict[int, int] = {}

    def same_noise_in_a_step(distribution: object, seed: int, sample_index: int, position: int) -> int:
        return real(distribution, seed, sample_index, first.setdefault(position // 2, position))  # type: ignore[arg-type]

    monkeypatch.setattr(verify_module, "draw", same_noise_in_a_step)
    with pytest.raises(AssertionError):
        faulty()


def test_a_penalty_that_ignores_the_nodes_path_changes_tokens(faulty: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    real = LogitsProcessor.process
    monkeypatch.setattr(LogitsProcessor, "process", lambda self, logits, path=(): real(self, logits))
    with pytest.raises(AssertionError):
        faulty()


def test_a_drafter_in_the_targets_graph_is_seen(plain_of: Callable[[str, str], Plain], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that returns one thing more is another function: in bf16 its logits may have other bits."""
    from paceline.runtimes.openvino import graph

    plain = plain_of("llama", "f32")
    clean = open_llm(plain.directory, "f32", "none").runtime.graph_digest  # type: ignore[attr-defined]
    real = graph.decoder

    def with_a_head(blocks: object, config: object, collect_layers: object) -> object:
        logits, hidden, collected = real(blocks, config, collect_layers)  # type: ignore[arg-type, type-var]
        return logits, hidden, [*collected, blocks.lm_head(hidden, "lm_head")]  # type: ignore[attr-defined]

    monkeypatch.setattr(graph, "decoder", with_a_head)
    assert open_llm(plain.directory, "f32", "none").runtime.graph_digest != clean  # type: ignore[attr-defined]
