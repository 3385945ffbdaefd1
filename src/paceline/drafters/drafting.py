"""How a draft model is asked for a draft: token by token, by a generator that says which row it needs next."""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from paceline.runtimes.base import FloatArray
from paceline.runtimes.ranking import RankedRow
from paceline.speculation.request import Request

ResultT = TypeVar("ResultT")
Path: TypeAlias = Sequence[int]
"""Tokens from the root's child on."""


class DraftRow(NamedTuple):
    """The draft model's row behind a path: its logits [V], and what the pass found in them, where that is enough."""

    logits: FloatArray
    ranked: RankedRow | None = None


Drafting: TypeAlias = Generator[Path, DraftRow | None, ResultT]
"""Yields the path whose draft-model row it needs next: () for the root, then each time the previous path plus one token. Is sent that
row, or None if there is none, and returns what was drafted."""


class IdTranslation(Protocol):
    """Carries tokens between a target and a draft model that has other ids for the same pieces."""

    def context(self, request: Request) -> Sequence[int]:
        """The draft model's ids of everything the request holds; later calls only append."""
        ...

    def target_row(self, row: FloatArray) -> FloatArray:
        """A draft row [V of the draft model] over the target's ids [V], -inf for those that cannot be drafted."""
        ...

    def draft_id(self, token_id: int) -> int:
        """The draft model's id of a target token that can be drafted."""
        ...


def chain(depth: int, pick: Callable[[DraftRow, Path], int | None]) -> Drafting[list[int]]:
    """One token per row, until `pick` returns None."""
    path: list[int] = []
    while len(path) < depth:
        row = yield path
        token = None if row is None else pick(row, path)
        if token is None:
            break
        path.append(token)
    return path
