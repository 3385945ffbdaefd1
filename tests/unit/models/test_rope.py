"""Rotary frequencies follow the published rule of each type."""

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.models.rope import inverse_frequencies
from paceline.models.rope_config import RopeConfig, RopeType

LLAMA3 = RopeConfig(500000.0, RopeType.LLAMA3, factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512)


def test_default_rope_frequencies_are_powers_of_theta() -> None:
    frequencies, attention_factor = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    assert frequencies.dtype == np.float32
    assert np.allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert attention_factor == 1.0


def test_linear_rope_divides_all_frequencies_by_the_factor() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    scaled, attention_factor = inverse_frequencies(RopeConfig(type=RopeType.LINEAR, factor=4.0), 64)
    assert np.array_equal(scaled, plain / 4)
    assert attention_factor == 1.0


def test_unrotated_pairs_of_proportional_rope_cannot_overflow() -> None:
    rope = RopeConfig(1e-44, RopeType.PROPORTIONAL, rotated_fraction=0.25)
    frequencies, _ = inverse_frequencies(rope, 64)
    assert np.isfinite(frequencies).all()


def test_proportional_rope_rotates_the_first_pairs_of_a_head() -> None:
    plain, _ = inverse_frequencies(RopeConfig(theta=1e6), 512)
    rope = RopeConfig(1e6, RopeType.PROPORTIONAL, factor=2.0, rotated_fraction=0.25)
    scaled, attention_factor = inverse_frequencies(rope, 512)
    assert rope.rotary_size(512) == 512
    assert np.array_equal(scaled[:64], plain[:64] / 2)
    assert scaled.shape == (256,)
    assert not scaled[64:].any()
    assert attention_factor == 1.0


def test_llama3_rope_keeps_high_frequencies_and_divides_low_ones() -> None:
    plain, _ = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    scaled, attention_factor = inverse_frequencies(LLAMA3, 128)
    wavelengths = 2 * math.pi / plain.astype(np.float64)
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert np.array_equal(scaled[short], plain[short])
    assert np.allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert np.all((scaled < plain) & (scaled > plain / 8) | ~between)
    assert attention_factor == 1.0


def test_yarn_rope_blends_frequencies_along_a_ramp() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    scaled, attention_factor = inverse_frequencies(YARN, 64)
    ratio = scaled / plain
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(0.25)
    assert np.all(np.diff(ratio) <= 1e-6)
    assert attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factor_is_given_or_computed_from_mscale() -> None:
    given = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512, attention_factor=1.5)
    assert inverse_frequencies(given, 64)[1] == 1.5
    scales = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512, mscale=1.0, mscale_all_dim=0.5)
    assert inverse_frequencies(scales, 64)[1] == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_yarn_rope_ramp_may_be_left_unrounded() -> None:
    unrounded = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512, truncate=False)
    assert not np.array_equal(inverse_frequencies(unrounded, 64)[0], inverse_frequencies(YARN, 64)[0])


LONGROPE = RopeConfig(
    10000.0,
    RopeType.LONGROPE,
    factor=32.0,
    original_max_positions=4096,
    short_factors=(1.0, 1.5, 2.0, 3.0),
    long_factors=(1.0, 4.0, 16.0, 64.0),
)


def test_longrope_divides_each_frequency_by_its_own_factor() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    for max_model_len, factors in ((None, LONGROPE.short_factors), (4096, LONGROPE.short_factors), (4097, LONGROPE.long_factors)):
        scaled, attention_factor = inverse_frequencies(LONGROPE.for_context(max_model_len), 8)
        assert np.allclose(plain / scaled, factors, rtol=1e-6), max_model_len
        assert attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert inverse_frequencies(replace(LONGROPE, attention_factor=1.25), 8)[1] == 1.25
    assert inverse_frequencies(replace(LONGROPE, factor=1.0), 8)[1] == 1.0


def test_dynamic_rope_theta_grows_with_the_context() -> None:
    dynamic = RopeConfig(type=RopeType.DYNAMIC, factor=2.0, original_max_positions=512)
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    assert np.array_equal(inverse_frequencies(dynamic.for_context(512), 8)[0], plain)
    grown, attention_factor = inverse_frequencies(dynamic.for_context(1024), 8)
    assert np.allclose(grown, inverse_frequencies(RopeConfig(10000.0 * 3 ** (8 / 6)), 8)[0], rtol=1e-6)
    assert grown[-1] == pytest.approx(plain[-1] / 3)  # the longest wave grows by factor * 1024 / 512 - (factor - 1)
    assert attention_factor == 1.0


def test_partial_rope_has_the_frequencies_of_a_smaller_head() -> None:
    partial, _ = inverse_frequencies(RopeConfig(rotated_fraction=0.75), 128)
    assert np.array_equal(partial, inverse_frequencies(RopeConfig(), 96)[0])
