"""Promise 1 with block drafters next to targets of every kind: no draft changes a token.

The drafters are right now and then (`write_fitted_block`) and read the target's embedding, its first and its last layer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from harness.always_drafts import draft_always
from harness.block_checkpoints import FITTED, write_fitted_block
from harness.engine_jobs import Job, JobMaker, Solo
from harness.engine_traffic import Traffic, check_clean
from harness.exact_targets import HYBRIDS, skip_without_kernels
from harness.scripted_target import LEAST_EXPECTED, chi_square_p_value
from harness.spread import mark_cases
from paceline import LLM, SamplingParams
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.speculation import speculator as speculator_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.tree import DraftSampling, DraftTree

NUM_BLOCKS = 8  # one more than the longest request may need
MAX_ROUNDS = 12
TARGETS = [
    f"{name}-{dtype}"
    for name in ("llama", "qwen3", "sliding", "gemma4", "gpt_oss", "muse_glimmer", *HYBRIDS, "nemotron_h")
    for dtype in ("f32", "bf16")
]
SHAPES = {"chain": (7, 1), "tree": (5, 3)}  # depth and width
NORMAL = {
    ("llama-f32", "dspark-rnn", "tree"),
    ("sliding-f32", "dflash-sliding", "chain"),
    ("gemma4-f32", "dspark-gated", "tree"),
    ("gpt_oss-bf16", "dflash", "tree"),
    ("lfm3-f32", "dspark-unaligned", "chain"),
    ("qwen3_5-f32", "dflash2", "tree"),
    ("muse_glimmer-f32", "dflash-sliding-both-ways", "chain"),
}
"""Cases of a normal run."""


@dataclass(frozen=True)
class Given:
    """A target, requests with the tokens of plain decoding, and drafters by kind."""

    solo: Solo
    jobs: list[Job]
    drafters: dict[str, Path]

    def open(self, kind: str, shape: str, **options: object) -> LLM:
        """The target with a drafter that drafts in every step."""
        depth, width = SHAPES[shape]
        given = {"num_blocks": NUM_BLOCKS, "num_speculative_tokens": depth, "tree_width": width, **options}
        llm = self.solo.open(str(self.drafters[kind]), **given)  # type: ignore[arg-type]
        llm.engine.speculator.policy = FixedDraftLength(depth, max_rows=12 if width > 1 else None)
        return llm


GivenOf = Callable[[str], Given]


@pytest.fixture(scope="module")
def given_of(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, large_counts: bool, seed: int
) -> Iterator[GivenOf]:
    made: dict[str, Given] = {}

    def make(target: str) -> Given:
        if target not in made:
            skip_without_kernels()
            name, dtype = target.split("-")
            solo = Solo(checkpoint(name), dtype)
            random = np.random.default_rng(seed + sum(map(ord, target)))
            jobs = JobMaker(solo, random, max_tokens=72 if large_counts else 16).make(60 if large_counts else 12)
            texts = [answer.token_ids for job in jobs for answer in job.answers if answer.token_ids]
            sizes = {"hidden_size": solo.config.hidden_size, "num_layers": solo.config.num_layers}
            folder = tmp_path_factory.mktemp(target)
            made[target] = Given(solo, jobs, {kind: write_fitted_block(folder / kind, kind, texts, **sizes) for kind in FITTED})
        return made[target]

    yield make
    made.clear()


def compare(llm: LLM, jobs: Sequence[Job], random: np.random.Generator) -> int:
    """Run the jobs through the engine until some were preempted and some met cached prefixes; return the tokens compared, all equal."""
    count = 0
    for _ in range(MAX_ROUNDS):
        traffic = Traffic(llm, jobs, random)
        traffic.run()
        check_clean(llm)
        count += traffic.num_compared
        assert traffic.num_compared == sum(job.num_tokens for job in jobs)
        if llm.stats().num_preemptions and llm.stats().num_cached_tokens:
            break
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert stats.num_failed == stats.drafter_failures == 0
    assert stats.speculation.num_draft_tokens > count / 2
    return count


CASES = [*product(TARGETS, FITTED, SHAPES)]


@pytest.mark.parametrize(("target", "kind", "shape"), mark_cases(CASES, NORMAL))
def test_block_drafts_change_no_token(
    target: str, kind: str, shape: str, given_of: GivenOf, large_counts: bool, seed: int, tally: "Counter[str]"
) -> None:
    """Requests come in batches of 1 to 16, are preempted, share prefixes, and their prompts are split into chunks."""
    number = CASES.index((target, kind, shape))
    if large_counts and number % 4 != number // 4 % 4:
        pytest.skip("left to other runs")
    given = given_of(target)
    llm = given.open(kind, shape)
    tally["token ids equal with block drafters"] += compare(llm, given.jobs, np.random.default_rng((seed, number)))
    speculation = llm.stats().speculation
    tally[f"accepted of {kind}"] += speculation.num_accepted_tokens
    tally[f"drafted of {kind}"] += speculation.num_draft_tokens


REJECTED = [*product(("llama-f32", "qwen3_5-f32", "gemma4-f32", "sliding-f32"), FITTED)]
NORMAL_REJECTED = {("llama-f32", "dspark-rnn"), ("gemma4-f32", "dspark-gated")}


@pytest.mark.parametrize(("target", "kind"), mark_cases(REJECTED, NORMAL_REJECTED))
def test_greedy_block_drafts_under_the_rejection_rule_change_no_token(
    target: str, kind: str, given_of: GivenOf, seed: int, tally: "Counter[str]"
) -> None:
    given = given_of(target)
    greedy = [replace(job, parent=None) for job in given.jobs if job.params.is_greedy]
    assert len(greedy) > 1
    for shape in SHAPES:
        llm = given.open(kind, shape, acceptance="rejection")
        traffic = Traffic(llm, greedy, np.random.default_rng(seed))
        traffic.run()
        check_clean(llm)
        tally["token ids equal with block drafters"] += traffic.num_compared
        assert traffic.num_compared == sum(job.num_tokens for job in greedy)
        assert llm.stats().drafter_failures == 0


NUM_TOKENS = 4  # the first one is the prompt's, and two are drafted


def exact_distribution(solo: Solo, prompt: list[int], params: SamplingParams, num_likely: int) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts of NUM_TOKENS of the likely tokens."""
    one = replace(params, max_tokens=1, logprobs=num_likely, logprobs_mode="processed")
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, prob in probs.items():
            (answer,) = solo.answer([*prompt, *text], one)
            assert answer.logprobs is not None
            longer |= {(*text, token): prob * float(np.exp(logprob)) for token, logprob in answer.logprobs[0].top}
        probs = longer
    assert abs(sum(probs.values()) - 1.0) < 1e-4
    return probs


@pytest.mark.spread(0.1)
@pytest.mark.parametrize("kind", FITTED)
def test_sampled_block_drafts_keep_the_target_distribution(
    kind: str, given_of: GivenOf, large_counts: bool, seed: int, monkeypatch: pytest.MonkeyPatch, tally: "Counter[str]"
) -> None:
    proposals: set[DraftSampling] = set()
    real = speculator_module.verify_rejection

    def recording(tree: DraftTree, *others: object) -> object:
        if tree.num_draft_tokens:
            proposals.add(tree.draft_sampling)
        return real(tree, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(speculator_module, "verify_rejection", recording)
    given = given_of("llama-f32")
    prompt = max((job.prompt for job in given.jobs if len(job.prompt) < 100), key=len)
    frequent = Counter(token for job in given.jobs for answer in job.answers for token in answer.token_ids)
    likely = {token: 30.0 for token, _ in frequent.most_common(3)}  # drafter and target draw no others
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, logit_bias=likely, ignore_eos=True)
    exact = exact_distribution(given.solo, prompt, params, len(likely))
    llm = given.open(kind, "chain", acceptance="rejection", num_blocks=200)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, 2_560 if large_counts else 640, 64):
        outputs = llm.generate([prompt] * 64, [replace(params, seed=seed + one) for one in range(first, first + 64)])
        counts.update(tuple(output.token_ids) for output in outputs)
    assert sum(prob * counts.total() >= LEAST_EXPECTED for prob in exact.values()) > 5
    assert chi_square_p_value(counts, exact) > 0.001
    assert proposals == {DraftSampling.SAMPLED}
    stats = llm.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    tally["texts drawn by rejection with block drafters"] += counts.total()


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("kv_cache_dtype", [one.value for one in KVCacheDtype])
@pytest.mark.parametrize("kind", ["dflash-sliding", "dspark-rnn"])
def test_block_drafts_change_no_token_with_any_kv_cache_dtype(
    kind: str, kv_cache_dtype: str, given_of: GivenOf, monkeypatch: pytest.MonkeyPatch, tally: "Counter[str]"
) -> None:
    given, random = given_of("llama-f32"), np.random.default_rng(1)
    prompts = [random.integers(1, given.solo.vocab_size, length).tolist() for length in (251, 40, 130)]  # outputs pass 256 positions
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=float(number > 0), seed=3) for number in range(3)]
    options = {"kv_cache_dtype": kv_cache_dtype, "threads": 1, "device": "cpu", "backend": "native", "max_model_len": 400}

    def answers(drafter: str, **more: object) -> list[list[int]]:
        with LLM(str(given.solo.directory), drafter=drafter, kv_cache_gb=0.02, **options, **more) as llm:  # type: ignore[arg-type]
            outputs = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
            assert llm.stats().drafter_failures == 0
            assert drafter == "none" or llm.stats().speculation.num_accepted_tokens > 5
        return [list(output.token_ids) for output in outputs]

    plain = answers("none", max_num_seqs=1)
    draft_always(monkeypatch)
    for width, chunk in ((1, 48), (3, 512)):
        assert answers(str(given.drafters[kind]), tree_width=width, num_speculative_tokens=5, prefill_chunk_size=chunk) == plain
        tally["token ids equal with block drafters"] += sum(map(len, plain))
