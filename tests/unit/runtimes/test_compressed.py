"""A product with a compressed constant is the product with the matrix's exact values."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.models.grouped import GroupedMatrix, pack_nibbles
from paceline.models.quantize import quantize_matrix

ov = pytest.importorskip("openvino")

from openvino import opset13 as ops  # noqa: E402

from paceline.models.config import WeightType  # noqa: E402
from paceline.models.weights import GroupedTensor, Tensor, Weights  # noqa: E402
from paceline.runtimes.openvino.compressed import compressed, is_compressible  # noqa: E402
from paceline.runtimes.openvino.graph import compile_properties  # noqa: E402
from paceline.runtimes.openvino.weights import GraphWeights  # noqa: E402

ROWS, COLUMNS = 48, 256


def values_of(output: "ov.Output") -> np.ndarray:
    """What the nodes themselves compute, without a product behind them."""
    compiled = ov.Core().compile_model(ov.Model([ops.result(output)], [], "values"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.array(compiled([])[0])


def random_matrix(bits: int, group: int, *, zero_point: int = 0, minimums: np.ndarray | None = None, signed: bool = False) -> GroupedMatrix:
    rng = np.random.default_rng(bits + group + zero_point)
    low, high = (-127, 128) if signed else (0, 2**bits)
    codes = rng.integers(low, high, (ROWS, COLUMNS)).astype(np.int8 if signed else np.uint8)
    scales = rng.integers(1, 2000, (ROWS, COLUMNS // group)).astype(np.float32) / 4096
    return GroupedMatrix(pack_nibbles(codes) if bits == 4 else codes, scales, minimums, bits, zero_point)


def with_zero_points(matrix: GroupedMatrix, highest: int) -> GroupedMatrix:
    points = np.random.default_rng(0).integers(0, highest + 1, matrix.scales.shape).astype(np.float32)
    return replace(matrix, minimums=-points * matrix.scales)


MATRICES = {
    "int8": random_matrix(8, 128, signed=True),
    "int8 in groups of 16": random_matrix(8, 16, signed=True),
    "int4": random_matrix(4, 128, zero_point=8),
    "int4 in groups of 16 around 4": random_matrix(4, 16, zero_point=4),
    "int4 without a zero point": random_matrix(4, 32),
    "uint8 with zero points": with_zero_points(random_matrix(8, 64), 255),
    "int8 with zero points": with_zero_points(random_matrix(8, 64, signed=True), 127),
    "int4 with zero points": with_zero_points(random_matrix(4, 32), 15),
    "int8 made here": quantize_matrix(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32), bits=8, group=128),
    "int4 made here": quantize_matrix(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32), bits=4, group=128),
    "affine int4 made here": quantize_matrix(
        np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32), bits=4, group=128, symmetric=False
    ),
    "affine int8 made here": quantize_matrix(
        np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32), bits=8, group=64, symmetric=False
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_the_nodes_hold_the_exact_values(name: str) -> None:
    kept: list[np.ndarray] = []
    assert is_compressible(MATRICES[name])
    assert np.array_equal(values_of(compressed(MATRICES[name], kept)), MATRICES[name].values())


@pytest.mark.parametrize("name", MATRICES)
def test_a_product_takes_the_codes_and_gives_what_the_values_give(name: str) -> None:
    matrix, kept = MATRICES[name], []
    x = ops.parameter(ov.PartialShape([-1, COLUMNS]), ov.Type.f32)
    model = ov.Model([ops.result(ops.matmul(x, compressed(matrix, kept), False, True))], [x], "product")
    compiled = ov.Core().compile_model(model, "CPU", compile_properties(WeightType.F32, 1))
    for num_rows in (1, 5):
        rows = np.random.default_rng(num_rows).standard_normal((num_rows, COLUMNS)).astype(np.float32)
        exact = rows.astype(np.float64) @ matrix.values().astype(np.float64).T
        assert np.abs(compiled([rows])[0] - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("minimum", [-0.3, 0.25])
def test_minimums_that_are_no_zero_points_are_widened(minimum: float) -> None:
    plain = random_matrix(4, 32)
    matrix = replace(plain, minimums=np.full_like(plain.scales, minimum))
    assert not is_compressible(matrix)
    weights = GraphWeights(Weights({"m": GroupedTensor(matrix)}), WeightType.F32, WeightType.BF16)
    assert np.array_equal(values_of(weights.matrix("m")), matrix.values())
    assert weights.smallest_group == 0


def test_the_smallest_group_is_of_the_matrices_that_went_in_compressed() -> None:
    tensors = {name: GroupedTensor(matrix) for name, matrix in MATRICES.items()}
    array = np.ones((4, 8), np.float32)
    weights = GraphWeights(Weights({**tensors, "plain": Tensor(array, WeightType.F32, array.shape)}), WeightType.F32, WeightType.F32)
    sizes = []
    for name in ("plain", "int8", "affine int8 made here", "int4 in groups of 16 around 4", "int4"):
        weights.matrix(name)
        sizes.append(weights.smallest_group)
    assert sizes == [0, 128, 64, 16, 16]
