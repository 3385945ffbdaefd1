"""Speculation as one object: drafters, the policy that decides how much they draft, and the rule that accepts draft tokens."""

from collections.abc import Sequence
from time import perf_counter

from paceline.runtimes.base import ForwardInputs, ForwardOutput, Network, PlanOutput
from paceline.sampling.path_sampler import PathRequest
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import CommittedRows, Drafter, DrafterNeeds
from paceline.speculation.propose import ErrorGuard, Proposer
from paceline.speculation.rejection import Acceptance, verify_rejection
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult, verify


class Speculator:
    """Drafts for the requests of a step, verifies the drafts and updates the policy with the outcome. A drafter that fails gives no draft;
    a step without any draft is plain.

    Args:
        drafters: empty for plain decoding.
        policy: decides how much is drafted.
        vocab_size: number of ids of the tokenizer. Further logits of the model are padding, whose ids are never drafted or emitted.
        acceptance: rule that accepts draft tokens.

    Attributes:
        drafter_names: names of the drafters, in order.
        uses_predicted_outputs: whether a drafter copies from `Request.prediction_token_ids`.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: FixedDraftLength,
        *,
        vocab_size: int,
        acceptance: Acceptance = Acceptance.MATCH,
    ) -> None:
        self.acceptance, self.vocab_size = acceptance, vocab_size
        self.drafters, self.policy = tuple(drafters), policy
        self.drafter_names = tuple(drafter.name for drafter in drafters)
        self.uses_predicted_outputs = any(drafter.traits.uses_predicted_outputs for drafter in drafters)
        self._guard = ErrorGuard()
        self._proposer = Proposer(drafters, self._guard, vocab_size=vocab_size)
        self._observers = [drafter for drafter in drafters if type(drafter).observe is not Drafter.observe]
        self._needs = DrafterNeeds.union(drafters)
        self._forward_s = 0.0  # seconds of the last forward pass

    @property
    def num_drafter_failures(self) -> int:
        """Number of suppressed exceptions of drafters and policy."""
        return self._guard.num_failures

    def propose(self, batch: Sequence[RequestRows], max_rows: int | None = None) -> None:
        """Set the draft of every request, or the reason why it has none. `max_rows`: as for `Proposer.propose`."""
        self._proposer.propose(batch, self.policy, max_rows, is_rejection=self.acceptance is Acceptance.REJECTION)

    def sampler_input(self, rows: RequestRows) -> PathRequest | None:
        """Return the input of the compiled sampler; None if the request's tree must be verified row by row."""
        request, tree, sampler = rows.request, rows.tree, rows.request.processor.path_sampler
        if tree is None or sampler is None or not self._verifies_by_match(request):
            return None
        position = len(request.token_ids)
        return PathRequest(sampler, tree.token_ids, tree.parents, request.seed, request.sample_index, position, rows.root_logits_row)

    def verify(self, rows: RequestRows, tree: DraftTree) -> VerifyResult:
        """Verify a request's tree by the rule `acceptance`."""
        if self._verifies_by_match(rows.request):
            return verify(tree, rows.logits, rows.request, rows.sampled_path)
        return verify_rejection(tree, rows.logits, rows.request)

    def _verifies_by_match(self, request: Request) -> bool:
        """Return whether a request is verified by the rule MATCH. At temperature 0 always, because both rules accept the same tokens."""
        return self.acceptance is Acceptance.MATCH or request.params.is_greedy

    def forward(self, target: Network, arguments: ForwardInputs) -> ForwardOutput:
        """Run the target's pass and time it."""
        start_s = perf_counter()
        output = target.forward(*arguments)
        self._forward_s = perf_counter() - start_s
        return output

    def observe_verified(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Pass the outcome of a verified draft to the policy."""
        with self._guard:
            self.policy.observe_verified(request, tree, accepted_nodes)

    def observe(self, batch: Sequence[RequestRows], seconds: float) -> None:
        """Pass the times of a step to the policy, and the rows that were kept to the drafters. `seconds`: time of the whole step."""
        if not self.drafters:
            return
        draft_s, plan_s = self._proposer.draft_s, self._proposer.plan_s
        host_s = max(0.0, seconds - self._forward_s - draft_s - plan_s)
        with self._guard:
            self.policy.observe_step_time(batch, self._forward_s, host_s, draft_s, plan_s)
        if self._observers:
            self.observe_rows([self._committed_rows(rows, rows.output) for rows in batch if rows.output is not None and rows.is_observed])

    def observe_rows(self, committed: Sequence[CommittedRows]) -> None:
        """Pass the rows that stay in the target's cache to the drafters, each with the hidden states that the drafter needs."""
        for drafter in self._observers:
            with self._guard:
                drafter.observe([rows.select_layers(self._needs.layers, drafter.needs.layers) for rows in committed])

    def _committed_rows(self, rows: RequestRows, output: PlanOutput) -> CommittedRows:
        """Return a request's kept rows with the hidden states that at least one drafter needs."""
        nodes = rows.kept_nodes
        hidden = output.hidden_states(nodes) if self._needs.hidden_states else None
        collected = output.collected_hidden_states(nodes) if self._needs.layers else ()
        return CommittedRows(rows.request, rows.first_position, len(nodes), hidden, collected)

    def preempt(self, request: Request) -> None:
        """Free the drafters' state of a request whose cache rows were evicted. Acceptance rates are kept."""
        if request.is_speculative:
            for drafter in self.drafters:
                with self._guard:
                    drafter.release(request)

    def release(self, request: Request) -> None:
        """Free the state of policy and drafters for a request that ended."""
        with self._guard:
            self.policy.release(request)
        self.preempt(request)
