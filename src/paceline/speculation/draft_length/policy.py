"""Draft length policy. Of the draft tokens of all requests together, each step sends the k that give the greatest expected log-speedup:

    value(k) = mean over requests of log(1 + expected accepted tokens) - log(seconds(k) / seconds(0))

Before drafting, `plan_drafts` maximises the value with the acceptance rates by depth: it decides which requests draft how many tokens.
After drafting, `prune_drafts` maximises the value with the probability of each token, and drops unprofitable tokens. An overhead budget
limits drafting time without benefit: a token bucket in seconds, filled with a fixed share of the run time.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.runtimes.cost import ForwardProfile
from paceline.speculation.constrained import FORCED_SOURCE
from paceline.speculation.draft_length.acceptance import FORCED_TOKEN_RATE, SIBLING_RATE_FACTOR, AcceptanceRates, DraftHistory
from paceline.speculation.draft_length.cost import AdapterUse, BatchShape, CostModel
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

MIN_GAIN = 0.03  # drafts are sent if the expected speedup is at least 1 + MIN_GAIN
MIN_PATH_PROB = 0.02  # pruning drops draft tokens whose path probability is below this
UNMEASURED_DRAFT_LEN = 4  # maximum number of draft tokens of a drafter whose time or acceptance is not measured well enough
MIN_VERIFIED_TOKENS = 8  # number of verified tokens from which on the acceptance of a drafter counts as measured
NEGLIGIBLE_DRAFT_TIME_SHARE = 0.02  # a drafter stops at improbable tokens only if a token takes more than this share of a plain step
OVERHEAD_SHARE = 0.0075  # share of the run time that is added to the overhead budget
OVERHEAD_STEPS = 128  # maximum of the overhead budget: the share of this many steps
MAX_CHARGE_STEPS = 0.25  # a step without a draft uses up at most the time of this many plain steps of the overhead budget
MAX_TRIAL_CHARGE_STEPS = 4.0  # a trial uses up at most the time of this many plain steps of the overhead budget
TRIAL_TOKENS = 2  # draft length of a trial, a short draft that measures whether an unprofitable drafter has become profitable
MIN_TRIAL_GAIN = 0.1  # an unprofitable draft is sent as a trial only if at least this many of its tokens are expected to be accepted
MAX_BACKOFF_LEVEL = 6  # an unprofitable drafter pauses for at most 2 ** 6 = 64 steps
MAX_LOOKUP_BACKOFF_LEVEL = 3  # an unprofitable lookup drafter pauses for at most 2 ** 3 = 8 steps
MAX_UNSENT_TOKENS = 4  # maximum tokens of a dropped draft that are compared with the text generated afterwards


class FixedDraftLength:
    """Drafts the same number of tokens in every step, whether or not drafting pays. Also the interface of policies.

    Args:
        num_speculative_tokens: maximum depth of a draft.
        max_rows: maximum number of rows of the target's pass that a tree takes, root included; None = as many as a chain.
    """

    def __init__(self, num_speculative_tokens: int, *, max_rows: int | None = None) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_rows = max_rows if max_rows is not None else num_speculative_tokens + 1

    def begin_step(self, batch: Sequence[RequestRows]) -> SkipReason | None:
        """Start a step. Return the reason if no request may draft in it, else None."""
        return None

    def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
        """Return why a drafter may not draft for a request; None = the drafter may draft. May update the request's draft history."""
        return None

    def plan_drafts(self, batch: Sequence[RequestRows], drafter: Drafter, max_rows: int | None) -> None:
        """Reduce `rows.draft_budget` of each request to what the drafter should draft; to None if drafting is unprofitable.

        Args:
            batch: all rows of the pass, including drafts that other drafters have made in this step.
            max_rows: maximum number of rows of the pass; None = no limit.
        """

    def is_better_draft(self, rows: RequestRows, tree: DraftTree) -> bool:
        """Return whether `tree` is better than the draft that the request has.

        A sampled draft is always preferred. A choice that depends on the sampled tokens would change the distribution that rejection
        sampling preserves.
        """
        return bool(tree.draft_probs) or tree.num_draft_tokens > rows.num_draft_tokens

    def prune_drafts(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        """Drop draft tokens that are not expected to save more time than their rows take."""

    def observe_verified(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Update acceptance rates from a verified tree."""

    def observe_draft_time(self, drafter: Drafter, num_requests: int, depth: int, seconds: float, *, has_prefill: bool = False) -> None:
        """Update the drafting cost from the time of a `propose` call.

        Args:
            has_prefill: `seconds` include a prefill of the drafter, so that a draft alone takes less time.
        """

    def observe_step_time(
        self, batch: Sequence[RequestRows], forward_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0
    ) -> None:
        """Update the costs from the times of a step: the target's pass, other work, drafting, and the decisions of this policy."""

    def release(self, request: Request) -> None:
        """Free the draft histories of a request that ended."""

    def describe(self) -> str:
        """Return a description of the policy for the banner."""
        return f"{self.num_speculative_tokens} draft tokens a step"


class DraftLengths(NamedTuple):
    """How many draft tokens to send for each request of a batch."""

    draft_lengths: list[int]  # number of draft tokens of each request; all 0 if the expected speedup is below 1 + `MIN_GAIN`
    log_speedup: float  # logarithm of the greatest expected speedup, also if that is too small and `draft_lengths` are all 0
    expected_tokens: float  # expected emitted tokens of a step with these drafts
    seconds: float  # expected time of this step

    @property
    def speedup(self) -> float | None:
        """The greatest expected speedup as a factor; None if there were no draft tokens."""
        return None if self.log_speedup == -math.inf else math.exp(self.log_speedup)


def best_draft_lengths(
    path_probs: Sequence[Sequence[float]],
    times: Sequence[float],
    num_requests: int,
    *,
    draft_s: Sequence[float] = (),
    indices_to_draft: Collection[int] = (),
) -> DraftLengths:
    """Return the numbers of draft tokens with the greatest geometric-mean speedup of the requests.

    Draft tokens of all requests are sorted by marginal log-speedup. Every prefix of that order is evaluated, because the time of a pass
    grows unevenly with its rows: a local maximum of the speedup may not be the greatest.

    Args:
        path_probs: [draft tokens] by request: probability that the token and all before it on its path are accepted, descending.
        times: seconds of the step by number of draft tokens; the length of the list limits that number.
        num_requests: number of requests that emit a token in the step, with or without draft. A longer pass delays each of them.
        draft_s: seconds of drafting to depth 0, 1, …
        indices_to_draft: indices of the requests whose drafts do not exist yet. Only these need drafting time.
    """
    order = list[tuple[float, int, int]]()
    for index, request_probs in enumerate(path_probs):
        expected = 1.0
        for depth, gain in enumerate(request_probs, 1):
            order.append((-math.log1p(gain / expected), depth, index))
            expected += gain
    order.sort()
    total, draft_depth, best_count, best_value, best_s = 0.0, 0, 0, -math.inf, times[0]
    for count, (negative_gain, depth, index) in enumerate(order[: len(times) - 1], 1):
        total -= negative_gain
        if depth > draft_depth and index in indices_to_draft:
            draft_depth = depth
        seconds = times[count] + (draft_s[draft_depth] if draft_depth else 0.0)
        value = total / num_requests - math.log(seconds / times[0])
        if value > best_value:
            best_count, best_value, best_s = count, value, seconds
    counts = [0] * len(path_probs)
    if best_value < math.log1p(MIN_GAIN):
        return DraftLengths(counts, best_value, float(num_requests), times[0])
    for _, _, index in order[:best_count]:
        counts[index] += 1
    expected = num_requests + sum(sum(request_probs[:count]) for request_probs, count in zip(path_probs, counts, strict=True))
    return DraftLengths(counts, best_value, expected, best_s)


class AdaptiveDraftLength(FixedDraftLength):
    """Chooses the draft length of every step from measured costs and acceptance.

    Args:
        num_speculative_tokens, max_rows: limits, as for `FixedDraftLength`.
        profile: the target's forward times.
    """

    def __init__(self, num_speculative_tokens: int, profile: ForwardProfile, *, max_rows: int | None = None) -> None:
        super().__init__(num_speculative_tokens, max_rows=max_rows)
        self.cost = CostModel(profile)
        # keys: name of the drafter, and whether the requests are greedy
        self.rates = defaultdict[tuple[str, bool], AcceptanceRates](AcceptanceRates)
        self._step = 0
        # seconds that unprofitable drafting may take; while negative, no drafter is called in steps without prefill
        self._overhead_budget_s = MAX_CHARGE_STEPS * profile.seconds_at(1)
        self._next_trial_budget_s = 0.0  # overhead budget that the next trial of an unprofitable drafter needs
        self._shape = BatchShape(0, 0, False, 0.0, AdapterUse.NONE)  # inputs of the cost model in the current step
        self._trial_request: Request | None = None  # request that drafts a trial in the current step
        self._accepted_trial_step = -1  # the last step with a trial whose tokens were all accepted: the next step may have another trial
        # whether the step uses up overhead budget if it ends without a draft; False if no request may draft
        self._charges_planning = False
        self._mean_output_len = 0.0
        self._lookup_drafters = set[str]()  # names of drafters that copy from texts
        self._last_draft_step = 0  # the last step whose pass had draft rows

    def begin_step(self, batch: Sequence[RequestRows]) -> SkipReason | None:
        self._step += 1
        self._shape, self._trial_request, self._charges_planning = BatchShape.from_batch(batch), None, False
        is_overspent = self._overhead_budget_s < 0.0 and not self._follows_accepted_trial
        return SkipReason.UNPROFITABLE if is_overspent and self._shape.is_decoding else None

    @property
    def _follows_accepted_trial(self) -> bool:
        return self._step == self._accepted_trial_step + 1

    def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
        history = request.draft_histories[drafter.name]
        if history.resume_step > self._step or (history.unsent_draft and not self._score_unsent_draft(request, drafter, history)):
            return SkipReason.UNPROFITABLE
        self._charges_planning = True
        return None

    def plan_drafts(self, batch: Sequence[RequestRows], drafter: Drafter, max_rows: int | None) -> None:
        is_timed = drafter.traits.is_lookup or self.cost.is_draft_cost_known(drafter.name)
        for rows in batch:
            rates = self.rates[drafter.name, rows.request.params.is_greedy]
            if rows.draft_budget is not None and not (is_timed and rates.num_observed >= MIN_VERIFIED_TOKENS):
                rows.draft_budget = _limit_tokens(rows.draft_budget, UNMEASURED_DRAFT_LEN)
        if drafter.traits.is_lookup:  # lookup drafters take next to no time; `prune_drafts` drops unprofitable drafts
            self._lookup_drafters.add(drafter.name)
            return
        current_probs = [sorted(self._path_probs(rows.request, rows.tree)[1:], reverse=True) for rows in batch]
        path_probs, indices_to_draft = self._planned_path_probs(batch, drafter, current_probs)
        max_tokens = max(TRIAL_TOKENS, sum(map(len, path_probs)))
        if max_rows is not None:
            max_tokens = max(0, min(max_tokens, max_rows - self._shape.num_rows))
        times = self.cost.step_times(self._shape, max_tokens)
        draft_s = [self.cost.draft_s(drafter.name, len(indices_to_draft), depth) for depth in range(max(map(len, path_probs)) + 1)]
        num_emitting = sum(rows.tree is not None for rows in batch)
        best = best_draft_lengths(path_probs, times, num_emitting, draft_s=draft_s, indices_to_draft=indices_to_draft)
        is_better = best.log_speedup > best_draft_lengths(current_probs, times, num_emitting).log_speedup
        for index, rows in enumerate(batch):
            if rows.draft_budget is None:
                continue
            if max_tokens < 1:
                rows.skip_drafter(SkipReason.PASS_FULL)
                continue
            rows.expected_speedup, history = best.speedup, rows.request.draft_histories[drafter.name]
            may_draft = is_better and index in indices_to_draft and best.draft_lengths[index] > 0
            if may_draft and self._repays_prefill(rows.request, drafter, best, times):
                history.backoff_level = 0
                rows.draft_budget = self._planned_budget(
                    rows.request, drafter.name, rows.draft_budget, best.draft_lengths[index], best, times, len(batch)
                )
            elif current_probs[index]:
                rows.draft_budget = None
            elif not self._plan_trial(rows, drafter, times):
                self._back_off(history, MAX_BACKOFF_LEVEL)
                rows.skip_drafter(SkipReason.UNPROFITABLE)

    def is_better_draft(self, rows: RequestRows, tree: DraftTree) -> bool:
        if rows.num_draft_tokens == 0 or tree.draft_probs:
            return True
        return sum(self._path_probs(rows.request, tree)) > sum(self._path_probs(rows.request, rows.tree))

    def prune_drafts(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        prunable = [rows for rows in batch if rows.request is not self._trial_request and _can_prune(rows)]
        if not prunable:
            return
        num_fixed = sum(rows.num_draft_tokens for rows in batch) - sum(rows.num_draft_tokens for rows in prunable)
        orders = list[list[int]]()  # for each request: nodes of its draft, by descending path probability
        probs_by_request = list[list[float]]()  # for each request: path probabilities of its draft tokens, in descending order
        for rows in prunable:
            path_probs = self._path_probs(rows.request, rows.tree)
            nodes = [node for node, prob in enumerate(path_probs) if prob >= MIN_PATH_PROB]
            orders.append(sorted(nodes, key=path_probs.__getitem__, reverse=True))
            probs_by_request.append([path_probs[node] for node in orders[-1][1:]])
        max_tokens = sum(map(len, probs_by_request))
        if max_rows is not None:
            max_tokens = min(max_tokens, max_rows - self._shape.num_rows - num_fixed)
            if max_tokens < 1:  # the other rows alone fill the pass; `fit_rows` will remove the drafts
                return
        times = self.cost.step_times(self._shape, num_fixed + max_tokens)[num_fixed:]
        best = best_draft_lengths(probs_by_request, times, sum(rows.tree is not None for rows in batch))
        for rows, order, request_probs, count in zip(prunable, orders, probs_by_request, best.draft_lengths, strict=True):
            rows.expected_speedup = best.speedup
            if count == 0:
                if not self._send_trial(rows, order, request_probs, times):
                    self._drop_unprofitable_draft(rows)
            elif rows.tree is not None:
                rows.tree, rows.expected_tokens = rows.tree.subtree(sorted(order[: count + 1])), 1.0 + sum(request_probs[:count])

    def observe_verified(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        if (name := drafter_name_of(tree)) is None:
            return
        if request is self._trial_request and len(accepted_nodes) == tree.tree_depth:
            self._accepted_trial_step = self._step
        rates, history = self.rates[name, request.params.is_greedy], request.draft_histories[name]
        rates_by_depth = rates.rates_by_depth(tree.tree_depth)
        for node, accepted_child in zip([0, *accepted_nodes], [*accepted_nodes, None], strict=True):
            if accepted_child is None and request.is_finished:
                # The request ended at the last accepted node. The node's children were not verified, and do not count as rejected.
                return
            for rank, child in enumerate(tree.children(node)):
                if tree.sources[child] == FORCED_SOURCE:
                    continue
                prob, depth = None if tree.confidences is None else tree.confidences[child], tree.depths[child]
                if rank == 0:
                    rate = rates_by_depth[depth - 1] if prob is None else rates.rate_by_prob(prob)
                    history.observe(rate, accepted=child == accepted_child)
                rates.observe(depth, prob, is_first_child=rank == 0, accepted=child == accepted_child)

    def observe_draft_time(self, drafter: Drafter, num_requests: int, depth: int, seconds: float, *, has_prefill: bool = False) -> None:
        if not has_prefill or seconds < self.cost.draft_s(drafter.name, num_requests, depth):
            self.cost.observe_draft_time(drafter.name, num_requests, depth, seconds)

    def observe_step_time(
        self, batch: Sequence[RequestRows], forward_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0
    ) -> None:
        num_draft_tokens = sum(rows.num_draft_tokens for rows in batch)
        if not self._shape.is_decoding:
            return
        plain_s = min(forward_s, self.cost.step_times(self._shape, 0)[0])  # a stall of the machine must not fill the overhead budget
        if self._trial_request is not None:
            if self._accepted_trial_step != self._step:
                self._overhead_budget_s -= min(draft_s + plan_s + max(0.0, forward_s - plain_s), MAX_TRIAL_CHARGE_STEPS * plain_s)
        elif num_draft_tokens == 0 and self._charges_planning:
            self._overhead_budget_s -= min(draft_s + plan_s, MAX_CHARGE_STEPS * plain_s)
        max_budget_s = max(self._next_trial_budget_s, OVERHEAD_SHARE * OVERHEAD_STEPS * plain_s)
        self._overhead_budget_s = min(self._overhead_budget_s + OVERHEAD_SHARE * plain_s, max_budget_s)
        self._last_draft_step = self._step if num_draft_tokens else self._last_draft_step
        self.cost.observe_step_time(self._shape, num_draft_tokens, forward_s, host_s)

    def release(self, request: Request) -> None:
        request.draft_histories.clear()
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = float(request.num_output_tokens)
            self._mean_output_len = 0.75 * self._mean_output_len + 0.25 * length if self._mean_output_len else length

    def describe(self) -> str:
        return f"up to {self.num_speculative_tokens} draft tokens a step, as many as pay"

    def _planned_path_probs(
        self, batch: Sequence[RequestRows], drafter: Drafter, current_probs: Sequence[Sequence[float]]
    ) -> tuple[list[Sequence[float]], set[int]]:
        """Return path probabilities by request, as for `best_draft_lengths`, and the indices of requests for which to draft.

        For these requests, the probabilities are estimated from acceptance rates by depth. For other requests, the probabilities are
        `current_probs`, those of the existing draft (empty without one): this drafter is not expected to make a better draft.
        """
        path_probs, indices_to_draft = list(current_probs), set[int]()
        for index, rows in enumerate(batch):
            if rows.draft_budget is not None:
                rates, history = self.rates[drafter.name, rows.request.params.is_greedy], rows.request.draft_histories[drafter.name]
                estimates = history.path_rates(rates.rates_by_depth(rows.draft_budget.max_tokens), MIN_PATH_PROB, rates.optimism)
                if sum(estimates) > sum(current_probs[index]):
                    path_probs[index] = estimates
                    indices_to_draft.add(index)
        return path_probs, indices_to_draft

    def _planned_budget(
        self, request: Request, drafter: str, budget: DraftBudget, count: int, best: DraftLengths, times: Sequence[float], batch_size: int
    ) -> DraftBudget:
        """Return the budget of a request for which the policy chose `count` draft tokens.

        If drafting a token takes noticeable time and the drafter gives probabilities, the drafter stops by itself: at the path probability
        below which another token costs more time than it saves. `count` then limits the draft only if the batch has several requests,
        because all of them wait for the longest draft.
        """
        rates, history = self.rates[drafter, request.params.is_greedy], request.draft_histories[drafter]
        token_s = self.cost.draft_token_s(drafter)
        stops_early = rates.has_probs and not budget.needs_draft_probs and token_s > NEGLIGIBLE_DRAFT_TIME_SHARE * times[0]
        if count < budget.max_depth and not (stops_early and batch_size == 1):
            width = max(1, (budget.max_rows - 1) // max(1, budget.max_depth))  # number of draft tokens at each depth of a tree
            budget = replace(budget, max_rows=1 + count * width, max_depth=count)
        if not stops_early:
            return budget
        num_rows = min(8, len(times) - 1)  # the time of a pass is piecewise constant in its rows: use the mean slope
        row_s = max(0.0, times[num_rows] - times[0]) / max(1, num_rows)
        # Drafting stops before a token whose expected accepted tokens per second of added time are fewer than those of the planned step.
        # The rate at depth 1 approximates the token's acceptance rate.
        lost_tokens = best.expected_tokens / best.seconds * (row_s + (token_s if batch_size == 1 else 0.0))
        min_path_prob = min(0.9, lost_tokens / max(0.2, rates.rates_by_depth(1)[0]))
        return replace(budget, min_path_prob=min_path_prob, calibrate=lambda prob: history.rate_for_request(rates.rate_by_prob(prob)))

    def _repays_prefill(self, request: Request, drafter: Drafter, best: DraftLengths, times: Sequence[float]) -> bool:
        """Return whether drafting saves more time over the rest of a request than the drafter's prefill takes."""
        prefill_s = drafter.prefill_s(request)
        if prefill_s <= 0.0:
            return True
        # an output longer than the mean of finished outputs is expected to reach twice its present length
        num_output = request.num_output_tokens
        num_expected = max(self._mean_output_len - num_output, num_output, 1.0) if self._mean_output_len else request.num_remaining_tokens
        saved_s_per_token = times[0] * (1.0 - math.exp(-best.log_speedup))
        return prefill_s <= saved_s_per_token * min(request.num_remaining_tokens, num_expected)

    def _plan_trial(self, rows: RequestRows, drafter: Drafter, times: Sequence[float]) -> bool:
        """Reduce an unprofitable drafter's budget to a trial; return False if the overhead budget is too small."""
        if rows.draft_budget is None or min(rows.draft_budget.max_depth, len(times) - 1) < TRIAL_TOKENS:
            return False
        cost_s = times[TRIAL_TOKENS] - times[0] + self.cost.draft_s(drafter.name, 1, TRIAL_TOKENS)
        if not self._begin_trial(rows, drafter.name, cost_s, times[0], drafter.prefill_s(rows.request)):
            return False
        rows.draft_budget = _limit_tokens(rows.draft_budget, TRIAL_TOKENS)
        return True

    def _send_trial(self, rows: RequestRows, nodes: Sequence[int], path_probs: Sequence[float], times: Sequence[float]) -> bool:
        """Reduce an unprofitable draft of a lookup drafter to a trial; return False if the overhead budget is too small.

        A trial measures the cost of rows. Without trials, lookup drafters would never draft again after a cost was measured too high. For
        other drafters, `plan_drafts` starts trials. Improbable drafts are no trials: `unsent_draft` measures acceptance without rows.
        """
        if self._step - self._last_draft_step < OVERHEAD_STEPS:
            return False
        count = min(TRIAL_TOKENS, len(path_probs))
        name = "" if rows.tree is None else drafter_name_of(rows.tree)
        if rows.tree is None or name is None or name not in self._lookup_drafters or sum(path_probs[:count]) < MIN_TRIAL_GAIN:
            return False
        if not self._begin_trial(rows, name, times[count] - times[0], times[0]):
            return False
        rows.tree, rows.expected_tokens = rows.tree.subtree(sorted(nodes[: count + 1])), 1.0 + sum(path_probs[:count])
        return True

    def _begin_trial(self, rows: RequestRows, drafter: str, cost_s: float, plain_s: float, prefill_s: float = 0.0) -> bool:
        """Let a request draft a trial that is expected to take `cost_s`; return False if the overhead budget is too small."""
        if self._trial_request is not None:
            return False
        # a nearly full overhead budget always suffices for a trial: otherwise a cost that was measured too high would never be corrected
        required_s = min(cost_s, 0.9 * OVERHEAD_SHARE * OVERHEAD_STEPS * plain_s) + prefill_s
        if self._overhead_budget_s < required_s and not self._follows_accepted_trial:
            self._next_trial_budget_s = required_s
            return False
        self._trial_request, self._next_trial_budget_s = rows.request, 0.0
        # give earlier tokens no weight in the request's acceptance, so that the two tokens of the trial can change it
        rows.request.draft_histories[drafter].num_verified_tokens = 0.0
        return True

    def _back_off(self, history: DraftHistory, max_level: int) -> None:
        """Raise the backoff level, and pause the drafter until the next step whose index is a multiple of 2 ** level.

        So requests of the same level resume in the same step: drafting for several requests at once is cheaper.
        """
        history.backoff_level = min(max_level, history.backoff_level + 1)
        history.resume_step = (self._step // 2**history.backoff_level + 1) * 2**history.backoff_level

    def _drop_unprofitable_draft(self, rows: RequestRows) -> None:
        """Drop a request's draft, but keep its first tokens as `unsent_draft`."""
        tree, request = rows.tree, rows.request
        if tree is not None and (name := drafter_name_of(tree)) is not None:
            unsent, history = tree.subtree([0, *tree.first_child_path()[:MAX_UNSENT_TOKENS]]), request.draft_histories[name]
            history.unsent_draft = len(request.token_ids), unsent
            history.resume_step = self._step + unsent.tree_depth
        rows.drop_draft(SkipReason.UNPROFITABLE)

    def _score_unsent_draft(self, request: Request, drafter: Drafter, history: DraftHistory) -> bool:
        """Update acceptance rates from an unsent draft, as if it had been verified; return whether its first token was correct."""
        num_tokens, tree = history.unsent_draft or (0, DraftTree.root_only(0))
        generated, accepted = request.token_ids[num_tokens:], list[int]()
        for token in generated:
            child = tree.child(accepted[-1] if accepted else 0, token)
            if child is None:
                break
            accepted.append(child)
        if len(accepted) == len(generated) < tree.tree_depth:  # the generated text agrees with the draft, but is still too short
            return False
        history.unsent_draft = None
        self.observe_verified(request, tree, accepted)
        if accepted:
            history.backoff_level = 0
        else:
            self._back_off(history, MAX_LOOKUP_BACKOFF_LEVEL if drafter.traits.is_lookup else MAX_BACKOFF_LEVEL)
        return len(accepted) > 0

    def _path_probs(self, request: Request, tree: DraftTree | None) -> list[float]:
        """Return [N] probabilities that each node and all before it are accepted, 1 for the root."""
        if tree is None or tree.num_draft_tokens == 0:
            return [1.0]
        name = drafter_name_of(tree) or FORCED_SOURCE
        rates, history = self.rates[name, request.params.is_greedy], request.draft_histories[name]
        rates_by_depth, path_probs = rates.rates_by_depth(tree.tree_depth), [1.0]
        sibling_rates = dict[int, float]()  # for each parent node: acceptance rate of its child that was handled last
        for node in range(1, len(tree.token_ids)):
            parent = tree.parents[node]
            if tree.sources[node] == FORCED_SOURCE:
                rate = FORCED_TOKEN_RATE
            elif path_probs[parent] < MIN_PATH_PROB:
                rate = 0.0
            elif tree.confidences is not None:
                rate = history.rate_for_request(rates.rate_by_prob(tree.confidences[node], is_first_child=parent not in sibling_rates))
            elif parent in sibling_rates:
                rate = SIBLING_RATE_FACTOR * sibling_rates[parent]
            else:
                rate = history.rate_for_request(rates_by_depth[tree.depths[node] - 1])
            sibling_rates[parent] = rate
            path_probs.append(path_probs[parent] * rate)
        return path_probs


def drafter_name_of(tree: DraftTree) -> str | None:
    """Return the name of the drafter that proposed a tree; None if all its tokens are forced by a grammar."""
    return next((source for source in tree.sources[1:] if source != FORCED_SOURCE), None)


def _limit_tokens(budget: DraftBudget, num_tokens: int) -> DraftBudget:
    """Return `budget`, reduced to at most `num_tokens` draft tokens."""
    depth = min(budget.max_depth, num_tokens)
    return replace(budget, max_rows=min(budget.max_rows, depth + 1), max_depth=depth)


def _can_prune(rows: RequestRows) -> bool:
    """Return whether draft tokens of a request may be removed. Removing sampled tokens would change the output distribution."""
    tree = rows.tree
    return tree is not None and rows.max_draft_budget is not None and tree.num_draft_tokens > 0 and not tree.draft_probs
