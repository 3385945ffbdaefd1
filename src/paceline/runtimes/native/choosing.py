"""Memory of kernels/choosing.c, which chooses a draft tree among guesses."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.native.library import Choice

_QUEUE = np.dtype([("worth", np.float64), ("reached", np.float64), ("parent", np.int32), ("guess", np.int32)])


def layout_number(layout: TreeLayout) -> int:
    """How the kernels call a layout."""
    return 0 if layout is TreeLayout.MASK else 1 if layout is TreeLayout.PATHS else 2


class ChoiceMemory:
    """What a choice works in, and what it finds.

    Args:
        choice: the record to fill.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice, self.num_rows = choice, 0
        self._arrays: dict[str, NDArray[Any]] = {}

    def make_room(self, num_rows: int, num_guesses: int) -> None:
        """For trees of so many rows, and as many guesses behind all nodes of one."""
        self.num_rows = num_rows
        found = np.zeros(1 + 3 * num_rows, np.int32)
        self._found = found.data
        self._arrays = {"found": found, "nodes": np.zeros(5 * num_rows, np.int32), "queue": np.zeros(num_guesses, _QUEUE)}
        for field, array in self._arrays.items():
            setattr(self._choice, field, array.ctypes.data)

    def found(self) -> list[int]:
        """The tree, see `Grower` of runtimes/head.py."""
        return self._found.tolist()
