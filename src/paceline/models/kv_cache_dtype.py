"""Data types of the KV cache."""

from enum import Enum

_VECTOR = 16  # cached rows are padded to a multiple of 16 values


class KVCacheDtype(Enum):
    """Data type of cached keys and values. An int8 row of a head has a float32 scale."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    INT8 = "int8"

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one element of a cached key or value."""
        return {KVCacheDtype.F32: 4, KVCacheDtype.INT8: 1}.get(self, 2)

    def row_bytes(self, head_size: int) -> int:
        """Return the bytes of one head's key, or value, at one position."""
        return -(-head_size // _VECTOR) * _VECTOR * self.item_bytes + (4 if self is KVCacheDtype.INT8 else 0)
