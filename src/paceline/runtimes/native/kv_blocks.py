"""How the kernels store keys and values in cache blocks (kernels/kv_blocks.h), read and copied row by row."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.kv_cache_dtype import KVCacheDtype

_ITEMS = {KVCacheDtype.F32: np.float32, KVCacheDtype.BF16: np.uint16, KVCacheDtype.F16: np.float16, KVCacheDtype.INT8: np.int8}


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """Access to rows of a block in storage [2 * layers, num_blocks, K, bytes] uint8; keys of layer i at 2 * i, values at 2 * i + 1.

    Keys are stored column-major, values row-major. bfloat16 is interleaved in pairs (two columns of a key, two rows of values), int8 keys
    in quads of columns. The float32 scales of int8 rows follow the codes.
    """

    kv_cache_dtype: KVCacheDtype
    block_size: int

    def copy(self, storage: NDArray[np.uint8], source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy a row, (block, slot), of all layers and heads."""
        for rows, copies in zip(self._row(storage, *source), self._row(storage, *target), strict=True):
            copies[...] = rows

    def read(self, storage: NDArray[np.uint8], block: int, row: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return keys and values [layers, K, columns] of a row as float32; columns are padded to whole vectors."""
        keys, values, *scales = self._row(storage, block, row)
        if self.kv_cache_dtype is KVCacheDtype.BF16:
            wide = [part.reshape(*part.shape[:2], -1).astype(np.uint32) for part in (keys, values)]
            return (wide[0] << 16).view(np.float32), (wide[1] << 16).view(np.float32)
        found = [part.astype(np.float32).reshape(*part.shape[:2], -1) for part in (keys, values)]
        for part, scale in zip(found, scales, strict=False):
            part *= scale[..., None]
        return found[0], found[1]

    def _row(self, storage: NDArray[np.uint8], block: int, row: int) -> Iterator[NDArray[Any]]:
        """Yield views of the keys and values of a row, then of their scales if the type has them."""
        size, item = self.block_size, np.dtype(_ITEMS[self.kv_cache_dtype])
        scales = 4 * size if self.kv_cache_dtype is KVCacheDtype.INT8 else 0
        columns = (storage.shape[-1] - scales) // (size * item.itemsize)
        units = storage[:, block, :, : size * columns * item.itemsize].view(item)
        keys, values = units[0::2], units[1::2]
        if self.kv_cache_dtype is KVCacheDtype.BF16:
            yield keys.reshape(*keys.shape[:2], columns // 2, size, 2)[:, :, :, row]
            yield values.reshape(*values.shape[:2], size // 2, columns, 2)[:, :, row // 2, :, row % 2]
        else:
            interleaved = 4 if self.kv_cache_dtype is KVCacheDtype.INT8 else 1
            yield keys.reshape(*keys.shape[:2], columns // interleaved, size, interleaved)[:, :, :, row]
            yield values.reshape(*values.shape[:2], size, columns)[:, :, row]
        if scales:
            found = storage[:, block, :, -scales:].view(np.float32)[..., row]
            yield found[0::2]
            yield found[1::2]
