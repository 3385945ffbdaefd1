"""Sample target tokens along the draft trees of all requests in one call of the kernels (kernels/sample_path.c)."""

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
_PATH_FORMAT = Struct("=QQqqQQQQQQii")  # struct format of `records.SamplePath`
_NUM_TOKENS_INDEX = sizeof(SamplePath) // 4 - 1  # index of `num_tokens` if the record is read as int32 numbers
_MIN_THREADED_FLOATS = 1 << 18  # if fewer floats are read, one thread is faster than several
_SAMPLING_COST = 4  # time of sampling from a row, relative to its argmax


class CompiledBatchPathSampler:
    """The `BatchPathSampler` of the kernels. Not thread-safe.

    Args:
        vocab_size: number of logits of a row.
        num_threads: threads among which requests are divided.
    """

    def __init__(self, vocab_size: int, num_threads: int = 1) -> None:
        self.vocab_size, self._num_threads = vocab_size, num_threads
        self._scratch = np.empty((num_threads, 3 * -(-vocab_size // LANES) * LANES), np.float32)
        self._scratch_address = self._scratch.ctypes.data
        self._sample_paths = kernels().paceline_sample_paths
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
        """Return a sampler with the sampling parameters of one request."""
        top_k = min(top_k, _MAX_INT)
        options = SampleOptions(top_p=top_p, min_p=min_p, temperature=temperature, top_k=top_k, columns=self.vocab_size)
        return CompiledPathSampler(self, options)

    def sample(self, requests: Sequence[PathRequest], logits_view: LogitsView) -> list[SampledPath | None]:
        """See `BatchPathSampler.sample`. Returns None for every request if the kernels cannot read the layout of the logits."""
        logits, block_max = logits_view
        if logits.shape[1] != self.vocab_size or logits.strides[1] != 4 or logits.dtype != np.float32:
            return [None] * len(requests)
        logits_address, row_bytes = _address_of(logits), logits.strides[0]
        block_max_address = block_max_bytes = 0  # 0: the kernels compute the maxima of blocks
        if block_max is not None and block_max.shape[1] * BLOCK_COLUMNS >= self.vocab_size and block_max.strides[1] == 4:
            block_max_address, block_max_bytes = _address_of(block_max), block_max.strides[0]
        num_nodes = [len(request.token_ids) for request in requests]
        if _PATH_FORMAT.size * len(requests) > len(self._records):
            self._allocate_records(2 * len(requests))
        if 2 * sum(num_nodes) > len(self._trees):
            self._allocate_trees(4 * sum(num_nodes))
        begin = num_floats = 0
        sampler: Any  # a `CompiledPathSampler`
        for index, (sampler, token_ids, parents, seed, sample_index, position, first_row) in enumerate(requests):
            size = num_nodes[index]
            if size > 1:
                self._trees[begin : begin + size], self._trees[begin + size : begin + 2 * size] = token_ids, parents
            _PATH_FORMAT.pack_into(
                self._records_buffer, index * _PATH_FORMAT.size,
                logits_address + row_bytes * first_row, block_max_address and block_max_address + block_max_bytes * first_row,
                row_bytes // 4, block_max_bytes // 4, sampler.options_address, self._trees_address + 4 * begin,
                seed, sample_index, position, self._result_address + 4 * begin, size, 0,
            )  # fmt: skip
            begin += 2 * size
            num_floats += (
                BLOCK_COLUMNS if sampler.is_greedy and block_max_address else self.vocab_size * (1 if sampler.is_greedy else _SAMPLING_COST)
            )
        num_threads = self._num_threads if num_floats >= _MIN_THREADED_FLOATS else 1
        self._sample_paths(self._records_address, len(requests), num_threads, self._scratch_address, self._scratch.shape[1])
        return self._read_paths(num_nodes)

    def _read_paths(self, num_nodes: Sequence[int]) -> list[SampledPath | None]:
        """Return the results of the kernels' last call as paths. num_nodes: nodes of each tree."""
        results, begin = self._result_tokens[: 2 * sum(num_nodes)].tolist(), 0
        paths: list[SampledPath | None] = []
        for count, size in zip(self._num_tokens[: len(num_nodes)].tolist(), num_nodes, strict=True):
            nodes_begin = begin + size
            paths.append(SampledPath(results[begin : begin + count], results[nodes_begin : nodes_begin + count - 1]) if count else None)
            begin += 2 * size
        return paths

    def _allocate_records(self, count: int) -> None:
        self._records = np.zeros(count * _PATH_FORMAT.size, np.uint8)
        self._records_buffer, self._records_address = self._records.data, self._records.ctypes.data
        self._num_tokens = self._records.view(np.int32)[_NUM_TOKENS_INDEX :: _NUM_TOKENS_INDEX + 1]

    def _allocate_trees(self, count: int) -> None:
        """Allocate arrays of `count` int32 numbers, one for the trees of a call and one for its results."""
        self._trees, self._result_tokens = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._trees_address, self._result_address = self._trees.ctypes.data, self._result_tokens.ctypes.data


class CompiledPathSampler:
    """The `PathSampler` of the kernels: holds the sampling parameters of a request as a C struct."""

    __slots__ = ("_options", "batch_sampler", "is_greedy", "options_address")

    def __init__(self, batch_sampler: CompiledBatchPathSampler, options: SampleOptions) -> None:
        self.batch_sampler, self._options, self.options_address = batch_sampler, options, addressof(options)
        self.is_greedy = options.temperature == 0.0


def _address_of(rows: LogitsArray) -> int:
    address: int = rows.__array_interface__["data"][0]
    return address
