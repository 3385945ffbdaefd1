"""Drafting replayed on a simulated clock: what a drafter would have guessed behind every token of a text is known, and what passes cost.

So a policy is judged exactly and repeatably: by the seconds that it takes for the text, beside those of every fixed draft length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.kv_cache.cache import CachedSequence
from paceline.runtimes.cost import ForwardProfile
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter, DrafterTraits
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

DEEPEST = 16


@dataclass(frozen=True)
class Costs:
    """Simulated seconds.

    Attributes:
        pass_s: of a pass by its rows.
        draft_s: of guessing, whatever the depth, and for each guess.
        host_s: of the other work of a step, for each request and each guess.
        asking_s: of deciding, for each request that is decided for.
    """

    pass_s: Callable[[int], float]
    draft_s: tuple[float, float] = (0.0, 0.0)
    host_s: tuple[float, float] = (0.0, 0.0)
    asking_s: float = 0.0

    def table(self) -> ForwardProfile:
        return ForwardProfile.from_samples({rows: self.pass_s(rows) for rows in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 64)})


@dataclass(frozen=True)
class Trace:
    """A text, and what was guessed behind each of its tokens.

    Attributes:
        token_ids: [T] of the output.
        guesses: [T] by number of tokens said before.
    """

    token_ids: Sequence[int]
    guesses: Sequence[DraftTree | None]
    temperature: float = 0.0


class _Player(Drafter):
    def __init__(self, texts: Sequence[Trace], costs: Costs) -> None:
        drafts = (tree for text in texts for tree in text.guesses if tree is not None and tree.num_draft_tokens > 0)
        self.name = next((tree.sources[1] for tree in drafts), "player")
        self.traits = DrafterTraits(is_lookup=costs.draft_s[1] == 0.0)

    def propose(self, requests: Any, budgets: Any) -> Any:
        return [None] * len(requests)


@dataclass
class Outcome:
    """What a replay took."""

    seconds: float = 0.0
    steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    plain: dict[SkipReason, int] = field(default_factory=dict)
    num_emitted_tokens: int = 0


def replay(
    policy: FixedDraftLength,
    texts: Sequence[Trace],
    costs: Costs,
    *,
    batch_size: int = 1,
    noise: Callable[[], float] = lambda: 1.0,
    other_noise: Callable[[], float] = lambda: 1.0,
    drawn: bool = False,
    has_mixture_pass: bool = False,
) -> Outcome:
    """Run texts through a policy, so many at a time.

    Args:
        noise: factor of each pass's time as it is measured; the clock goes by the true one.
        other_noise: the same of guessing, deciding and the other work of a step.
        drawn: whether guesses are drawn, for rejection.
        has_mixture_pass: whether an X-LoRA adapter answers.
    """
    waiting, running, outcome, player = list(texts), list[tuple[Request, Trace]](), Outcome(), _Player(texts, costs)
    while waiting or running:
        while waiting and len(running) < batch_size:
            running.append((_request(waiting[0]), waiting.pop(0)))
            if has_mixture_pass:
                running[-1][0].adapter_number, running[-1][0].has_mixture_pass = 1, True
        batch = [RequestRows.without_draft(request, 1) for request, _ in running]
        draft_s, plan_s = _guess(policy, player, batch, running, costs, other_noise, drawn=drawn)
        policy.prune_drafts(batch, None)
        num_rows = sum(1 + rows.num_draft_tokens for rows in batch)
        num_guessed = num_rows - len(batch)
        pass_s = costs.pass_s(num_rows)
        host_s = costs.host_s[0] * len(batch) + costs.host_s[1] * num_guessed
        outcome.seconds += pass_s + draft_s + plan_s + host_s
        outcome.steps += 1
        for rows, (request, trace) in zip(batch, running, strict=True):
            _commit(policy, rows, request, trace, outcome)
        policy.observe_step_time(batch, pass_s * noise(), host_s * other_noise(), draft_s * other_noise(), plan_s * other_noise())
        for request, _ in running:
            if request.is_finished:
                policy.release(request)
        running = [one for one in running if not one[0].is_finished]
    return outcome


def best_fixed(texts: Sequence[Trace], costs: Costs, *, batch_size: int = 1, deepest: int = DEEPEST) -> tuple[int, float]:
    """The fixed draft length that takes least time, 0 = none, in which nobody is asked, and its seconds."""
    silent = [replace(text, guesses=[None] * len(text.guesses)) for text in texts]
    plain = replay(FixedDraftLength(1), silent, replace(costs, draft_s=(0.0, 0.0)), batch_size=batch_size)
    times = {0: plain.seconds}
    for depth in range(1, deepest + 1):
        times[depth] = replay(FixedDraftLength(depth), texts, costs, batch_size=batch_size).seconds
    best = min(times, key=times.__getitem__)
    return best, times[best]


def controller(costs: Costs, *, table: ForwardProfile | None = None) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(DEEPEST, costs.table() if table is None else table)


def _request(trace: Trace) -> Request:
    params = SamplingParams(temperature=trace.temperature)
    length = len(trace.token_ids)
    return Request([0], 1, params, LogitsProcessor(params, 4, [1]), CachedSequence(), seed=0, sample_index=0, max_len=length + 1)


def _guess(
    policy: FixedDraftLength,
    player: _Player,
    batch: Sequence[RequestRows],
    running: Sequence[tuple[Request, Trace]],
    costs: Costs,
    noise: Callable[[], float],
    *,
    drawn: bool,
) -> tuple[float, float]:
    """Draft for all requests that may; returns seconds of guessing and of deciding."""
    reason = policy.begin_step(batch)
    num_considered = 0
    for rows, (request, _) in zip(batch, running, strict=True):
        depth = min(policy.num_speculative_tokens, request.num_remaining_tokens - 1)
        if depth < 1:
            continue
        rows.max_draft_budget = DraftBudget(policy.max_rows, depth, needs_draft_probs=drawn)
        rows.skip_reason = reason or policy.skip_reason(request, player)
        if rows.skip_reason is None:
            rows.draft_budget = rows.max_draft_budget
            num_considered += 1
    if num_considered == 0:
        return 0.0, 0.0
    plan_s = 0.0 if type(policy) is FixedDraftLength else costs.asking_s * num_considered
    policy.plan_drafts(batch, player, None)
    asked = [rows for rows in batch if rows.draft_budget is not None]
    if not asked:
        return 0.0, plan_s
    deepest = 0
    for rows, (request, trace) in zip(batch, running, strict=True):
        tree = trace.guesses[request.num_output_tokens] if rows.draft_budget is not None else None
        if rows.draft_budget is None or tree is None or tree.num_draft_tokens == 0:
            rows.skip_drafter(SkipReason.NO_MATCH)
            continue
        tree = _drafted(tree, rows.draft_budget)
        tree = tree.trim(vocab_size=2**31, max_depth=rows.draft_budget.max_depth, max_rows=rows.draft_budget.max_rows)
        rows.set_draft(tree, tree.num_draft_tokens, SkipReason.UNUSABLE)
        deepest = max(deepest, tree.tree_depth)
    seconds = costs.draft_s[0] + costs.draft_s[1] * deepest
    if deepest:
        policy.observe_draft_time(player, len(asked), deepest, seconds * noise())
    return seconds, plan_s


def _drafted(tree: DraftTree, budget: DraftBudget) -> DraftTree:
    """As far as a drafter would have gone that stops where little is expected."""
    if tree.confidences is None or budget.min_path_prob <= 0.0:
        return tree
    reached, kept = [1.0], [0]
    for node in range(1, len(tree.parents)):
        parent = tree.parents[node]
        reached.append(reached[parent] * budget.acceptance_rate(tree.confidences[node]))
        if parent in kept and reached[parent] >= budget.min_path_prob:
            kept.append(node)
    return tree.subtree(kept)


def _commit(policy: FixedDraftLength, rows: RequestRows, request: Request, trace: Trace, outcome: Outcome) -> None:
    tree, accepted, node = rows.tree, list[int](), 0
    said = trace.token_ids[request.num_output_tokens :]
    for token in said[:-1]:
        child = None if tree is None else tree.child(node, token)
        if child is None:
            break
        accepted.append(child)
        node = child
    request.token_ids += said[: len(accepted) + 1]
    request.cached_sequence.committed_len = len(request.token_ids) - 1
    outcome.num_emitted_tokens += len(accepted) + 1
    outcome.num_draft_tokens += rows.num_draft_tokens
    outcome.num_accepted_tokens += len(accepted)
    if rows.skip_reason is not None:
        outcome.plain[rows.skip_reason] = outcome.plain.get(rows.skip_reason, 0) + 1
    if request.num_output_tokens == len(trace.token_ids):
        request.finish_reason = FinishReason.LENGTH
    if tree is not None and rows.num_draft_tokens:
        policy.observe_verified(request, tree, accepted)


def made_up(length: int, chance: Callable[[int], float], random: Any, *, confident: Callable[[float], float] | None = None) -> Trace:
    """A text whose guesses are right by chance.

    Args:
        chance: position -> that of the next guess being right.
        confident: chance -> what the drafter says of it; None = nothing.
    """
    guesses: list[DraftTree | None] = []
    right = [bool(random.random() < chance(position)) for position in range(length + DEEPEST)]
    for position in range(length):
        depths = range(position, position + DEEPEST)
        tokens = [1 + at % 50 if right[at] else 0 for at in depths]
        probs = None if confident is None else [confident(chance(at)) for at in depths]
        guesses.append(DraftTree.chain(0, tokens, "player", probs))
    return Trace([1 + at % 50 for at in range(length)], guesses)
