"""The torch runtime: CUDA, and on the CPU the readable reference."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from paceline.errors import BackendUnavailableError, CapacityError, ConfigError
from paceline.kv_cache.paged import BLOCK_SIZE, KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import Weights
from paceline.runtimes.base import Capabilities, FloatArray, ForwardBatch, ForwardOutput, IntArray, Numerics, RowRange, Runtime
from paceline.runtimes.decoder import decoder
from paceline.runtimes.torch.attention import PaddedAttention, PlainAttention, Scores
from paceline.runtimes.torch.blocks import TorchBlocks, scaled_rows
from paceline.runtimes.torch.weights import DTYPES, TorchWeights


class TorchRuntime(Runtime):
    """A decoder computed with torch.

    Numerics: torch picks its kernels by shape, so a row's bits depend on how many rows it runs with (`fast`). With `exact`
    every row is a pass of its own: the same shapes as plain decoding, hence the same bits, at plain decoding's speed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        device: str = "cpu",
        weight_type: WeightType,
        numerics: Numerics = Numerics.FAST,
        collect_layers: Sequence[int] = (),
        tree_layout: TreeLayout | None = None,
    ) -> None:
        """Copy the weights to `device`.

        Args:
            device: "cpu" or "cuda".
            weight_type: type of weights, cache and computation.
            collect_layers: boundaries to return, 0 to L.
            tree_layout: `PATHS` or `MASK`; by default `MASK`, and `PATHS` with exact numerics.

        Raises:
            ConfigError: an argument is out of range, or a masked tree is asked for with exact numerics.
            BackendUnavailableError: the device is not there.
            CapacityError: the device's memory does not hold the weights.
        """
        exact = numerics is Numerics.EXACT
        layout = tree_layout or (TreeLayout.PATHS if exact else TreeLayout.MASK)
        if layout is TreeLayout.CHAIN or (exact and layout is TreeLayout.MASK):
            raise ConfigError(f"tree layout {layout.value!r} cannot be used with {numerics.value} numerics; use 'paths'")
        if any(not 0 <= layer <= config.num_layers for layer in collect_layers):
            raise ConfigError(f"collect_layers = {list(collect_layers)}: boundaries go from 0 to {config.num_layers}")
        self.config = config
        self.capabilities = Capabilities(numerics, layout, device, weight_type)
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
        shape = (2 * self.config.num_layers, num_blocks, self.config.num_kv_heads, BLOCK_SIZE, self.config.head_size)
        try:
            self._storage = torch.zeros(shape, dtype=DTYPES[self.capabilities.weight_type], device=self._device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"a cache of {num_blocks} blocks cannot be allocated on {self.capabilities.device!r}; ask for fewer"
            ) from error
        return KVCache(self._storage, self.capabilities.tree_layout)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.num_passes += 1
        if self.capabilities.numerics is Numerics.FAST:
            return self._run(batch)
        return _join([self._run(row) for row in _rows(batch)], batch.logits_rows)

    def embed(self, token_ids: IntArray) -> FloatArray:
        with torch.inference_mode():
            ids = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
            return _to_numpy(scaled_rows(F.embedding(ids, self._weights.plain["embedding"]), self.config))

    def _run(self, batch: ForwardBatch) -> ForwardOutput:
        if self._storage is None:
            raise RuntimeError("there is no cache yet: call new_cache first")
        attention_type = PlainAttention if self._device.type == "cpu" else PaddedAttention
        with torch.inference_mode():
            scores = Scores(self.config.attention_scale, self.config.attention_soft_cap)
            attention = attention_type(batch.ranges, BLOCK_SIZE, self._device, scores)
            blocks = TorchBlocks(self.config, self._weights, self._storage, batch, attention)
            logits, hidden, collected = decoder(blocks, self.config, self._collect_layers)
            return ForwardOutput(_to_numpy(logits), _to_numpy(hidden), _to_numpy(torch.stack(collected)) if collected else None)


def _open_device(device: str) -> torch.device:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device = {device!r}; the torch runtime knows 'cpu' and 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("device = 'cuda', but torch finds no CUDA device; install a CUDA build of torch or use 'cpu'")
    return torch.device(device)


def _to_numpy(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array


def _rows(batch: ForwardBatch) -> list[ForwardBatch]:
    """Each row as a pass of its own, in order, so that a row finds the ones before it in the cache."""
    wanted = set(batch.logits_rows.tolist())
    passes = []
    for rows in batch.ranges:
        if rows.mask is not None:
            raise RuntimeError("a masked tree reached a runtime with exact numerics, which takes paths")
        for index in range(rows.num_rows):
            row = rows.start + index
            passes.append(
                ForwardBatch(
                    batch.token_ids[row : row + 1],
                    batch.positions[row : row + 1],
                    (RowRange(0, 1, rows.cached_len + index, rows.block_table),),
                    np.zeros(int(row in wanted), np.int32),
                )
            )
    return passes


def _join(outputs: Sequence[ForwardOutput], logits_rows: IntArray) -> ForwardOutput:
    """The outputs of one-row passes as those of one pass."""
    collected = [output.collected_hidden_states for output in outputs if output.collected_hidden_states is not None]
    return ForwardOutput(
        np.concatenate([outputs[row].logits for row in logits_rows] or [outputs[0].logits[:0]]),
        np.concatenate([output.hidden_states for output in outputs]),
        np.concatenate(collected, axis=1) if collected else None,
    )
