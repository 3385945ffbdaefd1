"""The results of a pass where it left them."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from paceline.runtimes.base import FloatArray
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.records import Rows

Place: TypeAlias = tuple[int, Rows, int]
"""Buffer, rows and width."""


class Results(Mapping[str, FloatArray]):
    """Views of results, made when they are asked for.

    Args:
        places: of all results of the network.
        num_rows, num_wanted: of the pass.
    """

    __slots__ = ("_execution", "_num_rows", "_places")

    def __init__(self, execution: Execution, places: Mapping[str, Place], num_rows: int, num_wanted: int) -> None:
        self._execution, self._places, self._num_rows = execution, places, (num_rows, num_wanted)

    def address_of(self, name: str) -> int:
        """Where a result's first row lies; 0 = there is no such result."""
        place = self._places.get(name)
        return 0 if place is None else self._execution.address(place[0])

    def __getitem__(self, name: str) -> FloatArray:
        buffer, rows, width = self._places[name]
        return self._execution.rows(buffer, self._num_rows[rows], width)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
