"""Drafts under a grammar: removes draft tokens that the grammar forbids, and adds the tokens that it forces.

Verification obeys the grammar in any case, and verifies forced tokens like other draft tokens. All this only saves rows of tokens that
would be rejected, and adds tokens that are likely to be accepted.
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
    """Constrain the draft of a request by its grammar, or make a draft of forced tokens if it has none."""
    request, limit = rows.request, rows.max_draft_budget
    if limit is None or request.processor.grammar is None:
        return
    num_before = rows.num_draft_tokens
    max_rows, max_depth = request.limit_draft(MAX_FORCED_TOKENS + 1, MAX_FORCED_TOKENS)
    max_rows, max_depth = max(limit.max_rows, max_rows), max(limit.max_depth, max_depth)
    tree = constrain(rows.tree if num_before > 0 else None, request, max_depth, max_rows)
    rows.set_draft(tree, num_before, SkipReason.UNUSABLE)


def constrain(tree: DraftTree | None, request: Request, max_depth: int, max_rows: int) -> DraftTree | None:
    """Return a draft tree without the nodes that the request's grammar forbids, and with the tokens that it forces.

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
    given = tree if tree is not None else DraftTree.root_only(request.token_ids[-1])
    try:
        nodes = _constrained_nodes(matcher, given, min(max_depth, max_rows - 1))
    except RequestError:
        return None
    if not nodes:
        return None
    parents, token_ids, sources, probs = zip(*nodes, strict=True)
    if FORCED_SOURCE in sources or len(nodes) < given.num_draft_tokens:
        given = DraftTree.from_nodes(
            given.token_ids[0], token_ids, parents, sources, confidences=None if given.confidences is None else probs
        )
    # forced tokens are always in the vocabulary
    return given.trim(vocab_size=sys.maxsize, max_depth=max_depth, max_rows=max_rows)


def _constrained_nodes(matcher: GrammarMatcher, given: DraftTree, max_depth: int) -> list[tuple[int, int, str, float]]:
    """Return parent, token, source and probability of each draft token of the constrained tree, parents before children."""
    nodes: list[tuple[int, int, str, float]] = []

    def add_node(parent: int, token_id: int, source: str, prob: float) -> int:
        nodes.append((parent, token_id, source, prob))
        return len(nodes)

    def copy_node(given_node: int, parent: int) -> int:
        prob = 1.0 if given.confidences is None else given.confidences[given_node]
        return add_node(parent, given.token_ids[given_node], given.sources[given_node], prob)

    def add_descendants(given_node: int, node: int, path: list[int], forced: Sequence[int]) -> None:
        """Copy the allowed descendants of `given_node`, a node of the original draft, below its copy `node`.

        Args:
            path: tokens from the root to the node, root excluded.
            forced: tokens that the grammar forces after `path`. They replace other children.
        """
        if len(path) >= max_depth:
            return
        if forced:
            child = given.child(given_node, forced[0])
            if child is not None:
                add_descendants(child, copy_node(child, node), [*path, forced[0]], forced[1:])
                return
            for token in forced[: max_depth - len(path)]:
                node = add_node(node, token, FORCED_SOURCE, 1.0)
            return
        for child in given.children(given_node):
            child_path = [*path, given.token_ids[child]]
            if matcher.is_allowed(child_path):
                forced = matcher.forced_tokens(child_path) if len(child_path) < max_depth else ()
                add_descendants(child, copy_node(child, node), child_path, forced)

    add_descendants(0, 0, [], matcher.forced_tokens(()))
    return nodes
