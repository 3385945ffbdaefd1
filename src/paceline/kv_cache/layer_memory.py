"""What one kind of layer keeps of the texts in a cache, behind one interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paceline.kv_cache.prefix_index import Link
from paceline.kv_cache.row_plan import Commit, RowPlan


class LayerMemory(ABC):
    """What the layers of one kind keep: keys and values, a window of them, a recurrent state.

    The cache decides which rows stand in which blocks and calls these methods; the runtime that computes the layers reads and writes
    what is kept. A memory with something for every block (`key_values.py`) copies it. One with something for every sequence finds it by
    `RowPlan.sequence_id`, which the runtime finds in `RowRange`; it must have room for every sequence with rows, because the scheduler
    counts blocks only. Layers that read what another layer keeps have no memory.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes it takes now."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy what is kept for block `source` to block `target`, where another path or sequence will go on."""

    def reserve(self, plan: RowPlan) -> None:
        """The rows of `plan` are about to run, behind the committed ones of its sequence."""

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        """The rows of `plan` have run; keep those of `commit` and drop the others."""

    def cancel(self, plan: RowPlan) -> None:
        """Drop the rows of `plan`, whether they have run or not; an interrupt may even have kept `reserve` from being called."""

    def can_cut(self, sequence_id: int, length: int) -> bool:
        """Whether the last committed rows can be dropped so that `length` remain."""
        return True

    def num_reachable(self, links: Sequence[Link]) -> int:
        """How many of these blocks, which hold the beginning of a text, a sequence can go on behind, at most."""
        return len(links)

    def restart(self, sequence_id: int, length: int, links: Sequence[Link]) -> None:
        """A sequence goes on behind its first `length` rows: it was cut there, or adopted them.

        Args:
            links: its full blocks, as far as they were remembered or adopted.
        """

    def remember(self, sequence_id: int, first: int, links: Sequence[Link]) -> None:
        """A sequence's blocks from index `first` on, full of committed rows, can be adopted as `links` from now on."""

    def forget(self, link: Link) -> None:
        """The block of `link` cannot be adopted any more."""

    def release(self, sequence_id: int) -> None:
        """Drop what is kept for a sequence; it may begin anew."""
