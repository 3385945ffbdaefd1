"""Weights of gpt-oss checkpoints, which stack the experts of a layer in two tensors: in MXFP4, or transposed in bfloat16."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig, WeightType
from paceline.models.containers.module import StoredWeight
from paceline.models.grouped import RUN
from paceline.models.layers import ExpertMLP
from paceline.models.mxfp4 import matrix_from_blocks
from paceline.models.storage.safetensors_file import StoredTensor, view_tensor
from paceline.models.storage.stored_model import open_stored
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import GroupedTensor, LazyTensor, LazyWeights, Tensor, TensorInfo, Weights, open_tensor

_STACKED_MATRICES = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Which rows of an expert in a stack belong to which matrix. Rows of gate and up alternate."""


class Mxfp4ExpertWeights(LazyWeights):
    """The weights of a gpt-oss checkpoint directory. MXFP4 matrices are converted to groups on first use.

    Raises:
        CheckpointError: As in `Weights.open`, or a stack has another shape than config.json gives.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        opened = open_stored(directory, config)
        stored, files = opened.tensors, opened.files
        self._experts: dict[str, LazyTensor] = {}
        for index, layer in enumerate(config.layers):
            if isinstance(layer.mlp, ExpertMLP):
                self._experts |= _ExpertStacks(directory, stored, files, index, layer.mlp, config.hidden_size).experts()
        plain = Weights.from_stored_tensors(directory, stored, files, config, provided_elsewhere=self._experts)
        super().__init__(tensor_shapes(config), lambda name: plain[name] if name in plain else self._experts[name].make())

    def info(self, name: str) -> TensorInfo:
        return self._experts[name].info if name in self._experts else super().info(name)

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        return self._experts[name].arrays if name in self._experts else super().source_arrays(name)


class _ExpertStacks:
    """The stacked expert tensors of one layer. Reading a tensor removes it from `stored`."""

    def __init__(
        self,
        directory: Path,
        stored: dict[str, StoredWeight],
        files: Mapping[Path, NDArray[np.uint8]],
        layer: int,
        mlp: ExpertMLP,
        hidden_size: int,
    ) -> None:
        self._directory, self._stored, self._files, self._mlp, self._layer = directory, stored, files, mlp, layer
        self._prefix = f"model.layers.{layer}.mlp.experts."
        inner = mlp.expert.intermediate_size
        self._shapes = {"gate_up_proj": (2 * inner, hidden_size), "down_proj": (hidden_size, inner)}

    def experts(self) -> dict[str, LazyTensor]:
        """Return the tensors of single experts, by internal names."""
        found: dict[str, LazyTensor] = {}
        for stack, parts in _STACKED_MATRICES.items():
            count, (rows, columns) = self._mlp.routing.num_experts, self._shapes[stack]
            bias = self._take_tensor(f"{stack}_bias", (count, rows))
            plain = self._take_tensor(stack, (count, columns, rows)) if self._prefix + stack in self._stored else None
            blocks = exponents = None
            if plain is None:
                blocks = self._take_bytes(f"{stack}_blocks", (count, rows, columns // RUN, RUN // 2))
                exponents = self._take_bytes(f"{stack}_scales", (count, rows, columns // RUN))
            for expert in range(count):
                for part, part_rows in parts.items():
                    name = f"layers.{self._layer}.experts.{expert}.{part}"
                    found[f"{name}.bias"] = _lazy_view(bias.array[expert, part_rows], bias.weight_type)
                    if plain is not None:
                        found[f"{name}.weight"] = _lazy_view(plain.array[expert, :, part_rows].T, plain.weight_type)
                    elif blocks is not None and exponents is not None:
                        where = self._prefix + stack
                        found[f"{name}.weight"] = _lazy_groups(blocks[expert, part_rows], exponents[expert, part_rows], where)
        return found

    def _take_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return open_tensor(self._prefix + name, self._take_stored(name), shape, self._files)

    def _take_bytes(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        stored = self._take_stored(name)
        if stored.dtype != "U8" or stored.shape != shape:
            raise CheckpointError(
                f"{stored.path}: tensor {self._prefix + name!r} is of type {stored.dtype} and shape {list(stored.shape)}, but config.json "
                f"makes it U8 of shape {list(shape)}; one of the two files belongs to another model"
            )
        return view_tensor(stored, self._files[stored.path], np.dtype(np.uint8))

    def _take_stored(self, name: str) -> StoredTensor:
        stored = self._stored.pop(self._prefix + name, None)
        if not isinstance(stored, StoredTensor):
            raise CheckpointError(f"{self._directory} lacks {self._prefix}{name} that its config.json requires; download it again")
        return stored


def _lazy_view(array: NDArray[Any], weight_type: WeightType) -> LazyTensor:
    info = TensorInfo(array.shape, weight_type, None, array.nbytes)
    return LazyTensor(info, (array,), lambda: Tensor(array, weight_type, array.shape))


def _lazy_groups(blocks: NDArray[np.uint8], exponents: NDArray[np.uint8], where: str) -> LazyTensor:
    rows, groups = exponents.shape
    info = TensorInfo((rows, groups * RUN), WeightType.F32, 4, blocks.nbytes + 4 * exponents.size)
    return LazyTensor(info, (blocks, exponents), lambda: GroupedTensor(matrix_from_blocks(blocks, exponents, where)))
