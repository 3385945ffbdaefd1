"""Drafts under a grammar: removes draft tokens that the grammar forbids, and adds tokens that are the only ones it allows (forced tokens).

Verification obeys the grammar in any case, and verifies forced tokens like other draft tokens. These changes of drafts save rows of tokens
that would be rejected, and add tokens that are likely to be accepted.
"""

import sys
from collections.abc import Sequence

from paceline.errors import RequestError
from paceline.sampling.grammars.matcher import GrammarMatcher
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

FORCED_SOURCE = "grammar"  # value in `DraftTree.sources` that marks tokens forced by a grammar
MAX_FORCED_TOKENS = 16  # maximum number of forced tokens in one draft, independent of the draft length


def constrain_draft(rows: RequestRows) -> None:
    """Constrain a request's draft by its grammar. Without a draft, make one of the tokens that the grammar forces."""
    request, budget = rows.request, rows.max_draft_budget
    if budget is None or request.processor.grammar is None:
        return
    num_before = rows.num_draft_tokens
    max_rows, max_depth = request.limit_draft(MAX_FORCED_TOKENS + 1, MAX_FORCED_TOKENS)
    max_rows, max_depth = max(budget.max_rows, max_rows), max(budget.max_depth, max_depth)
    tree = constrain_tree(rows.tree if num_before > 0 else None, request, max_depth, max_rows)
    rows.set_draft(tree, num_before, SkipReason.UNUSABLE)


def constrain_tree(tree: DraftTree | None, request: Request, max_depth: int, max_rows: int) -> DraftTree | None:
    """Return a draft tree without the nodes that the request's grammar forbids, and with the tokens that the grammar forces.

    A sampled tree is returned unchanged. Its tokens obey the grammar, because `draft_probs` went through the request's processor. Removing
    a token because of its value would change the distribution that rejection sampling preserves.

    Args:
        tree: None = there is no draft.

    Returns:
        None if nothing can be drafted, or if the matcher fails: verification then raises the same error.
    """
    matcher = request.processor.grammar
    if matcher is None or (tree is not None and tree.draft_probs):
        return tree
    original = tree if tree is not None else DraftTree.root_only(request.token_ids[-1])
    try:
        nodes = _constrained_nodes(matcher, original, min(max_depth, max_rows - 1))
    except RequestError:
        return None
    if not nodes:
        return None
    parents, token_ids, sources, probs = zip(*nodes, strict=True)
    if FORCED_SOURCE in sources or len(nodes) < original.num_draft_tokens:
        original = DraftTree.from_nodes(
            original.token_ids[0], token_ids, parents, sources, confidences=None if original.confidences is None else probs
        )
    # forced tokens are always in the vocabulary
    return original.trim(vocab_size=sys.maxsize, max_depth=max_depth, max_rows=max_rows)


def _constrained_nodes(matcher: GrammarMatcher, original: DraftTree, max_depth: int) -> list[tuple[int, int, str, float]]:
    """Return parent, token, source and probability of each draft token of the constrained tree, parents before children."""
    nodes: list[tuple[int, int, str, float]] = []

    def add_node(parent: int, token_id: int, source: str, prob: float) -> int:
        nodes.append((parent, token_id, source, prob))
        return len(nodes)

    def copy_node(original_node: int, parent: int) -> int:
        prob = 1.0 if original.confidences is None else original.confidences[original_node]
        return add_node(parent, original.token_ids[original_node], original.sources[original_node], prob)

    def add_descendants(original_node: int, node: int, path: list[int], forced: Sequence[int]) -> None:
        """Copy the allowed descendants of `original_node`, a node of the original draft, below its copy `node`.

        Args:
            path: tokens from the root to the node, root excluded.
            forced: tokens that the grammar forces after `path`. They replace other children.
        """
        if len(path) >= max_depth:
            return
        if forced:
            child = original.child(original_node, forced[0])
            if child is not None:
                add_descendants(child, copy_node(child, node), [*path, forced[0]], forced[1:])
                return
            for token in forced[: max_depth - len(path)]:
                node = add_node(node, token, FORCED_SOURCE, 1.0)
            return
        for child in original.children(original_node):
            child_path = [*path, original.token_ids[child]]
            if matcher.is_allowed(child_path):
                forced = matcher.forced_tokens(child_path) if len(child_path) < max_depth else ()
                add_descendants(child, copy_node(child, node), child_path, forced)

    add_descendants(0, 0, [], matcher.forced_tokens(()))
    return nodes
