"""Keys and values of a head's true pairs, kept where the target keeps those of the same tokens.

A head with attention joins token s with the target's feature of position s - 1. That pair depends on the tokens up to s and on nothing
else, like the target's own row of token s, so it lives at the same slot of the same block, and whatever happens to blocks (copies,
forks, sharing of prefixes, eviction) is right for both:

    slot                 0     1        2        …   n
    the target's row     x_0   x_1      x_2          x_n (the root, pending)
    the head's pair      -     x_1 f_0  x_2 f_1      x_n f_(n-1)      drafted pairs behind it, dropped afterwards

Slot 0 has no pair and is never seen. Beside each row stands a mark, a hash of the tokens it was computed from: a sequence that adopts a
prefix sees which of its rows were ever drafted. The first pair behind an adopted prefix needs the feature of the prefix's last token:
one feature is kept for every full block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.key_values import PagedRows
from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.kv_cache.row_plan import blocks_for
from paceline.runtimes.base import FloatArray, IntArray, Network, RowRange
from paceline.speculation.drafter import RequestState
from paceline.speculation.request import Request

SPARE_BLOCKS = 64
"""The head's own blocks, for drafted rows beyond the blocks a sequence has."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, as is the factor below: another token always changes the mark
_FACTOR = np.uint64(0xD1342543DE82EF95)
_STEP_NUMBER, _WORD = int(_STEP), 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True)
class _Pairs:
    """One request's pairs: slots [first, num_pairs) hold true ones; features of positions num_pairs - 1 … num_seen - 1 wait."""

    sequence: CachedSequence
    first: int
    num_pairs: int
    num_seen: int  # positions whose features arrived
    mark: int  # of the tokens before slot num_pairs
    waiting: list[FloatArray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrueRows:
    """True pairs to run.

    Attributes:
        token_ids: [T] tokens of the pairs.
        features: [T, F] the features they are joined with.
        rows: where they stand; positions of the pairs are their slots less 1.
    """

    token_ids: IntArray
    features: FloatArray
    rows: RowRange


@dataclass(frozen=True, slots=True)
class PairRows(TrueRows):
    """Those of one request."""

    request: Request


class PairCache:
    """The pairs of all requests of one target.

    Args:
        runtime: the head; its cache becomes this one's.
        cache: the target's.
        feature_size: F, values of a feature.
        window: slots a pair may see, itself included.
    """

    def __init__(self, runtime: Network, cache: KVCache, *, feature_size: int, window: int) -> None:
        num_blocks = cache.pool.num_blocks
        rows = [PagedRows(memory.storage) for memory in runtime.allocate_kv(num_blocks + SPARE_BLOCKS)]
        self.block_size = cache.block_size
        self.window = window
        self.bytes_per_token = (sum(memory.num_bytes for memory in rows) + feature_size * 4 * num_blocks) // max(1, cache.max_slots)
        self._spares = range(num_blocks, num_blocks + SPARE_BLOCKS)
        self._marks = np.zeros((1, num_blocks, self.block_size), np.uint64)
        self._features = np.zeros((num_blocks, feature_size), np.float32)
        self._feature_marks = np.zeros(num_blocks, np.uint64)
        self._powers = np.cumprod(np.full(cache.max_slots + 1, _FACTOR, np.uint64), dtype=np.uint64)
        self._one_mark, self._one_power = self._marks.data, self._powers.data  # read after every pass: faster to index than arrays
        self._pairs = RequestState[_Pairs]()
        for memory in (*rows, PagedRows(self._marks)):
            cache.add(memory)

    def observe(self, request: Request, start: int, features: FloatArray) -> int:
        """Take the target's features [T, F] of positions `start` …; returns how many wait.

        A new or restarted request keeps the pairs that were already computed for its prefix.
        """
        end = start + len(features)
        pairs = self._pairs.get(request)
        if pairs is None or pairs.sequence is not request.sequence or pairs.num_seen != start:
            pairs = self._pairs[request] = self._begin(request, start)
        pairs.waiting.append(np.array(features, np.float32))
        pairs.num_seen = end
        self._keep_features(request, start, features)
        return end - pairs.num_pairs + 1

    def release(self, request: Request) -> None:
        """Forget a request; its rows stay as long as the target's."""
        self._pairs.pop(request)

    def waiting_rows(self, request: Request, *, with_root: bool, num_drafted: int = 0, spares: int = 0) -> PairRows | None:
        """The pairs that can be computed now; None where there are none, the features stop short of the root or no spare block is left.

        Args:
            with_root: the pair of the request's last token too, whose slot the target has not written yet.
            num_drafted: drafted rows that will follow.
            spares: spare blocks that other requests of the pass use.
        """
        pairs = self._pairs.get(request)
        if pairs is None or (with_root and pairs.num_seen != len(request.token_ids) - 1):
            return None
        begin, end = pairs.num_pairs, pairs.num_seen + with_root
        if end <= begin:
            return None
        table = request.sequence.block_table
        missing = -(-(end + num_drafted) // self.block_size) - len(table)
        if missing > SPARE_BLOCKS - spares:
            return None
        if missing > 0:
            table = [*table, *self._spares[spares : spares + missing]]
        if len(pairs.waiting) > 1:
            pairs.waiting = [np.concatenate(pairs.waiting)]
        rows = RowRange(0, end - begin, begin, np.array(table, np.int32), None, min(begin, max(pairs.first, end - self.window)))
        return PairRows(np.array(request.token_ids[begin:end], np.int32), pairs.waiting[0][: end - begin], rows, request)

    def keep(self, request: Request, token_ids: Sequence[int] | IntArray) -> None:
        """Note that the pairs of these tokens, the first waiting ones, were computed. A root's pair in a spare block will run again."""
        pairs = self._pairs[request]
        table, size = request.sequence.block_table, self.block_size
        begin = pairs.num_pairs
        end = min(begin + len(token_ids), len(table) * size)
        if end == begin:
            return
        mark, powers, marks = pairs.mark, self._one_power, self._one_mark
        for slot, token in zip(range(begin, end), token_ids, strict=False):  # as `_marks_of` says, which takes longer for the usual few
            mark = ((int(token) + 1) * _STEP_NUMBER * powers[slot] + mark) & _WORD
            marks[0, table[slot // size], slot % size] = mark
        pairs.mark, pairs.num_pairs = mark, end
        if end > pairs.num_seen:  # the root's was the last one
            pairs.waiting = []
        else:
            features = pairs.waiting[0] if len(pairs.waiting) == 1 else np.concatenate(pairs.waiting)
            pairs.waiting = [features[end - begin :]]

    def num_waiting(self, request: Request) -> int:
        """Pairs that can be computed now, the root's included."""
        pairs = self._pairs.get(request)
        return 0 if pairs is None else pairs.num_seen + 1 - pairs.num_pairs

    def num_spares(self, request: Request, num_drafted: int) -> int:
        """Spare blocks that a root and `num_drafted` rows behind it need."""
        end = len(request.token_ids) + num_drafted
        return max(0, blocks_for(end, self.block_size) - len(request.sequence.block_table))

    def first_pair(self, request: Request) -> int:
        """The first slot of a request that can be seen, for tests and statistics."""
        return self._pairs[request].first

    def num_pairs(self, request: Request) -> int:
        """Slots before which all pairs from the first one on are true, for tests and statistics."""
        return self._pairs[request].num_pairs

    def _begin(self, request: Request, start: int) -> _Pairs:
        if start == 0:
            return _Pairs(request.sequence, 1, 1, 0, int(self._marks_of(request.token_ids[:1], 0, 0)[0]))
        marks = self._marks_of(request.token_ids[: start + 1], 0, 0)
        table, size = request.sequence.block_table, self.block_size
        block = table[start // size - 1]
        if start % size or self._feature_marks[block] != marks[start - 1]:
            return _Pairs(request.sequence, start + 1, start + 1, start, int(marks[start]))
        known = self._marks[0, table[: start // size]].reshape(-1) == marks[:start]
        known[0] = False
        first = start - int(np.argmin(known[::-1]))  # the run that reaches the end; slot 0 ends every run
        return _Pairs(request.sequence, first, start, start, int(marks[start - 1]), [self._features[block : block + 1].copy()])

    def _keep_features(self, request: Request, start: int, features: FloatArray) -> None:
        """Those of the last tokens of full blocks."""
        size = self.block_size
        last = start + (size - 1 - start) % size
        if last >= start + len(features):
            return
        pairs = self._pairs[request]
        begin = pairs.num_pairs
        later = self._marks_of(request.token_ids[begin : start + len(features)], begin, pairs.mark)
        for position in range(last, start + len(features), size):
            block = request.sequence.block_table[position // size]
            self._features[block] = features[position - start]
            self._feature_marks[block] = pairs.mark if position < begin else later[position - begin]  # all before `begin` are marked

    def _marks_of(self, token_ids: Sequence[int] | IntArray, first: int, before: int) -> NDArray[np.uint64]:
        """The marks of slots `first` …: a polynomial of all tokens up to each."""
        values = (np.asarray(token_ids, np.uint64) + np.uint64(1)) * _STEP * self._powers[first : first + len(token_ids)]
        values[:1] += np.uint64(before)
        return np.cumsum(values, dtype=np.uint64)
