"""The rows that one request brings to a pass: known tokens that are not cached yet, and the guesses under the last of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.kv_cache.row_plan import RowPlan
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree


@dataclass(slots=True)
class RequestRows:
    """Known tokens of a request, the last of them the root of a tree of guesses.

    Nodes of the plan: [0, num_known) are the known tokens, node num_known - 1 is the root; then the tree's other nodes.

    Attributes:
        num_known: 1 while decoding, before that a chunk of the prompt.
        tree: None for a chunk that does not reach the request's last token: it emits nothing.
        wants_prompt_rows: whether the logits of all known tokens are wanted, not only those of the tree.
        plain_reason: why there are no guesses.
        given: the most that may be guessed, whatever it brings; None = nothing.
        budget: how much is to be guessed; None = nothing.
        expected_tokens: that the step was expected to emit for the request when its guesses were chosen; None = nobody said.
        expected_speedup: of the whole step over one without guesses; of a plain step, that of the best one with guesses.
        plan: set when slots are reserved.
    """

    request: Request
    num_known: int
    tree: DraftTree | None
    wants_prompt_rows: bool = False
    plain_reason: PlainReason | None = None
    given: DraftBudget | None = None
    budget: DraftBudget | None = None
    expected_tokens: float | None = None
    expected_speedup: float | None = None
    plan: RowPlan | None = None

    @classmethod
    def of(cls, request: Request, num_known: int) -> "RequestRows":
        """The rows of the next `num_known` known tokens, without guesses."""
        is_whole = num_known == len(request.token_ids) - request.sequence.committed_len
        tree = DraftTree.root_only(request.token_ids[-1]) if is_whole else None
        return cls(request, num_known, tree, request.wants_prompt_rows)

    @property
    def is_decoding(self) -> bool:
        """Whether the root is the only known token."""
        return self.tree is not None and self.num_known == 1

    @property
    def root(self) -> int:
        """The plan's node of the root."""
        return self.num_known - 1

    @property
    def num_guesses(self) -> int:
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
        start = self.request.sequence.committed_len
        known = self.request.token_ids[start : start + self.num_known]
        return known if self.tree is None or len(self.tree.token_ids) == 1 else [*known, *self.tree.token_ids[1:]]

    @property
    def logits_nodes(self) -> Sequence[int]:
        """The plan's nodes whose logits are wanted."""
        num_nodes = self.num_known if self.tree is None else self.num_known + len(self.tree.token_ids) - 1
        if self.wants_prompt_rows:
            return range(num_nodes)
        return range(self.num_known - 1, num_nodes) if self.tree is not None else ()

    @property
    def first_tree_row(self) -> int:
        """Of the rows of logits, that of the root."""
        return self.root if self.wants_prompt_rows else 0

    def set_guesses(self, tree: DraftTree | None, num_before: int, if_none_left: PlainReason) -> None:
        """Take what is left of `num_before` guesses, and count those that are not."""
        num_left = 0 if tree is None else tree.num_draft_tokens
        self.request.stats.cut += max(0, num_before - num_left)
        if tree is not None and num_left > 0:
            self.tree, self.plain_reason = tree, None
        elif num_before > 0:
            self.make_plain(if_none_left)

    def make_plain(self, reason: PlainReason) -> None:
        """Drop the guesses."""
        self.tree, self.plain_reason = DraftTree.root_only(self.request.token_ids[-1]), reason
