"""Run a benchmark: open the worker processes, send each request to them in turns, and end them whatever happens."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from paceline.benchmarking.modes import Mode
from paceline.benchmarking.plan import DEFAULT_PROMPTS, DEFAULT_ROUNDS, DEFAULT_TOKENS, BenchPlan
from paceline.benchmarking.requests import EncodedPrompt, EncodedWorkloads, WorkerRequest, make_copy_prompts, make_worker_requests
from paceline.benchmarking.samples import Sample
from paceline.benchmarking.workloads import REWRITING
from paceline.errors import PacelineError, shortened
from paceline.tokenizer.tokenizer import Tokenizer

_STDERR_TAIL_BYTES = 4000  # last bytes of stderr that are searched for an error
_EXIT_TIMEOUT_S = 5.0  # until a worker that was asked to exit is killed
COMPLETE, OUT_OF_TIME, INTERRUPTED = "complete", "out of time", "interrupted"

MIN_ROUNDS = 3
SHORT_TOKENS = 32

Item = TypeVar("Item")


class WorkerError(PacelineError):
    """A worker died, did not reply in time, or refused a request. `is_over`: the process has ended."""

    def __init__(self, message: str, *, is_over: bool) -> None:
        super().__init__(message)
        self.is_over = is_over


class WorkerProcess:
    """A worker process, started at once in a session of its own, so that Ctrl-C reaches only the caller.

    Args:
        name: name in error messages.
        command: program and arguments.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, process_group=0 if os.name == "posix" else None
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{name}: {command[0]} cannot be started: {error.strerror}", is_over=True) from error
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            WorkerError: no reply in time, the process ended, the reply is not JSON, or the reply is an error. In the first
                three cases the process is ended.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._died() from None
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise WorkerError(f"{self.name} did not answer within {timeout_s:g} s and was ended", is_over=True) from None
        if not line:
            raise self._died()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.kill()
            raise WorkerError(f"{self.name} answered {shortened(line)}, which is no JSON object, and was ended", is_over=True)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}", is_over=False)
        return answer

    def close(self) -> None:
        """Wait for the process to exit, then kill it and its children."""
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        self.kill()
        self._log.close()

    def kill(self) -> None:
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the process group has the number of its first process
        else:
            self._process.kill()
        self._process.wait()
        self._reader.join(_EXIT_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _died(self) -> WorkerError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        self.kill()
        code = self._process.returncode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return WorkerError(f"{self.name} ended {how}{self._last_stderr_line()}", is_over=True)

    def _last_stderr_line(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _STDERR_TAIL_BYTES))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A failure of a worker; without a workload it could not be opened, or has died."""

    mode: str
    message: str
    workload: str | None = None
    temperature: float | None = None
    round: int | None = None


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress callbacks: a line of text, the total number of turns, one more turn is done."""

    print_line: Callable[[str], None] = lambda text: None
    begin: Callable[[int], None] = lambda total: None
    advance: Callable[[], None] = lambda: None


def rotate_modes(modes: Sequence[Item], turn: int) -> list[Item]:
    """Rotate the order of the modes each turn: A B C, B C A, C A B."""
    first = turn % len(modes) if modes else 0
    return [*modes[first:], *modes[:first]]


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a run: counted rounds, output tokens, prompts of each workload."""

    rounds: int = DEFAULT_ROUNDS
    tokens: int = DEFAULT_TOKENS
    prompts: int = DEFAULT_PROMPTS

    def seconds(self, turn_s: float, turn_tokens: int, num_cells: int, batch_size: int) -> float:
        """Return the seconds of a run, the warm-up round included.

        Args:
            turn_s: seconds of one request of `turn_tokens` tokens in every mode together.
        """
        return (1 + self.rounds) * num_cells * -(-self.prompts // batch_size) * turn_s * self.tokens / turn_tokens


def fit_size(wanted: Size, fixed: frozenset[str], limit_s: float, *, turn_s: float, num_cells: int, batch_size: int = 1) -> Size:
    """Reduce the size until it fits: fewer prompts first, then rounds, then tokens.

    Args:
        fixed: names of fields that the user gave; they are not reduced.
        limit_s: time left. Where nothing more can be reduced, the result takes longer.
        turn_s: as for `Size.seconds`, with `wanted.tokens`.
    """
    size = wanted
    while size.seconds(turn_s, wanted.tokens, num_cells, batch_size) > limit_s:
        if size.prompts > 1 and "prompts" not in fixed:
            size = replace(size, prompts=size.prompts - 1)
        elif size.rounds > MIN_ROUNDS and "rounds" not in fixed:
            size = replace(size, rounds=size.rounds - 1)
        elif size.tokens > SHORT_TOKENS and "tokens" not in fixed:
            size = replace(size, tokens=max(SHORT_TOKENS, size.tokens // 2))
        else:
            break
    return size


@dataclass(slots=True)
class Measurements:
    """Measurements of a run so far.

    Attributes:
        facts: first reply of each worker, by mode.
        size: planned size.
        ended: "complete", "out of time" or "interrupted".
    """

    modes: Sequence[Mode]
    size: Size
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failures: list[WorkerFailure] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    ended: str = COMPLETE


def requested_size(plan: BenchPlan) -> tuple[Size, frozenset[str]]:
    """Return the size of a plan, and the names of the fields that the user gave."""
    prompts = DEFAULT_PROMPTS if plan.batch_size == 1 else plan.batch_size
    size = Size(plan.rounds or DEFAULT_ROUNDS, plan.max_tokens or DEFAULT_TOKENS, plan.num_prompts or prompts)
    given = {"rounds": plan.rounds, "tokens": plan.max_tokens, "prompts": plan.num_prompts or (plan.batch_size > 1 or None)}
    return size, frozenset(name for name, value in given.items() if value is not None)


class Run:
    """One run of a plan.

    Args:
        modes: the first of them decodes plainly in our own engine.
        started_s: clock (`time.monotonic`) from which the plan's minutes count.
    """

    def __init__(
        self,
        plan: BenchPlan,
        modes: Sequence[Mode],
        questions: EncodedWorkloads,
        tokenizer: Tokenizer,
        watcher: RunProgress,
        started_s: float,
    ) -> None:
        self._plan, self._questions, self._tokenizer, self._watcher = plan, questions, tokenizer, watcher
        self._deadline_s = started_s + 60 * plan.minutes
        size, self._fixed = requested_size(plan)
        self.measured = Measurements(modes, size, notices=list(questions.notices))
        self._workers: dict[str, WorkerProcess] = {}

    def measure(self) -> Measurements:
        """Measure everything; Ctrl-C ends it early and keeps what was measured."""
        with ExitStack() as stack:
            try:
                self._open(stack)
                if self._workers:
                    self._measure()
            except KeyboardInterrupt:
                self.measured.ended = INTERRUPTED
        return self.measured

    def _open(self, stack: ExitStack) -> None:
        for mode in self.measured.modes:
            self._watcher.print_line(f"opening {mode.name}")
            try:
                worker = WorkerProcess(mode.name, mode.command)
                stack.callback(worker.close)
                self.measured.facts[mode.name] = worker.send(dict(mode.order), self._plan.load_timeout_s)
                self._workers[mode.name] = worker
            except WorkerError as failure:
                self.measured.failures.append(WorkerFailure(mode.name, str(failure)))

    def _measure(self) -> None:
        cells = [(workload, temperature) for workload in self._questions.prompts for temperature in self._plan.temperatures]
        self._fit(num_cells=len(cells))
        prompts = {name: self._prompts_of(name) for name in self._questions.prompts}
        requests = [
            request
            for workload, temperature in cells
            for request in make_worker_requests(workload, temperature, prompts[workload], self._plan.batch_size)
        ]
        rounds = self.measured.size.rounds
        count = f"{len(requests)} request{'' if len(requests) == 1 else 's'}"
        self._watcher.print_line(f"measuring {len(self._workers)} modes in turns: {1 + rounds} rounds of {count}, the first to warm up")
        self._watcher.begin((1 + rounds) * len(requests))
        for number in range(1 + rounds):
            for place, request in enumerate(requests):
                if time.monotonic() > self._deadline_s:
                    self.measured.ended = OUT_OF_TIME
                    where = f"in round {number} of {rounds} (round 0 warms up)"
                    self.measured.notices.append(
                        f"stopped after {self._plan.minutes:g} minutes {where}: raise --minutes, or name fewer workloads"
                    )
                    return
                for mode in rotate_modes(self.measured.modes, number + place):
                    self._measure_request(mode, request, number)
                self._watcher.advance()

    def _fit(self, *, num_cells: int) -> None:
        """Run one of the longer prompts in every mode (warm-up), and reduce the size to what fits into the time."""
        size, plan = self.measured.size, self._plan
        first = [make_worker_requests(name, plan.temperatures[0], own, plan.batch_size)[0] for name, own in self._questions.prompts.items()]
        longer = sorted(first, key=lambda request: request.num_prompt_tokens)[3 * len(first) // 4]
        turn_s = 0.0
        for mode in self.measured.modes:
            if mode.name in self._workers and not mode.needs_prediction:
                start = time.monotonic()
                self._send(mode, longer)
                turn_s += time.monotonic() - start
        left_s = max(0.0, self._deadline_s - time.monotonic())
        fitting = fit_size(size, self._fixed, left_s, turn_s=turn_s, num_cells=num_cells, batch_size=plan.batch_size)
        if fitting != size:
            whole_s = size.seconds(turn_s, size.tokens, num_cells, plan.batch_size)
            self.measured.notices.append(
                f"{_shown(size)} would take about {whole_s / 60:.1f} minutes and --minutes is {plan.minutes:g}: measured are "
                f"{_shown(fitting)}; --rounds, --num-prompts and --max-tokens set them regardless"
            )
            self.measured.size = fitting

    def _prompts_of(self, workload: str) -> list[EncodedPrompt]:
        prompts = self._questions.prompts[workload][: self.measured.size.prompts]
        plain = self.measured.modes[0]
        if workload not in self._questions.copied or plain.name not in self._workers:
            return prompts
        self._watcher.print_line(f"making the predictions of {workload}")

        def answer(prompt: EncodedPrompt) -> Sequence[int]:
            found = self._send(plain, WorkerRequest(workload, 0.0, 0, (prompt,)))
            return prompt.prompt_ids if found is None else found["token_ids"]

        in_prompt, vocab_size = workload == REWRITING, self._questions.vocab_size
        made = make_copy_prompts(prompts, answer, self._tokenizer, in_prompt=in_prompt, vocab_size=vocab_size, seed=self._plan.seed)
        room = self._questions.context - self.measured.size.tokens
        return [prompt for prompt in made if len(prompt.prompt_ids) <= room] or prompts

    def _measure_request(self, mode: Mode, request: WorkerRequest, number: int) -> None:
        """Send one request to one mode and keep the sample."""
        if mode.name not in self._workers or (mode.needs_prediction and not request.has_predictions):
            return
        answer = self._send(mode, request, number)
        if answer is None:
            return
        known = {"mode": mode.name, "workload": request.workload, "temperature": request.temperature, "prompt": request.index}
        try:
            sample = Sample.of(answer, **known, round=number, num_prompt_tokens=request.num_prompt_tokens)
            if any(len(output.token_ids) != self.measured.size.tokens for output in sample.outputs):
                raise ValueError(f"{sample.num_tokens} tokens where {self.measured.size.tokens * len(request.prompts)} were requested")
        except (KeyError, TypeError, ValueError) as error:
            self._fail(mode, request, number, f"{mode.name} broke the protocol ({type(error).__name__}: {error})")
            return
        self.measured.samples.append(sample)

    def _send(self, mode: Mode, request: WorkerRequest, number: int | None = None) -> dict[str, Any] | None:
        """Send a request; return the reply, or None after recording a failure."""
        worker = self._workers[mode.name]
        try:
            return worker.send(request.as_dict(self.measured.size.tokens, self._plan.seed), self._plan.timeout_s)
        except WorkerError as failure:
            if failure.is_over:
                del self._workers[mode.name]
            self._fail(mode, request, number, str(failure))
            return None

    def _fail(self, mode: Mode, request: WorkerRequest, number: int | None, message: str) -> None:
        failure = WorkerFailure(mode.name, message, request.workload, request.temperature, number)
        known = {(one.mode, one.message, one.workload, one.temperature) for one in self.measured.failures}
        if (failure.mode, failure.message, failure.workload, failure.temperature) not in known:
            self.measured.failures.append(failure)


def _shown(size: Size) -> str:
    return f"{size.rounds} rounds of {size.prompts} prompt{'s' if size.prompts > 1 else ''} a workload and {size.tokens} tokens"
