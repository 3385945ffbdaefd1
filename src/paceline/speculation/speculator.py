"""What speculation is made of: a drafter, a policy of how much to draft, and the rule by which guesses are kept."""

import math
from collections.abc import Sequence
from time import perf_counter

from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.base import FloatArray, ForwardOutput, Network, Pass, PlanOutput
from paceline.speculation.budgets import reason_not_to_draft, share_budgets, within_limits
from paceline.speculation.constrained import SOURCE as FORCED
from paceline.speculation.constrained import constrain_guesses, fill_with_forced, forced_budget, with_forced
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter
from paceline.speculation.drafter_calls import DrafterCalls
from paceline.speculation.rejection import Acceptance, verify_rejection
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult, verify


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

    @property
    def num_failures(self) -> int:
        """How often a drafter raised or answered nonsense."""
        return self._calls.tolerated.num_failures

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
        num_known = sum(rows.num_known for rows in batch)
        if self.drafter is not None:
            self.policy.begin_step(num_known, sum(rows.is_decoding for rows in batch))
        for rows in batch:
            if rows.tree is not None:
                rows.budget = self._budget(rows)
        drafting = [rows for rows in batch if rows.budget is not None]
        if drafting:
            if max_rows is not None:
                share_budgets(drafting, max_rows - num_known, self.policy)
            open_rows = [rows for rows in drafting if rows.budget is not None and not fill_with_forced(rows, rows.budget)]
            for drafter, own in self._by_drafter(open_rows):
                self._calls.propose(drafter, own, self.policy)
            self._constrain(drafting)

    def verify(self, tree: DraftTree, logits: FloatArray, request: Request) -> VerifyResult:
        """Walk a tree by the rule in use."""
        return verify(tree, logits, request) if self.acceptance is Acceptance.MATCH else verify_rejection(tree, logits, request)

    def learn(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Tell the policy what became of a tree; what a grammar forces says nothing about the drafter."""
        num_drafted, num_accepted = tree.num_draft_tokens, len(accepted_nodes)
        if request.processor.constraint is not None:
            num_drafted -= sum(source == FORCED for source in tree.sources)
            num_accepted -= sum(tree.sources[node] == FORCED for node in accepted_nodes)
        if num_drafted > 0:
            self.policy.observe(request, num_drafted, num_accepted)

    def forward(self, target: Network, arguments: Pass) -> ForwardOutput:
        """The target's pass; the policy is told how long it took."""
        start_s = perf_counter()
        output = target.forward(*arguments)
        if self.drafter is not None:
            self.policy.observe_pass(len(arguments.batch.positions), perf_counter() - start_s)
        return output

    def observe(self, committed: Sequence[CommittedRows]) -> None:
        """Tell the drafter what a target pass made permanent, but for requests without speculation."""
        if self.drafter is not None:
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
        self.policy.release(request)
        if self.drafter is not None and not request.speculation.is_off:
            with self._calls.tolerated:
                self.drafter.release(request)

    def _budget(self, rows: RequestRows) -> DraftBudget | None:
        """How much may be guessed under a root; None = nothing, with the reason in `rows`."""
        request = rows.request
        rows.plain_reason = reason_not_to_draft(rows, has_drafter=self.drafter is not None)
        if rows.plain_reason is not None:
            return None
        wants_draws = self.acceptance is Acceptance.REJECTION and not request.params.is_greedy
        given = self.policy.budget(request)
        if given is None:
            rows.plain_reason = PlainReason.GUARD
            return forced_budget(request, self._layout, wants_draws=wants_draws)
        row_budget, max_depth = within_limits(request, given.row_budget, given.max_depth)
        return with_forced(DraftBudget(row_budget, max_depth, self._layout, wants_draws, self._max_reading_s(request)), request)

    def _max_reading_s(self, request: Request) -> float:
        """Seconds that a drafter may read of a request; no limit where it has read everything."""
        with self._calls.tolerated:
            if self.drafter is not None and self.drafter.reading_s(request) > 0.0:
                return self.policy.max_reading_s(request)
        return math.inf

    def _by_drafter(self, batch: Sequence[RequestRows]) -> Sequence[tuple[Drafter, Sequence[RequestRows]]]:
        """Who is asked for whom: the drafter, or the one of several that a request names."""
        if self.drafter is None or not batch:
            return []
        if all(rows.request.speculation.drafter is None for rows in batch):
            return [(self.drafter, batch)]
        named, groups = self.drafters, dict[str, list[RequestRows]]()
        for rows in batch:
            wanted = rows.request.speculation.drafter
            groups.setdefault(wanted if wanted in named else self.drafter.name, []).append(rows)
        return [(named[name], own) for name, own in groups.items()]

    def _constrain(self, batch: Sequence[RequestRows]) -> None:
        """Hold the guesses of requests with a grammar to it."""
        for rows in batch:
            if rows.request.processor.constraint is not None and rows.budget is not None:
                with self._calls.tolerated:  # the walk obeys the grammar in any case; if that cannot go on it will say so
                    constrain_guesses(rows, rows.budget)
