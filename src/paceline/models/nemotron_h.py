"""Nemotron-H: a layer is a mixer or an MLP, each behind one norm."""

from dataclasses import replace

from paceline.errors import CheckpointError, shortened
from paceline.models.expert_families import grouped_routing
from paceline.models.family import Family
from paceline.models.hybrid_families import mamba_mixer
from paceline.models.json_fields import JsonFields
from paceline.models.layer_reader import MAX_HEAD_SIZE, MAX_LAYERS, LayerReader
from paceline.models.layers import Activation, DenseMLP, ExpertMLP, LayerConfig, Mamba2Config

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h_layers(read: LayerReader) -> tuple[LayerConfig, ...]:
    """The layers that the metadata lists.

    Source: Nemotron-H's model in transformers 5.23, without its floor under the steps of prompts, which its own decoding has not.
    """
    fields, kinds = read.fields, _kinds(read.fields)
    if "full_attention" not in kinds:
        raise CheckpointError(f"{fields.path}: no layer has attention: at least one of the layers needs it")
    known: dict[str, LayerConfig] = {}
    for kind in dict.fromkeys(kinds):
        if kind in ("mlp", "moe"):
            known[kind] = LayerConfig(mixer=None, mlp=_experts(read) if kind == "moe" else _mlp(read, "intermediate_size"))
        else:
            attention = replace(read.attention(), rotates=False)
            known[kind] = LayerConfig(mixer=_mamba(read) if kind == "linear_attention" else attention, mlp=None)
    return tuple(known[kind] for kind in kinds)


def _kinds(fields: JsonFields) -> list[str]:
    """A list of layers, or a pattern of letters."""
    listed = fields.values.get("layers_block_type", fields.values.get("layer_types"))
    pattern = fields.values.get("hybrid_override_pattern")
    if listed is None and isinstance(pattern, str):
        listed = [_KINDS.get(letter, letter) for letter in pattern]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_LAYERS:
        raise CheckpointError(f"{fields.path}: layers_block_type = {shortened(listed)}, expected a list of 1 to {MAX_LAYERS} layers")
    kinds = [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KINDS.values():
            raise CheckpointError(
                f"{fields.path} names a layer {shortened(kind)}, which is not supported; supported are {', '.join(_KINDS.values())}"
            )
    return kinds


def _mamba(read: LayerReader) -> Mamba2Config:
    fields = read.fields
    if fields.values.get("mamba_hidden_act") not in (None, "silu", "swish"):
        raise CheckpointError(
            f"{fields.path}: mamba_hidden_act = {shortened(fields.values['mamba_hidden_act'])} is not supported, only 'silu' is"
        )
    names = {"heads": "mamba_num_heads", "groups": "n_groups", "state": "ssm_state_size", "kernel": "conv_kernel"}
    size = fields.size("mamba_head_dim", most=MAX_HEAD_SIZE)
    return mamba_mixer(read, names, head_size=size, conv_bias=fields.flag("use_conv_bias", default=True), bias=read.flag("use_bias"))


def _mlp(read: LayerReader, size: str) -> DenseMLP:
    fields, name = read.fields, read.fields.values.get("mlp_hidden_act", "relu2")
    if name != "relu2":
        raise CheckpointError(f"{fields.path}: mlp_hidden_act = {shortened(name)} is not supported, only 'relu2' is")
    if read.flag("mlp_bias"):
        raise CheckpointError(f"{fields.path}: mlp_bias = true is not supported for {read.family.name}, only false is")
    return DenseMLP(intermediate_size=fields.size(size), activation=Activation.RELU, has_gate=False)


def _experts(read: LayerReader) -> ExpertMLP:
    latent = read.fields.values.get("moe_latent_size")
    return ExpertMLP(
        routing=grouped_routing(read),
        expert=_mlp(read, "moe_intermediate_size"),
        shared=_mlp(read, "moe_shared_expert_intermediate_size"),
        latent_size=0 if latent is None else read.fields.size("moe_latent_size"),
    )


NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    gguf="nemotron_h",
    layers=nemotron_h_layers,
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    part_names={
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
    recurrent_part="mixer",
    count_layers=lambda fields: len(_kinds(fields)),
    aliases={
        "layer_norm_epsilon": "rms_norm_eps",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
    },
)
