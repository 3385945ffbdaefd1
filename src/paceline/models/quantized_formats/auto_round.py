"""AutoRound. Its tensors have the format of GPTQ or AWQ; only its settings in config.json differ."""

from collections.abc import Callable, Mapping

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats import awq, gptq
from paceline.models.quantized_formats.module import QuantizedFormat
from paceline.models.quantized_formats.settings import read_choice

_TOOL_NAME = "AutoRound"
_PACKINGS: Mapping[str, Callable[[JsonFields], QuantizedFormat]] = {
    "auto_round": lambda fields: gptq.gptq_layout_format(fields, _TOOL_NAME, is_gptq_v2=True),
    "auto_round:gptqmodel": lambda fields: gptq.gptq_layout_format(fields, _TOOL_NAME, is_gptq_v2=True),
    "auto_round:auto_gptq": lambda fields: gptq.gptq_layout_format(fields, _TOOL_NAME, is_gptq_v2=False),
    "auto_round:gptq": lambda fields: gptq.gptq_layout_format(fields, _TOOL_NAME, is_gptq_v2=False),
    "auto_round:auto_awq": lambda fields: awq.awq_layout_format(fields, _TOOL_NAME),
    "auto_round:awq": lambda fields: awq.awq_layout_format(fields, _TOOL_NAME),
}


def auto_round_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format that an AutoRound `quantization_config` describes.

    Raises:
        CheckpointError: The bits, the group size or the packing is not supported.

    Source: auto_round/inference/backend.py of AutoRound 0.16, which shows the packings that store zero points minus 1.
    """
    packing = fields.values.get("packing_format") or fields.values.get("backend") or "auto_round:auto_gptq"
    read_choice(fields, "data_type", ("int",), default="int")
    make_format = _PACKINGS.get(packing) if isinstance(packing, str) else None
    if make_format is None:
        known = ", ".join(_PACKINGS)
        raise CheckpointError(f"{fields.path}: AutoRound's packing_format = {shortened(packing)} is not supported, only {known}")
    return make_format(fields)
