"""ModelOpt (NVIDIA): FP8 with one scale for the tensor, NVFP4 with scales for groups and for the tensor."""

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.containers.fp8 import ACTIVATION_NOTICE
from paceline.models.containers.module import Container, PackedModule
from paceline.models.containers.settings import one_of
from paceline.models.containers.small_floats import E4M3, e2m1_groups, scaled_e4m3, scales_to_float32
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import Floats, PackedMatrix

_IGNORED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".k_proj.k_scale", ".v_proj.v_scale")
_CACHE_NOTICE = "its scheme for the cache is left out: keys and values are kept as they are"


def modelopt(fields: JsonFields) -> Container:
    """Return the container of a ModelOpt `quantization_config`.

    Raises:
        CheckpointError: The algorithm is not supported.
    """
    algorithm = one_of(fields, "quant_algo", ("FP8", "NVFP4"))
    has_cache = bool(fields.values.get("kv_cache_scheme") or fields.values.get("kv_cache_quant_algo"))
    return Container(
        f"ModelOpt, {algorithm}", (".weight_scale",), _read, _IGNORED_SUFFIXES, (ACTIVATION_NOTICE, *([_CACHE_NOTICE] if has_cache else []))
    )


def _read(module: PackedModule) -> PackedMatrix:
    if module.type_of("weight") == "F8_E4M3":
        return scaled_e4m3(module, scales_to_float32(module.floats("weight_scale", ndim=None), None), None)
    where, pairs = module.where("weight"), module.take("weight", "U8")
    scales = module.take("weight_scale", "F8_E4M3")
    factor = module.floats("weight_scale_2", ndim=None).astype(np.float32).reshape(-1)
    if factor.size != 1:
        raise CheckpointError(f"{where}: weight_scale_2 = {shortened(factor.tolist())}, expected one number; download the model again")

    def half(own: NDArray[np.uint8]) -> Floats:
        found: Floats = E4M3[own] * factor[0] * np.float32(0.5)
        return found

    return e2m1_groups(where, pairs, scales, half, float(factor[0]))
