"""Networks computed with torch: on CUDA, and on the CPU as a reference for tests."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import torch
from torch.nn import functional as F

from paceline.errors import CapacityError
from paceline.kv_cache.cache import BLOCK_SIZE, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.recurrent_state import CHECKPOINT_DEFAULTS, CheckpointConfig, RecurrentStateCache
from paceline.kv_cache.sliding_window import PassLimits
from paceline.models.adapters.adapter import Adapter
from paceline.models.adapters.network_adapter import to_network_adapter
from paceline.models.config import ModelConfig, WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.state_layout import StateLayout
from paceline.models.weights import Weights
from paceline.runtimes.base import Capabilities, FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network, Numerics, RowRange
from paceline.runtimes.decoder import HIDDEN_STATES, LOGITS, SUMMARY, NetworkDefinition, with_summaries
from paceline.runtimes.torch.adapters import TorchAdapter
from paceline.runtimes.torch.attention import PaddedAttention, RangeAttention
from paceline.runtimes.torch.ops import TorchOps, scaled_embeddings
from paceline.runtimes.torch.recurrent import RecurrentPass
from paceline.runtimes.torch.weights import DTYPES, TorchWeights
from paceline.runtimes.xlora import Inputs, Scalings, check_supports_xlora, check_xlora_enabled, compute_scalings


class TorchNetwork(Network):
    """A network that calls its `definition` with tensors in each pass.

    Torch selects kernels by shape, so the bits of a row depend on the number of rows: numerics are FAST.
    """

    def __init__(
        self,
        definition: NetworkDefinition,
        config: ModelConfig,
        weights: Weights,
        *,
        device: str = "cpu",
        weight_type: WeightType = WeightType.F32,
        kv_source: "TorchNetwork | None" = None,
    ) -> None:
        """
        Args:
            device: "cpu" or "cuda"; a weight is copied to it when it is first used.
            weight_type: type of weights, cache and computation.
            kv_source: network whose keys and values the attention layers read; None = the network has its own cache.
        """
        self.config, self.definition, self.weights = config, definition, weights
        self.capabilities = Capabilities(Numerics.FAST, device, weight_type, KVCacheDtype(weight_type.value))
        self._layout = StateLayout.for_layers(config.recurrent_layers)
        tensors = TorchWeights(weights, dtype=DTYPES[weight_type], device=torch.device(device), norms_in_float32=config.has_norm_offset)
        self._shared = self._cache_shared = _SharedState(tensors)
        if kv_source is not None:
            self._cache_shared = kv_source._cache_shared
        else:
            self.allocate_kv(1)

    @property
    def num_passes(self) -> int:
        return self._shared.num_passes

    @num_passes.setter
    def num_passes(self, count: int) -> None:
        self._shared.num_passes = count

    @property
    def num_xlora_passes(self) -> int:
        return self._shared.num_xlora_passes

    @property
    def supports_xlora(self) -> bool:
        return bool(self._shared.xlora_kv_storage)

    def allocate_kv(self, num_blocks: int) -> list[FullAttentionCache]:
        caches, self._shared.kv_storage = self._allocate_kv_storage(num_blocks)
        return caches

    def enable_xlora(self, cache: KVCache) -> None:
        check_supports_xlora(self.config)
        caches, self._shared.xlora_kv_storage = self._allocate_kv_storage(cache.pool.num_blocks)
        for own in caches:
            cache.add_layer_cache(own)

    def _allocate_kv_storage(self, num_blocks: int) -> tuple[list[FullAttentionCache], Sequence[torch.Tensor]]:
        """Allocate keys and values of `num_blocks` blocks. Return the caches and the result of `kv_arrays_of_layers`."""
        weights, groups = self._shared.weights, self.config.kv_groups(by_window=False)
        try:
            caches = [
                FullAttentionCache(torch.zeros(group.shape(num_blocks, BLOCK_SIZE), dtype=weights.dtype, device=weights.device))
                for group in groups
            ]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"a cache of {num_blocks} blocks cannot be allocated on {self.capabilities.device!r}: lower kv_cache_gb"
            ) from error
        return caches, self.kv_arrays_of_layers(groups, caches)

    def new_cache(self, num_blocks: int, limits: PassLimits | None = None, checkpoints: CheckpointConfig = CHECKPOINT_DEFAULTS) -> KVCache:
        layer_caches: list[LayerCache] = [*self.allocate_kv(num_blocks)]
        layout, device = self._layout, self._shared.weights.device

        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            try:
                return torch.zeros(shape, dtype=torch.float32, device=device)
            except RuntimeError as error:  # torch's out-of-memory error
                raise MemoryError(str(error)) from error

        if layout.layers:
            self._shared.states = RecurrentStateCache(layout.num_state_values, layout.num_record_values, BLOCK_SIZE, zeros, checkpoints)
            layer_caches.append(self._shared.states)
        return KVCache(layer_caches, num_blocks)

    def forward(self, inputs: Inputs, batch: ForwardBatch, logits_rows: LogitsRows) -> ForwardOutput:
        shared, num_rows = self._shared, len(batch.positions)
        shared.num_passes += 1
        if not batch.ranges:  # a network without attention does not use cache slots
            batch = ForwardBatch(batch.positions, (RowRange(0, num_rows, 0, np.zeros(-(-num_rows // BLOCK_SIZE), np.int32)),))
        with torch.inference_mode():
            classifiers = {number: own.classifier for number, own in shared.adapters.items() if own.classifier is not None}
            scalings = compute_scalings(classifiers, inputs, batch, self._run_scaling_pass)
            states = RecurrentPass(self._layout, self._cache_shared.states, batch.ranges)
            ops = self._new_ops(self._cache_shared.kv_storage, states, inputs, batch, logits_rows, scalings)
            results = _LazyResults(with_summaries(self.definition, logits_rows.summary)(ops))
            states.finish()
            results.copy_to_cpu(LOGITS if logits_rows.summary is None else SUMMARY)
            return ForwardOutput(results)

    def _new_ops(
        self,
        kv_storage: Sequence[torch.Tensor],
        states: RecurrentPass,
        inputs: Inputs,
        batch: ForwardBatch,
        logits_rows: LogitsRows,
        scalings: Scalings,
    ) -> TorchOps:
        """Return the operations of one pass, whose attention uses the keys and values in `kv_storage`."""
        shared = self._shared
        attention_type = RangeAttention if shared.weights.device.type == "cpu" else PaddedAttention
        attention = attention_type(batch.ranges, BLOCK_SIZE, shared.weights.device)
        return TorchOps(self.config, shared.weights, kv_storage, attention, states, inputs, batch, logits_rows, shared.adapters, scalings)

    def _run_scaling_pass(self, inputs: Inputs, batch: ForwardBatch, scalings: Scalings) -> torch.Tensor:
        """Run an X-LoRA scaling pass, which has its own keys and values, and return hidden states; see `runtimes/xlora.py`."""
        states, no_logits = RecurrentPass(self._layout, None, batch.ranges), LogitsRows(np.zeros(0, np.int32))
        self._shared.num_xlora_passes += 1
        return self.definition(self._new_ops(self._shared.xlora_kv_storage, states, inputs, batch, no_logits, scalings))[HIDDEN_STATES]

    def load_adapter(self, adapter: Adapter) -> int:
        check_xlora_enabled(self, adapter)
        loaded = TorchAdapter(to_network_adapter(adapter, self.config), self._shared.weights.device)
        number = next(self._shared.adapter_numbers)
        self._shared.adapters[number] = loaded
        return number

    def unload_adapter(self, number: int) -> None:
        del self._shared.adapters[number]

    def embed(self, token_ids: IntArray) -> FloatArray:
        weights = self._shared.weights
        with torch.inference_mode():
            ids = torch.from_numpy(token_ids.astype(np.int64)).to(weights.device)
            return _to_numpy(scaled_embeddings(F.embedding(ids, weights.weight("embedding")), self.config))

    def network_on_shared_kv(
        self, definition: NetworkDefinition, config: ModelConfig, weights: Weights, *, max_model_len: int
    ) -> "TorchNetwork":
        """See `Network`. The other network has the device and compute type of this network."""
        device, weight_type = self.capabilities.device, self.capabilities.weight_type
        return TorchNetwork(definition, config, weights, device=device, weight_type=weight_type, kv_source=self)

    def network_with_same_weights(self, definition: NetworkDefinition) -> "TorchNetwork":
        other = copy(self)
        other.definition = definition
        return other


class _LazyResults(Mapping[str, FloatArray]):
    """The results of a pass by name. A result is copied from the device when it is first read."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values
        self._copied: dict[str, FloatArray] = {}

    def copy_to_cpu(self, prefix: str) -> None:
        """Copy the results `prefix` and `prefix.*` now, so that the measured time of the pass includes the copy."""
        for name in self._values:
            if name.split(".")[0] == prefix:
                self[name]

    def __getitem__(self, name: str) -> FloatArray:
        if name not in self._copied:
            self._copied[name] = _to_numpy(self._values[name])
        return self._copied[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(slots=True)
class _SharedState:
    """State that networks with the same weights share."""

    weights: TorchWeights
    kv_storage: Sequence[torch.Tensor] = ()
    states: RecurrentStateCache | None = None
    xlora_kv_storage: Sequence[torch.Tensor] = ()
    num_passes: int = 0
    num_xlora_passes: int = 0
    adapters: dict[int, TorchAdapter] = field(default_factory=dict)
    adapter_numbers: Iterator[int] = field(default_factory=partial(count, 1))


def _to_numpy(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array
