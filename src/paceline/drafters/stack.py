"""Several drafters at once: measured acceptance and cost decide which are asked, and their answers become one tree.

They are asked in the order given. The next one is asked where its guesses are expected to be worth its time, or where those before
have none. How likely an answer is follows from its drafter's own probabilities, which are learned of for each drafter by itself: a long
copy that is nearly sure keeps a draft model from being asked, a short one does not. Answers are merged token by token, the likely ones
first, within the row budget; the acceptance of every answer is measured, whether or not it had a place in the tree.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from paceline.errors import as_exception, is_interrupt
from paceline.speculation.acceptance import Calibration, Offset
from paceline.speculation.backoff import Backoff
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Guess, grow_tree

log = logging.getLogger(__name__)

FIRST_RATE = 0.8  # acceptance of a guessed token before any was measured: the earlier drafter is trusted
FIRST_WEIGHT = 8.0  # weight of that first rate, in tokens
MEMORY = 64.0  # tokens a measured rate looks back on
SIBLING_SHARE = 0.5  # probability of a sibling over that of the one before it in the same drafter's tree
PROBE_INTERVAL = 32  # steps after which a drafter is asked again, whatever was measured before
CHEAP_SHARE = 0.01  # of a target pass: drafters that take less are asked every time

Places = tuple[tuple[int, int], ...]
"""Where a node of the merged tree stands in the members' trees: (member, node)."""


@dataclass(slots=True)
class _Acceptance:
    """How often a drafter's guesses are accepted; later tokens weigh more.

    Attributes:
        examined, accepted: guessed tokens, older ones counting less.
        has_read: whether the drafter was asked before; its first answer also takes reading the prompt.
        num_skipped: steps since it was asked.
        offset: by how much one request's guesses are likelier than others' of the same probability.
    """

    examined: float = FIRST_WEIGHT
    accepted: float = FIRST_WEIGHT * FIRST_RATE
    has_read: bool = False
    num_skipped: int = 0
    offset: Offset = field(default_factory=Offset)

    @property
    def rate(self) -> float:
        return self.accepted / self.examined

    def add(self, num_examined: int, num_accepted: int) -> None:
        keep = max(0.0, 1.0 - num_examined / MEMORY)
        self.examined = self.examined * keep + num_examined
        self.accepted = self.accepted * keep + num_accepted

    def expected(self, depth: int) -> float:
        """Accepted tokens of a chain of `depth` guesses."""
        return sum(self.rate**position for position in range(1, depth + 1))


@dataclass(slots=True)
class _Asked:
    """One request in one step: what was answered, and what that took.

    Attributes:
        trees: by member.
        chances: of their nodes, by member: that one is accepted if its parent is.
        num_tokens: tokens of the request when it was asked.
        gain: expected accepted tokens of the best answer.
    """

    budget: DraftBudget
    num_tokens: int
    trees: dict[int, DraftTree] = field(default_factory=dict)
    chances: dict[int, list[float]] = field(default_factory=dict)
    gain: float = 0.0
    draft_s: float = 0.0


class StackDrafter(Drafter):
    """Guesses with several drafters; one without an answer, or that fails, does no harm where another has an answer.

    Args:
        drafters: in the order in which they are asked; cheap ones first.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self.cache_bytes_per_token = sum(drafter.cache_bytes_per_token for drafter in drafters)
        self.notices = [notice for drafter in drafters for notice in drafter.notices]
        self.reads_predictions = any(drafter.reads_predictions for drafter in drafters)
        self.stops_early = any(drafter.stops_early for drafter in drafters)
        self.needs = DrafterNeeds(
            hidden_states=any(drafter.needs.hidden_states for drafter in drafters),
            layers=tuple(sorted({layer for drafter in drafters for layer in drafter.needs.layers})),
        )
        self._calibrations = [(Calibration(), Calibration()) for _ in drafters]  # at temperature 0, and of others
        self._lately = [_Acceptance() for _ in drafters]  # over all requests: new ones start from it
        self._acceptance = RequestState[list[_Acceptance]]()
        self._asked = RequestState[_Asked]()
        self._draft_s = [0.0 for _ in drafters]  # of one call to `propose`
        self._timed_depth: int | None = None  # of guesses that were not copied, in the last proposal; None = nobody was asked for some
        self._pass_s = 0.0  # from the end of a proposal until its rows are observed
        self._proposed_at: float | None = None
        self._has_warned = [False for _ in drafters]
        self._backoffs = [Backoff() for _ in drafters]
        self._last_errors: dict[int, Exception] = {}

    @property
    def members(self) -> Sequence[Drafter]:
        """Those it asks."""
        return self._drafters

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        asked = [_Asked(budget, len(request.token_ids)) for request, budget in zip(requests, budgets, strict=True)]
        failed: dict[int, Exception] = {}
        self._timed_depth = None
        for member in range(len(self._drafters)):
            if not self._backoffs[member].is_due():
                failed[member] = self._last_errors[member]
                continue
            indices = [i for i, one in enumerate(asked) if self._is_worth_asking(member, requests[i], one)]
            if indices and (error := self._ask(member, [requests[i] for i in indices], [asked[i] for i in indices])):
                failed[member] = self._last_errors[member] = error
        if failed and not any(one.trees for one in asked):
            raise next(iter(failed.values()))  # no other has an answer: the engine counts the step as failed
        for member, error in failed.items():
            self._warn(member, error)
        trees = [self._merge(request, one) for request, one in zip(requests, asked, strict=True)]
        for request, one in zip(requests, asked, strict=True):
            self._asked[request] = one
        self._proposed_at = time.perf_counter()
        return trees

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        if self._proposed_at is not None:
            self._pass_s = _smooth(self._pass_s, time.perf_counter() - self._proposed_at)
            self._proposed_at = None
        for one in rows:
            self._measure(one.request)
        _tell_all([partial(drafter.observe, [self._for_member(drafter, one) for one in rows]) for drafter in self._drafters])

    def reading_s(self, request: Request) -> float:
        return sum(drafter.reading_s(request) for drafter in self._drafters)

    def time_guess(self) -> float:
        return max(drafter.time_guess() for drafter in self._drafters)

    def can_guess(self, request: Request) -> bool:
        return any(drafter.can_guess(request) for drafter in self._drafters)

    def can_copy(self, request: Request) -> bool:
        return any(drafter.is_copier and drafter.can_guess(request) for drafter in self._drafters)

    def timed_depth(self, deepest: int) -> int | None:
        return deepest if all(drafter.is_copier for drafter in self._drafters) else self._timed_depth

    def may_guess(self, request: Request, max_reading_s: float) -> bool:
        return any(drafter.may_guess(request, max_reading_s) for drafter in self._drafters)

    def preempt(self, request: Request) -> None:
        self._asked.pop(request)
        _tell_all([partial(drafter.preempt, request) for drafter in self._drafters])

    def release(self, request: Request) -> None:
        _tell_all([partial(drafter.release, request) for drafter in self._drafters])

    def describe(self) -> str:
        return " + ".join(drafter.describe() for drafter in self._drafters)

    def _rates(self, request: Request) -> list[_Acceptance]:
        """This request's acceptance by member; a new request begins with the rates of recent ones, weighted as the first rate is."""
        rates = self._acceptance.get(request)
        if rates is None:
            rates = [_Acceptance(FIRST_WEIGHT, FIRST_WEIGHT * lately.rate) for lately in self._lately]
            self._acceptance[request] = rates
        return rates

    def _is_worth_asking(self, member: int, request: Request, one: _Asked) -> bool:
        """Whether tokens per second are expected to rise by what this member may add; one that costs next to nothing always is."""
        drafter = self._drafters[member]
        if not drafter.may_guess(request, one.budget.max_reading_s) or (one.budget.copies_only and not drafter.is_copier):
            return False
        depth = min(one.budget.max_depth, one.budget.row_budget - 1)
        draft_s = self._draft_s[member]
        if not one.trees or 0.0 < draft_s < CHEAP_SHARE * self._pass_s:
            return True
        acceptance = self._rates(request)[member]
        gain = max(one.gain, acceptance.expected(depth))
        if self._pass_s == 0.0:  # no target pass was timed yet
            is_worth = gain > one.gain
        else:
            spent_s = self._pass_s + one.draft_s
            is_worth = (1.0 + gain) * spent_s > (1.0 + one.gain) * (spent_s + draft_s)
        if is_worth:
            return True
        acceptance.num_skipped += 1
        return acceptance.num_skipped >= PROBE_INTERVAL

    def _ask(self, member: int, requests: Sequence[Request], asked: Sequence[_Asked]) -> Exception | None:
        """Collect one member's answers; what it raises is returned, so that the others' answers stay."""
        start = time.perf_counter()
        try:
            budgets = [self._budget_of(member, request, one.budget) for request, one in zip(requests, asked, strict=True)]
            answers: list[tuple[Request, _Asked, DraftTree | None, list[float]]] = []
            for request, one, tree in zip(requests, asked, self._drafters[member].propose(requests, budgets), strict=True):
                if tree is not None:
                    tree.check()
                answers.append((request, one, tree, [] if tree is None else self._chances(member, request, tree)))
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._backoffs[member].note(failed=True)
            return as_exception(error)
        self._backoffs[member].note(failed=False)
        seconds = time.perf_counter() - start
        if not self._drafters[member].is_copier:
            self._timed_depth = max([self._timed_depth or 0, *[tree.tree_depth for _, _, tree, _ in answers if tree is not None]])
        if all(self._rates(request)[member].has_read for request in requests):
            self._draft_s[member] = _smooth(self._draft_s[member], seconds)
        for request, one, tree, chances in answers:
            acceptance = self._rates(request)[member]
            acceptance.has_read, acceptance.num_skipped = True, 0
            one.draft_s += seconds
            if tree is not None and tree.num_draft_tokens > 0:
                one.trees[member], one.chances[member] = tree, chances
                one.gain = max(one.gain, _expected(tree, chances, one.budget.max_depth))
        return None

    def _budget_of(self, member: int, request: Request, budget: DraftBudget) -> DraftBudget:
        """The budget with the chance of a guess by this member's own probability."""
        if budget.least_reach <= 0.0:
            return budget
        calibration, offset = self._calibration(member, request), self._rates(request)[member].offset
        return replace(budget, chance_of=lambda prob: budget.chance(offset.chance(calibration.of_prob(prob))))

    def _calibration(self, member: int, request: Request) -> Calibration:
        return self._calibrations[member][not request.params.is_greedy]

    def _chances(self, member: int, request: Request, tree: DraftTree) -> list[float]:
        """[N] of each node that it is accepted if its parent is: by its probability, or by how often the member is right."""
        acceptance, calibration = self._rates(request)[member], self._calibration(member, request)
        chances, last = [1.0], dict[int, float]()
        for node in range(1, len(tree.parents)):
            parent = tree.parents[node]
            if tree.probs is not None and not tree.draft_probs:  # of what was drawn for rejection no choice may depend
                chance = acceptance.offset.chance(calibration.of_prob(tree.probs[node], is_first=parent not in last))
            else:
                chance = last[parent] * SIBLING_SHARE if parent in last else acceptance.rate
            last[parent] = chance
            chances.append(chance)
        return chances

    def _merge(self, request: Request, one: _Asked) -> DraftTree | None:
        """All answers as one tree: siblings with the same token are one node, the likely ones come first."""
        if len(one.trees) <= 1:
            return next((_with_chances(tree, one.chances[member]) for member, tree in one.trees.items()), None)
        children = {member: _children(tree) for member, tree in one.trees.items()}

        def expand(places: Places) -> Sequence[Guess[Places]]:
            found: dict[int, Guess[Places]] = {}
            for member, node in places:
                tree = one.trees[member]
                for child in children[member][node]:
                    token, prob = tree.token_ids[child], one.chances[member][child]
                    _, best, source, others = found.get(token, (token, -1.0, "", ()))
                    found[token] = (token, max(best, prob), tree.sources[child] if prob > best else source, (*others, (member, child)))
            return list(found.values())

        return grow_tree(request.token_ids[-1], one.budget, tuple((member, 0) for member in one.trees), expand)

    def _measure(self, request: Request) -> None:
        """Compare all members' guesses with the emitted tokens; guesses beyond these are not counted."""
        one = self._asked.pop(request)
        if one is None:
            return
        emitted = request.token_ids[one.num_tokens :]
        for member, tree in one.trees.items():
            node, num_examined, num_accepted = 0, 0, 0
            for token in emitted:
                if not tree.children(node):
                    break
                num_examined += 1
                child = tree.child(node, token)
                if tree.probs is not None:
                    self._learn(member, request, tree, node, child)
                if child is None:
                    break
                node, num_accepted = child, num_accepted + 1
            for acceptance in (self._rates(request)[member], self._lately[member]):
                acceptance.add(num_examined, num_accepted)

    def _learn(self, member: int, request: Request, tree: DraftTree, node: int, kept: int | None) -> None:
        """Learn of the guesses behind a node that was reached; `kept` is the accepted one."""
        calibration, is_first = self._calibration(member, request), True
        for child in tree.children(node):
            prob = tree.probs[child] if tree.probs is not None else 0.0
            if is_first:
                self._rates(request)[member].offset.add(calibration.of_prob(prob), was_kept=child == kept)
            calibration.add(tree.depths[child], prob, is_first=is_first, was_kept=child == kept)
            is_first = False

    def _for_member(self, drafter: Drafter, rows: CommittedRows) -> CommittedRows:
        """The rows with only the boundaries this member asked for, in its order; the target collects those of all members."""
        collected = rows.collected_hidden_states
        if collected is None or drafter.needs.layers == self.needs.layers:
            return rows
        wanted = [self.needs.layers.index(layer) for layer in drafter.needs.layers]
        return replace(rows, collected_hidden_states=collected[wanted] if wanted else None)

    def _warn(self, member: int, error: Exception) -> None:
        if not self._has_warned[member]:
            name = self._drafters[member].name
            log.warning("the drafter failed (%s, %s: %s); the others guess without it", name, type(error).__name__, error)
            self._has_warned[member] = True


def _expected(tree: DraftTree, chances: Sequence[float], max_depth: int) -> float:
    """Accepted tokens to be expected of a tree."""
    reached = [1.0]
    for node in range(1, len(tree.parents)):
        reached.append(reached[tree.parents[node]] * chances[node])
    return sum([chance for chance, depth in zip(reached, tree.depths, strict=True) if 0 < depth <= max_depth])


def _with_chances(tree: DraftTree, chances: Sequence[float]) -> DraftTree:
    """The tree with these as its probabilities; not one that was drawn, which stays as it is."""
    return tree if tree.draft_probs or tree.probs is None else replace(tree, probs=list(chances))


def _children(tree: DraftTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.parents]
    for node, parent in enumerate(tree.parents):
        if node:
            children[parent].append(node)
    return children


def _smooth(before: float, seconds: float) -> float:
    """A running average in which one slow call, such as a first one that reads the prompt, soon fades."""
    return seconds if before == 0.0 else 0.75 * before + 0.25 * min(seconds, 4.0 * before)


def _tell_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, then raise the first error: one failure must not skip the others."""
    failure: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure
