"""Attention over the paged cache: a plain form that reads like its definition, and one batched form for CUDA held to it by a test.

Both are built once per pass from its row ranges and then called once per layer with
q [T, H, D], keys and values [num_blocks, K, block_size, D] of that layer, the pass's own rows already written; they return [T, H, D].
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.runtimes.base import BoolArray, RowRange


class Attention(Protocol):
    """One pass's attention."""

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor: ...


def visible_slots(rows: RowRange) -> BoolArray:
    """[num_rows, cached_len + num_rows], True = the row may attend: all that is cached, then causally or by the range's mask."""
    mask = np.ones((rows.num_rows, rows.cached_len + rows.num_rows), np.bool_)
    mask[:, rows.cached_len :] = np.tri(rows.num_rows, dtype=np.bool_) if rows.mask is None else rows.mask
    return mask


class PlainAttention:
    """Range by range: gather its blocks, mask, attend."""

    def __init__(self, ranges: Sequence[RowRange], block_size: int, device: torch.device) -> None:
        self._ranges = ranges
        self._blocks = []
        self._masks = []
        for rows in ranges:
            num_blocks = -(-(rows.cached_len + rows.num_rows) // block_size)
            self._blocks.append(torch.from_numpy(rows.block_table[:num_blocks].astype(np.int64)).to(device))
            mask = visible_slots(rows)
            self._masks.append(None if mask.all() else torch.from_numpy(mask).to(device))

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        attended = torch.empty_like(q)
        for rows, blocks, mask in zip(self._ranges, self._blocks, self._masks, strict=True):
            num_slots = rows.cached_len + rows.num_rows
            own = slice(rows.start, rows.start + rows.num_rows)
            result = scaled_dot_product_attention(
                q[own].transpose(0, 1)[None],
                keys[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_slots],
                values[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_slots],
                attn_mask=mask,
                enable_gqa=True,
            )
            attended[own] = result[0].transpose(0, 1)
        return attended


class PaddedAttention:
    """All ranges in one call, padded to the longest: few launches, at the price of reading padding."""

    def __init__(self, ranges: Sequence[RowRange], block_size: int, device: torch.device) -> None:
        num_rows = max(rows.num_rows for rows in ranges)
        num_blocks = max(-(-(rows.cached_len + rows.num_rows) // block_size) for rows in ranges)
        tables = np.zeros((len(ranges), num_blocks), np.int64)
        mask = np.zeros((len(ranges), 1, num_rows, num_blocks * block_size), np.bool_)
        mask[..., 0] = True  # a padding row must see something, or its softmax is 0/0
        row_range: list[int] = []
        row_in_range: list[int] = []
        for index, rows in enumerate(ranges):
            own_blocks = rows.block_table[:num_blocks]
            tables[index, : len(own_blocks)] = own_blocks
            mask[index, 0, : rows.num_rows, : rows.cached_len + rows.num_rows] = visible_slots(rows)
            row_range.extend([index] * rows.num_rows)
            row_in_range.extend(range(rows.num_rows))
        self._num_rows = num_rows
        self._tables = torch.from_numpy(tables).to(device)
        self._mask = torch.from_numpy(mask).to(device)
        self._row_range = torch.tensor(row_range, device=device)
        self._row_in_range = torch.tensor(row_in_range, device=device)

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        padded = q.new_zeros(len(self._tables), self._num_rows, *q.shape[1:])
        padded[self._row_range, self._row_in_range] = q
        attended = scaled_dot_product_attention(
            padded.transpose(1, 2),
            keys[self._tables].transpose(1, 2).flatten(2, 3),
            values[self._tables].transpose(1, 2).flatten(2, 3),
            attn_mask=self._mask,
            enable_gqa=True,
        )
        return attended.transpose(1, 2)[self._row_range, self._row_in_range]
