"""Read the adapter_config.json of a LoRA adapter, and refuse unsupported settings.

Source: PEFT 0.21, `LoraConfig`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CheckpointError, shortened
from paceline.models.adapters.patterns import ModuleSelector
from paceline.models.json_fields import MAX_FLOAT32, JsonFields
from paceline.small_files import read_json

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 2**20
_UNSUPPORTED_KEYS = (
    "use_dora", "layer_replication", "alora_invocation_tokens", "alora_invocation_string", "trainable_token_indices", "use_qalora",
    "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config", "enable_lora",
)  # fmt: skip
_IGNORED_KEYS = (
    "auto_mapping", "base_model_name_or_path", "base_model_class", "parent_library", "revision", "task_type", "inference_mode",
    "peft_version", "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "runtime_config", "qalora_group_size", "merge_weights", "target_modules_to_tie", "modules_to_tie",
)  # fmt: skip
_SUPPORTED_KEYS = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules", "target_parameters",
    "layers_to_transform", "layers_pattern", "bias", "lora_bias", "modules_to_save", "init_lora_weights", "ensure_weight_tying",
    "fan_in_fan_out",
)  # fmt: skip
_SUPPORTED_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that do not change the base model's weights."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The settings of a LoRA adapter.

    Attributes:
        path: path of the adapter_config.json.
        base_model: base_model_name_or_path, for errors.
        rank, alpha: rank and alpha of modules that no pattern in `rank_pattern` or `alpha_pattern` matches.
        rank_pattern, alpha_pattern: rank and alpha by pattern of module names, in the order of the file.
        is_rank_stabilized: use_rslora: the scale is alpha / sqrt(rank) instead of alpha / rank.
        module_selector: selects the modules that the adapter changes.
        target_parameters: suffixes of parameters that the adapter changes in addition to modules.
        has_low_rank_biases: lora_bias: each lora_B has a bias.
        changes_tied_lm_head: ensure_weight_tying: the adapter's changes to the embedding also apply to an lm_head that is tied to it.
    """

    path: Path
    base_model: str | None
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    is_rank_stabilized: bool
    module_selector: ModuleSelector
    target_parameters: tuple[str, ...]
    has_low_rank_biases: bool
    changes_tied_lm_head: bool

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of lora_B @ lora_A: alpha / rank, or with `use_rslora` alpha / sqrt(rank)."""
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_settings(directory: Path) -> AdapterSettings:
    """Read the settings of the adapter in a directory.

    Raises:
        CheckpointError: The file is missing, a value is out of range, or a setting is not supported.
    """
    path = directory / CONFIG_FILE
    values = read_json(path)
    if values is None:
        raise CheckpointError(
            f"{directory} holds no {CONFIG_FILE}: give the directory of a LoRA adapter as PEFT's save_pretrained() writes it, "
            "with adapter_model.safetensors"
        )
    fields = JsonFields(values, path)
    _refuse_unsupported_settings(fields)
    base_model = values.get("base_model_name_or_path")
    return AdapterSettings(
        path=path,
        base_model=base_model if isinstance(base_model, str) and base_model else None,
        rank=fields.integer("r", 8, maximum=MAX_RANK),
        alpha=fields.number("lora_alpha", 8.0),
        rank_pattern={name: _check_rank(fields, name, value) for name, value in _read_pattern_table(fields, "rank_pattern").items()},
        alpha_pattern={name: _check_alpha(fields, name, value) for name, value in _read_pattern_table(fields, "alpha_pattern").items()},
        is_rank_stabilized=fields.flag("use_rslora", default=False),
        module_selector=ModuleSelector(
            path=path,
            target_modules=_read_regex_or_names(fields, "target_modules"),
            exclude_modules=_read_regex_or_names(fields, "exclude_modules"),
            modules_to_save=tuple(_read_names(fields, "modules_to_save")),
            layers_to_transform=_read_layer_indices(fields),
            layers_pattern=tuple(_read_names(fields, "layers_pattern")),
        ),
        target_parameters=tuple(_read_names(fields, "target_parameters")),
        has_low_rank_biases=fields.flag("lora_bias", default=False),
        changes_tied_lm_head=fields.flag("ensure_weight_tying", default=False),
    )


def _refuse_unsupported_settings(fields: JsonFields) -> None:
    peft_type = fields.values.get("peft_type", "LORA")
    if peft_type == "XLORA":
        raise CheckpointError(
            f"{fields.path}: peft_type = 'XLORA': what X-LoRA adds depends on the text, so it can neither be merged nor be part of another "
            "X-LoRA adapter; load it next to the model (adapters, --adapter)"
        )
    if peft_type != "LORA":
        raise CheckpointError(
            f"{fields.path}: peft_type = {shortened(peft_type)} is not supported, only 'LORA' and 'XLORA' are: use a plain LoRA adapter"
        )
    for name in _UNSUPPORTED_KEYS:
        if fields.values.get(name):
            raise CheckpointError(
                f"{fields.path}: {name} = {shortened(fields.values[name])} is not supported: it computes something else than plain LoRA; "
                "merge the adapter into its model with PEFT (merge_and_unload()) and use the result"
            )
    known = {*_UNSUPPORTED_KEYS, *_IGNORED_KEYS, *_SUPPORTED_KEYS}
    unknown = [name for name, value in fields.values.items() if value and name not in known]
    if unknown:
        raise CheckpointError(
            f"{fields.path}: {', '.join(map(shortened, unknown[:20]))} are set, which no known LoRA adapter has: they may change the "
            "result; remove those that do not, or merge the adapter into its model with PEFT"
        )
    init = fields.values.get("init_lora_weights", True)
    if not any(type(init) is type(supported) and init == supported for supported in (*_SUPPORTED_INITS, None)):
        raise CheckpointError(
            f"{fields.path}: init_lora_weights = {shortened(init)} changed the model's own weights when training began: save the adapter "
            "again with PEFT's path_initial_model_for_weight_conversion, which converts it to a plain LoRA adapter"
        )
    bias = fields.values.get("bias", "none")
    if bias not in ("none", "all", "lora_only", None):
        raise CheckpointError(f"{fields.path}: bias = {shortened(bias)}, expected none, all or lora_only")
    fields.flag("fan_in_fan_out", default=False)  # only the type is checked: PEFT ignores the value for all supported models


def _read_names(fields: JsonFields, name: str) -> list[str]:
    """Return the names in a field whose value is a list of names, a single name or null."""
    value = fields.values.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise CheckpointError(f"{fields.path}: {name} = {shortened(value)}, expected a name or a list of names")
    return found


def _read_regex_or_names(fields: JsonFields, name: str) -> str | tuple[str, ...]:
    """Return a field's value: a regular expression as text, or names as a tuple."""
    value = fields.values.get(name)
    return value if isinstance(value, str) and value else tuple(_read_names(fields, name) if value else ())


def _read_layer_indices(fields: JsonFields) -> tuple[int, ...]:
    value = fields.values.get("layers_to_transform")
    found = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(one) is int and one >= 0 for one in found):
        raise CheckpointError(f"{fields.path}: layers_to_transform = {shortened(value)}, expected a layer or a list of layers")
    return tuple(found)


def _read_pattern_table(fields: JsonFields, name: str) -> Mapping[str, object]:
    value = fields.values.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{fields.path}: {name} = {shortened(value)}, expected an object of modules' names")
    return value


def _check_rank(fields: JsonFields, name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise CheckpointError(f"{fields.path}: rank_pattern gives {shortened(name)} the rank {shortened(value)}, expected 1 to {MAX_RANK}")
    return value


def _check_alpha(fields: JsonFields, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        raise CheckpointError(
            f"{fields.path}: alpha_pattern gives {shortened(name)} the alpha {shortened(value)}, expected a number from "
            f"-{MAX_FLOAT32:.3g} to {MAX_FLOAT32:.3g} (float32)"
        )
    return float(value)
