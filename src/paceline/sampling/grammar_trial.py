"""Compiles grammars from clients in a process that can be ended, before they are compiled in this one.

llguidance's own limits do not end every compilation, and nothing in the same process can: {"type": "integer", "multipleOf": 999983} takes
minutes.
"""

import json
from collections import OrderedDict
from hashlib import sha256
from threading import Lock

from paceline.errors import BackendUnavailableError, RequestError
from paceline.isolated import Failure, IsolatedError, IsolatedFunction, Limits

MEMORY_BYTES = 1 << 30
"""Address space of a process that compiles."""

_COMPILE = "paceline.sampling.grammar_trial:compile_for_bytes"
_TURNS = 12  # a grammar waits at most as long as this many others may take
_MAX_KNOWN = 1024
BUSY = "grammar_busy"
"""Code of the error where other requests' grammars take too long."""
COSTLY = "grammar_too_costly"
"""Code of the error about a grammar that takes too much time or memory."""


def compile_for_bytes(text: str) -> None:
    """Compile a grammar for a vocabulary of bytes. Runs in the process.

    An error of the grammar is not reported: compiling it for the model's vocabulary raises the same one.
    """
    import llguidance

    try:
        llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text, log_level=0).compute_bitmask()
    except MemoryError:
        raise
    except Exception:
        return


class GrammarTrial:
    """Compiles grammars one after the other, so that they never take more than a core. Threads take turns.

    Args:
        timeout_s: seconds that one may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # hashes of the texts that passed
        self.isolated = IsolatedFunction(_COMPILE, Limits(timeout_s, MEMORY_BYTES))

    def check(self, text: str) -> None:
        """Check that compiling a grammar ends in time.

        Args:
            text: in llguidance's form.

        Raises:
            RequestError: it takes more time or memory than it may, those before it took too long, or `close` was called.
            BackendUnavailableError: no process can be started.
        """
        if not self._lock.acquire(timeout=_TURNS * self._timeout_s):
            raise RequestError("grammar: others before it take long to compile: send it again", parameter="grammar", code=BUSY)
        try:
            key = sha256(text.encode()).digest()
            if key not in self._known:  # many may have waited with the same one
                self._compile(text)
                self._known[key] = None
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the compilation that is under way, and every later one; threads that wait for their turn end too."""
        self.isolated.close()

    def _compile(self, text: str) -> None:
        try:
            self.isolated.run(json.dumps(text))
        except IsolatedError as error:
            if error.failure is Failure.NOT_STARTED:
                raise BackendUnavailableError(f"grammars are tried in a process of their own, which cannot be started ({error})") from error
            if error.failure is Failure.CLOSED:
                raise RequestError("grammar: nothing is compiled any more, the engine ends", parameter="grammar", code=BUSY) from error
            raise _refused(error, self._timeout_s) from error


def _refused(error: IsolatedError, timeout_s: float) -> RequestError:
    reason = f"compiling it failed: {error}"
    if error.failure is Failure.TIME:
        reason = f"it takes longer than {timeout_s:g} s to compile"
    elif error.failure is Failure.MEMORY:
        reason = f"it takes more than {MEMORY_BYTES >> 20} MB to compile"
    return RequestError(f"grammar: {reason}: send a simpler one", parameter="grammar", code=COSTLY)
