"""The explanation of draft lengths for users."""

from harness.replay import Costs, controller, made_up, replay
from paceline.speculation.draft_length.explain import explain_policy, explain_steps
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.stats import SkipReason, StepRecord


class Always:
    def random(self) -> float:
        return 0.0


def record(count: int, emitted: int, expected: float | None, speedup: float | None, reason: SkipReason | None = None) -> StepRecord:
    return StepRecord(0, (1,) * emitted, (1,) * count, (0,) * count, ("any",) * count, (), reason, expected, speedup)


def test_explain_steps_shows_expected_and_emitted_tokens_by_count() -> None:
    steps = [
        record(2, 3, 2.0, 1.5),
        record(2, 1, 2.4, 1.7),
        record(0, 1, None, None, SkipReason.PROMPT),
        record(0, 1, None, 0.9, SkipReason.UNPROFITABLE),
    ]
    head, drafted, *plain = explain_steps(steps)
    assert head.split()[:3] == ["draft", "tokens", "steps"]
    assert drafted.split() == ["2", "2", "2.20", "2.00", "1.60"]
    assert plain[0].split(maxsplit=2) == ["plain", "1", SkipReason.PROMPT.description]
    assert "drafting was not expected to pay (expected speedup of the best draft: 0.90)" in plain[1]


def test_explain_policy_shows_costs_and_acceptance_rates() -> None:
    costs = Costs(lambda rows: 0.010 + 0.001 * (rows - 1), (0.0, 0.002))
    policy = controller(costs)
    replay(policy, [made_up(200, lambda _: 1.0, Always())], costs)
    lines = "\n".join(explain_policy(policy))
    assert "a pass of 1 row 10.00 ms, 2 rows 11.00 ms" in lines
    assert "player: 1 token 2.00 ms, 4 tokens 8.00 ms; acceptance rate by depth at temperature 0: 0.9" in lines
    assert "above 0" not in lines, "nothing was drafted there"


def test_explain_policy_of_a_fixed_length_is_one_line() -> None:
    assert explain_policy(FixedDraftLength(3)) == ["always 3 draft tokens, whether or not they pay"]
