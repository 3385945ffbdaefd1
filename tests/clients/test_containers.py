"""Matrices packed by other tools, compared with what these tools unpack, in a separate environment (make test-clients)."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from clients.run_foreign import run_foreign
from paceline.models.config import WeightType
from paceline.models.families.table import FAMILIES
from paceline.models.quantized_formats.table import METHODS, find_quantized_format, group_packed_tensors
from paceline.models.storage.checkpoint_weights import lazy_matrix
from paceline.models.storage.mapped_files import map_file
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.safetensors_file import read_header
from paceline.models.weights import as_float32
from paceline.runtimes.embedding import round_to_type

TYPES = {"float32": WeightType.F32, "float16": WeightType.F16, "bfloat16": WeightType.BF16}
WRITERS = {"awq", "auto_round", "compressed_tensors", "bitsandbytes", "mlx", "fp8"}


@pytest.fixture(scope="module")
def written(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("containers") / "cases"
    run_foreign(clients / "containers", "write_containers.py", folder)
    return folder


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_packed_matrix_equals_what_its_quantisation_tool_unpacks(written: Path, writer: str) -> None:
    cases = sorted(written.glob(f"{writer}-*"))
    assert cases
    for folder in cases:
        values = json.loads((folder / "config.json").read_text())
        if "quant_method" not in values["quantization_config"]:
            values["quantization"] = values.pop("quantization_config")
        path, weight_type = folder / "model.safetensors", TYPES[values["dtype"]]
        quantized_format = find_quantized_format(values, folder / "config.json", FAMILIES["llama"])
        assert quantized_format is not None
        packed = group_packed_tensors(read_header(path), {path: map_file(path)}, quantized_format)
        assert list(packed) == ["layer.weight"], folder.name
        matrix, expected = packed["layer.weight"], load_file(folder / "expected.safetensors")["expected"]
        assert isinstance(matrix, PackedMatrix)
        found = round_to_type(as_float32(lazy_matrix(matrix, weight_type).compute()), weight_type)
        if folder.name == "bitsandbytes-int8":  # which multiplies in another order
            assert np.abs(found - expected).max() <= 2**-23 * np.abs(expected).max()
        else:
            assert np.array_equal(found, expected), folder.name


def test_quantisation_methods_without_a_tool_to_test_are_listed() -> None:
    assert set(METHODS) - {writer.replace("_", "-") for writer in WRITERS} == {"gptq", "fbgemm_fp8", "modelopt"}
