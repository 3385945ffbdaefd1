"""The second acceptance rule: keep a draft as often as the target's probability allows, else draw from what is left.

Opt-in (`acceptance="rejection"`). Texts have exactly the target's distribution, as in `verify`, but they are not the seed's plain
texts: which token comes out depends on what was drafted. In return more drafts are kept of a drafter that draws from a distribution of
its own, at high temperatures above all. Which rule holds at a place of the tree follows from how its drafts were made (`Proposal`):

    a chain, each token drawn        block verification: the longest prefix that the joint probabilities allow
    several draws at one place       in the order of the draws; after each rejection target_probs becomes the normalised residual
    chosen in any other way          the target draws, the walk follows the child that holds its token
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from paceline.errors import is_interrupt
from paceline.runtimes.base import FloatArray
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.residual import TokenProbs, acceptance, block_threshold, excess, residual
from paceline.speculation.commit import FinishLookahead
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree, Proposal
from paceline.speculation.verify import VerifyResult, verify


class Acceptance(Enum):
    """Which draft tokens are accepted."""

    MATCH = "match"  # those that the target itself draws: the seed's plain text
    REJECTION = "rejection"  # as many as the target's distribution allows: another text of the same distribution


class Ahead(Protocol):
    """Where the tokens of one walk end the request (`speculation/commit.py`)."""

    def finishes_with(self, token_id: int) -> bool:
        """Whether the request ends with this token, which follows those asked about before."""
        ...


class Chance(Protocol):
    """The random decisions of one walk; each is asked for once."""

    def accepts(self, threshold: float, depth: int, index: int) -> bool:
        """True with probability `threshold` (always from 1 on), for draft `index` of those after `depth` tokens."""
        ...

    def draw(self, probs: TokenProbs, depth: int) -> int:
        """Draw the token after `depth` tokens."""
        ...


class StepChance:
    """Decisions by the request's noise.

    Keyed by the step as well as by the place in it: block verification lets a later draft decide whether an earlier one is kept, so
    what it used must not come again when the next step draws for the same position.
    """

    def __init__(self, request: Request) -> None:
        self._key = request.seed, request.sample_index, len(request.token_ids)

    def accepts(self, threshold: float, depth: int, index: int) -> bool:
        return step_uniform(*self._key, Purpose.ACCEPT, depth, index) < threshold

    def draw(self, probs: TokenProbs, depth: int) -> int:
        return probs.token_at(step_uniform(*self._key, Purpose.RESIDUAL, depth))


def verify_rejection(tree: DraftTree, logits: FloatArray, request: Request) -> VerifyResult:
    """Walk `tree` with the target's rows, keeping the target's distribution; at temperature 0 the same as `verify`.

    Args:
        tree: rooted at the request's last token. Where it has `draft_probs`, its drafts were drawn from them.
        logits: [N, V] float32, row i belongs to node i; of a drawn chain all rows are read, else only those the walk reaches.
        request: gives processors, seed and position. Not changed.

    Raises:
        PacelineError: as `verify`.
    """
    if request.params.is_greedy:
        return verify(tree, logits, request)

    def target_probs(node: int, path: Sequence[int]) -> TokenProbs:
        return TokenProbs.from_distribution(request.processor.process(logits[node], path))

    return Walk(tree, target_probs, lambda: FinishLookahead(request), StepChance(request)).run()


class Walk:
    """Verification of one tree by rejection sampling, from the root to the first rejected token.

    Args:
        target_probs: (node, tokens from the root to it, root excluded) -> the target's distribution of what follows.
        look_ahead: returns a new look-ahead for the token that finishes the request; nothing after it is kept.
    """

    def __init__(
        self,
        tree: DraftTree,
        target_probs: Callable[[int, Sequence[int]], TokenProbs],
        look_ahead: Callable[[], Ahead],
        chance: Chance,
    ) -> None:
        self._tree, self._target_probs, self._chance = tree, target_probs, chance
        self._look_ahead, self._ahead = look_ahead, look_ahead()
        self._accepted: list[int] = []
        self._token_ids: list[int] = []

    def run(self) -> VerifyResult:
        """Walk to the end."""
        length = self._block_length() if self._tree.proposal is Proposal.SAMPLED else 0
        node = self._keep_block(length) if length else 0
        while node is not None:
            node = self._follow(node)
        return VerifyResult(tuple(self._accepted), tuple(self._token_ids))

    def _follow(self, node: int) -> int | None:
        """Choose the token after `node`; return the accepted child, or None where the walk ends."""
        tree, depth = self._tree, len(self._token_ids)
        try:
            target = self._target_probs(node, self._token_ids)
        except BaseException as error:
            if not self._accepted or is_interrupt(error):
                raise
            self._accepted.pop()  # its token is the last one, and the next step reaches this row first
            return None
        draft = tree.draft_probs.get(node)
        if draft is None:
            token = self._chance.draw(target, depth)
            return self._take(token, tree.child(node, token))
        for index, child in enumerate(tree.children(node)):
            token = tree.token_ids[child]
            if draft is None:  # the residual draft distribution is empty
                break
            if self._chance.accepts(acceptance(target, draft, token), depth, index):
                return self._take(token, child)
            target = residual(target, excess(target, draft))
            draft = draft.without(token)
        return self._take(self._chance.draw(target, depth), None)

    def _keep_block(self, length: int) -> int | None:
        """Keep the longest prefix that is accepted of `length` drawn tokens; returns the node to go on from where that is all of them.

        Source: Sun et al. 2024 (arXiv:2403.10444), algorithm 2. Deviation: a chain ends with the token that ends the request, or where
        its draws end.
        """
        tree = self._tree
        share: float = 1
        for depth in range(length):
            try:
                target = self._target_probs(depth, tree.token_ids[1 : depth + 1])
            except BaseException as error:  # the row may never be needed: verify only the tokens before it
                if depth == 0 or is_interrupt(error):
                    raise
                length = depth
                break
            draft = tree.draft_probs[depth]
            weights = excess(target, draft, share)
            if depth == 0 or self._chance.accepts(block_threshold(share, weights), depth - 1, 0):
                num_kept, after, left = depth, target, weights
            share = min(1, share * acceptance(target, draft, tree.token_ids[depth + 1]))
            if share == 0:  # neither this draft nor a later one can be accepted
                break
        is_whole = self._chance.accepts(share, length - 1, 0)
        node: int | None = 0
        for child in range(1, (length if is_whole else num_kept) + 1):
            node = self._take(tree.token_ids[child], child)
        return node if is_whole else self._take(self._chance.draw(residual(after, left), num_kept), None)

    def _block_length(self) -> int:
        """Drawn tokens of the chain from the root on, up to the one that ends the request."""
        length, ahead = 0, self._look_ahead()
        while length in self._tree.draft_probs:
            length += 1
            if ahead.finishes_with(self._tree.token_ids[length]):
                break
        return length

    def _take(self, token_id: int, child: int | None) -> int | None:
        """Add a token; return `child` if the walk goes on there."""
        self._token_ids.append(token_id)
        if child is None or self._ahead.finishes_with(token_id):
            return None
        self._accepted.append(child)
        return child
