"""Random operations on a small cache of labels, compared with lists: no operation loses, mixes or leaks a row."""

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.errors import CapacityError
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.kv_cache.row_plan import RowPlan, path_to

NUM_BLOCKS = 13
BLOCK_SIZE = 4
NUM_OPERATIONS = 40


class CheckedCache:
    """A cache whose rows are labels (values hold the negative), with the labels every sequence should hold."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE) -> None:
        self.storage = np.zeros((2, num_blocks, 2, block_size, 1), np.int64)
        self.cache = KVCache([FullAttentionCache(self.storage)], num_blocks, block_size=block_size)
        self.labels: dict[CachedSequence, list[int]] = {}
        self.node_labels: dict[CachedSequence, list[int]] = {}
        self.num_refused = 0
        self._last_label = 0

    def start(self) -> CachedSequence:
        sequence = self.cache.new_sequence()
        self.labels[sequence] = []
        return sequence

    def reserve(self, sequence: CachedSequence, parents: Sequence[int]) -> bool:
        """Reserve and write the rows as a pass would; False where memory was short."""
        if not self._attempt(lambda: self.cache.reserve_rows(sequence, parents)):
            return False
        self.node_labels[sequence] = [self._last_label + node for node in range(1, len(parents) + 1)]
        self._last_label += len(parents)
        for node, label in enumerate(self.node_labels[sequence]):
            block, slot = self._place(sequence.row_plan.block_table, sequence.committed_len + node)
            self.storage[0, block, :, slot] = label
            self.storage[1, block, :, slot] = -label
        return True

    def keep_path(self, sequence: CachedSequence, node: int) -> None:
        parents = sequence.row_plan.parents
        self.cache.keep_path(sequence, node)
        node_labels = self.node_labels.pop(sequence)
        self.labels[sequence] += [node_labels[one] for one in path_to(parents, node)]

    def cancel(self, sequence: CachedSequence) -> None:
        self.cache.drop_reserved_rows(sequence)
        self.node_labels.pop(sequence, None)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        if self._attempt(lambda: self.cache.truncate(sequence, length)):
            self.node_labels.pop(sequence, None)
            del self.labels[sequence][length:]

    def release(self, sequence: CachedSequence) -> None:
        self.cache.release_sequence(sequence)
        self.node_labels.pop(sequence, None)
        del self.labels[sequence]

    def check(self) -> None:
        """Ownership, every committed row, and what every row of a pass under way would attend to."""
        self.cache.check_consistency()
        for sequence, labels in self.labels.items():
            assert sequence.committed_len == len(labels)
            assert self._rows(sequence.block_table, len(labels)) == labels
            if (plan := sequence.row_plan) is not None:
                assert self._rows(plan.block_table, len(labels) + plan.num_rows) == labels + self.node_labels[sequence]

    def _rows(self, table: Sequence[int], count: int) -> list[int]:
        rows = self.storage[:, list(table)].transpose(1, 3, 0, 2, 4).reshape(-1, 4)[:count]
        assert (rows == rows[:, :1] * [1, 1, -1, -1]).all()
        return rows[:, 0].tolist()

    def _place(self, table: Sequence[int], slot: int) -> tuple[int, int]:
        return table[slot // self.cache.block_size], slot % self.cache.block_size

    def _attempt(self, action) -> bool:
        """Whether it went well; if memory was short, nothing may have changed."""
        before = self._state()
        storage = self.storage.copy()
        try:
            action()
        except CapacityError:
            assert self._state() == before
            assert (self.storage == storage).all()
            self.num_refused += 1
            return False
        return True

    def _state(self) -> list[object]:
        owners = [self.cache.pool.num_owners(block) for block in range(self.cache.pool.num_blocks)]
        return [owners, self.cache.pool.num_free, *((list(one.block_table), one.committed_len, one.row_plan) for one in self.labels)]


def _random_parents(generator: np.random.Generator) -> Sequence[int]:
    kind = int(generator.integers(3))
    if kind == 0:
        return range(-1, int(generator.integers(0, 12)))
    width = 1 if kind == 1 else 3  # stars and combs, or bushy trees
    return [-1, *(int(generator.integers(max(0, node - width), node)) // width for node in range(1, int(generator.integers(2, 9))))]


def _random_operation(checked: CheckedCache, generator: np.random.Generator) -> None:
    sequences = list(checked.labels)
    if not sequences or (len(sequences) < 5 and generator.random() < 0.1):
        checked.start()
        return
    sequence = sequences[int(generator.integers(len(sequences)))]
    draw = generator.random()
    if draw < 0.80:
        if sequence.row_plan is not None:
            checked.keep_path(sequence, int(generator.integers(len(sequence.row_plan.parents))))
        else:
            checked.reserve(sequence, _random_parents(generator))
    elif draw < 0.86:
        checked.cancel(sequence)
    elif draw < 0.94:
        checked.truncate(sequence, int(generator.integers(sequence.committed_len + 1)))
    else:
        checked.release(sequence)


def _run_schedules(seed: int, count: int) -> int:
    """Run random schedules, checking after every operation; returns how often memory was short."""
    num_refused = 0
    for schedule in range(count):
        generator = np.random.default_rng([seed, schedule])
        checked = CheckedCache()
        for _ in range(NUM_OPERATIONS):
            _random_operation(checked, generator)
            checked.check()
        for sequence in list(checked.labels):
            checked.release(sequence)
            checked.check()
        assert checked.cache.pool.num_free == NUM_BLOCKS
        num_refused += checked.num_refused
    return num_refused


def test_kv_cache_rows_and_blocks_are_right_under_random_use(seed, large_counts):
    count = 1_000 if large_counts else 120
    assert _run_schedules(seed, count) > count // 4


@pytest.mark.parametrize("offset", [-1, 1], ids=["the parent", "the child"])
def test_cache_check_detects_the_path_of_a_wrong_node(offset, seed, monkeypatch):
    commit = RowPlan.committed_path

    def off_by_one(plan: RowPlan, node: int):
        child = next((other for other, parent in enumerate(plan.parents) if parent == node), node)
        return commit(plan, path_to(plan.parents, node)[-2:][0] if offset < 0 else child)

    monkeypatch.setattr(RowPlan, "committed_path", off_by_one)
    with pytest.raises(AssertionError):
        _run_schedules(seed, 20)


def test_cache_check_detects_rows_that_were_not_moved(seed, monkeypatch):
    commit = RowPlan.committed_path
    monkeypatch.setattr(RowPlan, "committed_path", lambda plan, node: commit(plan, node)._replace(moves=()))
    with pytest.raises(AssertionError):
        _run_schedules(seed, 20)


def test_cache_reserve_twice_raises():
    checked = CheckedCache()
    sequence = checked.start()
    checked.reserve(sequence, [-1, 0, 0])
    with pytest.raises(RuntimeError, match="a pass is under way"):
        checked.cache.reserve_rows(sequence, [-1])
    checked.check()


def test_cache_keep_path_without_reserve_raises():
    checked = CheckedCache()
    with pytest.raises(RuntimeError, match="call reserve_rows first"):
        checked.cache.keep_path(checked.start(), 0)


@pytest.mark.parametrize("length", [0, 5, 8])
def test_cache_release_twice_raises_even_if_blocks_have_a_new_owner(length):
    checked = CheckedCache()
    first, second = checked.start(), checked.start()
    for sequence in (first, second):
        if length:
            checked.reserve(sequence, range(-1, length - 1))
            checked.keep_path(sequence, length - 1)
        if sequence is first:
            checked.release(first)
    with pytest.raises(RuntimeError, match="released before"):
        checked.cache.release_sequence(first)
    checked.check()


@pytest.mark.parametrize("length", [-1, 6])
def test_cache_truncate_to_an_impossible_length_raises(length):
    checked = CheckedCache()
    sequence = checked.start()
    checked.reserve(sequence, range(-1, 4))
    checked.keep_path(sequence, 4)
    with pytest.raises(ValueError, match="cannot truncate 5 committed rows"):
        checked.cache.truncate(sequence, length)
    checked.check()


def test_cache_keep_path_of_an_unknown_node_keeps_the_reservation():
    checked = CheckedCache()
    sequence = checked.start()
    checked.reserve(sequence, [-1, 0, 0])
    with pytest.raises(ValueError, match="not in the tree"):
        checked.cache.keep_path(sequence, 3)
    checked.check()
    checked.keep_path(sequence, 2)
    checked.check()


def test_kv_cache_lengths_match_its_storage():
    checked = CheckedCache()
    assert checked.cache.max_slots == NUM_BLOCKS * BLOCK_SIZE
    sequence = checked.start()
    checked.reserve(sequence, [-1, 0, 0, 1])
    assert (sequence.committed_len, sequence.row_plan.num_rows) == (0, 4)
    checked.cancel(sequence)
    assert (sequence.committed_len, sequence.row_plan, checked.cache.pool.num_free) == (0, None, NUM_BLOCKS)
