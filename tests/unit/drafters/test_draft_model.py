"""A draft model's passes, its cache, and what it proposes, against running its whole text anew."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from paceline import LLM, SamplingParams
from paceline.drafters.draft_model import PREFILL_CHUNK_TOKENS, DraftModelDrafter
from paceline.errors import CapacityError, RequestError
from paceline.kv_cache.cache import CachedSequence
from paceline.runtimes.base import Network, Numerics
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.processors import EditedRow, LogitsProcessor
from paceline.sampling.residual import TokenProbs
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget, PrefillTime
from paceline.speculation.rejection import Acceptance
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftSampling, DraftTree

NUM_BLOCKS = 64
GREEDY = SamplingParams()
FREE = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("draft"), "llama", num_hidden_layers=2, max_position_embeddings=1024)


def open_runtime(directory: Path) -> Network:
    return load_network(directory, RuntimeOptions(numerics=Numerics.FAST, num_threads=1, device="cpu")).network


@pytest.fixture(scope="module")
def runtime(directory: Path) -> Network:
    return open_runtime(directory)


@pytest.fixture(scope="module")
def twin(directory: Path) -> Network:
    """The same weights, for drafters that know nothing yet: a runtime has one cache."""
    return open_runtime(directory)


def make_drafter(runtime: Network, *, vocab_size: int = VOCAB_SIZE, tree_width: int = 1) -> DraftModelDrafter:
    runtime.num_passes = 0
    return DraftModelDrafter(runtime, runtime.new_cache(NUM_BLOCKS), vocab_size=vocab_size, tree_width=tree_width)


@pytest.fixture
def drafter(runtime: Network) -> Iterator[DraftModelDrafter]:
    """One that is checked to hold nothing once its requests are released."""
    drafter = make_drafter(runtime)
    requests: list[Request] = []
    propose = drafter.propose

    def remembering(asked: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        requests.extend(asked)
        return propose(asked, budgets)

    drafter.propose = remembering  # type: ignore[method-assign]
    yield drafter
    drafter.cache.check_consistency()
    for request in requests:
        drafter.release(request)
    drafter.cache.check_consistency()
    assert drafter.cache.pool.num_free == NUM_BLOCKS


def make_request(token_ids: Sequence[int], params: SamplingParams = GREEDY, *, vocab_size: int = VOCAB_SIZE, seed: int = 3) -> Request:
    processor = LogitsProcessor(params, vocab_size, token_ids)
    return Request(list(token_ids), len(token_ids), params, processor, CachedSequence(), seed=seed, sample_index=0, max_len=10_000)


def ask(drafter: DraftModelDrafter, *requests: Request, depth: int = 4) -> list[list[int] | None]:
    trees = drafter.propose(requests, [DraftBudget(depth + 1, depth)] * len(requests))
    return [None if tree is None else list(tree.token_ids[1:]) for tree in trees]


def append(request: Request, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        request.token_ids.append(token)
        request.processor.commit(token)


def test_draft_model_runs_one_pass_per_draft_depth(drafter: DraftModelDrafter) -> None:
    request = make_request([5, 6, 7])
    for depth in (1, 4, 7):
        before = drafter.runtime.num_passes
        (drafts,) = ask(drafter, request, depth=depth)
        assert drafts is not None
        assert len(drafts) == depth == drafter.runtime.num_passes - before
        append(request, [*drafts[: depth // 2], 11])


@pytest.mark.parametrize("length", [PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS + 1, 600])
def test_draft_model_prefills_a_long_prompt_in_chunks(drafter: DraftModelDrafter, twin: Network, length: int) -> None:
    request = make_request([5, 6, 7, 8, 9, 10] * 100)
    del request.token_ids[length:]
    assert ask(drafter, request) == ask(make_drafter(twin), request)
    assert drafter.runtime.num_passes == (length - 1) // PREFILL_CHUNK_TOKENS + 4


@pytest.mark.parametrize("params", [GREEDY, FREE], ids=["greedy", "sampled"])
def test_drafts_after_rejections_equal_those_of_a_fresh_draft_model(
    drafter: DraftModelDrafter, twin: Network, params: SamplingParams, seed: int
) -> None:
    """After every mix of accepted, rejected and unasked steps, it proposes what it would for a text it never saw."""
    random = np.random.default_rng(seed)
    request = make_request(random.integers(0, VOCAB_SIZE, 20).tolist(), params)
    for _ in range(25):
        (drafts,) = ask(drafter, request, depth=int(random.integers(1, 6)))
        assert drafts is not None
        drafter.cache.check_consistency()
        fresh = make_drafter(twin)
        assert drafts == ask(fresh, request, depth=len(drafts))[0]
        kept = int(random.integers(0, len(drafts) + 1))
        unasked = random.integers(0, VOCAB_SIZE, 1 + int(random.choice([0, 0, 3, 40]))).tolist()
        append(request, [*drafts[:kept], *unasked])


def test_text_longer_than_the_draft_context_is_drafted_from_its_end(drafter: DraftModelDrafter, twin: Network, seed: int) -> None:
    limit, depth = drafter.runtime.config.max_positions, 8
    tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, limit + 30).tolist()
    request = make_request(tokens[: limit - depth])
    assert ask(drafter, request, depth=depth) == ask(make_drafter(twin), make_request(tokens[: limit - depth]), depth=depth)
    append(request, tokens[limit - depth : limit - depth + 1])
    start = 1 + (limit - depth) // 2
    for end in (limit - depth + 1, limit + 30):
        append(request, tokens[len(request.token_ids) : end])
        (drafts,) = ask(drafter, request, depth=depth)
        assert len(drafts or ()) == depth
        assert [drafts] == ask(make_drafter(twin), make_request(tokens[start:end]), depth=depth)
        drafter.cache.check_consistency()


def test_draft_model_batch_drafts_equal_each_request_alone(drafter: DraftModelDrafter, twin: Network, seed: int) -> None:
    random = np.random.default_rng(seed)
    requests = [make_request(random.integers(0, VOCAB_SIZE, length).tolist(), FREE, seed=length) for length in (1, 7, 40, 300)]
    for _ in range(3):
        alone = [ask(make_drafter(twin), request)[0] for request in requests]
        assert ask(drafter, *requests) == alone
        for request, drafts in zip(requests, alone, strict=True):
            append(request, [*(drafts or ())[: len(request.token_ids) % 4], 9])


def test_draft_model_prefill_s_counts_tokens_not_in_its_cache(runtime: Network, drafter: DraftModelDrafter) -> None:
    drafter._prefill_time = PrefillTime(0.5)
    request, others = make_request([5, 6, 7] * 40), make_request([5, 6, 7] * 60)
    assert drafter.prefill_s(request) == 60.0
    ask(drafter, request)
    drafter._prefill_time = PrefillTime(0.5)  # that pass was measured
    assert drafter.prefill_s(request) == 0.0
    append(request, [11] * 30)
    assert drafter.prefill_s(request) == 15.0, "a pass over so many tokens takes longer than one over a few"
    assert drafter.prefill_s(others) == 90.0
    ask(drafter, request)
    drafter.release(request)
    drafter.release(others)
    drafter._prefill_time = PrefillTime(0.5)
    assert drafter.prefill_s(others) == 90.0 - 0.5 * 96, "three blocks of the text were seen"
    drafter.release(others)


def test_draft_batch_larger_than_a_pass_drafts_the_same_as_alone(
    drafter: DraftModelDrafter, twin: Network, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose last rows alone, or whose chunks, are too many for one pass."""
    random = np.random.default_rng(seed)
    for lengths in ([240] * 5, [300, 700, 20, 256, 257, 1], [1] * 9):
        requests = [make_request(random.integers(0, VOCAB_SIZE, length).tolist()) for length in lengths]
        alone = [ask(make_drafter(twin), request)[0] for request in requests]
        with monkeypatch.context() as patch:
            patch.setattr("paceline.runtimes.base.MAX_PASS_ROWS", PREFILL_CHUNK_TOKENS if max(lengths) > 1 else 4)
            assert ask(drafter, *requests) == alone
        for request in requests:
            drafter.release(request)


def test_draft_batch_with_different_depths_runs_the_deepest_only(drafter: DraftModelDrafter) -> None:
    requests = [make_request([5, 6]), make_request([7]), make_request([8, 9])]
    trees = drafter.propose(requests, [DraftBudget(9, 5), DraftBudget(3, 9), DraftBudget(1, 4)])
    assert [tree and tree.num_draft_tokens for tree in trees] == [5, 2, None]
    assert drafter.runtime.num_passes == 5


@pytest.mark.parametrize("width", [2, 3])
def test_wider_draft_tree_contains_the_chain_and_the_likeliest_siblings(runtime: Network, twin: Network, width: int) -> None:
    request = make_request([5, 6, 7], FREE)
    (chain,) = ask(make_drafter(twin), request)
    drafter = make_drafter(runtime, tree_width=width)
    (tree,) = drafter.propose([request], [DraftBudget(33, 4)])
    assert tree is not None
    assert runtime.num_passes == 4
    assert tree.num_draft_tokens == 4 * width
    node = 0
    for token in chain or ():
        siblings = [tree.token_ids[child] for child, parent in enumerate(tree.parents) if parent == node]
        assert len(set(siblings)) == width
        found = tree.child(node, token)
        assert found is not None
        node = found
    drafter.cache.check_consistency()
    drafter.release(request)
    assert drafter.cache.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("width", [1, 3])
def test_draft_model_stops_after_an_unlikely_token(runtime: Network, width: int) -> None:
    """The chance halves with each token, and what is behind less than a fifth is not wanted: 1/2, 1/4, and 1/8 behind the last pass."""
    drafter = make_drafter(runtime, tree_width=width)
    request = make_request([5, 6, 7])
    budget = DraftBudget(1 + 12 * width, 12, min_path_prob=0.2, calibrate=lambda _: 0.5)
    (tree,) = drafter.propose([request], [budget])
    assert tree is not None
    assert drafter.runtime.num_passes == 3
    assert tree.tree_depth == 3
    assert len(tree.token_ids) == 1 + 3 * width


@pytest.mark.parametrize("needs_draft_probs", [False, True], ids=["grown", "drawn"])
def test_draft_tree_fills_the_rows_and_drafts_no_deeper(runtime: Network, needs_draft_probs: bool) -> None:
    """What the engine would cut is not drafted: neither nodes beyond the rows nor passes behind the last level that has one."""
    random = np.random.default_rng(5)
    num_passes = num_levels = 0
    for width, max_rows, depth in itertools.product((2, 4), (2, 3, 5, 9, 17, 33), (1, 4, 8)):
        drafter = make_drafter(runtime, tree_width=width)
        request = make_request(random.integers(0, VOCAB_SIZE, 20).tolist(), FREE)
        (tree,) = drafter.propose([request], [DraftBudget(max_rows, depth, needs_draft_probs)])
        assert tree is not None
        tree.check()
        assert tree.trim(vocab_size=VOCAB_SIZE, max_depth=depth, max_rows=max_rows) is tree
        assert tree.num_draft_tokens == min(max_rows - 1, width * depth)
        assert runtime.num_passes == tree.tree_depth or (not needs_draft_probs and runtime.num_passes == tree.tree_depth + 1)
        num_passes, num_levels = num_passes + runtime.num_passes, num_levels + tree.tree_depth
    assert num_passes <= 1.15 * num_levels  # a row whose guesses turn out to be worth less than a sibling's was needed to know it


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_for_rejection_are_sampled_from_the_stored_probs(runtime: Network, twin: Network, width: int) -> None:
    """The law of a node is what its whole text, run anew, gives after the request's processors."""
    params = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2)
    request = make_request([5, 6, 7], params)
    drafter = make_drafter(runtime, tree_width=width)
    (tree,) = drafter.propose([request], [DraftBudget(33, 4, needs_draft_probs=True)])
    assert tree is not None
    tree.check()
    assert tree.draft_sampling is (DraftSampling.SAMPLED if width == 1 else DraftSampling.WITHOUT_REPLACEMENT)
    assert tree.num_draft_tokens == 4 * width
    path: list[int] = []
    for node, probs in tree.draft_probs.items():
        fresh = make_request([*request.token_ids, *path])
        other = make_drafter(twin)
        rows: list[np.ndarray] = []
        guessed = other._sample
        other._sample = lambda request, row, path, width, guessed=guessed, rows=rows: (  # type: ignore[method-assign]
            rows.append(row.logits.copy()),
            guessed(request, row, path, width),
        )[1]
        ask(other, fresh, depth=1)
        law = TokenProbs.from_distribution(request.processor.process(rows[0], path))
        np.testing.assert_allclose(probs.probs_at_ids_of(law), law.probs, atol=1e-5)
        left: TokenProbs | None = probs
        for index, child in enumerate(tree.children(node)):
            assert left is not None
            number = step_uniform(request.seed, 0, len(request.token_ids), Purpose.DRAFT, len(path), index)
            assert tree.token_ids[child] == left.token_at_quantile(number)
            left = left.without_token(tree.token_ids[child])
        path.append(tree.token_ids[tree.children(node)[0]])
    assert len(path) == 4
    drafter.release(request)


def test_drafts_at_temperature_0_are_deterministic(drafter: DraftModelDrafter) -> None:
    request = make_request([5, 6, 7])
    (tree,) = drafter.propose([request], [DraftBudget(5, 4, needs_draft_probs=True)])
    assert tree is not None
    assert tree.draft_sampling is DraftSampling.DETERMINISTIC
    assert list(tree.token_ids[1:]) == ask(drafter, request)[0]


@pytest.mark.parametrize("needs_draft_probs", [False, True])
def test_draft_model_stops_where_the_grammar_allows_no_token(
    drafter: DraftModelDrafter, monkeypatch: pytest.MonkeyPatch, needs_draft_probs: bool
) -> None:
    request = make_request([5, 6, 7], replace(FREE, presence_penalty=0.1))
    edit = request.processor.edit_logits

    def at_most_two(row: np.ndarray, path: Sequence[int] = ()) -> EditedRow:
        if len(path) == 2:
            raise RequestError("no token is left to choose")
        return edit(row, path)

    monkeypatch.setattr(request.processor, "edit_logits", at_most_two)
    (tree,) = drafter.propose([request], [DraftBudget(5, 4, needs_draft_probs=needs_draft_probs)])
    assert tree is not None
    assert tree.num_draft_tokens == 2


def test_failed_draft_model_pass_leaves_its_cache_clean(drafter: DraftModelDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [make_request([5, 6, 7]), make_request([8])]
    expected = ask(drafter, *requests)
    forward = drafter.runtime.forward
    calls = iter([forward, None])
    monkeypatch.setattr(drafter.runtime, "forward", lambda *arguments: (next(calls) or _fail)(*arguments))
    for request in requests:
        append(request, [3])
    with pytest.raises(CapacityError):
        ask(drafter, *requests)
    drafter.cache.check_consistency()
    assert drafter.cache.pool.num_free == NUM_BLOCKS
    monkeypatch.undo()
    for request in requests:
        del request.token_ids[-1]
    assert ask(drafter, *requests) == expected


def _fail(*arguments: object) -> None:
    raise CapacityError("planted")


def test_request_without_draft_cache_blocks_gets_no_draft(runtime: Network) -> None:
    """Nor does it take the others' guesses away; one that runs out of room on the way keeps what it has."""
    drafter = DraftModelDrafter(runtime, runtime.new_cache(3), vocab_size=VOCAB_SIZE)
    first, second, third = make_request([5] * 60), make_request([6] * 60), make_request([7] * 30)
    alone = ask(make_drafter(runtime), first)[0]
    assert ask(drafter, first, second, third) == [alone, None, ask(make_drafter(runtime), third, depth=3)[0]]
    drafter.cache.check_consistency()
    for request in (first, second, third):
        drafter.release(request)
    assert drafter.cache.pool.num_free == 3


def test_draft_logits_are_cropped_or_padded_to_the_target_vocabulary(runtime: Network) -> None:
    for vocab_size in (10, 96, 98, 150):
        drafter = make_drafter(runtime, vocab_size=vocab_size)
        for params in (GREEDY, FREE):
            request = make_request([5, 6, 7], params, vocab_size=vocab_size)
            (drafts,) = ask(drafter, request, depth=16)
            assert drafts is not None
            assert max(drafts) < min(vocab_size, VOCAB_SIZE)
            drafter.release(request)


def test_target_token_unknown_to_the_draft_model_ends_drafting(runtime: Network) -> None:
    drafter = make_drafter(runtime, vocab_size=150)
    request = make_request([5, 6, 7], vocab_size=150)
    assert ask(drafter, request)[0] is not None
    append(request, [120])
    assert ask(drafter, request, make_request([5])) != [None, None]
    assert ask(drafter, request) == [None]
    append(request, [6])
    assert ask(drafter, request) == [None]
    drafter.cache.check_consistency()


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.4, top_p=0.9)])
def test_draft_model_equal_to_the_target_is_always_accepted(directory: Path, params: SamplingParams) -> None:
    """Sampled too: both draw with the same noise."""
    llm = LLM(str(directory), threads=2, device="cpu", kv_cache_gb=0.02, drafter=str(directory), num_speculative_tokens=5)
    llm.engine.speculator.policy = FixedDraftLength(5)
    prompts = [[5, 6, 7], [8] * 40, [9]]
    for output in llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, temperature=params.temperature, top_p=params.top_p)):
        assert output.speculation.acceptance_rate == 1.0
        assert output.speculation.mean_acceptance_length > 4
    drafts = llm.drafter.cache  # type: ignore[union-attr]
    drafts.check_consistency()
    assert drafts.pool.num_free == drafts.pool.num_blocks
    assert "2 layers, hidden size 64" in llm.banner


def test_draft_model_equal_to_the_target_is_accepted_by_rejection(directory: Path) -> None:
    llm = LLM(str(directory), threads=2, device="cpu", kv_cache_gb=0.02, drafter=str(directory), num_speculative_tokens=5)
    llm.engine.speculator.policy = FixedDraftLength(5)
    prompts = [[5, 6, 7], [8] * 40, [9]]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=4)
    plain = llm.generate(prompts, params)
    greedy = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    llm.engine.speculator.acceptance = Acceptance.REJECTION
    first, again = llm.generate(prompts, params), llm.generate(prompts, params)
    for output in first:
        assert output.speculation.acceptance_rate == 1.0
        assert output.speculation.mean_acceptance_length > 4
    assert [one.token_ids for one in first] == [one.token_ids for one in again] != [one.token_ids for one in plain]
    unchanged = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [one.token_ids for one in unchanged] == [one.token_ids for one in greedy]
