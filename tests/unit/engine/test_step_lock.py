"""One thread at a time, and no queued call is lost."""

import threading
import time
from collections import deque

import pytest

from harness.forked import needs_fork, run_forked
from paceline.engine.engine import StepLock
from paceline.errors import ConfigError


class Counter:
    """A number that only the holder of the lock changes, and a queue of what to add to it."""

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        self.total = self.num_inside = 0
        self.num_forks = 0
        self.lock = StepLock(self.drain, self.fork)

    def fork(self) -> None:
        self.num_forks += 1

    def drain(self) -> None:
        self.enter()
        while self.queue:
            self.total += self.queue.popleft()
        self.num_inside -= 1

    def enter(self) -> None:
        self.num_inside += 1
        assert self.num_inside <= 2, "another thread is inside"  # the holder, and its own draining


def test_step_lock_drains_items_queued_by_other_threads(large_counts: bool) -> None:
    counter = Counter()
    count = 20_000 if large_counts else 2_000

    def leave() -> None:
        for _ in range(count):
            counter.queue.append(1)
            counter.lock.request_drain()

    def take() -> None:
        for _ in range(count):
            with counter.lock.held():
                counter.enter()
                counter.num_inside -= 1

    threads = [threading.Thread(target=work) for work in (leave, leave, leave, take, take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert (counter.total, list(counter.queue), counter.num_inside) == (3 * count, [], 0)


def test_step_lock_request_drain_does_not_wait() -> None:
    counter = Counter()
    with counter.lock.held():
        asker = threading.Thread(target=lambda: (counter.queue.append(5), counter.lock.request_drain()))
        asker.start()
        asker.join(10)
        assert not asker.is_alive()
        assert counter.total == 0
        counter.queue.append(2)
        counter.lock.request_drain()  # its own, as a finaliser would
        assert counter.total == 0
    assert counter.total == 7


def test_error_releases_the_step_lock_and_keeps_queued_items() -> None:
    counter = Counter()

    def fail() -> None:
        with counter.lock.held():
            counter.queue.append(3)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert counter.total == 3
    with counter.lock.held():
        assert counter.lock.is_held_by_this_thread
    assert not counter.lock.is_held_by_this_thread


def test_nested_step_lock_raises_and_other_threads_wait() -> None:
    counter = Counter()
    with counter.lock.held(), pytest.raises(ConfigError, match="from within its own step"), counter.lock.held():
        pass
    order: list[str] = []

    def second() -> None:
        with counter.lock.held():
            order.append("second")

    with counter.lock.held():
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.02)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


@needs_fork
@pytest.mark.parametrize("is_held", [False, True])
def test_forked_process_gets_a_new_step_lock_unless_it_was_held(is_held: bool) -> None:
    counter, is_inside, may_leave = Counter(), threading.Event(), threading.Event()

    def hold() -> None:
        with counter.lock.held():
            is_inside.set()
            may_leave.wait(60)

    holder = threading.Thread(target=hold)
    if is_held:
        holder.start()
        is_inside.wait(10)

    def take_the_lock() -> None:
        if is_held:
            with pytest.raises(ConfigError, match="forked while another thread"), counter.lock.held():
                pass
            return
        for _ in range(2):
            with counter.lock.held():
                assert counter.num_forks == 1

    assert run_forked(take_the_lock) == 0
    may_leave.set()
    if is_held:
        holder.join(10)
