"""Any untrusted file opens or raises one of our errors, within bounded time and memory; the process survives.

A failure prints its seed, kind and index, which make the same file again, and keeps the file as it was.
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fuzz.head_kinds import HeadTorchFile
from fuzz.kind import Kind
from fuzz.kinds import KINDS
from fuzz.model_kinds import AdapterConfigFile, GgufModelFile, SafetensorsFile
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config

pytest.importorskip("gguf")

SMALL, LARGE = 60, 60_000
NUM_WORKERS = 2
BATCH = 100
WALL_S = 60.0  # for one file, on a machine that does other things; its time of a processor is limited by the worker
START_S = 300.0
MOST_FAILURES = 20


@dataclass(slots=True)
class Findings:
    """What came of all files: how often which outcome, and what went wrong."""

    outcomes: "Counter[tuple[str, str]]" = field(default_factory=Counter)
    failures: list[tuple[str, int, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def batches(num_files: int) -> Iterator[tuple[str, int, int]]:
    """Kind, first and last index + 1; small ones in turn, so that kinds that take long do not come last."""
    shares = sum(kind.share for kind in KINDS)
    counts = {kind.__name__: max(2, round(num_files * kind.share / shares)) for kind in KINDS}
    for begin in range(0, max(counts.values()), BATCH):
        for name, count in counts.items():
            if begin < count:
                yield name, begin, min(begin + BATCH, count)


class Worker:
    """A process that opens files; started again when it dies."""

    program = Path(__file__).with_name("worker.py")

    def __init__(self, folder: Path, seed: int, kept: Path) -> None:
        self._folder, self._seed, self._kept = folder, seed, kept
        self._process: subprocess.Popen[str] | None = None

    def open_files(self, kind: str, begin: int, end: int, findings: Findings) -> None:
        while begin < end and len(findings.failures) < MOST_FAILURES:
            process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps({"kind": kind, "begin": begin, "end": end}) + "\n")
            process.stdin.flush()
            while begin < end:
                answer = self._answer(WALL_S)
                with findings.lock:
                    if answer is None:
                        self._report(findings, kind, begin, f"the process ended with code {self._code()}")
                    elif answer["outcome"] == "failed":
                        self._report(findings, kind, begin, f"{answer['text']}\n{answer.get('trace', '')}")
                    findings.outcomes[kind, "died" if answer is None else answer["outcome"]] += 1
                begin += 1
                if answer is None:
                    break

    def _report(self, findings: Findings, kind: str, index: int, text: str) -> None:
        """Keep the file: the worker's copy, or what it wrote last."""
        kept = self._kept / f"{kind}-{self._seed}-{index}"
        copies = (self._folder / f"{kind}-{index}", self._folder / f"{kind}.path")
        kept.write_bytes(next(path for path in copies if path.is_file()).read_bytes())
        findings.failures.append((kind, index, f"{text}\n(kept as {kept})"))

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, str(self.program), str(self._folder), str(self._seed)]
        environment = {**os.environ, "PACELINE_CACHE": str(self._folder), "RUST_BACKTRACE": "0", "TRANSFORMERS_VERBOSITY": "critical"}
        errors = (self._folder.parent / f"{self._folder.name}.stderr").open("ab")
        with errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )  # fmt: skip
        assert self._answer(START_S) == {"ready": True}, f"see {errors.name}"
        return self._process

    def _answer(self, seconds: float) -> "dict[str, str] | None":
        assert self._process is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(seconds, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        watchdog.join()
        return json.loads(line) if line else None

    def _code(self) -> int:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        return code

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.wait()
            self._process = None


def open_all(num_files: int, seed: int, folder: Path, kept: Path) -> Findings:
    tasks: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    for task in batches(num_files):
        tasks.put(task)
    findings = Findings()

    def work(number: int) -> None:
        worker = Worker(folder / f"worker {number}", seed, kept)
        (folder / f"worker {number}").mkdir()
        try:
            while len(findings.failures) < MOST_FAILURES:
                worker.open_files(*tasks.get_nowait(), findings)
        except queue.Empty:
            pass
        finally:
            worker.close()

    threads = [threading.Thread(target=work, args=[number]) for number in range(NUM_WORKERS if num_files > SMALL else 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return findings


def test_fuzzed_file_opens_or_raises_a_paceline_error(
    tmp_path: Path, seed: int, large_counts: bool, tally: "Counter[str]", pytestconfig: pytest.Config
) -> None:
    num_files = LARGE if large_counts else SMALL
    findings = open_all(num_files, seed, tmp_path, pytestconfig.cache.mkdir("fuzz"))
    for (kind, outcome), count in findings.outcomes.items():
        words = " ".join(re.findall("[A-Z][a-z0-9]+", kind.removesuffix("File"))).lower()
        tally[f"hostile {words} files {outcome}"] += count
    assert findings.failures == [], "\n".join(f"{kind} {index} with seed {seed}: {text}" for kind, index, text in findings.failures)
    assert sum(findings.outcomes.values()) >= 0.9 * num_files
    for kind in KINDS:
        assert findings.outcomes[kind.__name__, "refused"] + findings.outcomes[kind.__name__, "opened"] > 1


@pytest.mark.long
def test_fuzzer_detects_crashes_hangs_and_foreign_exceptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The net has no hole: four files that do what none may do."""
    (tmp_path / "worker").mkdir()
    program = (tmp_path / "program.py").write_text
    program(FAILING.format(worker=str(Path(__file__).with_name("worker.py")), tests=str(Path(__file__).parents[1])))
    monkeypatch.setattr(Worker, "program", tmp_path / "program.py")
    monkeypatch.setattr(sys.modules[__name__], "WALL_S", 6.0)
    findings, worker = Findings(), Worker(tmp_path / "worker", 0, tmp_path)
    worker.open_files("AdapterConfigFile", 1, 7, findings)
    worker.close()
    found = {index: text.splitlines()[0] for _, index, text in findings.failures}
    assert found[1].startswith("ZeroDivisionError")
    assert found[2] == "the process ended with code -11"
    assert found[3] == "the process ended with code -9"  # by the watchdog
    assert found[4].startswith("an error of 9000 characters")
    assert "MB" in found[5]
    assert sorted(found) == [1, 2, 3, 4, 5]
    kind = AdapterConfigFile(tmp_path / "again")
    assert all((tmp_path / f"AdapterConfigFile-0-{index}").read_bytes() == kind.content(0, index) for index in found)
    assert findings.outcomes["AdapterConfigFile", "opened"] == 1


FAILING = """
import os, signal, sys, time
sys.path[:0] = [{tests!r}, os.path.dirname({worker!r})]
import worker
from fuzz import kinds
from paceline import errors
kinds.KINDS = (kinds.AdapterConfigFile,)

class Unprintable(errors.PacelineError):
    def __str__(self):
        return "x" * 9000

def use(self, index):
    if index == 1:
        1 / 0
    if index == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if index == 3:
        time.sleep(60)
    if index == 4:
        raise Unprintable
    if index == 5:
        bytes(bytearray(400_000_000))

kinds.AdapterConfigFile.use = use
worker.main(worker.Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_unmodified_fuzz_seed_file_opens(kind: type[Kind], tmp_path: Path) -> None:
    made = kind(tmp_path)
    made.path.write_bytes(made.undamaged())
    if kind is AdapterConfigFile:
        with pytest.raises(CheckpointError, match="holds a LoRA adapter"):
            made.use(0)
    else:
        made.use(0)


@pytest.mark.parametrize("kind", [SafetensorsFile, GgufModelFile])
def test_opening_a_model_file_allocates_less_than_a_megabyte(kind: type[Kind], tmp_path: Path) -> None:
    made = kind(tmp_path)
    made.path.write_bytes(made.undamaged())
    made.use(1)
    tracemalloc.start()
    try:
        open_weights(made.path if kind is GgufModelFile else tmp_path, read_model_config(made.path if kind is GgufModelFile else tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# PyTorch's older format holds addresses
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not HeadTorchFile], ids=lambda kind: kind.__name__)
def test_fuzzed_file_is_reproducible_from_seed_and_number(kind: type[Kind], tmp_path: Path, seed: int) -> None:
    first, second = kind(tmp_path / "first"), kind(tmp_path / "second")
    contents = [first.content(seed, index) for index in range(5)]
    assert contents == [second.content(seed, index) for index in range(5)]
    assert len(set(contents)) > 1
