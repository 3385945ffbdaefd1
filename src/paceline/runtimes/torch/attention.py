"""Attention over the paged cache: a readable form, and a padded form for CUDA that a test compares with it.

An object is built for each pass and called for each layer, after the pass's keys and values were written. It takes q [T, H, D] and the
layer's keys and values [num_blocks, K, block_size, D], and returns [T, H, D].
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.models.layers import AttentionConfig
from paceline.runtimes.base import BoolArray, RowRange


class Attention(Protocol):
    """Attention of all rows of one pass."""

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, config: AttentionConfig, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Return attention [T, H, D] of one layer.

        Args:
            config: of the layer; its scale, soft cap and window are used.
            sinks: [H] scores of a key without a value that every row attends to; None = no sinks.
        """
        ...


def visible_slots(rows: RowRange, window: int | None = None, *, is_causal: bool = False) -> BoolArray:
    """Return [num_rows, cached_len + num_rows], True = may attend: to cached rows, then causally or by the range's mask.

    Args:
        window: only the last `window` rows of each row's path; None = all. Later rows, which a mask may allow, are not counted.
        is_causal: the range's mask is ignored.
    """
    mask = np.ones((rows.num_rows, rows.cached_len + rows.num_rows), np.bool_)
    mask[:, : rows.first_slot] = False
    mask[:, rows.cached_len :] = np.tri(rows.num_rows, dtype=np.bool_) if rows.mask is None or is_causal else rows.mask
    if window is not None:
        before = mask & np.tri(*mask.shape, rows.cached_len, dtype=np.bool_)
        mask &= np.cumsum(before[:, ::-1], axis=1)[:, ::-1] <= window
    return mask


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    config: AttentionConfig,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of q [B, H, T, D] over keys and values [B, K, slots, D]; mask broadcasts to [B, H, T, slots], True = may attend.

    Source: the soft cap is that of Gemma 2 (Gemma Team 2024, section 2), sinks are those of gpt-oss (OpenAI 2025, section 2).
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
    shares = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return torch.matmul(shares.to(q.dtype), values)


class PlainAttention:
    """Computes each range by itself: gather its blocks, mask, attend."""

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
        kind = config.window, config.is_causal
        if kind not in self._masks:
            masks = [visible_slots(rows, config.window, is_causal=config.is_causal) for rows in self._ranges]
            self._masks[kind] = [None if mask.all() else torch.from_numpy(mask).to(self._device) for mask in masks]
        attended = torch.empty_like(q)
        for rows, blocks, mask in zip(self._ranges, self._blocks, self._masks[kind], strict=True):
            num_slots = rows.cached_len + rows.num_rows
            own = slice(rows.start, rows.start + rows.num_rows)
            result = attend(
                q[own].transpose(0, 1)[None],
                keys[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_slots],
                values[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_slots],
                mask,
                config,
                sinks,
            )
            attended[own] = result[0].transpose(0, 1)
        return attended


class PaddedAttention:
    """Computes all ranges in one call, padded to the longest: few launches, but reads padding."""

    def __init__(self, ranges: Sequence[RowRange], block_size: int, device: torch.device) -> None:
        self._ranges = ranges
        num_rows = max(rows.num_rows for rows in ranges)
        num_blocks = max(-(-(rows.cached_len + rows.num_rows) // block_size) for rows in ranges)
        tables = np.empty((len(ranges), num_blocks), np.int64)
        row_range: list[int] = []
        row_in_range: list[int] = []
        for index, rows in enumerate(ranges):
            own_blocks = rows.block_table[:num_blocks]
            tables[index] = own_blocks[0]  # pad with a block of the same sequence: values of others, even NaN, must not be read
            tables[index, : len(own_blocks)] = own_blocks
            row_range.extend([index] * rows.num_rows)
            row_in_range.extend(range(rows.num_rows))
        self._num_rows, self._num_slots = num_rows, num_blocks * block_size
        self._tables = torch.from_numpy(tables).to(device)
        self._masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        self._row_range = torch.tensor(row_range, device=device)
        self._row_in_range = torch.tensor(row_in_range, device=device)

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, config: AttentionConfig, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        kind = config.window, config.is_causal
        if kind not in self._masks:
            self._masks[kind] = torch.from_numpy(self._mask(config.window, is_causal=config.is_causal)).to(q.device)
        padded = q.new_zeros(len(self._tables), self._num_rows, *q.shape[1:])
        padded[self._row_range, self._row_in_range] = q
        attended = attend(
            padded.transpose(1, 2),
            keys[self._tables].transpose(1, 2).flatten(2, 3),
            values[self._tables].transpose(1, 2).flatten(2, 3),
            self._masks[kind],
            config,
            sinks,
        )
        return attended.transpose(1, 2)[self._row_range, self._row_in_range]

    def _mask(self, window: int | None, *, is_causal: bool) -> BoolArray:
        """Return the attention mask [ranges, 1, rows, slots], True = may attend."""
        mask = np.zeros((len(self._ranges), 1, self._num_rows, self._num_slots), np.bool_)
        mask[..., 0] = True  # a padding row must attend to something, or its softmax is 0/0
        for index, rows in enumerate(self._ranges):
            mask[index, 0, : rows.num_rows, : rows.cached_len + rows.num_rows] = visible_slots(rows, window, is_causal=is_causal)
        return mask
