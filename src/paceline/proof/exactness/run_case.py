"""Run one case and compare its outputs; count what was compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.errors import is_interrupt
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.outputs import RequestOutput
from paceline.proof.exactness.cases import Case, CaseRequest, Factors
from paceline.proof.exactness.compare import ComparedOutput, Finding, Kind, OutputComparer, Status
from paceline.proof.exactness.engine_under_test import EngineUnderTest, ReferenceOutput, ReferenceOutputs, RequestSpec, RowRecorder
from paceline.sampling.params import SamplingParams

_REPEATED_EVENTS = ("prefix hit", "next turn")
_BLOCK_EDGE_SHARE = 0.5  # share of prompts whose changed token is the first or last of a cache block
_SHARED = ("prefix hit", "near hit", "next turn", "preempted")


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """One request of a case, its output, and the comparison."""

    request: CaseRequest
    output: RequestOutput
    compared: ComparedOutput


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Result of a case.

    Attributes:
        case: with stop tokens resolved, so that it can be repeated without the reference outputs.
        answered: none where the case raised.
        findings: all differences.
        num_preemptions: how often one of its requests was preempted.
    """

    case: Case
    answered: tuple[ComparedRequest, ...]
    findings: tuple[Finding, ...]
    num_preemptions: int = 0


class CaseRunner:
    """Runs cases on one engine."""

    def __init__(self, engine_under_test: EngineUnderTest, references: ReferenceOutputs, comparison: OutputComparer) -> None:
        self._engine_under_test, self._references, self._comparison = engine_under_test, references, comparison

    def run(self, case: Case) -> CaseOutcome:
        """Run a case and compare. An exception becomes a finding; an interrupt is raised again."""
        case = replace(case, requests=tuple(map(self._resolved, case.requests)))
        random = np.random.default_rng(case.seed)
        count = len(case.requests)
        salts = self._engine_under_test.new_salts(1) * count if case.setting.event in _SHARED else self._engine_under_test.new_salts(count)
        engine = self._engine_under_test.opened.engine
        answered: list[ComparedRequest] = []
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
            answered_findings = _findings_of(answered)
            return CaseOutcome(case, tuple(answered), (*answered_findings, _raised(case, error)))
        return CaseOutcome(case, tuple(answered), _findings_of(answered), engine.scheduler.num_preemptions - before)

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
        specs = []
        for one in case.requests:
            prompt, at = list(one.prompt_token_ids), int(random.integers(len(one.prompt_token_ids)))
            if random.random() < _BLOCK_EDGE_SHARE and len(prompt) > BLOCK_SIZE:
                at = int(random.choice([at for at in range(len(prompt)) if at % BLOCK_SIZE in (0, BLOCK_SIZE - 1)]))
            prompt[at] = (prompt[at] + 1) % vocab_size
            specs.append(RequestSpec(prompt, SamplingParams(max_tokens=1)))
        self._engine_under_test.run_requests(specs, [RowRecorder() for _ in specs], case.setting, salts, random)

    def _run_batch(
        self, case: Case, requests: Sequence[CaseRequest], run: int, salts: Sequence[str], random: np.random.Generator
    ) -> list[ComparedRequest]:
        references = [self._references.get(one.prompt_token_ids, one.params) for one in requests]
        specs = [
            RequestSpec(one.prompt_token_ids, one.params, reference.output.token_ids, one.drafter, one.num_speculative_tokens)
            for one, reference in zip(requests, references, strict=True)
        ]
        recorders = [self._watch(reference) for reference in references]
        outputs = self._engine_under_test.run_requests(specs, recorders, case.setting, salts, random)
        return [
            ComparedRequest(one, output, self._comparison.compare(output, recorder, reference, case=case.number, request=index, run=run))
            for index, (one, output, recorder, reference) in enumerate(zip(requests, outputs, recorders, references, strict=True))
        ]

    def _watch(self, reference: ReferenceOutput) -> RowRecorder:
        return RowRecorder(reference.output.token_ids, frozenset(reference.rows), self._engine_under_test.is_exact)


def _findings_of(answered: Sequence[ComparedRequest]) -> tuple[Finding, ...]:
    return tuple(one.compared.finding for one in answered if one.compared.finding is not None)


def _raised(case: Case, error: BaseException) -> Finding:
    """Return the finding for a case that raised, where plain decoding returned an output."""
    kind = Kind.CACHE if isinstance(error, RuntimeError) and "block" in str(error) else Kind.ERROR
    return Finding(kind=kind, status=Status.BUG, case=case.number, details=f"{type(error).__name__}: {error}")


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
        """Count one answer."""
        self.requests += 1
        self.tokens += answered.compared.num_tokens
        self.rows += answered.compared.num_rows
        self.drafted += answered.output.speculation.num_draft_tokens
        self.accepted += answered.output.speculation.num_accepted_tokens
        self.cached_tokens += answered.output.usage.num_cached_tokens
        if answered.compared.finding is not None:
            self.count(answered.compared.finding.status)

    def count(self, status: Status) -> None:
        """Count a difference."""
        if status is Status.BUG:
            self.bugs += 1
        else:
            self.near_ties += 1

    def as_dict(self) -> dict[str, int]:
        """Return the JSON object."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


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
        """Count a case."""
        self.cases += 1
        self.preemptions += outcome.num_preemptions
        for answered in outcome.answered:
            for counts in (self.all, *self._levels(outcome, answered)):
                counts.add(answered)
        of_answers = {id(one.compared.finding) for one in outcome.answered}
        for finding in outcome.findings:
            if id(finding) not in of_answers:
                self.all.count(finding.status)

    def _levels(self, outcome: CaseOutcome, answered: ComparedRequest) -> list[Counts]:
        setting, request = outcome.case.setting, answered.request
        levels = {
            "drafter": request.drafter,
            "num_speculative_tokens": setting.num_speculative_tokens,
            "shape": setting.shape,
            "batch": str(setting.batch),
            "event": setting.event,
            "sampling": request.sampling,
            "prompt": request.prompt,
        }
        return [self.by.setdefault(name, {}).setdefault(level, Counts()) for name, level in levels.items()]

    def as_dict(self) -> Mapping[str, Any]:
        """Return the JSON object."""
        by = {name: {level: counts.as_dict() for level, counts in levels.items()} for name, levels in self.by.items()}
        return {"cases": self.cases, "preemptions": self.preemptions, **self.all.as_dict(), "by": by}
