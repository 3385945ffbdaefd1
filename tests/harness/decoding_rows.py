"""Requests without a model, and the rows that they bring to a forward pass."""

from collections.abc import Sequence
from typing import Any

from paceline.kv_cache.cache import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows

VOCAB_SIZE = 100


def make_request(token_ids: list[int], *, num_output: int = 1, max_len: int = 4096, temperature: float = 0.0) -> Request:
    """A request whose last `num_output` tokens are output, all but the last token cached."""
    params = SamplingParams(temperature=temperature)
    num_prompt = len(token_ids) - num_output
    processor = LogitsProcessor(params, VOCAB_SIZE, token_ids[:num_prompt])
    request = Request(token_ids, num_prompt, params, processor, CachedSequence(), seed=0, sample_index=0, max_len=max_len)
    request.cached_sequence.committed_len = len(token_ids) - 1
    return request


def text_request(prompt: Sequence[int], output: Sequence[int] = (), **fields: Any) -> Request:
    """A request with a prompt and an output, for drafters that read nothing but text."""
    params = SamplingParams()
    processor = LogitsProcessor(params, 100_000, prompt)
    ids = [*prompt, *output]
    return Request(ids, len(prompt), params, processor, CachedSequence(), seed=0, sample_index=0, max_len=1_000_000, **fields)


def make_rows(*, num_cached: int = 10, num_new_tokens: int = 1, length: int | None = None) -> RequestRows:
    """The rows of a request with `num_cached` cached tokens."""
    request = make_request([1] * (num_cached + num_new_tokens if length is None else length))
    request.cached_sequence.committed_len = num_cached
    return RequestRows.without_draft(request, num_new_tokens)
