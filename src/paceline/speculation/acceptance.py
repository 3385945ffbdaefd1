"""How likely a guess is to be kept: learned for each drafter over all requests, and adjusted to each request as it goes on.

A drafter's own probabilities are not believed but calibrated: what counts is how often guesses of about that probability were kept. Where
it gives none, its depth in the draft decides. A request is easier or harder than others by an offset of log-odds, learned from its own
guesses: one step of Newton's method for a logistic regression with one weight, with older guesses forgotten.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

HOPED = 0.6  # chance of a guess before any was seen
_FIRST_WEIGHT, _DEEPER_WEIGHT = 4.0, 12.0  # of what is assumed of first guesses, in guesses, and of deeper ones
_PROB_WEIGHT = 6.0  # and of those of a probability
_MEMORY = 512.0  # guesses a chance of all requests looks back on
_OWN_PRIOR, _OWN_MEMORY = 12.0, 64.0  # the same of one request's offset
_LIKELY, _LIKELY_PRIOR = 0.75, 36.0  # chance above which one wrong guess says less, and that prior for it
_SURPRISE = 0.06  # chance below which what happened makes what was learned doubtful
_NEWTON = 5.0  # 1 / (p (1 - p)) of a chance neither small nor great
_MOST_OFFSET = 6.0
_BENEFIT = 1.0  # of the doubt, in standard deviations of the log-odds: what is judged too early is not tried again for long
_LEAST, _MOST = 0.004, 0.995
_MOST_ODDS = _MOST / (1.0 - _MOST)
_WORTH_KNOWN, _WORTH_MEMORY, _LONGEST_IDLE = 8, 16, 31  # questions to a drafter, and steps without one
_BORDERS = [1.0 / (1.0 + math.exp(5.0 - 0.5 * index)) for index in range(1, 24)]  # between probabilities that are learned of together


@dataclass(slots=True)
class _Share:
    """Guesses of one kind, older ones counting less."""

    tried: float = 0.0
    kept: float = 0.0

    def add(self, *, was_kept: bool) -> None:
        if self.tried >= _MEMORY:
            self.tried /= 2.0
            self.kept /= 2.0
        self.tried += 1.0
        self.kept += was_kept

    def of(self, assumed: float, weight: float) -> float:
        """The share of them that was kept; what is assumed, as of `weight` guesses, where few were seen."""
        return (self.kept + weight * assumed) / (self.tried + weight)


def _shares() -> list[_Share]:
    """One for each range of probabilities."""
    return [_Share() for _ in range(len(_BORDERS) + 1)]


@dataclass(slots=True)
class Calibration:
    """Chances of one drafter's guesses, given that those before them are right, over all requests.

    Attributes:
        is_known: whether any became of them.
        gives_probs: whether its guesses come with probabilities.
    """

    is_known: bool = False
    gives_probs: bool = False
    _by_depth: list[_Share] = field(default_factory=list)
    _by_prob: tuple[list[_Share], list[_Share]] = field(default_factory=lambda: (_shares(), _shares()))  # of later siblings, of first ones
    _chances: list[float] = field(default_factory=list)  # at depths 1 …, as far as they were asked for since they changed

    def at_depth(self, depth: int) -> float:
        """Chance of the first guess at a depth, the root's child being at 1: where little is known, that of the one before it."""
        return self._up_to(depth)[depth - 1]

    @property
    def doubt(self) -> float:
        """Log-odds by which all chances may well be greater than they seem: less and less the more guesses were seen."""
        if not self._by_depth:
            return 0.0
        first = self._by_depth[0]
        chance = min(max(first.of(HOPED, _FIRST_WEIGHT), _LEAST), _MOST)
        return _BENEFIT / math.sqrt((first.tried + _FIRST_WEIGHT) * chance * (1.0 - chance))

    def depths(self, count: int) -> list[float]:
        """Chances at depths 1 … count."""
        return self._up_to(count)[:count]

    def depths_together(self, count: int) -> list[float]:
        """The same to plan for a batch, in which all guess as deep as the deepest: beyond the first, none is likelier than all these are in
        the mean. Of single depths few are seen, and luck at one would count for all behind it."""
        deeper = self._by_depth[1:]
        tried = sum([share.tried for share in deeper]) + _DEEPER_WEIGHT
        mean = (sum([share.kept for share in deeper]) + _DEEPER_WEIGHT * self.at_depth(1)) / tried
        return [min(chance, mean) if index else chance for index, chance in enumerate(self.depths(count))]

    def _up_to(self, depth: int) -> list[float]:
        """The chances at depths 1 … depth, and maybe more."""
        known, shares = self._chances, self._by_depth
        while len(known) < depth:
            chance, index = known[-1] if known else HOPED, len(known)
            weight = _DEEPER_WEIGHT if index else _FIRST_WEIGHT
            known.append(min(shares[index].of(chance, weight), _MOST) if index < len(shares) else chance)
        return known

    def of_prob(self, prob: float, *, is_first: bool = True) -> float:
        """Chance of a guess to which its drafter gives this probability.

        Args:
            is_first: whether it is the first of its siblings.
        """
        assumed = prob if _LEAST <= prob <= _MOST else _clipped(prob)
        share = self._by_prob[is_first][bisect_right(_BORDERS, prob)]
        return share.of(assumed, _PROB_WEIGHT) if share.tried else assumed

    def add(self, depth: int, prob: float | None, *, is_first: bool, was_kept: bool) -> None:
        """A guess whose place was reached was kept or not."""
        if is_first:
            while len(self._by_depth) < depth:
                self._by_depth.append(_Share())
            self._by_depth[depth - 1].add(was_kept=was_kept)
            del self._chances[depth - 1 :]
        if prob is not None:
            self._add_prob(prob, is_first=is_first, was_kept=was_kept)

    def add_chain(self, probs: Sequence[float] | None, count: int, num_kept: int) -> None:
        """`add` of the first `count` guesses of a chain, which were reached; the first `num_kept` were kept."""
        shares = self._by_depth
        while len(shares) < count:
            shares.append(_Share())
        for index in range(count):
            shares[index].add(was_kept=index < num_kept)
            if probs is not None:
                self._add_prob(probs[index], is_first=True, was_kept=index < num_kept)
        self._chances.clear()

    def _add_prob(self, prob: float, *, is_first: bool, was_kept: bool) -> None:
        self.gives_probs = True
        self._by_prob[is_first][bisect_right(_BORDERS, prob)].add(was_kept=was_kept)


@dataclass(slots=True)
class Offset:
    """By how much the log-odds of one request's guesses differ from those over all requests.

    Attributes:
        value: 0 = not at all.
        num_seen: guesses it was learned from, at most as many as count.
    """

    value: float = 0.0
    num_seen: float = 0.0

    def chance(self, of_all: float, more: float = 0.0) -> float:
        """The chance of a guess that has this one over all requests; `more` log-odds are added to it."""
        if not _LEAST <= of_all <= _MOST:
            of_all = _clipped(of_all)
        log_odds = self.value + more
        if log_odds == 0.0:
            return of_all
        odds = of_all / (1.0 - of_all) * math.exp(log_odds)
        chance = odds / (1.0 + odds)
        return chance if _LEAST <= chance <= _MOST else _clipped(chance)

    def paths(self, of_all: Sequence[float], more: float, least: float) -> list[float]:
        """Chance that a guess and all before it are kept, by depth, of guesses that have these chances over all requests: what one more
        row is expected to bring, in tokens. Those less likely than `least` are left out."""
        factor, reached, gains = math.exp(self.value + more), 1.0, []
        for chance in of_all:
            odds = factor * chance / (1.0 - chance)
            reached *= odds / (1.0 + odds) if odds < _MOST_ODDS else _MOST
            if reached < least:
                break
            gains.append(reached)
        return gains

    def add(self, of_all: float, *, was_kept: bool) -> None:
        """A guess that has this chance over all requests was kept or not."""
        self.add_chain((of_all,), int(was_kept))

    def add_chain(self, of_all: Sequence[float], num_kept: int) -> None:
        """`add` of guesses one behind the other, the first `num_kept` of which were kept."""
        value, num_seen = self.value, self.num_seen
        for index, given in enumerate(of_all):
            before = given if _LEAST <= given <= _MOST else _clipped(given)
            odds = before / (1.0 - before) * math.exp(value)
            chance = odds / (1.0 + odds)
            was_kept, prior = index < num_kept, _OWN_PRIOR
            if (chance if was_kept else 1.0 - chance) < _SURPRISE:
                num_seen = 0.0  # as `doubt`
            elif chance > _LIKELY:
                prior = _LIKELY_PRIOR
            if num_seen < _OWN_MEMORY:
                num_seen += 1.0
            value += _NEWTON / (prior + num_seen) * (was_kept - chance)
            if not -_MOST_OFFSET <= value <= _MOST_OFFSET:
                value = math.copysign(_MOST_OFFSET, value)
        self.value, self.num_seen = value, num_seen

    def doubt(self) -> None:
        """What was learned may be out of date: the next guesses weigh more."""
        self.num_seen = 0.0


@dataclass(slots=True)
class Worth:
    """What it is worth to ask a drafter, in seconds saved by each question: what it takes is the same, what it brings is not.

    Attributes:
        num_asked: questions so far.
        rest: steps that the request rested last, of a new one half of what it is to rest first; 0 = it does not.
    """

    num_asked: int = 0
    rest: int = 0
    _saved_s: float = 0.0

    def begun(self) -> "Worth":
        """That of a new request, of which nothing is known but this of others: it is judged sooner; at once where they lost by it, and then
        it rests half as long as they did."""
        if self._saved_s >= 0.0:
            return Worth(min(self.num_asked, _WORTH_KNOWN // 2), 0, self._saved_s)
        return Worth(min(self.num_asked, _WORTH_KNOWN - 1), max(1, self.rest // 4), self._saved_s)

    def add(self, saved_s: float) -> int:
        """A question saved so many seconds; returns the steps to rest: more and more while it is not worth asking, fewer once one was."""
        self.num_asked += 1
        self._saved_s += (saved_s - self._saved_s) / min(self.num_asked, _WORTH_MEMORY)
        is_worth_it = self.num_asked < _WORTH_KNOWN or self._saved_s >= 0.0
        self.rest = 0 if is_worth_it else self.rest // 2 if saved_s > 0.0 else min(_LONGEST_IDLE, 2 * self.rest + 1)
        return self.rest


@dataclass(slots=True)
class RequestAcceptance:
    """How much easier or harder one request is to guess than others, for the drafter that guesses for it.

    Attributes:
        drafter: its name.
        copies: whether it copies, or one that it asks does.
        by_depth: of guesses of which nothing but the depth is known, so of all that are still to be made.
        by_prob: of guesses with a probability. They need not agree: where hard passages come with small probabilities, those are right.
        num_plain: steps without drafts since drafting stopped to pay.
        shadow: guesses that were not sent along: tokens of the text when they were made, the path of first guesses, its probabilities.
        num_resting: steps until the next of them.
        worth: what asking the drafter was worth lately, where that takes next to no time.
        num_idle: steps until the request is thought of again.
        num_unable: questions in which its drafter had nothing to guess from since a guess was kept, at first those of others.
        is_unable: whether it rests for that.
        is_cheap: whether asking its drafter took next to no time when that was last judged.
        denied: steps that it rested last because drafting was not worth it, 0 = it was.
    """

    drafter: str = ""
    copies: bool = False
    by_depth: Offset = field(default_factory=Offset)
    by_prob: Offset = field(default_factory=Offset)
    num_plain: int = 0
    shadow: tuple[int, list[int], list[float] | None] | None = None
    num_resting: int = 0
    worth: Worth = field(default_factory=Worth)
    num_idle: int = 0
    num_unable: int = 0
    is_unable: bool = False
    is_cheap: bool = False
    denied: int = 0
    _rest: int = 0

    def until_shadow(self) -> int:
        """Steps until guesses may be of use again, which the request may rest: those of a rest begin to count when they are over."""
        if self.shadow is not None:
            return max(0, len(self.shadow[1]) - 1)
        resting, self.num_resting = max(0, self.num_resting), 0
        return resting

    @property
    def wants_shadow(self) -> bool:
        """Whether guesses that are not sent along are of use now; asked once a step."""
        if self.shadow is not None:
            return False
        self.num_resting -= 1
        return self.num_resting < 0

    def end_shadow(self, longest_rest: int, *, was_right: bool, num_since: int = 0) -> None:
        """A shadow was compared with the text; after wrong ones there is a rest, each time a longer one.

        Args:
            num_since: tokens said since it ended, which is then some way off.
        """
        self.shadow = None
        self._rest = 0 if was_right else min(longest_rest, 2 * self._rest + 1)
        self.num_resting = max(0, self._rest - max(0, num_since))


def match_confidence(length: int, count: int) -> list[float]:
    """A measure of confidence for `count` guesses copied from where the last `length` tokens occurred: it grows with what agreed."""
    return [1.0 - 1.0 / (2.0 + one) for one in range(length, length + count)]  # never below an even chance


def expected_accepted(chance: float, depth: float) -> float:
    """Accepted tokens to be expected of a chain of `depth`, each accepted with this chance if those before it were."""
    return depth if chance == 1.0 else chance * (1.0 - chance**depth) / (1.0 - chance)


def _clipped(chance: float) -> float:
    """A chance that is neither taken for certain nor for impossible."""
    return _LEAST if chance < _LEAST else min(chance, _MOST)
