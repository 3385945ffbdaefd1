"""Rounding weights to the narrower types."""

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import WeightType


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits of float32 values, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def rounded(values: NDArray[np.float32], to: WeightType) -> NDArray[np.float32]:
    """`values` rounded to what `to` can hold, as float32."""
    if to is WeightType.BF16:
        return (to_bf16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float16).astype(np.float32) if to is WeightType.F16 else values
