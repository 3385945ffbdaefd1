"""Walks drawn by the kernels: all rows of a path in one call."""

from collections.abc import Sequence
from ctypes import addressof, byref, c_int32

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError
from paceline.runtimes.native.library import LANES, kernels
from paceline.runtimes.native.records import WalkOptions

_MOST_INT = 2**31 - 1


class CompiledWalks:
    """Makes what draws for single requests. Those of one object share memory: one walk at a time.

    Args:
        vocab_size: V of the rows.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._scratch = np.empty(2 * -(-vocab_size // LANES) * LANES, np.float32)
        self.scratch = self._scratch.ctypes.data
        self.run = kernels().paceline_walk

    @classmethod
    def if_there(cls, vocab_size: int) -> "CompiledWalks | None":
        """None where there are no kernels for this machine."""
        try:
            return cls(vocab_size)
        except BackendUnavailableError:
            return None

    def walker(self, *, temperature: float, top_k: int, top_p: float, min_p: float) -> "CompiledWalker":
        """What draws for one request."""
        most = min(top_k, _MOST_INT)
        return CompiledWalker(self, WalkOptions(top_p=top_p, min_p=min_p, temperature=temperature, top_k=most, columns=self.vocab_size))


class CompiledWalker:
    """Draws for one request."""

    __slots__ = ("_options", "_reference", "_walks")

    def __init__(self, walks: CompiledWalks, options: WalkOptions) -> None:
        self._walks, self._options, self._reference = walks, options, byref(options)

    def walk(
        self, logits: NDArray[np.float32], token_ids: Sequence[int], parents: Sequence[int], *, seed: int, sample_index: int, position: int
    ) -> tuple[Sequence[int], Sequence[int], bool]:
        """As `sampling.walker.Walker` says: tokens, the nodes that hold them, whether the walk is whole."""
        num_nodes, walks, options = len(token_ids), self._walks, self._options
        row_bytes, item_bytes = logits.strides
        if logits.shape[1] != walks.vocab_size or item_bytes != 4 or logits.dtype != np.float32:
            return (), (), False
        options.seed, options.sample_index = seed, sample_index
        numbers = c_int32 * (2 * num_nodes)
        tree, found = numbers(*token_ids, *parents), numbers()
        data = logits.__array_interface__["data"][0]
        count = walks.run(data, row_bytes // 4, self._reference, addressof(tree), num_nodes, position, walks.scratch, addressof(found))
        num_tokens = count if count > 0 else -1 - count
        num_nodes_found = num_tokens - 1 if count > 0 else num_tokens
        return found[:num_tokens], found[num_nodes : num_nodes + num_nodes_found], count > 0
