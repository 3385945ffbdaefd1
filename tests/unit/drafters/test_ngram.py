"""Copying what followed before, against a search of the whole text."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.decoding_rows import text_request
from paceline.drafters.ngram import MAX_MATCH_TOKENS, MIN_MATCH_TOKENS, NgramDrafter, NgramIndex
from paceline.speculation.drafter import DraftBudget


def search(token_ids: Sequence[int], count: int, min_match: int, max_match: int) -> list[int]:
    """The definition: the latest of all earlier occurrences of the longest matching suffix, drafts included."""
    size = len(token_ids)
    for length in range(min(max_match, size - 1), min_match - 1, -1):
        for end in range(size - 1, length - 1, -1):
            if list(token_ids[end - length : end]) == list(token_ids[size - length :]):
                text = list(token_ids)
                while len(text) < size + count:
                    text.append(text[end + len(text) - size])
                return text[size:]
    return []


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 6])
def test_ngram_proposals_equal_a_search_of_the_whole_text(vocab_size: int, seed: int, large_counts: bool) -> None:
    random = np.random.default_rng([seed, vocab_size])
    proposals = 0
    for _ in range(300 if large_counts else 12):
        min_match = int(random.integers(1, 4))
        max_match = min_match + int(random.integers(0, 4))
        index = NgramIndex(min_match, max_match)
        text: list[int] = []
        while len(text) < 80:
            text.extend(random.integers(0, vocab_size, random.integers(1, 9)).tolist())
            for _ in range(int(random.integers(1, 3))):  # a second call changes nothing
                count = int(random.integers(0, 12))
                found = index.propose(text, count)
                assert found == search(text, count, min_match, max_match)
            proposals += bool(found)
    assert proposals > 40


def test_ngram_docstring_example_is_right() -> None:
    assert NgramIndex(2).propose([1, 2, 3, 4, 1, 2, 3], 6) == [4, 1, 2, 3, 4, 1]


@pytest.mark.parametrize(("repeat", "count"), [(1, 1), (2, 5), (3, 20)])
def test_ngram_draft_of_a_repeating_text_continues_the_repetition(repeat: int, count: int) -> None:
    loop = [5, 6, 7][:repeat]
    text = loop * 6
    assert NgramIndex().propose(text, count) == (loop * (count + 1))[:count]


def test_ngram_match_shorter_than_min_match_proposes_nothing() -> None:
    assert MIN_MATCH_TOKENS == 3 <= MAX_MATCH_TOKENS
    assert NgramIndex().propose([1, 2, 9, 1, 2], 4) == []
    assert NgramIndex().propose([], 4) == NgramIndex().propose([1], 4) == []


def test_ngram_has_candidates_exactly_if_it_proposes(seed: int) -> None:
    random, drafter = np.random.default_rng(seed), NgramDrafter()
    request = text_request([int(token) for token in random.integers(0, 6, 20)])
    answers = list[bool]()
    for _ in range(120):
        (tree,) = drafter.propose([request], [DraftBudget(4, 3)])
        assert drafter.has_candidates(request) == (tree is not None)
        request.token_ids.append(int(random.integers(0, 6)))
        answers.append(drafter.has_candidates(request))
        assert answers[-1] == bool(search(request.token_ids, 3, MIN_MATCH_TOKENS, MAX_MATCH_TOKENS))
    assert set(answers) == {True, False}


def test_ngram_has_candidates_is_true_before_the_text_is_indexed() -> None:
    drafter = NgramDrafter()
    assert drafter.has_candidates(text_request(range(8)))
    request = text_request([1, 2, 3])
    drafter.propose([request], [DraftBudget(4, 3)])
    request.token_ids.extend([0, 4] * 200)
    assert drafter.has_candidates(request)
    assert drafter.prefill_s(request) >= 0.0
