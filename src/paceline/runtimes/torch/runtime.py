"""The torch runtime: CUDA, and on the CPU the readable reference."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from paceline.errors import BackendUnavailableError, CapacityError, ConfigError
from paceline.kv_cache.key_values import KeyValues
from paceline.kv_cache.paged import BLOCK_SIZE, KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import Weights
from paceline.runtimes.base import Capabilities, FloatArray, ForwardBatch, ForwardOutput, IntArray, Numerics, Runtime
from paceline.runtimes.decoder import decoder
from paceline.runtimes.torch.attention import PaddedAttention, PlainAttention
from paceline.runtimes.torch.blocks import TorchBlocks, scaled_rows
from paceline.runtimes.torch.weights import DTYPES, TorchWeights


class TorchRuntime(Runtime):
    """A decoder computed with torch.

    Torch picks its kernels by shape, so a row's bits depend on how many rows it runs with: numerics are fast.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        device: str = "cpu",
        weight_type: WeightType,
        collect_layers: Sequence[int] = (),
    ) -> None:
        """Copy the weights to `device`.

        Args:
            device: "cpu" or "cuda".
            weight_type: type of weights, cache and computation.
            collect_layers: boundaries to return, 0 to L.

        Raises:
            ConfigError: an argument is out of range.
            BackendUnavailableError: the device is not there.
            CapacityError: the device's memory does not hold the weights.
        """
        if any(not 0 <= layer <= config.num_layers for layer in collect_layers):
            raise ConfigError(f"collect_layers = {list(collect_layers)}: boundaries go from 0 to {config.num_layers}")
        self.config = config
        self.capabilities = Capabilities(Numerics.FAST, TreeLayout.MASK, device, weight_type)
        self.num_passes = 0
        self._collect_layers = tuple(collect_layers)
        self._device = _open_device(device)
        self._storage: torch.Tensor | None = None
        try:
            self._weights = TorchWeights(config, weights, dtype=DTYPES[weight_type], device=self._device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{weights.nbytes / 1e9:.2f} GB of weights do not fit the memory of {device!r}; use another device"
            ) from error

    def new_cache(self, num_blocks: int) -> KVCache:
        try:
            self._storage = torch.zeros(
                self.config.kv_shape(num_blocks, BLOCK_SIZE), dtype=DTYPES[self.capabilities.weight_type], device=self._device
            )
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"a cache of {num_blocks} blocks cannot be allocated on {self.capabilities.device!r}; ask for fewer"
            ) from error
        return KVCache([KeyValues(self._storage)], num_blocks, self.capabilities.tree_layout)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if self._storage is None:
            raise RuntimeError("there is no cache yet: call new_cache first")
        self.num_passes += 1
        attention_type = PlainAttention if self._device.type == "cpu" else PaddedAttention
        with torch.inference_mode():
            attention = attention_type(batch.ranges, BLOCK_SIZE, self._device)
            blocks = TorchBlocks(self.config, self._weights, self._storage, batch, attention)
            logits, hidden, collected = decoder(blocks, self.config, self._collect_layers)
            return ForwardOutput(_to_numpy(logits), _to_numpy(hidden), _to_numpy(torch.stack(collected)) if collected else None)

    def embed(self, token_ids: IntArray) -> FloatArray:
        with torch.inference_mode():
            ids = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
            return _to_numpy(scaled_rows(F.embedding(ids, self._weights.plain["embedding"]), self.config))


def _open_device(device: str) -> torch.device:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device = {device!r}; the torch runtime knows 'cpu' and 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("device = 'cuda', but torch finds no CUDA device; install a CUDA build of torch or use 'cpu'")
    return torch.device(device)


def _to_numpy(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array
