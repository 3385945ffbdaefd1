"""Tokens in blocks of any size end a request where tokens one by one end it."""

from dataclasses import dataclass

import numpy as np
import pytest

from paceline.engine.text_stop import TextStop
from paceline.kv_cache.cache import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.commit import commit
from paceline.speculation.request import FinishReason, Request, TokenOrigin

PIECES = ("a", "b", "ab", "ba", "", "c", "aa", "~b")  # "~" holds a piece back until the next token
EOS, STOP_TOKEN = 8, 9
VOCAB_SIZE = 10
PROMPT = [3, EOS, 4]  # an end token in the prompt ends nothing


class FakeDetokenizer:
    """PIECES; a piece that begins with "~" becomes final only with the next token."""

    def __init__(self) -> None:
        self._pending = ""

    def push(self, token_id: int) -> str:
        piece, held = self._pending, PIECES[token_id]
        self._pending = held[1:] if held.startswith("~") else ""
        return piece + ("" if self._pending else held)

    def flush(self) -> str:
        piece, self._pending = self._pending, ""
        return piece


@dataclass(frozen=True)
class Case:
    """What to generate and when to end."""

    token_ids: list[int]
    stop: tuple[str, ...]
    include_stop: bool
    end_token_ids: frozenset[int]
    max_tokens: int
    has_text: bool = True

    def request(self) -> Request:
        text_stop = TextStop(FakeDetokenizer(), self.stop, include_stop=self.include_stop) if self.has_text else None
        params = SamplingParams(max_tokens=self.max_tokens, frequency_penalty=0.5)
        return Request(
            list(PROMPT),
            len(PROMPT),
            params,
            LogitsProcessor(params, VOCAB_SIZE, PROMPT),
            CachedSequence(),
            seed=0,
            sample_index=0,
            max_len=len(PROMPT) + self.max_tokens,
            end_token_ids=self.end_token_ids,
            text_stop=text_stop,
        )

    def expected(self) -> tuple[list[int], FinishReason | None, str]:
        """Output ids, finish reason and whole text, from the definition."""
        detokenizer, text, output = FakeDetokenizer(), "", []
        reason = None
        for token in self.token_ids:
            output.append(token)
            if token not in self.end_token_ids:
                text += detokenizer.push(token)
            if token in self.end_token_ids or any(stop in text for stop in self.stop):
                reason = FinishReason.STOP
            elif len(output) == self.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        if not any(stop in text for stop in self.stop):
            text += detokenizer.flush()
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            text = text[: end if self.include_stop else at]
            reason = FinishReason.STOP if reason is not None else None
        return output, reason, text


def _random_case(generator: np.random.Generator) -> Case:
    stops = ["".join("ab"[bit] for bit in generator.integers(0, 2, generator.integers(1, 5))) for _ in range(generator.integers(0, 3))]
    return Case(
        token_ids=generator.choice(VOCAB_SIZE, 14, p=[0.115] * 8 + [0.04] * 2).tolist(),
        stop=tuple("c" + stop if generator.random() < 0.5 else stop + "b" for stop in stops),
        include_stop=bool(generator.integers(2)),
        end_token_ids=frozenset((EOS, STOP_TOKEN)),
        max_tokens=int(generator.integers(1, 18)),
    )


def _commit_in_blocks(request: Request, token_ids: list[int], sizes: list[int]) -> list[int]:
    """Commit blocks whose last token is the bonus until the request ends; returns how many tokens of each block were kept."""
    start, kept = 0, []
    for size in sizes:
        block = token_ids[start : start + size]
        if request.is_finished or not block:
            break
        kept.append(commit(request, block, len(block) - 1, has_draft=size > 1))
        start += size
    return kept


def test_tokens_in_blocks_end_where_tokens_one_by_one_end(seed, large_counts):
    generator = np.random.default_rng(seed)
    reasons = dict.fromkeys([FinishReason.STOP, FinishReason.LENGTH, None], 0)
    for _ in range(100_000 if large_counts else 2_000):
        case = _random_case(generator)
        output, reason, text = case.expected()
        sizes = generator.integers(1, 7, 14).tolist()
        for block_sizes in (sizes, [1] * 14):
            request = case.request()
            kept = _commit_in_blocks(request, case.token_ids, block_sizes)
            assert request.token_ids == PROMPT + output
            assert request.output_token_ids == output
            assert request.finish_reason is reason
            assert sum(kept) == len(output) == len(request.origins) == request.processor.num_output_tokens
            assert text.startswith(request.text_stop.text)
            assert request.text_stop.finish() == text
            assert request.origins == _origins(block_sizes, kept)
        reasons[reason] += 1
    assert min(reasons.values()) > 50, "every way to end must be met"


def _origins(sizes: list[int], kept: list[int]) -> list[TokenOrigin]:
    """Origins of the kept tokens of blocks of 14 tokens in all."""
    origins: list[TokenOrigin] = []
    left = 14
    for size, count in zip(sizes, kept, strict=False):
        last = TokenOrigin.BONUS if size > 1 else TokenOrigin.PLAIN
        origins += [*[TokenOrigin.ACCEPTED] * (min(size, left) - 1), last][:count]
        left -= size
    return origins


def _case(token_ids, *, stop=(), max_tokens=20, has_text=True) -> Case:
    return Case(list(token_ids), stop, False, frozenset((EOS, STOP_TOKEN)), max_tokens, has_text)


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("end", [EOS, STOP_TOKEN])
@pytest.mark.parametrize("has_text", [True, False])
def test_an_end_token_ends_a_block_at_every_offset_and_is_no_text(end, at, has_text):
    token_ids = [0, 5, 0, 5, 0]
    token_ids[at] = end
    request = _case(token_ids, has_text=has_text).request()
    assert commit(request, token_ids, 4, has_draft=True) == at + 1
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids == token_ids[: at + 1]
    if has_text:
        assert request.text_stop.finish() == "acaca"[:at]


@pytest.mark.parametrize("at", range(1, 6))
def test_the_limit_ends_a_block_at_every_offset(at):
    request = _case([0] * 5, max_tokens=at).request()
    assert commit(request, [0] * 5, 4, has_draft=True) == at
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_remaining_tokens == 0


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    for token_ids, stop in (([0, EOS], ()), ([0, 1], ("ab",))):
        request = _case(token_ids, stop=stop, max_tokens=2).request()
        commit(request, token_ids, 0, has_draft=False)
        assert request.finish_reason is FinishReason.STOP


def test_a_request_that_goes_on_has_no_finish_reason():
    request = _case([0, 1]).request()
    assert commit(request, [0, 1], 1, has_draft=True) == 2
    assert not request.is_finished
    assert request.origins == [TokenOrigin.ACCEPTED, TokenOrigin.BONUS]


def test_without_an_end_token_nothing_is_special_about_eos():
    case = _case([EOS, 0])
    request = Case(case.token_ids, (), False, frozenset(), 20, has_text=False).request()
    assert commit(request, [EOS, 0], 1, has_draft=True) == 2
    assert not request.is_finished
