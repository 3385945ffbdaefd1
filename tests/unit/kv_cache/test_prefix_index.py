"""Keys, and the order in which blocks without owners are given up."""

from hashlib import blake2b

import numpy as np
import pytest

from paceline.kv_cache import prefix_index
from paceline.kv_cache.prefix_index import Link, PrefixIndex

SIZE = 4


def _chain(index: PrefixIndex, token_ids: list[int], salt: bytes = b"") -> list[Link]:
    return list(index.links(token_ids, salt, (), len(token_ids) // SIZE))


def test_a_key_stands_for_every_token_up_to_the_end_of_its_block():
    index = PrefixIndex(SIZE)
    chain = _chain(index, list(range(12)))
    assert _chain(index, list(range(12))) == chain
    assert len({link.key for link in chain}) == len(chain) == 3
    for position in range(12):
        changed = _chain(index, [token + 1000 * (place == position) for place, token in enumerate(range(12))])
        same = [old.key == new.key for old, new in zip(chain, changed, strict=True)]
        assert same == [block < position // SIZE for block in range(3)]


def test_a_chain_goes_on_where_it_stopped():
    index = PrefixIndex(SIZE)
    whole = _chain(index, list(range(20)), b"mine")
    assert whole[:2] + list(index.links(list(range(20)), b"ignored here", whole[:2], 5)) == whole


def test_another_salt_and_another_index_have_other_keys():
    index = PrefixIndex(SIZE)
    chains = [_chain(index, list(range(8)), salt) for salt in (b"", b"a", b"b")] + [_chain(PrefixIndex(SIZE), list(range(8)))]
    assert len({link.key for chain in chains for link in chain}) == 8


def test_ids_that_differ_in_any_byte_have_other_keys():
    index = PrefixIndex(SIZE)
    keys = {_chain(index, [token, 0, 0, 0])[0].key for token in (0, 1, 256, 65_536, 16_777_216, 2**32 - 1)}
    assert len(keys) == 6


def test_who_was_first_stays_and_a_block_holds_one_thing():
    index = PrefixIndex(SIZE)
    first, second = _chain(index, list(range(8)))
    index.add(first, 5)
    index.add(first, 6)
    index.add(second, 5)
    assert index.find(first) == 5
    assert index.find(second) is None
    assert index.link_of(6) is None
    assert index.num_blocks == 1


def test_equal_keys_of_other_tokens_are_not_a_hit(monkeypatch):
    monkeypatch.setattr(prefix_index, "blake2b", lambda data, digest_size: blake2b(b"all the same", digest_size=digest_size))
    index = PrefixIndex(SIZE)
    (one,), (other,) = _chain(index, [1, 2, 3, 4]), _chain(index, [1, 2, 3, 5])
    assert one.key == other.key
    index.add(one, 5)
    assert index.find(one) == 5
    assert index.find(other) is None


def test_what_was_forgotten_is_not_found():
    index = PrefixIndex(SIZE)
    (link,) = _chain(index, [1, 2, 3, 4])
    index.add(link, 5)
    index.forget(5)
    index.forget(5)
    assert index.find(link) is None
    index.add(link, 6)
    assert index.find(link) == 6
    index.check([])


def test_only_blocks_that_are_known_retire():
    index = PrefixIndex(SIZE)
    (link,) = _chain(index, [1, 2, 3, 4])
    index.add(link, 5)
    assert index.retire(5)
    assert not index.retire(6)
    assert index.num_idle == 1
    assert index.revive(5)
    assert not index.revive(5)
    assert index.num_idle == 0


def test_the_least_recently_used_block_is_given_up_first(seed):
    """Held to a plain list over random use."""
    generator = np.random.default_rng(seed)
    index = PrefixIndex(SIZE)
    links = [_chain(index, [block] * SIZE)[0] for block in range(30)]
    owned: list[int] = []
    idle: list[int] = []
    for _ in range(3_000):
        action, block = int(generator.integers(6)), int(generator.integers(30))
        if action == 0 and block not in owned and block not in idle:
            index.add(links[block], block)
            owned.append(block)
        elif action == 1 and owned:
            idle.append(owned.pop(int(generator.integers(len(owned)))))
            assert index.retire(idle[-1])
        elif action == 2 and block in idle:
            assert index.revive(block)
            idle.remove(block)
            owned.append(block)
        elif action == 3 and block in idle:
            index.touch(links[block])
            idle.remove(block)
            idle.append(block)
        elif action == 4 and idle:
            assert index.evict() == idle.pop(0)
        elif action == 5 and generator.random() < 0.2:
            index.forget(block)
            idle, owned = [one for one in idle if one != block], [one for one in owned if one != block]
        index.check(idle)
        assert (index.num_blocks, index.num_idle) == (len(idle) + len(owned), len(idle))
    assert index.stats.evicted_blocks > 100


def test_touching_what_is_in_use_or_unknown_changes_nothing():
    index = PrefixIndex(SIZE)
    known, unknown = _chain(index, list(range(8)))
    index.add(known, 5)
    index.touch(known)
    index.touch(unknown)
    index.check([])


@pytest.mark.parametrize("idle", [[], [5, 6]], ids=["an idle block that has owners", "a block without owners that is not idle"])
def test_the_check_notices(idle):
    index = PrefixIndex(SIZE)
    for link, block in zip(_chain(index, list(range(8))), (5, 6), strict=True):
        index.add(link, block)
    index.retire(5)
    with pytest.raises(RuntimeError, match="idle in the prefix index or without owners"):
        index.check(idle)
