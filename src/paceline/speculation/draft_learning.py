"""What is learned of drafting as steps go by: what they take, what becomes of guesses, and how long requests rest for which these are in
vain.

Decisions are made elsewhere (`controller.py`).
"""

import math
from collections.abc import Sequence

from paceline.runtimes.pass_costs import PassTable
from paceline.speculation.acceptance import RequestAcceptance, Worth
from paceline.speculation.batch_rest import LONGEST, BatchRest, PlainSteps, rest_after, steps_until
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import Drafter
from paceline.speculation.drafter_facts import DrafterFacts
from paceline.speculation.pass_work import PassWork
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.row_choice import Choice
from paceline.speculation.stats import PlainReason
from paceline.speculation.step_times import StepTimes
from paceline.speculation.tree import DraftTree
from paceline.speculation.vain_time import OF_COPIES, OF_OTHERS, VainTime

UNREADY = 4  # steps with guesses whose time is not learned of
NOTED = 4  # of so many steps of a lone request one is measured
MOST_ASKING = 0.25  # of a plain step, that asking for a batch may count as
MUCH_MORE = 1.8  # times what was expected of a batch's guesses: what brings more is believed
IDLE_INTERVAL = 64  # questions to a drafter after which a step is idle, to know what asking takes
UNABLE_SHARE, VAIN_SHARE = 8, 4  # questions without a guess since one was kept, and steps of a batch in vain, for each step of rest
MOST_IDLE = 7  # steps of rest for either
MOST_UNABLE = 32  # such questions that a new request is taken to have had before


class DraftLearning(DraftLengthPolicy):
    """Learns what drafting takes and brings.

    Args:
        num_draft_tokens: the deepest draft.
        row_budget: rows of the target pass a tree may cost, root included; None = a chain's.
        table: what passes cost.

    Attributes:
        times: what steps take.
        costs, host: of them, what passes take and the other work.
        drafters: what was learned of each, by name.
    """

    def __init__(self, num_draft_tokens: int, table: PassTable, *, row_budget: int | None = None) -> None:
        super().__init__(num_draft_tokens, row_budget=row_budget)
        self.times = StepTimes(table)
        self.costs, self.host = self.times.costs, self.times.host
        self.drafters: dict[str, DrafterFacts] = {}
        self._rest = BatchRest()
        self._choice: Choice | None = None  # of the step under way, if there was one to make
        self._work: PassWork | None = None  # of that step without guesses
        self._num_planned = 0  # requests that were planned for in it
        self._asked: RequestAcceptance | None = None  # of a drafter that takes next to no time, in a lone request's step
        self._probed: Request | None = None  # one that guesses a little although that was not worth it lately
        self._credit_s, self._probe_s = 0.0, 0.0  # for probes, and what the last one was expected to take
        self._asks_together = False  # whether such drafters are asked for a batch
        self._num_kept, self._faster = 0, 0.0  # guesses of the step under way, and logarithms of the tokens that they bring
        self._expected_kept: Sequence[float] | None = None  # of each request with guesses in it; None = not all were weighed
        self._plain_s, self._guesses_s = 0.0, 0.0  # of that step: a pass without guesses, and what those that are sent make it longer
        self._num_drafted = 0
        self._unnoted = 0, 0.0  # drafted steps of a lone request of which nothing was learned yet, and their tokens
        self._num_steps = 0
        self._is_drafting = False
        self._worth = Worth()  # of asking for a batch, in logarithms of its requests' speeds
        self._num_vain = 0  # steps of batches in which nothing was guessed since a guess was kept
        self._vain_time = VainTime()
        self._mean_output = 0.0  # tokens of the last outputs, 0 = none yet

    def know_time(self, name: str, seconds: float) -> None:
        """Told at load what a guess of the drafter of this name takes."""
        self.drafters.setdefault(name, DrafterFacts()).know_time(seconds)

    def observe(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        self._num_kept += len(accepted_nodes)
        self._faster += math.log1p(len(accepted_nodes))
        if request.acceptance is not None and (facts := self._facts_of(request)) is not None:
            if accepted_nodes:
                request.acceptance.num_unable = 0
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
        return PlainReason.NO_GUESS if own.is_unable else PlainReason.DID_NOT_PAY

    def note_no_guess(self, request: Request, drafter: Drafter) -> None:
        own = self._own(request, drafter)
        own.num_unable, own.is_unable = own.num_unable + 1, True
        own.num_idle = steps_until(rest_after(own.num_unable, UNABLE_SHARE, MOST_IDLE), self._num_steps + 1)

    def observe_step(self, batch: Sequence[RequestRows], pass_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0) -> None:
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
        if self._choice is not None and not is_alone:
            self.times.planning.observe(1.0, self._num_planned, plan_s)
        if self._asks_together and self._work is not None:
            self._weigh_asking_together(batch, self._work, host_s + draft_s + plan_s)
        if is_alone and batch[0].is_decoding:
            self._weigh_asking(batch[0], num_guesses, num_kept, host_s + draft_s + plan_s)
        spent = None if is_alone or not self._is_in_vain(batch, num_guesses) else self._spent(batch, num_guesses, host_s, draft_s + plan_s)
        self._asked = self._work = self._choice = self._probed = None  # nothing of a request that ends is held
        self._asks_together, self._faster, self._expected_kept = False, 0.0, None
        self._num_steps += 1
        if num_guesses > 0:
            self._learn_plain_steps()
            rest.stop()
            self._note_drafted(batch, num_kept, pass_s, host_s)
        else:
            if not rest.is_of(batch):
                self._learn_plain_steps()
                rest.take(batch)
            if rest.steps.work.is_decoding:
                rest.note(pass_s, host_s)
        for rows in batch:
            own = self._read_shadow(rows.request)
            if own is not None and own.is_cheap and not is_alone:  # what the next plan would say
                own.num_idle, own.num_resting = max(own.num_idle, steps_until(own.num_resting, self._num_steps)), 0
        if not is_alone:
            self._rest_together(batch, num_guesses, num_kept, spent)
        if num_guesses == 0:
            rest.begin(batch)

    def _read_shadow(self, request: Request) -> RequestAcceptance | None:
        """Compare a request's guesses that were not sent with the text; what is known of it if that is done now."""
        own = request.acceptance
        if own is None or own.shadow is None or (facts := self._facts_of(request)) is None:
            return None
        return own if facts.read_shadow(request, own) else None

    def _weigh_asking_together(self, batch: Sequence[RequestRows], work: PassWork, other_s: float) -> None:
        """Learn what it was worth to ask drafters that take next to no time for a batch, which rests while that slows it down.

        What their guesses were expected to bring counts, not what became of them: of a few steps that is chance. Where they brought far
        more, what was expected is out of date.
        """
        if not work.is_decoding:
            return
        with_guesses, plain_s = PassWork.of(batch, with_guesses=True), self.times.of_guesses(work, 0, 0)[0]
        pass_s = self.costs.at(with_guesses.num_rows, work.num_cached, with_guesses.num_row_cached)
        expected_s = self.host.at(work.num_sequences, with_guesses.num_rows - work.num_rows)
        other_s = min(other_s, expected_s + MOST_ASKING * plain_s)  # one step that other programs held up says little
        faster = self._faster if self._expected_kept is None else sum(map(math.log1p, self._expected_kept))
        faster = self._faster if self._faster > MUCH_MORE * faster else faster
        num_idle = self._worth.add(faster / len(batch) - math.log((pass_s + other_s) / plain_s))
        for rows in batch:
            own = rows.request.acceptance
            if own is not None and own.num_idle < num_idle:
                own.num_idle = num_idle

    def _is_in_vain(self, batch: Sequence[RequestRows], num_guesses: int) -> bool:
        """Whether no guess of a step was expected to pay."""
        return num_guesses == 0 or all(rows.num_guesses == 0 or rows.request is self._probed for rows in batch)

    def _spent(self, batch: Sequence[RequestRows], num_guesses: int, host_s: float, asking_s: float) -> float:
        """What a batch's step took longer than one in which nobody is thought of, as a share of that, less what its guesses brought."""
        work = PassWork.of(batch, with_guesses=False)
        if not work.is_decoding:
            return 0.0
        self.costs.kind = work.kind
        plain_s = self.times.of_guesses(work, 0, 0)[0]
        more_s = asking_s + self.times.more_than_idle_s(len(batch), host_s)
        if num_guesses > 0:
            with_guesses = PassWork.of(batch, with_guesses=True)
            more_s += self.costs.at(with_guesses.num_rows, work.num_cached, with_guesses.num_row_cached)
            more_s -= self.costs.at(work.num_rows, work.num_cached, work.num_row_cached)
        spent = more_s / plain_s - self._faster / len(batch)
        if self._probed is not None:
            self._credit_s -= max(0.0, spent * plain_s - self._probe_s)
        return spent

    def _rest_together(self, batch: Sequence[RequestRows], num_guesses: int, num_kept: int, spent: float | None) -> None:
        """Let all requests of a batch rest where no guess of theirs was of use for several steps, or where to think of them takes long.

        Args:
            spent: as `_spent` says; None where guesses were expected to pay.
        """
        if num_guesses > 0:
            self._num_vain = 0 if num_kept > 0 else self._num_vain // 2
        else:
            self._num_vain += 1
        if spent is None:
            if num_kept > 0:
                self._vain_time.forget()
            return
        copies = any(own.copies or own.is_cheap for rows in batch if (own := rows.request.acceptance) is not None)
        num_idle = self._vain_time.add(self._num_steps, spent, OF_COPIES if copies else OF_OTHERS)
        if num_guesses == 0:
            num_idle = max(num_idle, rest_after(self._num_vain, VAIN_SHARE, MOST_IDLE))
        num_idle = steps_until(num_idle, self._num_steps)
        for rows in batch:
            own = rows.request.acceptance
            if own is not None and own.num_idle < num_idle:
                own.num_idle, own.is_unable = num_idle, False

    def _note_drafted(self, batch: Sequence[RequestRows], num_kept: int, pass_s: float, host_s: float) -> None:
        """Learn what a step with guesses took: of a lone request's, what some of them did once many were seen, and those that are new.

        The first ones do not count: memory and code are made ready for them, and a great time of theirs would forbid all others.
        """
        self._num_drafted += 1
        if self._num_drafted <= UNREADY:
            return
        count, brought = self._unnoted[0] + 1, self._unnoted[1] + len(batch) + num_kept
        work = PassWork.of(batch, with_guesses=True)
        if len(batch) == 1 and count < NOTED and self._num_drafted > NOTED * NOTED and self.costs.is_fresh(work.num_rows, work.num_cached):
            self._unnoted = count, brought
            return
        self._unnoted = 0, 0.0
        self.times.note(work, [pass_s], [host_s], brought, float(count))

    def _learn_plain_steps(self) -> None:
        """Learn what the last plain steps took: of a lone request's, what some of them did."""
        steps, self._rest.steps = self._rest.steps, PlainSteps(self._rest.steps.work)
        self.times.note_rested(steps.work.num_sequences, steps.rested_s)
        if not steps.passes_s:
            return
        noted = slice(None, None, NOTED if steps.work.num_sequences == 1 else 1)
        count = float(len(steps.passes_s))
        self.times.note(steps.work, steps.passes_s[noted], steps.hosts_s[noted], count * steps.work.num_sequences, count)

    def _weigh_asking(self, rows: RequestRows, num_guesses: int, num_kept: int, other_s: float) -> None:
        """Learn what it was worth to ask a drafter that takes next to no time, by what its guesses were expected to bring; other work is
        compared with that of idle steps."""
        if self._asked is None:
            if num_guesses == 0 and rows.plain_reason is PlainReason.DID_NOT_PAY:
                self.times.note_idle(other_s)
            return
        own, self._asked = self._asked, None
        brought = num_kept if self._expected_kept is None else sum(self._expected_kept)
        saved_s = self.times.saved_s(self._plain_s, self._guesses_s if num_guesses > 0 else 0.0, brought, other_s)
        own.num_idle = own.worth.add(saved_s)
        if (facts := self._facts_of(rows.request)) is not None:
            facts.worth.add(saved_s)
        if self.times.idle_s is None or own.worth.num_asked % IDLE_INTERVAL == 0:
            own.num_idle = max(own.num_idle, 1)

    def release(self, request: Request) -> None:
        if self._rest.holds(request):
            self._end_rest(request)
        if request.acceptance is not None and (facts := self._facts_of(request)) is not None:
            facts.num_unable = (facts.num_unable + min(MOST_UNABLE, request.acceptance.num_unable)) // 2
        request.acceptance = None
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = float(request.num_output_tokens)
            self._mean_output = 0.75 * self._mean_output + 0.25 * length if self._mean_output else length

    def _end_rest(self, ended: Request) -> None:
        """One of those that rest together ended. A last one is soon thought of: what is in vain for several may pay for one."""
        left = [request for request in self._rest.requests if request is not ended]
        self._rest.stop()
        if len(left) == 1 and (own := left[0].acceptance) is not None:
            own.num_idle = min(own.num_idle, MOST_IDLE)

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
            facts = self._facts(drafter)
            copies = drafter.is_copier or any(one.is_copier for one in getattr(drafter, "members", ()))
            own = RequestAcceptance(drafter.name, copies, worth=facts.worth.begun(), num_unable=facts.num_unable)
            request.acceptance = own
        return own
