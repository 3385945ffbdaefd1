"""Runs functions on untrusted input, each in a process of its own with limits on memory, processor time and wall-clock time.

A template, a grammar or a regular expression can make one operation take minutes or all memory, and a thread of the same process could not
stop it. The function is given by its module and name; its argument and result are JSON. The process starts with the first call and also
serves later calls. After a failure that ends it, the next call starts another one. This file is also the program of that process.
"""

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_TIMED_OUT, _OUT_OF_MEMORY = 1, 3  # exit codes of the process; 1 is that of `faulthandler` after a timeout
_CHUNK_BYTES = 1 << 16
_MAX_MESSAGE_CHARS = 2000
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


class Failure(Enum):
    """Reason why a call has no result."""

    NOT_STARTED = "not_started"
    TIME = "time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    RAISED = "raised"
    ENDED = "ended"
    CLOSED = "closed"


class IsolatedError(Exception):
    """Raised if a call has no result.

    Attributes:
        failure: the reason.
        error_type: name of the exception that the function raised; empty for other failures.
    """

    def __init__(self, failure: Failure, reason: str, error_type: str = "") -> None:
        super().__init__(reason)
        self.failure, self.error_type = failure, error_type


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a call.

    Attributes:
        seconds: wall-clock time of one call.
        memory_bytes: address space of the process, if the system can limit it.
        cpu_seconds: processor time of one call, if the system can limit it; None = no limit.
    """

    seconds: float
    memory_bytes: int
    cpu_seconds: int | None = None


def run(function: str, argument: str, limits: Limits) -> Any:
    """Call a function once, in a process that ends with the call; arguments and errors as for `IsolatedFunction`."""
    isolated = IsolatedFunction(function, limits)
    try:
        return isolated.run(argument)
    finally:
        isolated.close()


class IsolatedFunction:
    """Runs a function in a process of its own. Calls of several threads run one after another; a forked child starts its own process.

    The process ends when this object is freed, when the parent process ends, and when a call exceeds the limits.

    Args:
        function: "package.module:name". The process imports the module, which should therefore import little.
        setup: JSON. If given, the function is called with it once when the process starts, and must return the function that `run` calls.
    """

    def __init__(self, function: str, limits: Limits, *, setup: str | None = None) -> None:
        self._function, self._limits, self._setup = function, limits, setup
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False
        _LIVE.add(self)

    @property
    def pid(self) -> int | None:
        """Id of the process; None = none is running."""
        return None if self._process is None else self._process.popen.pid

    def start(self) -> None:
        """Start the process and call its setup, unless it is running.

        Raises:
            IsolatedError: the process cannot be started, or its setup failed.
        """
        with self._lock:
            self._running_process()

    def run(self, argument: str) -> Any:
        """Call the function in its process and return the result.

        Args:
            argument: the function's argument, as JSON.

        Raises:
            IsolatedError: the function raised an exception, exceeded a limit, or could not be called. Later calls work, unless this
                object was closed.
        """
        request = f'{{"argument": {argument}}}'
        with self._lock:
            process = self._running_process()
            was_used = process.is_used
            try:
                return self._exchange(process, request)
            except IsolatedError as error:
                if error.failure is not Failure.MEMORY or not was_used:
                    raise
            return self._exchange(self._running_process(), request)  # a new process, because earlier calls may have used up the memory

    def close(self) -> None:
        """End the process. A call that is running in another thread fails, and so do later calls."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.popen.kill()
        with self._lock:
            self._stop_process()

    def _exchange(self, process: "_Process", request: str | None) -> Any:
        """Send a request and return the answer; with None, return the answer after the start. End the process if it cannot go on."""
        try:
            if request is not None:
                process.send(request, self._limits)
                process.is_used = True
            return process.receive(self._limits)
        except BaseException as error:
            if not isinstance(error, IsolatedError) or process.has_ended:
                self._stop_process()
            if self._is_closed:
                raise _closed_error() from None
            raise

    def _running_process(self) -> "_Process":
        if self._process is not None and self._process.popen.poll() is None:
            return self._process
        self._stop_process()
        popen = _start_process(self._function, self._limits)
        process = self._process = _Process(popen, weakref.finalize(self, _end_process, popen))
        if self._is_closed:  # `close` was called before `self._process` was set, so it has not ended the process
            self._stop_process()
            raise _closed_error()
        try:
            self._exchange(process, None)
        except IsolatedError as error:
            if error.failure in (Failure.MEMORY, Failure.CLOSED):
                raise
            raise IsolatedError(Failure.NOT_STARTED, str(error)) from error
        if self._setup is not None:
            try:
                self._exchange(process, f'{{"setup": {self._setup}}}')
            except IsolatedError:
                self._stop_process()
                raise
        process.is_used = False
        return process

    def _stop_process(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process = None

    def reset_after_fork(self) -> None:
        """In a forked child, give up the parent's process, and replace the lock, which a thread of the parent may have held."""
        if self._process is not None:
            self._process.detach_after_fork()
            self._process = None
        self._lock = threading.Lock()


_LIVE: "weakref.WeakSet[IsolatedFunction]" = weakref.WeakSet()


def _reset_after_fork() -> None:
    for isolated in list(_LIVE):
        isolated.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(slots=True)
class _Process:
    """A running process.

    Attributes:
        terminate: ends the process when it is called, or when the `IsolatedFunction` is freed.
        pending: bytes that were received after the last complete answer.
        is_used: whether the process has served a call since its setup.
        has_ended: whether the process has ended, or will end after its last answer.
    """

    popen: "subprocess.Popen[bytes]"
    terminate: "weakref.finalize[Any, IsolatedFunction]"
    pending: bytearray = field(default_factory=bytearray)
    is_used: bool = False
    has_ended: bool = False

    def send(self, request: str, limits: Limits) -> None:
        assert self.popen.stdin is not None
        rest = memoryview(request.encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self.popen.stdin.fileno(), rest) :]
        except OSError:
            raise self._end_error(limits) from None

    def receive(self, limits: Limits) -> Any:
        assert self.popen.stdout is not None
        num_searched = 0
        while (end := self.pending.find(b"\n", num_searched)) < 0:
            num_searched = len(self.pending)
            chunk = os.read(self.popen.stdout.fileno(), _CHUNK_BYTES)
            if not chunk:
                raise self._end_error(limits)
            self.pending.extend(chunk)
        found: dict[str, Any] = json.loads(self.pending[:end])
        del self.pending[: end + 1]
        if "error" not in found:
            return found["result"]
        self.has_ended = found["ends"]
        if found["error"] == "MemoryError":
            raise _out_of_memory_error(limits)
        raise IsolatedError(Failure.RAISED, found["message"], found["error"])

    def detach_after_fork(self) -> None:
        """In a forked child, close the pipes without ending the process, which belongs to the parent."""
        self.terminate.detach()
        _close_pipes(self.popen)
        self.popen.returncode = 0  # the process is a child of the parent only, so `Popen.wait` would fail here

    def _end_error(self, limits: Limits) -> IsolatedError:
        self.has_ended = True
        code = self.popen.wait()
        if code == _TIMED_OUT:
            return IsolatedError(Failure.TIME, f"it took longer than {limits.seconds:g} seconds")
        if code in (_OUT_OF_MEMORY, -getattr(signal, "SIGABRT", _OUT_OF_MEMORY)):  # a Rust library aborts if memory runs out
            return _out_of_memory_error(limits)
        if code == -getattr(signal, "SIGXCPU", 0):
            return IsolatedError(Failure.CPU_TIME, f"it computed longer than {limits.cpu_seconds} seconds")
        return IsolatedError(Failure.ENDED, f"its process ended with code {code}")


def _out_of_memory_error(limits: Limits) -> IsolatedError:
    return IsolatedError(Failure.MEMORY, f"it needed more than the {limits.memory_bytes >> 20} MB it may have")


def _closed_error() -> IsolatedError:
    return IsolatedError(Failure.CLOSED, "the function was closed")


def _start_process(function: str, limits: Limits) -> "subprocess.Popen[bytes]":
    if getattr(sys, "frozen", False):  # in a frozen application, `sys.executable` is no Python interpreter
        raise IsolatedError(Failure.NOT_STARTED, "it is one program with paceline")
    settings: dict[str, Any] = {"function": function, "paths": [path for path in sys.path if path]}
    settings |= {"seconds": limits.seconds, "memory_bytes": limits.memory_bytes, "cpu_seconds": limits.cpu_seconds}
    command = [sys.executable or "", "-I", "-S", "-B", "-W", "ignore", "-c", _PROGRAM, __file__, json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    try:
        return start(command, bufsize=0, process_group=0, **pipes)  # its own group, so that Ctrl-C does not end the process
    except (OSError, ValueError) as error:
        raise IsolatedError(Failure.NOT_STARTED, str(error)) from error


def _end_process(popen: "subprocess.Popen[bytes]") -> None:
    popen.kill()
    _close_pipes(popen)
    popen.wait()


def _close_pipes(popen: "subprocess.Popen[bytes]") -> None:
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


# The functions below run in the isolated process.


def _serve(settings: dict[str, Any]) -> None:
    """Answer requests from standard input until it is closed."""
    try:
        sys.path += settings["paths"]
        module, _, name = settings["function"].partition(":")
        function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
        _limit_memory(settings["memory_bytes"])
        answer: dict[str, Any] = {"result": None}
    except Exception as error:
        answer = _error_answer(error)
    _write_answer(answer)
    if "error" in answer:
        return
    for line in sys.stdin.buffer:
        # the timer of `faulthandler` works even while the function holds the GIL
        faulthandler.dump_traceback_later(settings["seconds"], exit=True)
        _limit_cpu(settings["cpu_seconds"])
        try:
            request = json.loads(line)
            if "setup" in request:
                function, answer = function(request["setup"]), {"result": None}
            else:
                answer = {"result": function(request["argument"])}
        except BaseException as error:
            answer = _error_answer(error)
        _write_answer(answer)
        faulthandler.cancel_dump_traceback_later()
        if answer.get("ends"):
            return


def _error_answer(error: BaseException) -> dict[str, Any]:
    must_end = isinstance(error, MemoryError | RecursionError) or not isinstance(error, Exception)
    return {"error": type(error).__name__, "message": str(error)[:_MAX_MESSAGE_CHARS], "ends": must_end}


def _write_answer(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limit memory and forbid writing files, if the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _limit_cpu(seconds: int | None) -> None:
    """Limit processor time to `seconds` from now on, if the system can."""
    if seconds is None:
        return
    with suppress(ImportError, OSError, ValueError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    try:
        _serve(json.loads(sys.argv[1]))
    except BaseException:  # memory ran out while an answer was written
        os._exit(_OUT_OF_MEMORY)
    os._exit(0)  # skips the cleanup of the interpreter, which takes longer than a call
