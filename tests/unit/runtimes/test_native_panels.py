"""Products of rows rounded to bytes with weights in panels: what numpy computes from the definition, the same bits everywhere."""

from collections.abc import Iterator, Mapping
from ctypes import c_int
from itertools import product

import numpy as np
import pytest

from harness.native_network import BUILT, Network, count_claimed_pieces, plain_tensor
from paceline.models.config import WeightType
from paceline.models.grouped import GroupedMatrix, pack_nibbles, unpack_nibbles
from paceline.models.weights import AnyTensor, GroupedTensor, Weights
from paceline.runtimes.base import FloatArray
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.packed_weights import pack_weights
from paceline.runtimes.native.records import MatrixKind, Packing
from paceline.runtimes.native.weights import NativeWeights

MAX_ROWS = 20
EPSILON = float(np.finfo(np.float32).eps)
# bits, code type, zero point, whether there are minimums
FORMS = {
    "s8": (8, np.int8, 0, False),
    "s8-zero-point": (8, np.int8, -16, False),
    "u8": (8, np.uint8, 128, False),
    "s8-minimum": (8, np.int8, 0, True),
    "u8-minimum": (8, np.uint8, 3, True),
    "u4": (4, np.uint8, 8, False),
    "u4-minimum": (4, np.uint8, 0, True),
    "u4-halves": (4, np.uint8, 8, False),
    "u4-table": (4, np.uint8, 0, False),
    "u4-table-halves": (4, np.uint8, 0, False),
}
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
SIZES = [(96, 16), (96, 32), (192, 64), (576, 96), (256, 128), (512, 256)]
CASES = [pytest.param(form, *size, id=f"{form}-{size[1]}") for form, size in product(FORMS, SIZES)]
BY_CASE = pytest.mark.parametrize(("form", "columns", "group"), CASES)
BY_LEVEL = pytest.mark.parametrize("level", BUILT)


def grouped(random: np.random.Generator, form: str, outputs: int, columns: int, group: int) -> GroupedTensor:
    bits, kind, zero_point, has_minimums = FORMS[form]
    shape = (outputs, columns // group)
    scales = random.uniform(-0.1, 0.1, shape).astype(np.float32)
    if form.endswith("halves"):  # of an even number of groups they are kept as such
        scales = scales.astype(np.float16).astype(np.float32)
    minimums = random.normal(size=shape).astype(np.float32) if has_minimums else None
    low, high = (0, 16) if bits == 4 else (np.iinfo(kind).min, np.iinfo(kind).max + 1)
    codes = random.integers(low, high, (outputs, columns), dtype=kind)
    codes[0], codes[1] = low, high - 1  # sums as large as they can be
    return GroupedTensor(
        GroupedMatrix(pack_nibbles(codes) if bits == 4 else codes, scales, minimums, bits, zero_point, TABLE if "table" in form else None)
    )


def rows_of(random: np.random.Generator, num_rows: int, columns: int) -> FloatArray:
    """Rows whose columns differ in size by orders of magnitude, with zeros among them and one that is all of one sign."""
    rows = random.normal(size=(num_rows, columns)) * np.exp(random.normal(size=(num_rows, columns)))
    rows[:, ::7] = 0.0
    rows[0] = np.abs(rows[0]).max()
    return rows.astype(np.float32)


def network(tensors: Mapping[str, AnyTensor], *, num_threads: int = 1, level: str | None = None) -> Network:
    """All matrices of `tensors` as one product, rows rounded to bytes."""
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    columns = tensors[f"{names[0]}.weight"].shape[1]
    return Network(
        [columns], lambda blocks, inputs: blocks.linear(inputs[0], *names),
        tensors=tensors, num_threads=num_threads, level=level, packed=True,
    )  # fmt: skip


def as_codes(rows: FloatArray, group: int) -> tuple[np.ndarray, FloatArray]:
    """Codes [T, G, group] of the rows and the scale of each group [T, G]: the largest magnitude is 127."""
    parts = rows.reshape(len(rows), -1, group)
    largest = np.abs(parts).max(axis=2)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > np.float32(1e-30), np.float32(127.0) / largest, np.float32(0.0))
    return np.rint(parts * inverse[..., None]).astype(np.int64), largest / np.float32(127.0)


def expected(rows: FloatArray, weight: GroupedTensor) -> tuple[np.ndarray, np.ndarray]:
    """The product from its definition, in float64 after the integer sums, and how far float32 may be from it."""
    matrix = weight.matrix
    codes, scales = as_codes(rows, matrix.group_size)
    stored = unpack_nibbles(matrix.codes.view(np.uint8)) if matrix.bits == 4 else matrix.codes
    values = stored.astype(np.int64) - matrix.zero_point if matrix.code_values is None else matrix.code_values[stored].astype(np.int64)
    shifted = values.reshape(len(stored), -1, matrix.group_size)
    parts = np.einsum("tgi,ngi->tng", codes, shifted) * scales.astype(np.float64)[:, None, :] * matrix.scales.astype(np.float64)[None]
    if matrix.minimums is not None:
        parts = np.concatenate([parts, (codes.sum(axis=2) * scales)[:, None, :] * matrix.minimums.astype(np.float64)[None]], axis=2)
    return parts.sum(axis=2), EPSILON * (parts.shape[2] + 3) * np.abs(parts).sum(axis=2)


@pytest.mark.spread(0.5)
@BY_LEVEL
@BY_CASE
def test_panel_product_is_right_and_independent_of_other_rows(form: str, columns: int, group: int, level: str, seed: int) -> None:
    """One to twenty rows; numbers of outputs that are no whole panels, with and without a bias."""
    random = np.random.default_rng(seed)
    rows = rows_of(random, MAX_ROWS, columns)
    weight, plainer = grouped(random, form, 53, columns, group), grouped(random, form, 7, columns, group)
    bias = random.normal(size=53).astype(np.float32)
    run = network({"a.weight": weight, "a.bias": plain_tensor(bias), "b.weight": plainer}, level=level)
    assert run.packings == [Packing.BYTES]
    all_rows = run(rows)
    for found, one, offset in ((all_rows[0], weight, bias), (all_rows[1], plainer, np.float32(0.0))):
        wanted, worst = expected(rows, one)
        assert (np.abs(found - (wanted + offset)) <= worst + EPSILON * np.abs(wanted + offset)).all()
    for count in range(1, MAX_ROWS):
        first = int(random.integers(0, MAX_ROWS - count + 1))
        for found, whole in zip(run(rows[first : first + count]), all_rows, strict=True):
            assert np.array_equal(found, whole[first : first + count]), count


@pytest.mark.skipif(len(BUILT) < 2, reason="this machine has one instruction set we build for")
@BY_CASE
def test_panel_product_bits_are_equal_on_every_instruction_set(form: str, columns: int, group: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = rows_of(random, 9, columns)
    tensors = {"a.weight": grouped(random, form, 35, columns, group)}
    best, *others = (network(tensors, level=level)(rows)[0] for level in BUILT)
    assert all(np.array_equal(best, other) for other in others)


@pytest.mark.parametrize("num_rows", [1, 2, 13])
def test_panel_product_bits_are_independent_of_threads(num_rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = {f"{part}.weight": grouped(random, "u4", outputs, 128, 32) for part, outputs in {"q": 200, "k": 49, "v": 48}.items()}
    rows = rows_of(random, num_rows, 128)
    alone, *others = ([network(tensors, num_threads=count)(rows) for _ in range(5)] for count in (1, 2, 3))
    for results in (run for runs in others for run in runs):
        assert all(np.array_equal(found, wanted) for found, wanted in zip(results, alone[0], strict=True))


def test_panels_of_all_formats_multiply_the_same_input_rows(seed: int) -> None:
    """Formats with other groups or zero points need the rows packed in another way."""
    random = np.random.default_rng(seed)
    tensors: dict[str, AnyTensor] = {f"{form}.weight": grouped(random, form, 40, 96, 32) for form in FORMS}
    tensors["wider.weight"] = grouped(random, "s8", 40, 96, 96)
    tensors["plain.weight"] = plain_tensor(random.normal(size=(40, 96)).astype(np.float32))
    rows = rows_of(random, 9, 96)
    run = network(tensors)
    assert sorted(run.packings) == [Packing.FLOATS] + [Packing.BYTES] * 7
    for found, tensor in zip(run(rows), tensors.values(), strict=True):
        if isinstance(tensor, GroupedTensor):
            wanted, worst = expected(rows, tensor)
            assert (np.abs(found - wanted) <= worst + EPSILON * np.abs(wanted)).all()


@BY_LEVEL
@pytest.mark.parametrize(("form", "zero_point"), [("u4", 8), ("u4-table", 127)])
def test_four_and_eight_bit_panels_multiply_the_same_input_rows(form: str, zero_point: int, level: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    narrow = grouped(random, form, 40, 96, 32)
    codes = random.integers(0, 256, (40, 96), dtype=np.uint8)
    wide = GroupedTensor(GroupedMatrix(codes, narrow.matrix.scales, None, 8, zero_point))
    rows = rows_of(random, 9, 96)
    for found, tensor in zip(network({"a.weight": narrow, "b.weight": wide}, level=level)(rows), (narrow, wide), strict=True):
        wanted, worst = expected(rows, tensor)
        assert (np.abs(found - wanted) <= worst + EPSILON * np.abs(wanted)).all()


@BY_LEVEL
def test_table_format_product_of_extreme_codes_and_rows_is_exact(level: str) -> None:
    codes = np.array([[0], [15], [0], [15]], np.uint8) * np.ones((4, 512), np.uint8)
    codes[2, ::2] = 15
    codes[3, 256:] = 0
    table = np.linspace(-128, 127, 16).round().astype(np.int8)
    weight = GroupedTensor(GroupedMatrix(pack_nibbles(codes), np.ones((4, 2), np.float32), None, 4, 0, table))
    rows = np.ones((9, 512), np.float32) * 127.0
    rows[1::2] *= -1.0
    rows[4:6, 1::2] *= -1.0
    wanted = rows.astype(np.int64) @ table[codes].T.astype(np.int64)
    for count in (9, 8, 4, 2, 1):
        assert np.array_equal(network({"a.weight": weight}, level=level)(rows[9 - count :])[0], wanted[9 - count :]), count


@BY_LEVEL
@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("form", ["u4", "s8"])
def test_panel_product_of_long_rows_is_bit_equal_alone_and_together(form: str, group: int, level: str, seed: int) -> None:
    random, columns = np.random.default_rng(seed), 2112
    rows, run = rows_of(random, 9, columns), network({"a.weight": grouped(random, form, 40, columns, group)}, level=level, num_threads=3)
    alone = np.concatenate([run(rows[row : row + 1])[0] for row in range(len(rows))])
    for count in (2, 5, 9):
        assert np.array_equal(run(rows[:count])[0], alone[:count]), count


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_panel_product_of_a_non_finite_row_is_nan(num_rows: int, bad: float) -> None:
    rows = np.ones((num_rows, 64), np.float32)
    rows[0, 35] = bad
    (found,) = network({"a.weight": grouped(np.random.default_rng(0), "s8", 9, 64, 32)})(rows)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-36, 1e-20, 1e30])
def test_panel_product_of_zero_tiny_and_huge_rows_is_right(size: float) -> None:
    rows = np.full((2, 32), size, np.float32)
    weight = grouped(np.random.default_rng(0), "u8", 5, 32, 32)
    (found,) = network({"a.weight": weight})(rows)
    assert np.isfinite(found).all()
    wanted, worst = expected(rows, weight)
    assert (np.abs(found - wanted) <= worst + np.float32(1e-30)).all()


def test_panels_contain_every_value_and_pad_with_zeros(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix = grouped(random, "u8", 21, 64, 32).matrix
    panels = pack_weights(matrix, 2)
    assert panels.data.shape == (2, 2 * (64 + 32 * 16))
    assert panels.data.ctypes.data % 64 == 0
    first = panels.data[1, :64].view(np.float32)
    assert np.array_equal(first[:5], matrix.scales[16:, 0])
    assert not first[5:].any()
    codes = panels.data[1, 64 : 64 + 32 * 16].reshape(8, 16, 4)
    assert np.array_equal(codes[:, 2].ravel(), matrix.codes[18, :32])
    assert not codes[:, 5:].any()


def test_packed_weight_scales_are_float16_where_that_is_exact(seed: int) -> None:
    random = np.random.default_rng(seed)
    whole, halves, odd = (
        pack_weights(grouped(random, *size).matrix, 1)
        for size in (("u4", 16, 64, 32), ("u4-halves", 16, 64, 32), ("u4-halves", 16, 96, 32))
    )
    assert (whole.kind, halves.kind, odd.kind) == (MatrixKind.PANELS_4_BITS, MatrixKind.PANELS_4_BITS_FLOAT16, MatrixKind.PANELS_4_BITS)
    assert whole.data.nbytes - halves.data.nbytes == 64


@BY_CASE
def test_panel_rows_equal_the_rows_of_the_matrix(form: str, columns: int, group: int, seed: int) -> None:
    matrix = grouped(np.random.default_rng(seed), form, 37, columns, group).matrix
    numbers = np.array([36, 0, 15, 16, 0, 31], np.int32)
    assert np.array_equal(pack_weights(matrix, 2).rows(numbers), matrix.values(numbers))


def test_packed_weights_are_shared_and_free_their_source(seed: int) -> None:
    forgotten = []

    class Kept(Weights):
        def free_tensor(self, name: str) -> None:
            forgotten.append(name)

    weights = Kept({"a.weight": grouped(np.random.default_rng(seed), "u4", 20, 64, 32)})
    shared: dict = {}
    first, second = (NativeWeights(weights, WeightType.F32, packed=shared).matrix_record("a", 0) for _ in range(2))
    assert first.codes == second.codes
    assert list(shared) == ["a"]
    assert forgotten == ["a.weight"]
    plain = NativeWeights(weights, WeightType.F32).matrix_record("a", 0)
    assert plain.kind != first.kind


@pytest.fixture
def is_one_stream_best() -> Iterator[c_int]:
    """The variable of the kernels: whether few rows read one panel at a time, as on Zen 5."""
    flag = c_int.in_dll(kernels(), "is_one_stream_best")
    before = flag.value
    yield flag
    flag.value = before


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 9])
@pytest.mark.parametrize("one_stream", [0, 1])
def test_each_piece_of_a_panel_product_is_computed_once(
    one_stream: int, num_rows: int, num_threads: int, is_one_stream_best: c_int, seed: int
) -> None:
    """Four panels for few rows; one for more, on Zen 5, and where a thread would get fewer than four pieces of four panels."""
    random, sizes = np.random.default_rng(seed), {"a": 1000, "b": 16, "c": 53}
    tensors = {f"{name}.weight": grouped(random, "u4-halves", outputs, 64, 32) for name, outputs in sizes.items()}
    x, run = rows_of(random, num_rows, 64), network(tensors, num_threads=num_threads)
    is_one_stream_best.value = 1 - one_stream
    expected = [found.copy() for found in network(tensors)(x)]
    is_one_stream_best.value = one_stream
    run(x)
    for buffer in run.execution._buffers[1:]:
        buffer[...] = np.nan
    assert all(np.array_equal(found, wanted) for found, wanted in zip(run(x), expected, strict=True))
    of_piece = 64 if num_rows <= 4 and not one_stream and sum(sizes.values()) // num_threads >= 256 else 16
    assert count_claimed_pieces(run.execution, 0, 1) == sum(-(-outputs // of_piece) for outputs in sizes.values())
