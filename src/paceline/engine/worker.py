"""The thread that owns an engine: it does what others left in its inbox, steps, and tells everybody what is new.

Nobody may wait for ever. What goes wrong in a step ends those who are in the engine and nobody else; if the thread itself comes to an end,
however that happens, everybody who waits for it is told, and whoever comes later hears it at once.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from paceline.engine.open import OpenedEngine
from paceline.errors import ConfigError, PacelineError, as_exception
from paceline.outputs import StreamChunk
from paceline.speculation.request import Request

log = logging.getLogger(__name__)

News = tuple[Request, StreamChunk | Exception]


@dataclass(slots=True)
class Listener:
    """Who wants to know about a request.

    Attributes:
        wants_chunks: after every step, or only when it has ended.
        num_seen: output tokens told of so far.
    """

    request: Request
    loop: asyncio.AbstractEventLoop
    news: "asyncio.Queue[News]"
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
        thread: it holds this object, but nobody in front of it.
    """

    def __init__(self, opened: OpenedEngine) -> None:
        self.opened = opened
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._inbox_lock = Lock()  # whatever asks for something comes before the command that ends the thread
        self._listeners: dict[int, Listener] = {}  # by request; the thread's own
        self._closed: tuple[type[PacelineError], str] | None = None  # what to tell whoever comes too late
        self._is_ending = False
        self._process_id = os.getpid()
        self.thread = Thread(target=self._work, name="paceline-engine", daemon=True)
        self.thread.start()

    def check_open(self) -> None:
        """That there is a thread to ask.

        Raises:
            ConfigError: it was closed, or it is another process's.
            PacelineError: it ended because of a fault.
        """
        if not self._is_own_process:
            raise ConfigError(f"the engine was opened in process {self._process_id}, which forked this one: open one in each process")
        if self._closed is not None:
            kind, text = self._closed
            raise kind(text)

    def ask(self, command: Command) -> None:
        """Have something done between two steps.

        Raises:
            PacelineError: as `check_open`.
        """
        self.check_open()
        with self._inbox_lock:
            self.check_open()
            self._inbox.put(command)

    def run(self, listeners: Sequence[Listener]) -> None:
        """Run their requests; each listener gets news until its request has ended."""
        self.ask(Command(lambda: self._add(listeners), lambda error: _tell_error(listeners[0], error)))

    def give_up(self, listeners: Sequence[Listener]) -> None:
        """End requests that nobody waits for any more; nothing happens to those that have ended. Never raises."""
        if self._is_own_process:
            self._inbox.put(Command(lambda: self._drop(listeners), lambda _: None))

    def close(self) -> None:
        """End all requests with the finish reason "abort", free everything and end the thread soon; nothing happens the second time."""
        if not self._is_own_process:  # there is no thread here, and its locks may be held for ever
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

    def _work(self) -> None:
        fault: BaseException | None = None
        try:
            while not self._is_ending:
                self._turn()
            for listener in list(self._listeners.values()):
                self.opened.engine.abort(listener.request)
            self._tell_all()
        except BaseException as error:
            fault = error
            log.critical("the engine's thread ended", exc_info=True)
        finally:
            self._leave(fault)

    def _turn(self) -> None:
        """What is in the inbox, then a step; whatever goes wrong ends those who are here."""
        engine = self.opened.engine
        try:
            self._obey(is_idle=not engine.has_work)
            if engine.has_work:
                engine.step()
        except BaseException as error:  # not a request's own: those are caught in the step. The next requests may do
            log.exception("a step of the engine failed")
            self._fail_all(as_exception(error))
        self._tell_all()

    def _obey(self, *, is_idle: bool) -> None:
        """Do what is in the inbox; wait for something if there is nothing else to do."""
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
            self._listeners[id(listener.request)] = listener

    def _drop(self, listeners: Sequence[Listener]) -> None:
        for listener in listeners:
            self.opened.engine.abort(listener.request)
            self._listeners.pop(id(listener.request), None)

    def _end(self) -> None:
        self._is_ending = True

    def _leave(self, fault: BaseException | None) -> None:
        """The thread ends: nobody is left waiting, and nobody can come any more."""
        with self._inbox_lock:
            if fault is not None:
                self._closed = PacelineError, f"the engine's thread ended ({type(fault).__name__}: {fault}): open another engine"
            kind, text = self._closed or (PacelineError, "the engine's thread ended: open another engine")
        error = kind(text)
        for listener in self._listeners.values():
            _tell_error(listener, error)
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

    def _tell_all(self) -> None:
        """Tell every listener what is new."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Listener, StreamChunk | Exception]]] = {}
        for listener in list(self._listeners.values()):
            request = listener.request
            is_new = listener.wants_chunks and request.num_output_tokens > listener.num_seen
            if not (is_new or request.is_finished):
                continue
            by_loop.setdefault(listener.loop, []).append((listener, self._news_of(listener)))
            if request.is_finished:
                del self._listeners[id(request)]
        for loop, news in by_loop.items():
            if not tell(loop, _put_all, news):  # its loop is gone, and so are its callers
                self._drop([listener for listener, _ in news])

    def _news_of(self, listener: Listener) -> StreamChunk | Exception:
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


def tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> bool:
    """Have a loop call something soon; False where the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True


def _put_all(news: Sequence[tuple[Listener, StreamChunk | Exception]]) -> None:
    for listener, chunk in news:
        listener.news.put_nowait((listener.request, chunk))


def _tell_error(listener: Listener, error: Exception) -> None:
    tell(listener.loop, listener.news.put_nowait, (listener.request, error))
