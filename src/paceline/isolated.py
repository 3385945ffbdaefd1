"""Runs functions on untrusted input, each in a process of its own with limits on memory, processor time and wall-clock time.

A template, a grammar or a regular expression can make one operation take minutes or all memory, and nothing in the same process can stop
it. The function is named by its module, and its argument and result are JSON, so that no code is passed. The process starts with the
first call, serves later ones, and is replaced after a failure that ended it. This file is also the program of that process.
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

_LATE, _OUT_OF_MEMORY = 1, 3  # exit codes; `faulthandler` ends a process with 1
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
    """Runs a function in a process of its own. Threads call it in turn; after a fork, the child starts a process of its own.

    The process ends with this object, with its owner's process, and with a call that exceeds the limits.

    Args:
        function: "package.module:name". The process imports the module, which should therefore import little.
        setup: JSON; if given, the function is called with it when a process starts, and returns the function that `run` calls.
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
        """Start and set up the process unless it is running.

        Raises:
            IsolatedError: it cannot be started, or its setup failed.
        """
        with self._lock:
            self._started()

    def run(self, argument: str) -> Any:
        """Call the function in its process and return the result.

        Args:
            argument: the function's argument, as JSON.

        Raises:
            IsolatedError: the function raised an exception, exceeded a limit, or could not be called. Later calls work, unless `close`
                was called.
        """
        request = f'{{"argument": {argument}}}'
        with self._lock:
            process = self._started()
            was_used = process.is_used
            try:
                return self._answer(process, request)
            except IsolatedError as error:
                if error.failure is not Failure.MEMORY or not was_used:
                    raise
            return self._answer(self._started(), request)  # earlier calls may have used up the memory of the first process

    def close(self) -> None:
        """End the process, and with it a call in another thread; later calls fail."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.popen.kill()
        with self._lock:
            self._end()

    def _answer(self, process: "_Process", request: str | None) -> Any:
        """Send a request and return the answer; with None, return the answer that the process sends when it starts.

        A process that cannot serve another request is ended.
        """
        try:
            if request is not None:
                process.send(request, self._limits)
                process.is_used = True
            return process.receive(self._limits)
        except BaseException as error:
            if not isinstance(error, IsolatedError) or process.has_ended:
                self._end()
            if self._is_closed:
                raise _closed() from None
            raise

    def _started(self) -> "_Process":
        if self._process is not None and self._process.popen.poll() is None:
            return self._process
        self._end()
        popen = _start(self._function, self._limits)
        process = self._process = _Process(popen, weakref.finalize(self, _end_process, popen))
        if self._is_closed:  # `close` may not have seen the new process
            self._end()
            raise _closed()
        try:
            self._answer(process, None)
        except IsolatedError as error:
            if error.failure in (Failure.MEMORY, Failure.CLOSED):
                raise
            raise IsolatedError(Failure.NOT_STARTED, str(error)) from error
        if self._setup is not None:
            try:
                self._answer(process, f'{{"setup": {self._setup}}}')
            except IsolatedError:
                self._end()
                raise
        process.is_used = False
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def forget_parent(self) -> None:
        """Drop the parent's process in a forked child. The lock is replaced: the thread that held it does not exist in the child."""
        if self._process is not None:
            self._process.leave()
            self._process = None
        self._lock = threading.Lock()


_LIVE: "weakref.WeakSet[IsolatedFunction]" = weakref.WeakSet()


def _forget_parents() -> None:
    for isolated in list(_LIVE):
        isolated.forget_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


@dataclass(slots=True)
class _Process:
    """Holds a process, `end`, which ends it, and `pending`: bytes received after the last answer."""

    popen: "subprocess.Popen[bytes]"
    end: "weakref.finalize[Any, IsolatedFunction]"
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
            raise self._ended(limits) from None

    def receive(self, limits: Limits) -> Any:
        assert self.popen.stdout is not None
        num_searched = 0
        while (end := self.pending.find(b"\n", num_searched)) < 0:
            num_searched = len(self.pending)
            chunk = os.read(self.popen.stdout.fileno(), _CHUNK_BYTES)
            if not chunk:
                raise self._ended(limits)
            self.pending.extend(chunk)
        found: dict[str, Any] = json.loads(self.pending[:end])
        del self.pending[: end + 1]
        if "error" not in found:
            return found["result"]
        self.has_ended = found["ends"]
        if found["error"] == "MemoryError":
            raise _out_of_memory(limits)
        raise IsolatedError(Failure.RAISED, found["message"], found["error"])

    def leave(self) -> None:
        """Close this process's pipes to it without ending it, which the parent does."""
        self.end.detach()
        _close_pipes(self.popen)
        self.popen.returncode = 0  # not a child of this process: `wait` would fail

    def _ended(self, limits: Limits) -> IsolatedError:
        self.has_ended = True
        code = self.popen.wait()
        if code == _LATE:
            return IsolatedError(Failure.TIME, f"it took longer than {limits.seconds:g} seconds")
        if code in (_OUT_OF_MEMORY, -getattr(signal, "SIGABRT", _OUT_OF_MEMORY)):  # Rust aborts
            return _out_of_memory(limits)
        if code == -getattr(signal, "SIGXCPU", 0):
            return IsolatedError(Failure.CPU_TIME, f"it computed longer than {limits.cpu_seconds} seconds")
        return IsolatedError(Failure.ENDED, f"its process ended with code {code}")


def _out_of_memory(limits: Limits) -> IsolatedError:
    return IsolatedError(Failure.MEMORY, f"it needed more than the {limits.memory_bytes >> 20} MB it may have")


def _closed() -> IsolatedError:
    return IsolatedError(Failure.CLOSED, "the function was closed")


def _start(function: str, limits: Limits) -> "subprocess.Popen[bytes]":
    if getattr(sys, "frozen", False):  # the executable is no Python
        raise IsolatedError(Failure.NOT_STARTED, "it is one program with paceline")
    settings: dict[str, Any] = {"function": function, "paths": [path for path in sys.path if path]}
    settings |= {"seconds": limits.seconds, "memory_bytes": limits.memory_bytes, "cpu_seconds": limits.cpu_seconds}
    command = [sys.executable or "", "-I", "-S", "-B", "-W", "ignore", "-c", _PROGRAM, __file__, json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    try:
        return start(command, bufsize=0, start_new_session=True, **pipes)  # Ctrl-C must not reach it
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


# What follows runs in the process.


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
    _write(answer)
    if "error" in answer:
        return
    for line in sys.stdin.buffer:
        # The thread of `faulthandler` needs no GIL. It cannot start if the process is above its memory limit, so that this ends the process
        # instead of serving a small call from memory that is free inside the process.
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
        _write(answer)
        faulthandler.cancel_dump_traceback_later()
        if answer.get("ends"):
            return


def _error_answer(error: BaseException) -> dict[str, Any]:
    is_ruined = isinstance(error, MemoryError | RecursionError) or not isinstance(error, Exception)
    return {"error": type(error).__name__, "message": str(error)[:_MAX_MESSAGE_CHARS], "ends": is_ruined}


def _write(answer: dict[str, Any]) -> None:
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
    except BaseException:  # out of memory while an answer is written
        os._exit(_OUT_OF_MEMORY)
    os._exit(0)  # at once: the interpreter's own end takes longer than a call
