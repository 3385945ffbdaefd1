"""What a step guessed and what became of it, kept for those who ask to see it (`RequestSpeculation.trees`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree


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
    """

    start: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    accepted_nodes: tuple[int, ...] = ()
    plain_reason: PlainReason | None = None

    @classmethod
    def of(
        cls, tree: DraftTree, accepted_nodes: Sequence[int], start: int, token_ids: Sequence[int], plain_reason: PlainReason | None
    ) -> "StepRecord":
        """The record of a walk through `tree` that emitted `token_ids`; the tree's distributions are not kept."""
        return cls(
            start,
            tuple(token_ids),
            tuple(tree.token_ids[1:]),
            tuple(tree.parents[1:]),
            tuple(tree.sources[1:]),
            tuple(accepted_nodes),
            plain_reason,
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
        }
