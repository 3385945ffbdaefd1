"""How the numbers of keys and values are stored."""

from enum import Enum

_VECTOR = 16  # columns of a stored row are filled up to whole vectors


class KVCacheDtype(Enum):
    """The type of a cache's keys and values; of int8 every row of a head has a float32 scale."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    INT8 = "int8"

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return {KVCacheDtype.F32: 4, KVCacheDtype.INT8: 1}.get(self, 2)

    def row_bytes(self, head_size: int) -> int:
        """Bytes of a head's keys, or its values, of one position."""
        return -(-head_size // _VECTOR) * _VECTOR * self.item_bytes + (4 if self is KVCacheDtype.INT8 else 0)
