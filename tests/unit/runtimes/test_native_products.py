"""Native matrix products: right for every way weights are stored, and the same bits whatever else is in the pass."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from harness.native_network import BUILT, Network, plain_tensor
from paceline.models.config import WeightType
from paceline.models.grouped import GroupedMatrix, pack_nibbles
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, Weights, as_float32, to_bf16
from paceline.runtimes.base import FloatArray
from paceline.runtimes.embedding import round_to_type
from paceline.runtimes.native.records import PANEL_KINDS, MatrixKind, Packing
from paceline.runtimes.native.weights import NativeWeights

Random = np.random.Generator
Make = Callable[[Random, int, int, int], AnyTensor]
MAX_ROWS = 20
PLAIN_WIDTHS = [1, 7, 16, 50, 64, 145]
EPSILON = float(np.finfo(np.float32).eps) / 2


def plain(weight_type: WeightType) -> Make:
    def make(random: Random, outputs: int, columns: int, group: int) -> Tensor:
        values = random.normal(size=(outputs, columns)).astype(np.float32)
        stored: dict[WeightType, Any] = {
            WeightType.F32: values, WeightType.F16: values.astype(np.float16), WeightType.BF16: to_bf16(values)
        }  # fmt: skip
        return Tensor(stored[weight_type], weight_type, values.shape)

    return make


def grouped(bits: int, zero_point: int, *, signed: bool = False, minimums: bool = False) -> Make:
    def make(random: Random, outputs: int, columns: int, group: int) -> GroupedTensor:
        shape = (outputs, columns // group)
        scales = random.uniform(-0.1, 0.1, shape).astype(np.float32)
        offsets = random.normal(size=shape).astype(np.float32) if minimums else None
        if bits == 4:
            codes = pack_nibbles(random.integers(0, 16, (outputs, columns), dtype=np.uint8))
        else:
            kind = np.int8 if signed else np.uint8
            codes = random.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, (outputs, columns), dtype=kind)
        return GroupedTensor(GroupedMatrix(codes, scales, offsets, bits, zero_point))

    return make


PLAIN: Mapping[str, Make] = {"f32": plain(WeightType.F32), "f16": plain(WeightType.F16), "bf16": plain(WeightType.BF16)}
BYTES: Mapping[str, Make] = {
    "s8": grouped(8, 0, signed=True),
    "s8-zero-point": grouped(8, -16, signed=True),
    "u8": grouped(8, 128),
    "s8-minimum": grouped(8, 0, signed=True, minimums=True),
    "u8-minimum": grouped(8, 3, minimums=True),
}
NIBBLES: Mapping[str, Make] = {"u4": grouped(4, 8), "u4-minimum": grouped(4, 0, minimums=True)}
CASES: list[tuple[str, Make, int, int]] = [
    *((name, make, width, 0) for (name, make), width in product(PLAIN.items(), PLAIN_WIDTHS)),
    *((name, make, *size) for (name, make), size in product(BYTES.items(), [(48, 16), (96, 32), (192, 64), (256, 128), (80, 80)])),
    *((name, make, *size) for (name, make), size in product(NIBBLES.items(), [(96, 16), (96, 32), (192, 64), (256, 128), (96, 96)])),
]
BY_CASE = pytest.mark.parametrize(("make", "columns", "group"), [case[1:] for case in CASES], ids=[f"{c[0]}-{c[2]}-{c[3]}" for c in CASES])
BY_LEVEL = pytest.mark.parametrize("level", BUILT)


ROUND_TO = pytest.mark.parametrize("compute_type", [WeightType.F32, WeightType.BF16], ids=["computed-in-f32", "computed-in-bf16"])


def network(
    tensors: Mapping[str, AnyTensor], *, num_threads: int = 1, level: str | None = None, compute_type: WeightType = WeightType.F32
) -> Network:
    """All matrices of `tensors` as one product."""
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    columns = tensors[f"{names[0]}.weight"].shape[1]
    return Network(
        [columns],
        lambda blocks, inputs: blocks.linear(inputs[0], *names),
        tensors=tensors,
        num_threads=num_threads,
        level=level,
        compute_type=compute_type,
    )


def check(found: FloatArray, x: FloatArray, weight: AnyTensor, bias: FloatArray | None) -> None:
    """`found` is what a float32 sum in 16 lanes can be at worst."""
    values = as_float32(weight).astype(np.float64)
    wide = x.astype(np.float64)
    offset = np.zeros(len(values)) if bias is None else bias.astype(np.float64)
    roundings = x.shape[1] // 16 + 7
    worst = EPSILON * roundings * (np.abs(wide) @ np.abs(values).T + np.abs(offset))
    assert (np.abs(found - (wide @ values.T + offset)) <= worst).all()


def as_computed(run: Network, x: FloatArray) -> FloatArray:
    """The rows as the product takes them."""
    return x if run.packings == [Packing.FLOATS] else round_to_type(x, WeightType.BF16)


def as_stored(weight: AnyTensor, compute_type: WeightType) -> AnyTensor:
    """The weights as they are computed with: plain ones in the type of computation, codes as they are."""
    if isinstance(weight, GroupedTensor) or compute_type is WeightType.F32:
        return weight
    return plain_tensor(round_to_type(as_float32(weight), compute_type))


@pytest.mark.spread(0.5)
@BY_LEVEL
@ROUND_TO
@BY_CASE
def test_native_product_is_right_and_independent_of_other_rows(
    make: Make, columns: int, group: int, level: str, seed: int, compute_type: WeightType
) -> None:
    """One to twenty rows, a sum of tiles of every size; a number of outputs that no tile divides, with and without a bias."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(MAX_ROWS, columns)).astype(np.float32)
    weight, plainer = make(random, 53, columns, group), make(random, 7, columns, group)
    bias = random.normal(size=53).astype(np.float32)
    run = network({"a.weight": weight, "a.bias": plain_tensor(bias), "b.weight": plainer}, level=level, compute_type=compute_type)
    all_rows = run(x)
    taken = as_computed(run, x)
    check(all_rows[0], taken, as_stored(weight, compute_type), round_to_type(bias, compute_type))
    check(all_rows[1], taken, as_stored(plainer, compute_type), None)
    for count in range(1, MAX_ROWS):
        first = int(random.integers(0, MAX_ROWS - count + 1))
        for found, expected in zip(run(x[first : first + count]), all_rows, strict=True):
            assert np.array_equal(found, expected[first : first + count]), count


@ROUND_TO
@pytest.mark.parametrize("name", ["f16", "s8", "u4-minimum"])
@pytest.mark.parametrize("num_rows", [1, 2, 13])
def test_native_product_bits_are_independent_of_threads(name: str, num_rows: int, seed: int, compute_type: WeightType) -> None:
    """Three matrices of one product, whose outputs are shared out piece by piece."""
    random = np.random.default_rng(seed)
    make = {**PLAIN, **BYTES, **NIBBLES}[name]
    tensors = {f"{part}.weight": make(random, outputs, 128, 32) for part, outputs in {"q": 200, "k": 49, "v": 48}.items()}
    x = random.normal(size=(num_rows, 128)).astype(np.float32)
    alone, *others = ([network(tensors, num_threads=count, compute_type=compute_type)(x) for _ in range(5)] for count in (1, 2, 3))
    for results in (run for runs in others for run in runs):
        assert all(np.array_equal(found, expected) for found, expected in zip(results, alone[0], strict=True))


@BY_LEVEL
@pytest.mark.parametrize(("name", "outputs"), [("f32", 53), ("bf16", 53), ("bf16", 523)])
def test_native_product_of_long_rows_is_bit_equal_alone_and_together(name: str, outputs: int, level: str, seed: int) -> None:
    """Blocks of columns are computed, and pieces of them packed by several threads; the last ones are shorter. A row alone reads matrices
    of 2 MB and more output by output."""
    random, columns = np.random.default_rng(seed), 2100
    weight, x = PLAIN[name](random, outputs, columns, 0), random.normal(size=(9, columns)).astype(np.float32)
    run = network({"a.weight": weight}, level=level, num_threads=3, compute_type=WeightType.BF16)
    alone = np.concatenate([run(x[row : row + 1])[0] for row in range(len(x))])
    check(alone, as_computed(run, x), as_stored(weight, WeightType.BF16), None)
    for count in (2, 3, 4, 6, 7, 9):
        assert np.array_equal(run(x[:count])[0], alone[:count]), count


@pytest.mark.parametrize(
    ("names", "packing"),
    [
        (["bf16"], Packing.BF16),
        (["f32", "f16"], Packing.BF16),  # stored as bfloat16 then
        (["u4", "s8"], Packing.FLOATS),
    ],
)
def test_native_product_inputs_are_rounded_as_each_matrix_requires(names: list[str], packing: Packing, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = {f"{name}.weight": {**PLAIN, **BYTES, **NIBBLES}[name](random, 20, 96, 32) for name in names}
    x = random.normal(size=(3, 96)).astype(np.float32)
    assert network(tensors).packings == [Packing.FLOATS]
    run = network(tensors, compute_type=WeightType.BF16)
    assert run.packings == [packing]
    for found, tensor in zip(run(x), tensors.values(), strict=True):
        check(found, as_computed(run, x), as_stored(tensor, WeightType.BF16), None)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_native_product_of_a_nan_row_is_nan(num_rows: int) -> None:
    """Rounding to bfloat16 must not turn a NaN into an infinity, nor the largest numbers into a NaN."""
    x = np.ones((num_rows, 32), np.float32)
    x[0, 3] = np.array([0x7F800001], np.uint32).view(np.float32)[0]
    weight = plain(WeightType.BF16)(np.random.default_rng(0), 9, 32, 0)
    (found,) = network({"a.weight": weight}, compute_type=WeightType.BF16)(x)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_native_product_mixes_matrices_of_all_kinds(num_threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = {f"{name}.weight": make(random, 60, 96, 32) for name, make in {**PLAIN, **BYTES, **NIBBLES}.items()}
    x = random.normal(size=(9, 96)).astype(np.float32)
    results = network(tensors, num_threads=num_threads)(x)
    for found, tensor in zip(results, tensors.values(), strict=True):
        check(found, x, tensor, None)


@pytest.mark.skipif(len(BUILT) < 2, reason="this machine has one instruction set we build for")
@ROUND_TO
@BY_CASE
def test_native_product_bits_are_equal_on_every_instruction_set(
    make: Make, columns: int, group: int, seed: int, compute_type: WeightType
) -> None:
    random = np.random.default_rng(seed)
    x = random.normal(size=(5, columns)).astype(np.float32)
    tensors = {"a.weight": make(random, 19, columns, group)}
    best, *others = (network(tensors, level=level, compute_type=compute_type)(x)[0] for level in BUILT)
    assert all(np.array_equal(best, other) for other in others)


def test_every_matrix_kind_of_the_kernels_is_tested(seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = {f"{name}.weight": make(random, 2, 64, 32) for name, make in {**PLAIN, **BYTES, **NIBBLES}.items()}
    weights = NativeWeights(Weights(tensors), WeightType.F32)
    assert {weights.matrix_record(name.removesuffix(".weight"), 0).kind for name in tensors} == set(MatrixKind) - PANEL_KINDS


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "s8", "s8-minimum", "u4-minimum"])
def test_native_product_reads_strided_arrays(name: str, seed: int) -> None:
    """Rows of a wider array, every other row, and columns that do not lie side by side."""
    random = np.random.default_rng(seed)
    make = {**PLAIN, **BYTES, **NIBBLES}[name]
    whole = make(random, 24, 128, 32)
    x = random.normal(size=(3, 128)).astype(np.float32)
    if isinstance(whole, GroupedTensor):
        matrix = whole.matrix
        offsets = None if matrix.minimums is None else matrix.minimums[::2]
        views: list[AnyTensor] = [
            GroupedTensor(GroupedMatrix(matrix.codes[::2], matrix.scales[::2], offsets, matrix.bits, matrix.zero_point))
        ]
    else:
        arrays = (whole.array[::2], np.asfortranarray(whole.array), np.concatenate([whole.array, whole.array], axis=1)[:, 128:])
        views = [Tensor(array, whole.weight_type, array.shape) for array in arrays]
    for view in views:
        check(network({"a.weight": view})(x)[0], x, view, None)


@pytest.mark.parametrize("wanted", [WeightType.F16, WeightType.BF16])
def test_native_weights_are_rounded_to_the_requested_type(wanted: WeightType, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(8, 32)).astype(np.float32)
    weights = NativeWeights(Weights({"a.weight": plain_tensor(values)}), wanted)
    assert weights.matrix_record("a", 0).row_bytes == 64
    assert weights.matrix_record("a", 0).kind == {WeightType.F16: 1, WeightType.BF16: 2}[wanted]


@BY_LEVEL
def test_native_product_keeps_float16_infinities_and_subnormals(level: str) -> None:
    stored = np.array([[6e-8, 65504.0, -6.1e-5, np.inf]], np.float16)
    x = np.eye(3, 4, dtype=np.float32)
    found = network({"a.weight": Tensor(stored, WeightType.F16, stored.shape)}, level=level)(x[:, :4])[0]
    assert np.isnan(found).all()  # 0 * inf
    finite = Tensor(stored[:, :3].copy(), WeightType.F16, (1, 3))
    assert np.array_equal(network({"a.weight": finite}, level=level)(x[:, :3])[0][:, 0], stored[0, :3].astype(np.float32))


@BY_LEVEL
@pytest.mark.parametrize(("make", "columns"), [(PLAIN["f32"], 40), (PLAIN["bf16"], 96), (BYTES["s8"], 96), (NIBBLES["u4"], 96)])
def test_head_products_equal_products_of_each_head(make: Make, columns: int, level: str, seed: int) -> None:
    """Of as many rows as there are: each head by its own matrix, then its tail; the same bits as of a row alone."""
    random, heads, outputs, tail, rounding = np.random.default_rng(seed), 3, 112, 5, make is PLAIN["bf16"]
    tensors = {f"up.{head}.weight": make(random, outputs, columns, 32) for head in range(heads)}
    run = Network(
        [heads * columns, heads * tail],
        lambda blocks, inputs: [blocks.head_products(inputs[0], "up", heads, inputs[1]), blocks.head_products(inputs[0], "up", heads)],
        tensors=tensors, num_threads=2, level=level, compute_type=WeightType.BF16 if rounding else WeightType.F32,
        packed=make in (BYTES["s8"], NIBBLES["u4"]),
    )  # fmt: skip
    x, tails = (random.normal(size=(19, heads * size)).astype(np.float32) for size in (columns, tail))
    with_tails, products = run(x, tails)
    split = with_tails.reshape(19, heads, outputs + tail)
    assert np.array_equal(split[..., outputs:].reshape(19, -1), tails)
    assert np.array_equal(split[..., :outputs].reshape(19, -1), products)
    by_head = products.reshape(19, heads, outputs)
    for head in range(heads):
        expected = x.reshape(19, heads, columns)[:, head].astype(np.float64) @ as_float32(tensors[f"up.{head}.weight"]).T
        assert np.abs(by_head[:, head] - expected).max() <= (1e-5 if make is PLAIN["f32"] else 0.03) * np.abs(expected).max()
    for begin, count in ((0, 1), (3, 2), (5, 8), (13, 6)):
        assert np.array_equal(run(x[begin : begin + count], tails[begin : begin + count])[0], with_tails[begin : begin + count])
