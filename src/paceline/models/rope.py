"""Frequencies of rotary embeddings for every rope type. Of R rotated values in a head, j and j + R/2 are a pair."""

import math

import numpy as np
from numpy.typing import NDArray

from paceline.models.rope_config import RopeConfig, RopeType


def inverse_frequencies(rope: RopeConfig, head_size: int) -> tuple[NDArray[np.float32], float]:
    """Return the frequencies [R/2], in radians per position, and the attention factor.

    The attention factor multiplies cos and sin; it is 1 except for yarn and longrope.

    Source: RoFormer (Su et al. 2021, section 3.2.2); linear: Chen et al. 2023; yarn, dynamic: Peng et al. 2023, section 3
        and appendix B.2; longrope: Ding et al. 2024, section 3; llama3: the rule published with Llama 3.1; proportional: the rule
        published with Gemma 4. Deviation: types that depend on the context length use `rope.scaled_context_len` as long as the model is
        loaded. transformers recomputes the frequencies as a text grows.
    """
    rotary_size = rope.rotary_size(head_size)
    exponents = np.arange(0, rotary_size, 2, dtype=np.float32) / np.float32(rotary_size)
    # float64: numpy's float32 power is often one bit off, an error that large positions multiply.
    theta_powers = np.power(_dynamic_theta(rope, rotary_size), exponents.astype(np.float64)).astype(np.float32)
    with np.errstate(over="ignore", divide="ignore"):  # overflow is harmless in pairs that do not rotate; `check_rope` refuses others
        unscaled = (np.float32(1.0) / theta_powers).astype(np.float32)
    if rope.type in (RopeType.DEFAULT, RopeType.DYNAMIC):
        return unscaled, 1.0
    if rope.type is RopeType.PROPORTIONAL:
        return _proportional_frequencies(rope, unscaled), 1.0
    if rope.type is RopeType.LINEAR:
        return unscaled / np.float32(rope.factor), 1.0
    if rope.type is RopeType.LLAMA3:
        return _llama3_frequencies(rope, unscaled), 1.0
    if rope.type is RopeType.LONGROPE:
        return _longrope_frequencies(rope, theta_powers), _longrope_attention_factor(rope)
    return _yarn_frequencies(rope, theta_powers, rotary_size), _yarn_attention_factor(rope)


def _proportional_frequencies(rope: RopeConfig, unscaled: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return frequencies that are 0 for all but the first `rotated_fraction` of the pairs."""
    num_rotating = int(rope.rotated_fraction * 2 * len(unscaled) // 2)
    return np.where(np.arange(len(unscaled)) < num_rotating, unscaled / np.float32(rope.factor), np.float32(0)).astype(np.float32)


def query_scales(rope: RopeConfig, positions: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the factor that queries are multiplied by at each position.

    Source: the rule published with Ministral 3, after Llama 4's.
    """
    if rope.attention_temperature_scale == 0.0:
        return np.ones(len(positions), np.float32)
    lengths = np.floor_divide(positions, rope.attention_temperature_len)
    scales = 1.0 + rope.attention_temperature_scale * np.log1p(lengths.astype(np.float64))
    return np.asarray(scales, np.float32)


def _dynamic_theta(rope: RopeConfig, rotary_size: int) -> float:
    """Return the base. With the dynamic type it grows with the context length, so that the longest wavelength covers the context."""
    if rope.type is not RopeType.DYNAMIC or rope.scaled_context_len <= rope.original_max_positions or rotary_size <= 2:
        return rope.theta
    growth = rope.factor * rope.scaled_context_len / rope.original_max_positions - (rope.factor - 1)
    return float(rope.theta * growth ** (rotary_size / (rotary_size - 2)))


def _longrope_frequencies(rope: RopeConfig, theta_powers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return frequencies divided by `long_factors` for contexts above the original length, else by `short_factors`."""
    is_long = rope.scaled_context_len > rope.original_max_positions
    divisors = np.array(rope.long_factors if is_long else rope.short_factors, np.float32)
    return np.asarray(np.float32(1.0) / (divisors * theta_powers), np.float32)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


def _llama3_frequencies(rope: RopeConfig, unscaled: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return frequencies: low ones divided by `factor`, high ones unchanged, frequencies in between interpolated."""
    wavelengths = np.float32(2 * math.pi) / unscaled
    longest = np.float32(rope.original_max_positions / rope.low_freq_factor)
    shortest = np.float32(rope.original_max_positions / rope.high_freq_factor)
    factor = np.float32(rope.factor)
    unscaled_share = (np.float32(rope.original_max_positions) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (np.float32(1.0) - unscaled_share) * unscaled / factor + unscaled_share * unscaled
    scaled = np.where(wavelengths > longest, unscaled / factor, np.where(wavelengths < shortest, unscaled, between))
    return scaled.astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, theta_powers: NDArray[np.float32], head_size: int) -> NDArray[np.float32]:
    """Return frequencies: high ones unchanged, low ones divided by `factor`, with a linear ramp in between."""

    def pair_with_turns(num_turns: float) -> float:
        """Return the index, with decimals, of the pair that makes this many full turns over the original context."""
        return head_size * math.log(rope.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    unscaled_share = np.float32(1.0) - ramp.astype(np.float32)
    scaled = np.float32(1.0) / (np.float32(rope.factor) * theta_powers)
    return np.asarray(scaled * (np.float32(1.0) - unscaled_share) + (np.float32(1.0) / theta_powers) * unscaled_share, np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
