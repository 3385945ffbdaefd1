"""What holds for n-gram, suffix and prediction drafters: own text only, within the budget, at a cost that does not grow with the text."""

import time
from collections.abc import Callable

import numpy as np
import pytest

from harness.decoding_rows import text_request
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request

LENGTH = 32_768
Make = Callable[[], Drafter]


def looping(drafter: Drafter) -> Request:
    """A request whose next tokens are 1, 2, 3, 1, ..."""
    prediction = {"prediction_token_ids": (1, 2, 3) * 8} if isinstance(drafter, PredictionDrafter) else {}
    return text_request([90], [1, 2, 3] * 3, **prediction)


@pytest.fixture(params=[NgramDrafter, SuffixDrafter, PredictionDrafter], ids=lambda one: one.__name__)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return request.param()  # type: ignore[no-any-return]


def test_lookup_drafter_drafts_each_request_from_its_own_text(drafter: Drafter) -> None:
    fresh = text_request([90], [1, 2, 3])
    tree, none = drafter.propose([looping(drafter), fresh], [DraftBudget(9, 4)] * 2)
    assert none is None
    assert tree is not None
    assert list(tree.token_ids) == [3, 1, 2, 3, 1]
    assert set(tree.sources[1:]) == {drafter.name}
    assert drafter.propose([text_request([1, 2, 3])], [DraftBudget(9, 4)]) == [None]


@pytest.mark.parametrize(("max_rows", "max_depth", "count"), [(9, 2, 2), (3, 9, 2), (1, 5, 0), (2, 1, 1)])
def test_lookup_draft_stays_within_its_budget(drafter: Drafter, max_rows: int, max_depth: int, count: int) -> None:
    (tree,) = drafter.propose([looping(drafter)], [DraftBudget(max_rows, max_depth)])
    assert (0 if tree is None else tree.num_draft_tokens) == count


TEXTS: dict[str, Callable[[np.random.Generator], list[int]]] = {
    "mixed": lambda random: random.integers(0, 1000, LENGTH).tolist(),
    "few ids": lambda random: random.integers(0, 50, LENGTH).tolist(),
    "one token": lambda _: [7] * LENGTH,
    "one word, many ends": lambda _: [token for index in range(LENGTH // 2) for token in (5, 10 + index)],
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "make", [NgramDrafter, lambda: SuffixDrafter(min_match=1), PredictionDrafter], ids=["ngram", "suffix", "prediction"]
)
def test_lookup_drafter_step_time_does_not_grow_with_the_text(make: Make, text: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids, drafter = TEXTS[text](random), make()
    request = text_request([90], ids[:30_000], prediction_token_ids=tuple(ids) if isinstance(drafter, PredictionDrafter) else ())
    drafter.propose([request], [DraftBudget(9, 8)])
    request.token_ids.append(60)  # a mismatch
    drafter.propose([request], [DraftBudget(9, 8)])
    start = time.thread_time()
    for token in [*ids[:250], *random.permutation(ids)[:250].tolist()]:
        request.token_ids.append(token)
        drafter.propose([request], [DraftBudget(9, 8)])
    assert time.thread_time() - start < 0.5, "reading the text again every step would take a hundred times this"
