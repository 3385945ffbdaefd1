"""What a user is told of how much was drafted."""

from harness.replay import Costs, controller, made_up, replay
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.explanation import explain_policy, explain_steps
from paceline.speculation.stats import PlainReason
from paceline.speculation.step_record import StepRecord


class Always:
    def random(self) -> float:
        return 0.0


def record(count: int, emitted: int, expected: float | None, speedup: float | None, reason: PlainReason | None = None) -> StepRecord:
    return StepRecord(0, (1,) * emitted, (1,) * count, (0,) * count, ("any",) * count, (), reason, expected, speedup)


def test_steps_are_shown_by_their_guesses_with_what_was_expected_and_what_came() -> None:
    steps = [
        record(2, 3, 2.0, 1.5),
        record(2, 1, 2.4, 1.7),
        record(0, 1, None, None, PlainReason.PROMPT),
        record(0, 1, None, 0.9, PlainReason.DID_NOT_PAY),
    ]
    head, drafted, *plain = explain_steps(steps)
    assert head.split()[:2] == ["guesses", "steps"]
    assert drafted.split() == ["2", "2", "2.20", "2.00", "1.60"]
    assert plain[0].split(maxsplit=2) == ["plain", "1", PlainReason.PROMPT.value]
    assert "drafting did not pay (the best draft was expected to make a step 0.90 times as fast)" in plain[1]


def test_the_costs_behind_decisions_are_shown_and_what_is_kept() -> None:
    costs = Costs(lambda rows: 0.010 + 0.001 * (rows - 1), (0.0, 0.002))
    policy = controller(costs)
    replay(policy, [made_up(200, lambda _: 1.0, Always())], costs)
    lines = "\n".join(explain_policy(policy))
    assert "a pass of 1 row 10.00 ms, 2 rows 11.00 ms" in lines
    assert "player: guessing 1 token 2.00 ms, 4 tokens 8.00 ms" in lines
    assert "player: kept at temperature 0, by depth, once those before are: 0.9" in lines
    assert "above 0" not in lines, "nothing was drafted there"


def test_a_fixed_length_has_nothing_to_explain() -> None:
    assert explain_policy(DraftLengthPolicy(3)) == ["always 3 draft tokens, whether or not they pay"]


def test_more_rows_are_never_shown_to_take_less_on_a_busy_machine() -> None:
    policy = controller(Costs(lambda rows: 0.010 + 0.001 * (rows - 1)))
    for _ in range(5):
        policy.costs.observe(1, 0.0, 0.0, 0.030)
        policy.costs.observe(2, 0.0, 0.0, 0.011)
    (shown, *_) = explain_policy(policy)
    times = [float(word) for word in shown.replace(",", "").split() if "." in word]
    assert times == sorted(times)
    assert len(times) == 6
