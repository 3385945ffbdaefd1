"""Test at load whether a network is exact: whether a row's logits have the same bits whatever other rows are in its pass.

Two sequences are decoded each alone, one row in a pass, and then in passes with several rows of one or both. All logits are compared.
"""

from collections.abc import Sequence

import numpy as np

from paceline.errors import CheckpointError
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.runtimes.base import FloatArray, Network, Numerics, assemble_pass
from paceline.runtimes.profile_cache import ProfileCache, profile_key

_LENGTHS = (38, 9)
"""Lengths of the two sequences; one ends in its second cache block."""
_PASS_ROWS = ((0, 5), (17, 0), (1, 1), (14, 1), (1, 2), (5, 0))
"""Rows of each sequence in the passes: one row as in decoding, a few as in verification, many as in prefill."""


def measure_numerics(network: Network, profile: ProfileCache, collect_layers: Sequence[int] = ()) -> Numerics:
    """Return EXACT if all logits of mixed passes have the same bits as those of passes with one row, else FAST.

    Args:
        network: the network to test; its cache is replaced.
        profile: where the result is stored, by network, kernels, processor and threads.
        collect_layers: layer boundaries at which the network returns hidden states; a part of what identifies it.

    Raises:
        CheckpointError: all logits of a row are NaN.
    """
    key = profile_key(
        "numerics", network.config, network.capabilities.weight_type, tuple(collect_layers), network.version, _LENGTHS, _PASS_ROWS
    )
    stored = profile.get(key)
    if stored not in [one.value for one in Numerics]:
        stored = (Numerics.EXACT if _is_exact(network) else Numerics.FAST).value
        profile.put(key, stored)
    return Numerics(stored)


def _is_exact(network: Network) -> bool:
    random = np.random.default_rng(0)
    tokens = [random.integers(0, network.config.vocab_size, length).tolist() for length in _LENGTHS]
    alone = [row for ids in tokens for row in _decode(network, [ids], [(1,)] * len(ids))]
    # an all-NaN row is an error of the checkpoint, so no result is stored
    if any(np.isnan(row).all() for row in alone):
        raise CheckpointError(
            "the target produced NaN logits when it was tested at load: its weights are damaged or overflow in this precision; "
            "verify the checkpoint's files or load it with a wider dtype"
        )
    mixed = _decode(network, tokens, _PASS_ROWS)
    return all(np.array_equal(one.view(np.int32), other.view(np.int32)) for one, other in zip(alone, mixed, strict=True))


def _decode(network: Network, token_ids: list[list[int]], pass_rows: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Return the logits of all rows, sequence by sequence. `pass_rows`: rows of each sequence in each pass."""
    cache = network.new_cache(4 * len(token_ids))
    sequences = [cache.new_sequence() for _ in token_ids]
    rows: list[list[FloatArray]] = [[] for _ in token_ids]
    for counts in pass_rows:
        work: list[tuple[int, list[int]]] = []
        for index, count in enumerate(counts):
            start = sequences[index].committed_len
            if count:
                work.append((index, token_ids[index][start : start + count]))
        logits = iter(_forward(network, cache, [(sequences[index], tokens) for index, tokens in work]))
        for index, tokens in work:
            rows[index].extend(next(logits) for _ in tokens)
    return [row for own in rows for row in own]


def _forward(network: Network, cache: KVCache, work: list[tuple[CachedSequence, list[int]]]) -> FloatArray:
    plans = [cache.reserve_rows(sequence, range(-1, len(tokens) - 1)) for sequence, tokens in work]
    tokens = [ids for _, ids in work]
    logits = network.forward(*assemble_pass(plans, tokens, [range(len(ids)) for ids in tokens])).logits.copy()
    for sequence, ids in work:
        cache.keep_path(sequence, len(ids) - 1)
    return logits
