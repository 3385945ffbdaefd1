"""What a finished request returns."""

import json

import pytest

from paceline.outputs import RequestOutput, Timing, Usage
from paceline.speculation.stats import SkipReason, SpeculationStats


def make_output(token_ids: list[int], *, decode_s: float = 2.0) -> RequestOutput:
    stats = SpeculationStats()
    stats.record((), 0, 1, SkipReason.PROMPT)
    stats.record((1, 2), 1, 2, None)
    return RequestOutput(
        text="a b c",
        token_ids=token_ids,
        prompt_token_ids=[7, 8],
        finish_reason="stop",
        usage=Usage(2, len(token_ids)),
        timing=Timing(0.5, decode_s),
        seed=2**64 - 1,
        numerics="exact",
        drafter="ngram",
        speculation=stats,
    )


def test_total_tokens_and_total_time_are_sums() -> None:
    assert Usage(2, 3).total_tokens == 5
    assert Timing(0.5, 2.0).total_s == 2.5


@pytest.mark.parametrize(("token_ids", "decode_s", "speed"), [([1, 2, 3], 2.0, 1.0), ([1], 0.0, 0.0), ([], 0.0, 0.0), ([1], 1.0, 0.0)])
def test_tokens_per_s_counts_the_tokens_after_the_first(token_ids: list[int], decode_s: float, speed: float) -> None:
    assert make_output(token_ids, decode_s=decode_s).tokens_per_s == speed


def test_request_output_as_dict_is_complete_json() -> None:
    record = make_output([1, 2, 3]).as_dict(model="mini", version="9.9")
    assert json.loads(json.dumps(record)) == record
    assert record["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "num_cached_tokens": 0}
    assert record["timing"] == {"prompt_s": 0.5, "decode_s": 2.0, "total_s": 2.5}
    assert (record["seed"], record["model"], record["version"], record["finish_reason"]) == (2**64 - 1, "mini", "9.9", "stop")
    assert record["drafter"] == "ngram"
    assert (record["speculation"]["num_accepted_tokens"], record["speculation"]["num_draft_tokens"], record["speculation"]["steps"]) == (
        1,
        2,
        2,
    )
