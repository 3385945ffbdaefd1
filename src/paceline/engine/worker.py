"""The thread that owns an engine: it runs the commands in its inbox, steps, and sends every listener what is new.

No caller may wait for ever. What goes wrong in a step ends the requests in the engine and no others; if the thread itself ends, however
that happens, every waiting caller gets an error, and later ones get it at once.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from paceline.engine.open import OpenedEngine
from paceline.engine.request import EngineRequest
from paceline.errors import ConfigError, PacelineError, as_exception
from paceline.outputs import StreamChunk

log = logging.getLogger(__name__)

Update = tuple[EngineRequest, StreamChunk | Exception]


@dataclass(slots=True)
class Listener:
    """Where the updates of a request go.

    Attributes:
        updates: a queue of `loop`.
        wants_chunks: after every step, or only when it has ended.
        num_seen: output tokens sent so far.
    """

    request: EngineRequest
    loop: asyncio.AbstractEventLoop
    updates: "asyncio.Queue[Update]"
    wants_chunks: bool
    num_seen: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """Something for the thread to do, and what to do with an error where it cannot be done."""

    do: Callable[[], None]
    fail: Callable[[Exception], None]


class Worker:
    """The thread and its inbox.

    Args:
        opened: from now on only the thread may use its engine.

    Attributes:
        thread: holds this object, but not the `AsyncEngine`, so that this one can be collected as garbage.
    """

    def __init__(self, opened: OpenedEngine) -> None:
        self.opened = opened
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._inbox_lock = Lock()  # so that no command follows the one that ends the thread
        self._listeners: dict[EngineRequest, Listener] = {}  # the thread's own
        self._closed: tuple[type[PacelineError], str] | None = None  # the error of later callers
        self._is_ending = False
        self._process_id = os.getpid()
        self.thread = Thread(target=self._run_until_closed, name="paceline-engine", daemon=True)
        self.thread.start()

    def check_open(self) -> None:
        """That there is a thread to submit to.

        Raises:
            ConfigError: it was closed, or it is another process's.
            PacelineError: it ended because of a fault.
        """
        if not self._is_own_process:
            raise ConfigError(f"the engine was opened in process {self._process_id}, which forked this one: open one in each process")
        if self._closed is not None:
            kind, text = self._closed
            raise kind(text)

    def submit(self, command: Command) -> None:
        """Have a command run between two steps.

        Raises:
            PacelineError: as `check_open`.
        """
        self.check_open()
        with self._inbox_lock:
            self.check_open()
            self._inbox.put(command)

    def run(self, listeners: Sequence[Listener]) -> None:
        """Run their requests; each listener gets updates until its request has ended."""
        self.submit(Command(lambda: self._add(listeners), lambda error: _send_error(listeners[0], error)))

    def abort(self, listeners: Sequence[Listener]) -> None:
        """End requests whose caller is gone; nothing happens to those that have ended. Never raises."""
        if self._is_own_process:
            self._inbox.put(Command(lambda: self._abort(listeners), lambda _: None))

    def close(self) -> None:
        """End all requests with the finish reason "abort", free everything and end the thread soon; nothing happens the second time."""
        if not self._is_own_process:  # the thread does not exist here, and its locks may be held for ever
            return
        with self._inbox_lock:
            if self._closed is None:
                self._closed = ConfigError, "the engine is closed: open another one"
                self._inbox.put(Command(self._end, lambda _: None))

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._is_own_process:
            self.thread.join()

    @property
    def _is_own_process(self) -> bool:
        return self._process_id == os.getpid()

    # From here on the thread's own.

    def _run_until_closed(self) -> None:
        fault: BaseException | None = None
        try:
            while not self._is_ending:
                self._run_once()
            for listener in list(self._listeners.values()):
                self.opened.engine.abort(listener.request)
            self._send_updates()
        except BaseException as error:
            fault = error
            log.critical("the engine's thread ended", exc_info=True)
        finally:
            self._shut_down(fault)

    def _run_once(self) -> None:
        """The commands in the inbox, then a step; whatever goes wrong ends the requests in the engine."""
        engine = self.opened.engine
        try:
            self._run_commands(is_idle=not engine.has_work)
            if engine.has_work:
                engine.step()
        except BaseException as error:  # a request's own errors are caught in the step. Later requests may succeed
            log.exception("a step of the engine failed")
            self._fail_all(as_exception(error))
        self._send_updates()

    def _run_commands(self, *, is_idle: bool) -> None:
        """Run what is in the inbox; wait for a command if there is nothing else to do."""
        try:
            command = self._inbox.get(block=is_idle)
            while True:
                try:
                    command.do()
                except BaseException as error:
                    command.fail(as_exception(error))
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _add(self, listeners: Sequence[Listener]) -> None:
        engine = self.opened.engine
        for listener in listeners:
            engine.check(listener.request)  # too large, or asks for what is not loaded: its caller's own
        for listener in listeners:
            engine.add(listener.request)
            self._listeners[listener.request] = listener

    def _abort(self, listeners: Sequence[Listener]) -> None:
        for listener in listeners:
            self.opened.engine.abort(listener.request)
            self._listeners.pop(listener.request, None)

    def _end(self) -> None:
        self._is_ending = True

    def _shut_down(self, fault: BaseException | None) -> None:
        """The thread ends: every waiting caller gets an error, and later ones are refused."""
        with self._inbox_lock:
            if fault is not None:
                self._closed = PacelineError, f"the engine's thread ended ({type(fault).__name__}: {fault}): open another engine"
            kind, text = self._closed or (PacelineError, "the engine's thread ended: open another engine")
        error = kind(text)
        for listener in self._listeners.values():
            _send_error(listener, error)
        self._listeners.clear()
        while True:
            try:
                self._inbox.get_nowait().fail(error)
            except Empty:
                return

    def _fail_all(self, error: Exception) -> None:
        for listener in self._listeners.values():
            if not listener.request.is_finished:
                listener.request.fail(error)
            self.opened.engine.abort(listener.request)

    def _send_updates(self) -> None:
        """Send every listener what is new."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Listener, StreamChunk | Exception]]] = {}
        for listener in list(self._listeners.values()):
            request = listener.request
            is_new = listener.wants_chunks and request.num_output_tokens > listener.num_seen
            if not (is_new or request.is_finished):
                continue
            by_loop.setdefault(listener.loop, []).append((listener, self._update_of(listener)))
            if request.is_finished:
                del self._listeners[request]
        for loop, updates in by_loop.items():
            if not call_soon(loop, _put_all, updates):  # its loop is closed, and its callers are gone
                self._abort([listener for listener, _ in updates])

    def _update_of(self, listener: Listener) -> StreamChunk | Exception:
        request = listener.request
        if request.error is not None:
            return request.error
        try:
            chunk = self.opened.chunk(request, listener.num_seen)
        except BaseException as error:  # its text cannot be made
            self.opened.engine.abort(request)
            return as_exception(error)
        listener.num_seen = request.num_output_tokens
        return chunk


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> bool:
    """Have a loop call something soon; False where the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True


def _put_all(updates: Sequence[tuple[Listener, StreamChunk | Exception]]) -> None:
    for listener, chunk in updates:
        listener.updates.put_nowait((listener.request, chunk))


def _send_error(listener: Listener, error: Exception) -> None:
    call_soon(listener.loop, listener.updates.put_nowait, (listener.request, error))
