"""Queries and gates of a head's layer, which checkpoints hold in one matrix, as if each were stored by itself."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles
from paceline.errors import CheckpointError
from paceline.models.layers import AttentionConfig
from paceline.models.tensor_file import FileTensor

GATE = "self_attn.attention_gate"
"""What the gates are called then, behind the layer's prefix."""


def with_gates(files: HeadFiles, prefix: str, attention: AttentionConfig, hidden_size: int) -> HeadFiles:
    """The same files with each head's queries, the first half of its rows, in one matrix and its gates in another; nothing is read.

    Args:
        prefix: of the names of the head's layer.

    Raises:
        CheckpointError: the stored matrix, or its bias, has another shape.
    """
    tensors = dict(files.tensors)
    shapes: dict[str, tuple[int, ...]] = {"weight": (2 * attention.query_size, hidden_size), "bias": (2 * attention.query_size,)}
    for kind, shape in shapes.items():
        name = f"{prefix}self_attn.q_proj.{kind}"
        whole = tensors.get(name)
        if whole is None:
            continue
        if whole.shape != shape:
            raise CheckpointError(
                f"{files.path}: tensor {name!r} has shape {list(whole.shape)}, expected {list(shape)}: queries and gates of "
                f"{attention.num_heads} heads, as the target's layers have them; is it another model's?"
            )
        part_shape = (attention.query_size, *shape[1:])
        for half, part in enumerate(("self_attn.q_proj", GATE)):
            rows = partial(_half_of, whole, half, attention.head_size)
            tensors[f"{prefix}{part}.{kind}"] = FileTensor(part_shape, whole.dtype, rows)
    return replace(files, tensors=tensors)


def _half_of(whole: FileTensor, half: int, head_size: int) -> NDArray[Any]:
    """The first or the second half of each head's rows."""
    array = whole.open()
    heads = array.reshape(-1, 2, head_size, *array.shape[1:])
    return np.ascontiguousarray(heads[:, half]).reshape(-1, *array.shape[1:])
