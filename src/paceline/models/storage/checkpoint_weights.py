"""The weights of a checkpoint directory. Some are computed from stored ones: quantised matrices, parts of matrices, and decays."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig, WeightType
from paceline.models.families.table import FAMILIES
from paceline.models.layers import ExpertMLP, GatedDeltaConfig, LayerConfig, Mamba2Config, Recurrent, ShortConvConfig
from paceline.models.storage.fused_matrices import Parts, Rows, fused_by_key_head, fused_in_layer, is_transposed, num_rows
from paceline.models.storage.mapped_files import drop_pages
from paceline.models.storage.mxfp4_experts import lazy_experts
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.packed_weights import dequantized_notice, lazy_matrix
from paceline.models.storage.stored_model import StoredModel, open_stored
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import LazyTensor, LazyWeights, Tensor, TensorInfo, Weights, as_float32, check_shape, take_tensor


class CheckpointWeights(LazyWeights):
    """The weights of a checkpoint directory. Tensors that differ from stored ones are made on first use.

    Args:
        num_threads: number of threads that convert quantised matrices.

    Raises:
        CheckpointError: A file is missing or damaged, or a tensor is missing, unknown, or of another shape or type.
    """

    def __init__(self, directory: Path, config: ModelConfig, *, num_threads: int = 1) -> None:
        stored = open_stored(directory, config)
        computed = _ComputedTensors(stored, config)
        for index, layer in enumerate(config.layers):
            computed.add_layer(index, layer)
        plain = Weights.from_stored(stored, config, provided_elsewhere=(*computed.tensors, *computed.packed))
        packed = {**plain.packed, **computed.packed}
        matrices = {name: lazy_matrix(matrix, config.weight_type, num_threads) for name, matrix in packed.items()}
        self._computed = {**computed.tensors, **matrices}
        super().__init__(tensor_shapes(config), lambda name: self._computed[name].make() if name in self._computed else plain[name])
        self.bundled_head, self.has_encoders, self.packed = stored.bundled_head, stored.has_encoders, packed
        if stored.container is not None:
            self.container = stored.container.name
            self.notices = (*stored.container.notices, *dequantized_notice(packed.values(), config.weight_type))

    def info(self, name: str) -> TensorInfo:
        return self._computed[name].info if name in self._computed else super().info(name)

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        return self._computed[name].arrays if name in self._computed else super().source_arrays(name)

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        if name in self._computed:
            drop_pages(self._computed[name].arrays)


class _ComputedTensors:
    """Tensors that are computed from stored ones, which are removed from `stored`.

    Attributes:
        tensors: tensors, by internal names.
        packed: packed matrices, by internal names.
    """

    def __init__(self, stored: StoredModel, config: ModelConfig) -> None:
        self._stored = stored
        self._family, self._shapes, self._hidden_size = FAMILIES[config.family], tensor_shapes(config), config.hidden_size
        self.tensors: dict[str, LazyTensor] = {}
        self.packed: dict[str, PackedMatrix] = {}

    def add_layer(self, index: int, layer: LayerConfig) -> None:
        """Add the computed tensors of the layer with this index."""
        for source, rows in fused_in_layer(layer, self._family).items():
            self._add_fused_rows(index, source, rows)
        if self._family.has_mxfp4_experts and isinstance(layer.mlp, ExpertMLP):
            self.tensors |= lazy_experts(self._stored, index, layer.mlp, self._hidden_size)
        for mixer in layer.mixers:
            if isinstance(mixer, Recurrent):
                self._add_mixer(index, mixer)

    def _add_mixer(self, index: int, mixer: Recurrent) -> None:
        prefix = f"{self._family.recurrent_module}."
        name_prefix, stored_prefix = f"layers.{index}.", f"model.layers.{index}.{prefix}"
        self._add_convolution(name_prefix, stored_prefix, mixer)
        if mixer.state_shape is not None:
            self._add_decay(name_prefix, stored_prefix + "A_log", mixer.state_shape.heads)
        if isinstance(mixer, GatedDeltaConfig) and stored_prefix + "in_proj_qkvz.weight" in self._stored.tensors:
            for source, rows in fused_by_key_head(mixer).items():
                self._add_fused_rows(index, prefix + source, rows)

    def _add_fused_rows(self, index: int, source: str, parts: Parts) -> None:
        """Split a fused matrix and its bias, and add the parts to these weights under their own names."""
        name_prefix, source, count = f"layers.{index}.", f"model.layers.{index}.{source}", num_rows(parts)
        first = f"{name_prefix}{next(iter(parts))}"
        has_bias, columns = f"{first}.bias" in self._shapes, self._shapes[f"{first}.weight"][1]
        shapes: dict[str, tuple[int, ...]] = {"weight": (count, columns), **({"bias": (count,)} if has_bias else {})}
        for kind, shape in shapes.items():
            stored = self._stored.tensors.get(f"{source}.{kind}")
            if isinstance(stored, PackedMatrix):
                del self._stored.tensors[f"{source}.{kind}"]
                check_shape(f"{source}.{kind}", stored, shape)
                for part, rows in parts.items():
                    matrix, name = stored.select_rows(rows), f"{name_prefix}{part}.{kind}"
                    if is_transposed(part):
                        self.tensors[name] = _lazy_transposed_matrix(matrix)
                    else:
                        self.packed[name] = matrix
                continue
            whole = take_tensor(self._stored, f"{source}.{kind}", shape)
            for part, rows in parts.items():
                make_lazy = _lazy_transposed_rows if is_transposed(part) else _lazy_rows
                self.tensors[f"{name_prefix}{part}.{kind}"] = make_lazy(whole, rows)

    def _add_convolution(self, name_prefix: str, stored_prefix: str, mixer: Recurrent) -> None:
        """Add the weights of a convolution: a stored tensor, or several that are concatenated or scaled."""
        wholes, scales = self._take_convolutions(stored_prefix, mixer), None
        if isinstance(mixer, Mamba2Config) and mixer.conv_scales != (1.0, 1.0, 1.0):
            sizes = mixer.state_shape.value_width, mixer.state_shape.key_width, mixer.state_shape.key_width
            scales = np.repeat(np.array(mixer.conv_scales, np.float32), sizes)
        is_stored = len(wholes) == 1 and scales is None
        make = partial(_without_middle_axis, wholes[0]) if is_stored else partial(_convolution_weights, wholes, scales)
        arrays, weight_type = tuple(whole.array for whole in wholes), wholes[0].weight_type if is_stored else WeightType.F32
        self.tensors[name_prefix + "conv.weight"] = _lazy_tensor(arrays, (mixer.channels, mixer.kernel_size), weight_type, make)

    def _take_convolutions(self, stored_prefix: str, mixer: Recurrent) -> list[Tensor]:
        """Return the stored weights [C, 1, kernel_size] of a convolution, or of those of queries, keys and values.

        transformers divides the channels of the latter into three equal parts when it saves them. Then all that matters is their order.
        """
        sizes = {"conv" if isinstance(mixer, ShortConvConfig) else "conv1d": mixer.channels}
        if isinstance(mixer, GatedDeltaConfig) and mixer.has_separate_projections:
            sizes = dict.fromkeys(("q_conv1d", "k_conv1d"), mixer.state_shape.key_width) | {"v_conv1d": mixer.state_shape.value_width}
        tensors = self._stored.tensors
        stored = [tensors[name] for part in sizes if (name := f"{stored_prefix}{part}.weight") in tensors]
        if len(stored) == len(sizes) and sum(one.shape[0] for one in stored if one.shape) == mixer.channels:
            sizes = {part: one.shape[0] for part, one in zip(sizes, stored, strict=True)}
        return [take_tensor(self._stored, f"{stored_prefix}{part}.weight", (size, 1, mixer.kernel_size)) for part, size in sizes.items()]

    def _add_decay(self, name_prefix: str, stored_name: str, heads: int) -> None:
        whole = take_tensor(self._stored, stored_name, (heads,))
        make = partial(_decays_from_logarithms, whole)
        self.tensors[name_prefix + "decay.weight"] = _lazy_tensor((whole.array,), (heads,), WeightType.F32, make)


def _without_middle_axis(whole: Tensor) -> NDArray[Any]:
    """Return the stored weights [C, 1, kernel_size] of a convolution as [C, kernel_size]."""
    array: NDArray[Any] = whole.array[:, 0]
    return array


def _convolution_weights(wholes: Sequence[Tensor], scales: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return the weights of several convolutions as one, times a factor for each channel."""
    weights = np.concatenate([as_float32(whole)[:, 0] for whole in wholes])
    return weights if scales is None else weights * scales[:, None]


def _decays_from_logarithms(logarithms: Tensor) -> NDArray[np.float32]:
    """Return decay = -exp(A_log). A decay of -infinity, from overflow, clears the state at every token."""
    with np.errstate(over="ignore"):
        return -np.exp(as_float32(logarithms))


def _lazy_rows(tensor: Tensor, rows: Rows) -> LazyTensor:
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    array = tensor.array[rows] if isinstance(rows, slice) else tensor.array
    return _lazy_tensor((array,), (count, *tensor.shape[1:]), tensor.weight_type, lambda: tensor.array[rows])


def _lazy_transposed_rows(tensor: Tensor, rows: Rows) -> LazyTensor:
    shape = _lazy_rows(tensor, rows).info.shape[::-1]
    return _lazy_tensor((tensor.array,), shape, tensor.weight_type, lambda: np.ascontiguousarray(tensor.array[rows].T))


def _lazy_transposed_matrix(matrix: PackedMatrix) -> LazyTensor:
    """Return the transposed matrix in float32. Groups cannot hold it: they would be along its columns."""
    shape = matrix.shape[::-1]
    values = partial(matrix.exact_values, slice(None))
    info = TensorInfo(shape, WeightType.F32, None, 4 * shape[0] * shape[1])
    return LazyTensor(info, matrix.source_arrays, lambda: Tensor(np.ascontiguousarray(values().T), WeightType.F32, shape))


def _lazy_tensor(
    stored: tuple[NDArray[Any], ...], shape: tuple[int, ...], weight_type: WeightType, make: Callable[[], NDArray[Any]]
) -> LazyTensor:
    item_bytes = 4 if weight_type is WeightType.F32 else 2
    info = TensorInfo(shape, weight_type, None, int(np.prod(shape)) * item_bytes)
    return LazyTensor(info, stored, lambda: Tensor(make(), weight_type, shape))
