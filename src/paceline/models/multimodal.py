"""Read the config of the text model from the config.json of a multimodal model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import CheckpointError, shortened

_MROPE_TYPE = "mrope"


@dataclass(frozen=True, slots=True)
class MultimodalModel:
    """How a multimodal config.json describes its text model.

    Attributes:
        text_model_type: `model_type` of the text model; None = `text_config` names it.
        default_text_model_type: `model_type` of the text model if `text_config` does not name it.
        text_config_defaults: defaults of the configuration class in transformers that differ from those of the text model's family.
        may_have_flat_config: old files may have no `text_config`; the text model's fields are then at the top level.
    """

    text_model_type: str | None = None
    default_text_model_type: str = "llama"
    text_config_defaults: Mapping[str, Any] = field(default_factory=dict)
    may_have_flat_config: bool = False


_QWEN2_VL_MODEL = MultimodalModel(
    "qwen2",
    text_config_defaults={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_window_layers": 80,
    },
    may_have_flat_config=True,
)
MULTIMODAL_MODELS: Mapping[str, MultimodalModel] = {
    "gemma3": MultimodalModel("gemma3_text"),
    "gemma3n": MultimodalModel("gemma3n_text"),
    "gemma4": MultimodalModel("gemma4_text"),
    "gemma4_unified": MultimodalModel("gemma4_unified_text"),
    "qwen3_5": MultimodalModel("qwen3_5_text"),
    "qwen3_5_moe": MultimodalModel("qwen3_5_moe_text"),
    "mistral3": MultimodalModel(default_text_model_type="mistral"),
    "qwen2_vl": _QWEN2_VL_MODEL,
    "qwen2_5_vl": _QWEN2_VL_MODEL,
    "qwen3_vl": MultimodalModel("qwen3", text_config_defaults={"rope_theta": 5e5, "max_position_embeddings": 128000}),
    "llava": MultimodalModel(),
    "llava_next": MultimodalModel(),
    "llava_onevision": MultimodalModel(default_text_model_type="qwen2"),
    "vipllava": MultimodalModel(),
    "internvl": MultimodalModel(default_text_model_type="qwen2"),
    "idefics3": MultimodalModel(),
    "smolvlm": MultimodalModel(),
    "lfm2_vl": MultimodalModel(default_text_model_type="lfm2"),
    "muse_glimmer": MultimodalModel("muse_glimmer_text"),
}
"""Supported multimodal models, by their `model_type`."""

_DEFAULT_SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Sizes that published files may leave out, because configuration classes in transformers have these defaults."""


def text_model_fields(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json fields of the text model: `values` itself unless the model is multimodal."""
    text, model_type = values.get("text_config"), values.get("model_type")
    model = MULTIMODAL_MODELS.get(model_type) if isinstance(model_type, str) else None
    if model is not None and text is not None and not isinstance(text, Mapping):
        raise CheckpointError(
            f"text_config of a {model_type} model is {shortened(text)}: it must be an object; use another copy of the model"
        )
    if model is None:
        return values
    if text is None and not model.may_have_flat_config:
        raise CheckpointError(
            f"config.json of a {model_type} model has no text_config, which holds the values of its language model: use a complete copy "
            "of the model, or the language model alone"
        )
    text = {} if text is None else text
    outer = {name: value for name, value in values.items() if name not in ("text_config", "vision_config", "architectures")}
    text_model_type = model.text_model_type or text.get("model_type") or model.default_text_model_type
    # eos_token_id at the top level takes precedence; quantisation settings at the top level are used if text_config has none.
    outer_names = ("eos_token_id", "quantization_config", "quantization")
    from_outer = {
        name: outer[name] for name in outer_names if outer.get(name) is not None and (name == "eos_token_id" or not text.get(name))
    }
    sizes = _DEFAULT_SIZES.get(text_model_type, {}) if isinstance(text_model_type, str) else {}
    found = {**sizes, **model.text_config_defaults, **outer, **text, **from_outer, "model_type": text_model_type}
    for name in ("rope_scaling", "rope_parameters"):  # for text tokens mrope's three position ids are equal, which is ordinary rope
        if isinstance(found.get(name), Mapping) and _MROPE_TYPE in (found[name].get("type"), found[name].get("rope_type")):
            found[name] = {**found[name], "type": "default", "rope_type": "default"}
    return found


def has_conflicting_tied_embeddings(values: Mapping[str, Any]) -> bool:
    """Return whether `tie_word_embeddings` differs between the top level and `text_config`."""
    text = values.get("text_config")
    if text_model_fields(values) is values or not isinstance(text, Mapping):
        return False
    outer, inner = values.get("tie_word_embeddings"), text.get("tie_word_embeddings")
    return outer is not None and inner is not None and outer != inner
