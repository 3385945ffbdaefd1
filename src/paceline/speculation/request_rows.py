"""One request's part of a step: its rows of the forward pass, its draft, and what the pass returned for them."""

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


def _no_logits() -> FloatArray:
    return NO_LOGITS


@dataclass(slots=True)
class RequestRows:
    """The next tokens of a request that are not cached, of which the last one is the root of the draft tree.

    Nodes of the plan: [0, num_known) are the known tokens, node num_known - 1 is the root; then the tree's other nodes.

    Attributes:
        num_known: 1 while decoding, before that a chunk of the prompt.
        tree: None for a chunk that does not reach the request's last token: it emits nothing.
        wants_prompt_rows: whether the logits of all known tokens are wanted, not only those of the tree.
        skip_reason: why there is no draft.
        limit: the most that may be drafted; None = nothing.
        budget: how much the drafter at work is to draft; None = nothing.
        expected_tokens: tokens that the step was expected to emit for the request when its draft was chosen; None = unknown.
        expected_speedup: of the whole step over one without drafts; for a plain step, that of the best draft.
        start: position of the first row.
        plan: the cache slots, once they are reserved.
        output, logits, prompt_logits: what the pass returned for all rows; [N, V] for the nodes of the tree; and for the prompt's rows.
        first_row: of the root, among the logits of the pass.
        path: the walk along the tree, as far as the compiled sampler could draw it.
        kept_nodes: the plan's nodes whose cache rows are kept: known tokens, and accepted ones.
        is_observed: its tokens were committed, so that drafters may see the rows.
    """

    request: Request
    num_known: int
    tree: DraftTree | None
    wants_prompt_rows: bool = False
    skip_reason: SkipReason | None = None
    limit: DraftBudget | None = None
    budget: DraftBudget | None = None
    expected_tokens: float | None = None
    expected_speedup: float | None = None
    start: int = 0
    plan: RowPlan | None = None
    output: PlanOutput | None = None
    logits: FloatArray = field(default_factory=_no_logits)
    prompt_logits: FloatArray = field(default_factory=_no_logits)
    first_row: int = 0
    path: SampledPath | None = None
    kept_nodes: Sequence[int] = ()
    is_observed: bool = False

    @classmethod
    def of(cls, request: Request, num_known: int) -> "RequestRows":
        """The rows of the next `num_known` tokens, without a draft."""
        is_whole = num_known == len(request.token_ids) - request.sequence.committed_len
        tree = DraftTree.root_only(request.token_ids[-1]) if is_whole else None
        rows = cls(request, num_known, tree, request.wants_prompt_rows, start=request.sequence.committed_len)
        rows.kept_nodes = range(num_known)
        return rows

    @property
    def is_decoding(self) -> bool:
        """Whether the root is the only known token."""
        return self.tree is not None and self.num_known == 1

    @property
    def root(self) -> int:
        """Index of the root among the nodes of the row plan."""
        return self.num_known - 1

    @property
    def num_draft_tokens(self) -> int:
        return 0 if self.tree is None else self.tree.num_draft_tokens

    @property
    def parents(self) -> Sequence[int]:
        """The plan's parents."""
        if self.tree is None or len(self.tree.token_ids) == 1:
            return range(-1, self.num_known - 1)
        return self.parents_with(self.tree.parents)

    def parents_with(self, tree_parents: Sequence[int]) -> Sequence[int]:
        """The plan's parents if the tree had these."""
        if self.num_known == 1:
            return tree_parents
        return [*range(-1, self.num_known - 1), *(self.root + parent for parent in tree_parents[1:])]

    @property
    def token_ids(self) -> Sequence[int]:
        """The token of each of the plan's nodes."""
        known = self.request.token_ids[self.start : self.start + self.num_known]
        return known if self.tree is None or len(self.tree.token_ids) == 1 else [*known, *self.tree.token_ids[1:]]

    @property
    def logits_nodes(self) -> Sequence[int]:
        """The plan's nodes whose logits are wanted."""
        num_nodes = self.num_known if self.tree is None else self.num_known + len(self.tree.token_ids) - 1
        if self.wants_prompt_rows:
            return range(num_nodes)
        return range(self.num_known - 1, num_nodes) if self.tree is not None else ()

    def set_output(self, output: PlanOutput, logits: FloatArray) -> None:
        """Take the request's part of a pass.

        Args:
            logits: [R, V] of the pass, without padding ids.
        """
        self.output, first = output, output.first_logits_row
        self.first_row = first + self.root if self.wants_prompt_rows else first
        self.logits = logits[self.first_row : output.end_logits_row]
        self.prompt_logits = logits[first : first + self.num_known] if self.wants_prompt_rows else NO_LOGITS

    def keep(self, accepted_nodes: Sequence[int]) -> None:
        """Note the accepted nodes of the tree, whose cache rows are kept."""
        if self.tree is not None and accepted_nodes:
            if isinstance(self.tree.parents, range):  # a chain
                self.kept_nodes = range(self.num_known + len(accepted_nodes))
            else:
                self.kept_nodes = [*range(self.num_known), *(self.root + node for node in accepted_nodes)]

    def set_draft(self, tree: DraftTree | None, num_before: int, reason_if_empty: SkipReason) -> None:
        """Set what is left of a draft of `num_before` tokens, and count the tokens that are not."""
        num_left = 0 if tree is None else tree.num_draft_tokens
        self.request.stats.cut += max(0, num_before - num_left)
        if tree is not None and num_left > 0:
            self.tree, self.skip_reason = tree, None
        elif num_before > 0:
            self.drop_draft(reason_if_empty)

    def drop_draft(self, reason: SkipReason) -> None:
        """Make the request's step a plain one."""
        self.tree, self.skip_reason = DraftTree.root_only(self.request.token_ids[-1]), reason

    def skip(self, reason: SkipReason) -> None:
        """Note why the drafter at work does not draft for the request; this replaces no other reason than NO_MATCH."""
        self.budget = None
        if self.num_draft_tokens == 0 and (self.skip_reason is None or self.skip_reason is SkipReason.NO_MATCH):
            self.skip_reason = reason
