"""A log that nobody reads, and a process that does not end by itself."""

import logging
import threading
import time
from queue import SimpleQueue

import pytest

from paceline.server.logs import LineWriter, log_to_stderr
from paceline.server.shutdown_watchdog import EXIT_CODE, ShutdownWatchdog

WAIT_S = 10


def test_a_process_that_does_not_end_in_time_is_ended() -> None:
    ended: SimpleQueue[int] = SimpleQueue()
    with ShutdownWatchdog(ended.put) as watch:
        watch.exit_within(60)
        watch.exit_within(0.01)  # a second signal does not wait
        assert ended.get(timeout=WAIT_S) == EXIT_CODE


def test_one_that_ends_in_time_or_was_not_told_to_is_left_alone() -> None:
    ended: SimpleQueue[int] = SimpleQueue()
    for is_told in (False, True):
        with ShutdownWatchdog(ended.put) as watch:
            if is_told:
                watch.exit_within(0.1)
        watch._thread.join(WAIT_S)
        assert not watch._thread.is_alive()
    assert ended.empty()


def test_nobody_waits_for_a_log_that_is_not_read_and_what_is_lost_is_counted() -> None:
    is_read, written = threading.Event(), list[bytes]()

    def write(content: bytes) -> None:
        is_read.wait(WAIT_S)
        written.append(content)

    writer = LineWriter(write, max_waiting=3)
    started_s = time.monotonic()
    for number in range(20):
        writer.say(f"line {number}")
    assert time.monotonic() - started_s < WAIT_S / 2
    is_read.set()
    while not writer._lines.empty():
        time.sleep(0.001)
    writer.close()
    shown = b"".join(written).decode().splitlines()
    lost = [int(line.split()[0]) for line in shown if line.endswith("dropped: nobody read them")]
    assert sum(lost) + len(shown) - len(lost) == 20
    assert shown[0] == "line 0"


def test_the_end_does_not_wait_for_a_reader_either() -> None:
    is_read = threading.Event()
    writer = LineWriter(lambda content: is_read.wait(WAIT_S) and None)
    writer.say("a")
    started_s = time.monotonic()
    writer.close()
    assert time.monotonic() - started_s < WAIT_S / 2
    is_read.set()


def test_what_others_warn_of_goes_the_same_way(capfd: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr(logging.INFO) as lines:
        lines.say("a line\nof one")
        logging.getLogger("paceline.server").info("%s", "b")
        logging.getLogger("elsewhere").warning("%s", "c")
    assert capfd.readouterr().err.splitlines() == ["a line of one", "b", "c"]
    logging.getLogger("paceline.server").propagate = True
