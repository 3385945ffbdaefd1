"""ModelOpt (NVIDIA): FP8 with one scale for the matrix, NVFP4 with a scale for each group and one for the matrix."""

from paceline.models.containers.fp8 import ACTIVATION_NOTICE
from paceline.models.containers.module import Container, PackedModule
from paceline.models.containers.settings import read_choice
from paceline.models.containers.small_floats import read_e4m3, read_nvfp4
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import PackedMatrix

_IGNORED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".k_proj.k_scale", ".v_proj.v_scale")
_CACHE_NOTICE = "the KV cache settings are ignored: the option kv_cache_dtype sets the type of cached keys and values"


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
        return read_e4m3(module, "weight_scale")
    return read_nvfp4(module, "weight", "weight_scale_2", is_divisor=False)
