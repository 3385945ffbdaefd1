"""One request's rows of a forward pass: its tokens without cached rows, and the draft tokens after them.

nodes of the pass   0 … num_new_tokens - 1    tokens of the request; the last one is the root of the draft tree
                    num_new_tokens …          draft tokens, in the order of the tree
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.kv_cache.row_plan import RowPlan
from paceline.runtimes.base import FloatArray, PlanOutput
from paceline.sampling.path_sampler import SampledPath
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

NO_LOGITS: FloatArray = np.empty((0, 0), np.float32)


@dataclass(slots=True)
class RequestRows:
    """The rows of one request in one pass.

    Attributes:
        num_new_tokens: tokens of the request that run; 1 while decoding, more for a chunk of the prompt.
        tree: draft under the last token; None for a chunk that ends before the last token, which emits nothing.
        skip_reason: why there is no draft.
        limit: most that may be drafted in this step; None = nothing.
        budget: what the drafter being called may draft; None = nothing.
        expected_tokens: number of tokens the request was expected to emit when its draft was chosen; None = unknown.
        expected_speedup: expected speedup of the whole step over one without drafts; for a plain step, that of the best draft.
        start: position of the first row.
        plan: reserved cache slots.
        output: hidden states of all rows.
        logits: [N, V] of the tree's nodes.
        prompt_logits: [num_new_tokens, V] if log-probabilities of prompt tokens are needed.
        first_row: row of the root among the logits of the whole pass.
        path: accepted path and bonus token as the compiled sampler drew them; None = it did not.
        kept_nodes: nodes of the pass whose cache rows are kept: the new tokens and the accepted drafts.
        is_observed: whether drafters see the rows.
    """

    request: Request
    num_new_tokens: int
    tree: DraftTree | None
    skip_reason: SkipReason | None = None
    limit: DraftBudget | None = None
    budget: DraftBudget | None = None
    expected_tokens: float | None = None
    expected_speedup: float | None = None
    start: int = 0
    plan: RowPlan | None = None
    output: PlanOutput | None = None
    logits: FloatArray = field(default_factory=lambda: NO_LOGITS)
    prompt_logits: FloatArray = field(default_factory=lambda: NO_LOGITS)
    first_row: int = 0
    path: SampledPath | None = None
    kept_nodes: Sequence[int] = ()
    is_observed: bool = False

    @classmethod
    def without_draft(cls, request: Request, num_new_tokens: int) -> "RequestRows":
        """Return the rows of the next tokens of a request, without a draft."""
        tree = DraftTree.root_only(request.token_ids[-1]) if num_new_tokens == request.num_uncached else None
        return cls(request, num_new_tokens, tree, start=request.sequence.committed_len, kept_nodes=range(num_new_tokens))

    @property
    def root(self) -> int:
        """The root's number among the nodes of the pass."""
        return self.num_new_tokens - 1

    @property
    def num_draft_tokens(self) -> int:
        return 0 if self.tree is None else self.tree.num_draft_tokens

    @property
    def parents(self) -> Sequence[int]:
        """Parent of each node of the pass."""
        return range(-1, self.root) if self.num_draft_tokens == 0 or self.tree is None else self.parents_with(self.tree.parents)

    def parents_with(self, tree_parents: Sequence[int]) -> Sequence[int]:
        """Return the parent of each node of the pass if the draft tree had these parents."""
        if self.num_new_tokens == 1:
            return tree_parents
        return [*range(-1, self.root), *(self.root + parent for parent in tree_parents[1:])]

    @property
    def token_ids(self) -> Sequence[int]:
        """Token of each node of the pass."""
        new = self.request.token_ids[self.start : self.start + self.num_new_tokens]
        return new if self.num_draft_tokens == 0 or self.tree is None else [*new, *self.tree.token_ids[1:]]

    @property
    def logits_nodes(self) -> Sequence[int]:
        """Nodes of the pass whose logits are needed."""
        end = self.num_new_tokens + self.num_draft_tokens
        if self.request.needs_prompt_logits:
            return range(end)
        return () if self.tree is None else range(self.root, end)

    def set_output(self, output: PlanOutput, logits: FloatArray) -> None:
        """Take the request's part of the pass's output.

        Args:
            logits: [R, V] of the whole pass, without padding ids.
        """
        self.output, self.first_row = output, output.first_logits_row
        if self.request.needs_prompt_logits:
            self.prompt_logits = logits[self.first_row : self.first_row + self.num_new_tokens]
            self.first_row += self.root
        self.logits = logits[self.first_row : output.end_logits_row]

    def keep_accepted(self, accepted_nodes: Sequence[int]) -> None:
        """Add accepted nodes of the tree to those whose cache rows are kept."""
        if self.tree is not None and accepted_nodes:
            if isinstance(self.tree.parents, range):  # a chain
                self.kept_nodes = range(self.num_new_tokens + len(accepted_nodes))
            else:
                self.kept_nodes = [*range(self.num_new_tokens), *(self.root + node for node in accepted_nodes)]

    def set_draft(self, tree: DraftTree | None, num_before: int, reason_if_empty: SkipReason) -> None:
        """Set the remaining draft, of originally `num_before` tokens, and count the dropped ones."""
        num_left = 0 if tree is None else tree.num_draft_tokens
        self.request.stats.num_dropped_tokens += max(0, num_before - num_left)
        if tree is not None and num_left > 0:
            self.tree, self.skip_reason = tree, None
        elif num_before > 0:
            self.drop_draft(reason_if_empty)

    def drop_draft(self, reason: SkipReason) -> None:
        """Drop the draft, so that the request's step is a plain one, and record the reason."""
        self.tree, self.skip_reason = DraftTree.root_only(self.request.token_ids[-1]), reason

    def skip(self, reason: SkipReason) -> None:
        """Record why a drafter does not draft. A later drafter's reason replaces NO_MATCH, but no other one."""
        self.budget = None
        if self.num_draft_tokens == 0 and self.skip_reason in (None, SkipReason.NO_MATCH):
            self.skip_reason = reason
