"""Whether a stranger's grammar compiles within a time: tried in a process that can be ended.

llguidance's own limits do not end every compilation, and nothing in the same process can: {"type": "integer", "multipleOf": 999983} takes
minutes.
"""

import importlib.util
import subprocess
import sys
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from threading import Lock

from paceline.errors import BackendUnavailableError, RequestError

MEMORY_BYTES = 1 << 30
"""Address space of a process that compiles."""

_PROGRAM = Path(__file__).with_name("compile_process.py")
_START = "import runpy, sys; sys.path.append(sys.argv[3]); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_TURNS = 12  # how many grammars' times one waits for its turn
_MAX_KNOWN = 1024
BUSY = "grammar_busy"
"""Code of the error that others' grammars are the reason of."""
COSTLY = "grammar_too_costly"
"""Code of the error about a grammar that takes too much time or memory."""


class GrammarTrial:
    """Tries grammars one after the other, so that they never take more than a core. May be asked from several threads.

    Args:
        timeout_s: seconds that one may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # those that passed, by their hashes
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def check(self, text: str) -> None:
        """That a grammar compiles in time, or fails in time.

        Args:
            text: in llguidance's form.

        Raises:
            RequestError: it takes longer or more memory than it may, others before it took too long, or nothing is tried any more.
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
        """Try nothing more: what is under way ends now, and so does everybody's waiting for a turn."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _compile(self, text: str) -> None:
        found = importlib.util.find_spec("llguidance")
        library = "" if found is None or found.origin is None else str(Path(found.origin).parents[1])
        command = [sys.executable, "-I", "-S", "-c", _START, str(_PROGRAM), str(MEMORY_BYTES), library]
        try:
            self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise BackendUnavailableError(f"grammars are tried in a process of their own, which cannot be started ({error})") from error
        with process:
            try:
                if not self._is_closed:
                    process.communicate(text.encode(), timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                raise _refused(f"it takes longer than {self._timeout_s:g} s to compile: send a simpler one") from None
            finally:
                process.kill()
        if self._is_closed:
            raise RequestError("grammar: nothing is compiled any more, the engine ends", parameter="grammar", code=BUSY)
        if process.returncode != 0:
            raise _refused(f"it takes more than {MEMORY_BYTES >> 20} MB to compile: send a simpler one")


def _refused(reason: str) -> RequestError:
    return RequestError(f"grammar: {reason}", parameter="grammar", code=COSTLY)
