"""Draft length policy. Each step sends the number of draft tokens with the greatest expected log-speedup, averaged over the requests:

    value(k) = mean over requests of log(1 + expected accepted tokens) - log(seconds(k) / seconds(0))    with the best k draft tokens

Before drafting, `plan` maximises it with the acceptance rates by depth, and so decides which requests draft and how far. After drafting,
`select` maximises it with the probability of each token, and drops the other tokens. Time that brought nothing is limited by an overhead
budget, a token bucket that fills with a fixed share of the run time. Decisions change the speed, never a token.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.kv_cache.row_plan import TreeLayout, is_chain
from paceline.runtimes.cost import ForwardProfile
from paceline.speculation.constrained import FORCED
from paceline.speculation.draft_length.acceptance import FORCED_RATE, SIBLING_FACTOR, AcceptanceRates, DraftHistory
from paceline.speculation.draft_length.cost import BatchShape, CostModel
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

MIN_GAIN = 0.03  # minimum expected speedup minus 1 for which draft tokens are sent
MIN_PATH_PROB = 0.02  # path probability below which a draft token is never sent
COLD_TOKENS = 4  # maximum draft length of a drafter with few measurements
CHEAP_SHARE = 0.02  # share of a plain step below which a draft token's time is negligible, so the drafter need not stop early
OVERHEAD_SHARE = 0.01  # share of run time that may be spent on drafting without benefit
OVERHEAD_STEPS = 128  # number of steps whose share the overhead budget can accumulate
MAX_CHARGE = 0.25  # maximum charge of one step to the overhead budget, in forward passes
PROBE_TOKENS = 2  # draft length of a probe, which measures whether an unprofitable drafter is profitable again
MAX_BACKOFF_LEVEL, MAX_LOOKUP_BACKOFF_LEVEL = 6, 3  # at most 2 ** 6 = 64 steps; 8 for lookup drafters, which take next to no time
UNSENT_TOKENS = 4  # tokens of a dropped draft that are compared with the text afterwards


class FixedDraftLength:
    """Drafts the same number of tokens in every step, whether or not that pays. Also the interface of policies.

    Args:
        num_speculative_tokens: depth of a draft.
        row_budget: most rows of the target's pass that a tree takes, root included; None = those of a chain.
    """

    def __init__(self, num_speculative_tokens: int, *, row_budget: int | None = None) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.row_budget = row_budget if row_budget is not None else num_speculative_tokens + 1

    def begin_step(self, batch: Sequence[RequestRows]) -> SkipReason | None:
        """Start a step; return the reason if no request is to draft in it."""
        return None

    def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
        """Return why a drafter is not to draft for a request; None = it may. Called once a step for each; may update the history."""
        return None

    def plan(self, batch: Sequence[RequestRows], drafter: Drafter, max_rows: int | None) -> None:
        """Reduce the budgets of a drafter (`rows.budget`), to None where drafting is not expected to pay.

        Args:
            batch: all rows of the pass, with the drafts of drafters that were called before.
            max_rows: most rows of the pass; None = no limit.
        """

    def prefers(self, rows: RequestRows, tree: DraftTree) -> bool:
        """Return whether a draft is better than the present one of a request.

        A drawn draft always is: to choose by the tokens drawn would change the distribution that rejection sampling preserves.
        """
        return bool(tree.draft_probs) or tree.num_draft_tokens > rows.num_draft_tokens

    def prune_drafts(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        """Drop draft tokens that are not expected to pay for their rows."""

    def observe_verified(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Update acceptance rates from a verified tree."""

    def observe_draft_time(self, drafter: Drafter, num_requests: int, depth: int, seconds: float) -> None:
        """Update the drafting cost from the time of a `propose` call."""

    def observe_step_time(
        self, batch: Sequence[RequestRows], forward_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0
    ) -> None:
        """Update the costs from the times of a step: the target's pass, other work, drafting, and the decisions of this policy."""

    def release(self, request: Request) -> None:
        """Free what is kept for a request that ended."""

    def describe(self) -> str:
        """Return a description of the policy for the banner."""
        return f"{self.num_speculative_tokens} draft tokens a step"


class Choice(NamedTuple):
    """Numbers of draft tokens to send.

    Attributes:
        counts: by request; all 0 if the expected speedup is below `MIN_GAIN`.
        log_speedup: log of the expected speedup by the best number of draft tokens, even if below `MIN_GAIN`.
        expected_tokens, seconds: of the step with these counts.
    """

    counts: list[int]
    log_speedup: float
    expected_tokens: float
    seconds: float

    @property
    def speedup(self) -> float | None:
        """The expected speedup as a factor; None if there is no draft token."""
        return None if self.log_speedup == -math.inf else math.exp(self.log_speedup)


def best_choice(
    gains: Sequence[Sequence[float]],
    times: Sequence[float],
    num_requests: int,
    *,
    draft_s: Sequence[float] = (),
    undrafted: Collection[int] = (),
) -> Choice:
    """Return the numbers of draft tokens with the greatest geometric-mean speedup of the requests.

    Draft tokens of all requests are sorted by marginal log-speedup, and every prefix of that order is evaluated, because pass times grow in
    steps.

    Args:
        gains: by request, the probability that its first, second, … token and all before it on its path are accepted, descending.
        times: seconds of the step by number of draft tokens; the length of the list limits that number.
        num_requests: all requests that emit a token in the step. A longer pass delays each of them.
        draft_s: seconds of drafting to depth 0, 1, …
        undrafted: requests whose tokens are still to be drafted.
    """
    order = list[tuple[float, int, int]]()
    for index, own in enumerate(gains):
        tokens = 1.0
        for depth, gain in enumerate(own, 1):
            order.append((-math.log1p(gain / tokens), depth, index))
            tokens += gain
    order.sort()
    total, deepest, best, best_value, best_s = 0.0, 0, 0, -math.inf, times[0]
    for count, (gain, depth, index) in enumerate(order[: len(times) - 1], 1):
        total -= gain
        if depth > deepest and index in undrafted:
            deepest = depth
        seconds = times[count] + (draft_s[deepest] if deepest else 0.0)
        value = total / num_requests - math.log(seconds / times[0])
        if value > best_value:
            best, best_value, best_s = count, value, seconds
    counts = [0] * len(gains)
    if best_value < math.log1p(MIN_GAIN):
        return Choice(counts, best_value, float(num_requests), times[0])
    for _, _, index in order[:best]:
        counts[index] += 1
    expected = num_requests + sum(sum(own[:count]) for own, count in zip(gains, counts, strict=True))
    return Choice(counts, best_value, expected, best_s)


class AdaptiveDraftLength(FixedDraftLength):
    """Chooses the draft length of every step from measured costs and acceptance.

    Args:
        num_speculative_tokens, row_budget: limits, as for `FixedDraftLength`.
        profile: the target's forward times.
    """

    def __init__(self, num_speculative_tokens: int, profile: ForwardProfile, *, row_budget: int | None = None) -> None:
        super().__init__(num_speculative_tokens, row_budget=row_budget)
        self.cost = CostModel(profile)
        self.rates: dict[tuple[str, bool], AcceptanceRates] = {}  # acceptance rates by drafter, and by whether requests are greedy
        self._step = 0
        self._overhead_budget_s = MAX_CHARGE * profile.seconds_at(1)  # while the budget is negative, no request drafts
        self._next_probe_budget_s = 0.0  # amount that the budget must reach before the next probe
        self._shape: BatchShape | None = None  # of the step
        self._probed: Request | None = None  # in this step
        self._is_chargeable = False  # whether this step's decisions are charged; not if no request could draft, so that the budget refills
        self._mean_output_len = 0.0

    def begin_step(self, batch: Sequence[RequestRows]) -> SkipReason | None:
        self._step += 1
        self._shape, self._probed, self._is_chargeable = BatchShape.from_batch(batch), None, False
        return SkipReason.UNPROFITABLE if self._overhead_budget_s < 0.0 and self._shape.is_decoding else None

    def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
        _, history = self._rates_and_history(request, drafter.name)
        if history.resume_step > self._step or (history.unsent is not None and not self._score_unsent(request, drafter, history)):
            return SkipReason.UNPROFITABLE
        self._is_chargeable = True
        return None

    def plan(self, batch: Sequence[RequestRows], drafter: Drafter, max_rows: int | None) -> None:
        for rows in batch:
            if rows.budget is not None and not self._is_sufficiently_measured(rows.request, drafter):
                rows.budget = _limit_to_chain(rows.budget, COLD_TOKENS)
        if drafter.traits.is_lookup:  # lookup drafters take next to no time: `prune_drafts` judges their drafts
            return
        shape = self._shape or BatchShape.from_batch(batch)
        present = [sorted(self._path_probs(rows.request, rows.tree)[1:], reverse=True) for rows in batch]
        planned, undrafted = self._planned_gains(batch, drafter, present)
        most = max(PROBE_TOKENS, sum(map(len, planned)))
        most = max(0, most if max_rows is None else min(most, max_rows - shape.num_rows))
        times = self.cost.step_times(shape, most)
        draft_s = [self.cost.draft_s(drafter.name, len(undrafted), depth) for depth in range(max(map(len, planned)) + 1)]
        num_emitting = sum(rows.tree is not None for rows in batch)
        choice = best_choice(planned, times, num_emitting, draft_s=draft_s, undrafted=undrafted)
        is_better = choice.log_speedup > best_choice(present, times, num_emitting).log_speedup
        for index, rows in enumerate(batch):
            if rows.budget is None:
                continue
            if most < 1:
                rows.skip(SkipReason.PASS_FULL)
                continue
            rows.expected_speedup, history = choice.speedup, self._rates_and_history(rows.request, drafter.name)[1]
            is_chosen = is_better and index in undrafted and choice.counts[index] > 0
            if is_chosen and self._repays_prefill(rows.request, drafter, choice, times):
                history.pause_exponent = 0
                rows.budget = self._chosen_budget(rows.request, drafter, rows.budget, choice.counts[index], choice, times, len(batch))
            elif present[index]:
                rows.budget = None
            elif not self._try_probe(rows, drafter, times):
                self._back_off(history, MAX_BACKOFF_LEVEL)
                rows.skip(SkipReason.UNPROFITABLE)

    def prefers(self, rows: RequestRows, tree: DraftTree) -> bool:
        if rows.num_draft_tokens == 0 or tree.draft_probs:
            return True
        return sum(self._path_probs(rows.request, tree)) > sum(self._path_probs(rows.request, rows.tree))

    def prune_drafts(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        prunable = [rows for rows in batch if rows.request is not self._probed and _can_prune(rows)]
        if not prunable or self._shape is None:
            return
        num_fixed = sum(rows.num_draft_tokens for rows in batch) - sum(rows.num_draft_tokens for rows in prunable)
        reached = [self._path_probs(rows.request, rows.tree) for rows in prunable]
        orders = [sorted([node for node, prob in enumerate(own) if prob >= MIN_PATH_PROB], key=lambda node: -own[node]) for own in reached]
        gains = [[own[node] for node in order[1:]] for own, order in zip(reached, orders, strict=True)]
        most = sum(map(len, gains))
        if max_rows is not None:
            most = min(most, max_rows - self._shape.num_rows - num_fixed)
            if most < 1:  # `fit_rows` removes the drafts
                return
        times = self.cost.step_times(self._shape, num_fixed + most)[num_fixed:]
        choice = best_choice(gains, times, sum(rows.tree is not None for rows in batch))
        for rows, order, own, count in zip(prunable, orders, gains, choice.counts, strict=True):
            rows.expected_speedup = choice.speedup
            if count == 0:
                self._drop_unprofitable_draft(rows)
            elif rows.tree is not None:
                rows.tree, rows.expected_tokens = rows.tree.subtree(sorted(order[: count + 1])), 1.0 + sum(own[:count])

    def observe_verified(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        if (name := drafter_of(tree)) is None:
            return
        rates, history = self._rates_and_history(request, name)
        rates_by_depth = rates.rates_by_depth(tree.tree_depth)
        next_nodes = [
            *accepted_nodes,
            *([] if request.is_finished else [-1]),
        ]  # the last accepted node has no accepted child; if the request finished there, none was judged
        for node, accepted_child in zip([0, *accepted_nodes], next_nodes, strict=False):
            for rank, child in enumerate(tree.children(node)):
                if tree.sources[child] == FORCED:
                    continue
                prob, depth = None if tree.probs is None else tree.probs[child], tree.depths[child]
                if rank == 0:
                    history.observe(
                        rates_by_depth[depth - 1] if prob is None else rates.rate_by_prob(prob), accepted=child == accepted_child
                    )
                rates.observe(depth, prob, is_first=rank == 0, accepted=child == accepted_child)

    def observe_draft_time(self, drafter: Drafter, num_requests: int, depth: int, seconds: float) -> None:
        self.cost.observe_draft_time(drafter.name, num_requests, depth, seconds)

    def observe_step_time(
        self, batch: Sequence[RequestRows], forward_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0
    ) -> None:
        num_drafts = sum(rows.num_draft_tokens for rows in batch)
        if self._shape is None or not self._shape.is_decoding:
            return
        plain_s = min(forward_s, self.cost.step_times(self._shape, 0)[0])  # a stall of the machine must not fill the overhead budget
        if num_drafts == 0 and self._is_chargeable:
            self._overhead_budget_s -= min(draft_s + plan_s, MAX_CHARGE * plain_s)
        most_s = max(self._next_probe_budget_s, OVERHEAD_SHARE * OVERHEAD_STEPS * plain_s)
        self._overhead_budget_s = min(self._overhead_budget_s + OVERHEAD_SHARE * plain_s, most_s)
        self.cost.observe_step_time(self._shape, num_drafts, forward_s, host_s)

    def release(self, request: Request) -> None:
        request.draft_histories.clear()
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = float(request.num_output_tokens)
            self._mean_output_len = 0.75 * self._mean_output_len + 0.25 * length if self._mean_output_len else length

    def describe(self) -> str:
        return f"up to {self.num_speculative_tokens} draft tokens a step, as many as pay"

    def _rates_and_history(self, request: Request, drafter: str) -> tuple[AcceptanceRates, DraftHistory]:
        """Return a drafter's acceptance rates over all requests, and its history for one request."""
        key = drafter, request.params.is_greedy
        if key not in self.rates:
            self.rates[key] = AcceptanceRates()
        if drafter not in request.draft_histories:
            request.draft_histories[drafter] = DraftHistory()
        return self.rates[key], request.draft_histories[drafter]

    def _is_sufficiently_measured(self, request: Request, drafter: Drafter) -> bool:
        """Return whether enough was measured of a drafter to draft as many tokens as the model of costs and acceptance suggests."""
        is_timed = drafter.traits.is_lookup or self.cost.is_draft_cost_known(drafter.name)
        return is_timed and self._rates_and_history(request, drafter.name)[0].num_observed >= 2 * COLD_TOKENS

    def _planned_gains(
        self, batch: Sequence[RequestRows], drafter: Drafter, present: Sequence[Sequence[float]]
    ) -> tuple[list[Sequence[float]], set[int]]:
        """Return the expected gains of the better draft of each request, its present one or this drafter's, and which have the latter.

        A gain is the probability that a draft token and all before it are accepted, [draft tokens] for each request.
        """
        planned, undrafted = list(present), set[int]()
        for index, rows in enumerate(batch):
            if rows.budget is not None:
                rates, history = self._rates_and_history(rows.request, drafter.name)
                gains = history.path_rates(rates.rates_by_depth(rows.budget.max_tokens), MIN_PATH_PROB, rates.optimism)
                if sum(gains) > sum(present[index]):
                    planned[index] = gains
                    undrafted.add(index)
        return planned, undrafted

    def _chosen_budget(
        self, request: Request, drafter: Drafter, budget: DraftBudget, count: int, choice: Choice, times: Sequence[float], num_requests: int
    ) -> DraftBudget:
        """Return the budget of a request that drafts `count` tokens.

        If its drafter gives probabilities and its tokens take time, it stops where the probability of the path no longer pays for a token.
        Then a single request is not limited to `count` tokens. In a batch, others wait for the longest draft.
        """
        rates, history = self._rates_and_history(request, drafter.name)
        token_s = self.cost.draft_token_s(drafter.name)
        stops_early = rates.has_probs and not budget.needs_draft_probs and token_s > CHEAP_SHARE * times[0]
        if count < budget.max_depth and not (stops_early and num_requests == 1):
            width = max(1, (budget.row_budget - 1) // max(1, budget.max_depth))
            budget = replace(budget, row_budget=1 + count * width, max_depth=count)
        if not stops_early:
            return budget
        span = min(8, len(times) - 1)
        row_s = max(0.0, times[span] - times[0]) / max(1, span)
        tokens_lost = choice.expected_tokens / choice.seconds * (row_s + (token_s if num_requests == 1 else 0.0))
        min_path_prob = min(0.9, tokens_lost / max(0.2, rates.rates_by_depth(1)[0]))
        return replace(budget, min_path_prob=min_path_prob, rate_of=lambda prob: history.request_rate(rates.rate_by_prob(prob)))

    def _repays_prefill(self, request: Request, drafter: Drafter, choice: Choice, times: Sequence[float]) -> bool:
        """Return whether drafting saves more time over the rest of a request than its drafter needs to read the text first."""
        prefill_s = drafter.prefill_s(request)
        if prefill_s <= 0.0:
            return True
        num_output = request.num_output_tokens
        expected = max(self._mean_output_len - num_output, num_output, 1.0) if self._mean_output_len else request.num_remaining_tokens
        saved_s = times[0] * (1.0 - math.exp(-choice.log_speedup))  # for one token
        return prefill_s <= saved_s * min(request.num_remaining_tokens, expected)

    def _try_probe(self, rows: RequestRows, drafter: Drafter, times: Sequence[float]) -> bool:
        """Let a drafter that is not expected to pay draft `PROBE_TOKENS`, if the overhead budget holds the price."""
        if self._probed is not None or rows.budget is None or min(rows.budget.max_depth, len(times) - 1) < PROBE_TOKENS:
            return False
        price_s = times[PROBE_TOKENS] - times[0] + self.cost.draft_s(drafter.name, 1, PROBE_TOKENS)
        most_s = 0.9 * OVERHEAD_SHARE * OVERHEAD_STEPS * times[0]  # a full budget pays for any draft: its measured cost may be a stall
        prefill_s = drafter.prefill_s(rows.request)
        if self._overhead_budget_s < min(price_s, most_s) + prefill_s:
            self._next_probe_budget_s = min(price_s, most_s) + prefill_s
            return False
        self._overhead_budget_s, self._next_probe_budget_s = self._overhead_budget_s - price_s - prefill_s, 0.0
        self._probed = rows.request
        self._rates_and_history(rows.request, drafter.name)[
            1
        ].num_observed = 0.0  # so that one probe is enough to correct the acceptance rate of this request
        rows.budget = _limit_to_chain(rows.budget, PROBE_TOKENS)
        return True

    def _back_off(self, history: DraftHistory, max_level: int) -> None:
        """Wait twice as many steps as before. Requests of the same level resume in the same step, because drafting together is cheaper."""
        history.pause_exponent = min(max_level, history.pause_exponent + 1)
        history.resume_step = (self._step // 2**history.pause_exponent + 1) * 2**history.pause_exponent

    def _drop_unprofitable_draft(self, rows: RequestRows) -> None:
        """Drop a request's draft, but store its first tokens, to compare them with the text later."""
        tree, request = rows.tree, rows.request
        if tree is not None and (name := drafter_of(tree)) is not None:
            start, history = tree.subtree([0, *tree.first_child_path()[:UNSENT_TOKENS]]), self._rates_and_history(request, name)[1]
            history.unsent = len(request.token_ids), start
            history.resume_step = self._step + start.tree_depth
        rows.drop_draft(SkipReason.UNPROFITABLE)

    def _score_unsent(self, request: Request, drafter: Drafter, history: DraftHistory) -> bool:
        """Update acceptance rates from an unsent draft, as if it had been verified; return whether its first token was correct."""
        num_tokens, tree = history.unsent or (0, DraftTree.root_only(0))
        text, accepted = request.token_ids[num_tokens:], list[int]()
        for token in text:
            child = tree.child(accepted[-1] if accepted else 0, token)
            if child is None:
                break
            accepted.append(child)
        if len(accepted) == len(text) < tree.tree_depth:  # right so far
            return False
        history.unsent = None
        self.observe_verified(request, tree, accepted)
        if accepted:
            history.pause_exponent = 0
        else:
            self._back_off(history, MAX_LOOKUP_BACKOFF_LEVEL if drafter.traits.is_lookup else MAX_BACKOFF_LEVEL)
        return len(accepted) > 0

    def _path_probs(self, request: Request, tree: DraftTree | None) -> list[float]:
        """Return [N] probabilities that each node and all before it are accepted, 1 for the root."""
        if tree is None or tree.num_draft_tokens == 0:
            return [1.0]
        rates, history = self._rates_and_history(request, drafter_of(tree) or FORCED)
        rates_by_depth, reached, last_sibling = rates.rates_by_depth(tree.tree_depth), [1.0], dict[int, float]()  # its rate, by parent
        for node in range(1, len(tree.token_ids)):
            parent = tree.parents[node]
            if tree.sources[node] == FORCED:
                rate = FORCED_RATE
            elif reached[parent] < MIN_PATH_PROB:
                rate = 0.0
            elif tree.probs is not None:
                rate = history.request_rate(rates.rate_by_prob(tree.probs[node], is_first=parent not in last_sibling))
            elif parent in last_sibling:
                rate = SIBLING_FACTOR * last_sibling[parent]
            else:
                rate = history.request_rate(rates_by_depth[tree.depths[node] - 1])
            last_sibling[parent] = rate
            reached.append(reached[parent] * rate)
        return reached


def drafter_of(tree: DraftTree) -> str | None:
    """Return the name of the drafter that proposed a tree; None if a grammar forces all of it."""
    return next((source for source in tree.sources[1:] if source != FORCED), None)


def _limit_to_chain(budget: DraftBudget, num_tokens: int) -> DraftBudget:
    """Return a budget for a chain of at most `num_tokens`."""
    depth = min(budget.max_depth, num_tokens)
    return replace(budget, row_budget=min(budget.row_budget, depth + 1), max_depth=depth)


def _can_prune(rows: RequestRows) -> bool:
    """Return whether single draft tokens of a request may be removed.

    Not drawn ones, whose distribution would change, nor those of branches that have cache rows of their own.
    """
    tree = rows.tree
    if tree is None or rows.max_budget is None or tree.num_draft_tokens == 0 or tree.draft_probs:
        return False
    return rows.max_budget.layout is TreeLayout.MASK or is_chain(tree.parents)
