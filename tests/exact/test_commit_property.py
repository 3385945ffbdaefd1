"""Steps that keep blocks of tokens end a request where steps of one token end it, with the same text, counts and state.

The steps are real ones, on a target whose logits are written down: at every position one token stands out, and a second one that takes
its place where it is banned. What a request must be like at its end is also said by definition, from all its tokens at once.
"""

from codecs import utf_8_decode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import write_byte_fallback_tokenizer, write_byte_level_tokenizer
from harness.written_target import MAX_DEPTH, NUM_POSITIONS, BlockDrafter, WrittenTarget
from paceline import SamplingParams
from paceline.engine.input_processor import InputProcessor
from paceline.engine.stop_matcher import StopStringMatcher
from paceline.kv_cache.cache import KVCache
from paceline.outputs import RequestOutput
from paceline.runtimes.base import FloatArray
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation import commit as commit_module
from paceline.speculation import step as step_module
from paceline.speculation.commit import FinishCheck
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.request import Request, TokenOrigin
from paceline.speculation.speculator import Speculator
from paceline.speculation.step import step
from paceline.tokenizer.tokenizer import Tokenizer

LETTERS = ("a", "b", "ab", "aab", " the", "é", "你", "😀", "👩‍🚀", "t", "\n")  # of several tokens, and of several bytes a character


@dataclass(frozen=True)
class Case:
    """A prompt, the target's token at every position, and what ends the request."""

    prompt: list[int]
    script: list[int]  # by position, the prompt's included
    second: list[int]
    params: SamplingParams
    is_streamed: bool
    max_model_len: int
    eos_ids: tuple[int, ...]
    vocab_size: int
    seed: int

    def table(self) -> FloatArray:
        table = np.random.default_rng(self.seed).normal(0.0, 1.0, (NUM_POSITIONS, self.vocab_size)).astype(np.float32)
        positions = np.arange(NUM_POSITIONS - 1)
        table[positions, self.second[1:]] += 9.0
        table[positions, self.script[1:]] += 15.0
        return table


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    writers = {"bytes": write_byte_level_tokenizer, "fallback": write_byte_fallback_tokenizer}
    return {name: Tokenizer.open(write(Path(folder / name))) for name, write in writers.items()}


def random_case(tokenizer: Tokenizer, random: np.random.Generator) -> Case:
    """Texts of few letters, so that stop strings overlap, begin and break off; ends at every place."""
    vocab_size = tokenizer.vocab_size
    eos, stop_id = min(tokenizer.special_token_ids), int(random.integers(vocab_size))

    def text(count: int) -> str:
        return "".join(random.choice(LETTERS[: int(random.choice([3, 6, len(LETTERS)]))], count))

    def tokens() -> list[int]:
        ids = tokenizer.encode(text(NUM_POSITIONS), add_special_tokens=False)
        noise = random.choice([eos, stop_id, *random.integers(0, vocab_size, 2)], len(ids))
        kept = np.where(random.random(len(ids)) < random.choice([0.0, 0.03, 0.15]), noise, ids).tolist()
        return (kept * NUM_POSITIONS)[:NUM_POSITIONS]

    script, second = tokens(), tokens()
    prompt = random.integers(0, vocab_size, int(random.integers(1, 6))).tolist()
    whole = tokenizer.decode(script[len(prompt) :])
    at = random.integers(0, max(1, len(whole) // 2), 3)
    stops = [whole[place : place + int(random.integers(1, 5))] for place in at] + [text(2), text(1)]
    max_tokens = int(random.integers(1, 26))
    extra: list[dict[str, Any]] = [
        {}, {}, {"frequency_penalty": 0.3}, {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 3}, {"bad_words": [script[5:7]]},
        {"temperature": 1.0}, {"temperature": 4.0, "top_p": 0.95, "presence_penalty": 1.0},
    ]  # fmt: skip
    params = SamplingParams(
        **extra[int(random.integers(len(extra)))],
        seed=int(random.integers(1 << 30)),
        max_tokens=max_tokens,
        min_tokens=int(random.choice([0, 0, random.integers(0, max_tokens + 1)])),
        stop=[stop for stop in stops if stop and random.random() < 0.2],
        stop_token_ids=[stop_id] if random.random() < 0.4 else [],
        include_stop=bool(random.integers(2)),
        ignore_eos=bool(random.integers(2)),
    )
    max_model_len = len(prompt) + int(random.integers(1, 26)) if random.random() < 0.3 else NUM_POSITIONS
    is_streamed = bool(random.integers(2))
    return Case(prompt, script, second, params, is_streamed, max_model_len, (eos,), vocab_size, int(random.integers(1 << 30)))


@dataclass
class Ran:
    """A request at its end."""

    request: Request
    output: RequestOutput
    streamed: str
    num_blocks: int


def run(case: Case, tokenizer: Tokenizer, target: WrittenTarget, cache: KVCache, drafter: Drafter | None) -> Ran:
    """The steps of one request."""
    input_processor = InputProcessor(tokenizer, case.vocab_size, case.max_model_len, case.eos_ids)
    request = input_processor.make_request(case.prompt, case.params, is_streamed=case.is_streamed)
    request.cached_sequence = cache.new_sequence()
    speculator = Speculator(
        [] if drafter is None else [drafter],
        FixedDraftLength(MAX_DEPTH, max_rows=2 * MAX_DEPTH),
        vocab_size=case.vocab_size,
    )
    target.table = case.table()
    streamed, num_blocks, seen = "", 0, 0
    while not request.is_finished:
        step([request], [request.num_next_tokens(3)], target, cache, speculator)
        streamed += input_processor.make_chunk(request, seen, None).text
        num_blocks += request.num_output_tokens > seen
        seen = request.num_output_tokens
        if request.num_output_tokens and not request.is_finished:
            assert request.cached_sequence.committed_len == len(request.token_ids) - 1
    kept_last = request.origins[-1] is TokenOrigin.ACCEPTED  # by verification that continued after the end: its row ran
    assert request.cached_sequence.committed_len == len(request.token_ids) - (not kept_last)
    assert request.error is None, request.error
    output = input_processor.make_output(request, numerics="exact", drafter="none")
    cache.release_sequence(request.cached_sequence)
    cache.check_consistency()
    return Ran(request, output, streamed + input_processor.make_chunk(request, seen, None).text, num_blocks)


def assert_as_defined(case: Case, ran: Ran, tokenizer: Tokenizer) -> None:
    """The request ended with the first token that ends it, and its text is that of its tokens, up to the stop."""
    params, ids = case.params, ran.output.token_ids
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else case.eos_ids)}
    limit = min(params.max_tokens, case.max_model_len - len(case.prompt))
    for count in range(1, len(ids) + 1):
        is_end, is_full = ids[count - 1] in ends, count == limit
        shown = ids[: count - 1] if is_end and not params.include_stop else ids[:count]
        text = tokenizer.decode(shown)
        if not (is_end or is_full):
            text = settled(text, shown, tokenizer)
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in params.stop if stop in text]
        assert count > params.min_tokens or ids[count - 1] not in {*params.stop_token_ids, *case.eos_ids}
        assert (is_end or is_full or bool(found)) == (count == len(ids))
    reason = "stop" if is_end or found else "length"
    assert ran.output.finish_reason == reason
    if found:
        text = text[: min(found)[0] if params.include_stop else min(found)[1]]
    assert ran.output.text == text
    assert ran.output.usage.completion_tokens == len(ids) == len(ran.request.origins)


def settled(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Without what later tokens may still change: the last character, or the bytes of it that are there."""
    if tokenizer.has_byte_pieces:
        pieces = [tokenizer.piece(token) for token in ids if token not in tokenizer.special_token_ids]
        run = list(takewhile(lambda piece: piece.startswith("<0x"), reversed(pieces)))
        tail = bytes(int(piece[3:5], 16) for piece in reversed(run))
        held = tail.decode("utf-8", "surrogateescape"), utf_8_decode(tail, "surrogateescape", False)[0]
        return text[: len(text) - (len(held[0]) - len(held[1]))]
    return text[:-1] if text.endswith("\N{REPLACEMENT CHARACTER}") else text


def assert_same(case: Case, blocks: Ran, ones: Ran, *, walks_on: bool) -> None:
    """Everything that is left of a request, but for how its tokens came.

    Args:
        walks_on: verification continues after the end, so that only commit cuts.
    """
    for name in ("token_ids", "text", "finish_reason", "usage", "seed", "logprobs"):
        assert getattr(blocks.output, name) == getattr(ones.output, name), name
    if case.is_streamed:
        assert blocks.streamed == ones.streamed == ones.output.text
    stats, request = blocks.request.stats, blocks.request
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_bonus_tokens == blocks.output.usage.completion_tokens
    assert sum(stats.num_accepted_tokens_by_position) == stats.num_accepted_tokens == request.origins.count(TokenOrigin.ACCEPTED)
    assert sum(stats.num_draft_tokens_by_position) == stats.num_draft_tokens
    assert all(
        kept <= drafted for kept, drafted in zip(stats.num_accepted_tokens_by_position, stats.num_draft_tokens_by_position, strict=True)
    )
    assert stats.steps == blocks.num_blocks
    assert stats.num_bonus_tokens == stats.steps or (walks_on and stats.num_bonus_tokens == stats.steps - 1), (
        "the token that ends a walk is the target's own"
    )
    assert (ones.request.stats.num_accepted_tokens, ones.request.stats.steps) == (0, len(ones.output.token_ids))
    row = np.random.default_rng(case.seed).normal(0.0, 3.0, case.vocab_size).astype(np.float32)
    fresh = LogitsProcessor(case.params, case.vocab_size, case.prompt, case.eos_ids)
    for token in ones.output.token_ids:
        fresh.commit(token)
    processors = [blocks.request.processor, ones.request.processor, fresh]
    assert len({processor.num_output_tokens for processor in processors}) == 1
    rows = [processor.process(row, path).scores for processor in processors for path in ((), case.script[:2])]
    assert all(np.array_equal(row, other) for row, other in zip(rows, rows[2:], strict=False))


def compare(tokenizer: Tokenizer, random: np.random.Generator, num_blocks: int, *, walks_on: bool = False) -> Counter[str]:
    """Cases until so many blocks were committed; what was met.

    Args:
        walks_on: as in `assert_same`.
    """
    met: Counter[str] = Counter()
    target = WrittenTarget()
    cache = target.new_cache(60)
    while met["blocks"] < num_blocks:
        case = random_case(tokenizer, random)
        ones = run(case, tokenizer, target, cache, None)
        assert_as_defined(case, ones, tokenizer)
        text = [*ones.request.token_ids, *case.script[len(ones.request.token_ids) :]]
        drafter = BlockDrafter(text, case.vocab_size, random)
        blocks = run(case, tokenizer, target, cache, drafter)
        assert_same(case, blocks, ones, walks_on=walks_on)
        met["blocks"] += blocks.num_blocks
        met["tokens"] += len(ones.output.token_ids)
        met[how_it_ended(case, ones)] += 1
        met["ended within a block"] += ones.output.finish_reason == "stop" and drafter.num_drafted > len(ones.request.token_ids)
        met["blocks of several"] += sum(blocks.request.stats.num_accepted_tokens_by_position[:1])
    return met


def how_it_ended(case: Case, ran: Ran) -> str:
    last = ran.output.token_ids[-1]
    if ran.output.finish_reason == "length":
        return "context" if len(ran.output.token_ids) < case.params.max_tokens else "max_tokens"
    if last in case.params.stop_token_ids:
        return "stop id"
    return "eos" if last in case.eos_ids and not case.params.ignore_eos else "stop string"


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_request_ends_at_the_same_token_with_single_and_multi_token_steps(
    kind: str, tokenizers: dict[str, Tokenizer], seed: int, large_counts: bool, tally: "Counter[str]"
) -> None:
    num_blocks = 50_000 if large_counts else 1_000
    met = compare(tokenizers[kind], np.random.default_rng(seed), num_blocks)
    for way in ("context", "max_tokens", "stop id", "eos", "stop string"):
        assert met[way] > num_blocks / 200, met
    assert met["ended within a block"] > num_blocks / 200, met
    assert met["blocks of several"] > num_blocks / 4, met
    tally["accepted blocks compared with single tokens"] += met["blocks"]


@pytest.fixture
def walks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification that continues after the end, as far as drafts are right."""
    monkeypatch.setattr(FinishCheck, "finishes_with", lambda self, token_id: False)


def compare_all(tokenizers: dict[str, Tokenizer], seed: int, num_blocks: int) -> None:
    for tokenizer in tokenizers.values():
        compare(tokenizer, np.random.default_rng(seed), num_blocks, walks_on=True)


@pytest.mark.usefixtures("walks_on")
def test_commit_ends_a_request_within_any_accepted_path(tokenizers: dict[str, Tokenizer], seed: int, large_counts: bool) -> None:
    compare_all(tokenizers, seed, 500 if large_counts else 200)


# Planted faults: each must make a comparison fail.


@pytest.mark.usefixtures("walks_on")
def test_fault_of_verification_past_the_end_is_found(tokenizers: dict[str, Tokenizer], seed: int) -> None:
    with pytest.raises(AssertionError):
        compare(tokenizers["bytes"], np.random.default_rng(seed), 700)


def keep_tokens_after_the_end(patch: pytest.MonkeyPatch) -> None:
    real = commit_module.commit

    def goes_on(request: Request, token_ids: Sequence[int], num_accepted: int, **options: Any) -> int:
        count = real(request, token_ids, num_accepted, **options)
        request.token_ids.extend(token_ids[count:])
        return count

    patch.setattr(step_module, "commit", goes_on)


def let_the_processor_read_past_the_end(patch: pytest.MonkeyPatch) -> None:
    real = commit_module.commit

    def tells_all(request: Request, token_ids: Sequence[int], num_accepted: int, **options: Any) -> int:
        count = real(request, token_ids, num_accepted, **options)
        for token in token_ids[count:]:
            request.processor.commit(token)
        return count

    patch.setattr(step_module, "commit", tells_all)


def count_statistics_before_the_stop(patch: pytest.MonkeyPatch) -> None:
    """Tokens are counted as the walk kept them, not as the stop left them."""
    real = commit_module.commit
    patch.setattr(
        step_module, "commit", lambda request, token_ids, *args, **options: (real(request, token_ids, *args, **options), len(token_ids))[1]
    )


def check_stop_strings_once_a_step(patch: pytest.MonkeyPatch) -> None:
    """A stop that spans two blocks is missed, and within one it is found only at the block's end."""
    real_commit, real_push = commit_module.commit, StopStringMatcher.push

    def commit(request: Request, token_ids: Sequence[int], num_accepted: int, **options: Any) -> int:
        is_last = iter([False] * (len(token_ids) - 1) + [True] * 9)
        with pytest.MonkeyPatch.context() as inner:
            late: list[int] = []

            def push(self: StopStringMatcher, token_id: int) -> bool:
                late.append(token_id)
                return any(real_push(self, token) for token in late) if next(is_last) else False

            inner.setattr(StopStringMatcher, "push", push)
            return real_commit(request, token_ids, num_accepted, **options)

    patch.setattr(step_module, "commit", commit)


def count_min_tokens_without_the_draft_path(patch: pytest.MonkeyPatch) -> None:
    real = LogitsProcessor.edit_logits

    def count(self: LogitsProcessor, logits: FloatArray, path: Sequence[int] = ()) -> Any:
        num_uncounted = len(path) if self._min_tokens else 0
        self.num_output_tokens -= num_uncounted
        try:
            return real(self, logits, path)
        finally:
            self.num_output_tokens += num_uncounted

    patch.setattr(LogitsProcessor, "edit_logits", count)


def check_max_tokens_once_a_step(patch: pytest.MonkeyPatch) -> None:
    limited, real_reason, real_commit = [False], commit_module.finish_reason, commit_module.commit

    def reason(request: Request, path: Sequence[int], stop_matcher: StopStringMatcher | None) -> Any:
        names = ("token_ids", "params", "end_token_ids", "processor")
        full = SimpleNamespace(max_len=len(request.token_ids) + 1, **{name: getattr(request, name) for name in names})
        return real_reason(full if limited[0] else request, path, stop_matcher)  # type: ignore[arg-type]

    def commit(request: Request, token_ids: Sequence[int], *args: Any, **options: Any) -> int:
        limited[0] = len(token_ids) > 1
        return real_commit(request, token_ids, *args, **options)

    patch.setattr(Request, "limit_draft", lambda self, max_rows, max_depth: (max_rows, max_depth))
    patch.setattr(commit_module, "finish_reason", reason)
    patch.setattr(step_module, "commit", commit)


FAULTS = (
    keep_tokens_after_the_end,
    let_the_processor_read_past_the_end,
    count_statistics_before_the_stop,
    check_stop_strings_once_a_step,
    count_min_tokens_without_the_draft_path,
    check_max_tokens_once_a_step,
)


@pytest.mark.usefixtures("walks_on")
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_commit_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], tokenizers: dict[str, Tokenizer], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare_all(tokenizers, seed, 700)
