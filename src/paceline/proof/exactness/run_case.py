"""Run one case and compare its outputs; count what was compared."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from paceline.errors import is_interrupt
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.outputs import RequestOutput
from paceline.proof.exactness.cases import Case, CaseRequest, Factors
from paceline.proof.exactness.compare import Finding, Kind, OutputComparer, Status
from paceline.proof.exactness.engine_under_test import EngineUnderTest, ReferenceOutputs, RowRecorder
from paceline.sampling.params import SamplingParams

_REPEATED_EVENTS = ("prefix hit", "next turn")
_BLOCK_EDGE_SHARE = 0.5  # share of prompts whose changed token is the first or last of a cache block
_SHARED = ("prefix hit", "near hit", "next turn", "preempted")


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """One request of a case, its output, and the result of `OutputComparer.compare`."""

    request: CaseRequest
    output: RequestOutput
    num_tokens: int
    num_rows: int
    finding: Finding | None


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Result of a case.

    Attributes:
        case: with stop tokens resolved, so that it can be repeated without the reference outputs.
        answered: those before the case raised, if it did.
        raised: the finding for what the case raised.
        num_preemptions: how often one of its requests was preempted.
    """

    case: Case
    answered: Sequence[ComparedRequest]
    raised: Finding | None
    num_preemptions: int

    @property
    def findings(self) -> list[Finding]:
        return [one for one in (*(answered.finding for answered in self.answered), self.raised) if one is not None]


class CaseRunner:
    """Runs cases on one engine."""

    def __init__(self, engine_under_test: EngineUnderTest, references: ReferenceOutputs, comparison: OutputComparer) -> None:
        self._engine_under_test, self._references, self._comparison = engine_under_test, references, comparison

    def run(self, case: Case) -> CaseOutcome:
        """Run a case and compare it with plain decoding. Exceptions are reported as findings, interrupts raised again."""
        case = replace(case, requests=tuple(map(self._resolved, case.requests)))
        random = np.random.default_rng(case.seed)
        count = len(case.requests)
        salts = self._engine_under_test.new_salts(1) * count if case.setting.event in _SHARED else self._engine_under_test.new_salts(count)
        engine = self._engine_under_test.opened.engine
        answered: list[ComparedRequest] = []
        raised: Finding | None = None
        before = engine.scheduler.num_preemptions
        try:
            requests = case.requests
            if case.setting.event == "near hit":
                self._fill_cache(case, salts, random)
            for run in range(2 if case.setting.event in _REPEATED_EVENTS else 1):
                if run and case.setting.event == "next turn":
                    requests = tuple(map(self._next_turn, requests))
                answered += self._run_batch(case, requests, run, salts, random)
            self._engine_under_test.check()
        except BaseException as error:
            if is_interrupt(error):
                raise
            kind = Kind.CACHE if isinstance(error, RuntimeError) and "block" in str(error) else Kind.ERROR
            raised = Finding(kind=kind, status=Status.BUG, case=case.number, details=f"{type(error).__name__}: {error}")
        return CaseOutcome(case, answered, raised, engine.scheduler.num_preemptions - before)

    def _resolved(self, request: CaseRequest) -> CaseRequest:
        """Return the request with the token of plain decoding at `stop_index` as its stop token."""
        if request.stop_index is None:
            return request
        answer = self._references.get(request.prompt_token_ids, request.params).output.token_ids
        stop = answer[min(request.stop_index, len(answer) - 1)]
        return replace(request, params=replace(request.params, stop_token_ids=(stop,)), stop_index=None)

    def _next_turn(self, request: CaseRequest) -> CaseRequest:
        """Return the request with its output appended to the prompt, where there is room."""
        answer = self._references.get(request.prompt_token_ids, request.params).output.token_ids
        prompt = (*request.prompt_token_ids, *answer)
        is_short = len(prompt) + request.params.max_tokens <= self._engine_under_test.opened.input_processor.max_model_len
        return replace(request, prompt_token_ids=prompt) if is_short else request

    def _fill_cache(self, case: Case, salts: Sequence[str], random: np.random.Generator) -> None:
        """Fill the cache with rows of prompts that differ from those of the case in one token each."""
        vocab_size = self._engine_under_test.opened.input_processor.vocab_size
        others = []
        for one in case.requests:
            prompt, at = list(one.prompt_token_ids), int(random.integers(len(one.prompt_token_ids)))
            if random.random() < _BLOCK_EDGE_SHARE and len(prompt) > BLOCK_SIZE:
                at = int(random.choice([at for at in range(len(prompt)) if at % BLOCK_SIZE in (0, BLOCK_SIZE - 1)]))
            prompt[at] = (prompt[at] + 1) % vocab_size
            others.append(replace(one, prompt_token_ids=tuple(prompt), params=SamplingParams(max_tokens=1)))
        self._engine_under_test.run_requests(others, [RowRecorder() for _ in others], case.setting, salts, random)

    def _run_batch(
        self, case: Case, requests: Sequence[CaseRequest], run: int, salts: Sequence[str], random: np.random.Generator
    ) -> list[ComparedRequest]:
        references = [self._references.get(one.prompt_token_ids, one.params) for one in requests]
        recorders = [RowRecorder(reference.output.token_ids, frozenset(reference.rows)) for reference in references]
        outputs = self._engine_under_test.run_requests(requests, recorders, case.setting, salts, random)
        return [
            ComparedRequest(one, output, *self._comparison.compare(output, recorder, reference, case=case.number, request=index, run=run))
            for index, (one, output, recorder, reference) in enumerate(zip(requests, outputs, recorders, references, strict=True))
        ]


@dataclass(slots=True)
class Counts:
    """Counts of some cases.

    Attributes:
        requests: answers compared.
        tokens: output tokens compared.
        rows: rows of logits compared.
        drafted, accepted: draft tokens of these outputs, and how many were accepted.
        cached_tokens: prompt tokens whose rows were found in the cache.
        near_ties, bugs: answers that differ.
    """

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    near_ties: int = 0
    bugs: int = 0

    def add(self, answered: ComparedRequest) -> None:
        self.requests += 1
        self.tokens += answered.num_tokens
        self.rows += answered.num_rows
        self.drafted += answered.output.speculation.num_draft_tokens
        self.accepted += answered.output.speculation.num_accepted_tokens
        self.cached_tokens += answered.output.usage.num_cached_tokens
        if answered.finding is not None:
            self.count(answered.finding.status)

    def count(self, status: Status) -> None:
        if status is Status.BUG:
            self.bugs += 1
        else:
            self.near_ties += 1


@dataclass(slots=True)
class Tally:
    """Counts of all cases.

    Attributes:
        by: the counts of each level of each factor.
    """

    cases: int = 0
    preemptions: int = 0
    all: Counts = field(default_factory=Counts)
    by: dict[str, dict[str, Counts]] = field(default_factory=dict)

    @classmethod
    def of(cls, factors: Factors) -> "Tally":
        """Make zero counts for every level, so that levels that never ran are shown."""
        return cls(by={name: {level: Counts() for level in levels} for name, levels in factors.items()})

    def add(self, outcome: CaseOutcome) -> None:
        self.cases += 1
        self.preemptions += outcome.num_preemptions
        for answered in outcome.answered:
            for counts in (self.all, *self._levels(outcome, answered)):
                counts.add(answered)
        if outcome.raised is not None:
            self.all.count(outcome.raised.status)

    def _levels(self, outcome: CaseOutcome, answered: ComparedRequest) -> list[Counts]:
        request = answered.request
        levels = asdict(outcome.case.setting) | {name: getattr(request, name) for name in ("drafter", "sampling", "prompt")}
        return [self.by.setdefault(name, {}).setdefault(str(level), Counts()) for name, level in levels.items()]

    def as_dict(self) -> Mapping[str, Any]:
        values = asdict(self)
        return {**values.pop("all"), **values}
