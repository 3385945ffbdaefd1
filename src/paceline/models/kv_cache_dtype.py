"""Data types of the KV cache."""

from enum import Enum

_HEAD_SIZE_MULTIPLE = 16  # in the cache, a head's key or value is padded to a multiple of this many numbers


class KVCacheDtype(Enum):
    """Data type of cached keys and values. With int8, each head's key and value at a position has a float32 scale."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    INT8 = "int8"

    @property
    def item_bytes(self) -> int:
        return {KVCacheDtype.F32: 4, KVCacheDtype.INT8: 1}.get(self, 2)

    def row_bytes(self, head_size: int) -> int:
        """Return the size in bytes of a head's key (or value) at one position, with padding and scale."""
        return -(-head_size // _HEAD_SIZE_MULTIPLE) * _HEAD_SIZE_MULTIPLE * self.item_bytes + (4 if self is KVCacheDtype.INT8 else 0)
