"""Nemotron-H: each layer is either a mixer or an MLP, with one norm before it."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.families.experts import grouped_topk_routing
from paceline.models.families.family import Family, GgufFormat, special_ids
from paceline.models.families.hybrids import MAMBA_METADATA_KEYS, gguf_layer_count, layers_with_attention, mamba_gguf_fields, mamba_mixer
from paceline.models.gguf.fields import GatingFunction, GgufFields
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import MAX_HEAD_SIZE, MAX_LAYERS, LayerBuilder
from paceline.models.layers import ExpertMLP, LayerConfig, Mamba2Config

_LETTER_LAYER_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_LAYER_TYPE_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def _nemotron_h_layers(builder: LayerBuilder) -> tuple[LayerConfig, ...]:
    """Return the layers that config.json lists.

    Source: Nemotron-H's model in transformers 5.23. Deviation: its lower limit of dt during prefill is ignored.
    """
    fields, kinds = builder.fields, _read_layer_types(builder.fields)
    if "full_attention" not in kinds:
        raise CheckpointError(f"{fields.path}: no layer has attention: at least one is needed")
    layers_by_type: dict[str, LayerConfig] = {}
    for kind in dict.fromkeys(kinds):
        if kind in ("mlp", "moe"):
            layers_by_type[kind] = LayerConfig(mixer=None, mlp=_expert_mlp(builder) if kind == "moe" else builder.mlp(has_gate=False))
        else:
            attention = builder.attention(has_rope_embedding=False)
            layers_by_type[kind] = LayerConfig(mixer=_mamba_mixer(builder) if kind == "linear_attention" else attention, mlp=None)
    return tuple(layers_by_type[kind] for kind in kinds)


def _read_layer_types(fields: JsonFields) -> list[str]:
    """Return the type of each layer, from a list of types or a pattern with a letter for each layer."""
    listed = fields.values.get("layers_block_type", fields.values.get("layer_types"))
    pattern = fields.values.get("hybrid_override_pattern")
    if listed is None and isinstance(pattern, str):
        listed = [_LETTER_LAYER_TYPES.get(letter, letter) for letter in pattern]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_LAYERS:
        raise CheckpointError(f"{fields.path}: layers_block_type = {shortened(listed)}, expected a list of 1 to {MAX_LAYERS} layers")
    kinds = [_OLD_LAYER_TYPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]
    supported = _LETTER_LAYER_TYPES.values()
    for kind in kinds:
        if not isinstance(kind, str) or kind not in supported:
            raise CheckpointError(f"{fields.path} names a layer {shortened(kind)}, supported are {', '.join(supported)}")
    return kinds


def _mamba_mixer(builder: LayerBuilder) -> Mamba2Config:
    fields = builder.fields
    if fields.values.get("mamba_hidden_act") not in (None, "silu", "swish"):
        raise CheckpointError(
            f"{fields.path}: mamba_hidden_act = {shortened(fields.values['mamba_hidden_act'])} is not supported, only 'silu' is"
        )
    return mamba_mixer(builder, head_size=fields.integer("mamba_d_head", maximum=MAX_HEAD_SIZE), bias=builder.flag("use_bias"))


def _expert_mlp(builder: LayerBuilder) -> ExpertMLP:
    latent = builder.fields.values.get("moe_latent_size")
    return ExpertMLP(
        routing=grouped_topk_routing(builder),
        expert=builder.mlp(width_field="moe_intermediate_size", has_gate=False),
        shared_expert=builder.mlp(width_field="moe_shared_expert_intermediate_size", has_gate=False),
        latent_size=0 if latent is None else builder.fields.integer("moe_latent_size"),
    )


def _nemotron_h_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Nemotron-H's own config.json fields. Layers without KV heads and without an MLP width have a Mamba-2 mixer."""
    num_layers = gguf_layer_count(fields, config["num_hidden_layers"])
    widths = fields.architecture_value("feed_forward_length")
    if not isinstance(widths, list) or len(widths) < num_layers:
        fields.raise_invalid("feed_forward_length", widths, f"a number for each of {num_layers} layers, 0 for those without an MLP")
    kinds = []
    for layer, has_attention in enumerate(layers_with_attention(fields, num_layers)):
        mlp = "moe" if fields.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") else "mlp"
        kinds.append("full_attention" if has_attention else mlp if widths[layer] else "linear_attention")
    mamba = mamba_gguf_fields(fields, num_layers)
    values = {"num_hidden_layers": num_layers, "layers_block_type": kinds, "use_bias": mamba.pop("mamba_proj_bias"), **mamba}
    if fields.architecture_value("expert_count"):
        num_groups = fields.count("expert_group_count", 1)
        values |= {
            **fields.read_experts(is_normalized=True, gating=(GatingFunction.SIGMOID,)),
            "moe_shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length"),
            "moe_latent_size": fields.architecture_value("moe_latent_size") or None,
            "n_group": num_groups,
            "topk_group": fields.count("expert_group_used_count", 1 if num_groups == 1 else None),
            "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        }
    return values


FAMILIES = (
    Family(
        name="nemotron_h",
        architecture="NemotronHForCausalLM",
        model_names="Nemotron-H, Nemotron Nano 2, Nemotron 3",
        build_layers=_nemotron_h_layers,
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "mamba_d_state": 128,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_conv": 4,
            "n_routed_experts": 8,
            "mlp_hidden_act": "relu2",
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            **special_ids(1, 2),
        },
        module_names={
            "embedding": "model.embeddings",
            "final_norm": "model.norm_f",
            "attention_norm": "norm",
            "mlp_norm": "norm",
            **{name: f"mixer.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "experts")},
            "router": "mixer.gate",
            "shared_expert": "mixer.shared_experts",
            "latent_proj": "mixer.fc1_latent_proj",
            "latent_output": "mixer.fc2_latent_proj",
        },
        activation_field="mlp_hidden_act",
        recurrent_module="mixer",
        count_layers=lambda fields: len(_read_layer_types(fields)),
        field_aliases={
            "layer_norm_epsilon": "rms_norm_eps",
            "mamba_num_heads": "mamba_n_heads",
            "mamba_head_dim": "mamba_d_head",
            "ssm_state_size": "mamba_d_state",
            "n_groups": "mamba_n_groups",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "mamba_dt_limit": "time_step_limit",
        },
        gguf=GgufFormat(
            architectures=("nemotron_h", "nemotron_h_moe"),
            read_extra_fields=_nemotron_h_gguf_fields,
            metadata_keys={
                **MAMBA_METADATA_KEYS,
                "layers_block_type": "feed_forward_length",
                "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            },
            module_names={"mlp_norm": "attn_norm"},
            has_rope=False,
            allows_zero_layer_sizes=True,
            norm_eps_key="attention.layer_norm_epsilon",
        ),
    ),
)
