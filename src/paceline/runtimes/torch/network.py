"""Networks computed with torch: CUDA, and on the CPU the readable reference."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from paceline.errors import BackendUnavailableError, CapacityError, ConfigError
from paceline.kv_cache.cache import BLOCK_SIZE, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.recurrent_state import DEFAULT_CHECKPOINTS, CheckpointConfig, RecurrentStateCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.kv_cache.sliding_window import PassLimits
from paceline.models.adapters.adapter import Adapter
from paceline.models.adapters.network_adapter import to_network
from paceline.models.config import ModelConfig, WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.state_layout import StateLayout
from paceline.models.weights import Weights
from paceline.runtimes.adapter_rows import ScalingPart
from paceline.runtimes.base import (
    NO_MIXTURE_WITH_STATES,
    Capabilities,
    FloatArray,
    ForwardBatch,
    ForwardOutput,
    IntArray,
    Network,
    Numerics,
    RowRange,
    Wanted,
    no_room_for_mixture,
)
from paceline.runtimes.decoder import HIDDEN_STATES, LOGITS, RANKED, Compose, ranked
from paceline.runtimes.planes import planes_of
from paceline.runtimes.torch.adapters import TorchAdapter
from paceline.runtimes.torch.attention import PaddedAttention, PlainAttention
from paceline.runtimes.torch.blocks import TorchBlocks, scaled_rows
from paceline.runtimes.torch.recurrent import RecurrentPass
from paceline.runtimes.torch.weights import DTYPES, TorchWeights


class TorchNetwork(Network):
    """A network computed anew in every pass.

    Torch picks its kernels by shape, so a row's bits depend on how many rows it runs with: numerics are fast.
    """

    def __init__(
        self,
        compose: Compose,
        config: ModelConfig,
        weights: Weights,
        *,
        device: str = "cpu",
        weight_type: WeightType = WeightType.F32,
        cache_of: "TorchNetwork | None" = None,
    ) -> None:
        """
        Args:
            device: "cpu" or "cuda"; weights are copied there when the first pass needs them.
            weight_type: type of weights, cache and computation.
            cache_of: whose keys and values it reads; None = its own.

        Raises:
            ConfigError: there is no such device.
            BackendUnavailableError: it is not there.
        """
        self.config, self.compose, self.weights = config, compose, weights
        self.capabilities = Capabilities(Numerics.FAST, TreeLayout.MASK, device, weight_type, KVCacheDtype(weight_type.value))
        self._layout = StateLayout.of(config.recurrents)
        opened = _open_device(device)
        tensors = TorchWeights(weights, dtype=DTYPES[weight_type], device=opened, norms_in_float32=config.norm_offset)
        self._shared = self._cache_shared = _Shared(tensors)
        if cache_of is not None:
            self._cache_shared = cache_of._cache_shared
        else:
            self.new_key_values(1)

    @property
    def num_passes(self) -> int:
        return self._shared.num_passes

    @num_passes.setter
    def num_passes(self, count: int) -> None:
        self._shared.num_passes = count

    @property
    def num_scaling_passes(self) -> int:
        return self._shared.num_scaling_passes

    @property
    def takes_mixtures(self) -> bool:
        return bool(self._shared.scaling_planes)

    def new_key_values(self, num_blocks: int) -> list[FullAttentionCache]:
        layer_caches, self._shared.planes = self._allocate(num_blocks)
        return layer_caches

    def keep_scaling_passes(self, cache: KVCache) -> None:
        if self.config.recurrents:
            raise ConfigError(NO_MIXTURE_WITH_STATES)
        layer_caches, self._shared.scaling_planes = self._allocate(cache.pool.num_blocks)
        for layer_cache in layer_caches:
            cache.add_layer_cache(layer_cache)

    def _allocate(self, num_blocks: int) -> tuple[list[FullAttentionCache], Sequence[torch.Tensor]]:
        """Keys and values of so many blocks, and each layer's planes in them."""
        weights, groups = self._shared.weights, self.config.kv_groups(by_window=False)
        try:
            layer_caches = [
                FullAttentionCache(torch.zeros(group.shape(num_blocks, BLOCK_SIZE), dtype=weights.dtype, device=weights.device))
                for group in groups
            ]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"a cache of {num_blocks} blocks cannot be allocated on {self.capabilities.device!r}: lower kv_cache_gb"
            ) from error
        return layer_caches, planes_of(self.config, groups, layer_caches)

    def new_cache(self, num_blocks: int, limits: PassLimits | None = None, checkpoints: CheckpointConfig = DEFAULT_CHECKPOINTS) -> KVCache:
        layer_caches: list[LayerCache] = [*self.new_key_values(num_blocks)]
        layout, device = self._layout, self._shared.weights.device

        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            try:
                return torch.zeros(shape, dtype=torch.float32, device=device)
            except RuntimeError as error:  # what torch raises where there is no memory
                raise MemoryError(str(error)) from error

        if layout.places:
            self._shared.states = RecurrentStateCache(layout.state_size, layout.record_size, BLOCK_SIZE, zeros, checkpoints)
            layer_caches.append(self._shared.states)
        return KVCache(layer_caches, num_blocks, self.capabilities.tree_layout)

    def forward(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch, wanted: Wanted) -> ForwardOutput:
        shared, num_rows = self._shared, len(batch.positions)
        shared.num_passes += 1
        if not batch.ranges:  # no attention: where rows would be kept plays no part
            batch = ForwardBatch(batch.positions, (RowRange(0, num_rows, 0, np.zeros(-(-num_rows // BLOCK_SIZE), np.int32)),))
        with torch.inference_mode():
            scalings = self._scalings(inputs, batch)
            states = RecurrentPass(self._layout, self._cache_shared.states, batch.ranges)
            blocks = self._blocks(self._cache_shared.planes, states, inputs, batch, wanted, scalings)
            results = _Results(ranked(self.compose, wanted.ranking)(blocks))
            states.finish()
            results.fetch(LOGITS if wanted.ranking is None else RANKED)
            return ForwardOutput(results)

    def _blocks(
        self,
        planes: Sequence[torch.Tensor],
        states: RecurrentPass,
        inputs: Mapping[str, NDArray[Any]],
        batch: ForwardBatch,
        wanted: Wanted,
        scalings: Mapping[int, torch.Tensor],
    ) -> TorchBlocks:
        """What computes one pass over the keys and values in `planes`."""
        shared = self._shared
        attention_type = PlainAttention if shared.weights.device.type == "cpu" else PaddedAttention
        attention = attention_type(batch.ranges, BLOCK_SIZE, shared.weights.device)
        return TorchBlocks(self.config, shared.weights, planes, attention, states, inputs, batch, wanted, shared.adapters, scalings)

    def _scalings(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch) -> dict[int, torch.Tensor]:
        """The scalings of all rows with X-LoRA, by the number of their adapter: what a pass over these rows alone gives.

        That pass sees and writes keys and values of its own, so that a row's scalings depend on the tokens up to it and on nothing else.
        """
        shared = self._shared
        mixtures = {
            item.adapter: own.mixture
            for item in batch.ranges
            if item.adapter and (own := shared.adapters[item.adapter]).mixture is not None
        }
        if not mixtures:
            return {}
        part = ScalingPart.of(inputs, batch, {number: mixture.pass_scaling for number, mixture in mixtures.items()})
        constants = {number: mixtures[number].constant(len(part.rows[number])) for number in part.scaled}
        states, nothing = RecurrentPass(self._layout, None, part.batch.ranges), Wanted(np.zeros(0, np.int32))
        hidden = self.compose(self._blocks(shared.scaling_planes, states, part.inputs, part.batch, nothing, constants))[HIDDEN_STATES]
        shared.num_scaling_passes += 1
        rows = {number: torch.from_numpy(own.astype(np.int64)) for number, own in part.rows.items()}
        return {number: mixture.scalings(hidden[rows[number]]) for number, mixture in mixtures.items()}

    def load_adapter(self, adapter: Adapter) -> int:
        if adapter.mixture is not None and not self.takes_mixtures:
            raise ConfigError(no_room_for_mixture(adapter.name))
        loaded = TorchAdapter(to_network(adapter, self.config), self._shared.weights.device)
        number = next(self._shared.adapter_numbers)
        self._shared.adapters[number] = loaded
        return number

    def unload_adapter(self, number: int) -> None:
        del self._shared.adapters[number]

    def embed(self, token_ids: IntArray) -> FloatArray:
        weights = self._shared.weights
        with torch.inference_mode():
            ids = torch.from_numpy(token_ids.astype(np.int64)).to(weights.device)
            return _to_numpy(scaled_rows(F.embedding(ids, weights.plain("embedding")), self.config))

    def reader(self, compose: Compose, config: ModelConfig, weights: Weights, *, max_model_len: int) -> "TorchNetwork":
        """As in `Network`, in this network's type."""
        can = self.capabilities
        return TorchNetwork(compose, config, weights, device=can.device, weight_type=can.weight_type, cache_of=self)

    def beside(self, compose: Compose) -> "TorchNetwork":
        other = TorchNetwork.__new__(TorchNetwork)
        other.__dict__.update(self.__dict__)
        other.compose = compose
        return other


class _Results(Mapping[str, FloatArray]):
    """Results that leave the device when they are first asked for."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values
        self._fetched: dict[str, FloatArray] = {}

    def fetch(self, kind: str) -> None:
        """What is wanted at any rate is waited for within the pass, so that its time can be measured."""
        for name in self._values:
            if name.split(".")[0] == kind:
                self[name]

    def __getitem__(self, name: str) -> FloatArray:
        if name not in self._fetched:
            self._fetched[name] = _to_numpy(self._values[name])
        return self._fetched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(slots=True)
class _Shared:
    """What networks beside one another have in common."""

    weights: TorchWeights
    planes: Sequence[torch.Tensor] = ()
    states: RecurrentStateCache | None = None
    scaling_planes: Sequence[torch.Tensor] = ()
    num_passes: int = 0
    num_scaling_passes: int = 0
    adapters: dict[int, TorchAdapter] = field(default_factory=dict)
    adapter_numbers: Iterator[int] = field(default_factory=partial(count, 1))


def _open_device(device: str) -> torch.device:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device = {device!r}; the torch runtime knows 'cpu' and 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("device = 'cuda', but torch finds no CUDA device; install a CUDA build of torch or use 'cpu'")
    return torch.device(device)


def _to_numpy(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array
