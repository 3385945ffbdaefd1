"""ModelOpt (NVIDIA): FP8 with one scale for the matrix, NVFP4 with a scale for each group and one for the matrix."""

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.containers.fp8 import ACTIVATION_NOTICE
from paceline.models.containers.module import Container, PackedModule
from paceline.models.containers.settings import read_choice
from paceline.models.containers.small_floats import E4M3, read_e2m1, read_e4m3, scales_to_float32
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import Floats, PackedMatrix

_IGNORED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".k_proj.k_scale", ".v_proj.v_scale")
_CACHE_NOTICE = "its scheme for the cache is left out: keys and values are kept as they are"


def modelopt_container(fields: JsonFields) -> Container:
    """Return the container of a ModelOpt `quantization_config`.

    Raises:
        CheckpointError: The algorithm is not supported.
    """
    algorithm = read_choice(fields, "quant_algo", ("FP8", "NVFP4"))
    notices = [_CACHE_NOTICE] if fields.values.get("kv_cache_scheme") or fields.values.get("kv_cache_quant_algo") else []
    return Container(f"ModelOpt, {algorithm}", (".weight_scale",), _read_matrix, _IGNORED_SUFFIXES, (ACTIVATION_NOTICE, *notices))


def _read_matrix(module: PackedModule) -> PackedMatrix:
    if module.tensor_type("weight") == "F8_E4M3":
        return read_e4m3(module, scales_to_float32(module.read_floats("weight_scale", ndim=None), None), None)
    where, pairs = module.describe_tensor("weight"), module.read_tensor("weight", "U8")
    scales = module.read_tensor("weight_scale", "F8_E4M3")
    factor = module.read_floats("weight_scale_2", ndim=None).astype(np.float32).reshape(-1)
    if factor.size != 1:
        raise CheckpointError(f"{where}: weight_scale_2 = {shortened(factor.tolist())}, expected one number; download the model again")

    def to_half_scales(stored: NDArray[np.uint8]) -> Floats:
        found: Floats = E4M3[stored] * factor[0] * np.float32(0.5)
        return found

    return read_e2m1(where, pairs, scales, to_half_scales, float(factor[0]))
