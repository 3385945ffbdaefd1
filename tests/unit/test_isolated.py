"""A call in a process of its own returns, or fails with its reason; whatever it does, the next call is served."""

import gc
import os
import sys
import threading
import time

import pytest

from paceline.isolated import Failure, IsolatedError, IsolatedFunction, Limits, run

FUNCTIONS = "harness.isolated_functions"
LIMITS = Limits(seconds=5.0, memory_bytes=256 << 20)
limited_memory = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's address space")


def failure_of(function: str, argument: str, limits: Limits) -> tuple[Failure, str]:
    with pytest.raises(IsolatedError) as caught:
        run(f"{FUNCTIONS}:{function}", argument, limits)
    return caught.value.failure, str(caught.value)


def test_isolated_function_gets_and_returns_values_unchanged() -> None:
    text = '[1, "é\\ud83d\\ude00\\n", {"a": null}, 0.5]'
    assert run(f"{FUNCTIONS}:echo", text, LIMITS) == [1, "é😀\n", {"a": None}, 0.5]


def test_isolated_function_setup_is_called_once() -> None:
    isolated = IsolatedFunction(f"{FUNCTIONS}:adder", LIMITS, setup="40")
    assert [isolated.run("2"), isolated.run("3")] == [42, 43]
    with pytest.raises(IsolatedError, match="a setup that fails"):
        IsolatedFunction(f"{FUNCTIONS}:adder", LIMITS, setup="-1").start()


@pytest.mark.parametrize(
    ("function", "argument", "limits", "expected"),
    [
        ("sleep", "30", Limits(0.3, 256 << 20), (Failure.TIME, "it took longer than 0.3 seconds")),
        ("hold_the_gil", "8", Limits(0.3, 1 << 30), (Failure.TIME, "it took longer than 0.3 seconds")),
        ("spin", "1", Limits(20.0, 256 << 20, cpu_seconds=1), (Failure.CPU_TIME, "it computed longer than 1 seconds")),
        ("fail", '"a reason"', LIMITS, (Failure.RAISED, "a reason")),
        ("panic", '"a panic"', LIMITS, (Failure.RAISED, "a panic")),
        ("leave", "7", LIMITS, (Failure.ENDED, "its process ended with code 7")),
        ("no_such_function", "1", LIMITS, (Failure.NOT_STARTED, f"module '{FUNCTIONS}' has no attribute 'no_such_function'")),
    ],
)
def test_isolated_function_failure_has_its_reason(function: str, argument: str, limits: Limits, expected: tuple[Failure, str]) -> None:
    assert failure_of(function, argument, limits) == expected


@limited_memory
@pytest.mark.parametrize(("argument", "megabytes"), [("1000000000", 256), ("1", 1), ("1", 4)])
def test_isolated_function_over_its_memory_limit_fails(argument: str, megabytes: int) -> None:
    """Also where the process has more before the call, of which enough is free for a small one."""
    expected = (Failure.MEMORY, f"it needed more than the {megabytes} MB it may have")
    assert failure_of("allocate", argument, Limits(5.0, megabytes << 20)) == expected


@limited_memory
def test_isolated_function_process_holding_memory_is_replaced_when_needed() -> None:
    isolated = IsolatedFunction(f"{FUNCTIONS}:keep", LIMITS)
    first = isolated.run("1")
    counts = [isolated.run(str(100 << 20)) for _ in range(4)]
    assert (first, max(counts)) == (1, 2)


@pytest.mark.parametrize("function", ["fail", "panic", "leave"])
def test_isolated_function_serves_calls_after_a_failure(function: str) -> None:
    isolated = IsolatedFunction(f"{FUNCTIONS}:{function}", LIMITS)
    for _ in range(3):
        with pytest.raises(IsolatedError):
            isolated.run("1")
    isolated.start()
    assert isolated.pid is not None


def test_isolated_function_replaces_a_killed_process() -> None:
    isolated = IsolatedFunction(f"{FUNCTIONS}:echo", LIMITS)
    pids = set()
    for number in range(20):
        assert isolated.run(str(number)) == number
        pids.add(isolated.pid)
    assert len(pids) == 1
    pid = pids.pop()
    assert pid is not None
    os.kill(pid, 9)
    time.sleep(0.05)
    assert isolated.run("1") == 1
    assert isolated.pid != pid


def test_closing_an_isolated_function_ends_running_and_later_calls() -> None:
    isolated, failures = IsolatedFunction(f"{FUNCTIONS}:sleep", Limits(60.0, 256 << 20)), list[Failure]()

    def call() -> None:
        with pytest.raises(IsolatedError) as caught:
            isolated.run("50")
        failures.append(caught.value.failure)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    while isolated.pid is None:
        time.sleep(0.01)
    isolated.close()
    for thread in threads:
        thread.join(20)
    call()
    assert failures == [Failure.CLOSED] * 4


def test_isolated_function_process_ends_with_its_object() -> None:
    isolated = IsolatedFunction(f"{FUNCTIONS}:echo", LIMITS)
    isolated.start()
    pid = isolated.pid
    assert pid is not None
    del isolated
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
def test_isolated_function_process_is_in_the_session_but_not_in_the_group_of_its_parent() -> None:
    # Ctrl-C reaches a group; Linux schedules sessions as groups, and on a busy machine let new ones wait for up to a minute
    isolated = IsolatedFunction(f"{FUNCTIONS}:echo", LIMITS)
    isolated.start()
    assert isolated.pid is not None
    assert (os.getsid(isolated.pid), os.getpgid(isolated.pid)) == (os.getsid(0), isolated.pid)
    isolated.close()
