"""The weights of a checkpoint by internal names, memory-mapped: nothing is read before it is used."""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, name_list
from paceline.models.config import ModelConfig, WeightType
from paceline.models.containers.module import StoredWeight
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.blocks import StoredBlocks
from paceline.models.grouped import GroupedMatrix
from paceline.models.layers import DenseMLP
from paceline.models.storage.mapped_files import drop_pages
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.safetensors_file import StoredTensor, view_tensor
from paceline.models.storage.stacked_experts import split_experts
from paceline.models.storage.stored_model import StoredModel
from paceline.models.tensor_names import checkpoint_names, tensor_shapes

_SUPPORTED_DTYPES: Mapping[str, tuple[WeightType, "np.dtype[Any]"]] = {
    "F32": (WeightType.F32, np.dtype("<f4")),
    "F16": (WeightType.F16, np.dtype("<f2")),
    "BF16": (WeightType.BF16, np.dtype("<u2")),
}
_BF16_SHIFT = np.uint32(16)
_KV_MODULES = ("k_proj", "v_proj", "k_norm", "v_norm")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A float tensor, mostly a read-only view of the mapped file. numpy has no bf16, so its bits are held as uint16."""

    array: NDArray[Any]
    weight_type: WeightType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A quantised matrix. `weight_type` is the float type that products with it are computed in."""

    matrix: GroupedMatrix
    weight_type: WeightType = WeightType.F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


AnyTensor = Tensor | GroupedTensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, type and size of a tensor, known before its values are read or computed.

    Attributes:
        bits: number of bits of a quantised code; None = the tensor is not quantised.
        nbytes: number of bytes in memory.
    """

    shape: tuple[int, ...]
    weight_type: WeightType
    bits: int | None
    nbytes: int


class Weights(Mapping[str, AnyTensor]):
    """The tensors of a network by internal names.

    Attributes:
        bundled_head: "medusa" or "mtp" if the files include such a drafting head.
        has_encoders: the files include image or audio encoders, which are not read.
        container: the format of quantised matrices in the files; None = there are none.
        notices: messages for users.
        packed: quantised matrices that are not converted yet, by internal names. Their tensors are converted on first use.
    """

    bundled_head: str | None = None
    has_encoders: bool = False
    container: str | None = None
    notices: tuple[str, ...] = ()
    packed: Mapping[str, PackedMatrix] = MappingProxyType({})

    def __init__(self, tensors: Mapping[str, AnyTensor]) -> None:
        self._tensors = dict(tensors)
        self._names: Collection[str] = self._tensors

    @classmethod
    def from_stored(cls, model: StoredModel, config: ModelConfig, provided_elsewhere: Container[str] = ()) -> "Weights":
        """Check the tensors of a checkpoint against its config.

        Args:
            provided_elsewhere: internal names of tensors that need not be in `model`, because the caller has them.

        Raises:
            CheckpointError: A tensor is missing, unknown, or of another shape or type.
        """
        files = model.files
        shapes = {name: shape for name, shape in tensor_shapes(config).items() if name not in provided_elsewhere}
        expected = {name: in_file for name, in_file in checkpoint_names(config).items() if name in shapes}
        has_fused = FAMILIES[config.family].has_fused_projections
        stored = split_experts(_split_fused_projections(model.tensors, config) if has_fused else model.tensors, config)
        if config.tied_embeddings and expected["embedding.weight"] not in stored and "lm_head.weight" in stored:
            expected["embedding.weight"] = "lm_head.weight"  # checkpoints with tied embeddings store the matrix under either name
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
        packed = {name: check_shape(in_file, one, shapes[name]) for name, (in_file, one) in found.items() if isinstance(one, PackedMatrix)}
        tensors = {
            name: open_tensor(in_file, one, shapes[name], files) for name, (in_file, one) in found.items() if isinstance(one, StoredTensor)
        }
        if config.tied_embeddings and "lm_head.weight" in stored:
            _check_tied(tensors.get("embedding.weight", packed.get("embedding.weight")), stored["lm_head.weight"], files)
        if config.has_norm_offset:
            tensors |= {name: add_norm_offset(tensor) for name, tensor in tensors.items() if _is_stored_minus_one(name, config)}
        if FAMILIES[config.family].has_interleaved_rope:
            _reorder_rope_rows(tensors, packed, config)
        weights = cls(tensors)
        weights.packed = packed
        return weights

    def __getitem__(self, name: str) -> AnyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Return the internal names of all tensors, in the order in which a forward pass uses them."""
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def has(self, name: str) -> bool:
        """Return whether the network has this tensor, without computing it."""
        return name in self._names

    def rows(self, name: str, row_indices: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the matrix rows with these indices as exact float32, [len(row_indices), columns]. Other rows are not read."""
        return as_float32(self[name], row_indices)

    def free_tensor(self, name: str) -> None:
        """Free the memory of a tensor. Its next use reads or computes the tensor again."""
        if (found := self._tensors.get(name)) is not None:
            drop_pages(found.matrix.arrays if isinstance(found, GroupedTensor) else (found.array,))

    def info(self, name: str) -> TensorInfo:
        """Return shape, type and size of a tensor without computing it."""
        tensor = self[name]
        bits = tensor.matrix.bits if isinstance(tensor, GroupedTensor) else None
        return TensorInfo(tensor.shape, tensor.weight_type, bits, tensor.nbytes)

    def stored_blocks(self, name: str) -> StoredBlocks | None:
        """Return a matrix as the quantised blocks of a GGUF file; None if it is not stored in such blocks."""
        return None

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        """Return the stored arrays that determine the values of a tensor, to compute a digest from."""
        tensor = self[name]
        return tensor.matrix.arrays if isinstance(tensor, GroupedTensor) else (tensor.array,)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights in memory."""
        return sum(self.info(name).nbytes for name in self)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor computed on first use: shape and type, the stored arrays that determine its values, and the function to call."""

    info: TensorInfo
    arrays: tuple[NDArray[Any], ...]
    make: Callable[[], AnyTensor]


class LazyWeights(Weights):
    """`Weights` whose tensors are computed on first use, and kept until `free_tensor`.

    Args:
        names: names of all tensors, in the order in which a forward pass uses them.
        make: returns the tensor of a name.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], AnyTensor]) -> None:
        super().__init__({})
        self._names = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> AnyTensor:
        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = self._make(name)
        return found

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        self._tensors.pop(name, None)


def as_float32(tensor: AnyTensor, rows: NDArray[np.int32] | None = None) -> NDArray[np.float32]:
    """Return all rows, or the rows with the indices `rows`, as exact float32; a view if the tensor is stored in float32."""
    if isinstance(tensor, GroupedTensor):
        return tensor.matrix.values(slice(None) if rows is None else rows)
    stored = tensor.array if rows is None else tensor.array.take(rows, 0)
    if tensor.weight_type is WeightType.BF16:
        bits: NDArray[np.uint32] = np.left_shift(stored.astype(np.uint32), _BF16_SHIFT)
        return bits.view(np.float32)
    return np.asarray(stored, np.float32)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 values to the nearest bf16, ties to even, and return its bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> _BF16_SHIFT) & np.uint32(1)))) >> _BF16_SHIFT).astype(np.uint16)


def take_rows(tensor: AnyTensor, rows: NDArray[np.int64] | slice) -> AnyTensor:
    """Return a matrix with only the selected rows: a view for a slice, otherwise a copy."""
    if isinstance(tensor, GroupedTensor):
        return replace(tensor, matrix=tensor.matrix.take_rows(rows))
    array = tensor.array[rows]
    return Tensor(array, tensor.weight_type, array.shape)


def _split_fused_projections(stored: Mapping[str, StoredWeight], config: ModelConfig) -> dict[str, StoredWeight]:
    """Return the tensors with fused qkv and gate_up matrices replaced by their parts, which are views of the same bytes."""
    tensors = dict(stored)
    for index, layer in enumerate(config.layers):
        query_size, kv_size = layer.attention.query_size, layer.attention.kv_size
        stacks = {"self_attn.qkv_proj": {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}}
        if isinstance(layer.mlp, DenseMLP) and layer.mlp.has_gate:
            stacks["mlp.gate_up_proj"] = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), layer.mlp.intermediate_size)
        for stack, sizes in stacks.items():
            name = f"model.layers.{index}.{stack}.weight"
            if name in tensors:
                parts = _split_rows(name, tensors.pop(name), list(sizes.values()))
                tensors |= {name.replace(stack, part): tensor for part, tensor in zip(sizes, parts, strict=True)}
    return tensors


def _split_rows(name: str, tensor: StoredWeight, sizes: Sequence[int]) -> list[StoredWeight]:
    """Split a matrix into consecutive row ranges with these numbers of rows."""
    if len(tensor.shape) != 2 or tensor.shape[0] != sum(sizes):
        where = tensor.where if isinstance(tensor, PackedMatrix) else f"{tensor.path}: tensor {name!r}"
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, but config.json requires {sum(sizes)} rows; "
            "one of the two files belongs to another model"
        )
    ends = list(accumulate(sizes))
    if isinstance(tensor, PackedMatrix):
        return [tensor.select_rows(slice(end - rows, end)) for rows, end in zip(sizes, ends, strict=True)]
    row_bytes = (tensor.end - tensor.begin) // tensor.shape[0]
    begin = tensor.begin
    return [
        StoredTensor(tensor.path, tensor.dtype, (rows, tensor.shape[1]), begin + (end - rows) * row_bytes, begin + end * row_bytes)
        for rows, end in zip(sizes, ends, strict=True)
    ]


def _is_stored_minus_one(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is a norm weight that is stored minus 1. Norms after recurrent mixers are stored unchanged."""
    is_plain = name == "final_norm.weight" and FAMILIES[config.family].has_plain_final_norm
    return name.endswith("norm.weight") and not name.endswith("gated_norm.weight") and not is_plain


def add_norm_offset(tensor: AnyTensor) -> Tensor:
    """Return a norm weight plus 1. The result is float32, because the sum may need more bits than the file's type has."""
    return Tensor(np.float32(1.0) + as_float32(tensor), WeightType.F32, tensor.shape)


def half_split_order(num_rows: int, head_size: int, rotary_size: int) -> NDArray[np.int64]:
    """Return the indices that reorder q or k rows from interleaved rotary pairs (GPT-J style) to pairs (j, j + R/2)."""
    heads = np.arange(num_rows).reshape(-1, head_size)
    rotated, unrotated = heads[:, :rotary_size], heads[:, rotary_size:]
    halves = rotated.reshape(len(heads), -1, 2).swapaxes(1, 2).reshape(len(heads), rotary_size)
    return np.concatenate((halves, unrotated), axis=1).reshape(num_rows)


def _reorder_rope_rows(tensors: dict[str, Tensor], packed: dict[str, PackedMatrix], config: ModelConfig) -> None:
    """Reorder the rows of q and k in place, so that rotary pairs are (j, j + R/2)."""
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


def check_shape(name: str, stored: PackedMatrix, shape: tuple[int, ...]) -> PackedMatrix:
    """Return `stored`, after checking its shape.

    Raises:
        CheckpointError: The matrix has another shape.
    """
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.where}: {name} holds a matrix of shape {list(stored.shape)}, but config.json requires {list(shape)}; "
            "one of the two files belongs to another model"
        )
    return stored


def open_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...], files: Mapping[Path, NDArray[np.uint8]]) -> Tensor:
    """Return a view of a stored tensor in its mapped file. Vectors may have further dimensions of size 1.

    Raises:
        CheckpointError: The tensor has another shape, or an unsupported type.
    """
    is_vector = len(shape) == 1 and tuple(size for size in stored.shape if size != 1) == tuple(size for size in shape if size != 1)
    if stored.shape != shape and not is_vector:
        raise CheckpointError(
            f"{stored.path}: tensor {name!r} has shape {list(stored.shape)}, but config.json requires {list(shape)}; "
            "one of the two files belongs to another model"
        )
    if stored.dtype not in _SUPPORTED_DTYPES:
        raise CheckpointError(
            f"{stored.path}: tensor {name!r} is of type {stored.dtype}, supported are {', '.join(_SUPPORTED_DTYPES)}: "
            "use an unquantised checkpoint"
        )
    weight_type, item_type = _SUPPORTED_DTYPES[stored.dtype]
    return Tensor(view_tensor(stored, files[stored.path], item_type).reshape(shape), weight_type, shape)


def take_tensor(stored: StoredModel, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor as `open_tensor` does, and remove it from `stored`.

    Raises:
        CheckpointError: It is missing, or has another shape or an unsupported type.
    """
    return open_tensor(name, stored.take(name), shape, stored.files)


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is not needed: rotary frequencies, lm_head of tied embeddings, k and v of layers that share a cache."""
    if name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight"):
        return True
    unused = re.fullmatch(rf"model\.layers\.(\d{{1,9}})\.self_attn\.({'|'.join(_KV_MODULES)})\.(weight|bias)", name)
    return unused is not None and shares_kv(config, int(unused[1]))


def shares_kv(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer reads the keys and values of another layer, so that its own projections are unused."""
    return layer in config.attention_layers and config.attention_layers[layer].kv_layer is not None


def _is_zero_bias(name: str, stored: StoredWeight, files: Mapping[Path, NDArray[np.uint8]]) -> bool:
    """Return whether a tensor is a bias of zeros. AutoGPTQ adds one to every matrix, also where the network has no bias."""
    return isinstance(stored, StoredTensor) and name.endswith(".bias") and not files[stored.path][stored.begin : stored.end].any()


def _check_tied(embedding: Tensor | PackedMatrix | None, stored: StoredWeight, files: Mapping[Path, NDArray[np.uint8]]) -> None:
    if isinstance(stored, PackedMatrix):
        arrays = embedding.arrays if isinstance(embedding, PackedMatrix) else ()
        is_same = len(arrays) == len(stored.arrays) and all(map(np.array_equal, arrays, stored.arrays))
        where = stored.where
    else:
        where = f"{stored.path}: lm_head.weight"
        is_same = isinstance(embedding, Tensor)
        if isinstance(embedding, Tensor):
            lm_head = open_tensor("lm_head.weight", stored, embedding.shape, files)
            is_same = lm_head.weight_type is embedding.weight_type and np.array_equal(lm_head.array, embedding.array)
    if not is_same:
        raise CheckpointError(
            f"{where} differs from the embedding although tie_word_embeddings is true; set tie_word_embeddings to false in config.json"
        )
