"""A layer cache defined only in this test: a recurrent state. Its network runs in the real engine and emits the same tokens.

The toy network's logits depend on a state h_t = f(h_(t-1), token), computed by the memory's own rules, and on attention over rows in
blocks. All its arithmetic is with integers, so one wrong row changes its output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import Engine
from paceline.engine.request import EngineRequest
from paceline.engine.scheduler import SchedulerLimits
from paceline.kv_cache.block_pool import BlockHash
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import Commit, RowPlan
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network, RowRange, assemble_pass
from paceline.runtimes.decoder import HIDDEN_STATES, LOGITS, TOKEN_IDS, NetworkDefinition
from paceline.sampling.draw import draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.speculator import Speculator
from paceline.speculation.tree import DraftTree

SIZE, STRIDE = 4, 2  # slots of a block; a state is kept after every second block
WIDTH, VOCAB, MODULUS = 3, 13, 10_007
Values = NDArray[np.int64]


class RecurrentStateCache(LayerCache):
    """A state per sequence. A pass leaves the state after each of its rows; that of the last row kept becomes the sequence's.

    Attributes:
        behind: by sequence, the length and the state after its committed rows; none = the state before any row.
        left: by sequence, [num_rows, WIDTH] after each row of the pass under way.
        crossed: by sequence, states after blocks that the last pass filled and nobody knows yet, by the block's index.
        kept: where sequences can begin.
    """

    def __init__(self) -> None:
        self.behind: dict[int, tuple[int, Values]] = {}
        self.left: dict[int, Values] = {}
        self.crossed: dict[int, dict[int, Values]] = {}
        self.kept: dict[BlockHash, Values] = {}

    @property
    def num_bytes(self) -> int:
        states = [state for _, state in self.behind.values()]
        return sum(state.nbytes for state in (*states, *self.left.values(), *self.kept.values()))

    def reserve(self, plan: RowPlan) -> None:
        assert self.behind.get(plan.sequence_id, (0, None))[0] == plan.committed_len
        self.left[plan.sequence_id] = np.full((plan.num_rows, WIDTH), -1)

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        states = self.left.pop(plan.sequence_id)[commit.rows]
        assert (states >= 0).all(), "a row that is kept has not run"
        ends = range(plan.committed_len + 1, commit.committed_len + 1)
        self.behind[plan.sequence_id] = commit.committed_len, states[-1]
        self.crossed[plan.sequence_id] = {
            end // SIZE - 1: state for end, state in zip(ends, states, strict=True) if end % (SIZE * STRIDE) == 0
        }

    def cancel(self, plan: RowPlan) -> None:
        self.left.pop(plan.sequence_id, None)

    def can_truncate(self, sequence_id: int, length: int) -> bool:
        return length == self.behind.get(sequence_id, (0, None))[0]

    def num_resumable_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        return next((count for count in range(len(block_hashes), 0, -1) if block_hashes[count - 1] in self.kept), 0)

    def resume(self, sequence_id: int, length: int, block_hashes: Sequence[BlockHash]) -> None:
        if length == 0:
            self.release(sequence_id)
        elif length != self.behind.get(sequence_id, (0, None))[0]:
            self.behind[sequence_id] = length, self.kept[block_hashes[length // SIZE - 1]]

    def register_prefix(self, sequence_id: int, first: int, block_hashes: Sequence[BlockHash]) -> None:
        crossed = self.crossed.pop(sequence_id, {})
        self.kept.update({block_hash: crossed[index] for index, block_hash in enumerate(block_hashes, first) if index in crossed})

    def evict(self, block_hash: BlockHash) -> None:
        self.kept.pop(block_hash, None)

    def release(self, sequence_id: int) -> None:
        self.behind.pop(sequence_id, None)
        self.crossed.pop(sequence_id, None)
        assert sequence_id not in self.left


class Toy(Network):
    """The network. `said` computes from the whole text what `forward` computes from its state."""

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        self._embedding = random.integers(0, MODULUS, (VOCAB, WIDTH))
        self._output = random.integers(0, MODULUS, (WIDTH, VOCAB))

    def new_cache(self, num_blocks: int) -> KVCache:
        (self.rows,), self.states = self.allocate_kv(num_blocks), RecurrentStateCache()
        return KVCache([self.rows, self.states], num_blocks, block_size=SIZE)

    def allocate_kv(self, num_blocks: int) -> list[FullAttentionCache]:
        return [FullAttentionCache(np.zeros((2, num_blocks, 1, SIZE, WIDTH), np.int64))]

    def network_with_same_weights(self, compose: NetworkDefinition) -> Network:
        raise AssertionError("a toy has no network beside it")

    def embed(self, token_ids: IntArray) -> FloatArray:
        return self._embedding[token_ids].astype(np.float32)

    def forward(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch, wanted: LogitsRows) -> ForwardOutput:
        token_ids = inputs[TOKEN_IDS]
        logits = np.concatenate([self._run(item, token_ids[item.start : item.start + item.num_rows]) for item in batch.ranges])
        return ForwardOutput({LOGITS: logits[wanted.rows], HIDDEN_STATES: np.zeros((len(logits), 1), np.float32)})

    def said(self, token_ids: Sequence[int]) -> FloatArray:
        """[T, V]"""
        state, states = np.zeros(WIDTH, np.int64), []
        for token in token_ids:
            state = self._next(state, token)
            states.append(state)
        keys, values = self._embedding[list(token_ids)], np.array(states)
        return np.stack([self._logits(state, keys[: row + 1], values[: row + 1]) for row, state in enumerate(states)])

    def _run(self, item: RowRange, token_ids: IntArray) -> FloatArray:
        length, first = self.states.behind.get(item.sequence_id, (0, np.zeros(WIDTH, np.int64)))
        left = self.states.left[item.sequence_id]
        assert length == item.cached_len
        mask = np.tri(item.num_rows, dtype=np.bool_) if item.mask is None else item.mask
        keys, values = self.rows.storage
        logits = []
        for row, token in enumerate(token_ids):
            before = np.flatnonzero(mask[row, :row])
            left[row] = self._next(left[before[-1]] if len(before) else first, int(token))
            slots = np.array([*range(length), *(length + before), length + row])
            blocks, places = item.block_table[slots // SIZE], slots % SIZE
            keys[blocks[-1], 0, places[-1]], values[blocks[-1], 0, places[-1]] = self._embedding[token], left[row]
            logits.append(self._logits(left[row], keys[blocks, 0, places], values[blocks, 0, places]))
        return np.stack(logits)

    def _next(self, state: Values, token: int) -> Values:
        return (31 * state + state[::-1] + self._embedding[token]) % MODULUS

    def _logits(self, state: Values, keys: Values, values: Values) -> FloatArray:
        attended = (keys @ state % 101 + 1) @ values
        return ((3 * state + attended) % MODULUS @ self._output % 997 / 150).astype(np.float32)


class Knowing(Drafter):
    """Has the expected output; drafts some of it, with wrong draft tokens after and next to it."""

    name = "knowing"

    def __init__(self, texts: dict[tuple[int, ...], list[int]], random: np.random.Generator, *, has_branches: bool) -> None:
        self._texts, self._random, self._has_branches = texts, random, has_branches

    def propose(self, requests: Sequence[EngineRequest], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._draft_tree(request) for request in requests]

    def _draft_tree(self, request: EngineRequest) -> DraftTree:
        text, start = self._texts[(request.seed, *request.token_ids[: request.num_prompt_tokens])], len(request.token_ids)
        right = text[start : start + int(self._random.integers(0, 6))]
        wrong = self._random.integers(0, VOCAB, 3).tolist()
        if not self._has_branches:
            return DraftTree.chain(request.token_ids[-1], right + wrong[:1], self.name)
        parents = [*range(len(right)), *self._random.integers(0, len(right) + 1, len(wrong)).tolist()]
        return DraftTree.from_nodes(request.token_ids[-1], right + wrong, parents, self.name)


@dataclass
class Traffic:
    """Prompts that share beginnings, and the output of plain decoding without a cache for each."""

    toy: Toy
    prompts: list[list[int]]
    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def make(cls, random: np.random.Generator, count: int = 8) -> "Traffic":
        heads = random.integers(0, VOCAB, (2, 17)).tolist()
        prompts = [
            [*heads[index % 2][: int(random.integers(0, 18))], *random.integers(0, VOCAB, int(random.integers(1, 9))).tolist()]
            for index in range(count)
        ]
        traffic = cls(Toy(), prompts)
        for request in traffic.requests():
            prompt = list(request.token_ids)
            while len(request.token_ids) < request.max_len:
                distribution = request.processor.process(traffic.toy.said(request.token_ids)[-1])
                request.token_ids.append(draw(distribution, request.seed, 0, len(request.token_ids)))
                request.processor.commit(request.token_ids[-1])
            traffic.texts[(request.seed, *prompt)] = request.token_ids
        return traffic

    def requests(self) -> list[EngineRequest]:
        made = []
        for index, prompt in enumerate(self.prompts):
            params = SamplingParams(temperature=float(index % 3 > 0))
            processor = LogitsProcessor(params, VOCAB, prompt)
            salt = b"" if index % 5 else b"another's"
            made.append(
                EngineRequest(list(prompt), len(prompt), params, processor, CachedSequence(), index, 0, len(prompt) + 24, salt=salt)
            )
        return made

    def run(self, drafter: Drafter | None, *, num_blocks: int) -> Engine:
        """All requests at once, twice over; texts are those of plain decoding, and nothing is left behind."""
        cache = self.toy.new_cache(num_blocks)
        speculator = Speculator([drafter] if drafter is not None else [], FixedDraftLength(6, max_rows=12), vocab_size=VOCAB)
        engine = Engine(self.toy, cache, speculator, SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk_size=5))
        for _ in range(2):
            requests = self.requests()
            for _ in engine.run(requests):
                cache.check()
                running = [request.cached_sequence.id for request in engine.scheduler.running]
                assert set(self.toy.states.behind) <= set(running)
            for prompt, request in zip(self.prompts, requests, strict=True):
                assert request.token_ids == self.texts[(request.seed, *prompt)], f"prompt of {len(prompt)}"
                assert request.num_cached_tokens % (SIZE * STRIDE) == 0
        self.check_nothing_leaked(cache, num_blocks)
        return engine

    def check_nothing_leaked(self, cache: KVCache, num_blocks: int) -> None:
        states = self.toy.states
        assert (states.behind, states.left, states.crossed) == ({}, {}, {})
        assert all(cache.pool.find_block(block_hash) is not None for block_hash in states.kept)
        cache.pool.release(cache.pool.allocate(num_blocks))  # evicts everything
        assert (len(cache.pool._hash_of), states.num_bytes) == (0, 0)


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("num_blocks", [16, 200], ids=["few blocks", "many blocks"])
@pytest.mark.parametrize("kind", ["none", "ngram", "chains", "trees"])
def test_drafts_change_no_token_of_a_recurrent_network(kind: str, num_blocks: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    traffic = Traffic.make(random)
    knowing = Knowing(traffic.texts, random, has_branches=kind == "trees")
    drafter = {"none": None, "ngram": NgramDrafter()}.get(kind, knowing)
    engine = traffic.run(drafter, num_blocks=num_blocks)
    stats = engine.stats
    assert engine.cache.stats.hit_tokens > 0
    assert (stats.num_preemptions > 0) == (num_blocks == 16)
    if drafter is knowing:
        assert stats.speculation.num_accepted_tokens > 100
        assert stats.num_steps < stats.completion_tokens / 2


FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "the state behind the last row of a pass is kept": (
        "keep_path",
        lambda self, plan, commit, real=RecurrentStateCache.keep_path: real(
            self, plan, Commit(commit.block_table, commit.committed_len, [*commit.rows[:-1], plan.num_rows - 1])
        ),
    ),
    "prefixes are adopted without a state": ("num_resumable_blocks", lambda self, block_hashes: len(block_hashes)),
    "what is kept for a block is the state behind the last row": (
        "register_prefix",
        lambda self, sequence_id, first, block_hashes: self.kept.update(dict.fromkeys(block_hashes, self.behind[sequence_id][1])),
    ),
    "states of blocks that are given up stay": ("evict", lambda self, block_hash: None),
    "states of ended sequences stay": ("release", lambda self, sequence_id: None),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_recurrent_state_cache_faults_are_found(
    fault: tuple[str, Callable[..., object]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    traffic = Traffic.make(random)
    monkeypatch.setattr(RecurrentStateCache, *fault)
    with pytest.raises((AssertionError, KeyError)):
        traffic.run(Knowing(traffic.texts, random, has_branches=True), num_blocks=40)


def test_truncate_of_a_recurrent_state_goes_back_to_a_checkpoint(seed: int) -> None:
    toy, token_ids = Toy(), np.random.default_rng(seed).integers(0, VOCAB, 22).tolist()
    cache = toy.new_cache(20)
    sequence = cache.new_sequence()

    def run(count: int) -> None:
        start = sequence.committed_len
        plan = cache.reserve(sequence, range(-1, count - 1))
        logits = toy.forward(*assemble_pass([plan], [token_ids[start : start + count]], [range(count)])).logits
        np.testing.assert_array_equal(logits, toy.said(token_ids[: start + count])[start:])
        cache.keep_path(sequence, count - 1)
        cache.register_prefix(sequence, token_ids)
        cache.check()

    run(22)
    for length, kept in ((22, 22), (21, 16), (15, 8), (7, 0)):
        assert cache.truncate(sequence, length) == sequence.committed_len == kept
        cache.check()
        if kept < 22:
            run(22 - kept)
    assert cache.truncate(sequence, 0) == 0
    run(3)
    cache.release(sequence)
    assert toy.states.num_bytes == sum(state.nbytes for state in toy.states.kept.values())
