"""Rejection sampling: accepts a sampled draft token with a probability such that outputs have exactly the target's distribution.

Opt-in (`acceptance="rejection"`). The distribution is the same as with `verify`, but a seed gives another text than plain decoding, because
the tokens depend on the draft. In return, more tokens of drafters that sample are accepted, especially at high temperatures. The algorithm
depends on how the draft was made (`DraftSampling`):

    a sampled chain               block verification: accept the longest prefix that the joint probabilities allow
    several samples at a node     accept or reject one after another; after a rejection, use the normalised residual of target_probs
    tokens that are not sampled   sample a token of the target, and accept the child with this token
"""

from collections.abc import Callable, Sequence
from enum import Enum

from paceline.errors import is_interrupt
from paceline.runtimes.base import FloatArray
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.residual import TokenProbs, acceptance_ratio, block_threshold, excess, residual
from paceline.speculation.commit import FinishCheck
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftSampling, DraftTree
from paceline.speculation.verify import VerifyResult, verify


class Acceptance(Enum):
    """The rule that accepts draft tokens."""

    MATCH = "match"  # a draft token is accepted if the target samples the same token: the text is that of plain decoding
    REJECTION = "rejection"  # rejection sampling: the text differs from that of plain decoding, but has the same distribution


class StepRandomness:
    """Random decisions of the verification of one step.

    Their noise is a function of two numbers: how many tokens are before the step, and the depth in the draft. A function of the position
    alone, which is the sum of both, would give the same noise twice: block verification uses later draft tokens to decide on earlier ones,
    and the next step samples tokens for those later positions again.
    """

    def __init__(self, request: Request) -> None:
        self._key = request.seed, request.sample_index, len(request.token_ids)

    def accepts(self, threshold: float, depth: int, index: int) -> bool:
        """Return True with probability `threshold`, for child `index` of a node at `depth`."""
        return step_uniform(*self._key, Purpose.ACCEPT, depth, index) < threshold

    def draw(self, probs: TokenProbs, depth: int) -> int:
        """Sample the token after a node at `depth`."""
        return probs.token_at_quantile(step_uniform(*self._key, Purpose.RESIDUAL, depth))


def verify_rejection(tree: DraftTree, logits: FloatArray, request: Request) -> VerifyResult:
    """Verify a tree so that outputs have the target's distribution; at temperature 0 this is `verify`.

    Args:
        tree, request: as for `verify`.
        logits: [N, V] float32, row i belongs to node i. All rows are read if the draft is a sampled chain, otherwise only those along the
            accepted path.

    Raises:
        PacelineError: in the same cases as `verify`.
    """
    if request.params.is_greedy:
        return verify(tree, logits, request)

    def target_probs(node: int, path: Sequence[int]) -> TokenProbs:
        return TokenProbs.from_distribution(request.processor.process(logits[node], path))

    return RejectionSampler(tree, target_probs, lambda: FinishCheck(request), StepRandomness(request)).verify()


class RejectionSampler:
    """Verification of one tree by rejection sampling.

    Args:
        target_probs: (node, tokens from the root to the node, root excluded) -> the target's distribution of the next token.
        new_finish_check: returns a `FinishCheck`, because no token is accepted after the token that finishes the request.
        randomness: source of the random decisions; tests pass an object that enumerates all decisions.
    """

    def __init__(
        self,
        tree: DraftTree,
        target_probs: Callable[[int, Sequence[int]], TokenProbs],
        new_finish_check: Callable[[], FinishCheck],
        randomness: StepRandomness,
    ) -> None:
        self._tree, self._target_probs, self._randomness = tree, target_probs, randomness
        self._new_finish_check, self._finish_check = new_finish_check, new_finish_check()
        self._accepted: list[int] = []
        self._token_ids: list[int] = []

    def verify(self) -> VerifyResult:
        length = self._block_length() if self._tree.draft_sampling is DraftSampling.SAMPLED else 0
        node = self._verify_block(length) if length else 0
        while node is not None:
            node = self._verify_children(node)
        return VerifyResult(tuple(self._accepted), tuple(self._token_ids))

    def _verify_children(self, node: int) -> int | None:
        """Accept a child of `node`, or sample another token; return the child, or None if verification ends here."""
        tree, depth = self._tree, len(self._token_ids)
        try:
            target = self._target_probs(node, self._token_ids)
        except BaseException as error:
            if not self._accepted or is_interrupt(error):
                raise
            self._accepted.pop()  # no token can be sampled after this node: its token becomes the bonus token
            return None
        draft = tree.draft_probs.get(node)
        if draft is None:
            token = self._randomness.draw(target, depth)
            return self._append_token(token, tree.child(node, token))
        for index, child in enumerate(tree.children(node)):
            token = tree.token_ids[child]
            if draft is None:  # all tokens of the draft distribution were rejected: no further child was sampled from it
                break
            if self._randomness.accepts(acceptance_ratio(target, draft, token), depth, index):
                return self._append_token(token, child)
            target = residual(target, excess(target, draft))
            draft = draft.without_token(token)
        return self._append_token(self._randomness.draw(target, depth), None)

    def _verify_block(self, length: int) -> int | None:
        """Accept the longest prefix of a block of `length` sampled tokens; return the last node if the whole block is accepted.

        Source: Sun et al. 2024 (arXiv:2403.10444), algorithm 2. Deviation: the block ends with the token that finishes the request, or
        with the last token that was sampled.
        """
        tree = self._tree
        ratio: float = 1  # p_i in algorithm 2
        for depth in range(length):
            try:
                target = self._target_probs(depth, tree.token_ids[1 : depth + 1])
            except BaseException as error:
                # Verify only the nodes before the first node with invalid logits (NaN), because the output may never reach that node.
                if depth == 0 or is_interrupt(error):
                    raise
                length = depth
                break
            draft = tree.draft_probs[depth]
            weights = excess(target, draft, ratio)
            if depth == 0 or self._randomness.accepts(block_threshold(ratio, weights), depth - 1, 0):
                num_accepted, target_after, weights_after = depth, target, weights
            ratio = min(1, ratio * acceptance_ratio(target, draft, tree.token_ids[depth + 1]))
            if ratio == 0:  # this token has target probability 0: neither this token nor a later draft token can be accepted
                break
        is_whole = self._randomness.accepts(ratio, length - 1, 0)
        node: int | None = 0
        for child in range(1, (length if is_whole else num_accepted) + 1):
            node = self._append_token(tree.token_ids[child], child)
        return node if is_whole else self._append_token(self._randomness.draw(residual(target_after, weights_after), num_accepted), None)

    def _block_length(self) -> int:
        """Return the number of draft tokens that the drafter sampled, up to and including the token that would finish the request."""
        length, finish_check = 0, self._new_finish_check()
        while length in self._tree.draft_probs:
            length += 1
            if finish_check.finishes_with(self._tree.token_ids[length]):
                break
        return length

    def _append_token(self, token_id: int, child: int | None) -> int | None:
        """Append a token to the result, and its node `child` if the draft has it. Return `child` if verification continues there."""
        self._token_ids.append(token_id)
        if child is None or self._finish_check.finishes_with(token_id):
            return None
        self._accepted.append(child)
        return child
