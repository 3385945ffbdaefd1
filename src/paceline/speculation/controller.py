"""How much to draft where speed counts: in each step as much as brings most expected tokens a second, nothing included.

What is expected of guesses is learned from those before (`acceptance.py`), what passes cost is measured (`runtimes/pass_costs.py`), as is
what guessing and the work around a pass take; `row_choice.py` weighs them. Nothing here knows a token from another.

Where drafting does not pay, a drafter that takes next to no time goes on guessing now and then, and its guesses are compared with what the
target says (a shadow: it costs no row). Of one that takes time a share of all time is spent on probes of two tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.runtimes.pass_costs import PassTable
from paceline.speculation.batch_rest import steps_until
from paceline.speculation.cut import can_cut, cut
from paceline.speculation.draft_learning import NOTED, DraftLearning
from paceline.speculation.drafter import Drafter
from paceline.speculation.pass_work import PassWork
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.row_choice import Choice, choose_rows, worth_keeping, worth_keeping_together
from paceline.speculation.stats import PlainReason

START_GAIN = 0.05  # expected gain from which on drafting begins, so that it does not come and go
STAY_GAIN = 0.02  # and from which on it goes on: what is expected of the best of several guesses is a little too much
CHEAP_SHARE = 0.05  # of a plain pass: a drafter that takes less is asked whatever is expected, and its guesses are weighed
LEAST_CHANCE = 0.02  # of a guess with all before it: no row is cheap enough for less
PROBE_SHARE = 0.01  # of all time: what probes may cost where drafting does not pay
SHARE_TOGETHER = 0.005  # the same in batches, where one request's probe delays all
MOST_CREDITED, CREDITED_TOGETHER = 32, 64  # steps for which is saved up at a time, and in batches, which rest longer
PROBE_TOKENS = 2
FIRST_TOKENS, FIRST_ROWS = 4, 16  # guessed of a request and in a pass while nothing is known of a drafter
CLEAR_GAIN, CLEAR_INTERVALS = 1.25, 4  # expected speedup above which plain passes are run so many times more seldom to compare with
DENIED_IDLE, MOST_DENIED = 3, 7  # steps that a request rests for which drafting was not worth it: at first, and where it never is
COMPARE_INTERVAL = 16  # steps from one such pass to the next, until enough are known


class DraftController(DraftLearning):
    """Chooses how much to draft, step by step.

    Args:
        num_draft_tokens: the deepest draft.
        row_budget: rows of the target pass a tree may cost, root included; None = a chain's.
        table: what passes cost.
    """

    def __init__(self, num_draft_tokens: int, table: PassTable, *, row_budget: int | None = None) -> None:
        super().__init__(num_draft_tokens, table, row_budget=row_budget)
        self._rate = 0.0  # tokens a second that time is worth
        self._credited_at = 0  # the step up to which was saved up for probes
        self._num_since_compared = 0

    def plan(self, batch: Sequence[RequestRows], drafting: Sequence[tuple[RequestRows, Drafter]], max_rows: int | None) -> None:
        self._choice, self._probed, self._asked, self._asks_together = None, None, None, False
        self._expected_kept, self._num_kept, self._faster = None, 0, 0.0  # of a step that failed
        open_ones = [one for one in drafting if one[0].budget is not None]
        if not open_ones:
            return
        for rows, _ in open_ones:
            if (own := rows.request.acceptance) is not None:
                own.is_unable = False
                self._read_shadow(rows.request)  # which may have ended while its request rested
        if len(self._rest.steps.passes_s) >= (1 if len(batch) > 1 else 2 * NOTED):
            self._learn_plain_steps()
        self._work = work = PassWork.of(batch, with_guesses=False)
        self.costs.kind, self._num_planned = work.kind, len(open_ones)
        most = sum([rows.budget.row_budget - 1 for rows, _ in open_ones if rows.budget is not None])
        most = most if max_rows is None else min(most, max_rows - work.num_rows)
        if most < 1:
            return self._refuse(open_ones, PlainReason.FULL_PASS)
        if self._asks_without_planning(open_ones, work, is_alone=len(batch) == 1):
            return
        others = len([rows for rows in batch if rows.tree is not None]) - len(open_ones)
        self._choice = choice = self._choose(open_ones, work, most, others)
        self._is_drafting, self._rate = any(choice.counts), choice.rate
        for rows, _ in open_ones:
            rows.expected_speedup = choice.speedup if self._is_drafting else choice.drafted_speedup
        if self._is_drafting and self._must_compare(choice.speedup, work):
            return self._refuse(open_ones, PlainReason.COMPARED)
        denied: list[tuple[RequestRows, Drafter]] = []
        for (rows, drafter), count in zip(open_ones, choice.counts, strict=True):
            if not self._allow(rows, drafter, count, len(open_ones), work):
                denied.append((rows, drafter))
        for rows, drafter in denied:
            own = self._own(rows.request, drafter)
            own.denied = min(MOST_DENIED, 2 * own.denied + 1) if own.denied else DENIED_IDLE
            own.num_idle = steps_until(own.denied, self._num_steps + 1)
        if denied:
            self._probe(denied, work, most)

    def select(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        guessed = [rows for rows in batch if rows.num_guesses > 0]
        if not guessed or self._work is None:
            return
        weighed = [rows for rows in guessed if rows.request is not self._probed and can_cut(rows)]
        num_fixed = sum([rows.num_guesses for rows in guessed]) - sum([rows.num_guesses for rows in weighed])
        reached = [self._reached(rows) or [1.0] for rows in weighed]
        orders = [_likeliest(chances) for chances in reached]
        most = sum([len(order) - 1 for order in orders])
        if max_rows is not None:
            most = min(most, max(0, max_rows - self._work.num_rows - num_fixed))
        times = self.times.of_guesses(self._work, num_fixed, most)
        gains = [[chances[node] for node in order[1:]] for order, chances in zip(orders, reached, strict=True)]
        # nothing is drafted at present where the last plan said so: then more is asked of a guess, as of a plan
        least_gain = STAY_GAIN if self._is_drafting else START_GAIN
        if len(batch) == 1:
            counts = [worth_keeping(gains[0][:most], times, self._rate * (1.0 + least_gain))] if gains else []
            self._guesses_s = times[sum(counts)] - (times[0] if num_fixed == 0 else self.times.of_guesses(self._work, 0, 0)[0])
        else:
            others = len([rows for rows in batch if rows.tree is not None]) - len(weighed)
            counts = worth_keeping_together(gains, times, others, least_gain)
        if self._choice is None:
            self._is_drafting = any(counts)
        self._expected_kept = [sum(own[:count]) for own, count in zip(gains, counts, strict=True)] if num_fixed == 0 else None
        for rows, order, count, chances in zip(weighed, orders, counts, reached, strict=True):
            nodes = order[: count + 1]
            cut(rows, sorted(nodes))
            if rows.request.speculation.trees and len(nodes) > 1:
                rows.expected_tokens = sum([chances[node] for node in nodes])

    def describe(self) -> str:
        rise = self.costs.at(1 + min(4, self.num_draft_tokens)) / self.costs.at(1)
        return f"up to {self.num_draft_tokens} draft tokens a step, as many as pay (5 rows take {rise:.2f} of the time of one)"

    def _asks_without_planning(self, open_ones: Sequence[tuple[RequestRows, Drafter]], work: PassWork, *, is_alone: bool) -> bool:
        """Whether all drafters take next to no time: they are asked at once, and their guesses decide.

        After guesses that were not worth a row a request rests until they were compared with the text, and a little longer.
        """
        times, _ = self.costs.row_times(work.num_rows, 0, work.num_cached, work.num_row_cached)
        for rows, drafter in open_ones:
            facts, budget = self._facts(drafter), rows.budget
            if budget is None or budget.wants_draws or not facts.times or drafter.reading_s(rows.request) > 0.0:
                return False
            if facts.seconds(len(open_ones), budget.max_depth) >= CHEAP_SHARE * times[0]:
                return False
        self._plain_s = times[0]
        if is_alone:
            self._rate = max(self.times.rate, 1.0 / (times[0] + self.host.at(1.0, 0.0)))
        elif self._is_drafting and self._must_compare(1.0, work):
            self._refuse(open_ones, PlainReason.COMPARED)
            return True
        self._asks_together = not is_alone
        for rows, drafter in open_ones:
            self._ask(rows, drafter, is_alone=is_alone)
        return True

    def _ask(self, rows: RequestRows, drafter: Drafter, *, is_alone: bool) -> None:
        """Let a drafter that takes next to no time guess for a request, unless it rests."""
        own, budget = self._own(rows.request, drafter), rows.budget
        own.is_cheap = True
        if not own.wants_shadow:
            rows.budget, rows.plain_reason = None, PlainReason.DID_NOT_PAY
            own.num_idle = own.until_shadow()
            return
        if is_alone:
            self._asked = own
        if budget is not None and not self._facts(drafter).calibration(rows.request).is_known:
            most = min(budget.max_depth, FIRST_TOKENS)
            rows.budget = replace(budget, row_budget=min(budget.row_budget, most + 1), max_depth=most)

    def _choose(self, open_ones: Sequence[tuple[RequestRows, Drafter]], work: PassWork, most: int, others: int) -> Choice:
        """What is best before anything is guessed, by what is known of depths alone."""
        gains, names = [], list(dict.fromkeys([drafter.name for _, drafter in open_ones]))
        for rows, drafter in open_ones:
            facts, own = self._facts(drafter), self._own(rows.request, drafter)
            calibration, budget = facts.calibration(rows.request), rows.budget
            depth = 0 if budget is None else min(budget.max_depth, budget.row_budget - 1)
            if not calibration.is_known:
                depth, most = min(depth, FIRST_TOKENS), min(most, FIRST_ROWS)
            chances = calibration.depths(depth) if len(open_ones) == 1 else calibration.depths_together(depth)
            gains.append(own.by_depth.paths(chances, calibration.doubt, LEAST_CHANCE))
        most = min(most, sum(map(len, gains)))
        guessing = [self.drafters[name].parts(len(open_ones)) for name in names]
        numbers = [names.index(drafter.name) for _, drafter in open_ones] if len(names) > 1 else ()
        least_gain = STAY_GAIN if self._is_drafting else START_GAIN
        times, plan_s = self.times.of_guesses(work, 0, most), self.times.planning.at(1.0, len(open_ones))
        times[1:] = [seconds + plan_s for seconds in times[1:]]  # without guesses there would soon be no plan either
        return choose_rows(gains, times, guessing, drafters=numbers, others=others, least_gain=least_gain)

    def _allow(self, rows: RequestRows, drafter: Drafter, count: int, num_requests: int, work: PassWork) -> bool:
        """Set a request's budget; returns whether it may draft, or would without costing anything."""
        budget, choice = rows.budget, self._choice
        if budget is None or choice is None:
            return True
        facts, own = self._facts(drafter), self._own(rows.request, drafter)
        deepest = min(budget.max_depth, budget.row_budget - 1)
        is_cheap = facts.seconds(num_requests, deepest) < CHEAP_SHARE * choice.plain_s  # one of which nothing is known is asked, to know
        own.is_cheap = is_cheap
        if count == 0:
            own.num_plain += 1
            if is_cheap and own.wants_shadow:
                return True
            if not is_cheap and not budget.wants_draws and drafter.can_copy(rows.request) and own.wants_shadow:
                rows.budget = replace(budget, copies_only=True)
                return True
            if is_cheap:
                own.num_idle = own.until_shadow()
            rows.budget, rows.plain_reason = None, PlainReason.DID_NOT_PAY
            return is_cheap
        own.num_plain = own.denied = 0
        calibration = facts.calibration(rows.request)
        if not is_cheap or budget.wants_draws or not calibration.is_known:
            stops_early = calibration.gives_probs and not budget.wants_draws
            if count < budget.max_depth and (not stops_early or num_requests > 1):
                width = max(1, (budget.row_budget - 1) // max(1, budget.max_depth))
                rows.budget = budget = replace(budget, row_budget=1 + count * width, max_depth=count)
            if stops_early and drafter.stops_early:
                least_reach = self._least_reach(rows.request, drafter, count, num_requests, work)
                rows.budget = replace(budget, least_reach=least_reach, chance_of=facts.chance_of(rows.request, own))
        if drafter.reading_s(rows.request) > 0.0 and rows.budget is not None:
            rows.budget = replace(rows.budget, max_reading_s=self._worthwhile_s(rows.request, choice))
        return True

    def _least_reach(self, request: Request, drafter: Drafter, count: int, num_requests: int, work: PassWork) -> float:
        """Chance of a whole path below which what one more guess behind it takes is not worth it.

        In a batch that is its row alone: guessing takes as long as the deepest of all, and how deep that is was planned.
        """
        if self._choice is None:
            return 0.0
        facts, own = self._facts(drafter), self._own(request, drafter)
        deeper_s = facts.seconds(1, count + 1) - facts.seconds(1, count) if num_requests == 1 else 0.0
        chances = facts.calibration(request).depths(count + 1)  # of the deepest alone little is known
        next_chance = max(0.2, sum([own.by_depth.chance(chance) for chance in chances]) / len(chances))
        more = self.costs.at(work.num_rows + 8 * num_requests, work.num_cached, work.num_row_cached) - self._choice.plain_s
        row_s = max(0.0, more) / (8 * num_requests)
        return min(0.9, self._choice.rate * (deeper_s + row_s) / next_chance)

    def _worthwhile_s(self, request: Request, choice: Choice) -> float:
        """Seconds of reading that drafting is expected to pay back over what is still to come of a request."""
        saved_s = choice.plain_s / choice.plain_tokens - choice.seconds / choice.tokens  # a token
        num_done = request.num_output_tokens
        expected = max(self._mean_output - num_done, num_done) if self._mean_output else request.num_remaining_tokens
        return max(0.0, saved_s) * min(request.num_remaining_tokens, max(1.0, expected))

    def _must_compare(self, speedup: float, work: PassWork) -> bool:
        """Whether a plain pass is due: little is gained, or its time is doubted, and no plain pass ran lately."""
        self._num_since_compared += 1
        if self._num_since_compared < COMPARE_INTERVAL:
            return False
        if not self.costs.is_doubted(work.num_rows, work.num_cached):
            if speedup >= CLEAR_GAIN and self._num_since_compared < COMPARE_INTERVAL * CLEAR_INTERVALS:
                return False
            if self.costs.is_fresh(work.num_rows, work.num_cached):
                return False
        self._num_since_compared = 0
        return True

    def _probe(self, denied: Sequence[tuple[RequestRows, Drafter]], work: PassWork, most: int) -> None:
        """Let the request that has rested longest guess a little, if that has been saved up for."""
        if self._choice is None:
            return
        share, most_steps = (PROBE_SHARE, MOST_CREDITED) if work.num_sequences == 1 else (SHARE_TOGETHER, CREDITED_TOGETHER)
        self._credit_s += share * min(self._num_steps - self._credited_at, most_steps) * self._choice.plain_s
        self._credited_at = self._num_steps
        rows, drafter = max(denied, key=lambda one: self._own(one[0].request, one[1]).num_plain)
        request, own = rows.request, self._own(rows.request, drafter)
        depth = min(PROBE_TOKENS, most, request.num_remaining_tokens - 1, self.num_draft_tokens)
        allowed = request.speculation.max_draft_tokens
        depth = depth if allowed is None else min(depth, allowed)
        plain_s = self.costs.at(work.num_rows, work.num_cached, work.num_row_cached)
        more_s = self.costs.at(work.num_rows + depth, work.num_cached, work.num_row_cached) - plain_s
        cost_s = max(0.0, more_s) + self._facts(drafter).seconds(1, depth) + drafter.reading_s(request)
        if depth < 1 or self._credit_s < cost_s or rows.given is None:
            return
        self._credit_s -= cost_s
        self._probe_s = cost_s
        own.by_depth.doubt()
        own.by_prob.doubt()
        own.num_plain, self._probed = 0, request
        rows.budget, rows.plain_reason = replace(rows.given, row_budget=depth + 1, max_depth=depth), None

    def _reached(self, rows: RequestRows) -> list[float]:
        """Chance of each node of a request's tree, with all before it."""
        own, facts, tree = rows.request.acceptance, self._facts_of(rows.request), rows.tree
        return [] if own is None or facts is None or tree is None else facts.reached(rows.request, own, tree)

    def _refuse(self, drafting: Sequence[tuple[RequestRows, Drafter]], reason: PlainReason) -> None:
        for rows, _ in drafting:
            rows.budget, rows.plain_reason = None, reason


def _likeliest(chances: Sequence[float]) -> list[int]:
    """The nodes of a tree that may be worth a row, the likeliest first; of those as likely the one nearer to the root, where they are
    numbered level by level."""
    return sorted([node for node, chance in enumerate(chances) if chance >= LEAST_CHANCE], key=chances.__getitem__, reverse=True)
