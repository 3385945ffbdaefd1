"""The tensors of a network: our names for them, their shapes, and what checkpoints call them."""

from paceline.models.config import ModelConfig
from paceline.models.families import FAMILIES
from paceline.models.layers import LayerConfig, NormOrder, QKNorm


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network, by our name, with its shape; matrices are [out, in]."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden)}
    if size := config.layer_input_size:
        shapes["layer_embedding.weight"] = (config.layer_vocab_size, config.num_layers * size)
        shapes |= {"layer_inputs_proj.weight": (config.num_layers * size, hidden), "layer_inputs_norm.weight": (size,)}
    for index, layer in enumerate(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(layer, hidden).items()}
    shapes["final_norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(layer: LayerConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    mixer, mlp = layer.mixer, layer.mlp
    shapes: dict[str, tuple[int, ...]] = {}
    if layer.norm_order.in_front:
        shapes |= {"attention_norm.weight": (hidden,), "mlp_norm.weight": (hidden,)}
    if layer.norm_order.behind:
        shapes |= {"attention_output_norm.weight": (hidden,), "mlp_output_norm.weight": (hidden,)}
    if mixer.qk_norm is QKNorm.HEAD:
        shapes |= {"q_norm.weight": (mixer.head_size,), "k_norm.weight": (mixer.head_size,)}
    elif mixer.qk_norm is QKNorm.WIDTH:
        shapes |= {"q_norm.weight": (mixer.query_size,), "k_norm.weight": (mixer.kv_size,)}
    projections = {
        "q_proj": (mixer.query_size, hidden, mixer.bias),
        "k_proj": (mixer.kv_size, hidden, mixer.bias),
        "v_proj": (mixer.kv_size, hidden, mixer.bias),
        "o_proj": (hidden, mixer.query_size, mixer.output_bias),
        "gate_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "up_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "down_proj": (hidden, mlp.intermediate_size, mlp.bias),
    }
    absent = [*(("k_proj", "v_proj") if mixer.kv_layer is not None else ()), *(("v_proj",) if mixer.keys_are_values else ())]
    for name, (rows, columns, has_bias) in projections.items():
        if name in absent:
            continue
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if mixer.kv_layer is not None:
        shapes.pop("k_norm.weight", None)
    if layer.input is not None:
        shapes |= {"input_gate.weight": (layer.input.size, hidden), "input_proj.weight": (hidden, layer.input.size)}
        shapes["input_norm.weight"] = (hidden,)
    if layer.scales_output:
        shapes["output_scale.weight"] = (1,)
    return shapes


_CHECKPOINT_PARTS = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "layer_embedding": "model.embed_tokens_per_layer",
    "layer_inputs_proj": "model.per_layer_model_projection",
    "layer_inputs_norm": "model.per_layer_projection_norm",
    "input_gate": "per_layer_input_gate",
    "input_proj": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}
_SCALE = "layer_scalar"  # without .weight
_BEHIND = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_NORMS = {
    NormOrder.PRE: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    NormOrder.POST: _BEHIND,
    NormOrder.SANDWICH: {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_BEHIND},
}


def checkpoint_names(config: ModelConfig) -> dict[str, str]:
    """How Hugging Face checkpoints call our tensors: `layers.3.q_proj.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    names, own_norms = {}, FAMILIES[config.family].norm_names
    for name in tensor_shapes(config):
        *prefix, part, kind = name.split(".")
        parts = {**_CHECKPOINT_PARTS, **_NORMS[config.layers[int(prefix[1])].norm_order], **own_norms} if prefix else _CHECKPOINT_PARTS
        names[name] = ".".join((["model", *prefix] if prefix else []) + ([_SCALE] if part == "output_scale" else [parts[part], kind]))
    return names
