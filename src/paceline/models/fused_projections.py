"""Projections that a checkpoint stores in one matrix, as if they were stored one by one: the same bytes of the file."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig
from paceline.models.containers.module import Stored
from paceline.models.layers import DenseMLP
from paceline.models.packed import PackedMatrix
from paceline.models.safetensors_file import StoredTensor


def unfused(stored: Mapping[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """The projections of stacked matrices as row ranges of them: the same bytes of the file."""
    tensors = dict(stored)
    for index, layer in enumerate(config.layers):
        query_size, kv_size = layer.attention.query_size, layer.attention.kv_size
        stacks = {"self_attn.qkv_proj": {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}}
        if isinstance(layer.mlp, DenseMLP):
            stacks["mlp.gate_up_proj"] = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), layer.mlp.intermediate_size)
        for stack, sizes in stacks.items():
            name = f"model.layers.{index}.{stack}.weight"
            if name in tensors:
                parts = _row_ranges(name, tensors.pop(name), list(sizes.values()))
                tensors |= {name.replace(stack, part): tensor for part, tensor in zip(sizes, parts, strict=True)}
    return tensors


def _row_ranges(name: str, tensor: Stored, sizes: Sequence[int]) -> list[Stored]:
    """A matrix cut into matrices of so many rows."""
    if len(tensor.shape) != 2 or tensor.shape[0] != sum(sizes):
        where = tensor.where if isinstance(tensor, PackedMatrix) else f"{tensor.path}: tensor {name!r}"
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, but config.json makes it {sum(sizes)} rows; one of the two files is another model's"
        )
    ends = list(accumulate(sizes))
    if isinstance(tensor, PackedMatrix):
        return [tensor.rows(slice(end - rows, end)) for rows, end in zip(sizes, ends, strict=True)]
    row_bytes = (tensor.end - tensor.begin) // tensor.shape[0]
    begin = tensor.begin
    return [
        StoredTensor(tensor.path, tensor.dtype, (rows, tensor.shape[1]), begin + (end - rows) * row_bytes, begin + end * row_bytes)
        for rows, end in zip(sizes, ends, strict=True)
    ]
