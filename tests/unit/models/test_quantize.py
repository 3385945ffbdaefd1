"""Quantised matrices stay close to what they were made from, are never NaN, and hold values that float32 holds exactly."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig, QuantOptions, SpeculationConfig, draft_quant_options, quant_options
from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import WeightType
from paceline.models.grouped import GroupedMatrix, unpack_nibbles
from paceline.models.quantize import (
    QuantizationScheme,
    largest_group_size,
    quantization_scheme,
    quantization_schemes,
    quantize_matrix,
    quantize_tensor,
)
from paceline.models.weights import GroupedTensor, Tensor, Weights

every_kind = pytest.mark.parametrize("bits", [8, 4])


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def f32(array: np.ndarray) -> Tensor:
    return Tensor(array, WeightType.F32, array.shape)


def codes_of(matrix: GroupedMatrix) -> np.ndarray:
    return unpack_nibbles(matrix.codes.view(np.uint8)) if matrix.bits == 4 else matrix.codes


@every_kind
def test_quantisation_error_is_bounded_by_the_clipping_range(bits: int, seed: int) -> None:
    values = normal(64, 256, seed)
    matrix = quantize_matrix(values, bits=bits, group_size=64)
    error = np.abs(matrix.values() - values).reshape(64, 4, 64)
    steps = np.abs(matrix.scales)[..., None]
    assert (error.mean(axis=2) < 0.5 * steps[..., 0]).all()
    assert (error <= (1.01 if bits == 8 else 2.6) * steps).all()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_quantisation_error_is_smaller_than_plain_rounding(group: int, seed: int) -> None:
    values = normal(64, 256, seed)
    groups = values.reshape(64, -1, group)
    scales = np.abs(groups).max(axis=2, keepdims=True) / 7
    plain = ((np.clip(np.rint(groups / scales), -8, 7) * scales - groups) ** 2).sum(axis=2)
    ours = ((quantize_matrix(values, bits=4, group_size=group).values() - values) ** 2).reshape(groups.shape).sum(axis=2)
    assert ours.sum() < 0.8 * plain.sum()
    assert (ours <= 1.0001 * plain).all()


@every_kind
def test_dequantised_values_are_exact_in_float32(bits: int, seed: int) -> None:
    matrix = quantize_matrix(normal(16, 128, seed) * 3, bits=bits, group_size=32)
    codes = codes_of(matrix).astype(np.float64) - matrix.zero_point
    exact = codes.reshape(16, 4, 32) * matrix.scales.astype(np.float64)[..., None]
    assert np.array_equal(exact.reshape(16, 128), matrix.values())
    assert (matrix.scales.view(np.uint32) % (1 << 12) == 0).all()


def test_int8_and_int4_codes_have_the_documented_range() -> None:
    values = normal(8, 64)
    int8, int4 = quantize_matrix(values, bits=8, group_size=32), quantize_matrix(values, bits=4, group_size=32)
    assert (int8.codes.dtype, int8.zero_point, int8.minimums) == (np.int8, 0, None)
    assert (int8.codes.min(), int8.codes.max()) == (-127, 127)
    assert (int4.codes.dtype, int4.zero_point, int4.minimums) == (np.uint8, 8, None)
    assert int4.codes.shape == (8, 32)
    assert (codes_of(int4).min(), codes_of(int4).max()) == (0, 15)


@every_kind
def test_values_of_no_rows_of_a_quantised_matrix_are_empty(bits: int) -> None:
    matrix = quantize_matrix(normal(3, 64), bits=bits, group_size=32)
    assert matrix.values(np.zeros(0, np.int32)).shape == (0, 64)


@every_kind
def test_quantised_group_of_zeros_has_scale_one_and_stays_zero(bits: int) -> None:
    values = normal(4, 128)
    values[1, 32:64] = 0
    values[2, :32] = -0.0
    matrix = quantize_matrix(values, bits=bits, group_size=32)
    assert matrix.scales[1, 1] == matrix.scales[2, 0] == 1
    assert not matrix.values()[1, 32:64].any()
    assert not matrix.values()[2, :32].any()
    assert (matrix.scales != 1).sum() == 14


@every_kind
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-29, 1e30, 1e37])
def test_quantised_tiny_and_huge_values_stay_finite(bits: int, size: float) -> None:
    signs = np.where(normal(4, 64) > 0, np.float32(size), -np.float32(size)).astype(np.float32)
    matrix = quantize_matrix(signs, bits=bits, group_size=32)
    assert np.isfinite(matrix.values()).all()
    assert np.isfinite(matrix.scales).all()
    assert (matrix.scales != 0).all()
    if size >= 1e-28:
        assert np.abs(matrix.values() / signs - 1).max() < 0.15


def test_quantised_constant_group_keeps_its_value() -> None:
    for value in (0.37, -0.37):
        matrix = quantize_matrix(np.full((2, 64), value, np.float32), bits=4, group_size=64)
        assert np.allclose(matrix.values(), value, rtol=2e-4)


@every_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38, -1e38])
def test_quantising_a_weight_that_is_not_finite_names_its_tensor(bits: int, bad: float) -> None:
    values = normal(300, 1024)
    values[299, 5] = bad
    with pytest.raises(CheckpointError, match=r"layers\.3\.q_proj\.weight holds weights that are NaN, infinite or beyond"):
        quantize_tensor("layers.3.q_proj.weight", f32(values), QuantizationScheme(bits, 128))


@pytest.mark.parametrize(("bits", "group"), [(5, 32), (4, 48), (4, 128), (8, 0)])
def test_impossible_quantisation_options_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ConfigError, match=r"of width 96 .* use 4 or 8 bits"):
        quantize_matrix(normal(2, 96), bits=bits, group_size=group)


@every_kind
@pytest.mark.parametrize("weight_type", list(WeightType))
def test_quantisation_is_independent_of_chunks_and_threads(bits: int, weight_type: WeightType) -> None:
    values = normal(700, 384)
    stored = {
        WeightType.F32: values,
        WeightType.F16: values.astype(np.float16),
        WeightType.BF16: (values.view(np.uint32) >> 16).astype(np.uint16),
    }[weight_type]
    widened = values if weight_type is WeightType.F32 else stored.astype(np.float32)
    if weight_type is WeightType.BF16:
        widened = (stored.astype(np.uint32) << 16).view(np.float32)
    whole = quantize_matrix(widened, bits=bits, group_size=128)
    for num_threads in (1, 3):
        made = quantize_tensor("m", Tensor(stored, weight_type, stored.shape), QuantizationScheme(bits, 128), num_threads=num_threads)
        assert made.weight_type is weight_type
        assert made.matrix.codes.dtype == whole.codes.dtype
        assert np.array_equal(made.matrix.codes, whole.codes)
        assert np.array_equal(made.matrix.scales, whole.scales)
        assert whole.minimums is made.matrix.minimums is None


@pytest.mark.parametrize(
    ("columns", "wished", "group"), [(384, 128, 128), (192, 128, 64), (96, 128, 32), (384, 32, 32), (100, 128, None), (16, 128, None)]
)
def test_quantisation_uses_the_largest_group_that_divides_the_width(columns: int, wished: int, group: int | None) -> None:
    assert largest_group_size(columns, wished) == group


def tiny_weights(*, is_tied: bool = True) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (40, 64),
        "layers.0.q_proj.weight": (64, 64),
        "layers.0.q_proj.bias": (64,),
        "layers.0.down_proj.weight": (64, 96),
        "layers.1.q_proj.weight": (64, 64),
        "layers.1.odd.weight": (64, 40),
        "final_norm.weight": (64,),
    }
    shapes |= {} if is_tied else {"lm_head.weight": (40, 64)}
    return Weights({name: f32(np.ones(shape, np.float32)) for name, shape in shapes.items()})


def test_quant_options_set_bits_and_group_size_per_matrix() -> None:
    found = quantization_schemes(tiny_weights(is_tied=False), QuantOptions(bits=4, embedding_bits=None))
    assert found == {
        "layers.0.q_proj.weight": QuantizationScheme(4, 64),
        "layers.0.down_proj.weight": QuantizationScheme(4, 32),
        "layers.1.q_proj.weight": QuantizationScheme(4, 64),
        "lm_head.weight": QuantizationScheme(8, 64),
    }


def test_moe_router_is_quantised_only_by_an_override() -> None:
    shapes = {"layers.0.router.weight": (8, 64), "layers.0.shared_gate.weight": (1, 64), "layers.0.experts.3.up_proj.weight": (32, 64)}
    weights = Weights({name: f32(np.ones(shape, np.float32)) for name, shape in shapes.items()})
    assert list(quantization_schemes(weights, QuantOptions(bits=4))) == ["layers.0.experts.3.up_proj.weight"]
    named = quantization_schemes(weights, QuantOptions(bits=4, overrides=(("*.router.weight", 8),)))
    assert named["layers.0.router.weight"].bits == 8


def test_first_matching_quantisation_override_applies() -> None:
    overrides = (("layers.0.q_*", None), ("layers.0.*", 8), ("embedding.weight", 4), ("*", 4))
    found = quantization_schemes(tiny_weights(), QuantOptions(overrides=overrides))
    bits = {name: scheme.bits for name, scheme in found.items()}
    assert bits == {"embedding.weight": 4, "layers.0.down_proj.weight": 8, "layers.1.q_proj.weight": 4}


@pytest.mark.parametrize(("embedding", "lm_head", "bits"), [(4, 8, 8), (8, 4, 8), (4, 4, 4), (None, 4, None), (8, None, None)])
def test_tied_embedding_and_lm_head_use_the_higher_number_of_bits(embedding: Any, lm_head: Any, bits: int | None) -> None:
    options = QuantOptions(bits=4, embedding_bits=embedding, lm_head_bits=lm_head)
    scheme = quantization_schemes(tiny_weights(), options).get("embedding.weight")
    assert (None if scheme is None else scheme.bits) == bits


def test_per_layer_embeddings_are_quantised_as_the_embedding() -> None:
    weights = Weights({name: f32(normal(40, 64)) for name in ("embedding.weight", "layer_embedding.weight", "layer_inputs_proj.weight")})
    found = quantization_schemes(weights, QuantOptions(bits=4, embedding_bits=8))
    assert [scheme.bits for scheme in found.values()] == [8, 8, 4]
    kept = quantization_schemes(weights, QuantOptions(bits=4, embedding_bits=None))
    assert list(kept) == ["layer_inputs_proj.weight"]


def test_quantised_matrix_is_requantised_only_to_fewer_bits() -> None:
    values = normal(16, 64)
    int8, int4 = (GroupedTensor(quantize_matrix(values, bits=bits, group_size=32)) for bits in (8, 4))

    def scheme(tensor: GroupedTensor, bits: int) -> QuantizationScheme | None:
        facts = Weights({"a": tensor}).tensor_info("a")
        return quantization_scheme("layers.0.q_proj.weight", facts, QuantOptions(bits=bits), is_also_lm_head=False)

    assert scheme(int8, 8) is scheme(int4, 8) is scheme(int4, 4) is None
    smaller = scheme(int8, 4)
    assert smaller == QuantizationScheme(4, 64)
    again = quantize_tensor("m", int8, smaller)
    expected = quantize_matrix(int8.matrix.values(), bits=4, group_size=64)
    assert np.array_equal(again.matrix.values(), expected.values())


def test_quantisation_needs_bounded_extra_memory() -> None:
    tensor = f32(normal(4096, 1024))
    tracemalloc.start()
    made = quantize_tensor("m", tensor, QuantizationScheme(4, 128))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < made.nbytes + 4_000_000 < tensor.nbytes / 2


def test_quantisation_setting_may_be_a_name_or_options() -> None:
    assert quant_options("quantization", "none") is None
    assert quant_options("quantization", "int4") == QuantOptions(bits=4)
    assert quant_options("quantization", "int8") == QuantOptions() == QuantOptions(bits=8, embedding_bits=8, lm_head_bits=8)
    custom = QuantOptions(bits=4, group=32, overrides=(("layers.0.*", None),))
    assert EngineConfig(quantization=custom).quantization is SpeculationConfig(draft_quantization=custom).draft_quantization is custom


@pytest.mark.parametrize(("target_bits", "bits"), [(32.0, None), (16.0, 8), (16.1, 8), (8.5, 4), (6.56, 4), (5.5, 4), (4.5, 4), (2.6, 4)])
def test_draft_quantization_auto_halves_the_bits_of_the_target(target_bits: float, bits: int | None) -> None:
    followed = draft_quant_options("auto", target_bits)
    assert (None if followed is None else followed.bits) == bits
    assert draft_quant_options("none", target_bits) is None
    assert draft_quant_options("int8", target_bits) == QuantOptions()


def test_draft_quantization_auto_on_a_gpu_keeps_the_stored_type() -> None:
    for bits in (16.0, 8.5, 4.5):
        assert draft_quant_options("auto", bits, device="cuda") is None
        assert draft_quant_options("int8", bits, device="cuda") == QuantOptions()


@pytest.mark.parametrize("value", ["int3", "INT8", "", None, 8, True])
def test_unknown_quantisation_name_is_refused_with_its_value(value: Any) -> None:
    for make, name in (
        (lambda: EngineConfig(quantization=value), "quantization"),
        (lambda: SpeculationConfig(draft_quantization=value), "draft_quantization"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        names = "none, int8, int4" if name == "quantization" else "auto, none, int8, int4"
        assert str(caught.value) == f"{name} is {value!r}: use one of {names}"


@pytest.mark.parametrize(
    ("name", "value"), [("bits", 3), ("bits", None), ("group", 16), ("group", 0), ("embedding_bits", 2), ("lm_head_bits", "keep")]
)
def test_invalid_quantisation_option_is_refused_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}: use "):
        QuantOptions(**{name: value})
    with pytest.raises(ConfigError, match=r"the override 'layers\.\*' is 6: use 4, 8 or None"):
        QuantOptions(overrides=(("layers.*", 6),))


def test_quantisation_overrides_may_be_a_mapping() -> None:
    assert QuantOptions(overrides={"layers.0.*": 8, "*": None}).overrides == (("layers.0.*", 8), ("*", None))  # type: ignore[arg-type]
    for wrong in (5, "layers", ("layers.0.*",), (("layers.0.*", 8, 4),), ((3, 8),)):
        with pytest.raises(ConfigError, match=r"overrides is .*: give patterns of names with their bits"):
            QuantOptions(overrides=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bits", "columns", "groups"), [(4, 96, 2), (4, 96, 5), (8, 96, 4), (8, 90, 2), (2, 96, 3)])
def test_grouped_matrix_with_unaligned_groups_is_refused(bits: int, columns: int, groups: int) -> None:
    codes = np.zeros((1, columns * bits // 8), np.uint8)
    with pytest.raises(ValueError, match=f"{columns} columns of {bits} bits in {groups} groups"):
        GroupedMatrix(codes, np.ones((1, groups), np.float32), None, bits)
