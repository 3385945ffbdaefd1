"""X-LoRA's scalings on the CPU, a row's with the same bits in every pass as its other values, and what scaling passes keep.

Source: PEFT 0.21, `XLoraClassifier` and `XLoraLayer.get_maybe_topk_scalings`.
"""

import numpy as np

from paceline.errors import CapacityError
from paceline.kv_cache.cache import BLOCK_SIZE, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache, PagedCache
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.models.adapters.adapter import Mixture
from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import Activation
from paceline.models.weights import Tensor, Weights
from paceline.runtimes.base import FloatArray, ForwardBatch, Wanted
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.packed_rows import PackedRows
from paceline.runtimes.native.program import NativeBlocks, Recorded, share_memory
from paceline.runtimes.native.weights import NativeWeights


class NativeMixture:
    """A mixture whose classifier the kernels compute.

    Attributes:
        pass_scaling: every scaling of the scaling pass; 0 = that is a pass of the target alone.
    """

    def __init__(self, mixture: Mixture, config: ModelConfig, num_threads: int) -> None:
        self._mixture, self.pass_scaling = mixture, mixture.pass_scaling
        arrays = {
            f"classifier.{number}.{kind}": values
            for number, layer in enumerate(mixture.classifier)
            for kind, values in zip(("weight", "bias"), layer, strict=True)
        }
        weights = Weights({name: Tensor(values, WeightType.F32, values.shape) for name, values in arrays.items()})
        self._weights = NativeWeights(weights, WeightType.F32, panels=None, num_threads=num_threads)  # operations hold addresses in them
        blocks = NativeBlocks(config, self._weights, config)
        value = hidden = blocks.input("hidden_states", config.hidden_size)
        for number in range(len(mixture.classifier)):
            if number:
                value = blocks.gated(value, blocks.input("ones", value.width), Activation.RELU)
            (value,) = blocks.linear(value, f"classifier.{number}")
        buffers, widths = share_memory(blocks, {value.index})
        self._execution = Execution(Recorded(blocks.operations, widths, blocks.sites), num_threads=num_threads)
        self._inputs = {name: buffers[one.index] for name, one in blocks.inputs.items()}
        self._result, self._hidden = buffers[value.index], hidden.width

    def constant(self, num_rows: int) -> FloatArray:
        """The scalings [rows, L * K] of a scaling pass."""
        return np.full((num_rows, self._mixture.num_layers * self._mixture.num_adapters), self.pass_scaling, np.float32)

    @np.errstate(over="ignore", invalid="ignore")  # of a row that is not finite: it is named behind the pass
    def scalings(self, hidden_states: FloatArray) -> FloatArray:
        """The scalings [rows, L * K] of the real pass.

        Args:
            hidden_states: [rows, E] of the scaling pass, after the final norm.
        """
        mixture, num_rows = self._mixture, len(hidden_states)
        self._execution.make_room(num_rows)
        for name, buffer in self._inputs.items():
            self._execution.rows(buffer, num_rows)[...] = hidden_states if name == "hidden_states" else 1.0
        self._execution.run(ForwardBatch(np.zeros(num_rows, np.int32), ()), Wanted(np.zeros(0, np.int32)))
        width = mixture.num_layers * mixture.num_adapters
        found = self._execution.rows(self._result, num_rows, width).reshape(-1, mixture.num_layers, mixture.num_adapters)
        if mixture.temperature is not None:
            found = _softmax(found / np.float32(mixture.temperature))
        if mixture.top_k is not None:
            chosen = np.argsort(-found, axis=-1, kind="stable")[..., : mixture.top_k]  # the first of equal ones
            stays = np.zeros(found.shape, np.bool_)
            np.put_along_axis(stays, chosen, values=True, axis=-1)
            found = np.where(stays, found, np.float32(0.0))
        if mixture.has_softmax_of_top_k:
            found = np.where(found != 0.0, _softmax(np.where(found != 0.0, found, np.float32(-np.inf))), np.float32(0.0))
        return np.array(found.reshape(num_rows, width), np.float32, order="C")


def add_scaling_caches(cache: KVCache, rows: PackedRows) -> list[PagedCache]:
    """Add the layer caches of scaling passes to a cache, one like each of its own; return them in that order.

    Raises:
        CapacityError: they do not fit in memory.
    """
    layer_caches = list[PagedCache]()
    try:
        for layer_cache in list(cache.layer_caches):
            assert isinstance(layer_cache, PagedCache)
            storage = np.zeros_like(layer_cache.storage)
            window = layer_cache.window if isinstance(layer_cache, SlidingWindowCache) else None
            layer_caches.append(
                FullAttentionCache(storage, rows) if window is None else SlidingWindowCache(storage, window, BLOCK_SIZE, rows)
            )
    except MemoryError as error:
        raise CapacityError("keys and values of X-LoRA's scaling passes do not fit in memory: lower kv_cache_gb") from error
    for layer_cache in layer_caches:
        cache.add_layer_cache(layer_cache)
    return layer_caches


def _softmax(values: FloatArray) -> FloatArray:
    """Over the last axis, summed up in its order: so a row's bits do not depend on how many rows there are."""
    largest = values.max(axis=-1, keepdims=True)
    powers: FloatArray = np.exp(values - np.where(np.isfinite(largest), largest, np.float32(0.0)))
    total = powers[..., :1].copy()
    for place in range(1, values.shape[-1]):
        total += powers[..., place : place + 1]
    total[total == 0.0] = 1.0  # of a row whose scalings are all 0
    return powers / total
