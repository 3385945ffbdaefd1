"""Functions in forked processes, none of which may hang."""

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

import pytest

PATIENCE_S = 60.0
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def run_forked(work: Callable[[], int | None]) -> int:
    """Return the exit code of a forked process: what the function returns, 0 for None, 1 if it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks while there are threads: that is the point here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work() or 0
        except BaseException:
            traceback.print_exc()  # the parent cannot report the cause
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")
