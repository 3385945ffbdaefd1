"""The protocol of workers, line by line, with a fake library."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.benchmarking.peers import worker_loop
from paceline.benchmarking.peers.worker_loop import Arrived, Generated, Opened, PeerError, WorkerRequest, answer_orders, converted

FIRST = {"model": "M", "draft": None, "mode": "plain", "threads": 3, "num_speculative_tokens": None, "context": 64, "precision": "bf16"}
REQUEST = {"prompt_ids": [1, 2], "max_tokens": 3, "temperature": 0, "seed": 0}
PEERS_FOLDER = Path(worker_loop.__file__).parent
FAKE = """
import importlib, sys
sys.path.insert(0, {folder!r})
loop = importlib.import_module("worker_loop")
def generate(request, arrived):
    print("chatter")
    arrived(request["max_tokens"])
    return loop.Generated([7] * request["max_tokens"])
def open_model(order):
    print("a greeting")
    return loop.Opened("fake", "1", order["mode"], generate)
loop.serve(open_model)
"""


@pytest.fixture(autouse=True)
def environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def said(generate: Callable[[WorkerRequest, Arrived], Generated], *orders: dict[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    lines = "".join(json.dumps(order) + "\n" for order in (FIRST, *orders))
    answer_orders(lambda _: Opened("fake", "1", "as told", generate), io.StringIO(lines), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def in_two_parts(request: WorkerRequest, arrived: Arrived) -> Generated:
    arrived(1)
    time.sleep(0.01)
    arrived(request["max_tokens"] - 1)
    return Generated([5] * request["max_tokens"], 4, 2)


def test_bench_peer_worker_reports_ready_and_answers_requests() -> None:
    ready, first, second = said(in_two_parts, REQUEST, REQUEST)
    assert ready.pop("load_s") >= 0
    assert ready == {"ready": True, "name": "fake", "version": "1", "note": "as told"}
    for answer in (first, second):
        assert answer["token_ids"] == [5, 5, 5]
        assert (answer["num_draft_tokens"], answer["num_accepted_tokens"]) == (4, 2)
        times = answer["times_s"]
        assert times[1] == times[2]  # they came together
        assert times[0] <= times[1] - 0.01 <= answer["seconds"]
        assert 0 < answer["rss_bytes"] <= answer["peak_rss_bytes"] or not Path("/proc/self/status").exists()


def test_token_times_reported_by_a_peer_are_used() -> None:
    _, answer = said(lambda *_: Generated([1, 2, 3], times_s=[0.5, 1.0, 1.5]), REQUEST)
    assert answer["times_s"] == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(("num_tokens", "num_arrived"), [(2, 3), (4, 3), (3, 2)])
def test_peer_output_of_the_wrong_length_is_an_error(num_tokens: int, num_arrived: int) -> None:
    def generate(_: WorkerRequest, arrived: Arrived) -> Generated:
        arrived(num_arrived)
        return Generated([1] * num_tokens)

    _, answer = said(generate, REQUEST)
    assert f"{num_tokens} tokens, {num_arrived} of them in time, expected 3" in answer["error"]


def test_peer_error_is_one_line_and_the_worker_continues() -> None:
    def fails_once(request: WorkerRequest, arrived: Arrived) -> Generated:
        if request["seed"] == 1:
            raise PeerError("no such thing\nat some place")
        return in_two_parts(request, arrived)

    _, error, answer = said(fails_once, REQUEST | {"seed": 1}, REQUEST)
    assert error == {"error": "no such thing"}
    assert answer["token_ids"] == [5, 5, 5]


def test_peer_that_cannot_open_the_model_reports_one_error_and_ends() -> None:
    def fails(_: WorkerRequest) -> Opened:
        raise PeerError("mtp is not to be had")

    answers = io.StringIO()
    answer_orders(fails, io.StringIO(json.dumps(FIRST) + "\n" + json.dumps(REQUEST) + "\n"), answers)
    assert json.loads(answers.getvalue()) == {"error": "mtp is not to be had"}


def test_peer_thread_variables_are_set_before_the_model_is_opened() -> None:
    seen: dict[str, str] = {}

    def look(_: WorkerRequest) -> Opened:
        seen.update(os.environ)
        return Opened("fake", "1", "", in_two_parts)

    answer_orders(look, io.StringIO(json.dumps(FIRST) + "\n"), io.StringIO())
    assert seen["OMP_NUM_THREADS"] == seen["RAYON_NUM_THREADS"] == "3"
    assert seen["HF_HUB_OFFLINE"] == "1"


def test_output_printed_by_a_peer_library_goes_to_stderr(tmp_path: Path) -> None:
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE.format(folder=str(PEERS_FOLDER)), encoding="utf-8")
    lines = "".join(json.dumps(order) + "\n" for order in (FIRST, REQUEST))
    done = subprocess.run([sys.executable, str(script)], input=lines, capture_output=True, text=True, check=True)
    ready, answer = done.stdout.splitlines()
    assert json.loads(ready)["ready"]
    assert json.loads(answer)["token_ids"] == [7, 7, 7]
    assert done.stderr.splitlines() == ["a greeting", "chatter"]


def test_peer_model_conversion_is_cached_until_the_model_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    (tmp_path / "environment").mkdir()
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights").write_bytes(b"12")
    made: list[Path] = []

    def convert(target: Path) -> None:
        made.append(target)
        target.write_bytes((source / "weights").read_bytes())

    first = converted(source, "Q8_0.gguf", convert)
    assert converted(source, "Q8_0.gguf", convert) == first
    assert (len(made), first.read_bytes()) == (1, b"12")
    (source / "weights").write_bytes(b"345")
    assert converted(source, "Q8_0.gguf", convert).read_bytes() == b"345"

    def breaks(target: Path) -> None:
        target.write_bytes(b"half")
        raise PeerError("no space")

    with pytest.raises(PeerError):
        converted(source, "Q4_0.gguf", breaks)
    converted(source, "Q4_0.gguf", convert)
    assert converted(source, "Q4_0.gguf", convert).read_bytes() == b"345"
