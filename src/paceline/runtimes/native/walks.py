"""Walks drawn by the kernels: all rows of a path in one call, and those of all requests of a step."""

from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, sizeof
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError
from paceline.runtimes.native.library import LANES, PEAK_COLUMNS, kernels
from paceline.runtimes.native.records import WalkOptions, WalkRecord

Walked: TypeAlias = tuple[Sequence[int], Sequence[int], bool]
Rows: TypeAlias = NDArray[np.float32]
Asked: TypeAlias = tuple[Any, Sequence[int], Sequence[int], int, int, int, int]
"""Walker, token ids, parents, seed, sample index, position and first row, as `sampling.walker.AskedWalk`."""
Drawn: TypeAlias = tuple[Rows, Rows | None, int, int]
"""Logits, peaks and the addresses of both, as `sampling.walker.DrawnRows`."""

_MOST_INT = 2**31 - 1
_WALK = Struct("=QQqqQQQQii")  # the fields of `records.WalkRecord`
_RESULT = sizeof(WalkRecord) // 4 - 1  # among its 32-bit numbers
_SHARED = 1 << 18  # floats to read from which on other threads are woken
_SAMPLED = 4  # times what a greedy row without peaks takes, a sampled one takes
_LEFT: Walked = ((), (), False)


class CompiledWalks:
    """Makes what draws for single requests. Those of one object share memory: one walk at a time.

    Args:
        vocab_size: V of the rows.
        num_threads: that share the walks of several requests.
    """

    def __init__(self, vocab_size: int, num_threads: int = 1) -> None:
        self.vocab_size, self._num_threads = vocab_size, num_threads
        self._scratch = np.empty((num_threads, 3 * -(-vocab_size // LANES) * LANES), np.float32)
        self.scratch = self._scratch.ctypes.data
        self.run, self._run_each = kernels().paceline_walk, kernels().paceline_walk_each
        self.row: Rows = np.empty(vocab_size, np.float32)
        self._make_records(1)
        self._make_room(1)

    @classmethod
    def if_there(cls, vocab_size: int, num_threads: int = 1) -> "CompiledWalks | None":
        """None where there are no kernels for this machine."""
        try:
            return cls(vocab_size, num_threads)
        except BackendUnavailableError:
            return None

    def walker(self, *, temperature: float, top_k: int, top_p: float, min_p: float) -> "CompiledWalker":
        """What draws for one request."""
        most = min(top_k, _MOST_INT)
        return CompiledWalker(self, WalkOptions(top_p=top_p, min_p=min_p, temperature=temperature, top_k=most, columns=self.vocab_size))

    def fits(self, logits: Rows) -> bool:
        """Whether rows are such as the kernels read."""
        return logits.shape[1] == self.vocab_size and logits.strides[1] == 4 and logits.dtype == np.float32

    def _place_of(self, peaks: Rows | None, address: int) -> tuple[int, int]:
        """Where the peaks of rows lie, and how many bytes apart; none where there are none that the kernels read."""
        if peaks is None or peaks.shape[1] * PEAK_COLUMNS < self.vocab_size or peaks.strides[1] != 4:
            return 0, 0
        return address or _address_of(peaks), peaks.strides[0]

    def walk_each(self, asked: Sequence[Asked], rows: Drawn) -> list[Walked]:
        """As `sampling.walker.Walks` says; none begins where rows are such as the kernels do not read."""
        logits, peaks, data, peaks_at = rows
        if not self.fits(logits):
            return [_LEFT] * len(asked)
        data, row_bytes = data or _address_of(logits), logits.strides[0]
        peaks_at, peaks_bytes = self._place_of(peaks, peaks_at)
        sizes = [len(one[1]) for one in asked]
        if _WALK.size * len(asked) > len(self._records):
            self._make_records(2 * len(asked))
        if 2 * sum(sizes) > len(self._trees):
            self._make_room(4 * sum(sizes))
        begin = work = 0
        for index, (walker, token_ids, parents, seed, sample_index, position, first_row) in enumerate(asked):
            options, size = walker.options, sizes[index]
            options.seed, options.sample_index = seed, sample_index
            if size > 1:
                self._trees[begin : begin + size], self._trees[begin + size : begin + 2 * size] = token_ids, parents
            _WALK.pack_into(
                self._view, index * _WALK.size,
                data + row_bytes * first_row, peaks_at and peaks_at + peaks_bytes * first_row, row_bytes // 4, peaks_bytes // 4,
                walker.options_at, self._trees_at + 4 * begin, position, self._found_at + 4 * begin, size, 0,
            )  # fmt: skip
            begin += 2 * size
            work += _SAMPLED * self.vocab_size if options.temperature > 0.0 else PEAK_COLUMNS if peaks_at else self.vocab_size
        num_threads = self._num_threads if work >= _SHARED else 1
        self._run_each(self._records_at, len(asked), num_threads, self.scratch, self._scratch.shape[1])
        return self._walked(sizes)

    def _walked(self, sizes: Sequence[int]) -> list[Walked]:
        """What was found along trees of so many nodes."""
        results = self._results[: len(sizes)].tolist()
        found, begin = self._found[: 2 * sum(sizes)].tolist(), 0
        walked: list[Walked] = []
        for count, size in zip(results, sizes, strict=True):
            num_tokens = count if count > 0 else -1 - count
            nodes = found[begin + size : begin + size + num_tokens - (count > 0)]
            walked.append((found[begin : begin + num_tokens], nodes, count > 0))
            begin += 2 * size
        return walked

    def _make_records(self, num_walks: int) -> None:
        self._records = np.zeros(num_walks * _WALK.size, np.uint8)
        self._view, self._records_at = self._records.data, self._records.ctypes.data
        self._results = self._records.view(np.int32)[_RESULT :: _RESULT + 1]

    def _make_room(self, num_numbers: int) -> None:
        """Memory for so many numbers of trees, and of what is found along them."""
        self._trees, self._found = np.zeros(num_numbers, np.int32), np.zeros(num_numbers, np.int32)
        self._trees_at, self._found_at = self._trees.ctypes.data, self._found.ctypes.data


class CompiledWalker:
    """Draws for one request."""

    __slots__ = ("_reference", "options", "options_at", "walks")

    def __init__(self, walks: CompiledWalks, options: WalkOptions) -> None:
        self.walks, self.options, self.options_at, self._reference = walks, options, addressof(options), byref(options)

    @property
    def row(self) -> Rows:
        """As `sampling.walker.Walker` says."""
        return self.walks.row

    def walk(
        self, logits: Rows, token_ids: Sequence[int], parents: Sequence[int], *, seed: int, sample_index: int, position: int
    ) -> Walked:
        """As `sampling.walker.Walker` says: tokens, the nodes that hold them, whether the walk is whole."""
        num_nodes, walks, options = len(token_ids), self.walks, self.options
        if not walks.fits(logits):
            return _LEFT
        options.seed, options.sample_index = seed, sample_index
        numbers = c_int32 * (2 * num_nodes)
        tree, found = numbers(*token_ids, *parents), numbers()
        data, stride = _address_of(logits), logits.strides[0] // 4
        count = walks.run(data, stride, self._reference, addressof(tree), num_nodes, position, walks.scratch, addressof(found))
        num_tokens = count if count > 0 else -1 - count
        num_nodes_found = num_tokens - 1 if count > 0 else num_tokens
        return found[:num_tokens], found[num_nodes : num_nodes + num_nodes_found], count > 0


def _address_of(rows: Rows) -> int:
    address: int = rows.__array_interface__["data"][0]
    return address
