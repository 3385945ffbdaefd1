"""How much to draft where speed counts: in each step as much as brings most expected tokens a second, nothing included.

What is expected of guesses is learned from those before (`acceptance.py`), what passes cost is measured (`runtimes/pass_costs.py`), as is
what guessing and the work around a pass take; `row_choice.py` weighs them. Nothing here knows a token from another.

Where drafting does not pay, a drafter that takes next to no time goes on guessing now and then, and its guesses are compared with what the
target says (a shadow: it costs no row). Of one that takes time a share of all time is spent on probes of two tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.runtimes.pass_costs import PassTable
from paceline.speculation.acceptance import RequestAcceptance
from paceline.speculation.batch_rest import LONGEST, BatchRest, PlainSteps, rest_after, steps_until
from paceline.speculation.cut import can_cut, cut
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import Drafter
from paceline.speculation.drafter_facts import DrafterFacts
from paceline.speculation.pass_work import PassWork
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.row_choice import Choice, choose_rows, worth_keeping, worth_keeping_together
from paceline.speculation.stats import PlainReason
from paceline.speculation.step_times import StepTimes
from paceline.speculation.tree import DraftTree

START_GAIN = 0.05  # expected gain from which on drafting begins, so that it does not come and go
STAY_GAIN = 0.02  # and from which on it goes on: what is expected of the best of several guesses is a little too much
CHEAP_SHARE = 0.05  # of a plain pass: a drafter that takes less is asked whatever is expected, and its guesses are weighed
LEAST_CHANCE = 0.02  # of a guess with all before it: no row is cheap enough for less
PROBE_SHARE = 0.01  # of all time: what probes may cost where drafting does not pay
MOST_CREDITED = 32  # steps for which is saved up at a time
PROBE_TOKENS = 2
NOTED_PLAIN = 4  # of so many steps of a lone request without guesses one is measured
FIRST_TOKENS, FIRST_ROWS = 4, 16  # guessed of a request and in a pass while nothing is known of a drafter
CLEAR_GAIN, CLEAR_INTERVALS = 1.25, 4  # expected speedup above which plain passes are run so many times more seldom to compare with
IDLE_INTERVAL = 64  # questions to a drafter after which a step is idle, to know what asking takes
UNABLE_SHARE, VAIN_SHARE = 8, 4  # questions in a row without a guess, and steps of a batch without one of use, for each step of rest
MOST_IDLE = 7  # steps of rest for either
DENIED_IDLE, MOST_DENIED = 3, 7  # steps that a request rests for which drafting was not worth it: at first, and where it never is
COMPARE_INTERVAL = 16  # steps from one such pass to the next, until enough are known


class DraftController(DraftLengthPolicy):
    """Chooses how much to draft, step by step.

    Args:
        num_draft_tokens: the deepest draft.
        row_budget: rows of the target pass a tree may cost, root included; None = a chain's.
        table: what passes cost.
    """

    def __init__(self, num_draft_tokens: int, table: PassTable, *, row_budget: int | None = None) -> None:
        super().__init__(num_draft_tokens, row_budget=row_budget)
        self.times = StepTimes(table)
        self.costs, self.host = self.times.costs, self.times.host
        self._rest = BatchRest()
        self.drafters: dict[str, DrafterFacts] = {}
        self._choice: Choice | None = None  # of the step under way, if there was one to make
        self._work: PassWork | None = None  # of that step without guesses
        self._rate = 0.0  # tokens a second that time is worth
        self._num_planned = 0  # requests that were planned for in the step under way
        self._num_steps = 0
        self._num_kept = 0  # guesses of the step under way
        self._num_vain = 0  # steps of batches in which nothing was guessed since a guess was kept
        self._credit_s, self._credited_at = 0.0, 0  # for probes, and the step up to which it was saved up
        self._probed: Request | None = None
        self._asked: RequestAcceptance | None = None  # of a drafter that takes next to no time, in the step under way
        self._is_drafting = False
        self._num_since_compared = 0
        self._mean_output = 0.0  # tokens of the last outputs, 0 = none yet

    def know_time(self, name: str, seconds: float) -> None:
        """Told at load what a guess of the drafter of this name takes."""
        self.drafters.setdefault(name, DrafterFacts()).know_time(seconds)

    def plan(self, batch: Sequence[RequestRows], drafting: Sequence[tuple[RequestRows, Drafter]], max_rows: int | None) -> None:
        self._choice, self._probed, self._asked = None, None, None
        open_ones = [one for one in drafting if one[0].budget is not None]
        if not open_ones:
            return
        if len(self._rest.steps.passes_s) >= (1 if len(batch) > 1 else 2 * NOTED_PLAIN):
            self._learn_plain_steps()
        self._work = work = PassWork.of(batch, with_guesses=False)
        self._num_planned = len(open_ones)
        most = sum([rows.budget.row_budget - 1 for rows, _ in open_ones if rows.budget is not None])
        most = most if max_rows is None else min(most, max_rows - work.num_rows)
        if most < 1:
            return self._refuse(open_ones, PlainReason.FULL_PASS)
        if len(batch) == 1 and self._asks_without_planning(*open_ones[0], work):
            return
        others = len([rows for rows in batch if rows.tree is not None]) - len(open_ones)
        self._choice = choice = self._choose(open_ones, work, most, others)
        self._is_drafting, self._rate = any(choice.counts), choice.rate
        for rows, _ in open_ones:
            rows.expected_speedup = choice.speedup if self._is_drafting else choice.drafted_speedup
        if self._is_drafting and self._must_compare(choice, work):
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
        orders = [
            sorted([(-chance, depth, node) for node, (chance, depth) in enumerate(zip(chances, depths, strict=False)) if chance >= LEAST_CHANCE])
            for chances, depths in zip(reached, [rows.tree.depths if rows.tree else () for rows in weighed], strict=True)
        ]
        most = sum([len(order) - 1 for order in orders])
        if max_rows is not None:
            most = min(most, max(0, max_rows - self._work.num_rows - num_fixed))
        times = self.times.of_guesses(self._work, num_fixed, most)
        gains = [[-chance for chance, _, _ in order[1:]] for order in orders]
        # nothing is drafted at present where the last plan said so: then more is asked of a guess, as of a plan
        least_gain = STAY_GAIN if self._is_drafting else START_GAIN
        if len(batch) == 1:
            counts = [worth_keeping(gains[0][:most], times, self._rate * (1.0 + least_gain))] if gains else []
        else:
            others = len([rows for rows in batch if rows.tree is not None]) - len(weighed)
            counts = worth_keeping_together(gains, times, others, least_gain)
        if self._choice is None:
            self._is_drafting = any(counts)
        kept = [[node for _, _, node in order[: count + 1]] for order, count in zip(orders, counts, strict=True)]
        for rows, nodes, chances in zip(weighed, kept, reached, strict=True):
            cut(rows, sorted(nodes))
            if rows.request.speculation.trees and len(nodes) > 1:
                rows.expected_tokens = sum([chances[node] for node in nodes])

    def observe(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        self._num_kept += len(accepted_nodes)
        if request.acceptance is not None and (facts := self._facts_of(request)) is not None:
            facts.learn(request, request.acceptance, tree, accepted_nodes)

    def observe_draft(self, drafter: Drafter, num_requests: int, depth: int, seconds: float, read_s: float) -> None:
        self._facts(drafter).observe(num_requests, depth, seconds)

    def rests_together(self, batch: Sequence[RequestRows]) -> bool:
        rest = self._rest
        rest.is_under_way = False  # of a step that failed
        return rest.left > 0 and rest.begins(batch)

    def rests(self, request: Request) -> PlainReason | None:
        own = request.acceptance
        if own is None or own.num_idle == 0:
            return None
        own.num_idle -= 1
        return PlainReason.NO_GUESS if own.num_unable else PlainReason.DID_NOT_PAY

    def note_no_guess(self, request: Request, drafter: Drafter) -> None:
        own = self._own(request, drafter)
        own.num_unable += 1
        own.num_idle = steps_until(rest_after(own.num_unable, UNABLE_SHARE, MOST_IDLE), self._num_steps + 1)

    def observe_step(
        self, batch: Sequence[RequestRows], pass_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0
    ) -> None:
        rest, is_alone = self._rest, len(batch) == 1
        if rest.is_under_way:
            self._num_steps += 1
            rest.note(pass_s, host_s)
            if is_alone:
                self.times.note_idle(host_s)
            if len(rest.steps.passes_s) >= LONGEST:
                self._learn_plain_steps()
            return
        was_planned, num_kept, self._num_kept = self._work is not None, self._num_kept, 0
        num_guesses = sum([rows.num_guesses for rows in batch]) if was_planned else 0
        if was_planned and not is_alone:
            self.times.planning.observe(1.0, self._num_planned, plan_s)
        if is_alone and batch[0].is_decoding:
            self._weigh_asking(batch[0], num_guesses, num_kept, host_s + draft_s + plan_s)
        self._probed = self._asked = self._work = None  # nothing of a request that ends is held
        self._num_steps += 1
        if num_guesses > 0 or not rest.is_of(batch):
            self._learn_plain_steps()
            rest.take(batch)
        if num_guesses > 0:
            self.times.note(PassWork.of(batch, with_guesses=True), [pass_s], [host_s], float(len(batch) + num_kept), 1.0)
        elif rest.steps.work.is_decoding:
            rest.note(pass_s, host_s)
        for rows in batch:
            own = rows.request.acceptance
            if own is not None and own.shadow is not None and (facts := self._facts_of(rows.request)) is not None:
                facts.read_shadow(rows.request, own)
                if own.shadow is None and own.is_cheap and not is_alone:  # what the next plan would say
                    own.num_idle, own.num_resting = max(own.num_idle, steps_until(own.num_resting, self._num_steps)), 0
        if not is_alone:
            self._rest_together(batch, num_guesses, num_kept)
        if num_guesses == 0:
            rest.begin(batch)

    def _rest_together(self, batch: Sequence[RequestRows], num_guesses: int, num_kept: int) -> None:
        """Let all requests of a batch rest where no guess of theirs was of use for several steps."""
        if num_guesses > 0:
            self._num_vain = 0 if num_kept > 0 else self._num_vain // 2
            return
        self._num_vain += 1
        num_idle = steps_until(rest_after(self._num_vain, VAIN_SHARE, MOST_IDLE), self._num_steps)
        for rows in batch:
            own = rows.request.acceptance
            if own is not None and own.num_idle < num_idle:
                own.num_idle = num_idle

    def _learn_plain_steps(self) -> None:
        """Learn what the last plain steps took: of a lone request's, what some of them did."""
        steps, self._rest.steps = self._rest.steps, PlainSteps(self._rest.steps.work)
        noted = slice(None, None, NOTED_PLAIN if steps.work.num_sequences == 1 else 1)
        count = float(len(steps.passes_s))
        self.times.note(steps.work, steps.passes_s[noted], steps.hosts_s[noted], count * steps.work.num_sequences, count)

    def _weigh_asking(self, rows: RequestRows, num_guesses: int, num_kept: int, other_s: float) -> None:
        """Learn what it was worth to ask a drafter that takes next to no time; other work is compared with that of idle steps."""
        if self._asked is None:
            if num_guesses == 0 and rows.plain_reason is PlainReason.DID_NOT_PAY:
                self.times.note_idle(other_s)
            return
        own, self._asked = self._asked, None
        saved_s = self.times.saved_s(self._work, num_guesses, num_kept, other_s)
        own.num_idle = own.worth.add(saved_s)
        if (facts := self._facts_of(rows.request)) is not None:
            facts.worth.add(saved_s)
        if self.times.idle_s is None or own.worth.num_asked % IDLE_INTERVAL == 0:
            own.num_idle = max(own.num_idle, 1)

    def release(self, request: Request) -> None:
        if self._rest.holds(request):
            self._rest.stop()
        request.acceptance = None
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = float(request.num_output_tokens)
            self._mean_output = 0.75 * self._mean_output + 0.25 * length if self._mean_output else length

    def describe(self) -> str:
        rise = self.costs.at(1 + min(4, self.num_draft_tokens)) / self.costs.at(1)
        return f"up to {self.num_draft_tokens} draft tokens a step, as many as pay (5 rows take {rise:.2f} of the time of one)"

    def _asks_without_planning(self, rows: RequestRows, drafter: Drafter, work: PassWork) -> bool:
        """Whether a lone request's drafter takes next to no time: it is asked at once, and its guesses decide.

        After guesses that were not worth a row it rests until they were compared with the text, and a little longer.
        """
        facts, own = self._facts(drafter), self._own(rows.request, drafter)
        budget = rows.budget
        if budget is None or budget.wants_draws or not facts.times:
            return False
        times, _ = self.costs.row_times(work.num_rows, 0, work.num_cached, work.num_row_cached)
        if facts.seconds(1, budget.max_depth) >= CHEAP_SHARE * times[0] or drafter.reading_s(rows.request) > 0.0:
            return False
        self._rate = max(self.times.rate, 1.0 / (times[0] + self.host.at(1.0, 0.0)))
        if not own.wants_shadow:
            rows.budget, rows.plain_reason = None, PlainReason.DID_NOT_PAY
            own.num_idle = own.until_shadow()
            return True
        self._asked, own.num_unable = own, 0
        if not facts.calibration(rows.request).is_known:
            most = min(budget.max_depth, FIRST_TOKENS)
            rows.budget = replace(budget, row_budget=min(budget.row_budget, most + 1), max_depth=most)
        return True

    def _choose(self, open_ones: Sequence[tuple[RequestRows, Drafter]], work: PassWork, most: int, others: int) -> Choice:
        """What is best before anything is guessed, by what is known of depths alone."""
        gains, names = [], list(dict.fromkeys([drafter.name for _, drafter in open_ones]))
        for rows, drafter in open_ones:
            facts, own = self._facts(drafter), self._own(rows.request, drafter)
            calibration, budget = facts.calibration(rows.request), rows.budget
            depth = 0 if budget is None else min(budget.max_depth, budget.row_budget - 1)
            if not calibration.is_known:
                depth, most = min(depth, FIRST_TOKENS), min(most, FIRST_ROWS)
            own.num_unable = 0
            gains.append(own.by_depth.paths(calibration.depths(depth), calibration.doubt, LEAST_CHANCE))
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
            if is_cheap:
                own.num_idle = own.until_shadow()
            rows.budget, rows.plain_reason = None, PlainReason.DID_NOT_PAY
            return is_cheap
        own.num_plain = own.denied = 0
        calibration = facts.calibration(rows.request)
        if not is_cheap or budget.wants_draws or not calibration.is_known:
            stops_early = calibration.gives_probs and not budget.wants_draws
            if not stops_early or num_requests > 1:
                width = max(1, (budget.row_budget - 1) // max(1, budget.max_depth))
                rows.budget = budget = replace(budget, row_budget=1 + count * width, max_depth=count)
            if stops_early:
                least_reach = self._least_reach(rows.request, drafter, count, num_requests, work)
                rows.budget = replace(budget, least_reach=least_reach, chance_of=facts.chance_of(rows.request, own))
        if drafter.reading_s(rows.request) > 0.0 and rows.budget is not None:
            rows.budget = replace(rows.budget, max_reading_s=self._worthwhile_s(rows.request, choice))
        return True

    def _least_reach(self, request: Request, drafter: Drafter, count: int, num_requests: int, work: PassWork) -> float:
        """Chance of a whole path below which what one more guess behind it takes is not worth it."""
        if self._choice is None:
            return 0.0
        facts, own = self._facts(drafter), self._own(request, drafter)
        deeper_s = (facts.seconds(num_requests, count + 1) - facts.seconds(num_requests, count)) / num_requests
        next_chance = max(0.2, own.by_depth.chance(facts.calibration(request).at_depth(count + 1)))
        more = self.costs.at(work.num_rows + 8 * num_requests, work.num_cached, work.num_row_cached) - self._choice.plain_s
        row_s = max(0.0, more) / (8 * num_requests)
        return min(0.9, self._choice.rate * (deeper_s + row_s) / next_chance)

    def _worthwhile_s(self, request: Request, choice: Choice) -> float:
        """Seconds of reading that drafting is expected to pay back over what is still to come of a request."""
        saved_s = choice.plain_s / choice.plain_tokens - choice.seconds / choice.tokens  # a token
        num_done = request.num_output_tokens
        expected = max(self._mean_output - num_done, num_done) if self._mean_output else request.num_remaining_tokens
        return max(0.0, saved_s) * min(request.num_remaining_tokens, max(1.0, expected))

    def _must_compare(self, choice: Choice, work: PassWork) -> bool:
        """Whether a plain pass is due: little is gained, and no plain pass ran lately."""
        self._num_since_compared += 1
        if self._num_since_compared < COMPARE_INTERVAL * (1 if choice.speedup < CLEAR_GAIN else CLEAR_INTERVALS):
            return False
        if self.costs.is_fresh(work.num_rows, work.num_cached):
            return False
        self._num_since_compared = 0
        return True

    def _probe(self, denied: Sequence[tuple[RequestRows, Drafter]], work: PassWork, most: int) -> None:
        """Let the request that has rested longest guess a little, if that has been saved up for."""
        if self._choice is None:
            return
        self._credit_s += PROBE_SHARE * min(self._num_steps - self._credited_at, MOST_CREDITED) * self._choice.plain_s
        self._credited_at = self._num_steps
        rows, drafter = max(denied, key=lambda one: self._own(one[0].request, one[1]).num_plain)
        request, own = rows.request, self._own(rows.request, drafter)
        depth = min(PROBE_TOKENS, most, request.num_remaining_tokens - 1, self.num_draft_tokens)
        allowed = request.speculation.max_draft_tokens
        depth = depth if allowed is None else min(depth, allowed)
        more_s = self.costs.at(work.num_rows + depth, work.num_cached, work.num_row_cached) - self._choice.plain_s
        cost_s = max(0.0, more_s) + self._facts(drafter).seconds(1, depth) + drafter.reading_s(request)
        if depth < 1 or self._credit_s < cost_s or rows.given is None:
            return
        self._credit_s -= cost_s
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

    def _facts(self, drafter: Drafter) -> DrafterFacts:
        facts = self.drafters.get(drafter.name)
        if facts is None:
            facts = self.drafters[drafter.name] = DrafterFacts()
        return facts

    def _facts_of(self, request: Request) -> DrafterFacts | None:
        return None if request.acceptance is None else self.drafters.get(request.acceptance.drafter)

    def _own(self, request: Request, drafter: Drafter) -> RequestAcceptance:
        own = request.acceptance
        if own is None or own.drafter != drafter.name:
            own = request.acceptance = RequestAcceptance(drafter.name, worth=self._facts(drafter).worth.begun())
        return own
