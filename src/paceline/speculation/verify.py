"""Verification: accepts the draft tokens that the target itself samples.

At the root, a token is sampled from the target's logits, with the noise that plain decoding uses at that position. If a child has this
token, the child is accepted, and the next token is sampled from the child's logits. Otherwise, or if the token finishes the request, it is
the bonus token, and verification ends. Every token is the target's own sample, so the output is that of plain decoding for any tree, and no
draft probabilities are needed.
"""

from typing import NamedTuple

from paceline.errors import is_interrupt
from paceline.runtimes.base import FloatArray
from paceline.sampling.path_sampler import SampledPath
from paceline.speculation.commit import FinishCheck, cannot_finish
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree


class VerifyResult(NamedTuple):
    """Outcome of verifying one tree."""

    accepted_nodes: tuple[int, ...]  # from depth 1 down
    token_ids: tuple[int, ...]  # tokens of the accepted nodes, then the bonus token


def verify(tree: DraftTree, logits: FloatArray, request: Request, path: SampledPath | None = None) -> VerifyResult:
    """Verify a tree by sampling the target's own tokens.

    Args:
        tree: tree whose root is the request's last token.
        logits: [N, V] float32, row i belongs to node i; only rows along the accepted path are read.
        request: the request, which is not changed.
        path: result of the compiled sampler; None = sample row by row.

    Raises:
        PacelineError: no token can be sampled at the root. If that happens at an accepted node, verification ends before the node.
    """
    if path is not None:
        return _cut_at_finish(path, request)
    finish_check, node = FinishCheck(request), 0
    accepted, token_ids = list[int](), list[int]()
    while True:
        try:
            edited = request.processor.edit_logits(logits[node], token_ids)
            token = edited.draw(request.seed, request.sample_index, len(request.token_ids) + len(token_ids))
        except BaseException as error:
            if not accepted or is_interrupt(error):
                raise
            # No token can be sampled after this node. Its own token becomes the bonus token, and the next step raises the error.
            return VerifyResult(tuple(accepted[:-1]), tuple(token_ids))
        token_ids.append(token)
        child = tree.child(node, token)
        if child is None or finish_check.finishes_with(token):
            return VerifyResult(tuple(accepted), tuple(token_ids))
        accepted.append(child)
        node = child


def _cut_at_finish(path: SampledPath, request: Request) -> VerifyResult:
    """Return the compiled sampler's path, cut at the first token that finishes the request, which becomes the bonus token."""
    token_ids, nodes = path
    count = len(nodes)
    if nodes and not cannot_finish(request, token_ids[:-1]):
        finish_check = FinishCheck(request)
        count = next((index for index, token in enumerate(token_ids[:-1]) if finish_check.finishes_with(token)), count)
    return VerifyResult(tuple(nodes[:count]), tuple(token_ids[: count + 1]))
