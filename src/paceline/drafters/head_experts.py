"""The experts of a head's layer: as many as the target's config says, and those stored in one stack as if they were stored one by one."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles
from paceline.errors import CheckpointError
from paceline.models.layer_builder import NUM_EXPERTS_KEYS
from paceline.models.layers import ExpertMLP
from paceline.models.storage.tensor_file import FileTensor

_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def with_single_experts(files: HeadFiles, prefix: str, mlp: ExpertMLP, hidden_size: int) -> HeadFiles:
    """The same files with the experts below `prefix` one by one, `<prefix>mlp.experts.E.gate_proj.weight`; nothing is read.

    Args:
        prefix: of the names of the head's layer.
        mlp: what the target's config makes of such a layer.

    Raises:
        CheckpointError: there are more or fewer experts than that, or a stack has another shape.
    """
    prefix = f"{prefix}mlp.experts."
    tensors, count = dict(files.tensors), mlp.routing.num_experts
    found = re.compile(re.escape(prefix) + r"([0-9]{1,6})\.")
    numbers = {int(match[1]) for name in tensors if (match := found.match(name))}
    if numbers and len(numbers) != count:
        raise CheckpointError(f"{files.path}: {prefix}* are {len(numbers)} experts, but {_said(files, count)}")
    inner = mlp.expert.intermediate_size
    for stack, parts in _STACKS.items():
        tensor = tensors.pop(prefix + stack, None)
        if tensor is None:
            continue
        rows, columns = (hidden_size, inner) if stack == "down_proj" else (inner, hidden_size)
        expected = (count, len(parts) * rows, columns)
        if tensor.shape != expected:
            raise CheckpointError(
                f"{files.path}: tensor {prefix + stack!r} has shape {list(tensor.shape)}, expected {list(expected)}: {_said(files, count)}"
            )
        for expert in range(count):
            for number, part in enumerate(parts):
                one = partial(_rows_of, tensor, expert, number * rows, rows)
                tensors[f"{prefix}{expert}.{part}.weight"] = FileTensor((rows, columns), tensor.dtype, one)
    return replace(files, tensors=tensors)


def _rows_of(stack: FileTensor, expert: int, first: int, count: int) -> NDArray[Any]:
    rows: NDArray[Any] = stack.open()[expert, first : first + count]
    return rows if rows.flags.c_contiguous else np.ascontiguousarray(rows)


def _said(files: HeadFiles, count: int) -> str:
    key = next((key for key in NUM_EXPERTS_KEYS if files.config.get(key) is not None), None)
    said = "the target has" if key is None else f"config.json says {key} ="
    return f"{said} {count}; one of the two is another model's"
