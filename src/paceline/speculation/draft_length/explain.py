"""Text of `--explain`: expected and emitted tokens of steps, and the costs and acceptance rates that decide the draft lengths."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength
from paceline.speculation.stats import SkipReason, StepRecord

_SHOWN_ROW_COUNTS = (1, 2, 3, 5, 9, 17)
_MAX_SHOWN_DEPTH = 8


def explain_steps(steps: Sequence[StepRecord]) -> list[str]:
    """Return one line for each number of draft tokens, with expected and emitted tokens, and one for each reason for plain steps."""
    lines = ["draft tokens  steps  expected tokens  emitted tokens  expected speedup"]
    by_count: dict[int, list[StepRecord]] = defaultdict(list)
    for step in steps:
        by_count[len(step.draft_token_ids)].append(step)
    for count, same_count in sorted(by_count.items()):
        if count:
            expected, speedup = _mean(step.expected_tokens for step in same_count), _mean(step.expected_speedup for step in same_count)
            emitted = sum(len(step.token_ids) for step in same_count) / len(same_count)
            lines.append(f"{count:12}  {len(same_count):5}  {expected:>15}  {emitted:14.2f}  {speedup:>16}")
    reasons = Counter(step.skip_reason for step in steps if step.skip_reason is not None)
    for reason, number in reasons.most_common():
        suffix = ""
        if reason is SkipReason.UNPROFITABLE:
            speedup = _mean(step.expected_speedup for step in steps if step.skip_reason is reason)
            suffix = f" (expected speedup of the best draft: {speedup})"
        lines.append(f"{'plain':>12}  {number:5}  {reason.description}{suffix}")
    return lines


def explain_policy(policy: FixedDraftLength) -> list[str]:
    """Return lines on the costs of passes, drafting and other work, and on acceptance rates."""
    if not isinstance(policy, AdaptiveDraftLength):
        return [f"always {policy.num_speculative_tokens} draft tokens, whether or not they pay"]
    profile, host_cost = policy.cost.profile, policy.cost.host_cost
    shown = ", ".join(
        f"{rows} row{'s' * (rows > 1)} {1e3 * profile.seconds_at(rows):.2f} ms" for rows in _SHOWN_ROW_COUNTS if rows <= policy.max_rows
    )
    lines = [f"profiled at load: a pass of {shown}"]
    lines.append(
        f"1,000 cached rows add {1e3 * profile.attention_s(1000, 1):.2f} ms; other work {1e3 * host_cost.seconds_at(1, 0):.2f} ms a step"
    )
    for (name, is_greedy), rates in sorted(policy.rates.items()):
        if rates.num_observed:
            one_s, four_s = (1e3 * policy.cost.draft_s(name, 1, count) for count in (1, 4))
            time = f"1 token {one_s:.2f} ms, 4 tokens {four_s:.2f} ms" if policy.cost.is_draft_cost_known(name) else "not timed yet"
            rates_by_depth = " ".join(f"{rate:.2f}" for rate in rates.rates_by_depth(min(_MAX_SHOWN_DEPTH, policy.num_speculative_tokens)))
            temperature = "temperature 0" if is_greedy else "temperatures above 0"
            lines.append(f"{name}: {time}; acceptance rate by depth at {temperature}: {rates_by_depth}")
    return lines


def _mean(numbers: Iterable[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    return f"{sum(known) / len(known):.2f}" if known else "-"
