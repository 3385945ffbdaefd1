"""The weights of a model with a LoRA adapter merged: W + lora_b @ lora_a in float32, then rounded to the weights' type."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.adapters.adapter import Adapter, LowRankUpdate
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD, network_matrices
from paceline.models.config import ModelConfig, WeightType
from paceline.models.gguf.blocks import StoredBlocks
from paceline.models.weights import AnyTensor, LazyWeights, Tensor, TensorInfo, Weights, as_float32, to_weight_type

_WEIGHTS_PER_CHUNK = 1 << 20  # few, to keep temporary arrays small
Floats = NDArray[np.float32]


def merged_config(config: ModelConfig, adapter: Adapter) -> ModelConfig:
    """Return the config with an adapter merged: embeddings are no longer tied if the adapter changes the embedding or lm_head."""
    changed = {*adapter.low_rank_updates, *adapter.biases, *adapter.replacements} & {EMBEDDING, LM_HEAD}
    return replace(config, tied_embeddings=False) if changed else config


class MergedWeights(LazyWeights):
    """The weights of a model with an adapter merged. Changed tensors are computed on first use.

    Args:
        base: the weights of the model.
        config: config of the model, before merging.
        adapter: adapter for this model.
        weight_type: type that changed matrices are rounded to, to nearest even.
        type_if_quantized: type that changed matrices are rounded to if they are quantised in `base`; None = `weight_type`.
        caller_quantizes: the caller quantises and frees each matrix as soon as it is computed, so `changed_bytes` is 0.
    """

    def __init__(
        self,
        base: Weights,
        config: ModelConfig,
        adapter: Adapter,
        *,
        weight_type: WeightType,
        type_if_quantized: WeightType | None = None,
        caller_quantizes: bool = False,
    ) -> None:
        self._base, self._adapter, self._type = base, adapter, weight_type
        self._type_if_quantized, self._caller_quantizes = type_if_quantized or weight_type, caller_quantizes
        is_untied = merged_config(config, adapter).tied_embeddings != config.tied_embeddings
        self._base_names = {"lm_head.weight": "embedding.weight"} if is_untied else {}
        pairs = [(name, matrix) for name, matrices in network_matrices(config).items() for matrix in matrices]
        self._changed = {
            f"{matrix.name}.weight": (name, matrix)
            for name, matrix in pairs
            if name in {**adapter.low_rank_updates, **adapter.replacements}
        }
        self._biases = {f"{matrix.name}.bias": (name, matrix) for name, matrix in pairs if name in adapter.biases}
        names = dict.fromkeys((*base, *self._base_names, *self._biases))
        super().__init__(names, self._make_tensor)
        self.bundled_head, self.has_encoders, self.quantized_format = base.bundled_head, base.has_encoders, base.quantized_format
        self.packed_matrices = {name: matrix for name, matrix in base.packed_matrices.items() if name not in self._changed}
        self.notices = (*base.notices, *self._merge_notices())

    def read_rows(self, name: str, row_indices: NDArray[np.int32]) -> Floats:
        base_name = self._base_names.get(name, name)
        return super().read_rows(name, row_indices) if self.is_changed(name) else self._base.read_rows(base_name, row_indices)

    def tensor_info(self, name: str) -> TensorInfo:
        if name in self._biases:
            size = len(self._adapter_bias(name))
            return TensorInfo((size,), WeightType.F32, None, 4 * size)
        info = self._base.tensor_info(self._base_names.get(name, name))
        if name not in self._changed:
            return info
        weight_type = self._type if info.bits is None else self._type_if_quantized
        nbytes = math.prod(info.shape) * weight_type.numpy_dtype.itemsize
        return replace(info, weight_type=weight_type, bits=None, nbytes=nbytes)

    def stored_blocks(self, name: str) -> StoredBlocks | None:
        return None if self.is_changed(name) else self._base.stored_blocks(self._base_names.get(name, name))

    @property
    def changed_bytes(self) -> int:
        """Return how many bytes all matrices that the adapter changes take in memory."""
        return 0 if self._caller_quantizes else sum(self.tensor_info(name).nbytes for name in self._changed)

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the model's files from which a tensor is computed, and the digest of an adapter that changes it."""
        base_name = self._base_names.get(name, name)
        base = self._base.source_arrays(base_name) if self._base.has_tensor(base_name) else ()
        return (*base, np.frombuffer(self._adapter.digest, np.uint8)[None]) if self.is_changed(name) else base

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        base_name = self._base_names.get(name, name)
        if self._base.has_tensor(base_name):  # a bias may exist only in the adapter
            self._base.free_tensor(base_name)

    def is_changed(self, name: str) -> bool:
        """Return whether the adapter changes this tensor."""
        return name in self._changed or name in self._biases

    def _merge_notices(self) -> Iterable[str]:
        """Yield messages for users: tokens may differ from those of a separate adapter, and merging takes memory."""
        yield f"the adapter {self._adapter.name!r} is merged into the weights: tokens may differ from those with a separate adapter"
        quantised = [name for name in self._changed if self._base.tensor_info(self._base_names.get(name, name)).bits is not None]
        if quantised and not self._caller_quantizes:
            size = sum(self.tensor_info(name).nbytes for name in quantised)
            stored = sum(self._base.tensor_info(self._base_names.get(name, name)).nbytes for name in quantised)
            yield (
                f"{len(quantised)} quantised matrices become {self._type_if_quantized.value} with the adapter merged: {size / 1e9:.2g} GB "
                f"in memory instead of {stored / 1e9:.2g} GB; quantization='int8' or 'int4' makes them smaller; loading the "
                "adapter with `adapters` leaves them quantised"
            )

    def _make_tensor(self, name: str) -> AnyTensor:
        if name in self._biases:
            bias = self._adapter_bias(name)
            values = bias + as_float32(self._base[name]) if self._base.has_tensor(name) else bias
            return Tensor(values, WeightType.F32, values.shape)
        base_name = self._base_names.get(name, name)
        if name not in self._changed:
            return self._base[base_name]
        merged = self._merged_matrix(name, base_name)
        if base_name == name:
            self._base.free_tensor(name)
        return merged

    def _merged_matrix(self, name: str, base_name: str) -> Tensor:
        changed, matrix = self._changed[name]
        update, replacement = self._adapter.low_rank_updates.get(changed), self._adapter.replacements.get(changed)
        tensor = self._base[base_name] if replacement is None else Tensor(replacement, WeightType.F32, replacement.shape)
        if update is not None and changed == EMBEDDING:
            update = LowRankUpdate(update.lora_b.T, update.lora_a.T)
        elif update is not None:
            update = LowRankUpdate(update.lora_a, matrix.select_rows(update.lora_b))
        weight_type = self.tensor_info(name).weight_type
        merged = np.empty(tensor.shape, weight_type.numpy_dtype)
        step = max(1, _WEIGHTS_PER_CHUNK // tensor.shape[1])
        for start in range(0, tensor.shape[0], step):
            rows = slice(start, start + step)
            values = as_float32(tensor, rows)
            values = values if update is None else values + update.lora_b[rows] @ update.lora_a
            merged[rows] = rounded = to_weight_type(values, weight_type)
            if not np.isfinite(rounded).all():
                raise CheckpointError(
                    f"{name} with the adapter {self._adapter.name!r} merged has values outside the range of {weight_type.value}: "
                    "use dtype='f32'"
                )
        return Tensor(merged, weight_type, tensor.shape)

    def _adapter_bias(self, name: str) -> Floats:
        changed, matrix = self._biases[name]
        return matrix.select_rows(self._adapter.biases[changed])
