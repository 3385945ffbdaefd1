"""Test at load whether a network is exact: whether a row's logits have the same bits whatever other rows are in its pass.

Two sequences are decoded in passes of one row, then in passes with several rows of one or both sequences. All logits are compared.
"""

from collections.abc import Sequence

import numpy as np

from paceline.errors import CheckpointError
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.runtimes.base import FloatArray, Network, Numerics, assemble_pass
from paceline.runtimes.profile_cache import ProfileCache, profile_key

_TEST_LENS = (38, 9)
"""Tokens of the two test sequences; the longer one ends in its second cache block."""
_TEST_ROWS = ((0, 5), (17, 0), (1, 1), (14, 1), (1, 2), (5, 0))
"""Rows of the first and the second sequence in each pass: one row as in decoding, a few as in verification, many as in prefill."""


def measure_numerics(network: Network, profiles: ProfileCache, collect_layers: Sequence[int] = ()) -> Numerics:
    """Return EXACT if the logits of passes with several rows have the same bits as those of passes with one row, else FAST.

    Args:
        network: the network to test; its cache is replaced.
        profiles: where the result is stored, by network, kernels, processor and threads.
        collect_layers: layer boundaries at which the network returns hidden states; the result is stored separately for each choice.

    Raises:
        CheckpointError: all logits of a row are NaN.
    """
    key = profile_key(
        "numerics", network.config, network.capabilities.weight_type, tuple(collect_layers), network.execution_key, _TEST_LENS, _TEST_ROWS
    )
    stored = profiles.get(key)
    if stored not in [one.value for one in Numerics]:
        stored = (Numerics.EXACT if _is_exact(network) else Numerics.FAST).value
        profiles.put(key, stored)
    return Numerics(stored)


def _is_exact(network: Network) -> bool:
    random = np.random.default_rng(0)
    tokens = [random.integers(0, network.config.vocab_size, length).tolist() for length in _TEST_LENS]
    single_row_logits = [row for ids in tokens for row in _decode(network, [ids], [(1,)] * len(ids))]
    # logits of only NaN mean that the checkpoint is damaged, so loading fails and no result of this test is stored
    if any(np.isnan(row).all() for row in single_row_logits):
        raise CheckpointError(
            "the target produced NaN logits when it was tested at load: its weights are damaged or overflow in this precision; "
            "verify the checkpoint's files or load it with a wider dtype"
        )
    mixed_logits = _decode(network, tokens, _TEST_ROWS)
    return all(np.array_equal(one.view(np.int32), other.view(np.int32)) for one, other in zip(single_row_logits, mixed_logits, strict=True))


def _decode(network: Network, token_ids: list[list[int]], rows_per_pass: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Return the logits of all rows, sequence by sequence. `rows_per_pass`: for each pass, how many rows each sequence has in it."""
    cache = network.new_cache(4 * len(token_ids))
    sequences = [cache.new_sequence() for _ in token_ids]
    logits_of_sequence: list[list[FloatArray]] = [[] for _ in token_ids]
    for counts in rows_per_pass:
        scheduled: list[tuple[int, list[int]]] = []
        for index, count in enumerate(counts):
            start = sequences[index].committed_len
            if count:
                scheduled.append((index, token_ids[index][start : start + count]))
        logits = iter(_forward(network, cache, [(sequences[index], tokens) for index, tokens in scheduled]))
        for index, tokens in scheduled:
            logits_of_sequence[index].extend(next(logits) for _ in tokens)
    return [row for logits in logits_of_sequence for row in logits]


def _forward(network: Network, cache: KVCache, scheduled: list[tuple[CachedSequence, list[int]]]) -> FloatArray:
    plans = [cache.reserve_rows(sequence, range(-1, len(tokens) - 1)) for sequence, tokens in scheduled]
    tokens = [ids for _, ids in scheduled]
    logits = network.forward(*assemble_pass(plans, tokens, [range(len(ids)) for ids in tokens])).logits.copy()
    for sequence, ids in scheduled:
        cache.keep_path(sequence, len(ids) - 1)
    return logits
