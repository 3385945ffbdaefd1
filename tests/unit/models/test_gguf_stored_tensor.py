"""Tensors in another order than a GGUF file stores them: rows and columns of every block type."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.gguf_checkpoints import dequantize, random_blocks
from paceline.models.config import WeightType
from paceline.models.gguf.blocks import QUANTIZED_BLOCK_TYPES
from paceline.models.gguf.header import BLOCK_TYPES, GgufTensor
from paceline.models.gguf.stored_tensor import TensorSource, order_digest_bytes, read_tensor, tensor_info
from paceline.models.weights import GroupedTensor, Tensor, as_float32

gguf = pytest.importorskip("gguf")
ROWS, COLUMNS = 12, 512


def tensor_of(block_type: str, raw: NDArray[np.uint8]) -> GgufTensor:
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == block_type)
    return GgufTensor(Path("model.gguf"), "blk.0.ssm_out.weight", kind, (ROWS, COLUMNS), raw.reshape(-1))


def tiled(size: int) -> NDArray[np.int64]:
    """Column indices of heads of `size` whose pairs are interleaved."""
    return np.arange(COLUMNS).reshape(-1, 2, size).swapaxes(0, 1).reshape(-1)


@pytest.mark.parametrize("block_type", QUANTIZED_BLOCK_TYPES)
@pytest.mark.parametrize("size", [16, 32, 128])
def test_gguf_columns_are_reordered_as_whole_groups_or_as_floats(block_type: str, size: int, seed: int) -> None:
    raw = random_blocks(np.random.default_rng(seed), block_type, ROWS, COLUMNS, scale=0.01)
    expected = dequantize(raw, block_type)[:, tiled(size)]
    source = TensorSource(tensor_of(block_type, raw), (ROWS, COLUMNS), column_order=partial(tiled, size))
    made = read_tensor("layers.0.o_proj.weight", source, regroup=False, num_threads=1)
    assert np.array_equal(as_float32(made), expected)
    assert isinstance(made, GroupedTensor) is (size % 32 == 0)
    facts = tensor_info(source, regroup=False)
    assert (facts.weight_type, facts.nbytes) == (WeightType.F32, made.nbytes)
    assert order_digest_bytes(source).tobytes() != order_digest_bytes(TensorSource(source.tensor, source.shape)).tobytes()


@pytest.mark.parametrize("block_type", ["F32", "BF16", "Q4_K"])
def test_gguf_rows_can_be_selected_and_reordered(block_type: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[block_type]
    is_grouped = block_type == "Q4_K"
    raw = (
        random_blocks(random, block_type, ROWS, COLUMNS, scale=0.01)
        if is_grouped
        else gguf.quants.quantize(random.normal(size=(ROWS, COLUMNS)).astype(np.float32), kind).view(np.uint8)
    )
    rows = np.array([7, 0, 11, 3])
    source = TensorSource(tensor_of(block_type, raw), (4, COLUMNS), row_order=lambda: rows)
    made = read_tensor("layers.0.q_proj.weight", source, regroup=False, num_threads=2)
    assert isinstance(made, GroupedTensor if is_grouped else Tensor)
    assert np.array_equal(as_float32(made), gguf.quants.dequantize(raw, kind)[rows])
    assert tensor_info(source, regroup=False).nbytes == made.nbytes
