"""Drafts under a grammar: forbidden tokens are removed before they cost a row, and tokens that the grammar forces are added."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import RequestError
from paceline.kv_cache.row_plan import TreeLayout
from paceline.sampling.grammars.matcher import GrammarMatcher
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

SOURCE = "grammar"
MAX_FORCED = 16  # forced tokens in one draft, whatever the draft length
ANY_ID = 2**31  # ids that do not exist are none that the grammar allows


def forced_draft(request: Request, limit: DraftBudget) -> DraftTree | None:
    """The tokens that a request's grammar forces next, as a draft; None where it forces none."""
    return forced_run(request, with_forced(limit, request).max_depth)


def with_forced(limit: DraftBudget, request: Request) -> DraftBudget:
    """A limit that admits up to `MAX_FORCED` forced tokens, however few a drafter may draft."""
    row_budget, max_depth = request.limit_draft(MAX_FORCED + 1, MAX_FORCED)
    return replace(limit, row_budget=max(limit.row_budget, row_budget), max_depth=max(limit.max_depth, max_depth))


def constrain_draft(rows: RequestRows, budget: DraftBudget) -> None:
    """Remove draft tokens that the request's grammar forbids, and add those that it forces."""
    num_before = rows.num_draft_tokens
    tree = rows.tree if num_before > 0 else None
    tree = constrain(tree, rows.request, budget.max_depth, budget.row_budget, layout=budget.layout)
    rows.set_draft(tree, num_before, SkipReason.UNUSABLE)


def constrain(
    tree: DraftTree | None, request: Request, max_depth: int, row_budget: int, *, layout: TreeLayout = TreeLayout.PATHS
) -> DraftTree | None:
    """What is left of a tree under the request's grammar, forced tokens put in.

    Forced tokens replace others in the same place and follow the last ones; without a draft they are the tree. They are verified as any
    other draft token.

    A tree whose tokens were drawn stays as it is. To remove one because of its token would change the distribution that rejection keeps;
    and drawn tokens obey the grammar already, because `draft_probs` went through the request's processor.

    Args:
        tree: None = there is no draft.
        max_depth: tokens from the root to the deepest node.
        row_budget: rows of the target pass, root included, in `layout`.

    Returns:
        None where nothing can be drafted, or the grammar allows no token: the target's own row then raises the error.
    """
    matcher = request.processor.grammar
    if not isinstance(matcher, GrammarMatcher) or (tree is not None and tree.draft_probs):
        return tree
    given = tree if tree is not None else DraftTree.root_only(request.token_ids[-1])
    growing = _ConstrainedTree(matcher, given, min(max_depth, row_budget - 1))
    try:
        growing.visit(0, 0, [], matcher.forced_tokens(()))
    except RequestError:
        return None
    if not growing.token_ids:
        return None
    if not growing.is_unchanged:
        probs = None if given.probs is None else growing.probs
        given = DraftTree.grow(given.token_ids[0], growing.token_ids, growing.parents, growing.sources, probs=probs)
    return given.trim(vocab_size=ANY_ID, max_depth=max_depth, row_budget=row_budget, layout=layout)


def forced_run(request: Request, max_depth: int) -> DraftTree | None:
    """The chain of tokens that the request's grammar forces next, at most `max_depth`; None where it forces none."""
    matcher = request.processor.grammar
    if not isinstance(matcher, GrammarMatcher):
        return None
    try:
        forced = matcher.forced_tokens(())[:max_depth]
    except RequestError:  # as in `constrain`
        return None
    return DraftTree.chain(request.token_ids[-1], forced, SOURCE) if forced else None


@dataclass(slots=True)
class _ConstrainedTree:
    """The tree to be: nodes 1 … n, parents before children."""

    matcher: GrammarMatcher
    given: DraftTree
    max_depth: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.children = [[] for _ in self.given.token_ids]
        for node, parent in enumerate(self.given.parents):
            if node:
                self.children[parent].append(node)

    @property
    def is_unchanged(self) -> bool:
        """Whether every given node was taken, and nothing else."""
        return SOURCE not in self.sources and len(self.token_ids) == self.given.num_draft_tokens

    def visit(self, given_node: int, node: int, path: list[int], forced: Sequence[int]) -> None:
        """Take what may follow a node that was taken.

        Args:
            given_node: of the given tree.
            node: the same in this one.
            path: tokens that lead there.
            forced: those that must follow.
        """
        if len(path) >= self.max_depth:
            return
        if forced:
            self._follow(given_node, node, path, forced)
            return
        for child in self.children[given_node]:
            longer = [*path, self.given.token_ids[child]]
            if self.matcher.is_allowed(longer):
                taken = self._take(node, longer[-1], child)
                self.visit(child, taken, longer, self._forced_after(longer))

    def _follow(self, given_node: int, node: int, path: list[int], forced: Sequence[int]) -> None:
        """Add a forced token; if it is in the draft, also what the draft has after it."""
        drafted = [child for child in self.children[given_node] if self.given.token_ids[child] == forced[0]]
        if drafted:
            taken = self._take(node, forced[0], drafted[0])
            longer = [*path, forced[0]]
            self.visit(drafted[0], taken, longer, forced[1:])
            return
        for token in forced[: self.max_depth - len(path)]:
            node = self._take(node, token, None)

    def _forced_after(self, path: list[int]) -> Sequence[int]:
        return self.matcher.forced_tokens(path) if len(path) < self.max_depth else ()

    def _take(self, parent: int, token_id: int, given_node: int | None) -> int:
        """Add a node; `given_node` None = the grammar forces it."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.sources.append(SOURCE if given_node is None else self.given.sources[given_node])
        self.probs.append(1.0 if given_node is None or self.given.probs is None else self.given.probs[given_node])
        return len(self.token_ids)
