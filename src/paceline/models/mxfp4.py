"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3.3)."""

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.grouped import GroupedMatrix, runs_of_pairs

TWICE_THE_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the 16 codes of E2M1, which are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""


def half_scales(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return half of the scales 2^(e - 127), as float32; 255 is NaN."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), scales)


def from_pairs(blocks: NDArray[np.uint8], exponents: NDArray[np.uint8], where: str) -> GroupedMatrix:
    """Return a matrix from bytes of two neighbouring codes, as in Hugging Face checkpoints.

    Args:
        blocks: [N, K / 32, 16], the first of two neighbours in the low half.
        exponents: [N, K / 32].
        where: the tensor, for the error.

    Raises:
        CheckpointError: A scale is NaN.
    """
    scales = half_scales(exponents)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{where} has a scale that is not finite; the file is damaged, download it again")
    codes = runs_of_pairs(blocks.reshape(len(blocks), -1))
    return GroupedMatrix(codes, scales, None, 4, table=TWICE_THE_VALUES)
