"""What was learned of one drafter: how long its guesses take, and what becomes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.speculation.acceptance import Calibration, Offset, RequestAcceptance, Worth
from paceline.speculation.constrained import SOURCE as FORCED
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.work_times import LinearTime

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
    """

    calibrations: tuple[Calibration, Calibration] = field(default_factory=lambda: (Calibration(), Calibration()))
    times: dict[int, LinearTime] = field(default_factory=dict)
    num_asked: int = 0
    worth: Worth = field(default_factory=Worth)

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
        """Told how long it took. The first time does not count: memory and kernels are made ready for it."""
        self.num_asked += 1
        if self.num_asked > 1:
            self.times.setdefault(num_requests.bit_length(), LinearTime()).observe(1.0, depth, seconds)

    def chance_of(self, request: Request, own: RequestAcceptance) -> Callable[[float], float]:
        """The chance of a guess of a request by the drafter's own probability for it."""
        return _Chance(self.calibration(request), own)

    def reached(self, request: Request, own: RequestAcceptance, tree: DraftTree) -> list[float]:
        """Chance of each node of a request's tree, with all before it."""
        calibration = self.calibration(request)
        depths, reached, last_child = calibration.depths(tree.tree_depth), [1.0], dict[int, float]()
        for node in range(1, len(tree.parents)):
            parent = tree.parents[node]
            if tree.sources[node] == FORCED:
                chance = FORCED_CHANCE
            elif tree.probs is not None:
                chance = own.by_prob.chance(calibration.of_prob(tree.probs[node], is_first=parent not in last_child))
            elif parent in last_child:
                chance = SIBLING_SHARE * last_child[parent]
            else:
                chance = own.by_depth.chance(depths[tree.depths[node] - 1])
            last_child[parent] = chance
            reached.append(reached[parent] * chance)
        return reached

    def learn(self, request: Request, own: RequestAcceptance, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Told what became of a tree."""
        calibration = self.calibration(request)
        calibration.is_known = True
        next_nodes = [*accepted_nodes, -1]
        if request.is_finished:  # where it ended, the guesses behind were not looked at
            next_nodes.pop()
        for node, then in zip([0, *accepted_nodes], next_nodes, strict=False):
            is_first = True
            for child in range(node + 1, len(tree.parents)):
                if tree.parents[child] == node:
                    if tree.sources[child] != FORCED:
                        prob = None if tree.probs is None else tree.probs[child]
                        _learn(own, calibration, tree.depths[child], prob, is_first=is_first, was_kept=child == then)
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
        calibration, chance = self.calibration(request), 1.0
        for index in range(min(len(said), num_kept + 1)):
            was_kept = index < num_kept
            chance *= own.by_depth.chance(calibration.at_depth(index + 1))
            _learn(own, calibration, index + 1, probs[index], is_first=True, was_kept=was_kept)
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


def _learn(own: RequestAcceptance, calibration: Calibration, depth: int, prob: float | None, *, is_first: bool, was_kept: bool) -> None:
    if is_first:
        own.by_depth.add(calibration.at_depth(depth), was_kept=was_kept)
        if prob is not None:
            own.by_prob.add(calibration.of_prob(prob), was_kept=was_kept)
    calibration.add(depth, prob, is_first=is_first, was_kept=was_kept)
