"""Weights of gpt-oss checkpoints, which stack the experts of a layer in two tensors: in MXFP4, or transposed in bfloat16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import WeightType
from paceline.models.containers.small_floats import read_e2m1
from paceline.models.grouped import RUN
from paceline.models.layers import ExpertMLP
from paceline.models.mxfp4 import half_scales
from paceline.models.storage.packed_weights import lazy_matrix
from paceline.models.storage.safetensors_file import view_tensor
from paceline.models.storage.stored_model import StoredModel
from paceline.models.weights import LazyTensor, Tensor, TensorInfo, take_tensor

_STACKED_MATRICES = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Which rows of an expert in a stack belong to which matrix. Rows of gate and up alternate."""


def lazy_experts(stored: StoredModel, layer: int, mlp: ExpertMLP, hidden_size: int) -> dict[str, LazyTensor]:
    """Return the tensors of single experts of a layer, by internal names, and remove the stacks from `stored`.

    Raises:
        CheckpointError: A stack is missing, or has another shape than config.json gives.
    """
    found: dict[str, LazyTensor] = {}
    count, inner = mlp.routing.num_experts, mlp.expert.intermediate_size
    for stack, parts in _STACKED_MATRICES.items():
        where = f"model.layers.{layer}.mlp.experts.{stack}"
        rows, columns = (hidden_size, inner) if stack == "down_proj" else (2 * inner, hidden_size)
        bias = take_tensor(stored, f"{where}_bias", (count, rows))
        plain = take_tensor(stored, where, (count, columns, rows)) if where in stored.tensors else None
        blocks = exponents = None
        if plain is None:
            blocks = _take_bytes(stored, f"{where}_blocks", (count, rows, columns // RUN, RUN // 2))
            exponents = _take_bytes(stored, f"{where}_scales", (count, rows, columns // RUN))
        for expert in range(count):
            for part, part_rows in parts.items():
                name = f"layers.{layer}.experts.{expert}.{part}"
                found[f"{name}.bias"] = _lazy_view(bias.array[expert, part_rows], bias.weight_type)
                if plain is not None:
                    found[f"{name}.weight"] = _lazy_view(plain.array[expert, :, part_rows].T, plain.weight_type)
                elif blocks is not None and exponents is not None:
                    pairs = blocks[expert, part_rows].reshape(-1, columns // 2)
                    matrix = read_e2m1(where, pairs, exponents[expert, part_rows], half_scales)
                    found[f"{name}.weight"] = lazy_matrix(matrix, bias.weight_type)
    return found


def _take_bytes(stored: StoredModel, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    tensor = stored.take(name)
    if tensor.dtype != "U8" or tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {name!r} is of type {tensor.dtype} and shape {list(tensor.shape)}, but config.json "
            f"makes it U8 of shape {list(shape)}; one of the two files belongs to another model"
        )
    return view_tensor(tensor, stored.files[tensor.path], np.dtype(np.uint8))


def _lazy_view(array: NDArray[Any], weight_type: WeightType) -> LazyTensor:
    info = TensorInfo(array.shape, weight_type, None, array.nbytes)
    return LazyTensor(info, (array,), lambda: Tensor(array, weight_type, array.shape))
