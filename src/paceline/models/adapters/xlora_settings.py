"""What the adapter_config.json of an X-LoRA adapter says, and what is refused of it.

Source: PEFT 0.21, `XLoraConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CheckpointError, shortened
from paceline.models.adapters.settings import CONFIG
from paceline.models.json_fields import JsonFields
from paceline.small_files import read_json

MAX_DEPTH, MAX_SIZE, MAX_ADAPTERS = 64, 2**20, 256
LEAST_TEMPERATURE = 2.0**-126
"""Smaller ones are no normal float32, in which scalings are computed."""
_READ = (
    "peft_type", "hidden_size", "adapters", "enable_softmax", "enable_softmax_topk", "layerwise_scalings", "xlora_depth", "xlora_size",
    "xlora_dropout_p", "softmax_temperature", "top_k_lora", "scaling_pass_value", "global_scaling_weight", "use_bias",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "base_model_class", "parent_library", "revision", "task_type", "inference_mode",
    "peft_version", "use_trainable_adapters",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class XLoraSettings:
    """What an adapter_config.json says of the mixture.

    Attributes:
        path: that file.
        hidden_size: width of the hidden states that the classifier reads.
        adapters: where the settings say that each adapter lies, in the order of the classifier's outputs.
        depth, size: layers of the classifier, and the width between them.
        has_dropout: whether its layers are numbered with a dropout between them.
        has_layerwise_scalings: every adapted matrix has scalings of its own.
        temperature: of the softmax; None = there is none.
        top_k: scalings that stay; None = all.
        has_softmax_of_top_k: they go through a softmax of their own.
        pass_scaling: every scaling of the scaling pass, as the products get it.
        global_weight: what all products are multiplied by besides.
    """

    path: Path
    hidden_size: int
    adapters: tuple[str, ...]
    depth: int
    size: int
    has_dropout: bool
    has_layerwise_scalings: bool
    temperature: float | None
    top_k: int | None
    has_softmax_of_top_k: bool
    pass_scaling: float
    global_weight: float


def is_xlora(directory: Path) -> bool:
    """Whether a directory says that it holds an X-LoRA adapter; False where it holds no adapter at all.

    Raises:
        CheckpointError: its adapter_config.json cannot be read.
    """
    values = read_json(directory / CONFIG)
    return values is not None and values.get("peft_type") == "XLORA"


def read_xlora_settings(directory: Path) -> XLoraSettings:
    """The settings of the X-LoRA adapter in a directory.

    Raises:
        CheckpointError: a value is absurd, or asks for something that is not computed here.
    """
    path = directory / CONFIG
    values = read_json(path) or {}
    fields = JsonFields(values, path)
    unknown = [name for name, value in values.items() if value and name not in (*_READ, *_WITHOUT_EFFECT)]
    if unknown:
        raise CheckpointError(
            f"{path}: {', '.join(map(shortened, unknown[:20]))} are set, which no known X-LoRA adapter has: they may change what it "
            "computes; remove what does not"
        )
    if not fields.flag("use_bias", default=True):
        raise CheckpointError(f"{path}: use_bias is false, and PEFT's classifier has biases: save the adapter again with PEFT 0.21")
    adapters = _adapters(fields)
    top_k = None if values.get("top_k_lora") is None else fields.size("top_k_lora", most=len(adapters))
    has_softmax_of_top_k = fields.flag("enable_softmax_topk", default=False)
    return XLoraSettings(
        path=path,
        hidden_size=fields.size("hidden_size", 4096),
        adapters=adapters,
        depth=fields.size("xlora_depth", 1, most=MAX_DEPTH),
        size=fields.size("xlora_size", 2048, most=MAX_SIZE),
        has_dropout=fields.number("xlora_dropout_p", 0.2) > 0.0,
        has_layerwise_scalings=fields.flag("layerwise_scalings", default=False),
        temperature=_temperature(fields) if fields.flag("enable_softmax", default=True) else None,
        top_k=top_k,
        has_softmax_of_top_k=has_softmax_of_top_k,
        pass_scaling=_pass_scaling(fields, len(adapters), top_k, has_softmax_of_top_k=has_softmax_of_top_k),
        global_weight=fields.number("global_scaling_weight", 1.0),
    )


def _adapters(fields: JsonFields) -> tuple[str, ...]:
    """PEFT loads the adapters under their numbers and then asks for them by these names: others it does not find."""
    found = fields.values.get("adapters")
    if not isinstance(found, Mapping) or not found or len(found) > MAX_ADAPTERS or not all(isinstance(one, str) for one in found.values()):
        raise CheckpointError(
            f"{fields.path}: adapters = {shortened(found)}, expected an object of 1 to {MAX_ADAPTERS} names with a directory each"
        )
    if list(found) != [str(number) for number in range(len(found))]:
        raise CheckpointError(
            f"{fields.path}: adapters are called {', '.join(map(shortened, list(found)[:20]))}, and PEFT finds those alone that are called "
            f'by their numbers: call them "0" to "{len(found) - 1}", in the order of the classifier\'s outputs'
        )
    return tuple(found.values())


def _temperature(fields: JsonFields) -> float:
    temperature = fields.number("softmax_temperature", 1.0)
    if temperature < LEAST_TEMPERATURE:
        raise CheckpointError(
            f"{fields.path}: softmax_temperature = {temperature:g}, expected a number of at least {LEAST_TEMPERATURE:.3g}"
        )
    return temperature


def _pass_scaling(fields: JsonFields, num_adapters: int, top_k: int | None, *, has_softmax_of_top_k: bool) -> float:
    """The value of the scaling pass behind what becomes of all scalings: top-k and its softmax."""
    if "scaling_pass_value" in fields.values and fields.values["scaling_pass_value"] is None:
        raise CheckpointError(
            f"{fields.path}: scaling_pass_value is null, with which PEFT computes nothing: write the number, such as {1 / num_adapters:g} "
            "(1 / number of adapters) or 0"
        )
    value = fields.number("scaling_pass_value", 0.0)
    if value == 0.0:
        return 0.0
    if top_k is not None and top_k < num_adapters:
        raise CheckpointError(
            f"{fields.path}: scaling_pass_value = {value:g} with top_k_lora = {top_k} of {num_adapters}: all scalings of that pass are "
            "equal, and which of them are the largest is not defined; set one of the two to what the other was trained with, 0 or null"
        )
    return 1.0 / num_adapters if has_softmax_of_top_k else value
