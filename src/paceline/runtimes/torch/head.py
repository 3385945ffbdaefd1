"""Heads computed with torch: on a GPU, and the reference for the native ones."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from paceline.errors import CapacityError
from paceline.kv_cache.key_values import PagedRows
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights, as_float32
from paceline.runtimes.base import FloatArray, ForwardBatch, RowRange
from paceline.runtimes.head import Compose, Draws, HeadRuntime, Ranking
from paceline.runtimes.torch.attention import Attention, PaddedAttention, PlainAttention
from paceline.runtimes.torch.blocks import TorchBlocks
from paceline.runtimes.torch.ranking import rank_rows
from paceline.runtimes.torch.weights import FusedLinear


class HeadWeights:
    """Float32 copies on the device, made when a network first asks for them."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self.plain = _Loaded(weights, device)
        self.fused = _Fused(self.plain, weights)


class _Loaded(dict[str, torch.Tensor]):
    """Weights by name without `.weight`, biases by their whole name."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        super().__init__()
        self._weights, self._device = weights, device

    def __missing__(self, name: str) -> torch.Tensor:
        stored = self._weights[name if name.endswith(".bias") else name + ".weight"]
        self[name] = torch.from_numpy(np.array(as_float32(stored))).to(self._device)
        return self[name]


class _Fused(dict[tuple[str, ...], FusedLinear]):
    """Products of one input, stacked."""

    def __init__(self, plain: _Loaded, weights: Weights) -> None:
        super().__init__()
        self._plain, self._weights = plain, weights

    def __missing__(self, names: tuple[str, ...]) -> FusedLinear:
        parts = [self._plain[name] for name in names]
        bias = None
        if any(self._weights.has(name + ".bias") for name in names):
            biases = [
                self._plain[name + ".bias"] if self._weights.has(name + ".bias") else part.new_zeros(len(part))
                for name, part in zip(names, parts, strict=True)
            ]
            bias = torch.cat(biases)
        self[names] = FusedLinear(torch.cat(parts) if len(parts) > 1 else parts[0], bias, tuple(len(part) for part in parts))
        return self[names]


class TorchHeadBlocks(TorchBlocks):
    """The blocks of one pass, with its inputs."""

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights,
        storage: torch.Tensor,
        batch: ForwardBatch,
        attention: Attention,
        inputs: Mapping[str, FloatArray],
        draws: Draws | None,
    ) -> None:
        super().__init__(config, weights, storage, batch, attention)  # type: ignore[arg-type]  # a mapping that loads when asked
        self._inputs = {name: torch.from_numpy(np.array(rows, np.float32)).to(storage.device) for name, rows in inputs.items()}
        self._draws = None if draws is None else draws.reshape(-1)
        self._num_drawn = 0  # rows of the rankings so far

    def input(self, name: str, width: int) -> torch.Tensor:
        return self._inputs[name]

    def concat(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.cat(values, dim=-1)

    def silu_residual(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + F.silu(y)

    def rank(self, logits: torch.Tensor, ranking: Ranking) -> torch.Tensor:
        first = self._num_drawn
        self._num_drawn += len(logits)
        return rank_rows(logits, ranking, None if self._draws is None else self._draws[first : self._num_drawn])


class TorchHead(HeadRuntime):
    """A network computed anew in every pass."""

    def __init__(self, compose: Compose, config: ModelConfig, weights: Weights, *, device: str = "cpu") -> None:
        self.config = config
        self.compose = compose
        self._shared = _Shared(HeadWeights(weights, torch.device(device)), torch.device(device), self._zeros(config, 1, device))

    @property
    def num_passes(self) -> int:  # type: ignore[override]
        return self._shared.num_passes

    def forward(self, inputs: Mapping[str, FloatArray], batch: ForwardBatch, draws: Draws | None = None) -> Mapping[str, FloatArray]:
        num_rows = len(batch.positions)
        shared, config = self._shared, self.config
        shared.num_passes += 1
        if not batch.ranges:  # no attention: where rows would be kept plays no part
            batch = replace(batch, ranges=(RowRange(0, num_rows, 0, np.zeros(-(-num_rows // BLOCK_SIZE), np.int32)),))
        attention_type = PlainAttention if shared.device.type == "cpu" else PaddedAttention
        with torch.inference_mode():
            attention = attention_type(batch.ranges, BLOCK_SIZE, shared.device)
            blocks = TorchHeadBlocks(config, shared.weights, shared.storage, batch, attention, inputs, draws)
            return _Results(self.compose(blocks))

    def new_cache(self, num_blocks: int) -> PagedRows:
        try:
            self._shared.storage = self._zeros(self.config, num_blocks, self._shared.device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"a drafter's cache of {num_blocks} blocks does not fit on {self._shared.device}: lower cache_gb"
            ) from error
        return PagedRows(self._shared.storage)

    def beside(self, compose: Compose) -> "TorchHead":
        other = TorchHead.__new__(TorchHead)
        other.config, other.compose, other._shared = self.config, compose, self._shared
        return other

    @staticmethod
    def _zeros(config: ModelConfig, num_blocks: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(config.kv_shape(num_blocks, BLOCK_SIZE), device=device)


class _Results(Mapping[str, FloatArray]):
    """Results that leave the device when they are asked for."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> FloatArray:
        found: FloatArray = self._values[name].float().cpu().numpy()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Shared:
    """What networks beside one another have in common."""

    def __init__(self, weights: HeadWeights, device: torch.device, storage: torch.Tensor) -> None:
        self.weights, self.device, self.storage = weights, device, storage
        self.num_passes = 0
