import numpy as np

from paceline.sampling.history import TokenCounts


def test_counts_are_those_of_the_list(seed):
    generator = np.random.default_rng(seed)
    counts = TokenCounts(np.array([3, 5]))
    text = [3, 5]
    for token_id in generator.integers(0, 300, 500).tolist():
        counts.add(token_id)
        text.append(token_id)
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == {one: text.count(one) for one in text}


def test_what_was_added_last_can_be_taken_back():
    counts = TokenCounts()
    counts.extend([7, 8, 7])
    counts.extend([8, 9, 9, 10, 7])
    counts.drop_last([8, 9, 9, 10, 7])
    assert counts.token_ids.tolist() == [7, 8]
    assert counts.counts.tolist() == [2.0, 1.0]
    counts.add(10)
    assert counts.token_ids.tolist() == [7, 8, 10]
