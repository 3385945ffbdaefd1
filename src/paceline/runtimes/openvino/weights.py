"""Weights as graph constants that share memory with the checkpoint's mapped file.

The plugin packs every matrix into its own layout at the first pass and reads the source until then, so the buffers must outlive
that pass; `op.constant(ov.Tensor(...))` shares memory without keeping a reference, which is why they are held here.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from paceline.models.config import WeightType
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, Weights, as_float32
from paceline.runtimes.openvino.compressed import compressed, is_compressible
from paceline.runtimes.rounding import rounded, to_bf16

OV_TYPE = {WeightType.F32: ov.Type.f32, WeightType.BF16: ov.Type.bf16}
_SCRATCH = Path("/var/tmp")
NUMPY_TYPE: dict[WeightType, Any] = {WeightType.F32: np.float32, WeightType.BF16: np.uint16}


def shared_tensor(array: np.ndarray, weight_type: WeightType) -> ov.Tensor:
    """An OpenVINO tensor over `array`'s memory; bf16 arrives as uint16 bits. The caller keeps `array` alive."""
    if weight_type is WeightType.BF16:
        return ov.Tensor(array.view(np.int16), ov.Shape(list(array.shape)), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def on_disk(array: np.ndarray) -> np.ndarray:
    """A copy of `array` in an unnamed temporary file, mapped: until it is packed the system may write it out instead of running full.

    Where the disk has no room the array stays as it is.
    """
    directory = _SCRATCH if _SCRATCH.is_dir() else None  # unlike /tmp it is rarely kept in memory
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            array.tofile(file)
            return np.memmap(file, array.dtype, mode="c", shape=array.shape)
    except OSError:
        return array


class GraphWeights:
    """Constants of one graph in `weight_type`, with values rounded to `round_to`; views of the file where nothing changes."""

    def __init__(self, weights: Weights, weight_type: WeightType, round_to: WeightType) -> None:
        self._weights = weights
        self._round_to = round_to
        self.weight_type = weight_type
        self.smallest_group = 0  # columns, of the matrices that went in compressed so far; 0 = none did
        self._matrices: list[np.ndarray] = []
        self.vectors: list[np.ndarray] = []  # read in place at every pass: keep them as long as the graph

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def vector(self, name: str, *, exact: bool = False) -> ov.Output:
        """A norm weight or bias as float32, [width]; `exact` = not rounded."""
        values = as_float32(self._weights[name])
        self.vectors.append(np.ascontiguousarray(values if exact else rounded(values, self._round_to)))
        return ops.constant(shared_tensor(self.vectors[-1], WeightType.F32)).output(0)

    def matrix(self, name: str) -> ov.Output:
        """A weight matrix in `weight_type`, [outputs, inputs]; a view of the file where nothing is converted.

        One in groups becomes float32 computed from compressed constants, if the plugin can take its groups so.
        """
        tensor = self._weights[name]
        if isinstance(tensor, GroupedTensor) and is_compressible(tensor.matrix):
            self.smallest_group = min(self.smallest_group or tensor.matrix.group, tensor.matrix.group)
            return compressed(tensor.matrix, self._matrices)
        self._matrices.append(self._converted(tensor))
        return ops.constant(shared_tensor(self._matrices[-1], self.weight_type)).output(0)

    def drop_matrices(self) -> None:
        """Forget the source of every matrix; call after the first pass."""
        self._matrices.clear()

    def _converted(self, tensor: AnyTensor) -> np.ndarray:
        if isinstance(tensor, Tensor) and tensor.weight_type is self.weight_type and self._round_to in (tensor.weight_type, WeightType.F32):
            return tensor.array
        values = as_float32(tensor)  # those of groups are nobody's to round
        if isinstance(tensor, Tensor):
            values = rounded(values, self._round_to)
        return on_disk(to_bf16(values) if self.weight_type is WeightType.BF16 else values)
