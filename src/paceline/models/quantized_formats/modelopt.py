"""ModelOpt (NVIDIA): FP8 with one scale for the matrix, NVFP4 with a scale for each group and one for the matrix."""

from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.fp8 import ACTIVATIONS_NOT_ROUNDED_NOTICE
from paceline.models.quantized_formats.module import PackedModule, QuantizedFormat
from paceline.models.quantized_formats.settings import read_choice
from paceline.models.quantized_formats.small_floats import read_e4m3, read_nvfp4
from paceline.models.storage.packed_matrix import PackedMatrix

_IGNORED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".k_proj.k_scale", ".v_proj.v_scale")
_KV_CACHE_NOTICE = "the KV cache settings are ignored: the option kv_cache_dtype sets the type of cached keys and values"


def modelopt_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format that a ModelOpt `quantization_config` describes.

    Raises:
        CheckpointError: The algorithm is not supported.
    """
    algorithm = read_choice(fields, "quant_algo", ("FP8", "NVFP4"))
    has_cache_settings = fields.values.get("kv_cache_scheme") or fields.values.get("kv_cache_quant_algo")
    notices = (ACTIVATIONS_NOT_ROUNDED_NOTICE, _KV_CACHE_NOTICE) if has_cache_settings else (ACTIVATIONS_NOT_ROUNDED_NOTICE,)
    return QuantizedFormat(f"ModelOpt, {algorithm}", (".weight_scale",), _read_matrix, _IGNORED_SUFFIXES, notices)


def _read_matrix(module: PackedModule) -> PackedMatrix:
    if module.tensor_type("weight") == "F8_E4M3":
        return read_e4m3(module, "weight_scale")
    return read_nvfp4(module, "weight", "weight_scale_2", is_divisor=False)
