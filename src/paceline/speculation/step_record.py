"""The draft of a step and its outcome, kept if a request wants them (`RequestSpeculation.trees`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

if TYPE_CHECKING:  # a request holds records
    from paceline.speculation.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one request. Node 0 of its tree is the root, the token before those it emitted; nodes 1 … n are the draft.

    Attributes:
        start: index of its first token among the output tokens.
        token_ids: what it emitted: the tokens of the accepted nodes, then the target's own.
        draft_token_ids: [n] draft tokens.
        parents: [n] parent of each draft token, 0 = the root.
        sources: [n] drafter of each of them.
        accepted_nodes: nodes whose tokens were kept, from the root's child down.
        skip_reason: why there is no draft; None where there is one.
        expected_tokens: tokens that it was expected to emit when its draft was chosen; None = unknown.
        expected_speedup: of the step, other requests' rows included, over one without drafts; for a plain step, that of the best
            draft.
    """

    start: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    accepted_nodes: tuple[int, ...] = ()
    skip_reason: SkipReason | None = None
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
            rows.skip_reason,
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
            "skip_reason": None if self.skip_reason is None else self.skip_reason.value,
            "expected_tokens": _rounded(self.expected_tokens),
            "expected_speedup": _rounded(self.expected_speedup),
        }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)
