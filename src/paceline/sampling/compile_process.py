"""The program that tries a grammar, in a process of its own; `grammar_trial.py` starts it.

It imports nothing of paceline. Its argument is how much memory it may use; a grammar in llguidance's form stands in standard input.
"""

import os
import sys
from contextlib import suppress

BROKEN = 3


def compile_one(memory_bytes: int) -> None:
    """Compile it for a vocabulary of bytes. Whether that succeeds is not said: whoever compiles it for a model says what is wrong."""
    import llguidance

    ids = llguidance.LLTokenizer("byte")
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with suppress(Exception):
        llguidance.LLMatcher(ids, sys.stdin.buffer.read().decode(), log_level=0).compute_bitmask()


if __name__ == "__main__":
    try:
        compile_one(int(sys.argv[1]))
    except BaseException:
        os._exit(BROKEN)
    os._exit(0)  # at once: tidying up takes longer than compiling
