"""Sample along the draft trees of all requests in one call of the kernels."""

from collections.abc import Sequence
from ctypes import addressof, sizeof
from struct import Struct
from typing import Any

import numpy as np

from paceline.errors import BackendUnavailableError
from paceline.runtimes.native.library import BLOCK_COLUMNS, LANES, kernels
from paceline.runtimes.native.records import SampleOptions, SamplePath
from paceline.sampling.path_sampler import LogitsArray, LogitsView, PathRequest, SampledPath

_MAX_INT = 2**31 - 1
_PATH = Struct("=QQqqQQQQQQii")  # struct format of `records.SamplePath`
_NUM_TOKENS = sizeof(SamplePath) // 4 - 1  # index of `num_tokens` among the 32-bit fields of the record
_MIN_SHARED = 1 << 18  # number of floats to read from which waking other threads pays
_SAMPLED_COST = 4  # cost of sampling a row relative to its argmax


class CompiledBatchPathSampler:
    """Implements `BatchPathSampler`. Not thread-safe: calls share memory.

    Args:
        vocab_size: V of the rows.
        num_threads: threads that share the requests.
    """

    def __init__(self, vocab_size: int, num_threads: int = 1) -> None:
        self.vocab_size, self._num_threads = vocab_size, num_threads
        self._scratch = np.empty((num_threads, 3 * -(-vocab_size // LANES) * LANES), np.float32)
        self._scratch_at = self._scratch.ctypes.data
        self._run = kernels().paceline_sample_paths
        self._allocate_records(1)
        self._allocate_trees(1)

    @classmethod
    def if_available(cls, vocab_size: int, num_threads: int = 1) -> "CompiledBatchPathSampler | None":
        """Return a sampler, or None if there are no kernels for this machine."""
        try:
            return cls(vocab_size, num_threads)
        except BackendUnavailableError:
            return None

    def path_sampler(self, *, temperature: float, top_k: int, top_p: float, min_p: float) -> "CompiledPathSampler":
        """Compile the sampling parameters of one request."""
        top_k = min(top_k, _MAX_INT)
        options = SampleOptions(top_p=top_p, min_p=min_p, temperature=temperature, top_k=top_k, columns=self.vocab_size)
        return CompiledPathSampler(self, options)

    def sample(self, requests: Sequence[PathRequest], view: LogitsView) -> list[SampledPath | None]:
        """Sample as `BatchPathSampler.sample`; None for all if the kernels cannot read the logits."""
        logits, block_max, logits_address, block_max_address = view
        if logits.shape[1] != self.vocab_size or logits.strides[1] != 4 or logits.dtype != np.float32:
            return [None] * len(requests)
        logits_address, row_bytes = logits_address or _address_of(logits), logits.strides[0]
        block_max_address, block_max_bytes = self._block_max_address(block_max, block_max_address)
        sizes = [len(request.token_ids) for request in requests]
        if _PATH.size * len(requests) > len(self._records):
            self._allocate_records(2 * len(requests))
        if 2 * sum(sizes) > len(self._trees):
            self._allocate_trees(4 * sum(sizes))
        begin = work = 0
        sampler: Any  # made by `path_sampler`
        for index, (sampler, token_ids, parents, seed, sample_index, position, first_row) in enumerate(requests):
            size = sizes[index]
            if size > 1:
                self._trees[begin : begin + size], self._trees[begin + size : begin + 2 * size] = token_ids, parents
            _PATH.pack_into(
                self._view, index * _PATH.size,
                logits_address + row_bytes * first_row, block_max_address and block_max_address + block_max_bytes * first_row,
                row_bytes // 4, block_max_bytes // 4, sampler.options_at, self._trees_at + 4 * begin,
                seed, sample_index, position, self._result_at + 4 * begin, size, 0,
            )  # fmt: skip
            begin += 2 * size
            work += (
                BLOCK_COLUMNS if sampler.is_greedy and block_max_address else self.vocab_size * (1 if sampler.is_greedy else _SAMPLED_COST)
            )
        num_threads = self._num_threads if work >= _MIN_SHARED else 1
        self._run(self._records_at, len(requests), num_threads, self._scratch_at, self._scratch.shape[1])
        return self._paths(sizes)

    def _block_max_address(self, block_max: LogitsArray | None, address: int) -> tuple[int, int]:
        """Return the address of `block_max` and its row stride; 0 if the kernels must compute it."""
        if block_max is None or block_max.shape[1] * BLOCK_COLUMNS < self.vocab_size or block_max.strides[1] != 4:
            return 0, 0
        return address or _address_of(block_max), block_max.strides[0]

    def _paths(self, sizes: Sequence[int]) -> list[SampledPath | None]:
        """Return the sampled paths for trees of these sizes."""
        found, begin = self._result_tokens[: 2 * sum(sizes)].tolist(), 0
        paths: list[SampledPath | None] = []
        for count, size in zip(self._num_tokens[: len(sizes)].tolist(), sizes, strict=True):
            nodes = begin + size
            paths.append(SampledPath(found[begin : begin + count], found[nodes : nodes + count - 1]) if count else None)
            begin += 2 * size
        return paths

    def _allocate_records(self, count: int) -> None:
        self._records = np.zeros(count * _PATH.size, np.uint8)
        self._view, self._records_at = self._records.data, self._records.ctypes.data
        self._num_tokens = self._records.view(np.int32)[_NUM_TOKENS :: _NUM_TOKENS + 1]

    def _allocate_trees(self, count: int) -> None:
        """Allocate memory for `count` tree nodes and as many results."""
        self._trees, self._result_tokens = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._trees_at, self._result_at = self._trees.ctypes.data, self._result_tokens.ctypes.data


class CompiledPathSampler:
    """Implements `PathSampler`."""

    __slots__ = ("_options", "batch", "is_greedy", "options_at")

    def __init__(self, batch: CompiledBatchPathSampler, options: SampleOptions) -> None:
        self.batch, self._options, self.options_at, self.is_greedy = batch, options, addressof(options), options.temperature == 0.0


def _address_of(rows: LogitsArray) -> int:
    address: int = rows.__array_interface__["data"][0]
    return address
