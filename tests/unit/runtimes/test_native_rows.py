"""Row-wise native kernels, compared with float64."""

from collections.abc import Callable

import numpy as np
import pytest

from harness.native_network import BUILT, Network, make_batch, native_config, plain_tensor
from paceline.models.config import ModelConfig
from paceline.models.layers import Activation
from paceline.models.rope import inverse_frequencies
from paceline.runtimes.base import FloatArray, RowRange
from paceline.runtimes.native.program import NativeOps, Value

pytestmark = pytest.mark.parametrize("level", BUILT)
WIDTHS = [1, 15, 16, 33, 64, 200, 4100]  # the last one is shared out in pieces
GATES = [activation for activation in Activation if activation is not Activation.XIELU]
LARGE = [0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 10.0, -10.0, 88.0, -88.0, 89.5, -89.5, 1e4, -1e4, 3e38]


def values(rows: int, width: int, seed: int, scale: float = 3.0) -> FloatArray:
    return (scale * np.random.default_rng(seed).normal(size=(rows, width))).astype(np.float32)


def gate_of(activation: Activation, level: str, width: int) -> Callable[[FloatArray, FloatArray], FloatArray]:
    run = Network([width, width], lambda ops, inputs: [ops.gated(*inputs, activation)], level=level)
    return lambda x, up: run(x, up)[0]


def activated(activation: Activation, x: FloatArray) -> np.ndarray:
    wide = x.astype(np.float64)
    if activation is Activation.SILU:
        return wide * 0.5 * (1 + np.tanh(wide / 2))
    if activation is Activation.SIGMOID:
        return 0.5 * (1 + np.tanh(wide / 2))
    if activation is Activation.RELU:
        return wide.clip(0)
    if activation is Activation.NONE:
        return wide
    return 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", GATES)
def test_native_gated_activation_equals_its_definition(activation: Activation, width: int, level: str, seed: int) -> None:
    x, up = values(3, width, seed), values(3, width, seed + 1)
    found = gate_of(activation, level, width)(x, up)
    expected = activated(activation, x) * up
    assert np.allclose(found, expected, rtol=5e-7, atol=5e-7 * np.abs(x * up).max())


@pytest.mark.parametrize("activation", GATES)
def test_native_activation_without_gate_equals_a_product_with_ones(activation: Activation, level: str, seed: int) -> None:
    x = values(3, 50, seed)
    (found,) = Network([50], lambda ops, inputs: [ops.activated(inputs[0], activation)], level=level)(x)
    assert np.array_equal(found, gate_of(activation, level, 50)(x, np.ones_like(x)))


@pytest.mark.parametrize("activation", GATES)
def test_native_gated_activation_is_right_at_the_range_of_exp(activation: Activation, level: str) -> None:
    x = np.array([[value for value in LARGE if value < 1e38]], np.float32)
    found = gate_of(activation, level, x.shape[1])(x, np.ones_like(x))
    with np.errstate(over="ignore"):
        assert np.allclose(found, activated(activation, x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("heads", "size"), [(1, 33), (3, 5), (4, 16), (5, 24), (33, 128)])
def test_native_gate_of_a_group_applies_to_all_its_columns(heads: int, size: int, level: str, seed: int) -> None:
    gate, up = values(3, heads, seed), values(3, heads * size, seed + 1)
    run = Network([heads, heads * size], lambda ops, inputs: [ops.gated(*inputs, Activation.SIGMOID)], level=level)
    whole = gate_of(Activation.SIGMOID, level, heads * size)(gate.repeat(size, axis=1), up)
    assert np.array_equal(run(gate, up)[0], whole)


@pytest.mark.parametrize("width", [1, 33, 4100])
def test_native_xielu_equals_its_definition(width: int, level: str, seed: int) -> None:
    x, given = values(3, width, seed), {"alpha_p": 0.4, "alpha_n": -0.7, "beta": 0.6, "eps": -1e-6}
    x[0, 0] = 0.0
    tensors = {f"a.{name}": plain_tensor(np.array([value], np.float32)) for name, value in given.items()}
    (found,) = Network([width], lambda ops, inputs: [ops.xielu(inputs[0], "a")], tensors=tensors, level=level)(x)
    wide, positive, negative = x.astype(np.float64), np.log1p(np.exp(0.4)), 0.6 + np.log1p(np.exp(-0.7))
    expected = np.where(wide > 0, positive * wide**2, negative * (np.expm1(np.minimum(wide, -1e-6)) - wide)) + 0.6 * wide
    assert np.allclose(found, expected, rtol=5e-7, atol=5e-7)


def test_native_exp_is_accurate_to_two_units_in_the_last_place(level: str) -> None:
    """silu(-x) / -x = 1 / (1 + e^x): where e^x is large the exponential's own relative error shows."""
    x = np.linspace(20.0, 87.0, 4096, dtype=np.float32)[None]
    found = -gate_of(Activation.SILU, level, x.shape[1])(-x, np.ones_like(x)).astype(np.float64) / x
    relative = np.abs(found * (1 + np.exp(x.astype(np.float64))) - 1)
    assert relative.max() < 6 * np.finfo(np.float32).eps / 2


def test_nan_input_of_activation_and_soft_cap_stays_nan(level: str) -> None:
    """Damaged weights must not turn into plausible values."""
    x = np.array([[1.0, np.nan, 2.0]], np.float32)
    for activation in GATES:
        assert np.isnan(gate_of(activation, level, 3)(x, np.ones_like(x))).tolist() == [[False, True, False]]
    capped = Network([3], lambda ops, inputs: [ops.soft_cap(inputs[0], 30.0)], level=level)
    assert np.isnan(capped(x)[0]).tolist() == [[False, True, False]]


@pytest.mark.parametrize("width", WIDTHS)
def test_native_addition_rounds_once(width: int, level: str, seed: int) -> None:
    x, y = values(3, width, seed), values(3, width, seed + 1)
    (found,) = Network([width, width], lambda ops, inputs: [ops.add(*inputs)], level=level)(x, y)
    assert np.array_equal(found, x + y)


@pytest.mark.parametrize("width", WIDTHS)
def test_native_scaling_of_columns_rounds_once(width: int, level: str, seed: int) -> None:
    x, weight = values(3, width, seed), values(1, width, seed + 1)[0]
    tensors = {"scale.weight": plain_tensor(weight)}
    (found,) = Network([width], lambda ops, inputs: [ops.scale_columns(inputs[0], "scale")], tensors=tensors, level=level)(x)
    assert np.array_equal(found, x * weight)


@pytest.mark.parametrize("width", [1, 15, 33, 200, 4100])
@pytest.mark.parametrize(("inputs", "outputs", "first", "offset"), [(4, 4, 0, 0.0), (1, 4, 0, 1.0), (1, 4, 1, 1.0), (3, 2, 1, -0.5)])
def test_native_mix_equals_its_definition(inputs: int, outputs: int, first: int, offset: float, width: int, level: str, seed: int) -> None:
    x, y, weights = values(5, inputs * width, seed), values(5, outputs * width, seed + 1), values(5, outputs * inputs, seed + 2, 0.3)
    widths = [x.shape[1], y.shape[1], weights.shape[1]]

    def build(ops: NativeOps, given: list[Value]) -> list[Value]:
        return [ops.mix_streams(given[1], given[0], matrix, outputs, offset=offset, first=first) for matrix in (given[2], None)]

    found = Network(widths, build, level=level)(x, y, weights)
    streams, wide = (rows.astype(np.float64).reshape(5, -1, width) for rows in (x, y))
    for result, matrix in zip(found, (weights.astype(np.float64), np.zeros(weights.shape)), strict=True):
        sums = np.einsum("toi,tiw->tow", matrix.reshape(5, outputs, inputs) + offset, streams)
        sums[:, :first] = 0
        assert np.allclose(result, (wide + sums).reshape(y.shape), rtol=1e-5, atol=1e-5)
    for row in range(5):  # whatever else is in the pass
        alone = Network(widths, build, level=level)(x[row : row + 1], y[row : row + 1], weights[row : row + 1])
        assert all(np.array_equal(one[0], whole[row]) for one, whole in zip(alone, found, strict=True))


@pytest.mark.parametrize("factor", [1.6448536, 0.0, -0.5])
@pytest.mark.parametrize("width", [1, 2, 15, 33, 4100])
def test_native_gaussian_top_k_uses_the_deviation_of_all_values(width: int, factor: float, level: str, seed: int) -> None:
    x = values(5, width, seed) + np.float32(2)
    run = Network([width], lambda ops, inputs: [ops.gaussian_top_k(inputs[0], factor)], level=level)
    (found,) = run(x)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axis=1, keepdims=True) - factor * wide.std(axis=1, keepdims=True)).clip(0)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (found > 0).any() == (expected > 0).any()
    assert all(np.array_equal(run(x[row : row + 1])[0][0], found[row]) for row in range(5))
    x[0, 0] = np.nan
    assert np.isnan(run(x)[0]).all(axis=1).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("width", [1, 15, 33, 4100])
def test_native_match_rms_equals_its_definition(width: int, level: str, seed: int) -> None:
    x, like = values(5, width, seed), values(5, width, seed + 1, scale=7.0)
    x[0], x[1] = 0.0, 1e-4  # mean squares below the least one
    like[2] = 0.0
    run = Network([width, width], lambda ops, inputs: [ops.match_rms(*inputs)], level=level)
    (found,) = run(x, like)
    wide, wanted = x.astype(np.float64), np.sqrt((like.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
    expected = wide * wanted / np.sqrt(np.maximum((wide**2).mean(axis=1, keepdims=True), 1e-5))
    assert np.allclose(found, expected, rtol=2e-6, atol=0)
    assert all(np.array_equal(run(x[row : row + 1], like[row : row + 1])[0][0], found[row]) for row in range(5))


@pytest.mark.parametrize("width", WIDTHS)
def test_native_scaling_rounds_once(width: int, level: str, seed: int) -> None:
    x = values(3, width, seed)
    (found,) = Network([width], lambda ops, inputs: [ops.scale(inputs[0], 0.22)], level=level)(x)
    assert np.array_equal(found, x * np.float32(0.22))


@pytest.mark.parametrize("cap", [2.0, 30.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_native_soft_cap_equals_its_definition(width: int, cap: float, level: str, seed: int) -> None:
    x = values(3, width, seed, scale=20.0)
    (found,) = Network([width], lambda ops, inputs: [ops.soft_cap(inputs[0], cap)], level=level)(x)
    assert np.abs(found - cap * np.tanh(x.astype(np.float64) / cap)).max() <= 4e-7 * cap
    assert np.abs(found).max() <= cap


@pytest.mark.parametrize(("num_heads", "width"), [(1, 1), (1, 50), (1, 64), (1, 1000), (3, 16), (5, 24), (2, 80)])
def test_native_rms_norm_equals_its_definition(num_heads: int, width: int, level: str, seed: int) -> None:
    x, weight = values(11, num_heads * width, seed), values(1, width, seed + 1)[0]
    x[0] = 0.0

    def build(ops: NativeOps, inputs: list[Value]) -> list[Value]:
        return [ops.rms_norm(inputs[0], "n") if num_heads == 1 else ops.head_norm(inputs[0], "n", num_heads)]

    (found,) = Network([x.shape[1]], build, tensors={"n.weight": plain_tensor(weight)}, level=level)(x)
    wide = x.astype(np.float64).reshape(11, num_heads, width)
    expected = (wide / np.sqrt((wide**2).mean(axis=2, keepdims=True) + 1e-5) * weight).reshape(x.shape)
    assert np.allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [1, 50, 1000])
@pytest.mark.parametrize("has_bias", [True, False])
def test_native_layer_norm_equals_its_definition(has_bias: bool, width: int, level: str, seed: int) -> None:
    x, weight, bias = values(11, width, seed) + np.float32(5), *values(2, width, seed + 1)
    tensors = {"n.weight": plain_tensor(weight), **({"n.bias": plain_tensor(bias)} if has_bias else {})}
    (found,) = Network([width], lambda ops, inputs: [ops.layer_norm(inputs[0], "n")], tensors=tensors, level=level)(x)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(axis=1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5) * weight + (bias if has_bias else 0.0)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "width"), [(1, 50), (3, 16), (2, 80)])
def test_native_rms_norm_without_weight_equals_a_weight_of_ones(num_heads: int, width: int, level: str, seed: int) -> None:
    x, one = values(11, num_heads * width, seed), plain_tensor(np.ones(width, np.float32))

    def build(ops: NativeOps, inputs: list[Value]) -> list[Value]:
        return [ops.head_norm(inputs[0], name, num_heads) for name in ("n", None)]

    with_ones, without = Network([x.shape[1]], build, tensors={"n.weight": one}, level=level)(x)
    assert np.array_equal(without, with_ones)


@pytest.mark.parametrize(("begin", "width"), [(0, 5), (7, 33), (60, 1), (10, 4100)])
def test_native_column_selection_copies_the_columns(begin: int, width: int, level: str, seed: int) -> None:
    x = values(5, begin + width + 3, seed)
    (found,) = Network([x.shape[1]], lambda ops, inputs: [ops.columns(inputs[0], begin, width)], level=level)(x)
    assert np.array_equal(found, x[:, begin : begin + width])


def rotated(config: ModelConfig, x: FloatArray, positions: np.ndarray) -> np.ndarray:
    frequencies, _ = inverse_frequencies(config.attention.rope, config.attention.head_size)
    angles = (positions.astype(np.float32)[:, None] * frequencies)[:, None].astype(np.float64)
    half = angles.shape[-1]
    wide = x.astype(np.float64).reshape(len(x), -1, config.attention.head_size)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    turned = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles), wide[..., 2 * half :])
    return np.concatenate(turned, axis=-1).reshape(x.shape)


@pytest.mark.parametrize(("head_size", "fraction"), [(16, 1.0), (24, 1.0), (64, 0.5), (80, 0.4), (128, 1.0), (96, 0.75)])
def test_native_rope_rotates_its_part_of_a_head_only(head_size: int, fraction: float, level: str, seed: int) -> None:
    config = native_config(head_size=head_size, rotated_fraction=fraction)
    x = values(9, 3 * head_size, seed)
    positions = np.array([0, 1, 2, 31, 32, 33, 100, 255, 256])
    run = Network([x.shape[1]], lambda ops, inputs: [ops.rope(inputs[0], 3, config.attention.rope)], config=config, level=level)
    (found,) = run(x, batch=make_batch([RowRange(0, 9, 0, np.array([1], np.int32))], positions=positions.tolist()))
    assert np.abs(found - rotated(config, x, positions)).max() <= 3e-7 * np.abs(x).max()
    kept = slice(config.attention.rope.rotary_size(head_size), None)
    assert np.array_equal(found.reshape(9, 3, -1)[..., kept], x.reshape(9, 3, -1)[..., kept])
    for row, position in enumerate(positions.tolist()):  # a lone row's angles are read where they lie
        (alone,) = run(x[row : row + 1], batch=make_batch([RowRange(0, 1, 0, np.array([1], np.int32))], positions=[position]))
        assert np.array_equal(alone[0], found[row])


@pytest.mark.parametrize("wanted", [[], [4], [2, 0, 4], [4, 3, 2, 1, 0]])
def test_selected_logits_rows_come_in_requested_order(wanted: list[int], level: str, seed: int) -> None:
    x = values(5, 4100, seed)
    run = Network([x.shape[1]], lambda ops, inputs: [ops.soft_cap(ops.logits_rows(inputs[0]), 1e9), inputs[0]], level=level)
    batch = make_batch([RowRange(0, 5, 0, np.array([1], np.int32))], wanted)
    run = Network([x.shape[1]], lambda ops, inputs: [ops.logits_rows(inputs[0])], level=level)
    assert np.array_equal(run(x, batch=batch)[0], x[wanted])
