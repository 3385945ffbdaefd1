"""Modes take turns on the same orders, and a run goes on whatever one of them does."""

from pathlib import Path

import pytest

from harness.bench_runs import PROMPTS, fake_mode, measured, run_of
from harness.bench_workers import tokens_of
from paceline.benchmarking.plan import BenchPlan
from paceline.benchmarking.results import make_cells
from paceline.benchmarking.run import INTERRUPTED, OUT_OF_TIME, RunProgress


def test_bench_modes_alternate_and_rotate_on_each_prompt(tmp_path: Path) -> None:
    log = tmp_path / "order"
    measured([fake_mode(name, f"order={log}") for name in ("plain", "B", "C")])
    order = [line[0] for line in log.read_text().splitlines()]
    assert "".join(order[:3]) == "pBC"  # every worker answers once, to measure its time
    # four rounds of two prompts
    assert "".join(order[3:]) == "pBC BCp BCp CpB CpB pBC pBC BCp".replace(" ", "")


def test_all_bench_modes_get_equal_requests(tmp_path: Path) -> None:
    found = measured([fake_mode("plain"), fake_mode("B", "drafts=2")])
    places = {(one.round, one.prompt) for one in found.samples}
    assert places == {(number, prompt) for number in range(4) for prompt in (0, 1)}
    assert len(found.samples) == 2 * len(places)
    for one in found.samples:
        assert list(one.outputs[0].token_ids) == tokens_of(list(PROMPTS[one.prompt].prompt_ids), 33, {})


def test_dead_bench_worker_fails_only_its_own_mode() -> None:
    found = measured([fake_mode("plain"), fake_mode("B", "dies=4"), fake_mode("C", "drafts=1")])
    (failure,) = found.failures
    assert (failure.mode, failure.workload) == ("B", "made up")
    assert "exit code 3" in failure.message
    counts = {name: sum(one.mode == name for one in found.samples) for name in "BC"}
    assert counts == {"B": 2, "C": 8}
    by_mode = {cell.mode: cell for cell in make_cells(found)}
    assert by_mode["B"].refusal == "no whole round was measured"
    assert by_mode["C"].speedup is not None


def test_hanging_bench_worker_is_ended_and_fails_its_own_mode() -> None:
    plan = BenchPlan(rounds=1, max_tokens=33, num_prompts=2, timeout_s=1.0)
    found = measured([fake_mode("plain"), fake_mode("B", "hangs=2")], plan=plan)
    assert [failure.message for failure in found.failures] == ["B did not answer within 1 s and was ended"]
    assert sum(one.mode == "plain" for one in found.samples) == 4


def test_bench_worker_that_cannot_open_the_model_fails_its_own_mode() -> None:
    found = measured([fake_mode("plain"), fake_mode("B", "refuses")])
    assert [(one.mode, one.message, one.workload) for one in found.failures] == [("B", "B: this model is too new", None)]
    assert found.samples


def test_bench_without_plain_outputs_reports_no_speedup() -> None:
    found = measured([fake_mode("plain", "refuses"), fake_mode("B", "drafts=3")])
    assert [cell.refusal for cell in make_cells(found)] == ["plain has no outputs to compare with"]


def test_worker_output_of_the_wrong_length_is_a_protocol_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of([fake_mode("plain")])
    ask = run._send

    def short(*arguments: object) -> object:
        answer = ask(*arguments)  # type: ignore[arg-type]
        return answer and {**answer, "token_ids": [1], "times_s": [1.0]}

    monkeypatch.setattr(run, "_send", short)
    found = run.measure()
    assert found.samples == []
    assert {one.message for one in found.failures} == {"plain broke the protocol (ValueError: 1 tokens where 33 were requested)"}


def test_interrupted_bench_keeps_the_measured_rounds() -> None:
    told: list[None] = []

    def advance() -> None:
        told.append(None)
        if len(told) == 4:
            raise KeyboardInterrupt

    found = measured([fake_mode("plain"), fake_mode("B", "drafts=3")], watcher=RunProgress(advance=advance))
    assert found.ended == INTERRUPTED
    assert len(found.samples) == 8
    assert [cell.num_rounds for cell in make_cells(found)] == [1, 1]


def test_bench_over_its_time_limit_keeps_the_measured_rounds() -> None:
    plan = BenchPlan(rounds=3, max_tokens=33, num_prompts=2, minutes=1e-9)
    found = measured([fake_mode("plain")], plan=plan)
    assert found.ended == OUT_OF_TIME
    assert "raise --minutes" in found.notices[-1]


def test_bench_defaults_shrink_to_the_time_limit_with_a_notice() -> None:
    found = measured([fake_mode("plain")], plan=BenchPlan(minutes=1e-9))
    assert (found.size.rounds, found.size.tokens, found.size.prompts) == (3, 32, 1)
    assert "would take about" in found.notices[0]


def test_bench_sends_a_batch_as_one_request() -> None:
    plan = BenchPlan(rounds=1, max_tokens=33, batch_size=3)
    found = measured([fake_mode("plain"), fake_mode("B", "drafts=2")], plan=plan)
    assert {len(one.outputs) for one in found.samples} == {3}  # the first of two prompts is run twice
    assert {one.prompt for one in found.samples} == {0}
    assert [cell.speedup is not None for cell in make_cells(found)] == [False, True]
