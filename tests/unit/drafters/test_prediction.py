"""Following a text that was given in advance, against a search of all its places."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.decoding_rows import text_request
from paceline.drafters.prediction import MATCH_LENGTHS, MAX_SUBSTITUTED_TOKENS, NUM_NEARBY_POSITIONS, PredictedText, PredictionDrafter
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request


def make_request(prediction: Sequence[int], output: Sequence[int] = (), prompt: Sequence[int] = (90, 91)) -> Request:
    return text_request(prompt, output, prediction_token_ids=tuple(prediction))


def after(predicted: Sequence[int], output: Sequence[int], count: int = 3) -> list[int]:
    prediction = PredictedText(predicted)
    prediction.observe_tokens(output)
    return list(prediction.propose(count))


def search(predicted: Sequence[int], output: Sequence[int], count: int) -> list[int]:
    """The definition, from the first token on, looking at every place each time."""
    place: int | None = 0
    anchor = num_lost = 0
    tried, right = {"run": 4, "near": 4, "replaced": 4}, {"run": 2, "near": 2, "replaced": 2}
    found: dict[str, int] = {}
    for end in range(1, len(output) + 1):
        for kind, at in found.items():
            tried[kind] += 1
            right[kind] += list(predicted[at : at + 1]) == [output[end - 1]]
        found = {}
        if place is not None and list(predicted[place : place + 1]) == [output[end - 1]]:
            place, num_lost = place + 1, 0
            anchor = place
            continue
        num_lost += 1
        for length in MATCH_LENGTHS:
            places = [at for at in range(length, len(predicted) + 1) if list(predicted[at - length : at]) == list(output[:end][-length:])]
            ahead = [at for at in places if at >= anchor]
            if end >= length and places:
                found["run"] = ahead[0] if ahead else places[-1]
                break
        if near := [
            at for at in range(anchor + 1, min(anchor + NUM_NEARBY_POSITIONS, len(predicted)) + 1) if predicted[at - 1] == output[end - 1]
        ]:
            found["near"] = near[0]
        if num_lost <= MAX_SUBSTITUTED_TOKENS:
            found["replaced"] = anchor + num_lost
        place = found[max(found, key=lambda kind: right[kind] / tried[kind])] if found else None
    return [] if place is None else list(predicted[place : place + count])


def edited(text: Sequence[int], vocab_size: int, random: np.random.Generator) -> list[int]:
    """With passages removed, inserted, replaced and moved."""
    result: list[int] = []
    at = 0
    while at < len(text):
        size = int(random.integers(1, 9))
        match int(random.integers(0, 7)):
            case 0:
                pass
            case 1:
                result += [*random.integers(0, vocab_size, int(random.integers(1, 4))), *text[at : at + size]]
            case 2:
                result += random.integers(0, vocab_size, size).tolist()
            case 3:
                result += text[int(random.integers(0, len(text))) :][:size]
            case _:
                result += text[at : at + size]
        at += size
    return [int(token) for token in result]


@pytest.mark.parametrize("vocab_size", [2, 5, 40, 1000])
def test_prediction_proposals_equal_a_search_of_all_positions(vocab_size: int, seed: int, large_counts: bool) -> None:
    random = np.random.default_rng([seed, vocab_size])
    num_proposals = 0
    for _ in range(30 if large_counts else 4):
        predicted = random.integers(0, vocab_size, int(random.integers(1, 80))).tolist()
        output = edited(predicted, vocab_size, random)
        request, drafter = make_request(predicted), PredictionDrafter()
        while len(request.output_token_ids) < len(output):
            start = request.num_output_tokens
            request.token_ids.extend(output[start : start + int(random.integers(1, 5))])
            depth = int(random.integers(0, 9))
            (tree,) = drafter.propose([request], [DraftBudget(6, depth)])
            found = [] if tree is None else list(tree.token_ids[1:])
            assert found == search(predicted, request.output_token_ids, min(depth, 5)), (predicted, request.output_token_ids)
            num_proposals += bool(found)
    assert num_proposals > 20


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [1, 2, 3]),
        ([1], [2, 3, 4]),
        ([1, 2, 9], [4, 5, 6]),  # replaced
        ([1, 2, 9, 4], [5, 6, 7]),
        ([1, 2, 4], [5, 6, 7]),  # left out
        ([1, 2, 9, 8, 3], [4, 5, 6]),  # inserted
        ([1, 2, 9, 8, 7, 6], [7, 8]),  # 6 occurs nearby
        ([1, 2, 30, 31], [5, 6, 7]),  # two for two
        ([1, 2, 30, 31, 32], []),  # something else
        ([1, 2, 30, 31, 32, 5, 6], [7, 8]),  # back again
        ([1, 2, 3, 4, 5, 6, 7, 8], []),  # its end
        ([1, 2, 3, 4, 5, 6, 7, 8, 2, 3], [4, 5, 6]),  # a passage again
        ([9], [2, 3, 4]),  # the first token differs
    ],
    ids=str,
)
def test_prediction_realigns_after_a_mismatch(output: list[int], expected: list[int]) -> None:
    assert after([1, 2, 3, 4, 5, 6, 7, 8], output) == expected


def test_prediction_realigns_by_the_rule_that_was_right_before() -> None:
    words = [1, 2, 3, 4, 1, 5, 3, 6, 1, 7, 3, 8, 1, 9]  # the 1 and the 3 occur nearby everywhere
    swapped = PredictedText(words)
    swapped.observe_tokens([1, 2, 1, 4, 1, 5, 1, 6])  # each 3 became a 1, which also occurs nearby
    assert list(swapped.propose(2)) == [1, 7]
    swapped.observe_tokens([1, 7, 1])
    assert list(swapped.propose(3)) == [8, 1, 9]
    assert swapped.confidence(3)[0] > 0.6
    fresh = PredictedText(words)
    fresh.observe_tokens([1, 7, 1])
    assert list(fresh.propose(2)) != [8, 1]


def test_each_wrong_prediction_token_costs_about_one_step(seed: int) -> None:
    random = np.random.default_rng(seed)
    text = [int(token) for token in random.integers(0, 12, 300)]  # every pair of tokens occurs several times
    predicted = [50 if at % 20 == 10 else token for at, token in enumerate(text)]
    prediction, said, num_steps = PredictedText(predicted), 0, 0
    while said < len(text):
        drafted = list(prediction.propose(16))
        kept = next((index for index, token in enumerate(drafted) if text[said + index : said + index + 1] != [token]), len(drafted))
        prediction.observe_tokens(text[said : said + kept + 1])
        said += kept + 1
        num_steps += 1
    assert num_steps <= 15 + 300 // 17 + 8


def test_prediction_confidence_falls_after_a_mismatch() -> None:
    prediction = PredictedText(list(range(20)))
    assert prediction.confidence(3) == [0.75, 0.8, 1.0 - 1.0 / 6.0]
    prediction.observe_tokens([0, 90])
    assert prediction.confidence(2) == [0.5, 0.8]
    assert prediction.confidence(0) == []


def test_prediction_uses_the_next_of_several_equal_matches() -> None:
    predicted = [7, 8, 1, 7, 8, 2, 7, 8, 3, 7, 8, 4]
    assert after(predicted, [7, 8, 1, 7, 8, 2, 50, 7, 8]) == [3, 7, 8]


def test_verbatim_prediction_is_proposed_to_its_end() -> None:
    predicted = list(range(100, 130))
    request, drafter = make_request(predicted, predicted[:1]), PredictionDrafter()
    num_steps = 0
    while request.num_output_tokens < 30:
        (tree,) = drafter.propose([request], [DraftBudget(5, 4)])
        if tree is not None:
            request.token_ids.extend(tree.token_ids[1:])
            assert set(tree.sources[1:]) == {"prediction"}
        num_steps += 1
    assert num_steps == 8
    assert request.output_token_ids == predicted
    assert drafter.propose([request], [DraftBudget(5, 4)]) == [None]
