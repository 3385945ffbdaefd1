"""A process that holds one model in one mode and answers orders: lines of JSON, in and out."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError, shortened

_LAST_WORDS = 4000  # bytes of what it wrote to stderr that are looked at
_PATIENCE_S = 5.0  # for a worker that is told to end


class WorkerError(PacelineError):
    """A worker died, did not answer in time, or refused an order; `is_over` says whether it can be asked again."""

    def __init__(self, message: str, *, is_over: bool) -> None:
        super().__init__(message)
        self.is_over = is_over


class WorkerProcess:
    """Starts the process at once; it lives in a session of its own, so that Ctrl-C reaches nobody but the caller.

    Args:
        name: what errors call it.
        command: program and arguments.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=os.name == "posix"
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{name}: {command[0]} cannot be started: {error.strerror}", is_over=True) from error
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to an order.

        Raises:
            WorkerError: there is none in time, the process ended, what came is no answer, or the answer is an error. In the first
                three cases the process is ended.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._died() from None
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise WorkerError(f"{self.name} did not answer within {timeout_s:g} s and was ended", is_over=True) from None
        if not line:
            raise self._died()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.kill()
            raise WorkerError(f"{self.name} answered {shortened(line)}, which is no JSON object, and was ended", is_over=True)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}", is_over=False)
        return answer

    def close(self) -> None:
        """Let it end, or end it: nothing of it is left afterwards."""
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self.kill()
        self._log.close()

    def kill(self) -> None:
        """End it, and what it has started."""
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the session's leader gave the group its number
        else:
            self._process.kill()
        self._process.wait()
        self._reader.join(_PATIENCE_S)
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _died(self) -> WorkerError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self.kill()
        code = self._process.returncode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return WorkerError(f"{self.name} ended {how}{self._last_words()}", is_over=True)

    def _last_words(self) -> str:
        """The last line it wrote to stderr."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LAST_WORDS))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""
