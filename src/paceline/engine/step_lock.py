"""One step at a time, whoever calls: other threads, a finaliser, a call from within a step, a forked process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from paceline.errors import ConfigError


class StepLock:
    """Held by the thread that steps or reads what a step changes. What others want is left in queues, which the holder empties.

    Args:
        drain: empties the queues; called with the lock held, whenever it was just acquired or is about to be released.
        after_fork: called in a forked process before the lock is acquired there first.
    """

    def __init__(self, drain: Callable[[], None], after_fork: Callable[[], None]) -> None:
        self._drain, self._after_fork = drain, after_fork
        self._lock = Lock()
        self._process_id = os.getpid()
        self._owner: int | None = None  # the thread that holds it
        self._is_drain_due = False  # something may be left in a queue

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == get_ident()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it.

        Raises:
            ConfigError: this thread holds it already, or the process was forked while another thread held it.
        """
        self._check()
        try:
            with self._lock:
                try:
                    self._owner = get_ident()
                    self._drain()
                    yield
                finally:
                    try:
                        self._drain()
                    finally:
                        self._owner = None
        finally:
            self._drain_if_due()

    def request_drain(self) -> None:
        """Have the queues emptied, now or by the thread that holds the lock; never waits."""
        self._is_drain_due = True
        self._drain_if_due()

    def _drain_if_due(self) -> None:
        """If another thread holds the lock nothing is lost: that thread comes here after releasing it."""
        while self._is_drain_due and not self.is_mine and self._lock.acquire(blocking=False):
            try:
                self._owner, self._is_drain_due = get_ident(), False
                self._drain()
            finally:
                self._owner = None
                self._lock.release()

    def _check(self) -> None:
        if self._process_id != os.getpid():
            if self._owner is not None:
                raise ConfigError("this process was forked while another thread used the model: load the model in each process")
            self._lock, self._process_id = Lock(), os.getpid()
            self._after_fork()
        if self.is_mine:
            raise ConfigError("the model was called from within its own step, by a processor or a drafter: call it from outside")
