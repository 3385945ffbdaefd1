"""The weights of a network as tensors on a device. A weight is converted when it is first used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import CapacityError
from paceline.models.config import WeightType
from paceline.models.weights import GroupedTensor, Weights, as_float32

DTYPES = {WeightType.F32: torch.float32, WeightType.F16: torch.float16, WeightType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Matrices with the same input, concatenated: weight [sum of sizes, in], bias [sum of sizes] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, ...]


class TorchWeights:
    """Returns weights as tensors and caches the tensors. Raises CapacityError if the device has too little memory.

    Args:
        dtype: type of matrices and norm weights. Other vectors are float32.
        norms_in_float32: norm weights are float32, not `dtype`.
    """

    def __init__(self, weights: Weights, *, dtype: torch.dtype, device: torch.device, norms_in_float32: bool) -> None:
        self.device, self.dtype = device, dtype
        self._weights, self._norms_in_float32 = weights, norms_in_float32
        self._tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._fused: dict[tuple[str, ...], FusedLinear] = {}

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight (not its bias) by internal name without `.weight`."""
        is_float32 = self._norms_in_float32 and name.endswith("norm")
        return self._tensor(name + ".weight", torch.float32 if is_float32 else self.dtype)

    def vector(self, name: str) -> torch.Tensor:
        """Return a vector in float32 by internal name."""
        return self._tensor(name, torch.float32)

    def has_tensor(self, name: str) -> bool:
        """Return whether there is a tensor with this internal name."""
        return self._weights.has_tensor(name)

    def rows(self, name: str, row_indices: NDArray[np.int32]) -> torch.Tensor:
        """Return rows of a matrix. Only these rows are copied to the device."""
        return torch.from_numpy(self._weights.read_rows(name + ".weight", row_indices)).to(device=self.device, dtype=self.dtype)

    def fused(self, names: tuple[str, ...]) -> FusedLinear:
        """Return several matrices, concatenated, by internal names without `.weight`."""
        if names not in self._fused:
            with self._convert_out_of_memory():
                self._fused[names] = self._fuse(names)
        return self._fused[names]

    def _tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if (name, dtype) not in self._tensors:
            with self._convert_out_of_memory():
                self._tensors[name, dtype] = self._load(name, dtype)
        return self._tensors[name, dtype]

    def _fuse(self, names: tuple[str, ...]) -> FusedLinear:
        matrices = [self._load(name + ".weight", self.dtype) for name in names]
        sizes = tuple(matrix.shape[0] for matrix in matrices)
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        if not any(self._weights.has_tensor(name + ".bias") for name in names):
            return FusedLinear(weight, None, sizes)
        biases = [
            self._load(name + ".bias", self.dtype) if self._weights.has_tensor(name + ".bias") else weight.new_zeros(size)
            for name, size in zip(names, sizes, strict=True)
        ]
        return FusedLinear(weight, torch.cat(biases), sizes)

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._weights[name]
        if isinstance(stored, GroupedTensor):
            copied = torch.from_numpy(as_float32(stored))
        else:  # copied, because tensors are writable and the array may be a read-only view of a mapped file
            is_bf16 = stored.weight_type is WeightType.BF16
            copied = torch.from_numpy(np.array(stored.array.view(np.int16) if is_bf16 else stored.array, order="C"))
            copied = copied.view(torch.bfloat16) if is_bf16 else copied
        return copied.to(device=self.device, dtype=dtype)

    @contextmanager
    def _convert_out_of_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self._weights.nbytes / 1e9:.2f} GB of weights do not fit the memory of {self.device.type!r}; use another device"
            ) from error
