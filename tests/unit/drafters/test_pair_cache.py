"""A head's rows in the target's cache: which pairs run when, with which features and slots, and what a new sequence may reuse."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.drafters.recurrent_heads.cache import FeaturePairCache, RequestFeaturePairs
from paceline.kv_cache.cache import BLOCK_SIZE, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network
from paceline.runtimes.decoder import NetworkDefinition
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.request import Request

NUM_BLOCKS, FEATURE = 24, 3


class SilentHead(Network):
    """Has a cache and nothing else."""

    def forward(self, inputs: Mapping[str, FloatArray], batch: ForwardBatch, wanted: LogitsRows) -> ForwardOutput:
        return ForwardOutput({})

    def embed(self, token_ids: IntArray) -> FloatArray:
        raise AssertionError

    def allocate_kv(self, num_blocks: int) -> list[FullAttentionCache]:
        return [FullAttentionCache(np.zeros((2, num_blocks, 1, BLOCK_SIZE, 2), np.float32))]

    def network_with_same_weights(self, definition: NetworkDefinition) -> Network:
        return self


@dataclass
class Bench:
    """A target's cache, the pairs stored with it, and the tokens that each kept row was computed from, by block and slot."""

    cache: KVCache
    pairs: FeaturePairCache
    rows: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def make(cls, window: int = 1000, first_slot: int = 1) -> "Bench":
        cache = KVCache([], NUM_BLOCKS)
        return cls(cache, FeaturePairCache(SilentHead(), cache, feature_size=FEATURE, window=window, first_slot=first_slot))

    def request(self, token_ids: list[int]) -> Request:
        params = SamplingParams()
        processor = LogitsProcessor(params, 1000, token_ids)
        return Request(list(token_ids), len(token_ids), params, processor, self.cache.new_sequence(), 0, 0, 10_000)

    def commit(self, request: Request, count: int, *, observed: bool = True) -> None:
        """The target runs `count` more of the request's tokens."""
        start = request.cached_sequence.committed_len
        self.cache.reserve_rows(request.cached_sequence, range(-1, count - 1))
        self.cache.keep_path(request.cached_sequence, count - 1)
        self.cache.register_prefix(request.cached_sequence, request.token_ids)
        if observed:
            self.pairs.append_features(
                request, start, np.stack([feature(request.token_ids[: row + 1]) for row in range(start, start + count)])
            )

    def run(self, request: Request, *, include_root: bool) -> RequestFeaturePairs | None:
        """Run pending pairs and check them: every pair joins its token with the feature of the token before it."""
        rows = self.pairs.pending_pairs(request, include_root=include_root)
        if rows is None:
            return None
        first = rows.rows.cached_len
        for index, token in enumerate(rows.token_ids):
            slot = first + index
            assert token == request.token_ids[slot]
            np.testing.assert_array_equal(rows.features[index], feature(request.token_ids[:slot]))
            block = int(rows.rows.block_table[slot // BLOCK_SIZE])
            self.rows[block, slot % BLOCK_SIZE] = tuple(request.token_ids[: slot + 1])
        for slot in range(rows.rows.first_visible_slot, first):  # what they see was computed from this text
            block = int(rows.rows.block_table[slot // BLOCK_SIZE])
            assert self.rows[block, slot % BLOCK_SIZE] == tuple(request.token_ids[: slot + 1])
        self.pairs.mark_computed(rows.request, rows.token_ids)
        return rows


def feature(token_ids: list[int]) -> FloatArray:
    """What a target would make of a text: another value for every one; zeros before the first token."""
    if not token_ids:
        return np.zeros(FEATURE, np.float32)
    return np.random.default_rng([len(token_ids), *token_ids]).normal(0, 1, FEATURE).astype(np.float32)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


@pytest.mark.parametrize("length", [2, 31, 32, 33, 34, 64, 65, 66])
def test_eagle_root_at_the_end_of_a_block_is_recomputed(length: int) -> None:
    """The target has written everything but the root; a pair outside of the target's blocks is not kept."""
    bench = Bench.make()
    request = bench.request(text(length))
    bench.commit(request, length - 1)
    rows = bench.run(request, include_root=True)
    assert rows is not None
    assert len(rows.token_ids) == length - 1
    assert rows.rows.first_visible_slot == rows.rows.cached_len == 1
    has_slot = (length - 1) % BLOCK_SIZE > 0
    assert bench.pairs._slots[request].end_slot == (length if has_slot else length - 1)
    request.token_ids += [7, 8]
    bench.commit(request, 2)
    again = bench.run(request, include_root=True)
    assert again is not None
    assert len(again.token_ids) == (2 if has_slot else 3)


def test_eagle_prompt_chunks_run_without_the_root() -> None:
    bench = Bench.make()
    request = bench.request(text(100))
    for count in (40, 30, 29):
        bench.commit(request, count)
        assert bench.run(request, include_root=False) is not None
    assert bench.pairs._slots[request].end_slot == 99
    assert bench.run(request, include_root=False) is None
    rows = bench.run(request, include_root=True)
    assert rows is not None
    assert len(rows.token_ids) == 1


def test_eagle_root_without_a_hidden_state_is_not_drafted() -> None:
    bench = Bench.make()
    request = bench.request(text(50))
    bench.commit(request, 30)
    assert bench.pairs.pending_pairs(request, include_root=True) is None
    assert bench.pairs.pending_pairs(bench.request(text(3)), include_root=True) is None


@pytest.mark.parametrize(("shared", "first_slot"), [(32, 1), (40, 1), (64, 1), (64, 0), (95, 1)])
def test_eagle_drafts_after_a_prefix_hit_continue_from_its_hidden_state(shared: int, first_slot: int) -> None:
    bench = Bench.make(first_slot=first_slot)
    first = bench.request(text(97))
    bench.commit(first, 96)
    bench.run(first, include_root=True)
    second = bench.request([*text(97)[:shared], *text(20, seed=1)])
    adopted = bench.cache.match_prefix(second.cached_sequence, second.token_ids)
    assert adopted == shared // BLOCK_SIZE * BLOCK_SIZE
    bench.commit(second, len(second.token_ids) - 1 - adopted)
    rows = bench.run(second, include_root=True)
    assert rows is not None
    assert rows.rows.cached_len == adopted
    assert rows.rows.first_visible_slot == first_slot


def test_eagle_uses_only_the_drafted_part_of_a_cached_prefix() -> None:
    """Two blocks that ran without the head, two with it: who adopts all of them sees the latter."""
    bench = Bench.make()
    first = bench.request(text(65))
    bench.commit(first, 64, observed=False)
    second = bench.request(text(65) + text(70, seed=2))
    assert bench.cache.match_prefix(second.cached_sequence, second.token_ids) == 64
    bench.commit(second, 70)
    rows = bench.run(second, include_root=True)
    assert rows is not None
    assert rows.rows.first_visible_slot == rows.rows.cached_len == 65  # the pair of token 64 needs a feature that is not stored
    third = bench.request([*second.token_ids[:130], 5, 6, 7])
    assert bench.cache.match_prefix(third.cached_sequence, third.token_ids) == 128
    bench.commit(third, 4)
    rows = bench.run(third, include_root=True)
    assert rows is not None
    assert (rows.rows.first_visible_slot, rows.rows.cached_len) == (65, 128)


def test_eagle_cache_of_a_preempted_request_starts_again() -> None:
    bench = Bench.make()
    request = bench.request(text(90))
    bench.commit(request, 89)
    bench.run(request, include_root=True)
    bench.cache.release_sequence(request.cached_sequence)
    request.cached_sequence = bench.cache.new_sequence()
    assert bench.cache.match_prefix(request.cached_sequence, request.token_ids) == 64
    bench.commit(request, 25)
    rows = bench.run(request, include_root=True)
    assert rows is not None
    assert (rows.rows.first_visible_slot, rows.rows.cached_len) == (1, 64)


def test_eagle_window_limits_the_visible_cache_slots() -> None:
    bench = Bench.make(window=20)
    request = bench.request(text(60))
    bench.commit(request, 59)
    rows = bench.run(request, include_root=False)
    assert rows is not None
    assert rows.rows.first_visible_slot == 1  # no farther than the rows that are there
    rows = bench.run(request, include_root=True)
    assert rows is not None
    assert rows.rows.first_visible_slot == 40  # the root's slot is 59


@pytest.mark.parametrize("first_slot", [1, 0])
def test_eagle_cache_rows_match_the_text_after_random_events(first_slot: int, seed: int, large_counts: bool) -> None:
    """Prompts with common beginnings come and go, run with and without the head, are cut off and adopt one another's rows."""
    random = np.random.default_rng(seed)
    bench = Bench.make(first_slot=first_slot)
    running: list[Request] = []
    num_seen = 0
    for _ in range(4000 if large_counts else 400):
        event = random.integers(0, 10)
        if event < 3 and bench.cache.pool.num_free > 8 and len(running) < 5:
            beginning = text(int(random.integers(1, 90)), seed=int(random.integers(0, 3)))
            request = bench.request([*beginning, *text(int(random.integers(1, 30)), seed=int(random.integers(0, 10_000)))])
            bench.cache.match_prefix(request.cached_sequence, request.token_ids)
            running.append(request)
        elif running:
            request = running[int(random.integers(0, len(running)))]
            due = len(request.token_ids) - 1 - request.cached_sequence.committed_len
            if event < 8 and bench.cache.pool.num_free > 6 and len(request.token_ids) < 200:
                bench.commit(request, max(1, min(due, int(random.integers(1, 60)))), observed=event < 7) if due else None
                if bench.run(request, include_root=bool(random.integers(0, 2))) is not None:
                    num_seen += 1
                if request.cached_sequence.committed_len == len(request.token_ids) - 1:
                    request.token_ids += text(int(random.integers(1, 6)), seed=int(random.integers(0, 10_000)))
            else:
                running.remove(request)
                bench.pairs.release(request)
                bench.cache.release_sequence(request.cached_sequence)
    assert num_seen > (1000 if large_counts else 80)
    assert bench.cache.prefix_stats.num_hit_tokens > 0
