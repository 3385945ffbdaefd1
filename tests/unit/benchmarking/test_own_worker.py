"""Our own worker answers by the protocol, with the tokens of `LLM.generate`, and keeps nothing of a request for the next one."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.always_drafts import draft_always
from paceline.benchmarking.own_worker import OwnModel, TimedCall
from paceline.benchmarking.peers.worker_loop import answer_orders, memory_bytes
from paceline.benchmarking.samples import Sample
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.runtimes.native import library
from paceline.sampling.params import SamplingParams

PROMPT = [40, 50, 60, 70, 80, 90, 100]
OPTIONS = {"quantization": "none", "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker puts a clock into the library, which here others use as well."""
    path = library.kernels_path()
    if path is not None:
        opened = library.open_kernels(path)
        for module in ("paceline.benchmarking.own_worker", "paceline.runtimes.native.execution"):
            monkeypatch.setattr(f"{module}.kernels", lambda: opened)


def order(*drafters: str, **options: Any) -> dict[str, Any]:
    return {
        "model": "mini", "mode": "x", "threads": 1, "context": 512, "num_speculative_tokens": 3, "drafters": list(drafters),
        "options": OPTIONS | options,
    }  # fmt: skip


def request(**fields: Any) -> dict[str, Any]:
    return {"prompt_ids": PROMPT, "max_tokens": 24, "temperature": 0.0, "seed": 5, **fields}


def answered(*orders: dict[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    answer_orders(OwnModel, io.StringIO("\n".join(map(json.dumps, orders))), answers, PacelineError)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_own_bench_worker_reports_the_model_and_its_counters(own_kernels: None) -> None:
    ready, *found = answered(order("ngram"), request(), request(temperature=0.8))
    assert ready["ready"] is True
    assert (ready["name"], ready["drafter"], ready["numerics"]) == ("paceline", "ngram", "exact")
    assert len(found) == 2
    with LLM("mini", drafter="none", threads=1, max_model_len=512) as llm:
        for one, temperature in zip(found, (0.0, 0.8), strict=True):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
            assert one["token_ids"] == llm.generate([PROMPT], params)[0].token_ids
    for one in found:
        sample = Sample.of(one, mode="ngram", workload="x", temperature=0.0, prompt=0, round=1, num_prompt_tokens=7)
        assert sample.acceptance_length == pytest.approx(24 / one["steps"])
        assert one["times_s"] == sorted(one["times_s"])
        assert one["times_s"][-1] <= one["seconds"]
        assert one["decoding_passes"] == one["passes"] - 1
        if ready["library"] != "torch":
            assert 0 < one["host_s"] < one["seconds"]
            assert ready["weights_bytes"] == pytest.approx(28.3e6, rel=0.01)
            assert ready["cache_bytes_per_token"] > 0


def test_bench_requests_share_no_prefix_cache_or_suffix_store(own_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    model = OwnModel(order("suffix"))
    long = request(prompt_ids=PROMPT * 12)  # some blocks of the cache
    first, second = (model.answer(long) for _ in range(2))
    assert first["num_draft_tokens"] == second["num_draft_tokens"]
    assert first["passes"] == second["passes"]
    assert model._loaded.engine.stats.num_cached_tokens == 0


def test_bench_batch_gives_the_tokens_of_its_single_requests(own_kernels: None) -> None:
    model = OwnModel(order("ngram"))
    requests = [request(), request(prompt_ids=PROMPT[::-1], seed=6)]
    alone = [model.answer(one)["token_ids"] for one in requests]
    together = model.answer({"batch": requests})
    assert [one["token_ids"] for one in together["outputs"]] == alone
    assert together["steps"] >= together["decoding_passes"]


def test_own_bench_worker_drafts_from_a_prediction(own_kernels: None) -> None:
    plain = OwnModel(order()).answer(request())
    assert (plain["num_draft_tokens"], plain["steps"]) == (0, 24)
    drafted = OwnModel(order("prediction")).answer(request(prediction=plain["token_ids"]))
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["num_accepted_tokens"] > 0


def test_bench_worker_answers_an_invalid_request_with_an_error(own_kernels: None) -> None:
    _, *found = answered(order(), request(prompt_ids=[]), request(max_tokens=10_000), {"nonsense": 1}, request(max_tokens=2))
    assert [list(one) == ["error"] for one in found] == [True, True, True, False]


def test_bench_worker_reports_a_model_that_cannot_be_opened(tmp_path: Path) -> None:
    (found,) = answered(order() | {"model": str(tmp_path)})
    assert "error" in found


def test_timed_call_returns_the_result_and_its_seconds() -> None:
    timed = TimedCall(lambda value: value + 1)
    assert timed(1) == 2
    assert timed.seconds > 0
    now, peak = memory_bytes()
    assert now <= peak
