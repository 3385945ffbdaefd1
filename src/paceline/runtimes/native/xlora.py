"""X-LoRA with the kernels: the classifier as a recorded network, and caches for scaling passes."""

import numpy as np

from paceline.errors import CapacityError
from paceline.kv_cache.cache import BLOCK_SIZE, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache, PagedCache
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.models.adapters.adapter import XLoraMixture
from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import Activation
from paceline.models.weights import Tensor, Weights
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows
from paceline.runtimes.native.buffers import assign_buffers
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.program import NativeBlocks, RecordedNetwork
from paceline.runtimes.native.weights import NativeWeights
from paceline.runtimes.xlora import Classifier


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
        self._weights = NativeWeights(weights, WeightType.F32, num_threads=num_threads)  # kept, because operations have addresses in it
        blocks = NativeBlocks(config, self._weights, config)
        value = blocks.input("hidden_states", config.hidden_size)
        for number in range(len(mixture.classifier)):
            if number:
                value = blocks.gated(value, blocks.input("ones", value.width), Activation.RELU)
            (value,) = blocks.linear(value, f"classifier.{number}")
        buffers, widths = assign_buffers(blocks, {value.index})
        self._execution = Execution(RecordedNetwork(blocks.operations, widths, blocks.sites), num_threads=num_threads)
        self._inputs = {name: buffers[value.index] for name, value in blocks.inputs.items()}
        self._result, self._width = buffers[value.index], value.width

    def logits(self, hidden_states: FloatArray) -> FloatArray:
        num_rows = len(hidden_states)
        self._execution.reserve_rows(num_rows)
        for name, buffer in self._inputs.items():
            self._execution.buffer_rows(buffer, num_rows)[...] = hidden_states if name == "hidden_states" else 1.0
        self._execution.run(ForwardBatch(np.zeros(num_rows, np.int32), ()), LogitsRows(np.zeros(0, np.int32)))
        return self._execution.buffer_rows(self._result, num_rows, self._width)


def add_scaling_pass_caches(cache: KVCache) -> list[PagedCache]:
    """Add to `cache`, for scaling passes, another cache like each of its layer caches. Return the added ones.

    Raises:
        CapacityError: they do not fit in memory.
    """
    added = list[PagedCache]()
    try:
        for layer_cache in list(cache.layer_caches):
            assert isinstance(layer_cache, PagedCache)
            storage, rows = np.zeros_like(layer_cache.storage), layer_cache.rows
            window = layer_cache.window if isinstance(layer_cache, SlidingWindowCache) else None
            added.append(FullAttentionCache(storage, rows) if window is None else SlidingWindowCache(storage, window, BLOCK_SIZE, rows))
    except MemoryError as error:
        raise CapacityError("keys and values of X-LoRA's scaling passes do not fit in memory: lower kv_cache_gb") from error
    for layer_cache in added:
        cache.add_layer_cache(layer_cache)
    return added
