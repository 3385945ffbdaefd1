"""Compare plain and speculative decoding of the same requests, in as many settings as a budget of tokens allows."""

import gc
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import EngineConfig, SpeculationConfig
from paceline.engine.input_processor import InputProcessor
from paceline.engine.loader import load_engine
from paceline.errors import ConfigError
from paceline.hub import resolve_model
from paceline.kv_cache.cache import KVCache
from paceline.models.checkpoint import read_model_config
from paceline.proof.exactness.cases import BATCHES, MOST_TOKENS, Case, CaseMaker, CaseRequest, PromptSource, SamplePrompts, given_prompts
from paceline.proof.exactness.compare import Finding, Kind, OutputComparer, Status, finite
from paceline.proof.exactness.engine_under_test import EngineUnderTest, ReferenceOutputs, max_abs_difference
from paceline.proof.exactness.report import provenance
from paceline.proof.exactness.run_case import CaseRunner, Tally
from paceline.proof.exactness.transformers_check import (
    OutputRows,
    TransformersComparison,
    compare_with_transformers,
    decode_with_rows,
    reason_not_comparable,
)
from paceline.runtimes.base import FloatArray, Network, assemble_pass

DEFAULT_TOKENS = 40_000
QUICK_TOKENS = 10_000
QUICK_S = 25.0
"""With --quick, no case is started after so many seconds."""
MAX_BUGS = 20
"""The run stops after so many bugs."""
_MOST_CONTEXT = 2048  # tokens; the default, so that the cache stays small
_LEAST_CONTEXT = 64
_MOST_REQUESTS = 8
_NUM_NOISE_TEXTS = 3
_TREE_WIDTH = 3
_DEFAULT_DRAFTERS = ("auto", "ngram", "suffix", "prediction")
_NOISE_ROWS = 8
"""Rows of the passes that are compared with passes of one row to measure rounding differences."""
_NOISE_FACTOR = 4.0
"""The noise bound over the largest measured difference: other shapes may differ by more than those tried."""
_NOISE_PREFILLED = 24  # tokens before those that are compared
_NOISE_LENGTH = 56  # tokens of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOptions:
    """Options of a proof.

    Attributes:
        engine, speculation: the target and its drafters, as `paceline run` takes them; drafter "auto" = all available ones.
        prompts: a file with a prompt a line; None = cuts of a sample text.
        num_tokens: output tokens to compare.
        seed: of all choices.
        batch_size: requests at a time in every case; None = 1, 4 and 8 in turns.
        seconds: time after which no case is started; None = no limit.
        cases: these alone, as `Case.as_dict` wrote them; empty = those of the seed.
        only: of the seed's cases this one alone.
        compares_transformers: whether logits are also compared with transformers, where it can load the model.
        command: the arguments of this process, for the report.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    prompts: Path | None = None
    num_tokens: int = DEFAULT_TOKENS
    seed: int = 0
    batch_size: int | None = None
    seconds: float | None = None
    cases: Sequence[Case] = ()
    only: int | None = None
    compares_transformers: bool = True
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ConfigError(f"tokens is {self.num_tokens}: use a whole number of output tokens to compare, at least 1")
        if self.batch_size is not None and not 1 <= self.batch_size <= _MOST_REQUESTS:
            raise ConfigError(f"batch_size is {self.batch_size}: use 1 to {_MOST_REQUESTS} requests at a time, or leave it out for several")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}: use a whole number from 0 to {2**32 - 1}")
        drafter = self.speculation.drafter
        if "none" in ((drafter,) if isinstance(drafter, str) else drafter):
            raise ConfigError("drafter 'none' leaves nothing to compare plain decoding with: name a drafter, or none at all for every one")
        if self.speculation.acceptance != "match":
            raise ConfigError("acceptance 'rejection' promises other texts of the same distribution: only 'match' can be compared")


@dataclass(slots=True)
class Proof:
    """Result of a proof.

    Attributes:
        numerics: "exact" or "fast".
        max_abs_difference: of logits between passes of 1 and of 8 rows.
        noise_bound: what logits may differ by; 0 where numerics are exact.
        findings: differences, with the cases they were found in by number.
        is_whole: whether the token budget was used up, or every case given by --case ran.
        transformers: the comparison with transformers.
    """

    seed: int
    num_tokens: int
    numerics: str = ""
    max_abs_difference: float = 0.0
    noise_bound: float = 0.0
    tally: Tally = field(default_factory=Tally)
    findings: list[Finding] = field(default_factory=list)
    cases: dict[int, Case] = field(default_factory=dict)
    num_references: int = 0
    reference_tokens: int = 0
    seconds: float = 0.0
    is_whole: bool = False
    transformers: TransformersComparison = field(default_factory=lambda: TransformersComparison("not_compared", "the run ended before it"))
    provenance: dict[str, Any] = field(default_factory=dict)
    notices: Sequence[str] = ()

    @property
    def bugs(self) -> list[Finding]:
        """Differences that rounding does not explain."""
        return [one for one in self.findings if one.status is Status.BUG]

    @property
    def verdict(self) -> str:
        """ "bug", "near-ties" (noise decided some tokens, and nothing else differs), "equal", or "nothing compared"."""
        if self.bugs:
            return "bug"
        if self.tally.all.near_ties:
            return "near-ties"
        return "equal" if self.tally.all.tokens else "nothing compared"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object; findings carry their cases, which `paceline prove --case` repeats."""
        cases: dict[int | None, Any] = {number: case.as_dict() for number, case in self.cases.items()}
        findings = [{**one.as_dict(), "repeat": self.repeat(one), "replay": cases.get(one.case)} for one in self.findings]
        return {
            "format": 1,
            "verdict": self.verdict,
            "seed": self.seed,
            "numerics": self.numerics,
            "max_abs_difference": finite(self.max_abs_difference),
            "noise_bound": finite(self.noise_bound),
            "tokens_wanted": self.num_tokens,
            "is_whole": self.is_whole,
            "seconds": round(self.seconds, 3),
            "references": self.num_references,
            "reference_tokens": self.reference_tokens,
            "compared": self.tally.as_dict(),
            "transformers": self.transformers.as_dict(),
            "findings": findings,
            "notices": list(self.notices),
            "provenance": self.provenance,
        }

    def repeat(self, finding: Finding) -> list[str]:
        """Return the arguments of a command that runs only the finding's case."""
        command = list(self.provenance.get("command", ()))
        if finding.case is None or "--case" in command:
            return command
        given = [one for at, one in enumerate(command) if one != "--seed" and (at == 0 or command[at - 1] != "--seed")]
        return [*given, "--seed", str(self.seed), "--case", str(finding.case)]


class Prover:
    """Opens the engine and runs the comparison. Used once.

    Raises:
        PacelineError: a model or drafter cannot be loaded or compared.
    """

    def __init__(self, options: ProofOptions) -> None:
        self._options = options
        self._started_s = time.monotonic()
        engine = options.engine
        self._directory = resolve_model(
            engine.model, gguf_file=engine.gguf_file, revision=engine.revision, token=engine.hf_token, offline=engine.offline
        )
        context = engine.max_model_len or min(_MOST_CONTEXT, read_model_config(self._directory).max_positions)
        self._engine = replace(engine, max_model_len=context, max_num_seqs=_MOST_REQUESTS)
        drafter = _DEFAULT_DRAFTERS if options.speculation.drafter == "auto" else options.speculation.drafter
        speculation = replace(options.speculation, drafter=drafter, tree_width=_TREE_WIDTH)
        opened = load_engine(self._engine, speculation)
        engine_under_test = EngineUnderTest(opened)
        self._engine_under_test: EngineUnderTest | None = engine_under_test
        batches = BATCHES if options.batch_size is None else (str(options.batch_size),)
        prompts = _prompts(options, opened.input_processor)
        self._case_maker = CaseMaker(prompts, engine_under_test.drafter_names, options.seed, batches)
        self._given_cases = options.cases
        if options.only is not None and not options.cases:
            self._given_cases = list(islice(self._case_maker.cases(), options.only, options.only + 1))
        self.proof = Proof(
            options.seed,
            options.num_tokens,
            opened.numerics,
            tally=Tally.of(self._case_maker.factors),
            provenance=provenance(engine_under_test, self._directory, self._engine, speculation, options.command),
            notices=opened.notices,
        )

    def run(self) -> Iterator[Tally]:
        """Compare; yield the counts after each case. `proof` holds the result."""
        try:
            texts = yield from self._compare()
            self._engine_under_test = None
            if texts:
                gc.collect()  # free our weights before transformers loads its own
                stored = read_model_config(self._directory).weight_type
                self.proof.transformers = compare_with_transformers(self._directory, texts, stored)
        finally:
            self.proof.seconds = time.monotonic() - self._started_s

    def _compare(self) -> Generator[Tally, None, list[OutputRows]]:
        """Run all cases; return the outputs to compare with transformers."""
        engine_under_test = self._engine_under_test
        if engine_under_test is None:
            raise RuntimeError("this prover has run")
        self._measure_noise(engine_under_test)
        references = ReferenceOutputs(engine_under_test)
        comparison = OutputComparer(
            engine_under_test.opened.input_processor, references, self.proof.noise_bound, is_exact=engine_under_test.is_exact
        )
        runner = CaseRunner(engine_under_test, references, comparison)
        this_round = 0
        for case in self._given_cases or self._case_maker.cases():
            if case.round != this_round:
                this_round = case.round
                references.clear()
            outcome = runner.run(case)
            self.proof.tally.add(outcome)
            if outcome.findings:
                self.proof.findings.extend(outcome.findings)
                self.proof.cases[case.number] = outcome.case
            self.proof.num_references, self.proof.reference_tokens = references.num_made, references.num_tokens
            self.proof.seconds = time.monotonic() - self._started_s
            yield self.proof.tally
            if self._is_enough():
                break
        else:
            self.proof.is_whole = True
        return self._texts_for_transformers(engine_under_test)

    def _is_enough(self) -> bool:
        if self._given_cases:
            return False
        if self.proof.tally.all.tokens >= self._options.num_tokens:
            self.proof.is_whole = True
            return True
        seconds = self._options.seconds
        return len(self.proof.bugs) >= MAX_BUGS or (seconds is not None and time.monotonic() - self._started_s > seconds)

    def _measure_noise(self, engine_under_test: EngineUnderTest) -> None:
        engine, texts = engine_under_test.opened.engine, [one.prompt_token_ids for one in self._some_requests()]
        longest = sorted(dict.fromkeys(texts), key=len)[-_NUM_NOISE_TEXTS:]
        difference = self.proof.max_abs_difference = _measure_difference(engine.runtime, engine.cache, longest)
        if not engine_under_test.is_exact:
            self.proof.noise_bound = _NOISE_FACTOR * difference
        elif difference > 0.0:
            self.proof.findings.append(
                Finding(
                    kind=Kind.LOAD,
                    status=Status.BUG,
                    rows_differ_by=difference,
                    details=f"numerics are said to be exact, but logits of passes of 1 and of {_NOISE_ROWS} rows differ",
                )
            )
            self.proof.tally.all.count(Status.BUG)

    def _some_requests(self) -> list[CaseRequest]:
        cases = self._options.cases or list(islice(self._case_maker.cases(), 2 * _MOST_REQUESTS))
        return [one for case in cases for one in case.requests]

    def _texts_for_transformers(self, engine_under_test: EngineUnderTest) -> list[OutputRows]:
        """Return rows of a few outputs; none where transformers cannot run the model."""
        is_off = self._given_cases or not self._options.compares_transformers
        reason = "it was switched off" if is_off else reason_not_comparable(self._directory, self._engine)
        if reason is not None:
            self.proof.transformers = TransformersComparison("not_compared", reason)
            return []
        return decode_with_rows(engine_under_test, [one.prompt_token_ids for one in self._some_requests()])


def _measure_difference(network: Network, cache: KVCache, texts: Sequence[Sequence[int]]) -> float:
    """Largest |difference| of logits between passes of 1 and of `_NOISE_ROWS` rows over the same texts; 0 where rows have the same bits.

    Args:
        cache: the network's; nothing else runs in it.
        texts: token ids, none of them empty; short ones are repeated.
    """
    worst = 0.0
    for given in texts:
        text = ([*given] * -(-_NOISE_LENGTH // len(given)))[:_NOISE_LENGTH]
        single, several = (_logits_of(network, cache, text, count) for count in (1, _NOISE_ROWS))
        worst = max([worst, *(max_abs_difference(one, other) for one, other in zip(single, several, strict=True))])
    return worst


def _logits_of(network: Network, cache: KVCache, text: Sequence[int], count: int) -> list[FloatArray]:
    """Return the logits of the rows after the prefilled ones, `count` rows a pass."""
    sequence = cache.new_sequence()
    rows: list[FloatArray] = []
    try:
        for first in (0, *range(_NOISE_PREFILLED, _NOISE_LENGTH, count)):
            tokens = text[first : first + count] if first else text[:_NOISE_PREFILLED]
            plan = cache.reserve_rows(sequence, range(-1, len(tokens) - 1), 1 if first else len(tokens))
            rows.extend(np.array(network.forward(*assemble_pass([plan], [tokens], [range(len(tokens))])).logits))
            cache.keep_path(sequence, len(tokens) - 1)
    finally:
        cache.release_sequence(sequence)
    return rows[_NOISE_PREFILLED:]


def _prompts(options: ProofOptions, input_processor: InputProcessor) -> PromptSource:
    longest = input_processor.max_model_len - MOST_TOKENS
    if input_processor.max_model_len < _LEAST_CONTEXT:
        raise ConfigError(f"max_model_len is {input_processor.max_model_len}: prompts and outputs take {_LEAST_CONTEXT}; raise it")
    if options.prompts is None:
        return SamplePrompts(input_processor, options.seed, longest=longest)
    return given_prompts(options.prompts, input_processor, longest=longest)
