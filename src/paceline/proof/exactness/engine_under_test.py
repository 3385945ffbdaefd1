"""The engine that is examined: opened once, run in any setting, and the reference outputs of plain decoding."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np

from paceline.engine.inputs import RequestOptions
from paceline.engine.loader import LoadedEngine
from paceline.engine.request import EngineRequest
from paceline.engine.scheduler import SchedulerLimits
from paceline.kv_cache.row_plan import num_blocks_for
from paceline.outputs import RequestOutput
from paceline.proof.exactness.adversaries import RandomDrafter, WrongDrafter
from paceline.proof.exactness.cases import ALL_DRAFTERS, CaseRequest, Setting
from paceline.runtimes.base import FloatArray
from paceline.sampling.params import SamplingParams
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.speculator import Speculator
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult

_TREE_ROWS = 3  # for each draft token, where there are branches
_PREEMPT_STEPS = 40  # steps of a case during which requests are preempted
_PREEMPT_EVERY = 3
_CHUNKS = (5, 7, 16, 31, 33)  # rows, around the borders of blocks and not
_EDIT_EVERY = 7  # every seventh token of a prediction is wrong
_LOGITS_ROW_DIVISOR = 5  # one row of logits is kept, at a fifth of the output, for comparison under fast numerics


@dataclass(slots=True)
class RowRecorder:
    """Records rows of logits of one request by output position: row i is the one that output token i was chosen from.

    Attributes:
        expected: output tokens of plain decoding; None = this is plain decoding.
        kept: positions whose rows are kept.
        checksums: of every row up to the first token that differs.
        rows: [V] float32 of the kept positions and of the first token that differs.
        diverged_at: position of that token.
    """

    expected: Sequence[int] | None = None
    kept: frozenset[int] = frozenset()
    checksums: dict[int, int] = field(default_factory=dict)
    rows: dict[int, FloatArray] = field(default_factory=dict)
    diverged_at: int | None = None

    def see(self, index: int, token: int, row: FloatArray) -> None:
        if self.diverged_at is not None:
            return
        self.checksums[index] = crc32(np.ascontiguousarray(row).data)
        if self.expected is not None and index < len(self.expected) and self.expected[index] != token:
            self.diverged_at = index
        if index in self.kept or self.diverged_at == index:
            self.rows[index] = row.copy()


class RecordingSpeculator(Speculator):
    """A speculator that records the rows of some requests."""

    recorders: dict[Request, RowRecorder]

    def verify(self, rows: RequestRows, tree: DraftTree) -> VerifyResult:
        result, request, logits = super().verify(rows, tree), rows.request, rows.logits
        recorder = self.recorders.get(request)
        if recorder is not None:
            first = request.num_output_tokens
            for depth, (node, token) in enumerate(zip((0, *result.accepted_nodes), result.token_ids, strict=False)):
                recorder.see(first + depth, token, logits[node])
        return result


def max_abs_difference(one: FloatArray, other: FloatArray) -> float:
    """Return the largest absolute difference of two rows. Equal infinities differ by 0; NaN differs by infinity."""
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, np.float32(0.0), np.abs(one - other))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))


class EngineUnderTest:
    """An engine with all drafters and two adversaries; a case may change its limits, policy and cache.

    Args:
        opened: the engine; it is changed and serves nothing else from now on.

    Attributes:
        drafter_names: names of all drafters.
        is_exact: whether rows must have the bits of plain decoding.
    """

    def __init__(self, opened: LoadedEngine) -> None:
        self.opened, engine = opened, opened.engine
        before = engine.speculator
        members = list(before.drafters)
        _number_same_names(members)
        vocab_size = opened.input_processor.vocab_size
        self._answers: dict[tuple[tuple[int, ...], int], Sequence[int]] = {}
        self._random_drafter = RandomDrafter(self._answers, vocab_size)
        self._default_policy = before.policy
        members += [WrongDrafter(self._answers, vocab_size), self._random_drafter]
        self.drafter_names = [drafter.name for drafter in members]
        self._speculator = RecordingSpeculator(members, before.policy, vocab_size=vocab_size)
        self._speculator.recorders = {}
        engine.speculator = self._speculator
        self.is_exact = opened.numerics == "exact"
        self._limits = engine.scheduler.limits
        self._num_salts = 0

    def decode_plain(self, prompt_token_ids: Sequence[int], params: SamplingParams, recorder: RowRecorder) -> RequestOutput:
        """Return the output of a request that runs alone, without drafts and cached rows, its prompt in as few passes as possible."""
        limits = replace(self._limits, prefill_chunk_size=self._limits.max_num_batched_tokens)
        (salt,) = self.new_salts(1)
        request = self._plain_request(prompt_token_ids, params, salt)
        (output,) = self._run([request], [recorder], limits, np.random.default_rng(0), event="cold")
        return output

    def run_requests(
        self,
        requests: Sequence[CaseRequest],
        recorders: Sequence[RowRecorder],
        setting: Setting,
        salts: Sequence[str],
        random: np.random.Generator,
    ) -> list[RequestOutput]:
        """Run requests together in a setting and return their outputs.

        Args:
            recorders: of each, see its rows; a request whose recorder expects no tokens is decoded plainly.
            salts: of each; those of the same salt share cached rows.
            random: decides who is preempted and how small chunks and passes are.

        Raises:
            Exception: whatever goes wrong; the engine is as it was before.
        """
        self._speculator.policy = self._policy(setting)
        self._random_drafter.reseed(int(random.integers(2**31)))
        try:
            made = [self._request(*one) for one in zip(requests, recorders, salts, strict=True)]
            return self._run(made, recorders, self._limits_of(setting, random), random, setting.event)
        finally:
            self._speculator.policy = self._default_policy
            self._answers.clear()

    def new_salts(self, count: int) -> list[str]:
        """Return cache salts that no request has had."""
        self._num_salts += count
        return [f"proof {number}" for number in range(self._num_salts - count, self._num_salts)]

    def check(self) -> None:
        """Check that the cache is consistent while nothing runs.

        Raises:
            RuntimeError: it is not.
        """
        cache = self.opened.engine.cache
        cache.check_consistency()
        if cache.pool.num_free != cache.pool.num_blocks:
            raise RuntimeError(f"{cache.pool.num_blocks - cache.pool.num_free} blocks of the cache belong to no request")

    def _run(
        self,
        requests: Sequence[EngineRequest],
        recorders: Sequence[RowRecorder],
        limits: SchedulerLimits,
        random: np.random.Generator,
        event: str,
    ) -> list[RequestOutput]:
        engine = self.opened.engine
        self._speculator.recorders = dict(zip(requests, recorders, strict=True))
        engine.scheduler.limits = limits
        most_steps = 1000 + 50 * sum(request.max_len for request in requests)
        try:
            with self._limit_free_blocks(requests, event), closing(engine.run(requests)) as steps:
                for number, _ in enumerate(steps):
                    if event == "preempted" and number < _PREEMPT_STEPS and number % _PREEMPT_EVERY == _PREEMPT_EVERY - 1:
                        self._preempt_one(random)
                    if number > most_steps:
                        raise RuntimeError(f"{len(requests)} requests did not end in {most_steps} steps")
            return [self.opened.make_output(request) for request in requests]
        finally:
            engine.scheduler.limits = self._limits
            self._speculator.recorders = {}

    def _request(self, given: CaseRequest, recorder: RowRecorder, salt: str) -> EngineRequest:
        if recorder.expected is None:
            return self._plain_request(given.prompt_token_ids, given.params, salt)
        options: RequestOptions = {"cache_salt": salt, "namespace": salt}
        name = None if given.drafter == ALL_DRAFTERS else given.drafter
        options["speculation"] = {"drafter": name, "num_speculative_tokens": given.num_speculative_tokens, "trees": True}
        if self._speculator.uses_predicted_outputs:
            options["prediction"] = self._prediction(recorder.expected)
        (request,) = self.opened.make_requests([list(given.prompt_token_ids)], given.params, options, is_streamed=False)
        self._answers[given.prompt_token_ids, request.seed] = recorder.expected
        return request

    def _plain_request(self, prompt_token_ids: Sequence[int], params: SamplingParams, salt: str) -> EngineRequest:
        options: RequestOptions = {"cache_salt": salt, "namespace": salt, "speculation": {"enabled": False}}
        (request,) = self.opened.make_requests([list(prompt_token_ids)], params, options, is_streamed=False)
        return request

    def _prediction(self, expected: Sequence[int]) -> list[int]:
        """Return the expected output with every seventh token replaced."""
        vocab_size = self.opened.input_processor.vocab_size
        return [(token + (at % _EDIT_EVERY == _EDIT_EVERY - 2)) % vocab_size for at, token in enumerate(expected)]

    def _policy(self, setting: Setting) -> FixedDraftLength:
        if setting.num_speculative_tokens == "auto":
            return self._default_policy
        count = int(setting.num_speculative_tokens)
        return FixedDraftLength(count, max_rows=1 + count * (_TREE_ROWS if setting.shape == "tree" else 1))

    def _limits_of(self, setting: Setting, random: np.random.Generator) -> SchedulerLimits:
        if setting.event == "chunked":
            return replace(self._limits, prefill_chunk_size=int(random.choice(_CHUNKS)))
        if setting.event == "full passes":
            rows = setting.batch + int(random.integers(2, 24))
            return replace(self._limits, max_num_batched_tokens=rows, prefill_chunk_size=rows)
        return replace(self._limits, spare_blocks=0) if setting.event == "preempted" else self._limits

    @contextmanager
    def _limit_free_blocks(self, requests: Sequence[EngineRequest], event: str) -> Iterator[None]:
        """For preemption, leave free blocks for the longest request and a few more."""
        cache = self.opened.engine.cache
        room = max(num_blocks_for(request.max_len, cache.block_size) for request in requests) + len(requests)
        taken = cache.pool.allocate(max(0, cache.pool.num_free - room)) if event == "preempted" else []
        try:
            yield
        finally:
            cache.pool.release(taken)

    def _preempt_one(self, random: np.random.Generator) -> None:
        scheduler = self.opened.engine.scheduler
        if scheduler.running:
            scheduler.preempt(scheduler.running[int(random.integers(len(scheduler.running)))])


def _number_same_names(drafters: Sequence[Drafter]) -> None:
    seen: dict[str, int] = {}
    for drafter in drafters:
        seen[drafter.name] = seen.get(drafter.name, 0) + 1
        if seen[drafter.name] > 1:
            drafter.name = f"{drafter.name} {seen[drafter.name]}"


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """Output of plain decoding.

    Attributes:
        checksums: of the row of each output token.
        rows: [V] float32 of some output positions; empty where numerics are exact.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    output: RequestOutput
    checksums: Mapping[int, int]
    rows: Mapping[int, FloatArray]


class ReferenceOutputs:
    """Outputs of plain decoding, computed on first use."""

    def __init__(self, engine_under_test: EngineUnderTest) -> None:
        self._engine_under_test = engine_under_test
        self._known: dict[tuple[tuple[int, ...], str], ReferenceOutput] = {}
        self.num_made = 0
        self.num_tokens = 0

    def get(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> ReferenceOutput:
        key = tuple(prompt_token_ids), repr(params)
        if key not in self._known:
            self._known[key] = self._make(prompt_token_ids, params)
        return self._known[key]

    def row(self, reference: ReferenceOutput, index: int) -> FloatArray | None:
        """Decode again and return the row, [V] float32, that output token `index` was chosen from; None if it is not reached."""
        recorder = RowRecorder(kept=frozenset([index]))
        self._engine_under_test.decode_plain(reference.prompt_token_ids, reference.params, recorder)
        return recorder.rows.get(index)

    def clear(self) -> None:
        """Drop all reference outputs, before a round with other requests."""
        self._known.clear()

    def _make(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> ReferenceOutput:
        kept = () if self._engine_under_test.is_exact else (params.max_tokens // _LOGITS_ROW_DIVISOR,)
        recorder = RowRecorder(kept=frozenset(kept))
        output = self._engine_under_test.decode_plain(prompt_token_ids, params, recorder)
        self.num_made += 1
        self.num_tokens += len(output.token_ids)
        return ReferenceOutput(prompt_token_ids, params, output, recorder.checksums, recorder.rows)
