"""LoRA adapters in the layout of kernels/low_rank.c, and the records with the adapter of each row of a pass.

An adapter site is an operation of a recorded network whose products LoRA adapters can change.
"""

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Array, addressof, cast, pointer
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.adapters.network_adapter import NetworkAdapter
from paceline.models.weights import to_bf16
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows
from paceline.runtimes.native.library import LANES
from paceline.runtimes.native.records import AdapterProduct, AdapterSite, Matrix, MatrixKind, Pass, PassAdapter

AdapterSiteNames = tuple[tuple[str, ...], ...]
"""The names of the matrices of each adapter site. An operation on experts is one site for each expert."""

_DOWN_PANEL_OUTPUTS = 8  # outputs of a LoRA A matrix that are packed together, DOWN_OUTPUTS in kernels/low_rank.c
_CACHE_LINE_BYTES = 64
_ARENA_BYTES = 1 << 23


class NativeAdapter:
    """A LoRA adapter in the kernels' layout. Each matrix has the narrowest float type that represents its values exactly.

    Attributes:
        network_adapter: the adapter from which it was made.
        max_down_outputs: the largest total number of outputs of the down projections of one adapter site.
    """

    def __init__(self, network_adapter: NetworkAdapter) -> None:
        self.network_adapter = network_adapter
        self._arenas: list[NDArray[np.uint8]] = []  # kept as long as the adapter: records point into these arrays
        self._free_offset = 0  # start of the unused part of `_arenas[-1]`
        self._records: list[Any] = []
        self._sites: dict[tuple[str, ...], AdapterSite] = {}
        self._replacements = {name: self._down_projection_tiles(values) for name, values in network_adapter.replacements.items()}
        self.max_down_outputs = 1

    def site_records(self, sites: AdapterSiteNames) -> "Array[AdapterSite]":
        """Return the adapter's matrices and biases for each adapter site of a network, as records for the kernels."""
        for names in sites:
            if names not in self._sites:
                self._sites[names] = self._make_site_record(names)
        return (AdapterSite * len(sites))(*(self._sites[names] for names in sites))

    def _make_site_record(self, names: tuple[str, ...]) -> AdapterSite:
        updates, biases = self.network_adapter.low_rank_updates, self.network_adapter.biases
        replacements = self._replacements if names == ("lm_head",) else {}
        if not any(name in one for name in names for one in (updates, biases, replacements)):
            return AdapterSite(None, None, None)
        own = [updates[name] for name in names if name in updates]
        down = self._down_projection_tiles(np.concatenate([update.lora_a for update in own])) if own else None
        products, first = (AdapterProduct * len(names))(), 0
        for product, name in zip(products, names, strict=True):
            product.replacement = pointer(replacements[name]) if name in replacements else None
            rank = len(updates[name].lora_a) if name in updates else 0
            product.first_rank, product.rank, first = first, rank, first + rank
            if name in updates:
                product.kind, product.up = self._up_projection_panels(updates[name].lora_b)
            if name in biases:
                product.up = product.up or self._copy_to_arena(np.zeros(LANES, np.float32))
                product.bias = self._copy_to_arena(np.ascontiguousarray(biases[name], np.float32))
        self.max_down_outputs = max(self.max_down_outputs, first)
        self._records.append((products, down))
        mixture, columns = self.network_adapter.mixture, None
        if mixture is not None and own:
            columns = self._copy_to_arena(np.concatenate([mixture.scaling_indices[name] for name in names if name in updates]))
        return AdapterSite(None if down is None else pointer(down), cast(products, POINTER(AdapterProduct)), columns)

    def _down_projection_tiles(self, values: NDArray[np.float32]) -> Matrix:
        """Copy `values` [outputs, columns] to [outputs / 8][columns / 16][8][16], padded with zeros, and return the record of the copy."""
        outputs, columns = values.shape
        padded = np.zeros((-(-outputs // _DOWN_PANEL_OUTPUTS) * _DOWN_PANEL_OUTPUTS, -(-columns // LANES) * LANES), np.float32)
        padded[:outputs, :columns] = values
        panels = padded.reshape(-1, _DOWN_PANEL_OUTPUTS, padded.shape[1] // LANES, LANES).swapaxes(1, 2)
        stored, kind = _narrowest_exact_type(np.ascontiguousarray(panels))
        return Matrix(kind, outputs, columns, 0, 0, -1, 0, stored.strides[0], self._copy_to_arena(stored), None, None, None, None)

    def _up_projection_panels(self, up: NDArray[np.float32]) -> tuple[MatrixKind, int]:
        """Copy `up` [outputs, rank] to [outputs / 16][rank][16], padded with zeros, and return type and address of the copy."""
        outputs, rank = up.shape
        padded = np.zeros((-(-outputs // LANES) * LANES, rank), np.float32)
        padded[:outputs] = up
        stored, kind = _narrowest_exact_type(np.ascontiguousarray(padded.reshape(-1, LANES, rank).swapaxes(1, 2)))
        return kind, self._copy_to_arena(stored)

    def _copy_to_arena(self, array: NDArray[Any]) -> int:
        """Copy an array to the next free cache line of an arena, because small allocations are slower to read. Return the address."""
        size = -(-array.nbytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        if not self._arenas or size > len(self._arenas[-1]) - self._free_offset:
            self._arenas.append(np.empty(max(_ARENA_BYTES, size + _CACHE_LINE_BYTES), np.uint8))
            self._free_offset = -self._arenas[-1].ctypes.data % _CACHE_LINE_BYTES
        start, self._free_offset = self._free_offset, self._free_offset + size
        target = self._arenas[-1][start : start + array.nbytes]
        target[...] = array.reshape(-1).view(np.uint8)
        return int(target.ctypes.data)


def _narrowest_exact_type(values: NDArray[np.float32]) -> tuple[NDArray[Any], MatrixKind]:
    """Return the values in the narrowest float type that represents them exactly, and that type."""
    if not (values.view(np.uint32) & np.uint32(0xFFFF)).any():
        return to_bf16(values), MatrixKind.BF16
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if np.array_equal(halves.astype(np.float32), values):
        return halves, MatrixKind.F16
    return values, MatrixKind.F32


class AdapterMapping:
    """Writes the adapter of each row of a pass to the `Pass` record.

    Args:
        adapters: loaded adapters by number; may change between passes.
        sites: see `AdapterSiteNames`.
        max_experts: most experts that a row is routed to; 0 = the network has no experts.
    """

    def __init__(self, adapters: Mapping[int, NativeAdapter], sites: Sequence[tuple[str, ...]], max_experts: int = 0) -> None:
        self._adapters, self._sites, self._max_experts = adapters, tuple(sites), max_experts
        self._cached_records: dict[int, Array[AdapterSite]] = {}
        self._kept_alive: tuple[object, ...] = ()  # arrays whose addresses are in the record of the last pass
        self._low_rank: FloatArray = np.empty(0, np.float32)

    def fill(
        self, record: Pass, batch: ForwardBatch, logits_rows: LogitsRows, scalings: Mapping[int, FloatArray] = MappingProxyType({})
    ) -> None:
        """Fill the adapter fields of `record` for one pass.

        Args:
            scalings: see `xlora.Scalings`.
        """
        record.num_adapters = 0
        rows_by_adapter = batch.rows_by_adapter() if self._adapters else {}
        if not rows_by_adapter or not self._sites:
            return
        adapter_of_row = np.full(len(batch.positions), -1, np.int32)
        for index, rows in enumerate(rows_by_adapter.values()):
            adapter_of_row[rows] = index
        adapter_of_logits_row = adapter_of_row[logits_rows.rows]
        pass_adapters, row_indices, start, max_down_outputs = (PassAdapter * len(rows_by_adapter))(), list[NDArray[np.int32]](), 0, 1
        for index, (number, rows) in enumerate(rows_by_adapter.items()):
            own = pass_adapters[index]
            own.sites = cast(self._site_records(number), POINTER(AdapterSite))
            max_down_outputs = max(max_down_outputs, self._adapters[number].max_down_outputs)
            for place, numbers in enumerate((rows, np.flatnonzero(adapter_of_logits_row == index).astype(np.int32))):
                own.first[place], own.count[place], start = start, len(numbers), start + len(numbers)
                row_indices.append(numbers)
            if number in scalings:
                own.scalings, own.num_scalings = scalings[number].ctypes.data, scalings[number].shape[1]
        numbers = np.concatenate(row_indices)
        size = max(len(numbers), len(adapter_of_row) * self._max_experts) * max_down_outputs
        if size > len(self._low_rank):
            self._low_rank = np.empty(size, np.float32)
        self._kept_alive = pass_adapters, numbers, scalings
        if self._max_experts:
            order = np.concatenate([np.flatnonzero(adapter_of_row < 0).astype(np.int32), *rows_by_adapter.values()])
            self._kept_alive = *self._kept_alive, order, adapter_of_row
            record.row_order, record.adapter_of_row = order.ctypes.data, adapter_of_row.ctypes.data
        record.adapters, record.adapter_rows = addressof(pass_adapters), numbers.ctypes.data
        record.low_rank, record.low_rank_floats = self._low_rank.ctypes.data, max_down_outputs
        record.num_adapters = len(pass_adapters)

    def _site_records(self, number: int) -> "Array[AdapterSite]":
        """Return `NativeAdapter.site_records` of an adapter, cached by its number: networks with many experts have thousands of sites."""
        if number not in self._cached_records:
            self._cached_records = {one: table for one, table in self._cached_records.items() if one in self._adapters}
            self._cached_records[number] = self._adapters[number].site_records(self._sites)
        return self._cached_records[number]
