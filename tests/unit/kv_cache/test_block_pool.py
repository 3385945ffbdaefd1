import numpy as np
import pytest

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockPool
from paceline.kv_cache.prefix_index import PrefixIndex


def test_every_block_can_be_taken():
    pool = BlockPool(4, PrefixIndex(4))
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.num_free == 0


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(CapacityError, match="at least 1 block"):
        BlockPool(0, PrefixIndex(4))


def test_taking_too_many_blocks_takes_none():
    pool = BlockPool(4, PrefixIndex(4))
    held = pool.allocate(2)
    with pytest.raises(CapacityError, match="3 blocks wanted, 2 of 4 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check([held])


def test_a_shared_block_is_free_only_after_its_last_owner_let_go():
    pool = BlockPool(2, PrefixIndex(4))
    held = pool.allocate(1)
    pool.share(held)
    pool.release(held)
    assert pool.num_owners(held[0]) == 1
    assert pool.num_free == 1
    pool.release(held)
    assert pool.num_free == 2
    pool.check([])


def test_a_block_cannot_be_released_more_often_than_it_was_taken():
    pool = BlockPool(2, PrefixIndex(4))
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(held)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        pytest.param([[0]], "block 1 has 1 owners but stands in 0", id="a leaked block"),
        pytest.param([[0, 1], [1]], "block 1 has 1 owners but stands in 2", id="a block of two tables with one owner"),
        pytest.param([[0, 1, 2]], "block 2 has 0 owners", id="a free block in a table"),
    ],
)
def test_the_check_notices(tables, complaint):
    pool = BlockPool(3, PrefixIndex(4))
    pool.allocate(2)
    with pytest.raises(RuntimeError, match=complaint):
        pool.check(tables)


def test_counts_are_those_of_the_tables_over_random_use(seed):
    generator = np.random.default_rng(seed)
    pool = BlockPool(12, PrefixIndex(4))
    tables: list[list[int]] = []
    for _ in range(2_000):
        action = int(generator.integers(3))
        if action == 0 and pool.num_free:
            tables.append(pool.allocate(int(generator.integers(1, pool.num_free + 1))))
        elif action == 1 and 0 < len(tables) < 8:
            tables.append(list(tables[int(generator.integers(len(tables)))]))
            pool.share(tables[-1])
        elif tables:
            pool.release(tables.pop(int(generator.integers(len(tables)))))
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 12
