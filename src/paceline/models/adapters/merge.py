"""The weights of a model with one adapter merged: W + up @ down in float32, before rounding or quantisation."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.adapters.adapter import Adapter, LowRank
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD, network_matrices
from paceline.models.config import ModelConfig, WeightType
from paceline.models.gguf.blocks import StoredBlocks
from paceline.models.weights import AnyTensor, LazyWeights, Tensor, TensorInfo, Weights, as_float32, to_bf16

_CHUNK_VALUES = 1 << 20
_ITEM_TYPES = {WeightType.F32: np.float32, WeightType.F16: np.float16, WeightType.BF16: np.uint16}
Floats = NDArray[np.float32]


def merged_config(config: ModelConfig, adapter: Adapter) -> ModelConfig:
    """Return the network with an adapter merged. If it changes the embedding or the head, the two are no longer tied."""
    changed = {*adapter.products, *adapter.biases, *adapter.saved} & {EMBEDDING, LM_HEAD}
    return replace(config, tied_embeddings=False) if changed else config


class MergedWeights(LazyWeights):
    """The weights of a model with an adapter merged. Changed tensors are computed on first use.

    Args:
        base: the weights of the model.
        config: config of the model, before merging.
        adapter: made for this model.
        weight_type: to which changed matrices are rounded, to nearest even.
        quantised_type: the same for matrices that are quantised in `base`; None = `weight_type`.
        is_quantised_next: the caller quantises each matrix as soon as it is computed.
    """

    def __init__(
        self,
        base: Weights,
        config: ModelConfig,
        adapter: Adapter,
        *,
        weight_type: WeightType,
        type_if_quantised: WeightType | None = None,
        is_quantised_next: bool = False,
    ) -> None:
        self._base, self._adapter, self._type = base, adapter, weight_type
        self._quantised_type, self._quantised_next = type_if_quantised or weight_type, is_quantised_next
        is_parted = merged_config(config, adapter).tied_embeddings != config.tied_embeddings
        self._sources = {"lm_head.weight": "embedding.weight"} if is_parted else {}
        matrices = [(name, matrix) for name, of_name in network_matrices(config).items() for matrix in of_name]
        self._changed = {
            f"{matrix.name}.weight": (name, matrix) for name, matrix in matrices if name in {**adapter.products, **adapter.saved}
        }
        self._biases = {f"{matrix.name}.bias": (name, matrix) for name, matrix in matrices if name in adapter.biases}
        names = dict.fromkeys((*base.names(), *self._sources, *self._biases))
        super().__init__(names, self._tensor)
        self.bundled_head, self.has_encoders, self.container = base.bundled_head, base.has_encoders, base.container
        self.packed = {name: one for name, one in base.packed.items() if name not in self._changed}
        self.notices = (*base.notices, *self._notices())

    def rows(self, name: str, numbers: NDArray[np.int32]) -> Floats:
        return super().rows(name, numbers) if self.is_changed(name) else self._base.rows(self._sources.get(name, name), numbers)

    def info(self, name: str) -> TensorInfo:
        if name in self._biases:
            size = len(self._merged_bias(name))
            return TensorInfo((size,), WeightType.F32, None, 4 * size)
        info = self._base.info(self._sources.get(name, name))
        if name not in self._changed:
            return info
        weight_type = self._type if info.bits is None else self._quantised_type
        nbytes = int(np.prod(info.shape)) * np.dtype(_ITEM_TYPES[weight_type]).itemsize
        return replace(info, weight_type=weight_type, bits=None, nbytes=nbytes)

    def blocks(self, name: str) -> StoredBlocks | None:
        return None if self.is_changed(name) else self._base.blocks(self._sources.get(name, name))

    @property
    def changed_bytes(self) -> int:
        """Return the bytes in memory of all matrices that the adapter changes."""
        return 0 if self._quantised_next else sum(self.info(name).nbytes for name in self._changed)

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        source = self._sources.get(name, name)
        base = self._base.source_arrays(source) if self._base.has(source) else ()
        return (*base, np.frombuffer(self._adapter.key, np.uint8)[None]) if self.is_changed(name) else base

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        source = self._sources.get(name, name)
        if self._base.has(source):  # the model has no such tensor if only the adapter has this bias
            self._base.free_tensor(source)

    def is_changed(self, name: str) -> bool:
        """Return whether the adapter changes a tensor."""
        return name in self._changed or name in self._biases

    def _notices(self) -> Iterable[str]:
        """Yield notices: the merged model is another target than the base model, and dequantised matrices take memory."""
        yield f"the adapter {self._adapter.name!r} is merged into the weights: another target than the model with a separate adapter"
        quantised = [name for name in self._changed if self._base.info(self._sources.get(name, name)).bits is not None]
        if quantised and not self._quantised_next:
            size = sum(self.info(name).nbytes for name in quantised)
            stored = sum(self._base.info(self._sources.get(name, name)).nbytes for name in quantised)
            yield (
                f"{len(quantised)} quantised matrices become {self._quantised_type.value} with the adapter merged: {size / 1e9:.2g} GB in "
                f"memory for {stored / 1e9:.2g} GB; quantization='int8' or 'int4' makes them smaller; loaded with `adapters` "
                "they stay as they are"
            )

    def _tensor(self, name: str) -> AnyTensor:
        if name in self._biases:
            own = self._merged_bias(name)
            values = own + as_float32(self._base[name]) if self._base.has(name) else own
            return Tensor(values, WeightType.F32, values.shape)
        source = self._sources.get(name, name)
        if name not in self._changed:
            return self._base[source]
        merged = self._merged_matrix(name, source)
        if source == name:
            self._base.free_tensor(name)
        return merged

    def _merged_matrix(self, name: str, source: str) -> Tensor:
        changed, matrix = self._changed[name]
        product, saved = self._adapter.products.get(changed), self._adapter.saved.get(changed)
        tensor = self._base[source] if saved is None else Tensor(saved, WeightType.F32, saved.shape)
        if product is not None and changed == EMBEDDING:
            product = LowRank(product.up.T, product.down.T)
        elif product is not None and matrix.rows is not None:
            product = LowRank(product.down, product.up[matrix.rows])
        weight_type = self.info(name).weight_type
        found = np.empty(tensor.shape, _ITEM_TYPES[weight_type])
        step = max(1, _CHUNK_VALUES // tensor.shape[1])
        for start in range(0, tensor.shape[0], step):
            rows = np.arange(start, min(start + step, tensor.shape[0]), dtype=np.int32)
            values = as_float32(tensor, rows)
            found[rows] = self._round_to_type(values if product is None else values + product.up[rows] @ product.down, name, weight_type)
        return Tensor(found, weight_type, tensor.shape)

    def _merged_bias(self, name: str) -> Floats:
        changed, matrix = self._biases[name]
        own = self._adapter.biases[changed]
        return own if matrix.rows is None else own[matrix.rows]

    def _round_to_type(self, values: Floats, name: str, weight_type: WeightType) -> NDArray[Any]:
        if weight_type is WeightType.BF16:
            return to_bf16(values)
        with np.errstate(over="ignore"):
            own = values.astype(_ITEM_TYPES[weight_type])
        if not np.isfinite(own).all():
            raise CheckpointError(
                f"{name} with the adapter {self._adapter.name!r} merged has values that {weight_type.value} does not reach: use dtype='f32'"
            )
        return own
