"""The weights of a checkpoint directory. Some are computed from stored tensors: quantised matrices, parts of matrices, and decays."""

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, name_list
from paceline.models.config import FLOAT_TYPES, ModelConfig, WeightType
from paceline.models.families.table import FAMILIES
from paceline.models.grouped import RUN_COLUMNS, halved_e8m0_scales
from paceline.models.layers import ExpertMLP, GatedDeltaConfig, LayerConfig, Mamba2Config, Recurrent, ShortConvConfig
from paceline.models.quantized_formats.module import StoredWeight
from paceline.models.quantized_formats.small_floats import read_e2m1
from paceline.models.storage.fused_matrices import (
    RowsByMatrix,
    RowSelection,
    fused_by_key_head,
    fused_in_layer,
    fused_projections,
    is_transposed,
    num_rows,
)
from paceline.models.storage.mapped_files import drop_pages
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.safetensors_file import StoredTensor, view_tensor
from paceline.models.storage.stacked_experts import split_experts
from paceline.models.storage.stored_model import StoredModel, open_stored
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import (
    GroupedTensor,
    LazyTensor,
    LazyWeights,
    Tensor,
    TensorInfo,
    add_norm_offset,
    as_float32,
    half_split_order,
    shares_kv,
    to_weight_type,
)

_STACKED_MATRICES = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Rows of each matrix of an expert in a stacked tensor. Rows of gate and up alternate."""
_KV_MODULES = ("k_proj", "v_proj", "k_norm", "v_norm")


class CheckpointWeights(LazyWeights):
    """The weights of a checkpoint directory. Tensors that are not stored as the network needs them are computed on first use.

    Args:
        num_threads: number of threads that convert quantised matrices.

    Raises:
        CheckpointError: A file is missing or damaged, or a tensor is missing or unknown, or its shape or type is not supported.
    """

    def __init__(self, directory: Path, config: ModelConfig, *, num_threads: int = 1) -> None:
        stored = open_stored(directory, config)
        computed = _ComputedTensors(stored, config)
        for index, layer in enumerate(config.layers):
            computed.add_layer(index, layer)
        plain, packed = _find_tensors(stored, config, {*computed.tensors, *computed.packed})
        packed |= computed.packed
        matrices = {name: lazy_matrix(matrix, config.weight_type, num_threads) for name, matrix in packed.items()}
        self._computed = {**computed.tensors, **matrices}
        super().__init__(tensor_shapes(config), lambda name: self._computed[name].compute() if name in self._computed else plain[name])
        self.bundled_head, self.has_encoders, self.packed_matrices = stored.bundled_head, stored.has_encoders, packed
        if stored.quantized_format is not None:
            self.quantized_format = stored.quantized_format.name
            self.notices = (*stored.quantized_format.notices, *dequantized_notice(packed.values(), config.weight_type))

    def tensor_info(self, name: str) -> TensorInfo:
        return self._computed[name].info if name in self._computed else super().tensor_info(name)

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the checkpoint's files from which a tensor is computed."""
        return self._computed[name].source_arrays if name in self._computed else super().source_arrays(name)

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        if name in self._computed:
            drop_pages(self._computed[name].source_arrays)


def lazy_matrix(packed: PackedMatrix, weight_type: WeightType, num_threads: int = 1) -> LazyTensor:
    """Return a matrix that is converted on first use: to a `GroupedMatrix`, or to floats of `weight_type` if that cannot hold its values.

    The conversion raises a CheckpointError if a scale or a value is not finite.
    """
    if packed.bits is None:
        round_values = partial(to_weight_type, weight_type=weight_type)
        return _lazy_tensor(packed.source_arrays, packed.shape, weight_type, lambda: packed.to_array(round_values, num_threads))
    info = TensorInfo(packed.shape, WeightType.F32, packed.bits, packed.shape[0] * packed.row_bytes)
    return LazyTensor(info, packed.source_arrays, lambda: GroupedTensor(packed.to_grouped_matrix(num_threads)))


def dequantized_bytes(packed: Iterable[PackedMatrix], weight_type: WeightType) -> int:
    """Return how many bytes all matrices that are converted to floats take in memory."""
    return sum(lazy_matrix(matrix, weight_type).info.nbytes for matrix in packed if matrix.bits is None)


def dequantized_notice(packed: Iterable[PackedMatrix], weight_type: WeightType) -> tuple[str, ...]:
    """Return one notice for users: how much memory the matrices take that are converted to floats. Empty if no matrix is."""
    floats = [matrix for matrix in packed if matrix.bits is None]
    if not floats:
        return ()
    size, stored = dequantized_bytes(floats, weight_type), sum(array.nbytes for matrix in floats for array in matrix.source_arrays)
    return (
        f"{len(floats)} matrices become {weight_type.value}, rounded to nearest even, because groups cannot hold their values: "
        f"{size / 1e9:.2g} GB in memory instead of {stored / 1e9:.2g} GB in the files; quantization='int8' or 'int4' makes them smaller",
    )


def _find_tensors(model: StoredModel, config: ModelConfig, computed: Container[str]) -> tuple[dict[str, Tensor], dict[str, PackedMatrix]]:
    """Check the tensors of a checkpoint against its config. Return the float tensors and the packed matrices, by internal names.

    Args:
        computed: internal names of tensors that are computed, and so need not be in `model`.
    """
    files = model.files
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name not in computed}
    expected = {name: in_file for name, in_file in checkpoint_names(config).items() if name in shapes}
    has_fused = FAMILIES[config.family].has_fused_projections
    stored = split_experts(_split_fused_projections(model.tensors, config) if has_fused else model.tensors, config)
    if config.tied_embeddings and expected["embedding.weight"] not in stored and "lm_head.weight" in stored:
        expected["embedding.weight"] = "lm_head.weight"  # checkpoints with tied embeddings may use either name
    missing = [name for name in expected.values() if name not in stored]
    if missing:
        raise CheckpointError(
            f"{model.directory} lacks {name_list(missing)} that its config.json requires: it may be another model's config"
        )
    known = set(expected.values())
    others = {name: one for name, one in stored.items() if name not in known and not _is_ignorable(name, config)}
    unknown = [name for name, one in others.items() if not _is_zero_bias(name, one, files)]
    if unknown:
        raise CheckpointError(
            f"{model.directory} holds {name_list(unknown)} that a {config.family} model with this config.json does not have; "
            "running without them would give other tokens"
        )
    found = {name: (in_file, stored[in_file]) for name, in_file in expected.items()}
    packed = {name: _check_shape(in_file, one, shapes[name]) for name, (in_file, one) in found.items() if isinstance(one, PackedMatrix)}
    tensors = {
        name: _open_tensor(in_file, one, shapes[name], files) for name, (in_file, one) in found.items() if isinstance(one, StoredTensor)
    }
    if config.tied_embeddings and "lm_head.weight" in stored:
        _check_tied_embedding(tensors.get("embedding.weight", packed.get("embedding.weight")), stored["lm_head.weight"], files)
    if config.has_norm_offset:
        tensors |= {name: add_norm_offset(tensor) for name, tensor in tensors.items() if _is_stored_minus_one(name, config)}
    if FAMILIES[config.family].has_interleaved_rope:
        _reorder_rope_rows(tensors, packed, config)
    return tensors, packed


class _ComputedTensors:
    """Computes tensors of the network from stored tensors, and removes the stored ones from `StoredModel.tensors`.

    Attributes:
        tensors: computed float tensors, by internal names.
        packed: computed packed matrices, by internal names.
    """

    def __init__(self, stored: StoredModel, config: ModelConfig) -> None:
        self._stored = stored
        self._family, self._shapes, self._hidden_size = FAMILIES[config.family], tensor_shapes(config), config.hidden_size
        self.tensors: dict[str, LazyTensor] = {}
        self.packed: dict[str, PackedMatrix] = {}

    def add_layer(self, index: int, layer: LayerConfig) -> None:
        """Add the computed tensors of a layer."""
        for fused_name, rows in fused_in_layer(layer, self._family).items():
            self._add_fused_rows(index, fused_name, rows)
        if self._family.has_mxfp4_experts and isinstance(layer.mlp, ExpertMLP):
            self.tensors |= _lazy_experts(self._stored, index, layer.mlp, self._hidden_size)
        for mixer in layer.mixers:
            if isinstance(mixer, Recurrent):
                self._add_mixer(index, mixer)

    def _add_mixer(self, index: int, mixer: Recurrent) -> None:
        prefix = f"{self._family.recurrent_module}."
        name_prefix, stored_prefix = f"layers.{index}.", f"model.layers.{index}.{prefix}"
        self._add_convolution(name_prefix, stored_prefix, mixer)
        if mixer.state_shape is not None:
            self._add_decay(name_prefix, stored_prefix + "A_log", mixer.state_shape.num_heads)
        if isinstance(mixer, GatedDeltaConfig) and stored_prefix + "in_proj_qkvz.weight" in self._stored.tensors:
            for fused_name, rows in fused_by_key_head(mixer).items():
                self._add_fused_rows(index, prefix + fused_name, rows)

    def _add_fused_rows(self, index: int, fused_name: str, parts: RowsByMatrix) -> None:
        """Split a fused matrix and its bias, and add the parts under their internal names."""
        name_prefix, fused_name, count = f"layers.{index}.", f"model.layers.{index}.{fused_name}", num_rows(parts)
        first = f"{name_prefix}{next(iter(parts))}"
        has_bias, columns = f"{first}.bias" in self._shapes, self._shapes[f"{first}.weight"][1]
        shapes: dict[str, tuple[int, ...]] = {"weight": (count, columns), **({"bias": (count,)} if has_bias else {})}
        for kind, shape in shapes.items():
            stored = self._stored.tensors.get(f"{fused_name}.{kind}")
            if isinstance(stored, PackedMatrix):
                del self._stored.tensors[f"{fused_name}.{kind}"]
                _check_shape(f"{fused_name}.{kind}", stored, shape)
                for part, rows in parts.items():
                    matrix, name = stored.select_rows(rows), f"{name_prefix}{part}.{kind}"
                    if is_transposed(part):
                        self.tensors[name] = _lazy_transposed_matrix(matrix)
                    else:
                        self.packed[name] = matrix
                continue
            tensor = _pop_tensor(self._stored, f"{fused_name}.{kind}", shape)
            for part, rows in parts.items():
                make_lazy = _lazy_transposed_rows if is_transposed(part) else _lazy_rows
                self.tensors[f"{name_prefix}{part}.{kind}"] = make_lazy(tensor, rows)

    def _add_convolution(self, name_prefix: str, stored_prefix: str, mixer: Recurrent) -> None:
        """Add the weights of a convolution, stored in one tensor or several. Some families multiply channels by factors."""
        tensors, scales = self._pop_convolutions(stored_prefix, mixer), None
        if isinstance(mixer, Mamba2Config) and mixer.xbc_conv_scales != (1.0, 1.0, 1.0):
            sizes = mixer.state_shape.value_width, mixer.state_shape.key_width, mixer.state_shape.key_width
            scales = np.repeat(np.array(mixer.xbc_conv_scales, np.float32), sizes)
        name, shape = name_prefix + "conv.weight", (mixer.channels, mixer.kernel_size)
        arrays = tuple(tensor.array for tensor in tensors)
        if len(tensors) == 1 and scales is None:
            self.tensors[name] = _lazy_tensor(arrays, shape, tensors[0].weight_type, lambda: arrays[0][:, 0])
        else:
            self.tensors[name] = _lazy_tensor(arrays, shape, WeightType.F32, lambda: _convolution_weights(tensors, scales))

    def _pop_convolutions(self, stored_prefix: str, mixer: Recurrent) -> list[Tensor]:
        """Return the stored weights [C, 1, kernel_size] of a convolution, or of the three convolutions of queries, keys and values.

        The stored sizes of the three are not checked, only their sum: transformers divides the channels into three equal parts on saving.
        """
        sizes = {"conv" if isinstance(mixer, ShortConvConfig) else "conv1d": mixer.channels}
        if isinstance(mixer, GatedDeltaConfig) and mixer.has_separate_qkv_projections:
            sizes = dict.fromkeys(("q_conv1d", "k_conv1d"), mixer.state_shape.key_width) | {"v_conv1d": mixer.state_shape.value_width}
        tensors = self._stored.tensors
        stored = [tensors[name] for part in sizes if (name := f"{stored_prefix}{part}.weight") in tensors]
        if len(stored) == len(sizes) and sum(one.shape[0] for one in stored if one.shape) == mixer.channels:
            sizes = {part: one.shape[0] for part, one in zip(sizes, stored, strict=True)}
        return [_pop_tensor(self._stored, f"{stored_prefix}{part}.weight", (size, 1, mixer.kernel_size)) for part, size in sizes.items()]

    def _add_decay(self, name_prefix: str, stored_name: str, heads: int) -> None:
        tensor = _pop_tensor(self._stored, stored_name, (heads,))
        self.tensors[name_prefix + "decay.weight"] = _lazy_tensor(
            (tensor.array,), (heads,), WeightType.F32, lambda: _decays_from_logarithms(tensor)
        )


def _convolution_weights(tensors: Sequence[Tensor], scales: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Concatenate the weights of convolutions, and multiply each channel by its factor."""
    weights = np.concatenate([as_float32(tensor)[:, 0] for tensor in tensors])
    return weights if scales is None else weights * scales[:, None]


def _decays_from_logarithms(logarithms: Tensor) -> NDArray[np.float32]:
    """Return decay = -exp(A_log). An overflow to -infinity is valid: the state is cleared at every token."""
    with np.errstate(over="ignore"):
        return -np.exp(as_float32(logarithms))


def _lazy_rows(tensor: Tensor, rows: RowSelection) -> LazyTensor:
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    array = tensor.array[rows] if isinstance(rows, slice) else tensor.array
    return _lazy_tensor((array,), (count, *tensor.shape[1:]), tensor.weight_type, lambda: tensor.array[rows])


def _lazy_transposed_rows(tensor: Tensor, rows: RowSelection) -> LazyTensor:
    shape = _lazy_rows(tensor, rows).info.shape[::-1]
    return _lazy_tensor((tensor.array,), shape, tensor.weight_type, lambda: np.ascontiguousarray(tensor.array[rows].T))


def _lazy_transposed_matrix(matrix: PackedMatrix) -> LazyTensor:
    """Return the transposed matrix in float32. It cannot stay quantised, because its groups would be along columns."""
    shape = matrix.shape[::-1]
    values = partial(matrix.exact_values, slice(None))
    info = TensorInfo(shape, WeightType.F32, None, 4 * shape[0] * shape[1])
    return LazyTensor(info, matrix.source_arrays, lambda: Tensor(np.ascontiguousarray(values().T), WeightType.F32, shape))


def _lazy_tensor(
    stored: tuple[NDArray[Any], ...], shape: tuple[int, ...], weight_type: WeightType, make: Callable[[], NDArray[Any]]
) -> LazyTensor:
    info = TensorInfo(shape, weight_type, None, math.prod(shape) * weight_type.numpy_dtype.itemsize)
    return LazyTensor(info, stored, lambda: Tensor(make(), weight_type, shape))


def _lazy_experts(stored: StoredModel, layer: int, mlp: ExpertMLP, hidden_size: int) -> dict[str, LazyTensor]:
    """Return the tensors of each expert of a layer, by internal names, and remove the stacked tensors from `stored`."""
    tensors: dict[str, LazyTensor] = {}
    count, inner = mlp.routing.num_experts, mlp.expert.intermediate_size
    for stack, parts in _STACKED_MATRICES.items():
        stored_name = f"model.layers.{layer}.mlp.experts.{stack}"
        rows, columns = (hidden_size, inner) if stack == "down_proj" else (2 * inner, hidden_size)
        bias = _pop_tensor(stored, f"{stored_name}_bias", (count, rows))
        plain = _pop_tensor(stored, stored_name, (count, columns, rows)) if stored_name in stored.tensors else None
        blocks = exponents = None
        if plain is None:
            blocks = _pop_uint8_tensor(stored, f"{stored_name}_blocks", (count, rows, columns // RUN_COLUMNS, RUN_COLUMNS // 2))
            exponents = _pop_uint8_tensor(stored, f"{stored_name}_scales", (count, rows, columns // RUN_COLUMNS))
        for expert in range(count):
            for part, part_rows in parts.items():
                name = f"layers.{layer}.experts.{expert}.{part}"
                tensors[f"{name}.bias"] = _lazy_array(bias.array[expert, part_rows], bias.weight_type)
                if plain is not None:
                    tensors[f"{name}.weight"] = _lazy_array(plain.array[expert, :, part_rows].T, plain.weight_type)
                elif blocks is not None and exponents is not None:
                    pairs = blocks[expert, part_rows].reshape(-1, columns // 2)
                    matrix = read_e2m1(stored_name, pairs, exponents[expert, part_rows], halved_e8m0_scales)
                    tensors[f"{name}.weight"] = lazy_matrix(matrix, bias.weight_type)
    return tensors


def _pop_uint8_tensor(stored: StoredModel, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    tensor = stored.pop_tensor(name)
    if tensor.dtype != "U8" or tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {name!r} is of type {tensor.dtype} and shape {list(tensor.shape)}, but config.json "
            f"makes it U8 of shape {list(shape)}; one of the two files belongs to another model"
        )
    return view_tensor(tensor, stored.files[tensor.path], np.dtype(np.uint8))


def _lazy_array(array: NDArray[Any], weight_type: WeightType) -> LazyTensor:
    """Return values of this type as a tensor, without reading them from the mapped file now."""
    return _lazy_tensor((array,), array.shape, weight_type, lambda: array)


def _split_fused_projections(stored: Mapping[str, StoredWeight], config: ModelConfig) -> dict[str, StoredWeight]:
    """Replace fused qkv and gate_up matrices with their parts, which are views of the same bytes, and return all tensors."""
    tensors = dict(stored)
    for index, layer in enumerate(config.layers):
        for stack, parts in fused_projections(layer).items():
            name = f"model.layers.{index}.{stack}.weight"
            if name in tensors:
                stacked, module = tensors.pop(name), name.removesuffix(".weight").rpartition(".")[0]
                tensors |= {f"{module}.{part}.weight": _select_rows(name, stacked, rows, num_rows(parts)) for part, rows in parts.items()}
    return tensors


def _select_rows(name: str, tensor: StoredWeight, rows: slice, total: int) -> StoredWeight:
    """Return the consecutive rows `rows` of a matrix, after checking that it has `total` rows."""
    if len(tensor.shape) != 2 or tensor.shape[0] != total:
        stored_name = tensor.stored_name if isinstance(tensor, PackedMatrix) else f"{tensor.path}: tensor {name!r}"
        raise CheckpointError(
            f"{stored_name} has shape {list(tensor.shape)}, but config.json requires {total} rows: they belong to different models"
        )
    if isinstance(tensor, PackedMatrix):
        return tensor.select_rows(rows)
    row_bytes = (tensor.end - tensor.begin) // total
    begin, end = tensor.begin + rows.start * row_bytes, tensor.begin + rows.stop * row_bytes
    return replace(tensor, shape=(rows.stop - rows.start, tensor.shape[1]), begin=begin, end=end)


def _is_stored_minus_one(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is a norm weight that is stored minus 1. Gated norms of recurrent mixers are stored unchanged."""
    is_plain = name == "final_norm.weight" and FAMILIES[config.family].has_plain_final_norm
    return name.endswith("norm.weight") and not name.endswith("gated_norm.weight") and not is_plain


def _reorder_rope_rows(tensors: dict[str, Tensor], packed: dict[str, PackedMatrix], config: ModelConfig) -> None:
    """Reorder the rows of q and k in place, so that row j of a head is paired with row j + rotary_size / 2 in rotary embeddings."""
    for index, attention in config.attention_layers.items():
        head_size = attention.head_size
        for name in (f"layers.{index}.{part}.{kind}" for part in ("q_proj", "k_proj") for kind in ("weight", "bias")):
            found = tensors.get(name, packed.get(name))
            if found is None:
                continue
            order = half_split_order(found.shape[0], head_size, attention.rope.rotary_size(head_size))
            if isinstance(found, PackedMatrix):
                packed[name] = found.select_rows(order)
            else:
                tensors[name] = replace(found, array=found.array[order])


def _check_shape(name: str, stored: PackedMatrix, shape: tuple[int, ...]) -> PackedMatrix:
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.stored_name}: {name} holds a matrix of shape {list(stored.shape)}, but config.json requires {list(shape)}; "
            "one of the two files belongs to another model"
        )
    return stored


def _open_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...], files: Mapping[Path, NDArray[np.uint8]]) -> Tensor:
    """Return a view of a stored tensor in its mapped file. A stored vector may have additional dimensions of size 1."""
    is_vector = len(shape) == 1 and tuple(size for size in stored.shape if size != 1) == tuple(size for size in shape if size != 1)
    if stored.shape != shape and not is_vector:
        raise CheckpointError(
            f"{stored.path}: tensor {name!r} has shape {list(stored.shape)}, but config.json requires {list(shape)}; "
            "one of the two files belongs to another model"
        )
    if stored.dtype not in FLOAT_TYPES:
        raise CheckpointError(
            f"{stored.path}: tensor {name!r} is of type {stored.dtype}, supported are {', '.join(FLOAT_TYPES)}: "
            "use an unquantised checkpoint"
        )
    weight_type = FLOAT_TYPES[stored.dtype]
    return Tensor(view_tensor(stored, files[stored.path], weight_type.numpy_dtype).reshape(shape), weight_type, shape)


def _pop_tensor(stored: StoredModel, name: str, shape: tuple[int, ...]) -> Tensor:
    """Remove a tensor from `stored`, check that it has shape `shape` and a float type, and return a view of it."""
    return _open_tensor(name, stored.pop_tensor(name), shape, stored.files)


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is unused: rotary frequencies, a tied lm_head, or k and v of layers that read another layer's cache."""
    if name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight"):
        return True
    unused = re.fullmatch(rf"model\.layers\.(\d{{1,9}})\.self_attn\.({'|'.join(_KV_MODULES)})\.(weight|bias)", name)
    return unused is not None and shares_kv(config, int(unused[1]))


def _is_zero_bias(name: str, stored: StoredWeight, files: Mapping[Path, NDArray[np.uint8]]) -> bool:
    """Return whether a tensor is a bias of zeros. AutoGPTQ adds such a bias to every matrix."""
    return isinstance(stored, StoredTensor) and name.endswith(".bias") and not files[stored.path][stored.begin : stored.end].any()


def _check_tied_embedding(embedding: Tensor | PackedMatrix | None, stored: StoredWeight, files: Mapping[Path, NDArray[np.uint8]]) -> None:
    if isinstance(stored, PackedMatrix):
        arrays = embedding.stored_arrays if isinstance(embedding, PackedMatrix) else ()
        is_same = len(arrays) == len(stored.stored_arrays) and all(map(np.array_equal, arrays, stored.stored_arrays))
        stored_name = stored.stored_name
    else:
        stored_name = f"{stored.path}: lm_head.weight"
        is_same = isinstance(embedding, Tensor)
        if isinstance(embedding, Tensor):
            lm_head = _open_tensor("lm_head.weight", stored, embedding.shape, files)
            is_same = lm_head.weight_type is embedding.weight_type and np.array_equal(lm_head.array, embedding.array)
    if not is_same:
        raise CheckpointError(
            f"{stored_name} differs from the embedding although tie_word_embeddings is true: set it to false in config.json"
        )
