"""What may draw the tokens of a whole walk at once, where rows are not edited; the way row by row is the definition."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Walked: TypeAlias = tuple[Sequence[int], Sequence[int], bool]
"""The path that the target's own tokens take: the tokens, the nodes that hold them, and whether the walk is whole.

In a whole walk one token more than nodes is drawn, the last. Else the walk stands in front of a row that is left to the other way."""


class Walker(Protocol):
    """Draws for one request as `LogitsProcessor.process` and `draw` do, to the same tokens, from rows that nothing edits."""

    @property
    def walks(self) -> "Walks":
        """What draws for several requests at once, of those whose walkers have the same."""

    @property
    def row(self) -> NDArray[np.float32]:
        """[V] memory for a row that was edited, to be drawn from at once: others use it too."""

    def walk(
        self, logits: NDArray[np.float32], token_ids: Sequence[int], parents: Sequence[int], *, seed: int, sample_index: int, position: int
    ) -> Walked:
        """The walk along one tree.

        Args:
            logits: [N, V], a row for each node.
            token_ids, parents: [N] of the tree.
            seed, sample_index, position: of the token behind the root, as `draw` takes them.
        """


class DrawnRows(NamedTuple):
    """The rows that walks read.

    Attributes:
        logits: [R, V].
        peaks: [R, blocks] as the runtime knows them of the logits; None = it does not.
        logits_at, peaks_at: addresses of both, where the runtime knows them; 0 = the arrays are to be asked, which takes longer.
    """

    logits: NDArray[np.float32]
    peaks: NDArray[np.float32] | None = None
    logits_at: int = 0
    peaks_at: int = 0


class AskedWalk(NamedTuple):
    """A walk that is asked for: the walker, and the arguments of its `walk` but for the logits. Node i's row is row `first_row + i`."""

    walker: Walker
    token_ids: Sequence[int]
    parents: Sequence[int]
    seed: int
    sample_index: int
    position: int
    first_row: int = 0


class Walks(Protocol):
    """Draws for several requests at once."""

    def walk_each(self, asked: Sequence[AskedWalk], rows: DrawnRows) -> list[Walked]:
        """What `walk` of each one's walker says, in order."""
