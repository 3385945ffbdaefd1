"""Rejection sampling, the second rule of acceptance: accept a draft token as often as the target's probability allows, else draw another.

Opt-in (`acceptance="rejection"`). Outputs have exactly the target's distribution, as with `verify`, but a seed gives another text than
plain decoding, because the token depends on what was drafted. In return more tokens are accepted of a drafter that samples, most of all at
high temperatures. How the draft was made decides (`Proposal`):

    a chain of drawn tokens      block verification: the longest prefix that the joint probabilities allow
    several draws at a node      one after the other; after each rejection target_probs becomes the normalised residual
    tokens chosen otherwise      the target draws, and the child that holds its token is accepted
"""

from collections.abc import Callable, Sequence
from enum import Enum

from paceline.errors import is_interrupt
from paceline.runtimes.base import FloatArray
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.residual import TokenProbs, acceptance, block_threshold, excess, residual
from paceline.speculation.commit import FinishCheck
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree, Proposal
from paceline.speculation.verify import VerifyResult, verify


class Acceptance(Enum):
    """The rule that accepts draft tokens."""

    MATCH = "match"  # accept what the target itself samples: the output of plain decoding with the same seed
    REJECTION = "rejection"  # as often as the target's distribution allows: another text of the same distribution


class StepRandomness:
    """The random decisions of one step, each made once. The key of their noise is the number of tokens before the step, and the depth.

    A key of the position alone would repeat: block verification decides by a later draft token whether an earlier one is accepted, and the
    next step draws for that later position again.
    """

    def __init__(self, request: Request) -> None:
        self._key = request.seed, request.sample_index, len(request.token_ids)

    def accepts(self, threshold: float, depth: int, index: int) -> bool:
        """Return True with probability `threshold`, for child `index` of a node at `depth`."""
        return step_uniform(*self._key, Purpose.ACCEPT, depth, index) < threshold

    def draw(self, probs: TokenProbs, depth: int) -> int:
        """Draw the token after a node at `depth`."""
        return probs.token_at(step_uniform(*self._key, Purpose.RESIDUAL, depth))


def verify_rejection(tree: DraftTree, logits: FloatArray, request: Request) -> VerifyResult:
    """Verify a tree so that outputs have the target's distribution; at temperature 0 this is `verify`.

    Args:
        tree: rooted at the request's last token.
        logits: [N, V] float32, row i belongs to node i. All rows are read if the draft is a chain sampled from `draft_probs`,
            otherwise those along the accepted path.
        request: not changed.

    Raises:
        PacelineError: as `verify`.
    """
    if request.params.is_greedy:
        return verify(tree, logits, request)

    def target_probs(node: int, path: Sequence[int]) -> TokenProbs:
        return TokenProbs.from_distribution(request.processor.process(logits[node], path))

    return RejectionSampler(tree, target_probs, lambda: FinishCheck(request), StepRandomness(request)).verify()


class RejectionSampler:
    """Verification of one tree by rejection sampling.

    Args:
        target_probs: (node, tokens from the root to it, root excluded) -> the target's distribution of the next token.
        new_finish_check: returns a check for the token that finishes the request; nothing after it is accepted.
        decisions: tests enumerate them instead of drawing.
    """

    def __init__(
        self,
        tree: DraftTree,
        target_probs: Callable[[int, Sequence[int]], TokenProbs],
        new_finish_check: Callable[[], FinishCheck],
        decisions: StepRandomness,
    ) -> None:
        self._tree, self._target_probs, self._decisions = tree, target_probs, decisions
        self._new_finish_check, self._finish_check = new_finish_check, new_finish_check()
        self._accepted: list[int] = []
        self._token_ids: list[int] = []

    def verify(self) -> VerifyResult:
        """Verify the tree; return the accepted nodes and the tokens."""
        length = self._block_length() if self._tree.proposal is Proposal.SAMPLED else 0
        node = self._verify_block(length) if length else 0
        while node is not None:
            node = self._verify_children(node)
        return VerifyResult(tuple(self._accepted), tuple(self._token_ids))

    def _verify_children(self, node: int) -> int | None:
        """Accept a child of `node` or draw another token; return the accepted child, or None at the end."""
        tree, depth = self._tree, len(self._token_ids)
        try:
            target = self._target_probs(node, self._token_ids)
        except BaseException as error:
            if not self._accepted or is_interrupt(error):
                raise
            self._accepted.pop()  # the last token becomes the bonus token; the next step reads this row first, and reports the error
            return None
        draft = tree.draft_probs.get(node)
        if draft is None:
            token = self._decisions.draw(target, depth)
            return self._append_token(token, tree.child(node, token))
        for index, child in enumerate(tree.children(node)):
            token = tree.token_ids[child]
            if draft is None:  # no further token had a probability above 0
                break
            if self._decisions.accepts(acceptance(target, draft, token), depth, index):
                return self._append_token(token, child)
            target = residual(target, excess(target, draft))
            draft = draft.without(token)
        return self._append_token(self._decisions.draw(target, depth), None)

    def _verify_block(self, length: int) -> int | None:
        """Accept the longest prefix of `length` drawn tokens; return the last node if that is all of them.

        Source: Sun et al. 2024 (arXiv:2403.10444), algorithm 2. Deviation: a chain ends with the token that finishes the request, or
        where its draws end.
        """
        tree = self._tree
        share: float = 1  # the paper's p_i
        for depth in range(length):
            try:
                target = self._target_probs(depth, tree.token_ids[1 : depth + 1])
            except BaseException as error:  # an invalid row may never be needed: verify only the tokens before it
                if depth == 0 or is_interrupt(error):
                    raise
                length = depth
                break
            draft = tree.draft_probs[depth]
            weights = excess(target, draft, share)
            if depth == 0 or self._decisions.accepts(block_threshold(share, weights), depth - 1, 0):
                num_kept, after, left = depth, target, weights
            share = min(1, share * acceptance(target, draft, tree.token_ids[depth + 1]))
            if share == 0:  # neither this draft token nor a later one can be accepted
                break
        is_whole = self._decisions.accepts(share, length - 1, 0)
        node: int | None = 0
        for child in range(1, (length if is_whole else num_kept) + 1):
            node = self._append_token(tree.token_ids[child], child)
        return node if is_whole else self._append_token(self._decisions.draw(residual(after, left), num_kept), None)

    def _block_length(self) -> int:
        """Return the number of drawn tokens from the root on, up to the one that finishes the request."""
        length, lookahead = 0, self._new_finish_check()
        while length in self._tree.draft_probs:
            length += 1
            if lookahead.finishes_with(self._tree.token_ids[length]):
                break
        return length

    def _append_token(self, token_id: int, child: int | None) -> int | None:
        """Append a token to the result; return `child` if verification goes on there, else None."""
        self._token_ids.append(token_id)
        if child is None or self._finish_check.finishes_with(token_id):
            return None
        self._accepted.append(child)
        return child
