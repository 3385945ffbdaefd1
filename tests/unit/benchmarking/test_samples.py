"""What follows from the tokens of a request and the times at which they came."""

from typing import Any

import pytest

from paceline.benchmarking.samples import Sample
from paceline.repeats import repeat_share

KNOWN = {"mode": "plain", "workload": "chat", "temperature": 0.0, "prompt": 0, "round": 1, "num_prompt_tokens": 3}


def sample(times: list[float], **answer: Any) -> Sample:
    tokens = list(range(len(times)))
    return Sample.of({"token_ids": tokens, "times_s": times, "seconds": times[-1], **answer}, **KNOWN)


def test_sample_decode_time_starts_after_the_first_token() -> None:
    found = sample([1.0, 1.5, 1.5, 2.0])
    assert (found.first_token_s, found.num_decoded, found.decoding_s) == (1.0, 3, 1.0)


def test_tokens_that_arrive_together_count_as_one_gap() -> None:
    assert sample([1.0, 1.5, 1.5, 2.0]).gaps_s == [0.5, 0.5]


def test_output_that_arrives_at_once_has_the_whole_time_as_decode_time() -> None:
    found = sample([2.0, 2.0, 2.0])
    assert (found.num_decoded, found.decoding_s) == (3, 2.0)


def test_batch_decode_time_starts_when_all_requests_have_a_token() -> None:
    outputs = [{"token_ids": [1, 2, 3], "times_s": [1.0, 2.0, 3.0]}, {"token_ids": [4, 5, 6], "times_s": [2.0, 3.0, 4.0]}]
    found = Sample.of({"outputs": outputs, "seconds": 4.0}, **KNOWN)
    assert (found.num_tokens, found.first_token_s, found.num_decoded, found.decoding_s) == (6, 1.5, 3, 2.0)


def test_acceptance_length_follows_from_steps_or_accepted_tokens() -> None:
    times = [float(index) for index in range(1, 13)]
    assert sample(times, steps=4).acceptance_length == 3.0
    assert sample(times, num_accepted_tokens=8).acceptance_length == 3.0
    assert sample(times).acceptance_length is None


@pytest.mark.parametrize(
    "answer", [{}, {"token_ids": [1], "times_s": [], "seconds": 1.0}, {"token_ids": [], "times_s": [], "seconds": 1.0}]
)
def test_incomplete_worker_answer_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        Sample.of(answer, **KNOWN)


def test_repeats_counts_runs_of_eight_tokens_that_occurred_before() -> None:
    assert repeat_share([list(range(20))]) == 0.0
    assert repeat_share([[1, 2] * 10]) == pytest.approx(11 / 13)  # two pieces are new
    assert repeat_share([list(range(7))]) == 0.0


def test_repeat_share_is_counted_within_each_output() -> None:
    assert repeat_share([list(range(20)), list(range(20))]) == 0.0
    assert repeat_share([list(range(20)), [1, 2] * 10]) == pytest.approx(11 / 26)
    assert repeat_share([[1, 2, 3]]) == 0.0
