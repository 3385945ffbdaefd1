"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3.3)."""

import numpy as np
from numpy.typing import NDArray

DOUBLED_E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the 16 codes of E2M1, so that they are integers. The values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""


def half_scales(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return half of the scales 2^(exponent - 127), because code values are doubled. The exponent 255 is NaN."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), scales)
