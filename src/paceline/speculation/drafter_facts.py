"""What was learned of one drafter: how long its guesses take, and what becomes of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.speculation.acceptance import Calibration, Offset, RequestAcceptance, Worth
from paceline.speculation.constrained import SOURCE as FORCED
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.work_times import LinearTime

TIMED = 4  # of so many proposals one is timed, once so many were
LONGEST_REST = 15  # steps between two shadows of a request, at most
FORCED_CHANCE = 0.98  # of a token that a grammar forces: tokenizers may spell it in another way
UNLIKELY = 0.05  # chance of a whole shadow, all of which was right, from which on what was learned of its request is out of date
SIBLING_SHARE = 0.3  # chance of a sibling over that of the guess before it, where its drafter says nothing


@dataclass(slots=True)
class DrafterFacts:
    """What was learned of one drafter.

    Attributes:
        calibrations: of its guesses at temperature 0, and of others: the same probability means another thing there.
        times: by requests it guesses for at once (powers of 2), seconds of guessing by depth.
        num_asked: proposals so far.
        worth: of asking it for lone requests, where that takes next to no time.
        num_unable: questions at the ends of requests in which it had nothing to guess from, since a guess was kept, at most 32; the mean
            of the last requests.
    """

    calibrations: tuple[Calibration, Calibration] = field(default_factory=lambda: (Calibration(), Calibration()))
    times: dict[int, LinearTime] = field(default_factory=dict)
    num_asked: int = 0
    worth: Worth = field(default_factory=Worth)
    num_unable: int = 0

    def calibration(self, request: Request) -> Calibration:
        """The one for guesses of this request."""
        return self.calibrations[not request.params.is_greedy]

    def seconds(self, num_requests: int, depth: float) -> float:
        """That guessing will take; 0 where nothing is known."""
        fixed_s, deeper_s = self.parts(num_requests)
        return fixed_s + deeper_s * depth

    def parts(self, num_requests: int) -> tuple[float, float]:
        """The same: seconds in any case, and for each token of the deepest guess."""
        if num_requests == 0 or not self.times:
            return 0.0, 0.0
        size = num_requests.bit_length()
        known = self.times.get(size) or self.times[min(self.times, key=lambda one: abs(one - size))]
        return known.parts

    def know_time(self, seconds: float) -> None:
        """Told before its first guess what each takes."""
        self.times[1] = LinearTime.of_each(seconds)

    def observe(self, num_requests: int, depth: int, seconds: float) -> None:
        """Told how long it took, whereof some is learned. The first time does not count: memory and kernels are made ready for it."""
        self.num_asked += 1
        if 1 < self.num_asked <= TIMED * TIMED or self.num_asked % TIMED == 0:
            self.times.setdefault(num_requests.bit_length(), LinearTime()).observe(1.0, depth, seconds)

    def chance_of(self, request: Request, own: RequestAcceptance) -> Callable[[float], float]:
        """The chance of a guess of a request by the drafter's own probability for it."""
        return _Chance(self.calibration(request), own)

    def reached(self, request: Request, own: RequestAcceptance, tree: DraftTree) -> list[float]:
        """Chance of each node of a request's tree, with all before it."""
        calibration, probs = self.calibration(request), tree.probs
        if _is_own_chain(request, tree):
            if probs is None:
                return [1.0, *own.by_depth.paths(calibration.depths(tree.tree_depth), 0.0, 0.0)]
            return [1.0, *own.by_prob.paths([calibration.of_prob(prob) for prob in probs[1:]], 0.0, 0.0)]
        depths, reached, last_child = calibration.depths(tree.tree_depth), [1.0], dict[int, float]()
        for node, (parent, depth, source) in enumerate(zip(tree.parents, tree.depths, tree.sources, strict=True)):
            if node == 0:
                continue
            if source == FORCED:
                chance = FORCED_CHANCE
            elif probs is not None:
                chance = own.by_prob.chance(calibration.of_prob(probs[node], is_first=parent not in last_child))
            elif parent in last_child:
                chance = SIBLING_SHARE * last_child[parent]
            else:
                chance = own.by_depth.chance(depths[depth - 1])
            last_child[parent] = chance
            reached.append(reached[parent] * chance)
        return reached

    def learn(self, request: Request, own: RequestAcceptance, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Told what became of a tree."""
        calibration = self.calibration(request)
        calibration.is_known = True
        if _is_own_chain(request, tree):  # where it ended, the guesses behind were not looked at
            num_kept = len(accepted_nodes)
            count = num_kept if request.is_finished else min(tree.num_draft_tokens, num_kept + 1)
            _learn_chain(own, calibration, None if tree.probs is None else tree.probs[1:], count, num_kept)
            return
        depths, next_nodes = calibration.depths(tree.tree_depth), [*accepted_nodes, -1]
        if request.is_finished:  # where it ended, the guesses behind were not looked at
            next_nodes.pop()
        for node, then in zip([0, *accepted_nodes], next_nodes, strict=False):
            is_first = True
            for child in tree.children(node):
                if tree.sources[child] != FORCED:
                    prob, depth, was_kept = None if tree.probs is None else tree.probs[child], tree.depths[child], child == then
                    if is_first:
                        own.by_depth.add(depths[depth - 1], was_kept=was_kept)
                        if prob is not None:
                            own.by_prob.add(calibration.of_prob(prob), was_kept=was_kept)
                    calibration.add(depth, prob, is_first=is_first, was_kept=was_kept)
                is_first = False

    def read_shadow(self, request: Request, own: RequestAcceptance) -> bool:
        """Compare what would have been guessed with what was said; returns whether that is done."""
        if own.shadow is None:
            return False
        start, guessed, probs = own.shadow
        said = request.token_ids[start : start + len(guessed)]
        num_kept = next((index for index, token in enumerate(said) if token != guessed[index]), len(said))
        if num_kept == len(said) < len(guessed) and not request.is_finished:
            return False
        calibration, count = self.calibration(request), min(len(said), num_kept + 1)
        chance = math.prod(own.by_depth.chance(at_depth) for at_depth in calibration.depths(count))
        _learn_chain(own, calibration, probs, count, num_kept)
        own.end_shadow(LONGEST_REST, was_right=num_kept > 0, num_since=len(request.token_ids) - start - len(guessed))
        if num_kept == len(guessed) > 1:
            own.worth.rest = 0  # it was judged by guesses that should have been sent
            if chance < UNLIKELY:
                own.by_depth, own.by_prob = Offset(), Offset()
        return True


@dataclass(frozen=True, slots=True)
class _Chance:
    """The calibrated chance of a guess of one request, by its drafter's own probability."""

    calibration: Calibration
    own: RequestAcceptance

    def __call__(self, prob: float) -> float:
        return self.own.by_prob.chance(self.calibration.of_prob(prob))


def _is_own_chain(request: Request, tree: DraftTree) -> bool:
    """Whether a tree is a chain, as nearly always, of which a grammar forces nothing."""
    return isinstance(tree.parents, range) and request.processor.constraint is None


def _learn_chain(own: RequestAcceptance, calibration: Calibration, probs: Sequence[float] | None, count: int, num_kept: int) -> None:
    """Learn of the first `count` guesses of a chain, which were reached; the first `num_kept` were kept."""
    own.by_depth.add_chain(calibration.depths(count), num_kept)
    if probs is not None:
        own.by_prob.add_chain([calibration.of_prob(prob) for prob in probs[:count]], num_kept)
    calibration.add_chain(probs, count, num_kept)
