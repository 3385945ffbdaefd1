"""Drafting under a grammar: guesses it forbids are cut before they cost a row, tokens it forces are guessed for nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import RequestError
from paceline.kv_cache.row_plan import TreeLayout
from paceline.sampling.matcher import GrammarMatcher
from paceline.speculation.budgets import within_limits
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree

SOURCE = "grammar"
MAX_FORCED = 16  # tokens that a grammar forces and that are guessed at once, however few a drafter may
ANY_ID = 2**31  # ids that do not exist are none that the grammar allows


def forced_budget(request: Request, layout: TreeLayout, *, wants_draws: bool) -> DraftBudget | None:
    """A budget for the tokens that the request's grammar forces next, which are as good as known; None where it forces none."""
    _, max_depth = within_limits(request, MAX_FORCED + 1, MAX_FORCED)
    tree = forced_run(request, max_depth)
    return None if tree is None else DraftBudget(tree.num_draft_tokens + 1, tree.num_draft_tokens, layout, wants_draws)


def with_forced(budget: DraftBudget, request: Request) -> DraftBudget:
    """A budget for all tokens that the request's grammar forces, if they are more than may be guessed."""
    if request.processor.constraint is None:
        return budget
    forced = forced_budget(request, budget.layout, wants_draws=budget.wants_draws)
    if forced is None or forced.max_depth <= budget.max_depth:
        return budget
    return replace(budget, row_budget=max(budget.row_budget, forced.row_budget), max_depth=forced.max_depth)


def fill_with_forced(rows: RequestRows, budget: DraftBudget) -> bool:
    """Guess what the request's grammar forces where that fills the budget, so that no drafter need be asked; returns whether it does."""
    if rows.request.processor.constraint is None:
        return False
    depth = min(budget.max_depth, budget.row_budget - 1)
    tree = forced_run(rows.request, depth)
    if tree is None or tree.num_draft_tokens < depth:
        return False
    rows.tree = tree
    return True


def constrain_guesses(rows: RequestRows, budget: DraftBudget) -> None:
    """Cut guesses that the request's grammar forbids, and guess what it forces."""
    num_before = rows.num_guesses
    tree = rows.tree if num_before > 0 else None
    tree = constrain(tree, rows.request, budget.max_depth, budget.row_budget, layout=budget.layout)
    rows.set_guesses(tree, num_before, PlainReason.CUT)


def constrain(
    tree: DraftTree | None, request: Request, max_depth: int, row_budget: int, *, layout: TreeLayout = TreeLayout.PATHS
) -> DraftTree | None:
    """What is left of a tree under the request's grammar, forced tokens put in.

    Tokens that the grammar forces replace other guesses in their place and follow the last guesses; without guesses they are the tree.
    They are guesses as any other, checked by the target.

    A tree whose guesses were drawn stays as it is: to cut a guess for the token it holds would change the distribution that rejection
    keeps. Drawn guesses obey the grammar already: `draft_probs` went through the request's processor.

    Args:
        tree: None = there were no guesses.
        max_depth: tokens from the root to the deepest node.
        row_budget: rows of the target pass, root included, in `layout`.

    Returns:
        None where nothing can be guessed, or the grammar cannot go on: the target's own row will say so.
    """
    matcher = request.processor.constraint
    if not isinstance(matcher, GrammarMatcher) or (tree is not None and tree.draft_probs):
        return tree
    given = tree if tree is not None else DraftTree.root_only(request.token_ids[-1])
    growing = _Growing(matcher, given, min(max_depth, row_budget - 1))
    try:
        growing.visit(0, 0, [], matcher.forced_tokens(()))
    except RequestError:
        return None
    if not growing.token_ids:
        return None
    if not growing.is_unchanged:
        given = DraftTree.grow(given.token_ids[0], growing.token_ids, growing.parents, growing.sources)
    return given.trim(vocab_size=ANY_ID, max_depth=max_depth, row_budget=row_budget, layout=layout)


def forced_run(request: Request, max_depth: int) -> DraftTree | None:
    """The chain of tokens that the request's grammar forces next, at most `max_depth`; None where it forces none."""
    matcher = request.processor.constraint
    if not isinstance(matcher, GrammarMatcher):
        return None
    try:
        forced = matcher.forced_tokens(())[:max_depth]
    except RequestError:  # as in `constrain`
        return None
    return DraftTree.chain(request.token_ids[-1], forced, SOURCE) if forced else None


@dataclass(slots=True)
class _Growing:
    """The tree to be: nodes 1 … n, parents before children."""

    matcher: GrammarMatcher
    given: DraftTree
    max_depth: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
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
                taken = self._take(node, longer[-1], self.given.sources[child])
                self.visit(child, taken, longer, self._forced_behind(longer))

    def _follow(self, given_node: int, node: int, path: list[int], forced: Sequence[int]) -> None:
        """Take a forced token, and what was guessed behind it if it was guessed itself."""
        guessed = [child for child in self.children[given_node] if self.given.token_ids[child] == forced[0]]
        if guessed:
            taken = self._take(node, forced[0], self.given.sources[guessed[0]])
            longer = [*path, forced[0]]
            self.visit(guessed[0], taken, longer, forced[1:])
            return
        for token in forced[: self.max_depth - len(path)]:
            node = self._take(node, token, SOURCE)

    def _forced_behind(self, path: list[int]) -> Sequence[int]:
        return self.matcher.forced_tokens(path) if len(path) < self.max_depth else ()

    def _take(self, parent: int, token_id: int, source: str) -> int:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.sources.append(source)
        return len(self.token_ids)
