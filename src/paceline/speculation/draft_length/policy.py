"""How much to draft. Each step sends the draft tokens that make its requests fastest: the argmax of expected log-speedup over their number.

    value(k) = mean over requests of log(1 + accepted tokens expected of the best k) - log(seconds(k) / seconds(0))

The same argmax runs before drafting, where depths alone are known, and after it, where each token has its own chance. Time that brought
nothing is paid from one token bucket, which fills with a fixed share of the run time. Decisions change speed, never tokens.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.kv_cache.row_plan import TreeLayout, is_chain
from paceline.runtimes.cost import ForwardProfile
from paceline.speculation.constrained import FORCED
from paceline.speculation.draft_length.acceptance import FORCED_RATE, SIBLING_FACTOR, AcceptanceRates, DraftHistory, UnsentDraft
from paceline.speculation.draft_length.cost import BatchShape, CostModel
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

MIN_GAIN = 0.03  # expected speedup - 1 from which on draft tokens are sent
MIN_REACH = 0.02  # chance of a token, with all before it, below which it is never worth a row
COLD_TOKENS = 4  # draft length while nothing is known of a drafter
CHEAP_SHARE = 0.02  # of a plain step: a drafter whose tokens take less need not stop early
BUCKET_SHARE = 0.01  # of run time, for attempts that brought nothing
BUCKET_STEPS = 128  # steps for which the bucket saves
MAX_CHARGE = 0.25  # of a forward pass: what one step may be charged
PROBE_TOKENS = 2  # drafted by a drafter that did not pay lately, to see whether it does now
MAX_BACKOFF_LEVEL, MAX_LOOKUP_BACKOFF_LEVEL = 6, 3  # 2 ** 6 = 64 steps, and 8 for lookup drafters, which cost next to nothing
UNSENT_TOKENS = 4  # of a draft that was not sent, compared with the text later


class FixedDraftLength:
    """Drafts the same number of tokens in every step, whether or not that pays; also the interface of policies.

    Args:
        num_speculative_tokens: depth of a draft.
        row_budget: rows of the target's pass a tree may cost, root included; None = those of a chain.
    """

    def __init__(self, num_speculative_tokens: int, *, row_budget: int | None = None) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.row_budget = row_budget if row_budget is not None else num_speculative_tokens + 1

    def begin_step(self, batch: Sequence[RequestRows]) -> SkipReason | None:
        """Start a step; return the reason if no request is to draft in it."""
        return None

    def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
        """Return why a drafter is not to draft for a request in this step; None = it may."""
        return None

    def plan(self, batch: Sequence[RequestRows], drafter: Drafter, max_rows: int | None) -> None:
        """Reduce the budgets of the requests that a drafter may draft for (`rows.budget`), to None where drafting does not pay.

        Args:
            batch: all rows of the pass, with the drafts that drafters before this one proposed.
            max_rows: of the pass; None = no limit.
        """

    def prefers(self, rows: RequestRows, tree: DraftTree) -> bool:
        """Return whether a draft is better than the one that a request has already.

        A drawn draft always is: to choose by what was drawn would change the distribution that rejection keeps.
        """
        return bool(tree.draft_probs) or tree.num_draft_tokens > rows.num_draft_tokens

    def select(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        """Remove draft tokens that are not worth their rows."""

    def observe(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Learn from a verified tree."""

    def observe_draft(self, drafter: Drafter, num_requests: int, depth: int, seconds: float) -> None:
        """Learn the time of a proposal."""

    def observe_step(
        self, batch: Sequence[RequestRows], forward_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0
    ) -> None:
        """Learn the times of a step: the target's pass, other work, drafting, and this policy's decisions."""

    def release(self, request: Request) -> None:
        """Drop what is kept for a request that ended."""

    def describe(self) -> str:
        """One line for the banner."""
        return f"{self.num_speculative_tokens} draft tokens a step"


class Choice(NamedTuple):
    """How many draft tokens of each request are worth sending.

    Attributes:
        counts: by request.
        log_speedup: of the best number of draft tokens; where it is below the least gain, all counts are 0.
        expected_tokens, seconds: of the step that is chosen.
    """

    counts: list[int]
    log_speedup: float
    expected_tokens: float
    seconds: float

    @property
    def speedup(self) -> float | None:
        """The speedup as a factor; None where no draft token is possible."""
        return None if self.log_speedup == -math.inf else math.exp(self.log_speedup)


def best_choice(
    gains: Sequence[Sequence[float]],
    times: Sequence[float],
    num_requests: int,
    *,
    draft_s: Sequence[float] = (),
    undrafted: Collection[int] = (),
) -> Choice:
    """Return the number of draft tokens with the greatest geometric-mean speedup of the requests.

    All tokens are sorted by what they add to it, and each number of the best ones is evaluated, because passes get slower in steps.

    Args:
        gains: by request, the chance of its first, second, … token, descending: expected tokens that it adds.
        times: seconds of the step by number of draft tokens; the list's length limits that number.
        num_requests: all that emit a token in the step; a longer pass delays each.
        draft_s: seconds of drafting to depth 0, 1, …
        undrafted: requests whose tokens must be drafted first.
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
        self.rates: dict[tuple[str, bool], AcceptanceRates] = {}  # by drafter, and whether requests are greedy
        self._step = 0
        # seconds that may be spent on attempts that bring nothing; while it is negative, no request drafts
        self._bucket_s = MAX_CHARGE * profile.at(1)
        self._goal_s = 0.0  # what the bucket must hold for the next probe
        self._shape: BatchShape | None = None  # of the step
        self._probed: Request | None = None  # in this step
        self._is_considered = False  # whether a request might draft in this step; other steps cost the bucket nothing, so that it refills
        self._mean_output_len = 0.0

    def begin_step(self, batch: Sequence[RequestRows]) -> SkipReason | None:
        self._step += 1
        self._shape, self._probed, self._is_considered = BatchShape.of(batch), None, False
        return SkipReason.UNPROFITABLE if self._bucket_s < 0.0 and self._shape.is_decoding else None

    def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
        history = self._history(request, drafter.name)
        if history.resume_step > self._step or (history.unsent is not None and not self._score_unsent(request, drafter, history)):
            return SkipReason.UNPROFITABLE
        self._is_considered = True
        return None

    def plan(self, batch: Sequence[RequestRows], drafter: Drafter, max_rows: int | None) -> None:
        for rows in batch:
            if rows.budget is not None:
                rows.budget = self._cold_budget(rows.request, drafter, rows.budget)
        if drafter.traits.is_lookup:  # takes next to no time: its drafts are judged when they are there
            return
        shape = self._shape or BatchShape.of(batch)
        present = [sorted(self._reach(rows)[1:], reverse=True) for rows in batch]
        planned, undrafted = list(present), set[int]()
        for index, rows in enumerate(batch):
            if rows.budget is not None:
                rates = self._rates(rows.request, drafter.name)
                by_depth = rates.by_depth(rows.budget.max_tokens)
                gains = self._history(rows.request, drafter.name).path_rates(by_depth, MIN_REACH, rates.optimism)
                if sum(gains) > sum(present[index]):
                    planned[index] = gains
                    undrafted.add(index)
        most = max(PROBE_TOKENS, sum(map(len, planned)))
        most = most if max_rows is None else min(most, max_rows - shape.num_rows)
        times = self.cost.step_times(shape, max(0, most))
        draft_s = [self.cost.draft_s(drafter.name, len(undrafted), depth) for depth in range(max(map(len, planned)) + 1)]
        emitting = sum(rows.tree is not None for rows in batch)
        choice = best_choice(planned, times, emitting, draft_s=draft_s, undrafted=undrafted)
        without = best_choice(present, times, emitting)
        is_better = choice.log_speedup > without.log_speedup
        for index, rows in enumerate(batch):
            if rows.budget is None:
                continue
            if most < 1:
                rows.skip(SkipReason.PASS_FULL)
                continue
            rows.expected_speedup = choice.speedup
            if is_better and index in undrafted and choice.counts[index] and self._repays_prefill(rows.request, drafter, choice, times):
                self._history(rows.request, drafter.name).backoff_level = 0
                rows.budget = self._depth_budget(rows, drafter, choice.counts[index], choice, times, len(batch))
            elif present[index]:
                rows.budget = None
            elif not self._probe(rows, drafter, times):
                self._back_off(self._history(rows.request, drafter.name), MAX_BACKOFF_LEVEL)
                rows.skip(SkipReason.UNPROFITABLE)

    def prefers(self, rows: RequestRows, tree: DraftTree) -> bool:
        if rows.num_draft_tokens == 0 or tree.draft_probs:
            return True
        return sum(self._reach(replace(rows, tree=tree))) > sum(self._reach(rows))

    def select(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        weighed = [rows for rows in batch if rows.request is not self._probed and _can_prune(rows)]
        if not weighed or self._shape is None:
            return
        num_fixed = sum(rows.num_draft_tokens for rows in batch) - sum(rows.num_draft_tokens for rows in weighed)
        reached = [self._reach(rows) for rows in weighed]
        orders = [sorted([node for node, chance in enumerate(own) if chance >= MIN_REACH], key=lambda node: -own[node]) for own in reached]
        gains = [[own[node] for node in order[1:]] for own, order in zip(reached, orders, strict=True)]
        most = sum(map(len, gains))
        if max_rows is not None:
            most = min(most, max_rows - self._shape.num_rows - num_fixed)
            if most < 1:  # `fit_rows` removes the drafts
                return
        times = self.cost.step_times(self._shape, num_fixed + most)[num_fixed:]
        choice = best_choice(gains, times, sum(rows.tree is not None for rows in batch))
        for rows, order, own, count in zip(weighed, orders, gains, choice.counts, strict=True):
            rows.expected_speedup = choice.speedup
            if count == 0:
                self._hold_back(rows)
            elif rows.tree is not None:
                rows.tree, rows.expected_tokens = rows.tree.subtree(sorted(order[: count + 1])), 1.0 + sum(own[:count])

    def observe(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        if (name := drafter_of(tree)) is None:
            return
        rates, history = self._rates(request, name), self._history(request, name)
        by_depth = rates.by_depth(tree.tree_depth)
        walked = zip([0, *accepted_nodes], [*accepted_nodes, *([] if request.is_finished else [-1])], strict=False)
        for node, accepted_child in walked:
            for rank, child in enumerate(tree.children(node)):
                if tree.sources[child] == FORCED:
                    continue
                prob, depth = None if tree.probs is None else tree.probs[child], tree.depths[child]
                if rank == 0:
                    history.observe(by_depth[depth - 1] if prob is None else rates.by_prob(prob), accepted=child == accepted_child)
                rates.observe(depth, prob, is_first=rank == 0, accepted=child == accepted_child)

    def observe_draft(self, drafter: Drafter, num_requests: int, depth: int, seconds: float) -> None:
        self.cost.observe_draft(drafter.name, num_requests, depth, seconds)

    def observe_step(
        self, batch: Sequence[RequestRows], forward_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0
    ) -> None:
        num_drafts = sum(rows.num_draft_tokens for rows in batch)
        if self._shape is None or not self._shape.is_decoding:
            return
        plain_s = min(forward_s, self.cost.step_times(self._shape, 0)[0])  # a stall of the machine fills no bucket
        if num_drafts == 0 and self._is_considered:
            self._bucket_s -= min(draft_s + plan_s, MAX_CHARGE * plain_s)
        self._bucket_s = min(self._bucket_s + BUCKET_SHARE * plain_s, max(self._goal_s, BUCKET_SHARE * BUCKET_STEPS * plain_s))
        self.cost.observe_step(self._shape, num_drafts, forward_s, host_s)

    def release(self, request: Request) -> None:
        request.draft_histories.clear()
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = float(request.num_output_tokens)
            self._mean_output_len = 0.75 * self._mean_output_len + 0.25 * length if self._mean_output_len else length

    def describe(self) -> str:
        rows = 1 + min(4, self.num_speculative_tokens)
        slowdown = self.cost.profile.at(rows) / self.cost.profile.at(1)
        return (
            f"up to {self.num_speculative_tokens} draft tokens a step, as many as pay ({rows} rows take {slowdown:.2f} of the time of one)"
        )

    def _cold_budget(self, request: Request, drafter: Drafter, budget: DraftBudget) -> DraftBudget:
        """The budget, kept short while little is known of a drafter."""
        is_known = drafter.traits.is_lookup or self.cost.is_draft_cost_known(drafter.name)
        if is_known and self._rates(request, drafter.name).num_observed >= 2 * COLD_TOKENS:
            return budget
        depth = min(budget.max_depth, COLD_TOKENS)
        return replace(budget, row_budget=min(budget.row_budget, depth + 1), max_depth=depth)

    def _depth_budget(
        self, rows: RequestRows, drafter: Drafter, count: int, choice: Choice, times: Sequence[float], num_requests: int
    ) -> DraftBudget | None:
        """The budget of a request that drafts. Where the drafter gives probabilities it stops when a token is not worth its time."""
        budget, rates = rows.budget, self._rates(rows.request, drafter.name)
        token_s = self.cost.draft_token_s(drafter.name)
        if budget is None:
            return None
        stops_early = rates.has_probs and not budget.wants_draws and token_s > CHEAP_SHARE * times[0]
        if count < budget.max_depth and not (stops_early and num_requests == 1):
            width = max(1, (budget.row_budget - 1) // max(1, budget.max_depth))
            budget = replace(budget, row_budget=1 + count * width, max_depth=count)
        if not stops_early:
            return budget
        span = min(8, len(times) - 1)
        row_s = max(0.0, times[span] - times[0]) / max(1, span)
        token_value = choice.expected_tokens / choice.seconds * (row_s + (token_s if num_requests == 1 else 0.0))
        history = self._history(rows.request, drafter.name)
        min_reach = min(0.9, token_value / max(0.2, rates.by_depth(1)[0]))
        return replace(budget, min_reach=min_reach, rate_of=lambda prob: history.rate(rates.by_prob(prob)))

    def _repays_prefill(self, request: Request, drafter: Drafter, choice: Choice, times: Sequence[float]) -> bool:
        """Whether drafting saves more time over the rest of a request than its drafter needs to read the text first."""
        prefill_s = drafter.prefill_s(request)
        if prefill_s <= 0.0:
            return True
        num_output = request.num_output_tokens
        expected = max(self._mean_output_len - num_output, num_output, 1.0) if self._mean_output_len else request.num_remaining_tokens
        saved_s = times[0] * (1.0 - math.exp(-choice.log_speedup))  # a token
        return prefill_s <= saved_s * min(request.num_remaining_tokens, expected)

    def _probe(self, rows: RequestRows, drafter: Drafter, times: Sequence[float]) -> bool:
        """Let a drafter that does not pay draft a little, if the bucket holds the price."""
        if self._probed is not None or rows.budget is None or min(rows.budget.max_depth, len(times) - 1) < PROBE_TOKENS:
            return False
        price_s = times[PROBE_TOKENS] - times[0] + self.cost.draft_s(drafter.name, 1, PROBE_TOKENS)
        most_s = 0.9 * BUCKET_SHARE * BUCKET_STEPS * times[0]  # a full bucket pays for any draft: its price may be that of a stall
        prefill_s = drafter.prefill_s(rows.request)
        if self._bucket_s < min(price_s, most_s) + prefill_s:
            self._goal_s = min(price_s, most_s) + prefill_s
            return False
        self._bucket_s, self._goal_s = self._bucket_s - price_s - prefill_s, 0.0
        self._probed = rows.request
        self._history(rows.request, drafter.name).num_observed = 0.0
        rows.budget = replace(rows.budget, row_budget=PROBE_TOKENS + 1, max_depth=PROBE_TOKENS)
        return True

    def _back_off(self, history: DraftHistory, max_level: int) -> None:
        """Wait for twice as many steps as before. Requests of the same level resume in the same step: drafting together is cheaper."""
        history.backoff_level = min(max_level, history.backoff_level + 1)
        history.resume_step = (self._step // 2**history.backoff_level + 1) * 2**history.backoff_level

    def _hold_back(self, rows: RequestRows) -> None:
        """Drop a request's draft, and store it to be scored once the text is longer than it."""
        tree, request = rows.tree, rows.request
        if tree is not None and (name := drafter_of(tree)) is not None:
            path, history = tree.first_path()[:UNSENT_TOKENS], self._history(request, name)
            probs = None if tree.probs is None else [tree.probs[node] for node in path]
            if FORCED not in [tree.sources[node] for node in path]:
                history.unsent = UnsentDraft(len(request.token_ids), [tree.token_ids[node] for node in path], probs)
            history.resume_step = self._step + len(path)
        rows.drop_draft(SkipReason.UNPROFITABLE)

    def _score_unsent(self, request: Request, drafter: Drafter, history: DraftHistory) -> bool:
        """Learn from a draft that was not sent; return whether it was right, so that drafting may go on."""
        unsent, rates = history.unsent, self._rates(request, drafter.name)
        history.unsent = None
        if unsent is None:
            return True
        text = request.token_ids[unsent.num_tokens :]
        by_depth = rates.by_depth(len(unsent.token_ids))
        num_right = 0
        for index, (token, drafted) in enumerate(zip(text, unsent.token_ids, strict=False)):
            prob, is_right = None if unsent.probs is None else unsent.probs[index], token == drafted
            history.observe(by_depth[index] if prob is None else rates.by_prob(prob), accepted=is_right)
            rates.observe(index + 1, prob, is_first=True, accepted=is_right)
            if not is_right:
                break
            num_right += 1
        if num_right == 0:
            self._back_off(history, MAX_LOOKUP_BACKOFF_LEVEL if drafter.traits.is_lookup else MAX_BACKOFF_LEVEL)
            return False
        history.backoff_level = 0
        return True

    def _reach(self, rows: RequestRows) -> list[float]:
        """[N] chance that each node of a request's tree is accepted with all before it, 1 for the root."""
        tree = rows.tree
        if tree is None or tree.num_draft_tokens == 0:
            return [1.0]
        name = drafter_of(tree)
        rates, history = self._rates(rows.request, name or FORCED), self._history(rows.request, name or FORCED)
        by_depth, reached, sibling = rates.by_depth(tree.tree_depth), [1.0], dict[int, float]()
        for node in range(1, len(tree.token_ids)):
            parent = tree.parents[node]
            if tree.sources[node] == FORCED:
                rate = FORCED_RATE
            elif reached[parent] < MIN_REACH:
                rate = 0.0
            elif tree.probs is not None:
                rate = history.rate(rates.by_prob(tree.probs[node], is_first=parent not in sibling))
            elif parent in sibling:
                rate = SIBLING_FACTOR * sibling[parent]
            else:
                rate = history.rate(by_depth[tree.depths[node] - 1])
            sibling[parent] = rate
            reached.append(reached[parent] * rate)
        return reached

    def _rates(self, request: Request, name: str) -> AcceptanceRates:
        key = name, request.params.is_greedy
        if key not in self.rates:
            self.rates[key] = AcceptanceRates()
        return self.rates[key]

    def _history(self, request: Request, name: str) -> DraftHistory:
        history = request.draft_histories.get(name)
        if history is None:
            history = request.draft_histories[name] = DraftHistory()
        return history


def drafter_of(tree: DraftTree) -> str | None:
    """The name of the drafter that proposed a tree; None where a grammar forces all of it."""
    return next((source for source in tree.sources[1:] if source != FORCED), None)


def _can_prune(rows: RequestRows) -> bool:
    """Whether single draft tokens may be removed. Not drawn ones, whose distribution would change, nor where a branch has its own rows."""
    tree = rows.tree
    if tree is None or rows.limit is None or tree.num_draft_tokens == 0 or tree.draft_probs:
        return False
    return rows.limit.layout is TreeLayout.MASK or is_chain(tree.parents)
