"""Verification: which draft tokens the target itself would have produced.

At the root the target's own token is drawn from its own row, with the noise of that position. If a child holds it, the walk goes there and
repeats; else it stops, and that token is the bonus token. It also stops at a token that finishes the request. Every token is the target's
own draw, so any tree is exact and no draft probability is needed.
"""

from typing import NamedTuple

from paceline.errors import is_interrupt
from paceline.runtimes.base import FloatArray
from paceline.sampling.path_sampler import PathRequest, SampledPath
from paceline.speculation.commit import FinishLookahead, cannot_finish
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree


class VerifyResult(NamedTuple):
    """Outcome of verifying one tree.

    Attributes:
        accepted_nodes: from the root's child down.
        token_ids: one for each accepted node, then the bonus token.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def bonus_token_id(self) -> int:
        return self.token_ids[-1]


def verify(tree: DraftTree, logits: FloatArray, request: Request, path: SampledPath | None = None) -> VerifyResult:
    """Walk a tree with the target's rows.

    Args:
        tree: rooted at the request's last token.
        logits: [N, V] float32, row i belongs to node i; only rows that the walk reaches are read.
        request: gives processors, seed and position; not changed.
        path: the walk as the compiled sampler drew it (`path_request`); None = draw row by row.

    Raises:
        PacelineError: the root's row cannot be drawn from. Where a later row cannot, the walk ends before it.
    """
    if path is not None:
        return _cut_at_finish(path, request)
    lookahead, node = FinishLookahead(request), 0
    accepted, token_ids = list[int](), list[int]()
    while True:
        try:
            edited = request.processor.edit(logits[node], token_ids)
            token = edited.draw(request.seed, request.sample_index, len(request.token_ids) + len(token_ids))
        except BaseException as error:
            if not accepted or is_interrupt(error):
                raise
            return VerifyResult(tuple(accepted[:-1]), tuple(token_ids))  # the next step draws from this row first, and reports the error
        token_ids.append(token)
        child = tree.child(node, token)
        if child is None or lookahead.finishes_with(token):
            return VerifyResult(tuple(accepted), tuple(token_ids))
        accepted.append(child)
        node = child


def path_request(tree: DraftTree, request: Request, first_row: int) -> PathRequest | None:
    """Return the input of the compiled sampler; None if rows of the request must be edited before they are drawn from."""
    sampler = request.processor.path_sampler
    if sampler is None:
        return None
    return PathRequest(sampler, tree.token_ids, tree.parents, request.seed, request.sample_index, len(request.token_ids), first_row)


def _cut_at_finish(path: SampledPath, request: Request) -> VerifyResult:
    """Drop what follows the token that finishes the request."""
    token_ids, nodes = path
    count = len(nodes)
    if nodes and not cannot_finish(request, token_ids[:-1]):
        lookahead = FinishLookahead(request)
        count = next((index for index, token in enumerate(token_ids[:-1]) if lookahead.finishes_with(token)), count)
    return VerifyResult(tuple(nodes[:count]), tuple(token_ids[: count + 1]))
