"""Tensor names and config fields of EAGLE heads: one form for all containers.

Sources: the reference code (`midlayer`), speculators 0.1 and 0.2 (`transformer`, `fusion_fc`, `embedding_layernorm`,
`pre_lm_head_layernorm`), HASS as it is trained in speculators' research/hass (`embed_layernorm`, `hidden_layernorm`,
`lm_head_layernorm`), and vLLM's model of EAGLE (`enorm`, `hnorm`, and a config that nests the layer's in `model`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.drafters.head_files import HeadFiles
from paceline.errors import CheckpointError
from paceline.models.json_fields import JsonFields
from paceline.models.storage.tensor_file import FileTensor

DEFAULT_POSITIONS = 2048  # what a config without a length means
_ALIASES = {
    "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc.",
    "embed_layernorm.": "embedding_layernorm.", "enorm.": "embedding_layernorm.",
    "hidden_layernorm.": "hidden_states_layernorm.", "hnorm.": "hidden_states_layernorm.",
    "lm_head_layernorm.": "norm.", "pre_lm_head_layernorm.": "norm.",
}  # fmt: skip
_PARTS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "hidden_norm": "hidden_norm",
    **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")},
}
_OURS = {
    "embed_tokens": "embedding", "norm": "final_norm", "lm_head": "lm_head", "fc": "fc", "input_norm": "input_norm",
    "embedding_layernorm": "embedding_norm", "hidden_states_layernorm": "feature_norm",
}  # fmt: skip


def plain_files(files: HeadFiles) -> HeadFiles:
    """The same files, with one name per tensor where containers differ.

    Raises:
        CheckpointError: a tensor is there under two names.
    """
    renamed: dict[str, FileTensor] = {}
    for name, tensor in files.tensors.items():
        alias = next((alias for alias in _ALIASES if name.startswith(alias)), None)
        plain = name if alias is None else _ALIASES[alias] + name.removeprefix(alias)
        if plain in renamed:
            raise CheckpointError(f"{files.path} holds {plain} under two names, one of them {name}: the file is damaged, download it again")
        renamed[plain] = tensor
    return replace(files, tensors=renamed)


def our_name(name: str) -> str:
    """The name in `network.py` of a tensor of the file."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"layers.{layer}.{_PARTS[part]}.{kind}"
    return f"{_OURS.get(stem, stem)}.{kind}"


def is_nested(files: HeadFiles) -> bool:
    """Whether the config is vLLM's own, with that of the layer in `model`."""
    return isinstance(files.config.get("model"), Mapping)


def config_fields(files: HeadFiles) -> JsonFields:
    """The values of config.json, nested ones included; `model_type` is the layer's."""
    path = files.path / "config.json" if files.path.is_dir() else files.path.with_name("config.json")
    if not files.config:
        raise CheckpointError(f"{path} is missing: an EAGLE head's sizes stand there; download it with the weights")
    nested = files.config.get("model" if is_nested(files) else "transformer_layer_config")
    layer = nested if isinstance(nested, Mapping) else {}
    values: dict[str, Any] = {
        "max_position_embeddings": files.config.get("max_sequence_length", DEFAULT_POSITIONS),
        **layer,
        **files.config,
    }
    values["model_type"] = layer.get("model_type", files.config.get("model_type"))
    if is_nested(files):
        values.setdefault("bias", values.get("eagle_fc_bias", False))
    for key in ("rope_scaling", "rope_parameters"):
        values[key] = _plain_rope(values.get(key))
    return JsonFields(values, path)


def _plain_rope(values: object) -> object:
    """Given parameters per layer type, those of sliding layers, which speculators uses for all. For text, mrope equals plain rope."""
    if not isinstance(values, Mapping):
        return values
    own = values.get("sliding_attention")
    values = own if isinstance(own, Mapping) else values
    if values.get("rope_type", values.get("type")) != "mrope":
        return values
    return {"rope_theta": values["rope_theta"]} if "rope_theta" in values else None
