"""Why a text was drafted as it was, in lines that a user can read: what was expected of the steps, what they brought, what they cost."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from paceline.speculation.controller import DraftController
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.stats import PlainReason
from paceline.speculation.step_record import StepRecord

_SHOWN_ROWS = (1, 2, 3, 5, 9, 17)
_SHOWN_DEPTHS = 8


def explain_steps(steps: Sequence[StepRecord]) -> list[str]:
    """Steps by the number of guesses they sent, what was expected of them and what they brought; plain ones by reason."""
    lines = ["guesses  steps  expected tokens  emitted tokens  expected speedup"]
    by_count: dict[int, list[StepRecord]] = defaultdict(list)
    for step in steps:
        by_count[len(step.draft_token_ids)].append(step)
    for count, own in sorted(by_count.items()):
        if count:
            expected = _mean(step.expected_tokens for step in own)
            emitted = sum(len(step.token_ids) for step in own) / len(own)
            lines.append(f"{count:7}  {len(own):5}  {expected:>15}  {emitted:14.2f}  {_mean(step.expected_speedup for step in own):>16}")
    reasons = Counter(step.plain_reason for step in steps if step.plain_reason is not None)
    for reason, number in reasons.most_common():
        behind = ""
        if reason is PlainReason.DID_NOT_PAY:
            denied = [step.expected_speedup for step in steps if step.plain_reason is reason]
            behind = f" (the best draft was expected to make a step {_mean(denied)} times as fast)"
        lines.append(f"{'plain':>7}  {number:5}  {reason.value}{behind}")
    return lines


def explain_policy(policy: DraftLengthPolicy) -> list[str]:
    """What it decided by: what passes, guessing and other work cost, and how often guesses are kept."""
    if not isinstance(policy, DraftController):
        return [f"always {policy.num_draft_tokens} draft tokens, whether or not they pay"]
    rows = [count for count in _SHOWN_ROWS if count <= policy.row_budget]
    times, _ = policy.costs.row_times(1, max(rows) - 1, 0.0, 0.0)  # as decisions see them: more rows never take less
    lines = ["a pass of " + ", ".join(f"{count} row{'s' * (count > 1)} {1e3 * times[count - 1]:.2f} ms" for count in rows)]
    reading = policy.costs.table.reading_s(1000, 1000)
    lines.append(f"1,000 cached rows add {1e3 * reading:.2f} ms for one row; other work {1e3 * policy.host.at(1, 0):.2f} ms a step")
    for name, facts in policy.drafters.items():
        lines.append(f"{name}: guessing 1 token {1e3 * facts.seconds(1, 1):.2f} ms, 4 tokens {1e3 * facts.seconds(1, 4):.2f} ms")
        for kind, calibration in zip(("temperature 0", "temperatures above 0"), facts.calibrations, strict=True):
            if calibration.is_known:
                shares = " ".join(f"{chance:.2f}" for chance in calibration.depths(min(_SHOWN_DEPTHS, policy.num_draft_tokens)))
                lines.append(f"{name}: kept at {kind}, by depth, once those before are: {shares}")
    return lines


def _mean(numbers: Iterable[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    return f"{sum(known) / len(known):.2f}" if known else "-"
