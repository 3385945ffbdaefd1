"""Networks computed by the CPU kernels of kernels/, which read weights as they are stored and are exact (`Numerics`)."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import MAX_PASS_ROWS
from paceline.errors import CapacityError
from paceline.kv_cache.cache import BLOCK_SIZE, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache, PagedCache
from paceline.kv_cache.recurrent_state import CHECKPOINT_DEFAULTS, CheckpointConfig, RecurrentStateCache
from paceline.kv_cache.sliding_window import PassLimits, SlidingWindowCache, num_window_blocks
from paceline.models.adapters.adapter import Adapter, XLoraMixture
from paceline.models.adapters.network_adapter import to_network_adapter
from paceline.models.config import KVGroup, ModelConfig, WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.layers import Activation
from paceline.models.state_layout import StateLayout
from paceline.models.storage.mapped_files import MappedFiles
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, Weights
from paceline.runtimes.base import Capabilities, FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network, Numerics
from paceline.runtimes.decoder import BLOCK_MAX, HIDDEN_STATES, LOGITS, PER_LAYER_EMBEDDINGS, TOKEN_IDS, NetworkDefinition, with_summaries
from paceline.runtimes.embedding import per_layer_embedding_rows, scaled_embeddings, unscaled_embedding_rows
from paceline.runtimes.logits_summary import SummaryOptions
from paceline.runtimes.native.adapters import AdapterSiteNames, NativeAdapter
from paceline.runtimes.native.aligned import aligned_zeros
from paceline.runtimes.native.buffers import assign_buffers
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.packed_weights import PackedWeights
from paceline.runtimes.native.program import NativeOps
from paceline.runtimes.native.records import CHECKPOINT_INTERVAL, RowSelection
from paceline.runtimes.native.rotary import MIN_POSITIONS, RotaryTables
from paceline.runtimes.native.weights import NativeWeights
from paceline.runtimes.xlora import Classifier, Inputs, Scalings, check_supports_xlora, check_xlora_enabled, compute_scalings

_NUMPY_TYPES = {KVCacheDtype.F32: np.float32, KVCacheDtype.BF16: np.uint16, KVCacheDtype.F16: np.float16, KVCacheDtype.INT8: np.int8}


class NativeNetwork(Network):
    """A network that records its operations once; each pass runs them in the kernels. Activations are float32."""

    weights: Weights
    has_window_eviction = True

    def __init__(
        self,
        definition: NetworkDefinition,
        config: ModelConfig,
        weights: Weights,
        *,
        num_threads: int,
        max_model_len: int,
        compute_type: WeightType = WeightType.F32,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32,
        packed: dict[str, PackedWeights] | None = None,
        kv_source: "NativeNetwork | None" = None,
        supports_adapters: bool = False,
    ) -> None:
        """Record the network.

        Args:
            max_model_len: maximum length of a sequence.
            compute_type: weights of another float type are rounded to it.
            kv_cache_dtype: type of cached keys and values.
            packed: cache of quantised matrices in panels, by name; filled when matrices are packed. In products with them, rows are
                rounded to 8 bits. None = matrices are not packed, and rows are not rounded.
            kv_source: network whose keys and values the attention layers read; None = the network has its own cache.
            supports_adapters: whether `load_adapter` is supported.

        Raises:
            BackendUnavailableError: there are no kernels for this machine.
        """
        self.config, self.weights = config, weights
        self.capabilities = Capabilities(Numerics.EXACT, "cpu", WeightType.F32, kv_cache_dtype)
        max_position = max(max_model_len, MIN_POSITIONS) + MAX_PASS_ROWS
        self._compute_type = compute_type
        native_weights = NativeWeights(weights, compute_type, packed=packed, num_threads=num_threads)
        self._shared = _SharedState(
            native_weights, RotaryTables(config, max_position), num_threads, kv_cache_dtype, {} if supports_adapters else None
        )
        self._cache_config = config
        if kv_source is not None:
            self._cache_config = kv_source.config
            kv_source._shared.add_kv_reader(self._shared)
        path = kernels_path()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None else "none"
        types = {(info.weight_type.value, info.bits) for info in map(weights.tensor_info, weights)}
        weight_types = sorted(kind if bits is None else f"{kind} in {bits} bits" for kind, bits in types)
        row_type = compute_type.value if packed is None else "bytes"
        self.execution_key = (
            f"kernels {digest}, {num_threads} threads, {' '.join(weight_types)} as {row_type}, cache {kv_cache_dtype.value}"
        )
        self._set_definition(definition)

    @property
    def num_passes(self) -> int:
        return self._shared.num_passes

    @num_passes.setter
    def num_passes(self, count: int) -> None:
        self._shared.num_passes = count

    def allocate_kv(self, num_blocks: int) -> list[PagedCache]:
        return self._allocate_kv(num_blocks, by_window=False)

    def new_cache(self, num_blocks: int, limits: PassLimits | None = None, checkpoints: CheckpointConfig = CHECKPOINT_DEFAULTS) -> KVCache:
        states = None
        if self.config.recurrent_layers:
            layout = StateLayout.for_layers(self.config.recurrent_layers)
            states = RecurrentStateCache(
                layout.num_state_values, layout.num_record_values, BLOCK_SIZE, aligned_zeros, checkpoints, chunk_size=CHECKPOINT_INTERVAL
            )
        caches = self._allocate_kv(num_blocks, limits, states, by_window=self.has_window_eviction)
        return KVCache(caches if states is None else [*caches, states], num_blocks)

    def _allocate_kv(
        self, num_blocks: int, limits: PassLimits | None = None, states: RecurrentStateCache | None = None, *, by_window: bool
    ) -> list[PagedCache]:
        """Allocate a cache for each group of layers that share blocks, and use these caches and `states` from now on.

        Args:
            states: cache of the recurrent layers.
            by_window: layers with different sliding windows are in different groups, and rows outside a window are freed.
        """
        groups, caches, windows = self.config.kv_groups(by_window=by_window), list[PagedCache](), list[SlidingWindowCache]()
        for group in groups:
            copy_row = KVBlockCodec(self.capabilities.kv_cache_dtype, BLOCK_SIZE, group.arrays_per_layer).copy_row
            if group.window is None:
                caches.append(FullAttentionCache(self._allocate_storage(group, num_blocks), copy_row))
            else:
                own_blocks = num_window_blocks(group.window, num_blocks, limits, BLOCK_SIZE)
                windows.append(SlidingWindowCache(self._allocate_storage(group, own_blocks), group.window, BLOCK_SIZE, copy_row))
                caches.append(windows[-1])
        self._shared.set_cache(self.kv_arrays_of_layers(groups, caches), windows, states)
        return caches

    @property
    def num_xlora_passes(self) -> int:
        return self._shared.num_xlora_passes

    @property
    def supports_xlora(self) -> bool:
        return self._shared.xlora_program is not None

    def enable_xlora(self, cache: KVCache) -> None:
        """See `Network`. Records the network a second time, for scaling passes, which have their own keys and values."""
        if self._shared.adapters is None:
            super().enable_xlora(cache)
        check_supports_xlora(self.config)
        caches = _add_scaling_pass_caches(cache)
        windows = [own for own in caches if isinstance(own, SlidingWindowCache)]
        storage = self.kv_arrays_of_layers(self.config.kv_groups(by_window=bool(windows)), caches)
        self._shared.xlora_program = self._record_program(None)
        self._shared.xlora_program.execution.set_cache(storage, windows, None, self.capabilities.kv_cache_dtype)

    def _allocate_storage(self, group: KVGroup, num_blocks: int) -> NDArray[np.uint8]:
        try:
            return aligned_zeros(group.stored_shape(num_blocks, BLOCK_SIZE, self.capabilities.kv_cache_dtype), np.uint8)
        except MemoryError as error:
            raise CapacityError(f"a cache of {num_blocks} blocks does not fit in memory: lower kv_cache_gb") from error

    def forward(self, inputs: Inputs, batch: ForwardBatch, logits_rows: LogitsRows) -> ForwardOutput:
        program, shared = self._programs.get(logits_rows.summary) or self._create_program(logits_rows.summary), self._shared
        shared.mapped_files.check_not_truncated()
        shared.num_passes += 1
        scalings = compute_scalings(shared.classifiers, inputs, batch, self._run_scaling_pass) if shared.classifiers else {}
        return ForwardOutput(self._run_program(program, inputs, batch, logits_rows, scalings))

    def _run_program(
        self, program: "_Program", inputs: Inputs, batch: ForwardBatch, logits_rows: LogitsRows, scalings: Scalings
    ) -> dict[str, FloatArray]:
        """Run one pass of a recorded network and return its results by name, as views of buffers."""
        num_rows, execution = len(batch.positions), program.execution
        execution.reserve_rows(num_rows)
        for name, buffer in program.inputs.items():
            execution.buffer_rows(buffer, num_rows)[...] = self._input_rows(name, inputs, batch)
        execution.run(batch, logits_rows, scalings)
        counts = {RowSelection.ALL: num_rows, RowSelection.LOGITS: len(logits_rows.rows)}
        return {name: execution.buffer_rows(buffer, counts[rows], width) for name, (buffer, rows, width) in program.results.items()}

    def _run_scaling_pass(self, inputs: Inputs, batch: ForwardBatch, scalings: Scalings) -> FloatArray:
        program = self._shared.xlora_program
        assert program is not None  # without it, `load_adapter` rejects X-LoRA adapters
        self._shared.num_xlora_passes += 1
        return self._run_program(program, inputs, batch, LogitsRows(np.zeros(0, np.int32)), scalings)[HIDDEN_STATES]

    def _input_rows(self, name: str, inputs: Inputs, batch: ForwardBatch) -> NDArray[Any]:
        if name == TOKEN_IDS:
            return self._embed_with_adapters(inputs[TOKEN_IDS], batch) if self._shared.adapters else self.embed(inputs[TOKEN_IDS])
        if name == PER_LAYER_EMBEDDINGS:
            return per_layer_embedding_rows(self.weights, inputs[TOKEN_IDS], self.config, self._compute_type)
        return inputs[name]

    def embed(self, token_ids: IntArray) -> FloatArray:
        return scaled_embeddings(self._embedding_rows(token_ids), self.config, self._compute_type)

    def _embedding_rows(self, token_ids: IntArray) -> FloatArray:
        table = self._embedding
        return table.rows(token_ids) if isinstance(table, PackedWeights) else unscaled_embedding_rows(table, token_ids, self._compute_type)

    def _embed_with_adapters(self, token_ids: IntArray, batch: ForwardBatch) -> FloatArray:
        """Return embedding rows, to which the adapter of each row is applied."""
        embedded = self.embed(token_ids)
        for number, rows in batch.rows_by_adapter().items():
            adapter, ids = self._adapters[number].network_adapter, token_ids[rows]
            if adapter.changes_embedding:
                own = adapter.adapt_embeddings(self._embedding_rows(ids), ids)
                embedded[rows] = scaled_embeddings(own, self.config, self._compute_type)
        return embedded

    @property
    def _adapters(self) -> dict[int, NativeAdapter]:
        return self._shared.adapters or {}

    def load_adapter(self, adapter: Adapter) -> int:
        if self._shared.adapters is None:
            return super().load_adapter(adapter)
        check_xlora_enabled(self, adapter)
        own = to_network_adapter(adapter, self.config)
        classifier = None if own.mixture is None else NativeClassifier(own.mixture, self.config, self._shared.num_threads)
        loaded = NativeAdapter(own)
        for program in self._programs.values():
            loaded.site_records(program.sites)
        number = next(self._shared.adapter_numbers)
        if classifier is not None:
            self._shared.classifiers[number] = classifier
        self._shared.adapters[number] = loaded
        return number

    def unload_adapter(self, number: int) -> None:
        del self._adapters[number]
        self._shared.classifiers.pop(number, None)

    def network_with_same_weights(self, definition: NetworkDefinition) -> "NativeNetwork":
        other = copy(self)
        other._set_definition(definition)
        return other

    def packed_lm_head_rows(self, num_rows: int) -> PackedWeights | None:
        """Return the first rows of `lm_head` in panels; None = `lm_head` is not packed."""
        table = self._shared.weights.lookup_table("embedding" if self.config.tied_embeddings else "lm_head")
        return table.first_outputs(num_rows) if isinstance(table, PackedWeights) else None

    def network_on_shared_kv(
        self, definition: NetworkDefinition, config: ModelConfig, weights: Weights, *, max_model_len: int
    ) -> "NativeNetwork":
        return NativeNetwork(
            definition,
            config,
            weights,
            num_threads=self._shared.num_threads,
            kv_cache_dtype=self.capabilities.kv_cache_dtype,
            max_model_len=max_model_len,
            packed={},
            kv_source=self,
        )

    def _set_definition(self, definition: NetworkDefinition) -> None:
        self.definition = definition
        self._programs: dict[SummaryOptions | None, _Program] = {}
        program = self._create_program(None)
        if TOKEN_IDS in program.inputs:  # a language model, which looks up embedding rows; with tied embeddings, in the matrix of lm_head
            self._embedding: AnyTensor | PackedWeights = self._shared.weights.lookup_table("embedding")
            self._shared.check_truncation_of(_arrays_of_embedding(self._embedding))
        if PER_LAYER_EMBEDDINGS in program.inputs:
            self._shared.check_truncation_of(self.weights.source_arrays("layer_embedding.weight"))

    def _create_program(self, summary: SummaryOptions | None) -> "_Program":
        program = self._record_program(summary)
        self._shared.add_execution(program.execution)
        self._programs[summary] = program  # stored last, so that an interrupt (Ctrl-C) cannot leave a program without a cache
        return program

    def _record_program(self, summary: SummaryOptions | None) -> "_Program":
        """Record the network, still without a cache. `summary`: return summaries of logits instead of logits; None = return logits."""
        shared = self._shared
        ops = NativeOps(self.config, shared.weights, self._cache_config, supports_adapters=shared.adapters is not None)
        results = dict(with_summaries(self.definition, summary)(ops))
        if summary is None and TOKEN_IDS in ops.inputs and LOGITS in results:
            block_max = ops.record_block_max(results[LOGITS])
            if block_max is not None:
                results[BLOCK_MAX] = block_max
        buffers, widths = assign_buffers(ops, {value.index for value in results.values()})
        return _Program(
            Execution(ops, widths, num_threads=shared.num_threads, tables=shared.tables, adapters=shared.adapters),
            {name: buffers[value.index] for name, value in ops.inputs.items()},
            {name: (buffers[value.index], value.rows, ops.result_width(value)) for name, value in results.items()},
            tuple(ops.sites),
        )


@dataclass(frozen=True, slots=True)
class _Program:
    """A recorded network: buffer of each input; buffer, rows and width of each result; names of the matrices that adapters can change."""

    execution: Execution
    inputs: Mapping[str, int]
    results: Mapping[str, tuple[int, RowSelection, int]]
    sites: AdapterSiteNames


@dataclass(slots=True)
class _SharedState:
    """State that networks with the same weights share."""

    weights: NativeWeights
    tables: RotaryTables
    num_threads: int
    kv_cache_dtype: KVCacheDtype
    adapters: dict[int, NativeAdapter] | None = None  # loaded adapters by adapter number; None = adapters are not supported
    adapter_numbers: Iterator[int] = field(default_factory=partial(count, 1))
    num_passes: int = 0
    classifiers: "dict[int, NativeClassifier]" = field(default_factory=dict)  # X-LoRA classifiers by adapter number
    num_xlora_passes: int = 0
    xlora_program: _Program | None = None  # the recorded network for scaling passes; None = X-LoRA is not enabled
    mapped_files: MappedFiles = field(default_factory=lambda: MappedFiles(()))  # weight files, checked for truncation before each pass
    _cache: tuple[Sequence[NDArray[np.uint8]], Sequence[SlidingWindowCache], RecurrentStateCache | None] | None = None
    _executions: list[Execution] = field(default_factory=list)  # of all recorded programs that use these weights
    _kv_readers: "list[_SharedState]" = field(default_factory=list)
    _checked_arrays: list[NDArray[Any]] = field(default_factory=list)

    def set_cache(
        self, kv_storage: Sequence[NDArray[np.uint8]], windows: Sequence[SlidingWindowCache] = (), states: RecurrentStateCache | None = None
    ) -> None:
        self._cache = kv_storage, windows, states
        for execution in self._executions:
            execution.set_cache(kv_storage, windows, states, self.kv_cache_dtype)
        for reader in self._kv_readers:
            reader.set_cache(kv_storage, windows, states)

    def add_kv_reader(self, reader: "_SharedState") -> None:
        """Make a network with other weights use this network's cache, also after `set_cache` replaces it."""
        self._kv_readers.append(reader)
        if self._cache is not None:
            reader.set_cache(*self._cache)

    def add_execution(self, execution: Execution) -> None:
        if self._cache is not None:
            execution.set_cache(*self._cache, self.kv_cache_dtype)
        self._executions.append(execution)
        self.check_truncation_of(())

    def check_truncation_of(self, arrays: tuple[NDArray[Any], ...]) -> None:
        """If these arrays are views of memory-mapped files, check before each later pass that the files were not truncated."""
        self._checked_arrays += arrays
        self.mapped_files = MappedFiles([*self.weights.arrays, *self._checked_arrays])


def _arrays_of_embedding(embedding: AnyTensor | PackedWeights) -> tuple[NDArray[Any], ...]:
    if isinstance(embedding, PackedWeights):
        return (embedding.data,)
    return embedding.matrix.arrays if isinstance(embedding, GroupedTensor) else (embedding.array,)


@dataclass(frozen=True, slots=True)
class KVBlockCodec:
    """Copies rows of storage [arrays_per_layer * layers, num_blocks, K, bytes] uint8 in the layout of kernels/kv_blocks.h.

    Keys of layer i are at 2 * i, values at 2 * i + 1. If a layer has one array (`KVGroup.arrays_per_layer`), it has the layout of values.
    Keys are column-major, values row-major. bfloat16 is interleaved in pairs (two columns of keys, two rows of values), int8 keys in quads
    of columns. A float32 scale for each int8 row follows the codes.
    """

    kv_cache_dtype: KVCacheDtype
    block_size: int
    arrays_per_layer: int = 2

    def copy_row(self, storage: NDArray[np.uint8], source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy the keys and values of one token in all layers. `source` and `target`: (block, slot)."""
        for rows, copies in zip(self.row_views(storage, *source), self.row_views(storage, *target), strict=True):
            copies[...] = rows

    def row_views(self, storage: NDArray[np.uint8], block: int, slot: int) -> Iterator[NDArray[Any]]:
        """Yield views of the keys and of the values of one token, then of their scales if the type is int8."""
        size, item = self.block_size, np.dtype(_NUMPY_TYPES[self.kv_cache_dtype])
        scales = 4 * size if self.kv_cache_dtype is KVCacheDtype.INT8 else 0
        columns = (storage.shape[-1] - scales) // (size * item.itemsize)
        codes = storage[:, block, :, : size * columns * item.itemsize].view(item)
        keys, values = (codes[0::2], codes[1::2]) if self.arrays_per_layer == 2 else (codes[:0], codes)
        if self.kv_cache_dtype is KVCacheDtype.BF16:
            yield keys.reshape(*keys.shape[:2], columns // 2, size, 2)[:, :, :, slot]
            yield values.reshape(*values.shape[:2], size // 2, columns, 2)[:, :, slot // 2, :, slot % 2]
        else:
            interleaved = 4 if self.kv_cache_dtype is KVCacheDtype.INT8 else 1
            yield keys.reshape(*keys.shape[:2], columns // interleaved, size, interleaved)[:, :, :, slot]
            yield values.reshape(*values.shape[:2], size, columns)[:, :, slot]
        if scales:
            results = storage[:, block, :, -scales:].view(np.float32)[..., slot]
            yield results[0::2]
            yield results[1::2]


class NativeClassifier(Classifier):
    """An X-LoRA classifier computed by the kernels, so that a row's bits do not depend on other rows."""

    def __init__(self, mixture: XLoraMixture, config: ModelConfig, num_threads: int) -> None:
        super().__init__(mixture)
        arrays = {
            f"classifier.{number}.{kind}": values
            for number, layer in enumerate(mixture.classifier)
            for kind, values in zip(("weight", "bias"), layer, strict=True)
        }
        weights = Weights({name: Tensor(values, WeightType.F32, values.shape) for name, values in arrays.items()})
        self._weights = NativeWeights(
            weights, WeightType.F32, num_threads=num_threads
        )  # kept alive, because operations point to its arrays
        ops = NativeOps(config, self._weights, config)
        value = hidden_states = ops.input(HIDDEN_STATES, config.hidden_size)
        for number in range(len(mixture.classifier)):
            if number:
                value = ops.activated(value, Activation.RELU)
            (value,) = ops.linear(value, f"classifier.{number}")
        buffers, widths = assign_buffers(ops, {value.index})
        self._execution = Execution(ops, widths, num_threads=num_threads)
        self._input, self._result, self._width = buffers[hidden_states.index], buffers[value.index], value.width

    def logits(self, hidden_states: FloatArray) -> FloatArray:  # of the scalings
        num_rows = len(hidden_states)
        self._execution.reserve_rows(num_rows)
        self._execution.buffer_rows(self._input, num_rows)[...] = hidden_states
        self._execution.run(ForwardBatch(np.zeros(num_rows, np.int32), ()), LogitsRows(np.zeros(0, np.int32)))
        return self._execution.buffer_rows(self._result, num_rows, self._width)


def _add_scaling_pass_caches(cache: KVCache) -> list[PagedCache]:
    """For each layer cache of `cache`, add another one for scaling passes. Return the added layer caches.

    Raises:
        CapacityError: the added layer caches do not fit in memory.
    """
    added = list[PagedCache]()
    try:
        for layer_cache in list(cache.layer_caches):
            assert isinstance(layer_cache, PagedCache)
            storage, copy_row = np.zeros_like(layer_cache.storage), layer_cache.copy_packed_row
            if isinstance(layer_cache, SlidingWindowCache):
                added.append(SlidingWindowCache(storage, layer_cache.window, BLOCK_SIZE, copy_row))
            else:
                added.append(FullAttentionCache(storage, copy_row))
    except MemoryError as error:
        raise CapacityError("keys and values of X-LoRA's scaling passes do not fit in memory: lower kv_cache_gb") from error
    for layer_cache in added:
        cache.add_layer_cache(layer_cache)
    return added
