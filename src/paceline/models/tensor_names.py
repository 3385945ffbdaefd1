"""Internal names of a network's tensors, such as `layers.3.q_proj.weight`, their shapes, and their names in Hugging Face checkpoints."""

from collections.abc import Mapping
from math import prod

from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.layers import (
    XIELU_PARAMETERS,
    Activation,
    AttentionConfig,
    AttentionGate,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    GatedNorm,
    LatentProjections,
    LayerConfig,
    NormOrder,
    QKNorm,
    Recurrent,
    ShortConvConfig,
)


def num_parameters(config: ModelConfig) -> int:
    return sum(map(prod, tensor_shapes(config).values()))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the network, by internal name. Matrices are [out, in]."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden)}
    if size := config.per_layer_input_size:
        shapes["layer_embedding.weight"] = (config.per_layer_vocab_size, config.num_layers * size)
        shapes |= {"layer_inputs_proj.weight": (config.num_layers * size, hidden), "layer_inputs_norm.weight": (size,)}
    for index in range(config.altup.num_streams - 1 if config.altup is not None else 0):
        shapes |= {f"altup_proj.{index}.weight": (hidden, hidden), f"altup_unembed_proj.{index}.weight": (hidden, hidden)}
    for index, layer in enumerate(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(layer, hidden).items()}
    shapes |= {f"final_norm.{kind}": (hidden,) for kind in _norm_parameters(config.layers[-1])}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.has_lm_head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def _layer_shapes(layer: LayerConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    mlp = layer.mlp
    shapes: dict[str, tuple[int, ...]] = {}
    parts = [*(["attention"] if layer.mixer is not None else []), *(["mlp"] if mlp is not None else [])]
    norms = []
    if layer.norm_order.has_input_norm:
        norms += ["attention_norm"] if layer.norm_order is NormOrder.PARALLEL else [f"{part}_norm" for part in parts]
    if layer.norm_order.has_output_norm:
        norms += [f"{part}_output_norm" for part in parts]
    shapes |= {f"{norm}.{kind}": (hidden,) for norm in norms for kind in _norm_parameters(layer)}
    for mixer in layer.mixers:
        shapes |= _attention_shapes(mixer, hidden) if isinstance(mixer, AttentionConfig) else _recurrent_shapes(mixer, hidden)
    if mlp is not None:
        shapes |= _expert_shapes(mlp, hidden) if isinstance(mlp, ExpertMLP) else _mlp_shapes(mlp, hidden)
    if layer.per_layer_input is not None:
        shapes |= {"input_gate.weight": (layer.per_layer_input.size, hidden), "input_proj.weight": (hidden, layer.per_layer_input.size)}
        shapes["input_norm.weight"] = (hidden,)
    if layer.has_output_scale:
        shapes["output_scale.weight"] = (1,)
    if layer.altup is not None:
        count = layer.altup.num_streams
        shapes |= {"altup_router_norm.weight": (hidden,), "altup_router.weight": (count, hidden)}
        shapes |= {"altup_predict.weight": (count * count, count), "altup_correct.weight": (count, count)}
        shapes["altup_output_scale.weight"] = (hidden,)
    if rank := layer.laurel_rank:
        shapes |= {"laurel_left.weight": (rank, hidden), "laurel_right.weight": (hidden, rank), "laurel_norm.weight": (hidden,)}
    return shapes


def _norm_parameters(layer: LayerConfig) -> tuple[str, ...]:
    return ("weight", "bias") if layer.has_norm_bias else ("weight",)


def _attention_shapes(mixer: AttentionConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    if mixer.latent is not None:
        return _latent_attention_shapes(mixer, mixer.latent, hidden)
    shapes: dict[str, tuple[int, ...]] = {}
    if mixer.qk_norm in (QKNorm.HEAD, QKNorm.HEAD_AFTER_ROPE):
        shapes |= {"q_norm.weight": (mixer.head_size,), "k_norm.weight": (mixer.head_size,)}
    elif mixer.qk_norm is QKNorm.ALL_HEADS:
        shapes |= {"q_norm.weight": (mixer.query_size,), "k_norm.weight": (mixer.kv_size,)}
    if mixer.has_sinks:
        shapes["attention.sinks"] = (mixer.num_heads,)
    projections = {
        "q_proj": (mixer.query_size, hidden, mixer.bias),
        "k_proj": (mixer.kv_size, hidden, mixer.bias),
        "v_proj": (mixer.kv_size, hidden, mixer.bias),
        "attention_gate": (mixer.num_heads, hidden, False) if mixer.gate is AttentionGate.HEAD else (mixer.query_size, hidden, mixer.bias),
        "o_proj": (hidden, mixer.query_size, mixer.output_bias),
    }
    absent = [*(("k_proj", "v_proj") if mixer.kv_source_layer is not None else ()), *(("v_proj",) if mixer.uses_keys_as_values else ())]
    absent += ["attention_gate"] if mixer.gate is AttentionGate.NONE else []
    shapes |= _projection_shapes({name: size for name, size in projections.items() if name not in absent})
    if mixer.kv_source_layer is not None:
        shapes.pop("k_norm.weight", None)
    return shapes


def _latent_attention_shapes(mixer: AttentionConfig, latent: LatentProjections, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of multi-head latent attention. `k_up.N` is the transposed up-projection of keys of head N."""
    heads, rank, query_input = mixer.num_heads, mixer.latent_size, latent.query_rank or hidden
    norms = {"kv_a_norm.weight": (rank,), **({"q_a_norm.weight": (latent.query_rank,)} if latent.query_rank else {})}
    matrices = {"q_a_proj": (latent.query_rank, hidden)} if latent.query_rank else {}
    matrices |= {"q_proj": (heads * latent.unrotated_size, query_input), "q_rope_proj": (heads * latent.rope_size, query_input)}
    matrices |= {"kv_a_proj": (rank, hidden), "k_rope_proj": (latent.rope_size, hidden)}
    matrices |= {f"k_up.{head}": (rank, latent.unrotated_size) for head in range(heads)}
    matrices |= {f"v_up.{head}": (latent.value_size, rank) for head in range(heads)}
    matrices["o_proj"] = (hidden, heads * latent.value_size)
    return norms | _projection_shapes({name: (*shape, False) for name, shape in matrices.items()})


def _recurrent_shapes(mixer: Recurrent, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a recurrent mixer's tensors. `decay.weight` is -exp(A_log)."""
    channels = mixer.channels
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (channels, mixer.kernel_size)}
    if isinstance(mixer, ShortConvConfig):
        shapes |= {"conv.bias": (channels,)} if mixer.bias else {}
        return shapes | _projection_shapes(dict.fromkeys(("conv_proj", "b_proj", "c_proj", "out_proj"), (hidden, hidden, mixer.bias)))
    state = mixer.state_shape
    shapes |= {"decay.weight": (state.num_heads,), "decay.bias": (state.num_heads,)}
    if isinstance(mixer, GatedDeltaConfig):
        shapes["gated_norm.weight"] = (mixer.value_size,)
        gates, bias = {"b_proj": (state.num_heads, hidden, False), "a_proj": (state.num_heads, hidden, False)}, False
    else:
        shapes |= {"conv.bias": (channels,)} if mixer.conv_bias else {}
        shapes |= {"skip.weight": (state.num_heads,)}
        shapes |= {} if mixer.norm is GatedNorm.NONE else {"gated_norm.weight": (state.value_width,)}
        gates, bias = {"dt_proj": (state.num_heads, hidden, mixer.bias)}, mixer.bias
    sizes = {"conv_proj": channels}
    if isinstance(mixer, GatedDeltaConfig) and mixer.has_separate_qkv_projections:
        sizes = {"q_proj": state.key_width, "k_proj": state.key_width, "v_proj": state.value_width}
    matrices = {name: (size, hidden, bias) for name, size in {**sizes, "z_proj": state.value_width}.items()} | gates
    return shapes | _projection_shapes({**matrices, "out_proj": (hidden, state.value_width, bias)})


def _projection_shapes(projections: Mapping[str, tuple[int, int, bool]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights and biases by tensor name. `projections`: (rows, columns, has_bias) by projection name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _mlp_shapes(mlp: DenseMLP, hidden: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
    inputs = dict.fromkeys(("gate_proj", "up_proj") if mlp.has_gate else ("up_proj",), (mlp.intermediate_size, hidden, mlp.bias))
    matrices = {**inputs, "down_proj": (hidden, mlp.intermediate_size, mlp.bias)}
    shapes = _projection_shapes({prefix + name: size for name, size in matrices.items()})
    if mlp.activation is Activation.XIELU:
        shapes |= {f"{prefix}activation.{part}": (1,) for part in XIELU_PARAMETERS}
    return shapes


def _expert_shapes(mlp: ExpertMLP, hidden: int) -> dict[str, tuple[int, ...]]:
    routing = mlp.routing
    shapes = _projection_shapes({"router": (routing.num_experts, hidden, routing.has_router_bias)})
    if routing.has_correction_bias:
        shapes["router.correction"] = (routing.num_experts,)
    if routing.has_expert_scales:
        shapes["router.scales"] = (routing.num_experts,)
    for expert in range(routing.num_experts):
        shapes |= _mlp_shapes(mlp.expert, mlp.latent_size or hidden, f"experts.{expert}.")
    if mlp.latent_size:
        shapes |= _projection_shapes({"latent_proj": (mlp.latent_size, hidden, False), "latent_output": (hidden, mlp.latent_size, False)})
    if mlp.shared_expert is not None:
        shapes |= _mlp_shapes(mlp.shared_expert, hidden, "shared_expert.")
    if mlp.has_expert_norms:
        shapes |= {f"{name}.weight": (hidden,) for name in ("router_norm", "experts_norm", "experts_output_norm", "shared_output_norm")}
    return shapes | (_projection_shapes({"shared_gate": (1, hidden, False)}) if mlp.has_shared_expert_gate else {})


_CHECKPOINT_MODULES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "layer_embedding": "model.embed_tokens_per_layer",
    "layer_inputs_proj": "model.per_layer_model_projection",
    "layer_inputs_norm": "model.per_layer_projection_norm",
    "input_gate": "per_layer_input_gate",
    "input_proj": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    "altup_proj": "model.altup_projections",
    "altup_unembed_proj": "model.altup_unembed_projections",
    "altup_router_norm": "altup.router_norm",
    "altup_router": "altup.modality_router",
    "altup_predict": "altup.prediction_coefs",
    "altup_correct": "altup.correction_coefs",
    "altup_output_scale.weight": "altup.correct_output_scale",
    "laurel_left": "laurel.linear_left",
    "laurel_right": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    "activation": "mlp.act_fn",
    "router": "mlp.gate",
    "experts": "mlp.experts",
    "shared_expert": "mlp.shared_expert",
    "shared_gate": "mlp.shared_expert_gate",
    "latent_proj": "mlp.fc1_latent_proj",
    "latent_output": "mlp.fc2_latent_proj",
    "attention": "self_attn",
    "attention_gate": "self_attn.q_proj",
    "correction": "e_score_correction_bias",
}
_LAYER_OUTPUT_SCALE_NAME = "layer_scalar"  # checkpoint name of `output_scale.weight`; it has no suffix
_OUTPUT_NORM_MODULES = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_NORM_MODULES = {
    NormOrder.PRE: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    NormOrder.PARALLEL: {"attention_norm": "input_layernorm"},
    NormOrder.POST: _OUTPUT_NORM_MODULES,
    NormOrder.SANDWICH: {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_OUTPUT_NORM_MODULES},
}


def checkpoint_names(config: ModelConfig) -> dict[str, str]:
    """Return checkpoint names by internal names, such as `model.layers.3.self_attn.q_proj.weight` for `layers.3.q_proj.weight`."""
    names, family_names = {}, FAMILIES[config.family].module_names
    names_by_layer = {layer: _layer_checkpoint_names(layer, config) for layer in dict.fromkeys(config.layers)}
    for name in tensor_shapes(config):
        if not name.startswith("layers."):
            part, *others = name.split(".")
            names[name] = ".".join([family_names.get(part, _CHECKPOINT_MODULES[part]), *others])
            continue
        _, index, *path = name.split(".")
        parts = names_by_layer[config.layers[int(index)]]
        if (whole := ".".join(path)) in parts:
            names[name] = f"model.layers.{index}.{parts[whole]}"
            continue
        first, *others = path
        is_expert = first in ("experts", "shared_expert")  # inside an expert, checkpoint names equal the internal names
        others = others if is_expert else [parts.get(part, part) for part in others]
        last = [_LAYER_OUTPUT_SCALE_NAME] if first == "output_scale" else [parts[first], *others]
        names[name] = ".".join(["model", "layers", index, *last])
    return names


def _layer_checkpoint_names(layer: LayerConfig, config: ModelConfig) -> dict[str, str]:
    """Return the checkpoint names of a layer's modules, and of tensors whose checkpoint name does not follow from their module."""
    family = FAMILIES[config.family]
    recurrent = [_recurrent_checkpoint_names(mixer, family.recurrent_module) for mixer in layer.mixers if isinstance(mixer, Recurrent)]
    attentions = [mixer for mixer in layer.mixers if isinstance(mixer, AttentionConfig)]
    latent = [_latent_checkpoint_names(mixer.latent) for mixer in attentions if mixer.latent is not None]
    modules = [_CHECKPOINT_MODULES, _NORM_MODULES[layer.norm_order], family.module_names, *recurrent, *latent]
    return {name: stored for part in modules for name, stored in part.items()}


def _latent_checkpoint_names(latent: LatentProjections) -> dict[str, str]:
    """Return the checkpoint names of latent attention. Projections that are fused in one matrix all have that matrix's name."""
    query = "q_b_proj" if latent.query_rank else "q_proj"
    matrices = {"q_a_proj": "q_a_proj", "q_proj": query, "q_rope_proj": query, "k_up": "kv_b_proj", "v_up": "kv_b_proj"}
    matrices |= dict.fromkeys(("kv_a_proj", "k_rope_proj"), "kv_a_proj_with_mqa")
    norms = {f"{part}_a_norm": f"{part}_a_layernorm" for part in ("q", "kv")}
    return {name: f"self_attn.{stored}" for name, stored in {**matrices, **norms}.items()}


def _recurrent_checkpoint_names(mixer: Recurrent, prefix: str) -> dict[str, str]:
    """Return the checkpoint names of a recurrent mixer. Projections that are fused in one matrix all have that matrix's name."""
    outputs = {"gated_norm": "norm", "out_proj": "out_proj"}
    if isinstance(mixer, GatedDeltaConfig) and mixer.has_separate_qkv_projections:
        projections = {**{name: name for name in ("q_proj", "k_proj", "v_proj", "b_proj", "a_proj")}, "z_proj": "g_proj"}
        outputs = {"gated_norm": "o_norm", "out_proj": "o_proj"}
    elif isinstance(mixer, GatedDeltaConfig):
        projections = {"conv_proj": "in_proj_qkv", "z_proj": "in_proj_z", "b_proj": "in_proj_b", "a_proj": "in_proj_a"}
    else:
        projections = dict.fromkeys(("conv_proj", "z_proj", "b_proj", "c_proj", "dt_proj"), "in_proj")
    names = {"decay.weight": "A_log", "decay.bias": "dt_bias", "skip.weight": "D", **outputs}
    names["conv"] = "conv" if isinstance(mixer, ShortConvConfig) else "conv1d"
    return {name: f"{prefix}.{stored}" for name, stored in {**projections, **names}.items()}
