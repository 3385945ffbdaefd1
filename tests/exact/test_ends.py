"""The output or error of a request does not depend on drafts, wherever and however it ends.

Grammars, stop texts, bans, repeated n-grams, minimum lengths and processors that raise are drawn at random, for models with and without
an end token. Plainly decoded, each request gives a text, or some tokens and an error. With drafts that are mostly right it must give the
same: rows after its end are none that plain decoding reaches, so errors in them must not matter.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import write_byte_level_tokenizer
from harness.written_target import MAX_DEPTH, NUM_POSITIONS, BlockDrafter, DrawingDrafter, WrittenTarget
from paceline import Grammar, RequestError, SamplingParams
from paceline.engine.input_processor import InputProcessor
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import FloatArray
from paceline.speculation.commit import FinishCheck
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.rejection import Acceptance
from paceline.speculation.speculator import Speculator
from paceline.speculation.step import step
from paceline.tokenizer.tokenizer import Tokenizer

pytest.importorskip("llguidance")


class Raising:
    """A processor that fails after some texts."""

    def __init__(self, length: int, kind: int) -> None:
        self._length, self._kind = length, kind

    def __call__(self, token_ids: Sequence[int], scores: Any) -> Any:
        if len(token_ids) < self._length:
            return scores
        if self._kind == 0:
            raise ValueError("behind the end, or not")
        return scores * np.float32(np.nan) if self._kind == 1 else np.full_like(scores, -np.inf)


@dataclass(frozen=True)
class Case:
    """A prompt, the target's token at every position, and the request's options."""

    prompt: list[int]
    script: list[int]
    params: SamplingParams
    eos_ids: tuple[int, ...]
    seed: int

    def table(self, vocab_size: int) -> FloatArray:
        table = np.random.default_rng(self.seed).normal(0.0, 1.0, (NUM_POSITIONS, vocab_size)).astype(np.float32)
        table[np.arange(NUM_POSITIONS - 1), self.script[1:]] += 12.0
        return table


@dataclass(frozen=True)
class Outcome:
    """What is left of a request."""

    token_ids: list[int]
    finish_reason: str
    text: str
    logprobs: object
    error: str | None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(write_byte_level_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="module")
def makers(tokenizer: Tokenizer) -> dict[tuple[int, ...], InputProcessor]:
    """Of models with and without an end token; what they compiled is kept."""
    eos = min(tokenizer.special_token_ids)
    return {ends: InputProcessor(tokenizer, tokenizer.vocab_size, NUM_POSITIONS, ends) for ends in ((), (eos,))}


def random_case(tokenizer: Tokenizer, random: np.random.Generator) -> Case:
    eos = min(tokenizer.special_token_ids)
    words = ["ab", "abc", "the", "b", "cab"]
    whole = "".join(random.choice(words, 20))[: NUM_POSITIONS - 6]
    unit = str(random.choice(words))
    grammars = [
        None, None, Grammar.regex(f"({unit}){{1,{int(random.integers(1, 5))}}}"), Grammar.regex(unit * int(random.integers(1, 5))),
        Grammar.choice([whole[: int(random.integers(1, 14))], unit * 3]), Grammar.regex("[a-c]{2,9}"),
    ]  # fmt: skip
    grammar = grammars[int(random.integers(len(grammars)))]
    said = unit * 20 if grammar is not None and random.random() < 0.7 else whole
    prompt = tokenizer.encode("abca"[: int(random.integers(1, 5))], add_special_tokens=False)
    script = ([*prompt, *tokenizer.encode(said, add_special_tokens=False)] * NUM_POSITIONS)[:NUM_POSITIONS]
    if random.random() < 0.3:
        script[int(random.integers(len(prompt), NUM_POSITIONS))] = eos
    max_tokens = int(random.integers(1, 24))
    at = int(random.integers(0, 10))
    processors = [Raising(len(prompt) + int(random.integers(0, 14)), int(random.integers(3)))] if random.random() < 0.35 else []
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=int(random.integers(0, max_tokens + 1)) if random.random() < 0.3 else 0,
        temperature=float(random.choice([0.0, 1.0, 1.0])),
        seed=int(random.integers(1 << 30)),
        stop=[said[at : at + int(random.integers(1, 6))]] if random.random() < 0.4 else [],
        include_stop=bool(random.integers(2)),
        ignore_eos=random.random() < 0.2,
        banned_token_ids=[script[int(random.integers(len(script)))]] if random.random() < 0.15 else [],
        no_repeat_ngram_size=int(random.integers(1, 4)) if random.random() < 0.25 else 0,
        bad_words=[script[5:7]] if random.random() < 0.15 else [],
        processors=processors,
        logprobs=2 if random.random() < 0.2 else None,
        logprobs_mode=str(random.choice(["raw", "processed"])),
        grammar=grammar,
    )
    return Case(prompt, script, params, () if random.random() < 0.6 else (eos,), int(random.integers(1 << 30)))


def run(
    case: Case, input_processor: InputProcessor, cache: KVCache, target: WrittenTarget, drafter: Drafter | None, rule: Acceptance
) -> Outcome:
    """The steps of one request."""
    request = input_processor.make_request(case.prompt, case.params, is_streamed=case.seed % 2 == 0)
    request.cached_sequence = cache.new_sequence()
    policy = FixedDraftLength(MAX_DEPTH, max_rows=2 * MAX_DEPTH)
    speculator = Speculator([] if drafter is None else [drafter], policy, vocab_size=input_processor.vocab_size, acceptance=rule)
    target.table = case.table(input_processor.vocab_size)
    while not request.is_finished:
        step([request], [request.num_next_tokens(3)], target, cache, speculator)
    output = input_processor.make_output(request, numerics="exact", drafter="none")
    cache.release_sequence(request.cached_sequence)
    cache.check_consistency()
    stats = request.stats
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_bonus_tokens == request.num_output_tokens
    error = None if request.error is None else f"{type(request.error).__name__}: {request.error}"
    return Outcome(output.token_ids, output.finish_reason, output.text, output.logprobs, error)


def assert_plain(case: Case, input_processor: InputProcessor, outcome: Outcome) -> None:
    """A text that rejection chose is one that plain decoding may give: drawn from good rows, up to its end or to the first bad row."""
    request = input_processor.make_request(case.prompt, case.params, is_streamed=False)
    table = case.table(input_processor.vocab_size)
    for count, token in enumerate(outcome.token_ids, 1):
        distribution = request.processor.process(table[len(request.token_ids) - 1])
        assert np.isfinite(_score(distribution, token)), "the token cannot be drawn"
        ended = FinishCheck(request).finishes_with(token)
        assert ended == (outcome.error is None and count == len(outcome.token_ids))
        request.token_ids.append(token)
        request.processor.commit(token)
        if request.stop_matcher is not None:
            request.stop_matcher.push(token)
    if outcome.error is not None:
        with pytest.raises(RequestError) as refusal:
            request.processor.process(table[len(request.token_ids) - 1])
        assert outcome.error == f"RequestError: {refusal.value}"


def _score(distribution: Any, token: int) -> float:
    if distribution.token_ids is None:
        return float(distribution.scores[token])
    at = np.flatnonzero(distribution.token_ids == token)
    return float(distribution.scores[at[0]]) if len(at) else -np.inf


def compare(tokenizer: Tokenizer, makers: dict[tuple[int, ...], InputProcessor], random: np.random.Generator, count: int) -> Counter[str]:
    """Run requests with and without drafts, with both acceptance rules; return which cases occurred."""
    met: Counter[str] = Counter()
    target = WrittenTarget()
    cache = target.new_cache(60)
    while met["requests"] < count:
        case = random_case(tokenizer, random)
        input_processor = makers[case.eos_ids]
        try:
            plain = run(case, input_processor, cache, target, None, Acceptance.MATCH)
        except RequestError:  # the grammar does not compile
            continue
        text = [*case.prompt, *plain.token_ids, *case.script[len(case.prompt) + len(plain.token_ids) :]]
        drafted = run(case, input_processor, cache, target, BlockDrafter(text, input_processor.vocab_size, random), Acceptance.MATCH)
        assert drafted == plain
        drafter = (BlockDrafter if random.random() < 0.3 else DrawingDrafter)(text, input_processor.vocab_size, random)
        rejected = run(case, input_processor, cache, target, drafter, Acceptance.REJECTION)
        if case.params.is_greedy:
            assert rejected == plain
        assert_plain(case, input_processor, rejected)
        met["requests"] += 1
        met["failed" if plain.error is not None else plain.finish_reason] += 1
        met["failed behind tokens"] += plain.error is not None and len(plain.token_ids) > 1
        met["grammars"] += case.params.grammar is not None and plain.error is None
        met["token ids"] += len(plain.token_ids)
        met["raise behind the end"] += plain.error is None and bool(case.params.processors)
    return met


def test_finish_reason_and_output_are_equal_with_and_without_drafts(
    tokenizer: Tokenizer, makers: dict[tuple[int, ...], InputProcessor], seed: int, large_counts: bool, tally: "Counter[str]"
) -> None:
    count = 20_000 if large_counts else 150
    met = compare(tokenizer, makers, np.random.default_rng(seed), count)
    for name in ("stop", "length", "failed", "failed behind tokens", "grammars", "raise behind the end"):
        assert met[name] > count / 30, met
    tally["ends compared with plain decoding's, by both rules"] += met["requests"]


def test_fault_of_verification_that_stops_at_end_tokens_only_is_found(
    tokenizer: Tokenizer, makers: dict[tuple[int, ...], InputProcessor], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: walks look for end tokens only."""
    monkeypatch.setattr(FinishCheck, "finishes_with", lambda self, token_id: token_id in self._request.end_token_ids)
    with pytest.raises(AssertionError):
        compare(tokenizer, makers, np.random.default_rng(seed), 600)


def test_finished_grammar_without_end_token_ends_with_stop(tokenizer: Tokenizer) -> None:
    input_processor = InputProcessor(tokenizer, tokenizer.vocab_size, NUM_POSITIONS, ())
    target, text = WrittenTarget(), "abcabcabcabc"
    script = [*tokenizer.encode("x" + text, add_special_tokens=False), *[1] * NUM_POSITIONS][:NUM_POSITIONS]
    case = Case(script[:1], script, SamplingParams(max_tokens=30, grammar=Grammar.regex(text)), (), 1)
    cache = target.new_cache(60)
    for rule in Acceptance:
        drafter = BlockDrafter([*script[:13], 1, 1, 1], input_processor.vocab_size, np.random.default_rng(1))
        outcome = run(case, input_processor, cache, target, drafter, rule)
        assert (outcome.text, outcome.finish_reason, outcome.error) == (text, "stop", None)
