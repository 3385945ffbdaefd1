"""A ratio is a speedup only if tokens are equal, something was drafted, and the text does not repeat itself."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.bench_runs import fake_mode, measured
from paceline.benchmarking.modes import Mode
from paceline.benchmarking.results import Cell, make_cells, summaries
from paceline.benchmarking.run import Measurements, Size
from paceline.benchmarking.samples import Output, Sample

PLAIN, GUESSING = fake_mode("plain"), fake_mode("B")
PEER, PEER_NGRAM = (
    fake_mode("peer plain", program="peer", baseline="peer plain"),
    fake_mode("peer ngram", program="peer", baseline="peer plain"),
)


def sample(mode: str, number: int, *, step_s: float = 0.1, ids: Sequence[int] = range(17), prompt: int = 0, **fields: object) -> Sample:
    """Tokens that come one after another."""
    times = tuple(step_s * (1 + index) for index in range(len(ids)))
    made = Sample(
        mode=mode, workload="chat", temperature=0.0, prompt=prompt, round=number, outputs=(Output(tuple(ids), times),), seconds=times[-1],
        num_prompt_tokens=8, num_draft_tokens=0 if mode == "plain" else 10, num_accepted_tokens=0 if mode == "plain" else 5,
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


def cells(samples: list[Sample], modes: Sequence[Mode] = (PLAIN, GUESSING), **facts: dict[str, object]) -> dict[str, Cell]:
    found = Measurements(modes, Size(2, 17, 1), samples=samples, facts=facts)  # type: ignore[arg-type]
    return {cell.mode: cell for cell in make_cells(found)}


def test_speedup_is_paired_by_round() -> None:
    samples = [sample("plain", number, step_s=0.1 * number) for number in (0, 1, 2)]
    samples += [sample("B", number, step_s=0.05 * number) for number in (0, 1, 2)]
    found = cells(samples)["B"]
    assert found.tokens_per_s is not None
    assert found.speedup is not None
    assert found.tokens_per_s.median == pytest.approx((20 + 10) / 2)
    assert found.speedup.pairs == pytest.approx((2.0, 2.0))


def test_warmup_round_is_excluded_from_results() -> None:
    samples = [sample("plain", 1), sample("B", 1), sample("plain", 0), sample("B", 0, step_s=0.0001)]
    found = cells(samples)["B"]
    assert found.num_rounds == 1
    assert found.speedup is not None
    assert found.speedup.median == pytest.approx(1.0)


def test_round_without_all_prompts_is_excluded() -> None:
    samples = [sample(mode, number, prompt=prompt) for mode in ("plain", "B") for number in (1, 2) for prompt in (0, 1)]
    assert cells(samples[:-1])["B"].num_rounds == 1


def test_mode_with_other_tokens_than_plain_has_no_speedup() -> None:
    samples = [sample("plain", 1), sample("plain", 2), sample("B", 1), sample("B", 2, ids=[*range(16), 99])]
    found = cells(samples)["B"]
    assert found.refusal == "1 of 2 outputs differ from plain"
    assert found.speedup is None
    assert found.ratio is not None


def test_differing_tokens_of_the_warmup_round_are_reported() -> None:
    samples = [sample("plain", 0), sample("plain", 1), sample("B", 0, ids=[*range(16), 99]), sample("B", 1)]
    assert cells(samples)["B"].refusal == "1 of 2 outputs differ from plain"


def test_bench_mode_without_drafts_has_no_speedup() -> None:
    samples = [sample("plain", 1), sample("B", 1, num_draft_tokens=0, num_accepted_tokens=0)]
    assert cells(samples)["B"].refusal == "nothing was drafted"
    unknown = [sample("plain", 1), sample("B", 1, num_draft_tokens=None, num_accepted_tokens=None)]
    assert cells(unknown)["B"].refusal == ""


def test_bench_cell_with_repetitive_outputs_has_no_speedup() -> None:
    ids = [1, 2] * 20
    found = cells([sample("plain", 1, ids=ids), sample("B", 1, ids=ids, step_s=0.01)])
    assert found["B"].is_looping
    assert found["B"].refusal == "looping: 94% of the output repeats itself"
    assert [one.speedup for one in summaries(list(found.values()), [PLAIN, GUESSING])] == [None]


def test_output_with_a_third_of_repeated_pieces_is_repetitive() -> None:
    quarter = [*range(30), *range(17)]  # 10 of 40 pieces
    third = [*range(30), *range(20)]  # 13 of 43
    for ids, is_looping in ((quarter, False), (third, True)):
        assert cells([sample("plain", 1, ids=ids), sample("B", 1, ids=ids)])["B"].is_looping is is_looping


def test_peer_mode_is_compared_with_the_plain_mode_of_the_same_peer() -> None:
    modes, own = [PLAIN, PEER, PEER_NGRAM], [*range(100, 117)]
    samples = [sample("plain", 1), sample("peer plain", 1, ids=own, num_draft_tokens=None), sample("peer ngram", 1, ids=own)]
    found = cells(samples, modes)
    assert [found[name].refusal for name in ("peer plain", "peer ngram")] == ["", ""]
    assert found["peer ngram"].differing == (0, 1)
    assert cells([*samples[:2], sample("peer ngram", 1)], modes)["peer ngram"].refusal == "1 of 1 outputs differ from peer plain"


def test_speedup_of_a_mode_uses_only_the_prompts_it_answered() -> None:
    """Predictions are not there for all prompts, and these are slower."""
    samples = [sample("plain", 1), sample("plain", 1, prompt=1, step_s=0.5), sample("B", 1, prompt=1, step_s=0.25)]
    found = cells(samples)["B"]
    assert found.speedup is not None
    assert found.speedup.median == pytest.approx(2.0)


def test_bytes_per_second_count_weights_and_half_of_the_final_cache() -> None:
    fact: dict[str, object] = {"weights_bytes": 1000, "cache_bytes_per_token": 10}
    one = sample("plain", 1, decoding_passes=16)
    assert cells([one], plain=fact)["plain"].bytes_per_s == pytest.approx(16 * (1000 + 10 * (8 + 8.5)) / 1.6)
    assert cells([one], plain={"weights_bytes": None, "cache_bytes_per_token": 10})["plain"].bytes_per_s is None


def test_summary_speedup_is_the_geometric_mean_of_valid_cells() -> None:
    fast = [sample("plain", 1), sample("B", 1, step_s=0.05)]
    slow = [replace(one, workload="code") for one in (sample("plain", 1), sample("B", 1, step_s=0.2))]
    looping = [replace(sample(mode, 1, ids=[1, 2] * 20), workload="json") for mode in ("plain", "B")]
    found = Measurements([PLAIN, GUESSING], Size(1, 17, 1), samples=[*fast, *slow, *looping])
    (summary,) = summaries(make_cells(found), found.modes)
    assert (summary.mode, summary.num_counted, summary.num_cells) == ("B", 2, 3)
    assert (summary.speedup, summary.lowest, summary.highest) == pytest.approx((1.0, 0.5, 2.0))


def test_results_of_worker_processes_are_judged_by_the_same_rules() -> None:
    modes = [fake_mode("plain"), fake_mode("fast", "drafts=3"), fake_mode("liar", "drafts=3", "text=other"), fake_mode("idle")]
    by_mode = {cell.mode: cell for cell in make_cells(measured(modes))}
    fast = by_mode["fast"]
    assert fast.speedup is not None
    assert fast.speedup.median == pytest.approx(4.0)
    assert fast.acceptance_length == pytest.approx(33 / 9)
    assert by_mode["liar"].refusal == "8 of 8 outputs differ from plain"
    assert by_mode["idle"].refusal == "nothing was drafted"
