"""Where blocks are short a tree shrinks: to its best chain, then to a shorter one; known tokens always find theirs."""

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.errors import CapacityError
from paceline.kv_cache.cache import KVCache
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.residual import TokenProbs
from paceline.speculation.propose import reserve_rows
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftSampling, DraftTree

BLOCK = 4


def make_cache(num_blocks: int) -> KVCache:
    """One with so many blocks of 4 rows."""
    return KVCache([], num_blocks, block_size=BLOCK)


def make_rows(cache: KVCache, length: int, parents: Sequence[int] = (), tokens: Sequence[int] = ()) -> RequestRows:
    """A request of `length` tokens whose last one is not cached, with guesses under it."""
    params = SamplingParams()
    request = Request(list(range(length)), length, params, LogitsProcessor(params, 99, []), cache.new_sequence(), 0, 0, 1000)
    if length > 1:
        cache.reserve_rows(request.cached_sequence, range(-1, length - 2))
        cache.keep_path(request.cached_sequence, length - 2)
    rows = RequestRows.without_draft(request, request.num_uncached)
    if parents:
        rows.tree = DraftTree.from_nodes(request.token_ids[-1], tokens or range(50, 50 + len(parents)), parents, "test")
    return rows


def paths(tree: DraftTree | None) -> list[tuple[int, ...]]:
    """Tokens from the root's child to each node."""
    assert tree is not None
    tree.check()
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else ())
    return found[1:]


# 50 is guessed first, 51 beside it; 52 and 53 behind 50; 54 behind 52
PARENTS = (0, 0, 1, 1, 3)
FIRST_PATH = [(50,), (50, 52), (50, 52, 54)]
WHOLE = [(50,), (51,), (50, 52), (50, 53), (50, 52, 54)]


@pytest.mark.parametrize(
    ("length", "num_free", "expected"),
    [
        (1, 2, WHOLE),
        (1, 1, FIRST_PATH),
        (2, 0, [(50,), (50, 52)]),  # the chain's last row would need another block
        (2, 1, WHOLE),
        (3, 0, [(50,)]),
        (4, 1, [(50,), (51,), (50, 52), (50, 52, 54)]),
    ],
)
def test_draft_tree_without_enough_blocks_keeps_its_first_path(length: int, num_free: int, expected: list[tuple[int, ...]]) -> None:
    num_own = -(-(length - 1) // BLOCK)
    cache = make_cache(num_own + num_free)
    rows = make_rows(cache, length, PARENTS)
    assert cache.pool.num_free == num_free
    (plan,) = reserve_rows([rows], cache)
    assert paths(rows.tree) == expected
    assert rows.skip_reason is None, "a step with guesses is no plain one"
    assert rows.request.stats.num_dropped_tokens == len(WHOLE) - len(expected)
    assert len(plan.parents) == 1 + len(expected)
    cache.check_consistency()
    cache.keep_path(rows.request.cached_sequence, len(expected))
    cache.check_consistency()


def test_step_without_free_blocks_for_drafts_is_plain() -> None:
    cache = make_cache(1)
    rows = make_rows(cache, BLOCK, PARENTS)
    reserve_rows([rows], cache)
    assert (rows.skip_reason, paths(rows.tree), rows.request.stats.num_dropped_tokens) == (SkipReason.NO_MEMORY, [], len(WHOLE))


def test_committed_tokens_take_blocks_from_drafts() -> None:
    cache = make_cache(2 + 1)
    first, second = make_rows(cache, 2, PARENTS), make_rows(cache, BLOCK + 1, PARENTS)
    reserve_rows([first, second], cache)  # the first one wants the free block, and the second one's root needs it, at a border
    assert paths(first.tree) == [(50,), (50, 52)], "what its own block has room for"
    assert paths(second.tree) == FIRST_PATH, "what the block of its root has room for"
    assert first.skip_reason is second.skip_reason is None
    cache.check_consistency()


def test_drafts_of_other_requests_are_dropped_only_as_far_as_needed() -> None:
    cache = make_cache(3 + 2)
    batch = [make_rows(cache, 2, (0, 0, 0)), make_rows(cache, 2, (0, 0, 0, 0)), make_rows(cache, BLOCK + 1)]
    reserve_rows(batch, cache)  # one block for the first one's drafts, one for the second's: the last root takes that
    assert [len(paths(rows.tree)) for rows in batch] == [3, 2, 0]
    assert [rows.skip_reason for rows in batch] == [None, None, None]
    cache.check_consistency()


def test_drafts_are_kept_if_committed_tokens_do_not_fit() -> None:
    cache = make_cache(2)
    batch = [make_rows(cache, BLOCK + 1), make_rows(cache, BLOCK + 1)]
    before = cache.pool.num_free
    with pytest.raises(CapacityError):
        reserve_rows(batch, cache)
    assert cache.pool.num_free == before
    cache.check_consistency()


def uniform(*tokens: int) -> TokenProbs:
    return TokenProbs(np.full(len(tokens), 1.0 / len(tokens)), np.array(tokens))


@pytest.mark.parametrize(
    ("num_cached", "num_free", "expected", "proposal"),
    [
        (2, 0, [(50,)], DraftSampling.SAMPLED),
        (1, 0, [(50,), (51,)], DraftSampling.WITHOUT_REPLACEMENT),
        (1, 1, [(50,), (51,), (50, 52), (50, 52, 54)], DraftSampling.WITHOUT_REPLACEMENT),
    ],
)
def test_sampled_trees_are_pruned_by_level(
    num_cached: int, num_free: int, expected: list[tuple[int, ...]], proposal: DraftSampling
) -> None:
    """`num_cached`: rows in the request's second block."""
    cache = make_cache(2 + num_free)
    rows = make_rows(cache, BLOCK + num_cached + 1)
    rows.tree = DraftTree.from_nodes(
        5, [50, 51, 52, 54], [0, 0, 1, 3], "test", {0: uniform(50, 51, 55), 1: uniform(52, 53), 3: uniform(54)}
    )
    reserve_rows([rows], cache)
    assert paths(rows.tree) == expected
    assert rows.tree.draft_sampling is proposal
    assert len(rows.tree.draft_probs) == len({len(path) for path in expected})
