"""What speculation is made of: a drafter, a policy of how much to draft, and the rule by which guesses are kept."""

from collections.abc import Sequence
from time import perf_counter

from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.base import FloatArray, ForwardOutput, Network, Pass, PlanOutput
from paceline.sampling.path_sampler import LogitsView, SampledPath
from paceline.speculation.budgets import fit_rows, reason_not_to_draft, within_limits
from paceline.speculation.constrained import constrain_guesses, fill_with_forced, forced_budget, with_forced
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter
from paceline.speculation.drafter_calls import DrafterCalls
from paceline.speculation.rejection import Acceptance, verify_rejection
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult, verify, walk_together


class Speculator:
    """Guesses for the requests of a step, and learns from what became of the guesses. Where it cannot guess, steps are plain.

    Args:
        drafter: None for plain decoding.
        policy: how much to draft.
        vocab_size: ids the tokenizer knows; rows of the model beyond them are padding, never emitted, and guesses of them are cut.
        layout: how trees are laid out, which decides what they cost.
        acceptance: which guesses are kept.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        policy: DraftLengthPolicy,
        *,
        vocab_size: int,
        layout: TreeLayout,
        acceptance: Acceptance = Acceptance.MATCH,
    ) -> None:
        self.drafter, self.policy, self.acceptance = drafter, policy, acceptance
        self.vocab_size, self._layout = vocab_size, layout
        self._calls = DrafterCalls(vocab_size)
        self._budgets: dict[tuple[int, int, bool], DraftBudget] = {}  # those that were given so far: there are few
        self._pass_s = 0.0  # of the last pass
        self._plan_s = 0.0  # of the step under way

    @property
    def num_failures(self) -> int:
        """How often a drafter raised or answered nonsense."""
        return self._calls.tolerated.num_failures

    @property
    def observes(self) -> bool:
        """Whether anybody is told what passes make permanent."""
        return self.drafter is not None and type(self.drafter).observe is not Drafter.observe

    @property
    def drafters(self) -> dict[str, Drafter]:
        """The drafter and those it is made of, by name: what one request may ask for."""
        if self.drafter is None:
            return {}
        members = getattr(self.drafter, "members", ())
        return {one.name: one for one in (*reversed(members), self.drafter)}

    def propose(self, batch: Sequence[RequestRows], max_rows: int | None = None) -> None:
        """Hang a tree under the root of every request that may draft; the others get the reason why not.

        Args:
            max_rows: of the pass, known tokens included; None = no limit.
        """
        if self.drafter is not None and self._rests_together(batch):
            return
        drafting = []
        for rows in batch:
            if rows.tree is not None:
                rows.budget = rows.given = self._most(rows)
                if rows.budget is not None and (drafter := self._drafter_of(rows.request)) is not None:
                    drafting.append((rows, drafter))
        if not drafting:
            return
        is_planned, start_s = False, perf_counter()
        with self._calls.tolerated:  # it asks drafters what they would have to read
            self.policy.plan(batch, drafting, max_rows)
            is_planned = True
        self._plan_s = perf_counter() - start_s
        if not is_planned:
            for rows, _ in drafting:
                rows.budget, rows.plain_reason = None, PlainReason.DRAFTER_FAILED
        constrained = [rows for rows, _ in drafting if rows.request.processor.constraint is not None]
        for rows in constrained:
            self._add_forced(rows)
        open_rows = [one for one in drafting if one[0].budget is not None]
        if not open_rows:
            return
        if constrained:
            open_rows = [one for one in open_rows if one[0].budget is not None and not fill_with_forced(one[0], one[0].budget)]
        for drafter, own in _by_drafter(open_rows):
            self._calls.propose(drafter, own, self.policy)
        self._constrain(constrained)
        start_s = perf_counter()
        with self._calls.tolerated:
            self.policy.select(batch, max_rows)
        self._plan_s += perf_counter() - start_s
        if max_rows is not None:
            fit_rows(batch, max_rows - sum(rows.num_known for rows in batch))

    def walk_together(self, batch: Sequence[RequestRows], first_rows: Sequence[int], rows: LogitsView) -> Sequence[SampledPath | None]:
        """What can be said at once of the walks of all requests, for `verify`.

        Args:
            first_rows: of each request's tree, among the pass's.
            rows: of the pass.
        """
        if self.acceptance is not Acceptance.MATCH:
            return [None] * len(batch)
        return walk_together([(own.tree, first, own.request) for own, first in zip(batch, first_rows, strict=True)], rows)

    def verify(self, tree: DraftTree, logits: FloatArray, request: Request, walked: SampledPath | None = None) -> VerifyResult:
        """Walk a tree by the rule in use."""
        return verify(tree, logits, request, walked) if self.acceptance is Acceptance.MATCH else verify_rejection(tree, logits, request)

    def learn(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Tell the policy what became of a tree."""
        with self._calls.tolerated:
            self.policy.observe(request, tree, accepted_nodes)

    def forward(self, target: Network, arguments: Pass) -> ForwardOutput:
        """The target's pass, timed."""
        start_s = perf_counter()
        output = target.forward(*arguments)
        self._pass_s = perf_counter() - start_s
        return output

    def end_step(self, batch: Sequence[RequestRows], seconds: float) -> None:
        """Tell the policy how long a step took: its pass, and its other work but for guessing."""
        if self.drafter is not None:
            drafting_s, self._calls.seconds = self._calls.seconds, 0.0
            plan_s, self._plan_s = self._plan_s, 0.0
            host_s = seconds - self._pass_s - drafting_s - plan_s
            try:
                self.policy.observe_step(batch, self._pass_s, host_s if host_s > 0.0 else 0.0, drafting_s, plan_s)
            except BaseException as error:
                if not self._calls.tolerated.bears(error):
                    raise

    def observe(self, committed: Sequence[CommittedRows]) -> None:
        """Tell the drafter what a target pass made permanent, but for requests without speculation."""
        if self.drafter is not None and self.observes:
            with self._calls.tolerated:
                self.drafter.observe([one for one in committed if not one.request.speculation.is_off])

    def committed_rows(self, request: Request, start: int, nodes: Sequence[int], output: PlanOutput) -> CommittedRows:
        """Rows that became permanent, with the activations that the drafter needs.

        Args:
            start: position of the first one.
            nodes: of the request's plan.
        """
        if self.drafter is None:
            return CommittedRows(request, start, len(nodes))
        needs = self.drafter.needs
        hidden = output.hidden_states(nodes) if needs.hidden_states else None
        collected = output.collected_hidden_states(nodes) if needs.layers else None
        return CommittedRows(request, start, len(nodes), hidden, collected)

    def preempt(self, request: Request) -> None:
        """Tell the drafter that a request's rows were dropped and will run again; what was learned of its acceptance stays."""
        if self.drafter is not None and not request.speculation.is_off:
            with self._calls.tolerated:
                self.drafter.preempt(request)

    def release(self, request: Request) -> None:
        """Forget a request that ended."""
        with self._calls.tolerated:
            self.policy.release(request)
        if self.drafter is not None and not request.speculation.is_off:
            with self._calls.tolerated:
                self.drafter.release(request)

    def _most(self, rows: RequestRows) -> DraftBudget | None:
        """The most that may be guessed under a root; None = nothing, with the reason in `rows`."""
        request = rows.request
        rows.plain_reason = reason_not_to_draft(rows, has_drafter=self.drafter is not None)
        if rows.plain_reason is None:
            try:
                rows.plain_reason = self._reason_not_to_ask(request)
            except BaseException as error:
                if not self._calls.tolerated.bears(error):
                    raise
                rows.plain_reason = PlainReason.DRAFTER_FAILED
        if rows.plain_reason is not None:
            return None
        wants_draws = self.acceptance is Acceptance.REJECTION and not request.params.is_greedy
        row_budget, max_depth = within_limits(request, self.policy.row_budget, self.policy.num_draft_tokens)
        budget = self._budgets.get((row_budget, max_depth, wants_draws))
        if budget is None:
            budget = self._budgets[row_budget, max_depth, wants_draws] = DraftBudget(row_budget, max_depth, self._layout, wants_draws)
        return budget

    def _reason_not_to_ask(self, request: Request) -> PlainReason | None:
        """Why no drafter is thought of for a request; what a grammar forces needs none."""
        if request.processor.constraint is not None:
            return None
        reason, drafter = self.policy.rests(request), self._drafter_of(request)
        if reason is not None or drafter is None or drafter.can_guess(request):
            return reason
        self.policy.note_no_guess(request, drafter)
        return PlainReason.NO_GUESS

    def _rests_together(self, batch: Sequence[RequestRows]) -> bool:
        """Whether nobody is thought of in this step."""
        try:
            return self.policy.rests_together(batch)
        except BaseException as error:
            if not self._calls.tolerated.bears(error):
                raise
            return False

    def _add_forced(self, rows: RequestRows) -> None:
        """Let what a request's grammar forces be guessed, whether or not other guesses pay."""
        given = rows.given
        if given is None or rows.plain_reason is PlainReason.FULL_PASS:
            return
        if rows.budget is not None:
            rows.budget = with_forced(rows.budget, rows.request)
        else:
            rows.budget = forced_budget(rows.request, self._layout, wants_draws=given.wants_draws)

    def _drafter_of(self, request: Request) -> Drafter | None:
        """Who is asked for a request: the drafter, or the one of several that it names."""
        wanted = request.speculation.drafter
        return self.drafter if wanted is None else self.drafters.get(wanted, self.drafter)

    def _constrain(self, batch: Sequence[RequestRows]) -> None:
        """Hold the guesses of requests with a grammar to it."""
        for rows in batch:
            if rows.budget is not None:
                with self._calls.tolerated:  # the walk obeys the grammar in any case; if that cannot go on it will say so
                    constrain_guesses(rows, rows.budget)


def _by_drafter(drafting: Sequence[tuple[RequestRows, Drafter]]) -> Sequence[tuple[Drafter, Sequence[RequestRows]]]:
    """The requests of each drafter."""
    groups: dict[str, tuple[Drafter, list[RequestRows]]] = {}
    for rows, drafter in drafting:
        groups.setdefault(drafter.name, (drafter, []))[1].append(rows)
    return list(groups.values())
