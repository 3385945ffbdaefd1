"""Does a row's result depend on what else is in the pass? Tested on the real graph at load, rather than assumed.

Reference: two sequences decoded alone, one row a pass. Then the same tokens in passes of several rows and of both sequences.
Exact means that every row's logits are bit-equal. What holds is tried from the cheapest padding on and remembered.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import numpy as np

from paceline.errors import CheckpointError
from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.models.config import ModelConfig
from paceline.runtimes.base import Capabilities, FloatArray, ForwardBatch, ForwardOutput, Numerics, assemble
from paceline.runtimes.facts import MeasuredFacts, fact_key


class RowPadding(Enum):
    """How a lone row is given company, cheapest first."""

    ATTENTION = "attention"  # repeated in front of the attention op alone
    WHOLE_ROW = "whole-row"  # repeated through the whole network
    NONE = "none"


class PaddedRuntime(Protocol):
    """A runtime that can repeat lone rows."""

    config: ModelConfig
    capabilities: Capabilities
    collect_layers: tuple[int, ...]
    version: str

    def set_numerics(self, padding: RowPadding, numerics: Numerics) -> None: ...

    def new_cache(self, num_blocks: int) -> KVCache: ...

    def forward(self, batch: ForwardBatch) -> ForwardOutput: ...


# Rows of the two sequences per pass: decode rows, drafts and prompt chunks, alone and together, across a block border.
_LENGTHS = (38, 9)
_PASSES = ((0, 5), (17, 0), (1, 1), (14, 1), (1, 2), (5, 0))

_INEXACT = "inexact"
_ANSWERS = (*(padding.value for padding in RowPadding), _INEXACT)


def settle_numerics(
    runtime: PaddedRuntime, wanted: Numerics, facts: MeasuredFacts, *, canonical: Callable[[], PaddedRuntime] | None = None
) -> str | None:
    """Set the padding that makes `runtime` exact, or say in one line that nothing does.

    Args:
        runtime: as it will be used; its cache is replaced.
        wanted: `FAST` needs no test.
        facts: remembers the answer by graph, library version, processor and threads.
        canonical: builds the same network without collected boundaries; its logits must be the same bits.

    Returns:
        a notice for the user, or None when the wish is met.

    Raises:
        CheckpointError: the network computes nothing but NaN.
    """
    if wanted is Numerics.FAST:
        runtime.set_numerics(RowPadding.NONE, Numerics.FAST)
        return None
    key = fact_key("numerics", runtime.config, runtime.capabilities.weight_type, runtime.collect_layers, runtime.version, _LENGTHS, _PASSES)
    answer = facts.get(key)
    if answer not in _ANSWERS:
        padding = find_padding(runtime, canonical)
        answer = padding.value if padding is not None else _INEXACT
        facts.put(key, answer)
    if answer == _INEXACT:
        runtime.set_numerics(RowPadding.NONE, Numerics.FAST)
        return "on this machine a row's bits depend on what else is in the pass: numerics is fast"
    runtime.set_numerics(RowPadding(answer), Numerics.EXACT)
    return None


def find_padding(runtime: PaddedRuntime, canonical: Callable[[], PaddedRuntime] | None = None) -> RowPadding | None:
    """The first padding under which every row of mixed passes equals solo decoding, None when none does."""
    random = np.random.default_rng(0)
    tokens = [random.integers(0, runtime.config.vocab_size, length).tolist() for length in _LENGTHS]
    for padding in RowPadding:
        runtime.set_numerics(padding, Numerics.EXACT)
        solo = [_solo(runtime, ids) for ids in tokens]
        if any(np.isnan(row).all() for rows in solo for row in rows):  # nothing can be learned from it, so nothing is remembered
            raise CheckpointError(
                "the target produced NaN logits when it was tested at load: its weights are damaged or overflow in this precision; "
                "verify the checkpoint's files or load it with a wider dtype"
            )
        if not _equal(solo, _mixed(runtime, tokens)):
            continue
        if canonical is not None:
            plain = canonical()
            plain.set_numerics(padding, Numerics.EXACT)
            if not _equal(solo, [_solo(plain, ids) for ids in tokens]):
                continue
        return padding
    return None


def _equal(left: list[FloatArray], right: list[FloatArray]) -> bool:
    return all(np.array_equal(one.view(np.int32), other.view(np.int32)) for one, other in zip(left, right, strict=True))


def _solo(runtime: PaddedRuntime, token_ids: list[int]) -> FloatArray:
    cache = runtime.new_cache(4)
    sequence = cache.new_sequence()
    rows = [_forward(runtime, cache, [(sequence, [token])])[0] for token in token_ids]
    return np.stack(rows)


def _mixed(runtime: PaddedRuntime, token_ids: list[list[int]]) -> list[FloatArray]:
    cache = runtime.new_cache(8)
    sequences = [cache.new_sequence() for _ in token_ids]
    rows: list[list[FloatArray]] = [[] for _ in token_ids]
    for counts in _PASSES:
        work: list[tuple[int, list[int]]] = []
        for index, count in enumerate(counts):
            start = sequences[index].committed_len
            if count:
                work.append((index, token_ids[index][start : start + count]))
        logits = iter(_forward(runtime, cache, [(sequences[index], tokens) for index, tokens in work]))
        for index, tokens in work:
            rows[index].extend(next(logits) for _ in tokens)
    return [np.stack(own) for own in rows]


def _forward(runtime: PaddedRuntime, cache: KVCache, work: list[tuple[CachedSequence, list[int]]]) -> FloatArray:
    plans = [cache.reserve(sequence, range(-1, len(tokens) - 1)) for sequence, tokens in work]
    tokens = [ids for _, ids in work]
    logits = runtime.forward(assemble(plans, tokens, [range(len(ids)) for ids in tokens])).logits.copy()
    for sequence, ids in work:
        cache.keep_path(sequence, len(ids) - 1)
    return logits
