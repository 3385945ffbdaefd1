"""Workers that die, hang or break the protocol cost an error and leave no process."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from harness.bench_runs import fake_mode
from paceline.benchmarking.run import WorkerError, WorkerProcess

REQUEST = {"prompt_ids": [1], "max_tokens": 4, "temperature": 0.0, "seed": 0}


@contextmanager
def worker(*words: str) -> Iterator[WorkerProcess]:
    with closing(WorkerProcess("fake", fake_mode("fake", *words).command)) as process:
        assert process.send({"model": "none"}, 30)["ready"]
        yield process


def is_running(pid: int) -> bool:
    """Whether a process does more than wait to be collected."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "\nState:\tZ" not in status.read_text()
    except OSError:
        return False


def test_worker_process_answers_and_ends() -> None:
    with worker() as process:
        assert len(process.send(REQUEST, 30)["token_ids"]) == 4
        assert is_running(process.pid)
    assert not is_running(process.pid)


def test_error_of_a_dead_bench_worker_contains_its_stderr() -> None:
    with worker("dies=1") as process:
        with pytest.raises(WorkerError, match="fake ended with exit code 3: out of luck") as raised:
            process.send(REQUEST, 30)
        assert raised.value.is_over
        with pytest.raises(WorkerError, match="ended"):
            process.send(REQUEST, 30)


def test_hanging_bench_worker_process_is_ended_in_time() -> None:
    with worker("hangs=1") as process:
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"did not answer within 0.2 s") as raised:
            process.send(REQUEST, 0.2)
        assert raised.value.is_over
        assert time.monotonic() - start < 5
        assert not is_running(process.pid)


def test_bench_worker_with_invalid_output_is_ended() -> None:
    with worker("nonsense") as process:
        with pytest.raises(WorkerError, match="no JSON") as raised:
            process.send(REQUEST, 30)
        assert raised.value.is_over


def test_worker_error_answer_does_not_end_the_worker() -> None:
    with closing(WorkerProcess("fake", fake_mode("fake", "refuses").command)) as process:
        with pytest.raises(WorkerError, match="fake: this model is too new") as raised:
            process.send({}, 30)
        assert not raised.value.is_over


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_child_processes_end_with_their_worker_process(tmp_path: Path) -> None:
    with worker(f"child={tmp_path / 'pid'}") as process:
        child = int((tmp_path / "pid").read_text())
        assert is_running(child)
        process.kill()
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_worker_program_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(WorkerError, match="no-such-program cannot be started"):
        WorkerProcess("fake", ("no-such-program",))
