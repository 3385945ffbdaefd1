"""Compiles untrusted grammars in a child process with limits of time and memory, before the engine compiles them.

llguidance's own limits do not end every compilation: {"type": "integer", "multipleOf": 999983} takes minutes, and a thread cannot be ended.
This module imports little, because the child process imports it.
"""

import json
from collections import OrderedDict
from hashlib import sha256
from threading import Lock

from paceline.errors import BackendUnavailableError, RequestError
from paceline.isolated import Failure, IsolatedError, IsolatedFunction, Limits

MAX_MEMORY_BYTES = 1 << 30
"""Maximum address space of the child process."""
GRAMMAR_BUSY_CODE = "grammar_busy"
"""Error code if a grammar waited too long, because grammars of other requests were being compiled."""
_GRAMMAR_TOO_COSTLY_CODE = "grammar_too_costly"

_COMPILE_FUNCTION = "paceline.sampling.grammars.compile_sandbox:compile_for_bytes"
_MAX_WAIT_TIMEOUTS = 12  # maximum wait for other compilations, in multiples of the time limit of one
_MAX_REMEMBERED_GRAMMARS = 1024


def compile_for_bytes(text: str) -> None:
    """Compile a grammar for a vocabulary of single bytes; runs in the child process.

    Errors of the grammar are ignored, because compiling it for the model's vocabulary raises them again.
    """
    import llguidance

    try:
        llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text, log_level=0).compute_bitmask()
    except MemoryError:
        raise
    except Exception:
        return


class CompileSandbox:
    """Test-compiles grammars in a child process, one at a time, so that compilations take at most one core.

    Args:
        timeout_s: time limit of one compilation.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._compiled_hashes: OrderedDict[bytes, None] = OrderedDict()  # hashes of grammars that compiled within the limits
        self.isolated = IsolatedFunction(_COMPILE_FUNCTION, Limits(timeout_s, MAX_MEMORY_BYTES))

    def check_grammar(self, text: str) -> None:
        """Check that a grammar compiles within the limits.

        Args:
            text: grammar in llguidance's format.

        Raises:
            RequestError: the grammar exceeds a limit, waited too long for other compilations, or `close` was called.
            BackendUnavailableError: no child process can be started.
        """
        if not self._lock.acquire(timeout=_MAX_WAIT_TIMEOUTS * self._timeout_s):
            text = "grammar: other grammars take too long to compile: retry later"
            raise RequestError(text, parameter="grammar", code=GRAMMAR_BUSY_CODE)
        try:
            key = sha256(text.encode()).digest()
            if key not in self._compiled_hashes:  # another thread may have checked the same grammar meanwhile
                self._compile(text)
                self._compiled_hashes[key] = None
                if len(self._compiled_hashes) > _MAX_REMEMBERED_GRAMMARS:
                    self._compiled_hashes.popitem(last=False)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Make the compilation in progress and all later calls of `check_grammar` fail at once."""
        self.isolated.close()

    def _compile(self, text: str) -> None:
        try:
            self.isolated.run(json.dumps(text))
        except IsolatedError as error:
            if error.failure is Failure.NOT_STARTED:
                raise BackendUnavailableError(f"grammars are compiled in a separate process first, which cannot start ({error})") from error
            if error.failure is Failure.CLOSED:
                text = "grammar: not compiled, the engine is shutting down"
                raise RequestError(text, parameter="grammar", code=GRAMMAR_BUSY_CODE) from error
            reason = f"compiling it failed: {error}"
            if error.failure is Failure.TIME:
                reason = f"it takes longer than {self._timeout_s:g} s to compile"
            elif error.failure is Failure.MEMORY:
                reason = f"it takes more than {MAX_MEMORY_BYTES >> 20} MB to compile"
            raise RequestError(f"grammar: {reason}: send a simpler one", parameter="grammar", code=_GRAMMAR_TOO_COSTLY_CODE) from error
