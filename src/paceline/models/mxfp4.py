"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3.3)."""

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.grouped import GroupedMatrix, pack_pairs_in_runs

DOUBLED_E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the 16 codes of E2M1, so that they are integers. The values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""


def half_scales(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return half of the scales 2^(exponent - 127), because code values are doubled. The exponent 255 is NaN."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), scales)


def matrix_from_blocks(blocks: NDArray[np.uint8], exponents: NDArray[np.uint8], where: str) -> GroupedMatrix:
    """Return the matrix that a Hugging Face checkpoint stores as blocks and exponents.

    Args:
        blocks: [N, K / 32, 16] bytes of two neighbouring codes, the first in the low 4 bits.
        exponents: [N, K / 32].
        where: name of the tensor, for errors.

    Raises:
        CheckpointError: A scale is NaN.
    """
    scales = half_scales(exponents)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{where} has a scale that is not finite; the file is damaged, download it again")
    codes = pack_pairs_in_runs(blocks.reshape(len(blocks), -1))
    return GroupedMatrix(codes, scales, None, 4, table=DOUBLED_E2M1_VALUES)
