"""LoRA adapters as the kernels read them (kernels/low_rank.c), and the records of which rows of a pass have which."""

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
"""The products of each operation of a network that adapters can change; of experts one entry each."""


_DOWN_PANEL_OUTPUTS = 8  # as in kernels/low_rank.c
_CACHE_LINE = 64
_PIECE_BYTES = 1 << 23


class NativeAdapter:
    """One adapter in memory, in the narrowest type that holds its values exactly.

    Attributes:
        network_adapter: its factors by internal names.
    """

    def __init__(self, network_adapter: NetworkAdapter) -> None:
        self.network_adapter = network_adapter
        self._memory: list[NDArray[np.uint8]] = []  # kept alive: records hold addresses of these arrays
        self._piece_offset = 0  # offset of the free part of the last piece of memory
        self._records: list[Any] = []
        self._sites: dict[tuple[str, ...], AdapterSite] = {}
        self._tables: dict[AdapterSiteNames, Array[AdapterSite]] = {}
        self._replacements = {name: self._down_projection_tiles(values) for name, values in network_adapter.replacements.items()}
        self.num_floats = 1  # maximum number of down-projection outputs of one operation

    def site_records(self, sites: AdapterSiteNames) -> "Array[AdapterSite]":
        """Return the adapter's record for each operation of a network, cached by `sites`."""
        if sites not in self._tables:
            self._tables[sites] = (AdapterSite * len(sites))(*map(self._cached_site, sites))
        return self._tables[sites]

    def _cached_site(self, names: tuple[str, ...]) -> AdapterSite:
        if names not in self._sites:
            self._sites[names] = self._make_site(names)
        return self._sites[names]

    def _make_site(self, names: tuple[str, ...]) -> AdapterSite:
        lows, biases = self.network_adapter.low_rank_updates, self.network_adapter.biases
        replacements = self._replacements if names == ("lm_head",) else {}
        if not any(name in one for name in names for one in (lows, biases, replacements)):
            return AdapterSite(None, None, None)
        own = [lows[name] for name in names if name in lows]
        down = self._down_projection_tiles(np.concatenate([low.down for low in own])) if own else None
        products, first = (AdapterProduct * len(names))(), 0
        for product, name in zip(products, names, strict=True):
            product.replacement = pointer(replacements[name]) if name in replacements else None
            rank = len(lows[name].down) if name in lows else 0
            product.first, product.rank, first = first, rank, first + rank
            if name in lows:
                product.kind, product.up = self._up_projection_panels(lows[name].up)
            if name in biases:
                product.up = product.up or self._copy_to_memory(np.zeros(LANES, np.float32))
                product.bias = self._copy_to_memory(np.ascontiguousarray(biases[name], np.float32))
        self.num_floats = max(self.num_floats, first)
        self._records.append((products, down))
        mixture, columns = self.network_adapter.mixture, None
        if mixture is not None and own:
            columns = self._copy_to_memory(np.concatenate([mixture.scaling_indices[name] for name in names if name in lows]))
        return AdapterSite(None if down is None else pointer(down), cast(products, POINTER(AdapterProduct)), columns)

    def _down_projection_tiles(self, values: NDArray[np.float32]) -> Matrix:
        """Return W [outputs, columns] as [outputs / 8][columns / 16][8][16], padded with zeros."""
        outputs, columns = values.shape
        padded = np.zeros((-(-outputs // _DOWN_PANEL_OUTPUTS) * _DOWN_PANEL_OUTPUTS, -(-columns // LANES) * LANES), np.float32)
        padded[:outputs, :columns] = values
        panels = padded.reshape(-1, _DOWN_PANEL_OUTPUTS, padded.shape[1] // LANES, LANES).swapaxes(1, 2)
        stored, kind = _narrowest_exact_type(np.ascontiguousarray(panels))
        return Matrix(kind, outputs, columns, 0, 0, -1, 0, stored.strides[0], self._copy_to_memory(stored), None, None, None, None)

    def _up_projection_panels(self, up: NDArray[np.float32]) -> tuple[MatrixKind, int]:
        """Return kind and address of `up` [outputs, rank] as [panels][rank][16]."""
        outputs, rank = up.shape
        padded = np.zeros((-(-outputs // LANES) * LANES, rank), np.float32)
        padded[:outputs] = up
        stored, kind = _narrowest_exact_type(np.ascontiguousarray(padded.reshape(-1, LANES, rank).swapaxes(1, 2)))
        return kind, self._copy_to_memory(stored)

    def _copy_to_memory(self, array: NDArray[Any]) -> int:
        """Copy the array to the next cache line of a large piece of memory, which is read faster, and return its address."""
        size = -(-array.nbytes // _CACHE_LINE) * _CACHE_LINE
        if size > self._num_free_bytes:
            self._memory.append(np.empty(max(_PIECE_BYTES, size + _CACHE_LINE), np.uint8))
            self._piece_offset = -self._memory[-1].ctypes.data % _CACHE_LINE
        start, self._piece_offset = self._piece_offset, self._piece_offset + size
        place = self._memory[-1][start : start + array.nbytes]
        place[...] = array.reshape(-1).view(np.uint8)
        return int(place.ctypes.data)

    @property
    def _num_free_bytes(self) -> int:
        return len(self._memory[-1]) - self._piece_offset if self._memory else 0


def _narrowest_exact_type(values: NDArray[np.float32]) -> tuple[NDArray[Any], MatrixKind]:
    """Return the values in the narrowest float type that holds them exactly, and the kind of that type."""
    if not (values.view(np.uint32) & np.uint32(0xFFFF)).any():
        return to_bf16(values), MatrixKind.BF16
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if np.array_equal(halves.astype(np.float32), values):
        return halves, MatrixKind.F16
    return values, MatrixKind.F32


class AdapterRows:
    """Fills the fields of a pass record that tell which rows have which adapter.

    Args:
        adapters: by number; read anew for each pass.
        sites: names of the products of each operation that adapters can change.
        max_chosen: most experts of a row; 0 = the network has none.
    """

    def __init__(self, adapters: Mapping[int, NativeAdapter], sites: Sequence[tuple[str, ...]], max_chosen: int = 0) -> None:
        self._adapters, self._sites, self._max_chosen = adapters, tuple(sites), max_chosen
        self._tables: dict[int, Array[AdapterSite]] = {}
        self._kept_alive: tuple[object, ...] = ()  # alive until the next pass
        self._low_rank: FloatArray = np.empty(0, np.float32)

    def fill(
        self, record: Pass, batch: ForwardBatch, logits_rows: LogitsRows, scalings: Mapping[int, FloatArray] = MappingProxyType({})
    ) -> None:
        """Fill the fields for one pass.

        Args:
            scalings: [rows, L * K] of the rows of each mixture of adapters, by its number.
        """
        record.num_adapters = 0
        ranges = batch.rows_by_adapter() if self._adapters else {}
        if not ranges or not self._sites:
            return
        adapter_of_row = np.full(len(batch.positions), -1, np.int32)
        for index, rows in enumerate(ranges.values()):
            adapter_of_row[rows] = index
        adapter_of_logits_row = adapter_of_row[logits_rows.rows]
        pass_adapters, parts, start, num_floats = (PassAdapter * len(ranges))(), list[NDArray[np.int32]](), 0, 1
        for index, (number, rows) in enumerate(ranges.items()):
            own = pass_adapters[index]
            own.sites = cast(self._adapter_table(number), POINTER(AdapterSite))
            num_floats = max(num_floats, self._adapters[number].num_floats)
            for place, numbers in enumerate((rows, np.flatnonzero(adapter_of_logits_row == index).astype(np.int32))):
                own.first[place], own.count[place], start = start, len(numbers), start + len(numbers)
                parts.append(numbers)
            if number in scalings:
                own.scalings, own.num_scalings = scalings[number].ctypes.data, scalings[number].shape[1]
        numbers = np.concatenate(parts)
        size = max(len(numbers), len(adapter_of_row) * self._max_chosen) * num_floats
        if size > len(self._low_rank):
            self._low_rank = np.empty(size, np.float32)
        self._kept_alive = pass_adapters, numbers, scalings
        if self._max_chosen:
            order = np.concatenate([np.flatnonzero(adapter_of_row < 0).astype(np.int32), *ranges.values()])
            self._kept_alive = *self._kept_alive, order, adapter_of_row
            record.row_order, record.adapter_of_row = order.ctypes.data, adapter_of_row.ctypes.data
        record.adapters, record.adapter_rows = addressof(pass_adapters), numbers.ctypes.data
        record.low_rank, record.low_rank_floats = self._low_rank.ctypes.data, num_floats
        record.num_adapters = len(pass_adapters)

    def _adapter_table(self, number: int) -> "Array[AdapterSite]":
        """Return an adapter's records, cached by its number: networks with many experts have thousands of sites."""
        if number not in self._tables:
            self._tables = {one: table for one, table in self._tables.items() if one in self._adapters}
            self._tables[number] = self._adapters[number].site_records(self._sites)
        return self._tables[number]
