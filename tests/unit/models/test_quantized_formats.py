"""Quantised matrices of other tools have the values of their definitions, and what does not fit together is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import packed_matrices
from harness.packed_matrices import Packed, awq, bytes_of_integers, e2m1, fp8, gptq, int8_rows, mlx, nf4, packed_integers, write_packed
from paceline.errors import CheckpointError
from paceline.models.config import WeightType
from paceline.models.families.table import FAMILIES
from paceline.models.quantized_formats.affine import unpack_codes
from paceline.models.quantized_formats.small_floats import E4M3_VALUES
from paceline.models.quantized_formats.table import METHODS, find_quantized_format, group_packed_tensors
from paceline.models.storage.checkpoint_weights import dequantized_notice, lazy_matrix
from paceline.models.storage.mapped_files import map_file
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.safetensors_file import read_header
from paceline.models.weights import GroupedTensor, Tensor, as_float32, to_bf16

SHAPE = (48, 256)
WHOLE = {
    "gptq-32": gptq(SHAPE),
    "gptq-64-second": gptq(SHAPE, group=64, second=True),
    "gptq-128-symmetric": gptq(SHAPE, group=128, symmetric=True),
    "gptq-row": gptq(SHAPE, group=-1),
    "gptq-8-bits": gptq(SHAPE, bits=8, group=128),
    "gptq-8-bits-symmetric": gptq(SHAPE, bits=8, symmetric=True),
    "gptq-2-bits": gptq(SHAPE, bits=2),
    "gptq-in-order": gptq(SHAPE, order="as they are"),
    "gptq-order-of-zeros": gptq(SHAPE, order="zeros"),
    "gptq-shuffled": gptq(SHAPE, order="shuffled"),
    "gptq-part-of-a-group": gptq((48, 160), group=64),
    "gptq-no-whole-run": gptq((48, 48), group=16),
    "gptq-no-group-of-ours": replace(gptq((48, 24), group=8), becomes_floats=True),
    "awq-32": awq(SHAPE),
    "awq-128": awq(SHAPE, group=128),
    "awq-row": awq(SHAPE, group=-1),
    "integers-symmetric": packed_integers(SHAPE),
    "integers": packed_integers(SHAPE, symmetric=False),
    "integers-8-bits-by-row": packed_integers(SHAPE, bits=8, group=-1, symmetric=False),
    "integers-long-scales": packed_integers(SHAPE, symmetric=False, type_name="F32"),
    "integers-8-bits-long-scales": packed_integers(SHAPE, bits=8, symmetric=False, type_name="F32"),
    "integers-shuffled": packed_integers(SHAPE, symmetric=False, shuffled=True),
    "bytes": bytes_of_integers(SHAPE),
    "bytes-with-zero-points": bytes_of_integers(SHAPE, symmetric=False),
    "fp8-blocks": fp8(SHAPE),
    "fp8-edges": fp8((48, 200), block=(32, 64)),
    "fp8-powers": fp8(SHAPE, e8m0=True),
    "fp8-one": fp8(SHAPE, block=None),
    "fp8-rows": fp8(SHAPE, by_row=True),
    "nvfp4-divided": e2m1(SHAPE, kind="compressed"),
    "nvfp4-multiplied": e2m1(SHAPE, kind="modelopt"),
    "mxfp4": e2m1(SHAPE, kind="mxfp4"),
    "nf4": nf4(SHAPE),
    "nf4-nested": nf4(SHAPE, nested=True),
    "nf4-across-rows": nf4((7, 90), nested=True),
    "int8-rows": int8_rows(SHAPE),
    **{f"mlx-{bits}-bits": mlx(SHAPE, bits=bits, group=group) for bits, group in ((2, 32), (3, 64), (4, 64), (5, 128), (6, 32), (8, 64))},
}


def opened(folder: Path, case: Packed, settings: dict[str, Any] | None = None) -> PackedMatrix:
    """The matrix of a file that holds one."""
    path = folder / "model.safetensors"
    write_packed(path, {f"layer.{name}": tensor for name, tensor in case.tensors.items()})
    own = case.settings if settings is None else settings
    key = "quantization_config" if "quant_method" in own else "quantization"
    quantized_format = find_quantized_format({key: own}, folder / "config.json", FAMILIES["llama"])
    assert quantized_format is not None
    found = group_packed_tensors(read_header(path), {path: map_file(path)}, quantized_format)
    matrix = found.pop("layer.weight")
    assert isinstance(matrix, PackedMatrix)
    assert not found
    return matrix


@pytest.mark.parametrize("name", WHOLE)
def test_packed_matrix_is_unpacked_to_exact_values(tmp_path: Path, name: str) -> None:
    case, matrix = WHOLE[name], opened(tmp_path, WHOLE[name])
    expected = case.values.astype(np.float32)
    for num_threads in (1, 3):
        tensor = lazy_matrix(matrix, WeightType.F32, num_threads).compute()
        assert isinstance(tensor, Tensor if case.becomes_floats else GroupedTensor)
        assert np.array_equal(as_float32(tensor), expected)
        assert (facts := lazy_matrix(matrix, WeightType.F32).info).nbytes == tensor.nbytes
        assert (facts.shape, facts.bits) == (expected.shape, None if isinstance(tensor, Tensor) else tensor.matrix.bits)
    order = np.random.default_rng(1).permutation(len(expected))[:5]
    for rows in (order, slice(3, 4), slice(1, 6)):
        part = matrix.select_rows(rows)
        assert np.array_equal(as_float32(lazy_matrix(part, WeightType.F32).compute()), expected[rows])
        assert np.array_equal(part.select_rows(slice(0, 1)).exact_values(slice(None)), expected[rows][:1])


def test_dequantised_matrix_is_rounded_with_a_notice(tmp_path: Path) -> None:
    case = fp8(SHAPE)
    matrix, expected = opened(tmp_path, case), case.values.astype(np.float32)
    assert np.array_equal(lazy_matrix(matrix, WeightType.BF16).compute().array, to_bf16(expected))
    assert np.array_equal(lazy_matrix(matrix, WeightType.F16).compute().array, expected.astype(np.float16))
    (notice,) = dequantized_notice([matrix], WeightType.BF16)
    assert notice.startswith("1 matrices become bf16")
    assert dequantized_notice([opened(tmp_path, awq(SHAPE))], WeightType.BF16) == ()


def test_packed_matrix_read_in_chunks_has_equal_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.storage.packed_matrix._WEIGHTS_PER_CHUNK", 16 * 256)
    for case in (WHOLE["gptq-32"], WHOLE["awq-32"], WHOLE["nf4-nested"], WHOLE["fp8-edges"]):
        assert np.array_equal(as_float32(lazy_matrix(opened(tmp_path, case), WeightType.F32, 2).compute()), case.values.astype(np.float32))


def test_gptq_version_follows_symmetric_zero_points(tmp_path: Path) -> None:
    for second in (True, False):
        case = gptq(SHAPE, symmetric=True, second=second, says="gptq" if second else "gptq_v2")
        assert np.array_equal(as_float32(lazy_matrix(opened(tmp_path, case), WeightType.F32).compute()), case.values.astype(np.float32))
    wrong = gptq(SHAPE, second=True, says="gptq")  # for others, only config.json gives the settings
    assert not np.array_equal(as_float32(lazy_matrix(opened(tmp_path, wrong), WeightType.F32).compute()), wrong.values.astype(np.float32))


def test_gptq_versions_have_different_cache_keys(tmp_path: Path) -> None:
    first, second = (opened(tmp_path, gptq(SHAPE, second=True, says=says)) for says in ("gptq", "gptq_v2"))
    assert any(not np.array_equal(one, other) for one, other in zip(first.source_arrays, second.source_arrays, strict=True))


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq"])
def test_auto_round_packing_formats_are_those_of_gptq_and_awq(tmp_path: Path, packing: str) -> None:
    case = awq(SHAPE) if "awq" in packing else gptq(SHAPE, second=packing.endswith("gptqmodel"))
    settings = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False}
    tensor = lazy_matrix(opened(tmp_path, case, settings), WeightType.F32).compute()
    assert np.array_equal(as_float32(tensor), case.values.astype(np.float32))


def test_mlx_modules_may_have_their_own_quantisation_settings(tmp_path: Path) -> None:
    case = mlx(SHAPE, bits=8, group=32)
    settings = {"group_size": 64, "bits": 4, "language_model.model.layer": {"group_size": 32, "bits": 8}, "lm_head": True}
    tensor = lazy_matrix(opened(tmp_path, case, settings), WeightType.F32).compute()
    assert np.array_equal(as_float32(tensor), case.values.astype(np.float32))


@pytest.mark.parametrize("bits", range(1, 9))
def test_unpack_codes_inverts_bit_packing(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 45))
    stream = packed_matrices.bits_of(codes, bits, 1).view(np.uint8)
    assert np.array_equal(unpack_codes(stream, bits, 45), codes)


def test_fp8_e4m3_table_equals_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3_VALUES, expected, equal_nan=True)


def _without(case: Packed, *parts: str) -> Packed:
    return replace(case, tensors={name: tensor for name, tensor in case.tensors.items() if name not in parts})


def _with(case: Packed, **tensors: Any) -> Packed:
    return replace(case, tensors={**case.tensors, **tensors})


def _settings(case: Packed, **settings: Any) -> Packed:
    return replace(case, settings={**case.settings, **settings})


def _groups(last: int) -> Any:
    return "I32", np.array([*[0] * 255, last], np.int32).view(np.uint32)


DAMAGED = {
    "gptq twice": (_with(gptq(SHAPE), weight=("F32", np.zeros((48, 256), np.float32))), "layer is stored twice, packed"),
    "gptq no scales": (_without(gptq(SHAPE), "scales"), "lacks its tensor layer.scales"),
    "gptq no zeros": (_without(gptq(SHAPE), "qzeros"), "lacks its tensor layer.qzeros"),
    "gptq other group": (_settings(gptq(SHAPE), group_size=64), r"qzeros must have shape \[4, 6\] with 4 bits in groups of 64, but has"),
    "gptq other bits": (_settings(gptq(SHAPE), bits=8), "qzeros must have shape"),
    "gptq three bits": (_settings(gptq(SHAPE), bits=3), "bits = 3 of the quantisation is not supported, only 2, 4, 8"),
    "gptq bits null": (_settings(gptq(SHAPE), bits=None), "bits = None of the quantisation is not supported, only 2, 4, 8"),
    "awq bits null": (_settings(awq(SHAPE), bits=None), "bits = None"),
    "gptq no group": (_settings(gptq(SHAPE), group_size=0), "group_size = 0, expected an integer from 1"),
    "gptq marlin": (_settings(gptq(SHAPE), checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    "gptq group 8 of 8": (_with(gptq(SHAPE), g_idx=_groups(8)), "g_idx has 256 numbers from 0 to 8, one below 8"),
    "gptq group -1": (_with(gptq(SHAPE), g_idx=_groups(-1)), "g_idx has 256 numbers from -1 to 0"),
    "gptq short order": (_with(gptq(SHAPE), g_idx=("I32", np.zeros(9, np.uint32))), "g_idx has 9 numbers"),
    "gptq infinite": (_with(gptq(SHAPE), scales=("F16", np.full((8, 48), np.inf, np.float16))), "is not finite"),
    "gptq bytes": (_with(gptq(SHAPE), qweight=("U8", np.zeros((32, 48), np.uint8))), "is of type U8"),
    "awq gemv": (_settings(awq(SHAPE), version="gemv"), "version = 'gemv' of the quantisation is not supported, only 'gemm'"),
    "awq eight bits": (_settings(awq(SHAPE), bits=8), "bits = 8"),
    "awq other group": (_settings(awq(SHAPE), group_size=128), r"qzeros must have shape \[2, 6\] in groups of 128, but has \[8, 6\]"),
    "auto-round packing": ({"quant_method": "auto-round", "packing_format": "auto_round:x"}, "packing_format = 'auto_round:x'"),
    "integers no scales": (_without(packed_integers(SHAPE), "weight_scale"), "lacks its tensor layer.weight_scale"),
    "integers no shape": (_without(packed_integers(SHAPE), "weight_shape"), "lacks its tensor layer.weight_shape"),
    "integers shape": (_with(packed_integers(SHAPE), weight_shape=("I64", np.array([48, 200]))), r"no matrix of weight_shape \[48, 200\]"),
    "integers zeros": (
        _with(packed_integers(SHAPE), weight_zero_point=("I32", np.zeros((5, 8), np.uint32))),
        r"shape \[5, 8\], expected \[6, 8\]",
    ),
    "sparse": (_settings(packed_integers(SHAPE), sparsity_config={"format": "sparse-24-bitmask"}), "format = 'sparse-24-bitmask'"),
    "transformed": (_settings(packed_integers(SHAPE), transform_config={"config_groups": {"a": 1}}), "transform_config = "),
    "unknown format": (_settings(packed_integers(SHAPE), format="marlin-24"), "format = 'marlin-24'"),
    "nvfp4 divisor": (
        _with(e2m1(SHAPE, kind="compressed"), weight_global_scale=("F32", np.array([0.5], np.float32))),
        "weight_global_scale = ",
    ),
    "fp8 no scales": (_without(fp8(SHAPE), "weight_scale_inv"), "layer.weight of type F8_E4M3 is packed, but not in the format FP8"),
    "fp8 other blocks": (_settings(fp8(SHAPE), weight_block_size=[16, 16]), "one a block in blocks of 16 x 16"),
    "fp8 no blocks": (_settings(fp8(SHAPE), weight_block_size=[0, 128]), r"weight_block_size = \[0, 128\], expected rows and columns"),
    "fp8 not a number": (_with(fp8(SHAPE), weight=("F8_E4M3", np.full(SHAPE, 127, np.uint8))), "is not finite"),
    "nf4 no table": (_without(nf4(SHAPE), "weight.quant_map"), "lacks its tensor layer.weight.quant_map"),
    "nf4 no state": (_without(nf4(SHAPE), "weight.quant_state.bitsandbytes__nf4"), "lacks its quant_state"),
    "nf4 damaged state": (
        _with(nf4(SHAPE), **{"weight.quant_state.bitsandbytes__nf4": ("U8", np.frombuffer(b"[" * 99, np.uint8))}),
        "not a JSON object",
    ),
    "nf4 few scales": (_with(nf4(SHAPE), **{"weight.absmax": ("F32", np.ones(9, np.float32))}), "9 scales for 192 blocks"),
    "int8 few scales": (_with(int8_rows(SHAPE), SCB=("F32", np.ones(9, np.float32))), "48 rows, but SCB 9 numbers"),
    "int8 tiles": (_with(int8_rows(SHAPE), weight_format=("U8", np.array(1, np.uint8))), "tiles for a GPU"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
    "mlx no scales": (_without(mlx(SHAPE), "scales"), "layer.weight of type U32 is packed, but not in the format MLX"),
    "mlx no minimums": (_without(mlx(SHAPE), "biases"), "lacks its tensor layer.biases"),
    "mlx other bits": (_settings(mlx(SHAPE), bits=8), "do not match 8 bits in groups of 64"),
    "mlx mode": (_settings(mlx(SHAPE), mode="nvfp4"), "mode = 'nvfp4'"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
    "unknown": ({"quant_method": "aqlm"}, r"quantised \('aqlm'\); supported are gptq, awq"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_packed_matrix_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    case, message = DAMAGED[name]
    whole = case if isinstance(case, Packed) else replace(gptq(SHAPE), settings=case)
    with pytest.raises(CheckpointError, match=message) as caught:
        lazy_matrix(opened(tmp_path, whole), WeightType.F32).compute()
    assert "\n" not in str(caught.value)


def test_quantised_activations_and_kv_cache_are_ignored_with_a_notice(tmp_path: Path) -> None:
    case = bytes_of_integers(SHAPE)
    case = _settings(_with(case, input_scale=("F32", np.ones(1, np.float32))), kv_cache_scheme={"num_bits": 8})
    assert opened(tmp_path, case).shape == SHAPE
    quantized_format = find_quantized_format({"quantization_config": case.settings}, tmp_path / "config.json", FAMILIES["llama"])
    assert quantized_format is not None
    assert [text.split()[0] for text in quantized_format.notices] == ["activations", "kv_cache_scheme"]


@pytest.mark.parametrize(
    ("file", "settings", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "GPTQ, 4 bits"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "AWQ, 4 bits"),
    ],
)
def test_quantisation_config_files_are_read(tmp_path: Path, file: str, settings: dict[str, Any], name: str) -> None:
    (tmp_path / file).write_text(json.dumps(settings))
    quantized_format = find_quantized_format({}, tmp_path / "config.json", FAMILIES["llama"])
    assert quantized_format is not None
    assert quantized_format.name == name
    assert find_quantized_format({}, tmp_path / "config.json", FAMILIES["llama"], reads_settings_files=False) is None


def test_every_quantisation_method_is_tested() -> None:
    named = {case.settings.get("quant_method", "mlx") for case in WHOLE.values()}
    assert named == set(METHODS) - {"auto-round"}
