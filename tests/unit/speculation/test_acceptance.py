"""What is learned of guesses, from made-up ones."""

import math

import numpy as np
import pytest

from paceline.speculation.acceptance import HOPED, Calibration, Offset, RequestAcceptance, Worth, expected_accepted


def observe(calibration: Calibration, random: np.random.Generator, chances: list[float], count: int) -> None:
    """Chains of guesses that are right by these chances, each looked at as far as it was right."""
    for _ in range(count):
        for depth, chance in enumerate(chances, start=1):
            was_kept = bool(random.random() < chance)
            calibration.add(depth, None, is_first=True, was_kept=was_kept)
            if not was_kept:
                break


def test_chances_by_depth_are_learned_and_deeper_ones_follow_the_last_known(seed: int) -> None:
    calibration, random = Calibration(), np.random.default_rng(seed)
    assert calibration.depths(3) == [HOPED] * 3
    observe(calibration, random, [0.9, 0.5], 600)
    depths = calibration.depths(4)
    assert depths == pytest.approx([0.9, 0.5, 0.5, 0.5], abs=0.08)
    assert depths == [calibration.at_depth(depth) for depth in (1, 2, 3, 4)]


def test_chances_by_depth_are_those_of_all_guesses_so_far_whenever_they_are_asked_for(seed: int) -> None:
    random, asked, at_the_end = np.random.default_rng(seed), Calibration(), Calibration()
    for _ in range(300):
        depth, was_kept = int(random.integers(1, 7)), bool(random.random() < 0.6)
        asked.add(depth, None, is_first=True, was_kept=was_kept)
        at_the_end.add(depth, None, is_first=True, was_kept=was_kept)
        asked.depths(int(random.integers(0, 9)))
    assert asked.depths(8) == at_the_end.depths(8) == [at_the_end.at_depth(depth) for depth in range(1, 9)]


def test_luck_at_one_depth_does_not_send_a_whole_batch_deeper() -> None:
    calibration = Calibration()
    for depth, num_kept, count in ((1, 60, 100), (2, 48, 60), (3, 33, 48), (4, 33, 33)):
        for index in range(count):
            calibration.add(depth, None, is_first=True, was_kept=index < num_kept)
    alone, together = calibration.depths(8), calibration.depths_together(8)
    assert alone[7] == alone[3] > 0.9
    assert together[:3] == alone[:3]
    assert alone[2] < together[3] == together[7] < 0.8


def test_at_a_high_chance_a_wrong_guess_counts_less_until_it_is_a_surprise() -> None:
    likely, even = Offset(), Offset()
    likely.add(0.9, was_kept=False)
    even.add(0.7, was_kept=False)
    assert 0.0 > likely.value > 0.65 * even.value
    surprised = Offset()
    surprised.add(0.97, was_kept=False)
    assert surprised.value < 1.5 * likely.value


def test_what_was_long_ago_counts_less(seed: int) -> None:
    calibration, random = Calibration(), np.random.default_rng(seed)
    observe(calibration, random, [0.95], 2_000)
    observe(calibration, random, [0.2], 1_500)
    assert calibration.at_depth(1) == pytest.approx(0.2, abs=0.08)


def test_a_drafters_own_probability_is_put_right_by_what_became_of_its_guesses(seed: int) -> None:
    """It says 0.9 where 0.5 is true; a sibling of the same probability is another thing."""
    calibration, random = Calibration(), np.random.default_rng(seed)
    assert calibration.of_prob(0.9) == 0.9
    assert not calibration.gives_probs
    for _ in range(400):
        calibration.add(1, 0.9, is_first=True, was_kept=bool(random.random() < 0.5))
    assert calibration.gives_probs
    assert calibration.of_prob(0.9) == pytest.approx(0.5, abs=0.08)
    assert calibration.of_prob(0.2) == 0.2
    assert calibration.of_prob(0.9, is_first=False) == 0.9


@pytest.mark.parametrize(("of_all", "own"), [(0.5, 0.9), (0.5, 0.05), (0.8, 0.3), (0.1, 0.6)])
def test_a_request_that_is_easier_or_harder_than_others_is_known_as_such(of_all: float, own: float, seed: int) -> None:
    offset, random = Offset(), np.random.default_rng(seed)
    assert offset.chance(of_all) == of_all
    seen = []
    for step in range(500):
        offset.add(of_all, was_kept=bool(random.random() < own))
        if step >= 200:
            seen.append(offset.chance(of_all))
    assert np.mean(seen) == pytest.approx(own, abs=0.08)


def test_a_dozen_wrong_guesses_in_a_row_are_enough_to_doubt_a_request() -> None:
    offset = Offset()
    for _ in range(12):
        offset.add(0.6, was_kept=False)
    assert offset.chance(0.6) < 0.3
    for _ in range(200):
        offset.add(0.6, was_kept=False)
    slow = offset.chance(0.6)
    offset.doubt()
    for _ in range(6):
        offset.add(0.6, was_kept=True)
    assert offset.chance(0.6) > 4 * slow, "after a doubt few guesses count for much"


def test_no_chance_is_ever_0_or_1() -> None:
    offset = Offset()
    for was_kept in [False] * 500 + [True] * 2_000:
        offset.add(1.0, was_kept=was_kept)
        assert 0.0 < offset.chance(0.0) < offset.chance(1.0) < 1.0


def test_doubt_fades_with_what_was_seen(seed: int) -> None:
    calibration, random = Calibration(), np.random.default_rng(seed)
    assert calibration.doubt == 0.0, "nothing seen is hoped for already"
    doubts = []
    for _ in range(3):
        observe(calibration, random, [0.5], 40)
        doubts.append(calibration.doubt)
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[-1] < 0.25


def test_shadows_rest_longer_each_time_they_are_wrong_and_not_after_one_is_right() -> None:
    own, made = RequestAcceptance("any"), []
    for step in range(60):
        if own.wants_shadow:
            made.append(step)
            own.end_shadow(16, was_right=False)
    assert made == [0, 2, 6, 14, 30, 47]
    own.end_shadow(16, was_right=True)
    assert own.wants_shadow


def test_while_a_shadow_waits_for_the_text_none_is_made() -> None:
    own = RequestAcceptance("any", shadow=(3, [1, 2], [None, None]))
    assert not any(own.wants_shadow for _ in range(40))


def test_a_path_is_as_likely_as_all_its_guesses() -> None:
    offset = Offset()
    assert offset.paths([0.5, 0.5, 0.8], 0.0, 0.0) == pytest.approx([0.5, 0.25, 0.2])
    assert offset.paths([0.5, 0.5, 0.8], 0.0, 0.25) == pytest.approx([0.5, 0.25])
    assert offset.paths([0.5], 1.0, 0.0) == pytest.approx([math.e / (1.0 + math.e)])
    assert expected_accepted(0.5, 3) == pytest.approx(sum(offset.paths([0.5] * 3, 0.0, 0.0)))
    assert expected_accepted(1.0, 3) == 3
    assert math.isclose(expected_accepted(0.999999, 3), 3.0, rel_tol=1e-4)


def test_a_question_that_was_worth_it_shortens_a_rest() -> None:
    worth = Worth()
    rests = [worth.add(saved) for saved in [-1.0] * 12 + [0.5] * 3]
    assert rests[-4:] == [31, 15, 7, 3]


def test_where_others_lost_by_asking_a_new_request_is_judged_at_once() -> None:
    """One question that brings much is enough to go on; where others gained, four are asked first."""
    others = Worth()
    for _ in range(8):
        others.add(-0.1)
    few = others.begun()
    assert [few.add(-0.1) for _ in range(3)] == [3, 7, 15]
    for _ in range(4):
        others.add(-0.1)
    lost, found, gained = others.begun(), others.begun(), Worth(12, 0, 0.1).begun()
    assert [lost.add(-0.1) for _ in range(3)] == [15, 31, 31], "at first half as long as the others did"
    worthy = others.begun()
    assert [worthy.add(saved) for saved in (0.3, 0.3, 0.3)] == [3, 1, 0], "others lost 0.1 a question"
    assert [found.add(saved) for saved in (2.0, -0.1, -0.1)] == [0, 0, 0]
    assert [gained.add(-1.0) for _ in range(5)] == [0, 0, 0, 1, 3]
    assert [Worth().begun().add(-1.0) for _ in range(2)] == [0, 0], "nothing is known of others"


def test_rests_between_shadows_begin_where_these_end() -> None:
    own = RequestAcceptance("player")
    for _ in range(4):
        own.end_shadow(15, was_right=False)
    assert own.num_resting == 15
    own.end_shadow(15, was_right=False, num_since=9)
    assert own.num_resting == 6
