"""Reference counts, block hashes, and the order of eviction."""

from hashlib import blake2b

import numpy as np
import pytest

from paceline.errors import CapacityError
from paceline.kv_cache import block_pool
from paceline.kv_cache.block_pool import BlockHash, BlockPool

SIZE = 4


def _hashes(pool: BlockPool, token_ids: list[int], salt: bytes = b"") -> list[BlockHash]:
    return list(pool.block_hashes(token_ids, salt, (), len(token_ids) // SIZE))


def test_block_pool_allocates_every_block_once():
    pool = BlockPool(4, SIZE)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.num_free == 0


def test_block_pool_without_blocks_is_refused():
    with pytest.raises(CapacityError, match="at least 1 block"):
        BlockPool(0, SIZE)


def test_allocating_more_blocks_than_free_allocates_none():
    pool = BlockPool(4, SIZE)
    held = pool.allocate(2)
    with pytest.raises(CapacityError, match="3 blocks needed, 2 of 4 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_consistency([held])


def test_shared_block_is_free_after_its_last_owner_released_it():
    pool = BlockPool(2, SIZE)
    held = pool.allocate(1)
    pool.add_owner(held)
    pool.release(held)
    assert pool.num_owners(held[0]) == 1
    assert pool.num_free == 1
    pool.release(held)
    assert pool.num_free == 2
    pool.check_consistency([])


def test_releasing_a_block_more_often_than_allocated_raises():
    pool = BlockPool(2, SIZE)
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(held)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        pytest.param([[0]], "block 1 has 1 owners but is in 0", id="a leaked block"),
        pytest.param([[0, 1], [1]], "block 1 has 1 owners but is in 2", id="a block of two tables with one owner"),
        pytest.param([[0, 1, 2]], "block 2 has 0 owners", id="a free block in a table"),
    ],
)
def test_block_pool_check_detects_wrong_owner_counts(tables, complaint):
    pool = BlockPool(3, SIZE)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match=complaint):
        pool.check_consistency(tables)


@pytest.mark.parametrize("spoil", ["_idle", "_free"])
def test_block_pool_check_detects_wrong_idle_and_free_lists(spoil):
    pool = BlockPool(8, SIZE)
    held = pool.allocate(2)
    for block_hash, block in zip(_hashes(pool, list(range(8))), held, strict=True):
        pool.register(block_hash, block)
    pool.release(held)
    pool.check_consistency([])
    getattr(pool, spoil).pop(next(iter(pool._idle))) if spoil == "_idle" else pool._free.pop()
    with pytest.raises(RuntimeError, match="idle or indexed without owners" if spoil == "_idle" else "free list"):
        pool.check_consistency([])


def test_block_pool_owner_counts_match_the_tables_under_random_use(seed):
    generator = np.random.default_rng(seed)
    pool = BlockPool(12, SIZE)
    tables: list[list[int]] = []
    for _ in range(2_000):
        action = int(generator.integers(3))
        if action == 0 and pool.num_free:
            tables.append(pool.allocate(int(generator.integers(1, pool.num_free + 1))))
        elif action == 1 and 0 < len(tables) < 8:
            tables.append(list(tables[int(generator.integers(len(tables)))]))
            pool.add_owner(tables[-1])
        elif tables:
            pool.release(tables.pop(int(generator.integers(len(tables)))))
        pool.check_consistency(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 12


def test_block_hash_depends_on_all_tokens_up_to_the_end_of_its_block():
    pool = BlockPool(8, SIZE)
    hashes = _hashes(pool, list(range(12)))
    assert _hashes(pool, list(range(12))) == hashes
    assert len({one.digest for one in hashes}) == len(hashes) == 3
    for position in range(12):
        changed = _hashes(pool, [token + 1000 * (place == position) for place, token in enumerate(range(12))])
        same = [old.digest == new.digest for old, new in zip(hashes, changed, strict=True)]
        assert same == [block < position // SIZE for block in range(3)]


def test_block_hashes_can_be_extended_from_known_ones():
    pool = BlockPool(8, SIZE)
    hashes = _hashes(pool, list(range(20)), b"mine")
    assert hashes[:2] + list(pool.block_hashes(list(range(20)), b"ignored here", hashes[:2], 5)) == hashes


def test_block_hashes_differ_by_salt_and_by_pool():
    pool = BlockPool(8, SIZE)
    lists = [_hashes(pool, list(range(8)), salt) for salt in (b"", b"a", b"b")] + [_hashes(BlockPool(8, SIZE), list(range(8)))]
    assert len({one.digest for hashes in lists for one in hashes}) == 8


def test_block_hashes_differ_by_any_byte_of_a_token_id():
    pool = BlockPool(8, SIZE)
    keys = {_hashes(pool, [token, 0, 0, 0])[0].digest for token in (0, 1, 256, 65_536, 16_777_216, 2**32 - 1)}
    assert len(keys) == 6


def test_registering_a_block_again_changes_nothing():
    pool = BlockPool(8, SIZE)
    first, second = _hashes(pool, list(range(8)))
    pool.allocate(8)
    pool.register(first, 5)
    pool.register(first, 6)
    pool.register(second, 5)
    assert pool.find_block(first) == 5
    assert pool.find_block(second) is None
    assert pool.hash_of(6) is None
    assert len(pool._hash_of) == 1


def test_block_lookup_with_a_hash_collision_compares_the_tokens(monkeypatch):
    monkeypatch.setattr(block_pool, "blake2b", lambda data, digest_size: blake2b(b"all the same", digest_size=digest_size))
    pool = BlockPool(8, SIZE)
    (one,), (other,) = _hashes(pool, [1, 2, 3, 4]), _hashes(pool, [1, 2, 3, 5])
    assert one.digest == other.digest
    pool.register(one, 5)
    assert pool.find_block(one) == 5
    assert pool.find_block(other) is None


def test_evicted_block_is_not_found_and_can_be_registered_again():
    pool = BlockPool(8, SIZE)
    (block_hash,) = _hashes(pool, [1, 2, 3, 4])
    pool.allocate(8)
    pool.register(block_hash, 5)
    pool.unregister(5)
    pool.unregister(5)
    assert pool.find_block(block_hash) is None
    pool.register(block_hash, 6)
    assert pool.find_block(block_hash) == 6
    pool.check_consistency([range(8)])


def test_block_eviction_takes_the_least_recently_used_first(seed):
    """Compared with a plain list over random use."""
    generator = np.random.default_rng(seed)
    evicted: list[BlockHash] = []
    pool = BlockPool(30, SIZE, evicted.append)
    hashes = [_hashes(pool, [block] * SIZE)[0] for block in range(30)]
    owned, idle = pool.allocate(30), list[int]()
    num_evictions = 0
    for _ in range(3_000):
        action, block = int(generator.integers(6)), int(generator.integers(30))
        is_indexed = pool.hash_of(block) is not None
        if action == 0 and block in owned:
            pool.register(hashes[block], block)
        elif action in (1, 2) and block in owned:
            owned.remove(block)
            pool.release([block])
            if is_indexed:
                idle.append(block)
        elif action == 3 and block in idle:
            if generator.random() < 0.5:
                pool.touch(hashes[block])
                idle.append(block)
            else:
                pool.add_owner([block])
                owned.append(block)
            idle.remove(block)
        elif action == 4 and pool.num_free:
            has_free = len(owned) + len(idle) < 30
            (allocated,) = pool.allocate(1)
            owned.append(allocated)
            if not has_free:
                num_evictions += 1
                assert (allocated, evicted[-1]) == (idle[0], hashes[idle.pop(0)])
        elif action == 5 and generator.random() < 0.2:
            pool.unregister(block)
            idle = [one for one in idle if one != block]
        pool.check_consistency([owned])
        assert list(pool._idle) == idle
        assert pool.num_free == 30 - len(owned)
    assert pool.prefix_stats.num_evicted_blocks == num_evictions > 50


def test_touching_an_owned_or_unknown_block_changes_nothing():
    pool = BlockPool(8, SIZE)
    known, unknown = _hashes(pool, list(range(8)))
    held = pool.allocate(8)
    pool.register(known, 5)
    pool.touch(known)
    pool.touch(unknown)
    pool.check_consistency([held])
