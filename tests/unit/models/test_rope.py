"""Rotary frequencies follow the published rule of each type."""

import math

import numpy as np
import pytest

from paceline.models.config import RopeConfig, RopeType
from paceline.models.rope import inverse_frequencies

LLAMA3 = RopeConfig(500000.0, RopeType.LLAMA3, factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512)


def test_plain_frequencies_are_powers_of_theta() -> None:
    frequencies, attention_factor = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    assert frequencies.dtype == np.float32
    assert np.allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert attention_factor == 1.0


def test_linear_stretches_every_wave_alike() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    scaled, attention_factor = inverse_frequencies(RopeConfig(type=RopeType.LINEAR, factor=4.0), 64)
    assert np.array_equal(scaled, plain / 4)
    assert attention_factor == 1.0


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
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


def test_yarn_goes_from_kept_to_stretched_along_a_ramp() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    scaled, attention_factor = inverse_frequencies(YARN, 64)
    ratio = scaled / plain
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(0.25)
    assert np.all(np.diff(ratio) <= 1e-6)
    assert attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factor_may_be_given_or_come_from_two_scales() -> None:
    given = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512, attention_factor=1.5)
    assert inverse_frequencies(given, 64)[1] == 1.5
    scales = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512, mscale=1.0, mscale_all_dim=0.5)
    assert inverse_frequencies(scales, 64)[1] == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_yarn_may_leave_the_ramps_ends_unrounded() -> None:
    unrounded = RopeConfig(10000.0, RopeType.YARN, factor=4.0, original_max_positions=512, truncate=False)
    assert not np.array_equal(inverse_frequencies(unrounded, 64)[0], inverse_frequencies(YARN, 64)[0])
