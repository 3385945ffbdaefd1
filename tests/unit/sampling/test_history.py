import numpy as np
import pytest

from paceline.sampling.history import TokenCounts, TokenView


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


def test_a_view_reads_like_the_list_of_text_and_path():
    view = TokenView([1, 2, 3], [4, 2])
    whole = [1, 2, 3, 4, 2]
    assert (list(view), len(view), view.count(2), view.index(4), 3 in view, 9 in view) == (whole, 5, 2, 3, True, False)
    assert [view[index] for index in range(-5, 5)] == [whole[index] for index in range(-5, 5)]
    for one in (slice(None), slice(-2, None), slice(1, 4), slice(None, None, -2), slice(2, 100), slice(4, 1)):
        assert view[one] == whole[one]
    assert np.array(view).tolist() == whole
    assert np.asarray(view, np.float32).dtype == np.float32
    for index in (5, -6):
        with pytest.raises(IndexError):
            view[index]


def test_a_view_does_not_see_what_is_added_later():
    text, path = [1, 2], [3]
    view = TokenView(text, path)
    text.append(7)
    path.append(8)
    assert list(view) == [1, 2, 3]
    assert view[-1] == 3
