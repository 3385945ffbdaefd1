"""What may draw the tokens of a whole walk at once, where rows are not edited; the way row by row is the definition."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Walker(Protocol):
    """Draws for one request as `LogitsProcessor.process` and `draw` do, to the same tokens, from rows that nothing edits."""

    def walk(
        self, logits: NDArray[np.float32], token_ids: Sequence[int], parents: Sequence[int], *, seed: int, sample_index: int, position: int
    ) -> tuple[Sequence[int], Sequence[int], bool]:
        """The path that the target's own tokens take: the tokens, the nodes that hold them, and whether the walk is whole.

        In a whole walk one token more than nodes is drawn, the last. Else the walk stands in front of a row that is left to the other way.

        Args:
            logits: [N, V], a row for each node.
            token_ids, parents: [N] of the tree.
            seed, sample_index, position: of the token behind the root, as `draw` takes them.
        """
