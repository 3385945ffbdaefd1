"""Attention over the paged cache: a simple implementation, and a padded one for CUDA, which tests compare with the simple one.

Each pass creates an object and calls it for each layer, after the keys and values of the pass were written to the cache.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.models.layers import AttentionConfig
from paceline.runtimes.base import BoolArray, RowRange


def visible_slots(rows: RowRange, window: int | None = None, *, is_causal: bool = False) -> BoolArray:
    """Return the attention mask of a range, [num_rows, cached_len + num_rows], True = may attend.

    Args:
        window: of the rows up to itself that the mask allows, a row attends to the last `window`. Later rows are not limited. None = all.
        is_causal: ignore the mask of the range.
    """
    mask = np.ones((rows.num_rows, rows.cached_len + rows.num_rows), np.bool_)
    mask[:, : rows.first_visible_slot] = False
    mask[:, rows.cached_len :] = np.tri(rows.num_rows, dtype=np.bool_) if rows.mask is None or is_causal else rows.mask
    if window is not None:
        before = mask & np.tri(*mask.shape, rows.cached_len, dtype=np.bool_)
        mask &= np.cumsum(before[:, ::-1], axis=1)[:, ::-1] <= window
    return mask


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    config: AttentionConfig,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of q [B, H, T, D] to keys and values [B, K, slots, D]. `mask` broadcasts to [B, H, T, slots]; True = may attend.

    Source: soft cap: Gemma 2 (Gemma Team 2024, section 2); sinks: gpt-oss (OpenAI 2025, section 2).
    """
    if config.soft_cap is None and sinks is None:
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=config.scale, enable_gqa=True)
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.matmul(q, keys.transpose(-1, -2)) * config.scale
    if config.soft_cap is not None:
        scores = torch.tanh(scores / config.soft_cap) * config.soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    scores = scores.float()
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return torch.matmul(weights.to(q.dtype), values)


class RangeAttention:
    """Attention that computes the rows of one sequence after another: gather the cache blocks of the range, then masked attention."""

    def __init__(self, ranges: Sequence[RowRange], block_size: int, device: torch.device) -> None:
        self._ranges = ranges
        self._device = device
        self._blocks = []
        self._masks: dict[tuple[int | None, bool], list[torch.Tensor | None]] = {}
        for rows in ranges:
            num_blocks = -(-(rows.cached_len + rows.num_rows) // block_size)
            self._blocks.append(torch.from_numpy(rows.block_table[:num_blocks].astype(np.int64)).to(device))

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, config: AttentionConfig, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention output [T, H, size of a value] of one layer.

        Args:
            q: queries [T, H, D].
            keys, values: cache of the layer, [num_blocks, K, block_size, D]. D may be smaller for values.
            sinks: [H] attention sinks (gpt-oss), scores that take part in the softmax only; None = no sinks.
        """
        key = config.window, config.is_causal
        if key not in self._masks:
            masks = [visible_slots(rows, config.window, is_causal=config.is_causal) for rows in self._ranges]
            self._masks[key] = [None if mask.all() else torch.from_numpy(mask).to(self._device) for mask in masks]
        outputs = q.new_empty(*q.shape[:-1], values.shape[-1])
        for rows, blocks, mask in zip(self._ranges, self._blocks, self._masks[key], strict=True):
            num_slots = rows.cached_len + rows.num_rows
            rows_of_range = slice(rows.start, rows.start + rows.num_rows)
            result = masked_attention(
                q[rows_of_range].transpose(0, 1)[None],
                keys[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_slots],
                values[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_slots],
                mask,
                config,
                sinks,
            )
            outputs[rows_of_range] = result[0].transpose(0, 1)
        return outputs


class PaddedAttention:
    """Attention that computes all ranges in one call, padded to the longest: few kernel launches, but padding takes time."""

    def __init__(self, ranges: Sequence[RowRange], block_size: int, device: torch.device) -> None:
        self._ranges = ranges
        num_rows = max(rows.num_rows for rows in ranges)
        num_blocks = max(-(-(rows.cached_len + rows.num_rows) // block_size) for rows in ranges)
        tables = np.empty((len(ranges), num_blocks), np.int64)
        range_of_row: list[int] = []
        index_in_range: list[int] = []
        for index, rows in enumerate(ranges):
            blocks = rows.block_table[:num_blocks]
            tables[index] = blocks[0]  # padding: a block of the same sequence, because others may contain NaN
            tables[index, : len(blocks)] = blocks
            range_of_row.extend([index] * rows.num_rows)
            index_in_range.extend(range(rows.num_rows))
        self._num_rows, self._num_slots = num_rows, num_blocks * block_size
        self._tables = torch.from_numpy(tables).to(device)
        self._masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        self._range_of_row = torch.tensor(range_of_row, device=device)
        self._index_in_range = torch.tensor(index_in_range, device=device)

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, config: AttentionConfig, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        key = config.window, config.is_causal
        if key not in self._masks:
            self._masks[key] = torch.from_numpy(self._mask(config.window, is_causal=config.is_causal)).to(q.device)
        padded = q.new_zeros(len(self._tables), self._num_rows, *q.shape[1:])
        padded[self._range_of_row, self._index_in_range] = q
        outputs = masked_attention(
            padded.transpose(1, 2),
            keys[self._tables].transpose(1, 2).flatten(2, 3),
            values[self._tables].transpose(1, 2).flatten(2, 3),
            self._masks[key],
            config,
            sinks,
        )
        return outputs.transpose(1, 2)[self._range_of_row, self._index_in_range]

    def _mask(self, window: int | None, *, is_causal: bool) -> BoolArray:
        """Return the attention mask [ranges, 1, rows, slots], True = may attend."""
        mask = np.zeros((len(self._ranges), 1, self._num_rows, self._num_slots), np.bool_)
        mask[..., 0] = True  # padding rows must attend to something, or their softmax is 0/0
        for index, rows in enumerate(self._ranges):
            mask[index, 0, : rows.num_rows, : rows.cached_len + rows.num_rows] = visible_slots(rows, window, is_causal=is_causal)
        return mask


Attention: TypeAlias = RangeAttention | PaddedAttention
