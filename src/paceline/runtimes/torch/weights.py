"""A checkpoint's weights as tensors of one type on one device, with the products that belong together fused."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import AnyTensor, GroupedTensor, Weights, as_float32

DTYPES = {WeightType.F32: torch.float32, WeightType.F16: torch.float16, WeightType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Several matrices with the same input, stacked: weight [sum of sizes, in], bias [sum of sizes] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, ...]


class TorchWeights:
    """What `TorchBlocks` computes with; the separate copies of fused matrices are not kept.

    Attributes:
        plain: embedding, norms and lm_head by our name without `.weight`.
        fused: linears by the names they fuse.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device
        self._norms_in_float32 = config.norm_offset
        self.plain: dict[str, torch.Tensor] = {}
        self.fused: dict[tuple[str, ...], FusedLinear] = {}
        for name in ("embedding", "final_norm", "lm_head"):
            self._add_plain(name)
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}."
            for name in ("attention_norm", "q_norm", "k_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"):
                self._add_plain(prefix + name)
            for group in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
                names = tuple(prefix + name for name in group)
                self.fused[names] = self._fuse(names)

    def _add_plain(self, name: str) -> None:
        if self._weights.has(name + ".weight"):
            wide = self._norms_in_float32 and name.endswith("norm")
            self.plain[name] = self._load(self._weights[name + ".weight"], torch.float32 if wide else self._dtype)

    def _fuse(self, names: Sequence[str]) -> FusedLinear:
        parts = [self._load(self._weights[name + ".weight"]) for name in names]
        sizes = tuple(part.shape[0] for part in parts)
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not any(self._weights.has(name + ".bias") for name in names):
            return FusedLinear(weight, None, sizes)
        biases = [
            self._load(self._weights[name + ".bias"]) if self._weights.has(name + ".bias") else weight.new_zeros(size)
            for name, size in zip(names, sizes, strict=True)
        ]
        return FusedLinear(weight, torch.cat(biases), sizes)

    def _load(self, stored: AnyTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self._dtype
        if isinstance(stored, GroupedTensor):
            return torch.from_numpy(as_float32(stored)).to(device=self._device, dtype=dtype)
        # A copy, because torch has no read-only tensors and the file must stay as it is.
        copied = torch.from_numpy(np.array(stored.array.view(np.int16) if stored.weight_type is WeightType.BF16 else stored.array))
        if stored.weight_type is WeightType.BF16:
            copied = copied.view(torch.bfloat16)
        return copied.to(device=self._device, dtype=dtype)
