"""A growing text: counts of its distinct tokens, as arrays that penalties can index with, and views of it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """A multiset of token ids with O(1) `add`, and `drop_last` to take back what was added last.

    Args:
        token_ids: distinct ids to start from, each counted once.
    """

    def __init__(self, token_ids: NDArray[np.int64] | None = None) -> None:
        start = np.empty(0, np.int64) if token_ids is None else token_ids
        self._size = len(start)
        capacity = max(64, 2 * self._size)
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: self._size] = start
        self._counts = np.zeros(capacity, np.float32)
        self._counts[: self._size] = 1.0
        self._slot_of = {int(token_id): slot for slot, token_id in enumerate(start)}

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Distinct ids, in order of first occurrence; a view that the next change invalidates."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `token_ids` occurs; a view that the next change invalidates."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._slot_of[token_id] = slot
            self._ids[slot] = token_id
            self._counts[slot] = 0.0
            self._size += 1
        self._counts[slot] += 1.0

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.add(token_id)

    def drop_last(self, token_ids: Sequence[int]) -> None:
        """Undo the `extend` of these ids, which must be the last that were added."""
        for token_id in reversed(token_ids):
            slot = self._slot_of[token_id]
            self._counts[slot] -= 1.0
            if self._counts[slot] == 0.0:
                # Last in, first out: a token whose count returns to 0 holds the newest slot.
                del self._slot_of[token_id]
                self._size -= 1


class TokenView(Sequence[int]):
    """Prompt + output + path as one read-only sequence, made without copying the text; slices are lists.

    Args:
        token_ids: a list that is only appended to; what is added later is not seen.
        path: tokens after them.
    """

    __slots__ = ("_path", "_size", "_token_ids")

    def __init__(self, token_ids: list[int], path: Sequence[int]) -> None:
        self._token_ids, self._size, self._path = token_ids, len(token_ids), tuple(path)

    def __len__(self) -> int:
        return self._size + len(self._path)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._at(one) for one in range(len(self))[index]]
        return self._at(range(len(self))[index])

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._token_ids, self._size), self._path)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.int64]:  # noqa: FBT001  # as numpy calls it
        return np.fromiter(self, np.int64, len(self)).astype(dtype or np.int64, copy=False)

    def __repr__(self) -> str:
        return f"TokenView({list(self)})"

    def _at(self, index: int) -> int:
        return self._token_ids[index] if index < self._size else self._path[index - self._size]
