"""What a step guessed and what became of it, kept for those who ask to see it (`RequestSpeculation.trees`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree

if TYPE_CHECKING:  # a request holds records
    from paceline.speculation.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one request. Node 0 of its tree is the root, the token in front of those it emitted; nodes 1 … n were guessed.

    Attributes:
        start: index of its first token among the output tokens.
        token_ids: what it emitted: the tokens of the accepted nodes, then the target's own.
        draft_token_ids: [n] guessed tokens.
        parents: [n] parent of each guessed node, 0 = the root.
        sources: [n] name of the drafter that guessed it.
        accepted_nodes: nodes whose tokens were kept, from the root's child down.
        plain_reason: why nothing was guessed; None where something was.
        expected_tokens: that it was expected to emit when its guesses were chosen; None = nobody said.
        expected_speedup: of the step, other requests' rows included, over one without guesses; of a plain step, that of the best one
            with guesses.
    """

    start: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    accepted_nodes: tuple[int, ...] = ()
    plain_reason: PlainReason | None = None
    expected_tokens: float | None = None
    expected_speedup: float | None = None

    @classmethod
    def of(cls, rows: "RequestRows", tree: DraftTree, accepted_nodes: Sequence[int], start: int, token_ids: Sequence[int]) -> "StepRecord":
        """The record of a walk through `tree`, that of `rows`, which emitted `token_ids`; its distributions are not kept."""
        return cls(
            start,
            tuple(token_ids),
            tuple(tree.token_ids[1:]),
            tuple(tree.parents[1:]),
            tuple(tree.sources[1:]),
            tuple(accepted_nodes),
            rows.plain_reason,
            rows.expected_tokens,
            rows.expected_speedup,
        )

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "start": self.start,
            "token_ids": list(self.token_ids),
            "draft_token_ids": list(self.draft_token_ids),
            "parents": list(self.parents),
            "sources": list(self.sources),
            "accepted_nodes": list(self.accepted_nodes),
            "plain": None if self.plain_reason is None else self.plain_reason.value,
            "expected_tokens": _rounded(self.expected_tokens),
            "expected_speedup": _rounded(self.expected_speedup),
        }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)
