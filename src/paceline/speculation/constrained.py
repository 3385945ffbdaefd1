"""Drafts under a grammar: forbidden draft tokens are removed before they cost a row, and tokens that the grammar forces are added.

Verification obeys the grammar in any case, so all of this only saves rows. Forced tokens are verified like other draft tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import RequestError
from paceline.kv_cache.row_plan import TreeLayout
from paceline.sampling.grammars.matcher import GrammarMatcher
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

FORCED = "grammar"  # source of forced tokens
MAX_FORCED_TOKENS = 16  # maximum forced tokens in one draft, whatever the draft length
ANY_ID = 2**31  # vocabulary size that `trim` never exceeds: the grammar allows valid ids only


def constrain_draft(rows: RequestRows) -> None:
    """Constrain the draft of a request by its grammar, or make a draft of forced tokens if it has none."""
    request, limit = rows.request, rows.limit
    if limit is None or not isinstance(request.processor.grammar, GrammarMatcher):
        return
    num_before = rows.num_draft_tokens
    row_budget, max_depth = request.limit_draft(MAX_FORCED_TOKENS + 1, MAX_FORCED_TOKENS)
    row_budget, max_depth = max(limit.row_budget, row_budget), max(limit.max_depth, max_depth)
    tree = constrain(rows.tree if num_before > 0 else None, request, max_depth, row_budget, layout=limit.layout)
    rows.set_draft(tree, num_before, SkipReason.UNUSABLE)


def constrain(
    tree: DraftTree | None, request: Request, max_depth: int, row_budget: int, *, layout: TreeLayout = TreeLayout.PATHS
) -> DraftTree | None:
    """Return what the request's grammar allows of a tree, with forced tokens in place of other tokens and after the last ones.

    A drawn tree is returned as it is. Its tokens obey the grammar, because `draft_probs` went through the request's processor, and to
    remove one because of its token would change the distribution that rejection sampling preserves.

    Args:
        tree: None = there is no draft.

    Returns:
        None if nothing can be drafted, or if the grammar allows no token: verification raises that error.
    """
    matcher = request.processor.grammar
    if not isinstance(matcher, GrammarMatcher) or (tree is not None and tree.draft_probs):
        return tree
    given = tree if tree is not None else DraftTree.root_only(request.token_ids[-1])
    result = _ConstrainedTree(matcher, given, min(max_depth, row_budget - 1))
    try:
        result.add_subtree(0, 0, [], matcher.forced_tokens(()))
    except RequestError:
        return None
    if not result.token_ids:
        return None
    if FORCED in result.sources or len(result.token_ids) < given.num_draft_tokens:
        probs = None if given.probs is None else result.probs
        given = DraftTree.grow(given.token_ids[0], result.token_ids, result.parents, result.sources, probs=probs)
    return given.trim(vocab_size=ANY_ID, max_depth=max_depth, row_budget=row_budget, layout=layout)


@dataclass(slots=True)
class _ConstrainedTree:
    """Nodes 1 … n of the constrained tree, parents before children, copied from the given tree or forced."""

    matcher: GrammarMatcher
    given: DraftTree
    max_depth: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)

    def add_subtree(self, given_node: int, node: int, path: list[int], forced: Sequence[int]) -> None:
        """Add the nodes that may follow one that was added.

        Args:
            given_node, node: its number in the given tree, and here.
            path: tokens from the root to it, root excluded.
            forced: tokens that the grammar forces next.
        """
        if len(path) >= self.max_depth:
            return
        children = self.given.children(given_node)
        if forced and not any(self.given.token_ids[child] == forced[0] for child in children):
            for token in forced[: self.max_depth - len(path)]:
                node = self._add_node(node, token, FORCED, 1.0)
            return
        for child in children:
            token = self.given.token_ids[child]
            longer = [*path, token]
            if token != forced[0] if forced else not self.matcher.is_allowed(longer):
                continue
            added = self._add_node(node, token, self.given.sources[child], 1.0 if self.given.probs is None else self.given.probs[child])
            if forced:
                self.add_subtree(child, added, longer, forced[1:])
                return
            self.add_subtree(child, added, longer, self.matcher.forced_tokens(longer) if len(longer) < self.max_depth else ())

    def _add_node(self, parent: int, token_id: int, source: str, prob: float) -> int:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.sources.append(source)
        self.probs.append(prob)
        return len(self.token_ids)
