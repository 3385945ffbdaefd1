"""The draft vocabulary: ids of the answers by count, then the lowest ids."""

from types import SimpleNamespace

import numpy as np

from paceline.training.vocabulary import choose_vocabulary


def test_choose_vocabulary_prefers_frequent_ids_of_answers() -> None:
    data = SimpleNamespace(token_ids=[np.array([9, 9, 7, 7, 7, 4, 8])], is_answer=[np.array([0, 0, 1, 1, 1, 1, 1])])
    found = choose_vocabulary(data, 5, 12)  # type: ignore[arg-type]
    assert found.target_ids.tolist() == [0, 1, 4, 7, 8]  # 9 is in the prompt alone; 0 and 1 fill up
    assert found.draft_ids.tolist() == [0, 1, -1, -1, 2, -1, -1, 3, 4, -1, -1, -1]
    assert found.coverage(data) == 1.0  # type: ignore[arg-type]
    assert choose_vocabulary(data, 1, 12).coverage(data) == 0.6  # type: ignore[arg-type]
