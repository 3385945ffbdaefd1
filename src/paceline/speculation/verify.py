"""Verification: which draft tokens the target itself would have produced.

At the root, the target's token is sampled from its logits, with the noise that plain decoding uses at that position. If a child holds this
token, the child is accepted, and sampling goes on from the child's logits. Otherwise the token is the bonus token, and verification ends. A
token that finishes the request also ends it. Every token is the target's own sample, so the output is that of plain decoding for any tree,
and no draft probabilities are needed.
"""

from typing import NamedTuple

from paceline.errors import is_interrupt
from paceline.runtimes.base import FloatArray
from paceline.sampling.path_sampler import PathRequest, SampledPath
from paceline.speculation.commit import FinishCheck, cannot_finish
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree


class VerifyResult(NamedTuple):
    """Outcome of verifying one tree.

    Attributes:
        accepted_nodes: from depth 1 down.
        token_ids: those of the accepted nodes, then the bonus token.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def bonus_token_id(self) -> int:
        return self.token_ids[-1]


def verify(tree: DraftTree, logits: FloatArray, request: Request, path: SampledPath | None = None) -> VerifyResult:
    """Verify a tree by the target's own draws.

    Args:
        tree: rooted at the request's last token.
        logits: [N, V] float32, row i belongs to node i; only rows along the accepted path are read.
        request: not changed.
        path: accepted path and bonus token as the compiled sampler drew them (`path_request`); None = draw row by row.

    Raises:
        PacelineError: no token can be drawn at the root. If none can at an accepted node, verification ends before that node.
    """
    if path is not None:
        return _cut_at_finish(path, request)
    lookahead, node = FinishCheck(request), 0
    accepted, token_ids = list[int](), list[int]()
    while True:
        try:
            edited = request.processor.edit(logits[node], token_ids)
            token = edited.draw(request.seed, request.sample_index, len(request.token_ids) + len(token_ids))
        except BaseException as error:
            if not accepted or is_interrupt(error):
                raise
            # the last token becomes the bonus token; the next step reads this row first, and reports the error
            return VerifyResult(tuple(accepted[:-1]), tuple(token_ids))
        token_ids.append(token)
        child = tree.child(node, token)
        if child is None or lookahead.finishes_with(token):
            return VerifyResult(tuple(accepted), tuple(token_ids))
        accepted.append(child)
        node = child


def path_request(tree: DraftTree, request: Request, first_row: int) -> PathRequest | None:
    """Return the input of the compiled sampler; None if processors edit the logits of the request."""
    sampler = request.processor.path_sampler
    if sampler is None:
        return None
    return PathRequest(sampler, tree.token_ids, tree.parents, request.seed, request.sample_index, len(request.token_ids), first_row)


def _cut_at_finish(path: SampledPath, request: Request) -> VerifyResult:
    """Drop what follows the token that finishes the request."""
    token_ids, nodes = path
    count = len(nodes)
    if nodes and not cannot_finish(request, token_ids[:-1]):
        lookahead = FinishCheck(request)
        count = next((index for index, token in enumerate(token_ids[:-1]) if lookahead.finishes_with(token)), count)
    return VerifyResult(tuple(nodes[:count]), tuple(token_ids[: count + 1]))
