"""The rows one request brings to a step, and reserving their slots."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import CapacityError
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import RowPlan
from paceline.speculation.request import Request
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree


@dataclass(slots=True)
class Work:
    """Rows of one request: known tokens that are not cached yet, the last of them the root of a tree of guesses.

    Nodes of the plan: [0, num_given) are the known tokens, node num_given - 1 is the root; then the tree's other nodes.

    Attributes:
        num_given: known tokens; 1 while decoding, a chunk of the prompt before.
        tree: None for a chunk that does not reach the request's last token: it emits nothing.
        wants_prompt_rows: whether the logits of all known tokens are wanted, not only those of the tree.
        plain: why there are no guesses.
        plan: set by `reserve`.
    """

    request: Request
    num_given: int
    tree: DraftTree | None
    wants_prompt_rows: bool = False
    plain: PlainReason | None = None
    plan: RowPlan | None = None

    @classmethod
    def of(cls, request: Request, num_given: int) -> "Work":
        """What `request` does next, with so many of its known tokens."""
        is_whole = num_given == len(request.token_ids) - request.sequence.committed_len
        tree = DraftTree.root_only(request.token_ids[-1]) if is_whole else None
        return cls(request, num_given, tree, request.wants_prompt_rows)

    @property
    def root(self) -> int:
        """The plan's node of the root."""
        return self.num_given - 1

    @property
    def parents(self) -> Sequence[int]:
        if self.tree is None or self.tree.num_draft_tokens == 0:
            return range(-1, self.num_given - 1)
        return self.parents_with(self.tree.parents)

    def parents_with(self, tree_parents: Sequence[int]) -> Sequence[int]:
        """The plan's parents if the tree had these."""
        if self.num_given == 1:
            return tree_parents
        return [*range(-1, self.num_given - 1), *(self.root + parent for parent in tree_parents[1:])]

    @property
    def token_ids(self) -> Sequence[int]:
        start = self.request.sequence.committed_len
        given = self.request.token_ids[start : start + self.num_given]
        return given if self.tree is None else [*given, *self.tree.token_ids[1:]]

    @property
    def logits_nodes(self) -> Sequence[int]:
        num_nodes = self.num_given + (self.tree.num_draft_tokens if self.tree is not None else 0)
        if self.wants_prompt_rows:
            return range(num_nodes)
        return range(self.root, num_nodes) if self.tree is not None else ()

    def make_plain(self, reason: PlainReason) -> None:
        """Drop the guesses."""
        self.tree, self.plain = DraftTree.root_only(self.request.token_ids[-1]), reason


def reserve(works: Sequence[Work], cache: KVCache) -> list[RowPlan]:
    """Reserve slots for every work; of guesses that find no block, or stand in the way of another work's known tokens, the best stay.

    Raises:
        CapacityError: not even the known tokens fit; nothing was changed.
    """
    try:
        for work in works:
            try:
                work.plan = cache.reserve(work.request.sequence, work.parents)
            except CapacityError:
                # Others' guesses make room for known tokens alone: paths take more blocks than a request was admitted with.
                _make_room(works, cache, cache.num_needed(work.request.sequence, range(-1, work.num_given - 1)))
                _trim(work, cache, cache.pool.num_free)
                work.plan = cache.reserve(work.request.sequence, work.parents)
    except CapacityError:
        for work in works:
            cache.cancel(work.request.sequence)
        raise
    return [work.plan for work in works if work.plan is not None]


def _make_room(works: Sequence[Work], cache: KVCache, num_blocks: int) -> None:
    """Take guesses back that are reserved already, the last work's first, until `num_blocks` are free or none is left."""
    for work in reversed(works):
        if cache.pool.num_free >= num_blocks:
            return
        if work.plan is not None and work.tree is not None and work.tree.num_draft_tokens > 0:
            cache.cancel(work.request.sequence)
            _trim(work, cache, cache.pool.num_free - num_blocks)
            work.plan = cache.reserve(work.request.sequence, work.parents)


def _trim(work: Work, cache: KVCache, num_blocks: int) -> None:
    """Keep the guesses that `num_blocks` blocks have room for."""
    tree = work.tree
    if tree is None or tree.num_draft_tokens == 0:
        return
    sequence = work.request.sequence
    kept = tree.prune(lambda parents: cache.num_needed(sequence, work.parents_with(parents)) <= num_blocks)
    work.request.stats.cut += tree.num_draft_tokens - kept.num_draft_tokens
    if kept.num_draft_tokens > 0:
        work.tree = kept
    else:
        work.make_plain(PlainReason.NO_MEMORY)
