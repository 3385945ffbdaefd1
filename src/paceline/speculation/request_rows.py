"""One request's rows of a forward pass: tokens without cached rows, then draft tokens. The rows are numbered as nodes of the pass:

0 … num_new_tokens - 1    tokens of the request; the last one is the root of the draft tree
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
    """The rows of one request in one pass."""

    request: Request
    num_new_tokens: int  # tokens of the request that run in this pass; 1 while decoding, more for a prompt chunk
    tree: DraftTree | None  # draft after the last token, or only the root; None for a chunk of the prompt that emits no token
    skip_reason: SkipReason | None = None  # why there is no draft
    max_draft_budget: DraftBudget | None = None  # budget of the request in this step, for all drafters; None = nothing may be drafted
    draft_budget: DraftBudget | None = None  # budget of the request for the drafter that is being called; None = this drafter may not draft
    expected_tokens: float | None = None  # as in `StepRecord`
    expected_speedup: float | None = None  # as in `StepRecord`
    first_position: int = 0  # position in the request's text of the first row
    row_plan: RowPlan | None = None  # reserved cache slots, and the rows and positions of the pass that use them
    output: PlanOutput | None = None  # hidden states of all rows
    logits: FloatArray = field(default_factory=lambda: NO_LOGITS)  # [N, V] of the tree's nodes
    prompt_logits: FloatArray = field(default_factory=lambda: NO_LOGITS)  # [num_new_tokens, V] if those of prompt tokens are needed
    root_logits_row: int = 0  # row of the root among the logits of the whole pass
    sampled_path: SampledPath | None = None  # result of the compiled sampler; None = verify row by row
    kept_nodes: Sequence[int] = ()  # nodes of the pass whose cache rows are kept: the new tokens and the accepted draft tokens
    is_observed: bool = False  # whether drafters receive the rows

    @classmethod
    def without_draft(cls, request: Request, num_new_tokens: int) -> "RequestRows":
        """Return the rows of the next tokens of a request, without a draft."""
        tree = DraftTree.root_only(request.token_ids[-1]) if num_new_tokens == request.num_uncached else None
        return cls(request, num_new_tokens, tree, first_position=request.cached_sequence.committed_len, kept_nodes=range(num_new_tokens))

    @property
    def root_node(self) -> int:
        """Index of the root among the nodes of the pass."""
        return self.num_new_tokens - 1

    @property
    def num_draft_tokens(self) -> int:
        return 0 if self.tree is None else self.tree.num_draft_tokens

    @property
    def parents(self) -> Sequence[int]:
        """Parent of each node of the pass."""
        return range(-1, self.root_node) if self.num_draft_tokens == 0 or self.tree is None else self.parents_of_pass(self.tree.parents)

    def parents_of_pass(self, tree_parents: Sequence[int]) -> Sequence[int]:
        """Return the parent of each node of the pass: the new tokens, a chain, and then a draft tree with the parents `tree_parents`."""
        if self.num_new_tokens == 1:
            return tree_parents
        return [*range(-1, self.root_node), *(self.root_node + parent for parent in tree_parents[1:])]

    @property
    def token_ids(self) -> Sequence[int]:
        """Token of each node of the pass."""
        new_ids = self.request.token_ids[self.first_position : self.first_position + self.num_new_tokens]
        return new_ids if self.num_draft_tokens == 0 or self.tree is None else [*new_ids, *self.tree.token_ids[1:]]

    @property
    def logits_nodes(self) -> Sequence[int]:
        """Nodes of the pass whose logits are needed."""
        num_nodes = self.num_new_tokens + self.num_draft_tokens
        if self.request.needs_prompt_logits:
            return range(num_nodes)
        return () if self.tree is None else range(self.root_node, num_nodes)

    def set_output(self, output: PlanOutput, logits: FloatArray) -> None:
        """Store the request's part of the pass's output. `logits`: [R, V] of all requests, without padding ids."""
        self.output, self.root_logits_row = output, output.first_logits_row
        if self.request.needs_prompt_logits:
            self.prompt_logits = logits[self.root_logits_row : self.root_logits_row + self.num_new_tokens]
            self.root_logits_row += self.root_node
        self.logits = logits[self.root_logits_row : output.end_logits_row]

    def keep_accepted(self, accepted_nodes: Sequence[int]) -> None:
        """Add accepted nodes of the tree to `kept_nodes`, as nodes of the pass."""
        if self.tree is not None and accepted_nodes:
            if isinstance(self.tree.parents, range):  # a chain, whose accepted nodes follow the request's own tokens
                self.kept_nodes = range(self.num_new_tokens + len(accepted_nodes))
            else:
                self.kept_nodes = [*range(self.num_new_tokens), *(self.root_node + node for node in accepted_nodes)]

    def set_draft(self, tree: DraftTree | None, num_drafted: int, reason_if_empty: SkipReason) -> None:
        """Set the draft to `tree`, the remaining part of a draft of `num_drafted` tokens, and count the dropped tokens.

        Args:
            reason_if_empty: why the step is plain if no draft token is left.
        """
        num_left = 0 if tree is None else tree.num_draft_tokens
        self.request.stats.num_dropped_tokens += max(0, num_drafted - num_left)
        if tree is not None and num_left > 0:
            self.tree, self.skip_reason = tree, None
        elif num_drafted > 0:
            self.drop_draft(reason_if_empty)

    def drop_draft(self, reason: SkipReason) -> None:
        """Drop the draft, which makes the request's step a plain step, and record the reason."""
        self.tree, self.skip_reason = DraftTree.root_only(self.request.token_ids[-1]), reason

    def skip_drafter(self, reason: SkipReason) -> None:
        """Record why a drafter does not draft. The reason of a later drafter replaces only an earlier NO_MATCH."""
        self.draft_budget = None
        if self.num_draft_tokens == 0 and self.skip_reason in (None, SkipReason.NO_MATCH):
            self.skip_reason = reason
