"""Counter-based noise: a pure function of (seed, sample, position, purpose, vocabulary id).

There is no generator state: the noise of a position is the same in every pass, in any order and after any rejected draft. Speculative
decoding therefore samples the same tokens as plain decoding.
"""

from enum import IntEnum
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

BitsArray = NDArray[np.uint32]
KeyArray = NDArray[np.uint64]
IdArray = NDArray[np.integer]

_UINT64_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # odd, 2**64 / golden ratio
_MIX_FACTOR_1 = 0xBF58476D1CE4E5B9
_MIX_FACTOR_2 = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What the noise of a position is used for. Noise for different purposes is independent."""

    TOKEN = 0  # sampling of the target's token, and of draft tokens that should equal it
    ACCEPT = 1  # rejection sampling: whether a draft token is accepted
    RESIDUAL = 2  # rejection sampling: the token after the last accepted one
    DRAFT = 3  # sampling of draft tokens for rejection sampling


@overload
def noise_key(seed: int, sample_index: int, position: int, purpose: Purpose) -> int: ...
@overload
def noise_key(seed: KeyArray, sample_index: KeyArray, position: KeyArray, purpose: Purpose) -> KeyArray: ...
def noise_key(seed: Any, sample_index: Any, position: Any, purpose: Purpose) -> Any:
    """Return the 64-bit key of one position, from which the bits of all vocabulary ids follow.

    Takes Python ints, or uint64 arrays of one shape for many rows at once; both give the same keys. If a single argument
    changes, the key always changes, because for fixed other arguments it is an injective function of this one.
    """
    state = _mix((seed + _GOLDEN_GAMMA) & _UINT64_MASK)
    state = _mix(state ^ (sample_index << 8) ^ int(purpose))
    return _mix(((state ^ position) + _GOLDEN_GAMMA) & _UINT64_MASK)


def _mix(state: Any) -> Any:
    """Apply SplitMix64's finaliser: every input bit flips every output bit with probability close to 1/2.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"; constants: Stafford's variant 13.
    """
    state = ((state ^ (state >> 30)) * _MIX_FACTOR_1) & _UINT64_MASK
    state = ((state ^ (state >> 27)) * _MIX_FACTOR_2) & _UINT64_MASK
    return state ^ (state >> 31)


@lru_cache(maxsize=8)
def _pair_offsets(vocab_size: int) -> KeyArray:
    """Return [ceil(V / 2)] numbers that are added to the key, one for each pair of ids. One 64-bit mix gives the bits of the ids 2i (low
    half) and 2i + 1 (high half)."""
    offsets: KeyArray = np.arange((vocab_size + 1) // 2, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA)
    offsets.flags.writeable = False
    return offsets


def key_bits(keys: KeyArray, token_ids: IdArray | int) -> BitsArray:
    """Return 32 random bits for each vocabulary id.

    Args:
        keys: [..., 1] uint64 from `noise_key`.
        token_ids: ids [..., M], or the vocabulary size V for all ids in order (then M = V).

    Returns:
        [..., M] uint32.
    """
    if isinstance(token_ids, int):
        state: KeyArray = _mix(keys + _pair_offsets(token_ids))
        # Explicitly little-endian, so that the low half belongs to the even id on every machine.
        bits: BitsArray = state.astype("<u8", copy=False).view("<u4")[..., :token_ids]
        return bits
    ids = token_ids.astype(np.uint64)
    state = _mix(keys + (ids >> 1) * np.uint64(_GOLDEN_GAMMA))
    halves: BitsArray = (state >> ((ids & 1) << 5)).astype(np.uint32)
    return halves


def noise_bits(seed: int, sample_index: int, position: int, purpose: Purpose, token_ids: IdArray | int) -> BitsArray:
    """Return 32 random bits for each vocabulary id at one position.

    Args:
        seed: seed of the request, in [0, 2**64).
        sample_index: which of the request's n samples, in [0, 2**32).
        position: index of the token in prompt + output, in [0, 2**64).
        token_ids: ids [M] of the target's vocabulary, or its size V for all of them in order.

    Returns:
        [M] (or [V]) uint32, the same on every machine. The bits of an id do not depend on the other ids.
    """
    key = noise_key(int(seed), int(sample_index), int(position), purpose)
    ids = int(token_ids) if isinstance(token_ids, (int, np.integer)) else np.asarray(token_ids)
    return key_bits(np.array([key], np.uint64), ids)


def exponential(bits: BitsArray) -> NDArray[np.float64]:
    """Return standard exponential variates E = -log1p(-w), w = (bits + 1/2) / 2**32; finite and > 0 for all bits.

    -log E is a Gumbel variate, so argmax_v (log prob_v - log E_v) is a sample. With the same noise, drafter and target often sample the
    same token.

    Source: Daliri et al. 2024 (arXiv:2408.07978) for Gumbel coupling of drafter and target.
    """
    uniform = (bits + 0.5) * 2.0**-32  # exact in float64: 33 significant bits, strictly inside (0, 1)
    return np.asarray(-np.log1p(-uniform), np.float64)


def step_uniform(seed: int, sample_index: int, first_position: int, purpose: Purpose, depth: int, index: int = 0) -> float:
    """Return a uniform number of 48 random bits in (0, 1) for one random decision of one step.

    Args:
        seed, sample_index: as in `noise_bits`.
        first_position: position of the first token that the step emits, in [0, 2**32). It differs between steps.
        depth: number of the step's tokens before the token that is decided on, in [0, 2**32).
        index: number of the decision at this depth.
    """
    key = noise_key(int(seed), int(sample_index), first_position << 32 | depth, purpose)
    bits: int = _mix((key + index * _GOLDEN_GAMMA) & _UINT64_MASK) >> 16
    return (bits + 0.5) * 2.0**-48
