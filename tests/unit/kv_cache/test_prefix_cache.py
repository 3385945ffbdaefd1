"""Blocks that outlive their sequence: a matched block holds exactly the right rows, whatever happened to the cache before."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockHash, BlockPool
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache, PagedCache
from paceline.kv_cache.row_plan import path_to

SIZE = 4
NUM_BLOCKS = 24
SALTS = (b"", b"another tenant")


class Text:
    """A sequence in the cache and what its rows are computed from; the last token is never cached."""

    def __init__(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        self.sequence, self.token_ids = sequence, list(token_ids)
        self.drafted: Sequence[int] | None = None  # the token of each node of the pass under way


class CheckedCache:
    """A cache whose rows are labels that depend on the salt and on every token up to the row, as keys and values do.

    A further layer cache, the companion, gets the same labels when rows are committed.
    """

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.storage = np.zeros((2, num_blocks, 1, SIZE, 1), np.int64)
        self.cache = KVCache([FullAttentionCache(self.storage)], num_blocks, block_size=SIZE)
        self.companion = np.zeros((1, num_blocks, SIZE), np.int64)
        self.cache.add_layer_cache(PagedCache(self.companion))
        self.texts: list[Text] = []
        self.num_adopted = 0
        self._labels: dict[tuple[object, ...], int] = {}
        self._known: dict[int, tuple[BlockHash, list[int]]] = {}

    def start(self, token_ids: Sequence[int], salt: bytes = b"") -> Text:
        """A new sequence that adopts what it can: exactly the longest run of blocks that are known to hold its rows."""
        self.check()
        text = Text(self.cache.new_sequence(salt), token_ids)
        self.texts.append(text)
        held = {tuple(rows): block for block, (_, rows) in self._known.items()}
        wanted = self.labels(text)[: (len(token_ids) - 1) // SIZE * SIZE]
        expected = []
        while (rows := tuple(wanted[len(expected) * SIZE : (len(expected) + 1) * SIZE])) in held:
            expected.append(held[rows])
        num_adopted = self.cache.match_prefix(text.sequence, token_ids)
        assert text.sequence.block_table == expected
        assert num_adopted == text.sequence.committed_len == len(expected) * SIZE
        self.num_adopted += len(expected)
        return text

    def run(self, text: Text, parents: Sequence[int], drafted: Sequence[int] = ()) -> None:
        """Reserve and write rows as a pass would: known tokens in front, then nodes with the tokens `drafted`."""
        plan = self.cache.reserve_rows(text.sequence, parents)
        start = text.sequence.committed_len
        text.drafted = [*text.token_ids[start : start + len(parents) - len(drafted)], *drafted]
        for node in range(plan.num_rows):
            before = [text.drafted[one] for one in path_to(parents, node)]
            slot = start + node
            self.storage[:, plan.block_table[slot // SIZE], :, slot % SIZE] = self._label(text, start, before)

    def keep(self, text: Text, node: int, *, register: bool = True) -> None:
        """Commit a node's path; a token that no row was computed from yet follows it."""
        start, parents = text.sequence.committed_len, text.sequence.row_plan.parents
        kept = [text.drafted[one] for one in path_to(parents, node)]
        self.cache.keep_path(text.sequence, node)
        text.token_ids[start : start + len(kept)] = kept
        if len(text.token_ids) == text.sequence.committed_len:
            text.token_ids.append(len(text.token_ids) % 2)
        labels = self.labels(text)
        for slot in range(start, text.sequence.committed_len):
            self.companion[:, text.sequence.block_table[slot // SIZE], slot % SIZE] = labels[slot]
        if register:
            self.cache.register_prefix(text.sequence, text.token_ids)

    def extend(self, text: Text) -> None:
        """Run and cache everything but the last token."""
        count = len(text.token_ids) - 1 - text.sequence.committed_len
        if count:
            self.run(text, range(-1, count - 1))
            self.keep(text, count - 1)

    def prompt(self, token_ids: Sequence[int], salt: bytes = b"") -> Text:
        """A sequence whose prompt has run."""
        text = self.start(token_ids, salt)
        self.extend(text)
        self.check()
        return text

    def cancel(self, text: Text) -> None:
        self.cache.drop_reserved_rows(text.sequence)
        text.drafted = None

    def truncate(self, text: Text, length: int) -> None:
        self.cache.truncate(text.sequence, length)
        text.drafted = None
        text.token_ids[length:] = [len(text.token_ids) % 3]

    def release(self, text: Text) -> None:
        self.cache.release_sequence(text.sequence)
        self.texts.remove(text)

    def labels(self, text: Text) -> list[int]:
        """What the committed rows (and those of known tokens) must hold."""
        return [self._label(text, 0, text.token_ids[: slot + 1]) for slot in range(len(text.token_ids) - 1)]

    def check(self) -> None:
        """Check the cache, every committed row, that no indexed block changed, and that all blocks without owners can be allocated."""
        self.cache.check_consistency()
        for text in self.texts:
            assert self._rows(text.sequence.block_table, text.sequence.committed_len) == self.labels(text)[: text.sequence.committed_len]
        hashes = {block: self.cache.pool.hash_of(block) for block in range(self.cache.pool.num_blocks)}
        known: dict[int, tuple[BlockHash, list[int]]] = {}
        for block, block_hash in hashes.items():
            if block_hash is not None:
                known[block] = (block_hash, self._rows([block], SIZE))
                assert self._known.get(block, known[block]) == known[block] or self._known[block][0] is not block_hash, (
                    "a known block changed"
                )
        self._known = known
        owned = {block for text in self.texts for block in text.sequence.block_table}
        owned |= {block for text in self.texts if text.sequence.row_plan for block in text.sequence.row_plan.fresh_blocks}
        assert self.cache.pool.num_free == self.cache.pool.num_blocks - len(owned)
        assert len(self.cache.pool._hash_of) == len(known)

    def _label(self, text: Text, start: int, tokens: Sequence[int]) -> int:
        key = (text.sequence.salt, *text.token_ids[:start], *tokens)
        return self._labels.setdefault(key, len(self._labels) + 1)

    def _rows(self, table: Sequence[int], count: int) -> list[int]:
        rows = self.storage[:, list(table)].reshape(2, -1)[:, :count]
        assert (rows[0] == rows[1]).all()
        assert (self.companion[0, list(table)].reshape(-1)[:count] == rows[0]).all()
        return rows[0].tolist()


def _random_prompt(checked: CheckedCache, generator: np.random.Generator) -> list[int]:
    """The beginning of a text that runs, or of one of a few fixed ones, and an end of its own."""
    bases = [text.token_ids for text in checked.texts] + [[base] * 40 for base in range(3)]
    base = bases[int(generator.integers(len(bases)))]
    return [*base[: int(generator.integers(0, 41))], *generator.integers(0, 2, int(generator.integers(1, 8))).tolist()]


def _random_pass(checked: CheckedCache, text: Text, generator: np.random.Generator) -> None:
    uncached = len(text.token_ids) - text.sequence.committed_len
    if uncached > 1:
        count = int(generator.integers(1, uncached + 1))
        checked.run(text, range(-1, count - 1))
    else:
        num_drafted = int(generator.integers(0, 9))
        parents = [-1, *(int(generator.integers(max(0, node - 3), node)) for node in range(1, num_drafted + 1))]
        checked.run(text, parents, generator.integers(0, 3, num_drafted).tolist())


def _random_event(checked: CheckedCache, generator: np.random.Generator) -> None:
    if not checked.texts or (len(checked.texts) < 6 and generator.random() < 0.12):
        checked.start(_random_prompt(checked, generator), SALTS[int(generator.random() < 0.2)])
        return
    text = checked.texts[int(generator.integers(len(checked.texts)))]
    draw = generator.random()
    if draw < 0.76 and text.sequence.row_plan is not None:
        nodes = len(text.sequence.row_plan.parents)
        is_chunk = len(text.token_ids) - text.sequence.committed_len >= nodes > 1
        checked.keep(text, nodes - 1 if is_chunk else int(generator.integers(nodes)), register=generator.random() < 0.9)
    elif draw < 0.76:
        _random_pass(checked, text, generator)
    elif draw < 0.79:
        checked.cancel(text)
    elif draw < 0.84:
        checked.truncate(text, int(generator.integers(text.sequence.committed_len + 1)))
    elif draw < 0.89:
        checked.cache.unregister_prefix(text.sequence)
    else:
        checked.release(text)


def _run_events(seed: int, num_schedules: int, num_events: int = 250) -> tuple[int, int, int]:
    """Run random events, checking after each; returns blocks adopted, blocks evicted and how often memory was short."""
    num_adopted = num_evicted = num_refused = 0
    for schedule in range(num_schedules):
        generator = np.random.default_rng([seed, schedule])
        checked = CheckedCache()
        for _ in range(num_events):
            try:
                _random_event(checked, generator)
            except CapacityError:
                num_refused += 1
            checked.check()
        for text in list(checked.texts):
            checked.release(text)
            checked.check()
        assert checked.cache.pool.num_free == NUM_BLOCKS
        num_adopted += checked.num_adopted
        num_evicted += checked.cache.prefix_stats.num_evicted_blocks
    return num_adopted, num_evicted, num_refused


def test_matched_blocks_hold_the_rows_of_the_prefix(seed, large_counts, tally):
    num_schedules = 100 if large_counts else 5
    num_adopted, num_evicted, num_refused = _run_events(seed, num_schedules)
    tally["prefix cache events"] += num_schedules * 250
    tally["blocks adopted"] += num_adopted
    tally["blocks evicted"] += num_evicted
    assert min(num_adopted, num_evicted, num_refused) > 10 * num_schedules


def _own_tokens_only(pool: BlockPool, token_ids, salt, known, num_blocks):
    for block in range(len(known), num_blocks):
        yield from real_hashes(pool, token_ids[block * SIZE : (block + 1) * SIZE], salt, (), 1)


def _release_to_the_free_list(pool: BlockPool, blocks: Sequence[int]) -> None:
    for block in blocks:
        pool._owners[block] -= 1
        if pool._owners[block] == 0:
            pool._free.append(block)


real_hashes = BlockPool.block_hashes
BREAKAGES = {
    "a key that stands for its own block only": (BlockPool, "block_hashes", _own_tokens_only),
    "a salt that does not count": (BlockPool, "block_hashes", lambda self, tokens, salt, *rest: real_hashes(self, tokens, b"", *rest)),
    "a block that is written while it is known": (BlockPool, "unregister", lambda self, block: self._idle.pop(block, None)),
    "a further layer cache that is not notified": (KVCache, "add_layer_cache", lambda self, layer_cache: None),
    "blocks given to two sequences": (BlockPool, "add_owner", lambda self, blocks: [self._idle.pop(block, None) for block in blocks]),
    "idle blocks that are never given up": (BlockPool, "num_free", property(lambda self: len(self._free))),
    "blocks that are not known again": (BlockPool, "release", _release_to_the_free_list),
}


@pytest.mark.parametrize("breakage", BREAKAGES.values(), ids=BREAKAGES)
def test_random_prefix_cache_events_detect_planted_faults(breakage, seed, monkeypatch):
    monkeypatch.setattr(*breakage)
    with pytest.raises((AssertionError, RuntimeError)):
        _run_events(seed, 8)


def test_repeated_prompt_matches_all_but_its_last_block():
    checked = CheckedCache()
    for length in (1, 4, 5, 8, 9, 11, 12, 13):
        prompt = [length] * length
        first = checked.prompt(prompt)
        again = checked.start(prompt)
        assert again.sequence.committed_len == (length - 1) // SIZE * SIZE
        assert again.sequence.block_table == first.sequence.block_table[: (length - 1) // SIZE]
        checked.release(first)
        checked.check()
        checked.release(again)


def test_prefix_of_a_released_sequence_is_matched_with_its_salt_only():
    checked = CheckedCache()
    checked.release(checked.prompt(range(13)))
    assert checked.cache.pool.num_free == NUM_BLOCKS
    assert len(checked.cache.pool._hash_of) == 3
    assert checked.start(range(13), b"salt").sequence.committed_len == 0
    assert checked.start(range(13)).sequence.committed_len == 12
    assert checked.start([*range(8), 99, *range(9, 13)]).sequence.committed_len == 8
    checked.check()
    assert (checked.cache.prefix_stats.num_looked_up_tokens, checked.cache.prefix_stats.num_hit_tokens) == (52, 20)


def test_released_prefix_is_not_counted_and_can_be_matched_again():
    checked = CheckedCache()
    checked.release(checked.prompt(range(13)))
    before = replace(checked.cache.prefix_stats)
    again = checked.start(range(10))
    assert again.sequence.committed_len == 8
    for _ in range(2):
        checked.cache.release_prefix(again.sequence)
        checked.check()
        assert (again.sequence.committed_len, again.sequence.block_table, again.sequence.block_hashes) == (0, [], [])
        assert checked.cache.pool.num_free == NUM_BLOCKS
        assert checked.cache.prefix_stats == before
    assert checked.cache.match_prefix(again.sequence, range(10)) == 8
    assert (checked.cache.prefix_stats.num_looked_up_tokens, checked.cache.prefix_stats.num_hit_tokens) == (
        before.num_looked_up_tokens + 10,
        before.num_hit_tokens + 8,
    )
    checked.release(again)


def test_output_blocks_are_matched_too():
    checked = CheckedCache()
    text = checked.prompt(range(6))
    checked.run(text, [-1, 0, 0, 1, 2, 4], [7, 8, 9, 10, 11])
    checked.keep(text, 5)
    checked.check()
    assert text.token_ids[:9] == [*range(6), 8, 10, 11]
    assert checked.start(text.token_ids).sequence.committed_len == 8
    assert checked.start([*range(6), 7, 9, 11]).sequence.committed_len == 4


def test_prefix_caching_off_registers_and_matches_nothing():
    cache = KVCache([], 9, block_size=SIZE, prefix_caching=False)
    sequence = cache.new_sequence()
    cache.reserve_rows(sequence, range(-1, 11))
    cache.keep_path(sequence, 11)
    cache.register_prefix(sequence, range(12))
    assert len(cache.pool._hash_of) == 0
    assert cache.match_prefix(cache.new_sequence(), range(12)) == 0
    assert cache.prefix_stats.num_looked_up_tokens == 0


def test_register_prefix_reads_committed_tokens_of_new_full_blocks_only():
    reads: list[slice] = []

    class Watched(list):
        def __getitem__(self, item):
            reads.append(item)
            return super().__getitem__(item)

    checked = CheckedCache()
    text = checked.start(range(11))
    checked.run(text, range(-1, 5))
    checked.keep(text, 5, register=False)
    tokens = Watched(text.token_ids)
    for _ in range(2):
        checked.cache.register_prefix(text.sequence, tokens)
        assert reads == [slice(0, 4)]
    checked.extend(text)
    checked.cache.register_prefix(text.sequence, tokens)
    assert reads == [slice(0, 4)]
    adopting = checked.start([*text.token_ids, 1, 2, 3])
    assert adopting.sequence.committed_len == 8
    checked.run(adopting, range(-1, 4))
    checked.keep(adopting, 4, register=False)
    checked.cache.register_prefix(adopting.sequence, Watched(adopting.token_ids))
    assert reads == [slice(0, 4), slice(8, 12)]


def test_first_of_two_equal_blocks_stays_indexed():
    checked = CheckedCache()
    first, second = checked.start(range(9)), checked.start(range(9))
    for text in (first, second):
        checked.extend(text)
        checked.check()
    assert set(first.sequence.block_table).isdisjoint(second.sequence.block_table)
    assert checked.start(range(9)).sequence.block_table == first.sequence.block_table[:2]


def test_equal_block_is_indexed_after_the_first_was_evicted():
    checked = CheckedCache(num_blocks=7)
    first, second = checked.start(range(9)), checked.start(range(9))
    checked.extend(first)
    checked.extend(second)
    checked.release(first)
    blocks = checked.cache.pool.allocate(5)  # everything but the copies
    assert len(checked.cache.pool._hash_of) == 0
    checked.cache.pool.release(blocks)
    kept = second.sequence.block_table[:2]
    checked.release(second)
    checked.check()
    assert checked.start(range(9)).sequence.block_table == kept


def test_release_of_an_equal_block_touches_the_indexed_one():
    """The beginning of a prefix is not evicted before its end, though another sequence's block replaces it."""
    checked = CheckedCache(num_blocks=8)
    first, second = checked.start(range(9)), checked.start(range(13))
    checked.extend(first)
    checked.extend(second)
    known = first.sequence.block_table[:2] + second.sequence.block_table[2:3]
    checked.release(first)
    checked.release(second)
    checked.check()
    checked.cache.pool.release(checked.cache.pool.allocate(6))
    checked.check()
    assert checked.start(range(13)).sequence.block_table == known[:2]


def test_eviction_begins_at_the_end_of_the_least_recently_used_prompt():
    checked = CheckedCache(num_blocks=10)
    prompts = [[base] * 13 for base in range(3)]
    for prompt in prompts:
        checked.release(checked.prompt(prompt))
    checked.release(checked.start(prompts[0]))  # used again
    for taken, lengths in ((2, (12, 8, 12)), (3, (12, 4, 12)), (5, (12, 0, 8)), (8, (8, 0, 0)), (10, (0, 0, 0))):
        checked.cache.pool.release(checked.cache.pool.allocate(taken))
        pool = checked.cache.pool
        found = [
            sum(pool.find_block(block_hash) is not None for block_hash in pool.block_hashes(prompt, b"", (), 3)) * SIZE
            for prompt in prompts
        ]
        assert tuple(found) == lengths, taken


def test_uncached_free_blocks_are_allocated_first():
    checked = CheckedCache(num_blocks=7)
    checked.release(checked.prompt(range(13)))
    blocks = checked.cache.pool.allocate(4)
    assert checked.cache.prefix_stats.num_evicted_blocks == 0
    blocks += checked.cache.pool.allocate(1)
    assert checked.cache.prefix_stats.num_evicted_blocks == 1
    with pytest.raises(CapacityError, match="3 blocks needed, 2 of 7 free"):
        checked.cache.pool.allocate(3)
    assert len(checked.cache.pool._hash_of) == 2


def test_match_prefix_needs_no_free_block():
    checked = CheckedCache(num_blocks=7)
    checked.release(checked.prompt(range(13)))
    other = checked.start([50] * 17)
    checked.run(other, range(-1, 15))  # the four blocks that were free
    checked.check()
    assert checked.cache.pool.num_free == 3
    text = checked.start(range(13))
    assert (text.sequence.committed_len, checked.cache.pool.num_free) == (12, 0)
    with pytest.raises(CapacityError):
        checked.run(text, [-1])
    checked.check()
    checked.keep(other, 15)
    checked.check()
    checked.release(text)
    checked.run(other, [-1])  # out of what was given back
    checked.check()


def test_truncate_within_an_indexed_block_removes_it_from_the_index():
    checked = CheckedCache()
    text = checked.prompt(range(13))
    checked.truncate(text, 6)
    checked.check()
    assert checked.start(range(13)).sequence.committed_len == 4
    text.token_ids[6:] = [60, 61, 62, 63]
    checked.extend(text)
    checked.check()
    assert checked.start([*range(6), 60, 61, 62]).sequence.committed_len == 8


def test_truncate_within_a_shared_block_copies_it():
    checked = CheckedCache()
    text = checked.prompt(range(13))
    sharing = checked.start(range(13))
    before = list(text.sequence.block_table)
    checked.truncate(sharing, 6)
    checked.check()
    assert sharing.sequence.block_table[0] == before[0]
    assert sharing.sequence.block_table[1] not in before
    assert checked.start(range(13)).sequence.block_table == before[:3]


def test_evicted_prefix_is_never_matched():
    checked = CheckedCache()
    text = checked.prompt(range(13))
    checked.cache.unregister_prefix(text.sequence)
    checked.check()
    assert checked.start(range(13)).sequence.committed_len == 0
    checked.release(text)
    checked.check()
    assert checked.start(range(13)).sequence.committed_len == 0


def test_match_prefix_of_a_sequence_with_rows_raises():
    checked = CheckedCache()
    text = checked.prompt(range(13))
    with pytest.raises(RuntimeError, match="only an empty sequence"):
        checked.cache.match_prefix(text.sequence, range(13))
    checked.truncate(text, 0)
    checked.check()
    text.token_ids = list(range(13))
    assert checked.cache.match_prefix(text.sequence, text.token_ids) == 12
    started = checked.start([70, 71])
    checked.run(started, [-1])
    with pytest.raises(RuntimeError, match="only an empty sequence"):
        checked.cache.match_prefix(started.sequence, range(13))


def test_sharing_a_free_block_raises():
    pool = BlockPool(3, SIZE)
    with pytest.raises(RuntimeError, match="block 1 is free"):
        pool.add_owner([1])


def _know_the_tail(checked: CheckedCache, text: Text) -> None:
    checked.cache.pool.register(BlockHash(b"key", b"tokens"), text.sequence.block_table[-1])


def _know_a_fresh_block(checked: CheckedCache, text: Text) -> None:
    checked.run(text, range(-1, 6), [0] * 6)
    checked.cache.pool.register(BlockHash(b"key", b"tokens"), text.sequence.row_plan.fresh_blocks[0])


def _know_it_for_something_else(checked: CheckedCache, text: Text) -> None:
    checked.cache.pool.unregister(text.sequence.block_table[0])
    checked.cache.pool.register(BlockHash(b"key", b"tokens"), text.sequence.block_table[0])


def _append_a_hash(checked: CheckedCache, text: Text) -> None:
    text.sequence.block_hashes.append(BlockHash(b"key", b"tokens"))


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (_know_the_tail, "a block that is being written"),
        (_know_a_fresh_block, "a block that is being written"),
        (_know_it_for_something_else, "indexed with a hash of other rows"),
        (_append_a_hash, "3 hashes for 2 full blocks"),
        (lambda checked, text: checked.cache.pool.register(BlockHash(b"key", b"tokens"), 20), "idle or indexed without owners"),
    ],
)
def test_prefix_cache_check_detects_inconsistent_state(tamper, complaint):
    checked = CheckedCache()
    text = checked.prompt(range(11))
    checked.check()
    tamper(checked, text)
    with pytest.raises(RuntimeError, match=complaint):
        checked.cache.check_consistency()
