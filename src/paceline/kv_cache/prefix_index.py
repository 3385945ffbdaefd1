"""Finding the blocks that already hold the beginning of a prompt. Pure bookkeeping: no tensor is touched here.

A full block is known by its place in a chain of links, one a block, which starts at the salt of whoever computed it:

    key of block 0 = hash(hash(secret, salt), tokens of block 0)      key of block i = hash(key of block i - 1, tokens of block i)

so a key stands for every token up to the block's end. Two different beginnings with one key of 128 bits would be needed to hand out
a wrong block: among a million blocks the chance is 10^-27. Nobody can look for such a pair: the secret is drawn anew for
every cache. And the block's own tokens are compared besides.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

KEY_BYTES = 16


@dataclass(slots=True)
class PrefixStats:
    """What the prefix cache saved since it was made.

    Attributes:
        queried_tokens: tokens of the prompts that were looked up.
        hit_tokens: of them, those whose rows were there.
        evicted_blocks: blocks forgotten because others needed the room.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0

    @property
    def missed_tokens(self) -> int:
        """Tokens that had to run; the last token of a prompt always does."""
        return self.queried_tokens - self.hit_tokens


class Link(NamedTuple):
    """One full block of a chain: its key, and its own token ids as bytes."""

    key: bytes
    token_bytes: bytes


class PrefixIndex:
    """Which block holds which link, and in which order those without owners are given up: least recently used first.

    A block is either unknown here, known and owned by sequences, or known and idle (no owner, its rows still readable).
    What is known must not be written to: forget it first.

    Args:
        on_forget: told of every link that no block is known by any more.
    """

    def __init__(self, block_size: int, on_forget: Callable[[Link], None] = lambda _: None) -> None:
        self.stats = PrefixStats()
        self._on_forget = on_forget
        self._block_size = block_size
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._block_of: dict[bytes, int] = {}
        self._link_of: dict[int, Link] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of their last use

    @property
    def num_blocks(self) -> int:
        """Blocks known."""
        return len(self._link_of)

    @property
    def num_idle(self) -> int:
        """Of them, those without owners: they can be evicted."""
        return len(self._idle)

    def links(self, token_ids: Sequence[int], salt: bytes, chain: Sequence[Link], num_blocks: int) -> Iterator[Link]:
        """The links behind `chain` up to `num_blocks` of `token_ids`, hashed one by one; `salt` counts only for the first block."""
        size = self._block_size
        key = chain[-1].key if chain else blake2b(self._secret + salt, digest_size=KEY_BYTES).digest()
        for start in range(len(chain) * size, num_blocks * size, size):
            token_bytes = array("I", token_ids[start : start + size]).tobytes()
            key = blake2b(key + token_bytes, digest_size=KEY_BYTES).digest()
            yield Link(key, token_bytes)

    def find(self, link: Link) -> int | None:
        """The block that holds `link`."""
        block = self._block_of.get(link.key)
        return block if block is not None and self._link_of[block].token_bytes == link.token_bytes else None

    def link_of(self, block: int) -> Link | None:
        """What `block` is known to hold."""
        return self._link_of.get(block)

    def add(self, link: Link, block: int) -> None:
        """Note that the owned `block` holds `link`, unless another block does or something else is known of `block`."""
        if link.key not in self._block_of and block not in self._link_of:
            self._block_of[link.key] = block
            self._link_of[block] = link

    def forget(self, block: int) -> None:
        """Know `block` no longer, if it was known. An idle one does not count as free any more: only `evict` may forget those."""
        link = self._link_of.pop(block, None)
        if link is not None:
            del self._block_of[link.key]
            self._idle.pop(block, None)
            self._on_forget(link)

    def retire(self, block: int) -> bool:
        """`block` lost its last owner. True if it is known: it is idle from now on, and evicted after all others that are."""
        if block not in self._link_of:
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> bool:
        """`block` gets an owner. True if it was idle."""
        if block not in self._idle:
            return False
        del self._idle[block]
        return True

    def touch(self, link: Link) -> None:
        """Evict the block of `link`, if it is idle, after all others that are."""
        block = self._block_of.get(link.key)
        if block is not None and block in self._idle:
            self._idle.move_to_end(block)

    def evict(self) -> int:
        """Forget the idle block whose last use is longest ago and return it."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        self.stats.evicted_blocks += 1
        return block

    def check(self, idle: Iterable[int]) -> None:
        """Raise RuntimeError unless keys and blocks belong together one to one and exactly `idle` are the known blocks without owners."""
        if {link.key: block for block, link in self._link_of.items()} != self._block_of:
            raise RuntimeError("the keys and the blocks of the prefix index do not belong together")
        if set(self._idle) != set(idle):
            raise RuntimeError(f"blocks {sorted(set(self._idle) ^ set(idle))} are idle in the prefix index or without owners, not both")
