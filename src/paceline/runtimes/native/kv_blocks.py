"""Copies of single rows of keys and values in the layout of kernels/kv_blocks.h."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.kv_cache_dtype import KVCacheDtype

_NUMPY_TYPES = {KVCacheDtype.F32: np.float32, KVCacheDtype.BF16: np.uint16, KVCacheDtype.F16: np.float16, KVCacheDtype.INT8: np.int8}


@dataclass(frozen=True, slots=True)
class KVBlockCodec:
    """Copies rows of storage [planes * layers, num_blocks, K, bytes] uint8: keys of layer i are at 2 * i, values at 2 * i + 1.

    If there is one plane a layer (`KVGroup.planes`), it is stored as values are.
    Keys are column-major, values row-major. bfloat16 is interleaved in pairs (two columns of keys, two rows of values), int8 keys in quads
    of columns. A float32 scale for each int8 row follows the codes.
    """

    kv_cache_dtype: KVCacheDtype
    block_size: int
    planes: int = 2

    def copy(self, storage: NDArray[np.uint8], source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy the keys and values of a row in all layers. `source` and `target`: (block, slot)."""
        for rows, copies in zip(self.row_views(storage, *source), self.row_views(storage, *target), strict=True):
            copies[...] = rows

    def row_views(self, storage: NDArray[np.uint8], block: int, row: int) -> Iterator[NDArray[Any]]:
        """Yield views of the keys and of the values of one token, then of their scales if the type is int8."""
        size, item = self.block_size, np.dtype(_NUMPY_TYPES[self.kv_cache_dtype])
        scales = 4 * size if self.kv_cache_dtype is KVCacheDtype.INT8 else 0
        columns = (storage.shape[-1] - scales) // (size * item.itemsize)
        codes = storage[:, block, :, : size * columns * item.itemsize].view(item)
        keys, values = (codes[0::2], codes[1::2]) if self.planes == 2 else (codes[:0], codes)
        if self.kv_cache_dtype is KVCacheDtype.BF16:
            yield keys.reshape(*keys.shape[:2], columns // 2, size, 2)[:, :, :, row]
            yield values.reshape(*values.shape[:2], size // 2, columns, 2)[:, :, row // 2, :, row % 2]
        else:
            interleaved = 4 if self.kv_cache_dtype is KVCacheDtype.INT8 else 1
            yield keys.reshape(*keys.shape[:2], columns // interleaved, size, interleaved)[:, :, :, row]
            yield values.reshape(*values.shape[:2], size, columns)[:, :, row]
        if scales:
            results = storage[:, block, :, -scales:].view(np.float32)[..., row]
            yield results[0::2]
            yield results[1::2]
