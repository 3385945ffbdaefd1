"""Networks on our own kernels: weights are read as they are stored, and no row's bits depend on its neighbours."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.config import MAX_PASS_ROWS
from paceline.errors import CapacityError, ConfigError
from paceline.kv_cache.key_values import KeyValues, PagedRows
from paceline.kv_cache.paged import BLOCK_SIZE, KVCache
from paceline.kv_cache.recurrent import DEFAULT_STATES, RecurrentStates, StateLimits
from paceline.kv_cache.row_plan import TreeLayout
from paceline.kv_cache.window import PassLimits, WindowKeyValues, window_blocks
from paceline.models.adapters.adapter import Adapter
from paceline.models.adapters.network_adapter import to_network
from paceline.models.config import KVGroup, ModelConfig, WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.state_layout import StateLayout
from paceline.models.storage.mapped_files import MappedFiles
from paceline.models.weights import AnyTensor, GroupedTensor, TensorInfo, Weights
from paceline.runtimes.adapter_rows import ScalingPart, rows_by_adapter
from paceline.runtimes.base import (
    NO_MIXTURE_WITH_STATES,
    Capabilities,
    FloatArray,
    ForwardBatch,
    ForwardOutput,
    IntArray,
    Network,
    Numerics,
    Wanted,
    no_room_for_mixture,
)
from paceline.runtimes.decoder import BLOCK_MAX, HIDDEN_STATES, LAYER_ROWS, LOGITS, TOKEN_IDS, Compose, ranked
from paceline.runtimes.native.adapters import NativeAdapter, Sites
from paceline.runtimes.native.aligned import zeros
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.mixture import NativeMixture, add_memories_of_scaling_passes
from paceline.runtimes.native.packed_rows import PackedRows
from paceline.runtimes.native.panels import Panels
from paceline.runtimes.native.program import NativeBlocks, Recorded, share_memory
from paceline.runtimes.native.records import GRID, Rows
from paceline.runtimes.native.weights import NativeWeights
from paceline.runtimes.planes import planes_of
from paceline.runtimes.ranking import Ranking
from paceline.runtimes.rotary import LEAST_POSITIONS, RotaryTables
from paceline.runtimes.rounding import layer_rows, scaled_rows, table_rows

Inputs = Mapping[str, NDArray[Any]]
Scalings = Mapping[int, FloatArray]
_Place: TypeAlias = tuple[int, Rows, int]
"""Of a result: buffer, rows and width."""


class _Results(Mapping[str, FloatArray]):
    """The results of a pass where it left them: views, made when they are asked for.

    Args:
        places: of all results of the network.
        num_rows, num_wanted: of the pass.
    """

    __slots__ = ("_execution", "_num_rows", "_places")

    def __init__(self, execution: Execution, places: Mapping[str, _Place], num_rows: int, num_wanted: int) -> None:
        self._execution, self._places, self._num_rows = execution, places, (num_rows, num_wanted)

    def address_of(self, name: str) -> int:
        """Where a result's first row lies; 0 = there is no such result."""
        place = self._places.get(name)
        return 0 if place is None else self._execution.address(place[0])

    def __getitem__(self, name: str) -> FloatArray:
        buffer, rows, width = self._places[name]
        return self._execution.rows(buffer, self._num_rows[rows], width)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class NativeNetwork(Network):
    """A recorded network and the memory it runs in. Values are float32 between products; weights keep the type they are stored in."""

    weights: Weights

    def __init__(
        self,
        compose: Compose,
        config: ModelConfig,
        weights: Weights,
        *,
        num_threads: int,
        max_model_len: int,
        round_to: WeightType = WeightType.F32,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32,
        panels: dict[str, Panels] | None = None,
        cache_of: "NativeNetwork | None" = None,
        takes_adapters: bool = False,
    ) -> None:
        """Record the network; the weights stay where they are.

        Args:
            max_model_len: of the longest text there can be.
            round_to: type the weights' values are rounded to first, where they are stored in another.
            kv_cache_dtype: of its keys and values.
            panels: gets matrices in groups as they are laid out for rows that are rounded to 8 bits (kernels/panels.c), by name. None =
                groups stay as they are, and so do rows.
            cache_of: whose keys and values it reads; None = its own.
            takes_adapters: whether `load_adapter` can be asked.

        Raises:
            BackendUnavailableError: there are no kernels for this machine.
        """
        self.config, self.weights = config, weights
        self.capabilities = Capabilities(Numerics.EXACT, TreeLayout.MASK, "cpu", WeightType.F32, kv_cache_dtype)
        most = max(max_model_len, LEAST_POSITIONS) + MAX_PASS_ROWS
        self._round_to = round_to
        native_weights = NativeWeights(weights, round_to, panels=panels, num_threads=num_threads)
        self._shared = _Shared(native_weights, RotaryTables(config, most), num_threads, kv_cache_dtype, {} if takes_adapters else None)
        self._cache_config = config
        if cache_of is not None:
            self._cache_config = cache_of.config
            cache_of._shared.add_reader(self._shared)
        path = kernels_path()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None else "none"
        stored = sorted({f"{facts.weight_type.value}{_bits(facts)}" for facts in map(weights.info, weights)})
        computed = round_to.value if panels is None else "bytes"
        self.version = f"kernels {digest}, {num_threads} threads, {' '.join(stored)} as {computed}, cache {kv_cache_dtype.value}"
        self._compose(compose)

    @property
    def holds_windows(self) -> bool:
        """As in `Network`; a path's blocks are known to the cache alone."""
        return self.capabilities.tree_layout is not TreeLayout.PATHS

    @property
    def num_passes(self) -> int:
        return self._shared.num_passes

    @num_passes.setter
    def num_passes(self, count: int) -> None:
        self._shared.num_passes = count

    def new_key_values(self, num_blocks: int) -> list[KeyValues]:
        groups = self.config.kv_groups(by_window=False)
        memories = [KeyValues(self._new_storage(group, num_blocks), self._rows) for group in groups]
        self._shared.use_cache(planes_of(self.config, groups, memories))
        return memories

    def new_cache(self, num_blocks: int, limits: PassLimits | None = None, states: StateLimits = DEFAULT_STATES) -> KVCache:
        cache = self._new_windows(num_blocks, limits) if self.config.windows and self.holds_windows else super().new_cache(num_blocks)
        if self.config.recurrents:
            if self.capabilities.tree_layout is TreeLayout.PATHS:
                raise ConfigError("layers with a recurrent state take no trees as paths")
            layout = StateLayout.of(self.config.recurrents)
            memory = RecurrentStates(layout.state_size, layout.record_size, BLOCK_SIZE, zeros, states, grid=GRID)
            self._shared.use_states(memory)
            cache.add(memory)
        return cache

    def _new_windows(self, num_blocks: int, limits: PassLimits | None) -> KVCache:
        groups, memories, windows = self.config.kv_groups(), list[PagedRows](), list[WindowKeyValues]()
        for group in groups:
            if group.window is None:
                memories.append(KeyValues(self._new_storage(group, num_blocks), self._rows))
            else:
                own_blocks = window_blocks(group.window, num_blocks, limits, BLOCK_SIZE)
                windows.append(WindowKeyValues(self._new_storage(group, own_blocks), group.window, BLOCK_SIZE, self._rows))
                memories.append(windows[-1])
        self._shared.use_cache(planes_of(self.config, groups, memories), windows)
        return KVCache(memories, num_blocks, self.capabilities.tree_layout)

    @property
    def num_scaling_passes(self) -> int:
        return self._shared.num_scaling_passes

    @property
    def takes_mixtures(self) -> bool:
        return self._shared.scaling_program is not None

    def keep_scaling_passes(self, cache: KVCache) -> None:
        """As in `Network`: the network is recorded once more, over memories like those of the cache."""
        if self._shared.adapters is None:
            super().keep_scaling_passes(cache)
        if self.config.recurrents:
            raise ConfigError(NO_MIXTURE_WITH_STATES)
        memories = add_memories_of_scaling_passes(cache, self._rows)
        windows = [memory for memory in memories if isinstance(memory, WindowKeyValues)]
        planes = planes_of(self.config, self.config.kv_groups(by_window=bool(windows)), memories)
        self._shared.scaling_program = self._recorded(None)
        self._shared.scaling_program.execution.use_cache(planes, windows, None, self.capabilities.kv_cache_dtype)

    @property
    def _rows(self) -> PackedRows:
        return PackedRows(self.capabilities.kv_cache_dtype, BLOCK_SIZE)

    def _new_storage(self, group: KVGroup, num_blocks: int) -> NDArray[np.uint8]:
        try:
            return zeros(group.stored_shape(num_blocks, BLOCK_SIZE, self.capabilities.kv_cache_dtype), np.uint8)
        except MemoryError as error:
            raise CapacityError(f"a cache of {num_blocks} blocks does not fit in memory: lower kv_cache_gb") from error

    def forward(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch, wanted: Wanted) -> ForwardOutput:
        program, shared = self._programs.get(wanted.ranking) or self._record(wanted.ranking), self._shared
        shared.files.check()
        shared.num_passes += 1
        scalings = self._scalings(inputs, batch) if shared.mixtures else {}
        results = self._run(program, inputs, batch, wanted, scalings)
        return ForwardOutput(results, results.address_of)

    def _run(self, program: "_Program", inputs: Inputs, batch: ForwardBatch, wanted: Wanted, scalings: Scalings) -> _Results:
        num_rows, execution = len(batch.positions), program.execution
        execution.make_room(num_rows)
        for name, buffer in program.inputs.items():
            execution.rows(buffer, num_rows)[...] = self._input(name, inputs, batch)
        execution.run(batch, wanted, scalings)
        return _Results(execution, program.results, num_rows, len(wanted.rows))

    def _scalings(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch) -> dict[int, FloatArray]:
        """The scalings of all rows with X-LoRA, by the number of their adapter, from a pass over them with keys and values of its own."""
        shared, program = self._shared, self._shared.scaling_program
        mixtures = {item.adapter: shared.mixtures[item.adapter] for item in batch.ranges if item.adapter in shared.mixtures}
        if not mixtures or program is None:
            return {}
        part = ScalingPart.of(inputs, batch, {number: mixture.pass_scaling for number, mixture in mixtures.items()})
        constants = {number: mixtures[number].constant(len(part.rows[number])) for number in part.scaled}
        hidden = self._run(program, part.inputs, part.batch, Wanted(np.zeros(0, np.int32)), constants)[HIDDEN_STATES]
        shared.num_scaling_passes += 1
        return {number: mixture.scalings(hidden[part.rows[number]]) for number, mixture in mixtures.items()}

    def _input(self, name: str, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch) -> NDArray[Any]:
        if name == TOKEN_IDS:
            return self._embed_adapted(inputs[TOKEN_IDS], batch) if self._shared.adapters else self.embed(inputs[TOKEN_IDS])
        if name == LAYER_ROWS:
            return layer_rows(self.weights, inputs[TOKEN_IDS], self.config, self._round_to)
        return inputs[name]

    def embed(self, token_ids: IntArray) -> FloatArray:
        return scaled_rows(self._table_rows(token_ids), self.config, self._round_to)

    def _table_rows(self, token_ids: IntArray) -> FloatArray:
        table = self._embedding
        return table.rows(token_ids) if isinstance(table, Panels) else table_rows(table, token_ids, self._round_to)

    def _embed_adapted(self, token_ids: IntArray, batch: ForwardBatch) -> FloatArray:
        """As `embed`, each row with its adapter."""
        embedded = self.embed(token_ids)
        for number, rows in rows_by_adapter(batch).items():
            adapter, ids = self._adapters[number].placed, token_ids[rows]
            if adapter.changes_embedding:
                own = adapter.embedding_rows(self._table_rows(ids), ids)
                embedded[rows] = scaled_rows(own, self.config, self._round_to)
        return embedded

    @property
    def _adapters(self) -> dict[int, NativeAdapter]:
        return self._shared.adapters or {}

    def load_adapter(self, adapter: Adapter) -> int:
        if self._shared.adapters is None:
            return super().load_adapter(adapter)
        if adapter.mixture is not None and not self.takes_mixtures:
            raise ConfigError(no_room_for_mixture(adapter.name))
        own = to_network(adapter, self.config)
        mixture = None if own.mixture is None else NativeMixture(own.mixture, self.config, self._shared.num_threads)
        loaded = NativeAdapter(own)
        for program in self._programs.values():
            loaded.table(program.sites)
        number = next(self._shared.adapter_numbers)
        if mixture is not None:
            self._shared.mixtures[number] = mixture
        self._shared.adapters[number] = loaded
        return number

    def unload_adapter(self, number: int) -> None:
        del self._adapters[number]
        self._shared.mixtures.pop(number, None)

    def beside(self, compose: Compose) -> "NativeNetwork":
        other = NativeNetwork.__new__(NativeNetwork)
        other.__dict__.update(self.__dict__)
        other._compose(compose)
        return other

    def vocabulary_panels(self, count: int) -> Panels | None:
        """The first `count` rows of the vocabulary matrix, where it lies in panels."""
        panels = self._shared.weights.table("embedding" if self.config.tied_embeddings else "lm_head")
        return panels.first(count) if isinstance(panels, Panels) else None

    def reader(self, compose: Compose, config: ModelConfig, weights: Weights, *, max_model_len: int) -> "NativeNetwork":
        return NativeNetwork(
            compose,
            config,
            weights,
            num_threads=self._shared.num_threads,
            kv_cache_dtype=self.capabilities.kv_cache_dtype,
            max_model_len=max_model_len,
            cache_of=self,
        )

    def _compose(self, compose: Compose) -> None:
        self.compose = compose
        self._programs: dict[Ranking | None, _Program] = {}
        program = self._record(None)
        if TOKEN_IDS in program.inputs:  # a tied matrix is read where products read it
            self._embedding: AnyTensor | Panels = self._shared.weights.table("embedding")
            self._shared.read_too(_arrays(self._embedding))
        if LAYER_ROWS in program.inputs:
            self._shared.read_too(self.weights.stored("layer_embedding.weight"))

    def _record(self, ranking: Ranking | None) -> "_Program":
        program = self._recorded(ranking)
        self._shared.add(program.execution)
        self._programs[ranking] = program  # last: an interrupt before leaves no program without a cache
        return program

    def _recorded(self, ranking: Ranking | None) -> "_Program":
        """A program that has no cache yet."""
        shared = self._shared
        blocks = NativeBlocks(self.config, shared.weights, self._cache_config, takes_adapters=shared.adapters is not None)
        results = dict(ranked(self.compose, ranking)(blocks))
        if ranking is None and TOKEN_IDS in blocks.inputs and LOGITS in results:
            block_max = blocks.keep_block_max(results[LOGITS])
            if block_max is not None:
                results[BLOCK_MAX] = block_max
        buffers, widths = share_memory(blocks, {value.index for value in results.values()})
        recorded = Recorded(blocks.operations, widths, blocks.sites)
        return _Program(
            Execution(recorded, num_threads=shared.num_threads, tables=shared.tables, adapters=shared.adapters),
            {name: buffers[value.index] for name, value in blocks.inputs.items()},
            {name: (buffers[value.index], value.rows, blocks.result_width(value)) for name, value in results.items()},
            tuple(blocks.sites),
        )


@dataclass(frozen=True, slots=True)
class _Program:
    """A composition as it was recorded: the buffer of each input; buffer, rows and width of each result; where adapters add to products."""

    execution: Execution
    inputs: Mapping[str, int]
    results: Mapping[str, _Place]
    sites: Sites


def _bits(facts: TensorInfo) -> str:
    return "" if facts.bits is None else f" in {facts.bits} bits"


@dataclass(slots=True)
class _Shared:
    """What networks beside one another have in common."""

    weights: NativeWeights
    tables: RotaryTables
    num_threads: int
    kv_cache_dtype: KVCacheDtype
    adapters: dict[int, NativeAdapter] | None = None  # None = there can be none
    adapter_numbers: Iterator[int] = field(default_factory=partial(count, 1))
    num_passes: int = 0
    mixtures: dict[int, NativeMixture] = field(default_factory=dict)  # of X-LoRA adapters, by their numbers
    num_scaling_passes: int = 0
    scaling_program: _Program | None = None  # None = there are no scaling passes
    files: MappedFiles = field(default_factory=lambda: MappedFiles(()))
    _cache: tuple[Sequence[NDArray[np.uint8]], Sequence[WindowKeyValues], RecurrentStates | None] | None = None
    _executions: list[Execution] = field(default_factory=list)
    _readers: "list[_Shared]" = field(default_factory=list)
    _also_read: list[NDArray[Any]] = field(default_factory=list)

    def use_cache(
        self, planes: Sequence[NDArray[np.uint8]], windows: Sequence[WindowKeyValues] = (), states: RecurrentStates | None = None
    ) -> None:
        self._cache = planes, windows, states
        for execution in self._executions:
            execution.use_cache(planes, windows, states, self.kv_cache_dtype)
        for reader in self._readers:
            reader.use_cache(planes, windows, states)

    def use_states(self, states: RecurrentStates) -> None:
        """Use this memory of recurrent layers beside the keys and values in use."""
        if self._cache is not None:
            self.use_cache(*self._cache[:2], states)

    def add_reader(self, reader: "_Shared") -> None:
        """Others that use this cache, whichever it is."""
        self._readers.append(reader)
        if self._cache is not None:
            reader.use_cache(*self._cache)

    def add(self, execution: Execution) -> None:
        if self._cache is not None:
            execution.use_cache(*self._cache, self.kv_cache_dtype)
        self._executions.append(execution)
        self.read_too(())

    def read_too(self, arrays: tuple[NDArray[Any], ...]) -> None:
        """Watch the files of what products read, and of these."""
        self._also_read += arrays
        self.files = MappedFiles([*self.weights.arrays, *self._also_read])


def _arrays(embedding: AnyTensor | Panels) -> tuple[NDArray[Any], ...]:
    if isinstance(embedding, Panels):
        return (embedding.data,)
    return embedding.matrix.arrays if isinstance(embedding, GroupedTensor) else (embedding.array,)
