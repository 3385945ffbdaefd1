"""A log that is not read, and a process that does not end by itself."""

import logging
import threading
import time
from queue import SimpleQueue

import pytest

from paceline.server.logs import log_to_stderr, queued_lines
from paceline.server.shutdown_watchdog import EXIT_CODE, ShutdownWatchdog

WAIT_S = 10


def test_shutdown_watchdog_exits_a_process_that_does_not_end_in_time() -> None:
    ended: SimpleQueue[int] = SimpleQueue()
    with ShutdownWatchdog(ended.put) as watchdog:
        watchdog.exit_within(60)
        watchdog.exit_within(0.01)  # a second signal does not wait
        assert ended.get(timeout=WAIT_S) == EXIT_CODE


def test_shutdown_watchdog_does_not_exit_a_process_that_ends_in_time() -> None:
    ended: SimpleQueue[int] = SimpleQueue()
    for has_deadline in (False, True):
        with ShutdownWatchdog(ended.put) as watchdog:
            if has_deadline:
                watchdog.exit_within(0.1)
        watchdog._thread.join(WAIT_S)
        assert not watchdog._thread.is_alive()
    assert ended.empty()


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
