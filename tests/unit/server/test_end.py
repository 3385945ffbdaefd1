"""A log that is not read, and a process that does not end by itself."""

import logging
import subprocess
import sys
import threading
import time

import pytest

from paceline.server.logs import log_to_stderr, queued_lines

WAIT_S = 10


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_process_that_does_not_end_in_time_exits_with_code_1(is_cancelled: bool) -> None:
    cancel = "faulthandler.cancel_dump_traceback_later()" if is_cancelled else ""
    script = f"""
import faulthandler, time
from paceline.server.run import exit_within
exit_within(60)
exit_within(0.01)  # a second signal does not wait
{cancel}
time.sleep(0.5 if {is_cancelled} else 60)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=50, check=False)
    assert (ended.returncode, ended.stderr) == (0 if is_cancelled else 1, b"")


def test_log_lines_that_stderr_does_not_take_are_dropped_and_counted() -> None:
    is_read, written = threading.Event(), list[bytes]()

    def write(content: bytes) -> None:
        is_read.wait(WAIT_S)
        written.append(content)

    with queued_lines(write, max_waiting=3) as lines:
        started_s = time.monotonic()
        for number in range(20):
            lines.print_line(f"line {number}")
        assert time.monotonic() - started_s < WAIT_S / 2
        is_read.set()
        while not lines.queue.empty():  # type: ignore[union-attr]
            time.sleep(0.001)
    shown = b"".join(written).decode().splitlines()
    lost = [int(line.split()[0]) for line in shown if "dropped" in line]
    assert lost
    assert sum(lost) + len(shown) - len(lost) == 20
    assert shown[0] == "line 0"


@pytest.mark.parametrize("num_lines", [1, 20], ids=["waiting", "full"])
def test_end_of_logging_does_not_wait_for_a_blocked_stderr(num_lines: int) -> None:
    is_read, started_s = threading.Event(), time.monotonic()

    def write(content: bytes) -> None:
        is_read.wait(WAIT_S)

    with queued_lines(write, max_waiting=3) as lines:
        for _ in range(num_lines):
            lines.print_line("a")
    logging.shutdown()  # called at the exit of the interpreter: it must not wait for a lock of the writer
    assert time.monotonic() - started_s < WAIT_S / 2
    is_read.set()


def test_warnings_of_other_libraries_are_written_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr(logging.INFO) as lines:
        lines.print_line("a line\nof one")
        logging.getLogger("paceline.server").info("%s", "b")
        logging.getLogger("elsewhere").warning("%s", "c")
    assert capfd.readouterr().err.splitlines() == ["a line of one", "b", "c"]
    logging.getLogger("paceline.server").propagate = True
