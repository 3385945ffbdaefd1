"""One at a time, whoever calls: other threads, a finaliser, a call from within, a forked process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from paceline.errors import ConfigError


class Turn:
    """Whose turn it is to change something that many may use.

    Args:
        tidy: done whenever a turn begins and ends, such as looking at what others left in a queue. Whoever left something there and
            cannot have the turn may go away: the one who has it looks again when it has given it back.
        forked: done in a forked process before its first turn.
    """

    def __init__(self, tidy: Callable[[], None], forked: Callable[[], None]) -> None:
        self._tidy, self._forked = tidy, forked
        self._lock = Lock()
        self._process_id = os.getpid()
        self._owner: int | None = None  # the thread that has the turn
        self._is_asked = False  # somebody left something

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == get_ident()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn and have it.

        Raises:
            ConfigError: this thread has it already, or the process was forked while another thread had it.
        """
        self._check()
        try:
            with self._lock:
                try:
                    self._owner = get_ident()
                    self._tidy()
                    yield
                finally:
                    try:
                        self._tidy()
                    finally:
                        self._owner = None
        finally:
            self._tidy_if_asked()

    def ask(self) -> None:
        """Have `tidy` done, now or by whoever has the turn; never waits."""
        self._is_asked = True
        self._tidy_if_asked()

    def _tidy_if_asked(self) -> None:
        """Who does not get the lock here knows that its holder comes here after giving it back."""
        while self._is_asked and not self.is_mine and self._lock.acquire(blocking=False):
            try:
                self._owner, self._is_asked = get_ident(), False
                self._tidy()
            finally:
                self._owner = None
                self._lock.release()

    def _check(self) -> None:
        if self._process_id != os.getpid():
            if self._owner is not None:
                raise ConfigError("this process was forked while another thread used the model: load the model in each process")
            self._lock, self._process_id = Lock(), os.getpid()
            self._forked()
        if self.is_mine:
            raise ConfigError("the model was called from within its own step, by a processor or a drafter: call it from outside")
