"""Main loop of every worker, our own and those of peers: requests and replies as lines of JSON, times, memory.

Runs in a peer's own environment next to the worker's script, so it imports nothing but the standard library.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

WorkerRequest = Mapping[str, Any]
Arrived = Callable[[int], None]
"""Called with the number of tokens that have just arrived."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Generated:
    """The answer to one request.

    Attributes:
        drafted, accepted: draft tokens and accepted ones; None where the library does not report them.
        times_s: arrival times, for a library without callbacks.
    """

    token_ids: list[int]
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    times_s: list[float] | None = None


class OpenModel(Protocol):
    def facts(self) -> dict[str, Any]:
        """Return additional fields for the reply to the first line."""

    def answer(self, command: Any, /) -> dict[str, Any]:
        """Run a request and return the reply."""


@dataclass(frozen=True)
class Opened:
    """A model that a peer has opened.

    Attributes:
        generate: runs a request ("prompt_ids", "max_tokens", "temperature", "seed") and reports arriving tokens; keeps no state.
        note: settings of the library, for the report.
    """

    name: str
    version: str
    note: str
    generate: Callable[[WorkerRequest, Arrived], Generated]

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "note": self.note}

    def answer(self, command: WorkerRequest) -> dict[str, Any]:
        times: list[float] = []
        start = time.perf_counter()
        generated = self.generate(command, lambda count: times.extend([time.perf_counter() - start] * count))
        seconds = time.perf_counter() - start
        times = generated.times_s or times
        wanted = command["max_tokens"]
        if len(generated.token_ids) != wanted or len(times) != wanted:
            raise PeerError(f"{self.name} gave {len(generated.token_ids)} tokens, {len(times)} of them in time, expected {wanted}")
        resident, peak = memory_bytes()
        return {
            "token_ids": generated.token_ids,
            "seconds": seconds,
            "times_s": times,
            "num_draft_tokens": generated.num_draft_tokens,
            "num_accepted_tokens": generated.num_accepted_tokens,
            "rss_bytes": resident,
            "peak_rss_bytes": peak,
        }


class PeerError(Exception):
    """This peer does not support the request; the text has the reason."""


def serve(open_model: Callable[[Any], OpenModel], expected: type[Exception] = PeerError) -> None:
    """Load the model that the first line of stdin names, and answer the requests after it. The library's output goes to stderr.

    Args:
        expected: errors of this type have no traceback.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer_orders(open_model, sys.stdin, answers, expected)


def answer_orders(open_model: Callable[[Any], OpenModel], orders: TextIO, answers: TextIO, expected: type[Exception] = PeerError) -> None:
    """Run `serve` on two given streams."""

    def send(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def failed(error: Exception) -> None:
        if not isinstance(error, expected):
            traceback.print_exc()
        send({"error": (str(error).strip() or type(error).__name__).splitlines()[0]})

    start = time.perf_counter()
    try:
        command = json.loads(orders.readline())
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(command["threads"])) | _OFFLINE)
        opened = open_model(command)
    except Exception as error:
        failed(error)
        return
    send({"ready": True, "load_s": time.perf_counter() - start, **opened.facts()})
    for line in orders:
        try:
            send(opened.answer(json.loads(line)))
        except Exception as error:
            failed(error)


def memory_bytes() -> tuple[int, int]:
    """Return resident memory of this process, now and at its peak; 0 where the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS:", "VmHWM:")))
    now, peak = (int(fields[name].split()[0]) * 1024 if name in fields else 0 for name in ("VmRSS", "VmHWM"))
    return now, peak


def converted(source: Path, kind: str, convert: Callable[[Path], None]) -> Path:
    """Return a model in the peer's format, converted once from `source` and kept in the peer's environment.

    Args:
        kind: what it becomes; the file or folder is made anew where `source` has changed.
        convert: makes it at the path it is given.
    """
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    key = hashlib.sha256(json.dumps([str(source.resolve()), facts]).encode()).hexdigest()[:12]
    target = Path(sys.prefix) / "models" / f"{source.name}-{key}-{kind}"
    if not target.exists():
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        target.parent.mkdir(exist_ok=True)
        convert(partial)
        partial.rename(target)
    return target
