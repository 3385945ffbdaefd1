"""Opens files in a process with limits: `python worker.py FOLDER SEED`. Reads lines of JSON {"kind", "begin", "end"}, writes one a file.

A line is how opening the file ended: "opened", "refused" with the error's text, or "failed" with what else was raised, was wrong with the
error, or exceeded a limit. A process that dies leaves no line for the file it died of.
"""

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import tracemalloc
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

MAX_CPU_S = 5.0
MAX_GROWTH_BYTES = 300_000_000
MAX_ALLOCATED_BYTES = 20_000_000  # by Python and numpy; 17 MB of them are reserved for partial results of attention
SAMPLE = 25  # every so many files what is allocated is measured
ADDRESS_SPACE_BYTES = 2 << 30  # beyond what the process has when it is ready
MAX_TEXT = 4100


def main(folder: Path, seed: int) -> None:
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries talk
    sys.path[:0] = [str(Path(__file__).parents[1])]
    from fuzz.kinds import KINDS
    from paceline.errors import PacelineError

    warnings.simplefilter("error", RuntimeWarning)
    kinds = {kind.__name__: kind(folder / kind.__name__) for kind in KINDS}
    for name, kind in kinds.items():  # where the files are, to look into a failure
        link = folder / f"{name}.path"
        link.unlink(missing_ok=True)
        link.symlink_to(kind.path)
    for kind in kinds.values():
        kind.path.write_bytes(kind.undamaged())
        with suppress(PacelineError):
            kind.use(0)  # what is imported and cached when the first file opens is no later file's doing
    limit()
    answer(answers, {"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        for index in range(task["begin"], task["end"]):
            found = open_one(kinds[task["kind"]], seed, index)
            if found["outcome"] == "failed":
                (folder / f"{task['kind']}-{index}").write_bytes(kinds[task["kind"]].content(seed, index))
            answer(answers, found)


def answer(answers: TextIO, found: dict[str, Any]) -> None:
    answers.write(json.dumps(found) + "\n")
    answers.flush()


def open_one(kind: Any, seed: int, index: int) -> dict[str, Any]:
    from paceline.errors import PacelineError

    kind.path.write_bytes(kind.content(seed, index))
    if index % SAMPLE == SAMPLE - 1:
        tracemalloc.start()
    before, started = reset_peak(), time.process_time()
    result: dict[str, Any] = {"outcome": "opened"}
    try:
        kind.use(index)
    except PacelineError as error:
        text = str(error)
        result = {"outcome": "refused", "text": text[:300]}
        if len(text) > MAX_TEXT or not text.isprintable():
            result = {"outcome": "failed", "text": f"an error of {len(text)} characters, printable: {text.isprintable()}"}
    except BaseException as error:
        result = {"outcome": "failed", "text": f"{type(error).__name__}: {error}"[:1000], "trace": traceback.format_exc()[-3000:]}
    spent, grown = time.process_time() - started, peak() - before
    allocated = tracemalloc.get_traced_memory()[1] if tracemalloc.is_tracing() else 0
    tracemalloc.stop()
    if spent > MAX_CPU_S or grown > MAX_GROWTH_BYTES or allocated > MAX_ALLOCATED_BYTES:
        took = f"took {spent:.1f} s of a processor, {grown / 1e6:.0f} MB and {allocated / 1e6:.0f} MB of them itself"
        result = {"outcome": "failed", "text": f"{took}, then {result}"[:1000]}
    if index % 200 == 0:
        gc.collect()
    return {**result, "seconds": round(spent, 4)}


def limit() -> None:
    """Address space, from now on; cores are not written."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def reset_peak() -> int:
    """Bytes in memory now, from which the next peak counts."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
