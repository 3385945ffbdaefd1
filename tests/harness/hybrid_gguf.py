"""GGUF files of models that are partly recurrent, in the conventions of llama.cpp's converters; for tests."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint_files import read_tensors, read_values
from harness.gguf_checkpoints import NamesInFile, add_tensor, add_values, finish, tensor_names

Floats = NDArray[np.float32]
ARCHITECTURES = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1",
}
MAX_LAYERS = 16
_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_MODULE = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
_VECTORS = ("ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight", "norm.weight")
"""Written as F32 like vectors."""


def write_hybrid_gguf(
    directory: Path,
    path: Path,
    types: str | Callable[[str], str] = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    fuses_inputs: bool = False,
    fuses_experts: bool = False,
    leaves_out: tuple[str, ...] = (),
    instead: Mapping[str, Floats] | None = None,
) -> Path:
    """The model of a checkpoint directory as a GGUF file; a module `mtp.*` is its last block.

    Args:
        types: the block type of matrices, for all or by the tensor's name.
        metadata: values in addition to or instead of the others, None = left out.
        fuses_inputs: qwen3_next's queries, keys, values and gates in one matrix, as its first files have them.
        fuses_experts: gates and ups of a layer's experts in one stack.
        leaves_out: names of tensors.
        instead: other values of tensors, by their names.
    """
    import gguf

    values = read_values(directory)
    architecture = ARCHITECTURES[values["model_type"]] + ("_moe" if "moe" in values.get("layers_block_type", ()) else "")
    names = tensor_names(architecture, MAX_LAYERS)
    tensors = {**hybrid_tensors(read_tensors(directory), values, names, fuses_inputs=fuses_inputs), **(instead or {})}
    if fuses_experts:
        for name in [name for name in tensors if "ffn_gate_exps" in name]:
            gates, ups = (tensors.pop(name.replace("gate_exps", part)) for part in ("gate_exps", "up_exps"))
            tensors[name.replace("gate_exps", "gate_up_exps")] = np.concatenate((gates, ups), axis=1)
    writer = gguf.GGUFWriter(path, architecture)
    found = {**_metadata(values, tensors), **(metadata or {})}
    add_values(writer, {key.replace("{a}", architecture): value for key, value in found.items()})
    for name, array in tensors.items():
        if name in leaves_out:
            continue
        is_small = array.ndim == 1 or 1 in array.shape or name.endswith(_VECTORS)
        add_tensor(writer, name, array, "F32" if is_small else types if isinstance(types, str) else types(name))
    return finish(writer, path)


def _metadata(values: Mapping[str, Any], tensors: Mapping[str, Floats]) -> dict[str, Any]:
    family, num_layers = values["model_type"], values.get("num_hidden_layers")
    num_layers = num_layers or len(values["layers_block_type"])
    num_mtp_modules = sum(name.endswith("nextn.eh_proj.weight") for name in tensors)
    rope, head_size = values.get("rope_parameters", {"rope_theta": 1e4}), values["head_dim"]
    found = {
        "{a}.block_count": num_layers + num_mtp_modules,
        "{a}.context_length": values["max_position_embeddings"],
        "{a}.embedding_length": values["hidden_size"],
        "{a}.feed_forward_length": values["intermediate_size"],
        "{a}.attention.head_count": values["num_attention_heads"],
        "{a}.attention.head_count_kv": values["num_key_value_heads"],
        "{a}.attention.key_length": head_size,
        "{a}.attention.value_length": head_size,
        "{a}.attention.layer_norm_rms_epsilon": next(
            values[name] for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if name in values
        ),
        "{a}.rope.freq_base": float(rope["rope_theta"]),
        "{a}.rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
        "tokenizer.ggml.bos_token_id": values["bos_token_id"],
        "tokenizer.ggml.eos_token_id": values["eos_token_id"],
    }
    if num_mtp_modules:
        found["{a}.nextn_predict_layers"] = num_mtp_modules
    if family.startswith("qwen"):
        return found | _qwen_metadata(values)
    if family == "nemotron_h":
        return found | _nemotron_metadata(values)
    if family == "falcon_h1":
        return found | _mamba_metadata(values) | {"{a}.ssm.inner_size": values["mamba_d_ssm"]}
    counts = [0 if kind in ("conv", "linear_attention", "mamba") else values["num_key_value_heads"] for kind in values["layer_types"]]
    own = _granite_metadata(values) if family == "granitemoehybrid" else _lfm2_metadata(values, len(tensors["blk.0.ffn_gate.weight"]))
    return found | {"{a}.attention.head_count_kv": counts} | own


def _qwen_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    is_mrope = values["model_type"] != "qwen3_next"
    found = {
        "{a}.ssm.conv_kernel": values["linear_conv_kernel_dim"],
        "{a}.ssm.state_size": values["linear_key_head_dim"],
        "{a}.ssm.group_count": values["linear_num_key_heads"],
        "{a}.ssm.time_step_rank": values["linear_num_value_heads"],
        "{a}.ssm.inner_size": values["linear_num_value_heads"] * values["linear_value_head_dim"],
        "{a}.full_attention_interval": 4,
        "{a}.rope.dimension_sections": [1, 1, 0, 0] if is_mrope else None,
    }
    if "num_experts" not in values:
        return found
    return found | {
        "{a}.feed_forward_length": None if is_mrope else values["intermediate_size"],
        "{a}.expert_count": values["num_experts"],
        "{a}.expert_used_count": values["num_experts_per_tok"],
        "{a}.expert_feed_forward_length": values["moe_intermediate_size"],
        "{a}.expert_shared_feed_forward_length": values["shared_expert_intermediate_size"],
    }


def _lfm2_metadata(values: Mapping[str, Any], width: int) -> dict[str, Any]:
    found: dict[str, Any] = {"{a}.shortconv.l_cache": values["conv_L_cache"], "{a}.feed_forward_length": width}
    if "num_experts" not in values:
        return found
    return found | {
        "{a}.expert_count": values["num_experts"],
        "{a}.expert_used_count": values["num_experts_per_tok"],
        "{a}.expert_feed_forward_length": values["moe_intermediate_size"],
        "{a}.leading_dense_block_count": values["num_dense_layers"],
        "{a}.expert_gating_func": 2,
        "{a}.expert_weights_scale": float(values["routed_scaling_factor"]),
    }


def _mamba_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "{a}.ssm.conv_kernel": values["mamba_d_conv"],
        "{a}.ssm.state_size": values["mamba_d_state"],
        "{a}.ssm.group_count": values["mamba_n_groups"],
        "{a}.ssm.time_step_rank": values["mamba_n_heads"],
        "{a}.ssm.inner_size": values["mamba_n_heads"] * values["mamba_d_head"],
    }


def _granite_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    has_experts = values["num_local_experts"] > 0
    found = {
        **_mamba_metadata(values),
        "{a}.feed_forward_length": values["intermediate_size" if has_experts else "shared_intermediate_size"],
        "{a}.attention.scale": float(values["attention_multiplier"]),
        "{a}.embedding_scale": float(values["embedding_multiplier"]),
        "{a}.residual_scale": float(values["residual_multiplier"]),
        "{a}.logit_scale": float(values["logits_scaling"]),
        "{a}.rope.scaling.finetuned": values["position_embedding_type"] == "rope",
    }
    if not has_experts:
        return found
    return found | {
        "{a}.expert_count": values["num_local_experts"],
        "{a}.expert_used_count": values["num_experts_per_tok"],
        "{a}.expert_shared_feed_forward_length": values["shared_intermediate_size"],
    }


def _nemotron_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds, width = (
        values["layers_block_type"],
        values["moe_intermediate_size" if "moe" in values["layers_block_type"] else "intermediate_size"],
    )
    found = {
        "{a}.ssm.conv_kernel": values["conv_kernel"],
        "{a}.ssm.state_size": values["ssm_state_size"],
        "{a}.ssm.group_count": values["n_groups"],
        "{a}.ssm.time_step_rank": values["mamba_num_heads"],
        "{a}.ssm.inner_size": values["mamba_num_heads"] * values["mamba_head_dim"],
        "{a}.feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        "{a}.attention.head_count_kv": [values["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds],
    }
    if "moe" not in kinds:
        return found
    return found | {
        "{a}.expert_count": values["n_routed_experts"],
        "{a}.expert_used_count": values["num_experts_per_tok"],
        "{a}.expert_feed_forward_length": values["moe_intermediate_size"],
        "{a}.expert_shared_feed_forward_length": values["moe_shared_expert_intermediate_size"],
        "{a}.expert_shared_count": values["n_shared_experts"],
        "{a}.expert_weights_norm": values["norm_topk_prob"],
        "{a}.expert_weights_scale": float(values["routed_scaling_factor"]),
        "{a}.expert_group_count": values["n_group"],
        "{a}.expert_group_used_count": values["topk_group"] if values["n_group"] > 1 else None,
        "{a}.moe_latent_size": values["moe_latent_size"],
    }


def hybrid_tensors(
    tensors: Mapping[str, Floats], values: Mapping[str, Any], names: NamesInFile, *, fuses_inputs: bool
) -> dict[str, Floats]:
    """The tensors of a checkpoint as a converter names and stores them."""
    found: dict[str, Floats] = {}
    experts: dict[str, dict[int, Floats]] = {}
    num_layers = values.get("num_hidden_layers", 0)  # 0 if no modules come after them
    for name, array in tensors.items():
        is_offset = values["model_type"].startswith("qwen") and name.endswith("norm.weight") and "linear_attn" not in name
        stored = array + np.float32(1) if is_offset or name.startswith("mtp.pre_fc_norm") else array
        stored = _times_falcon_factors(name, stored, values) if values["model_type"] == "falcon_h1" else stored
        module = re.fullmatch(r"(?:model\.)?mtp\.(fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\.weight", name)
        layer = re.fullmatch(r"(model\.layers|backbone\.layers|mtp\.layers|model\.mtp\.layers)\.(\d+)\.(.*)", name)
        if module is not None:
            found[f"blk.{num_layers}.nextn.{_MODULE[module[1]]}.weight"] = stored
        elif name.endswith("mtp.embed_tokens.weight"):
            found[f"blk.{num_layers}.nextn.embed_tokens.weight"] = stored
        elif layer is None:
            found[str(names(name))] = stored
        else:
            number, expert = int(layer[2]) + num_layers * ("mtp" in layer[1]), re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", layer[3])
            if expert is not None:
                experts.setdefault(f"blk.{number}.ffn_{_MLP[expert[2]]}_exps.weight", {})[int(expert[1])] = stored
            else:
                found |= _layer_tensors(f"blk.{number}.", layer[3], stored, values, names, fuses_inputs=fuses_inputs)
    return found | {name: np.stack([stack[number] for number in sorted(stack)]) for name, stack in experts.items()}


def _times_falcon_factors(name: str, array: Floats, values: Mapping[str, Any]) -> Floats:
    """Falcon-H1's factors are in the weights of its GGUF files."""
    attention_in, key = (np.float32(values[f"{part}_multiplier"]) for part in ("attention_in", "key"))
    factors = {
        "embed_tokens.weight": values["embedding_multiplier"],
        "lm_head.weight": values["lm_head_multiplier"],
        "q_proj.weight": attention_in,
        "k_proj.weight": attention_in * key,
        "v_proj.weight": attention_in,
        "self_attn.o_proj.weight": values["attention_out_multiplier"],
        "gate_proj.weight": values["mlp_multipliers"][0],
        "down_proj.weight": values["mlp_multipliers"][1],
        "mamba.out_proj.weight": values["ssm_out_multiplier"],
    }
    if name.endswith("mamba.in_proj.weight"):
        inner, keys = values["mamba_d_ssm"], values["mamba_n_groups"] * values["mamba_d_state"]
        rows = np.repeat(np.float32(values["ssm_multipliers"]), (inner, inner, keys, keys, values["mamba_n_heads"]))
        return array * (rows * np.float32(values["ssm_in_multiplier"]))[:, None]
    return array * next((np.float32(factor) for part, factor in factors.items() if name.endswith(part)), np.float32(1))


def _layer_tensors(
    block: str, part: str, array: Floats, values: Mapping[str, Any], names: NamesInFile, *, fuses_inputs: bool
) -> dict[str, Floats]:
    family, is_nemotron = values["model_type"], values["model_type"] == "nemotron_h"
    known_part = part.replace("dt_bias", "dt.bias" if is_nemotron else "dt_proj.bias").replace("correction_bias", "correction.bias")
    name = names(f"{'backbone' if is_nemotron else 'model'}.layers.{block.split('.')[1]}.{known_part}") or block + part
    name += ".bias" if name.endswith("exp_probs_b") else ""
    if family == "granitemoehybrid":
        return _granite_tensors(block, name, part, array, values)
    if is_nemotron or family == "falcon_h1":
        return {name: _mamba_values(part, array, values["n_groups" if is_nemotron else "mamba_n_groups"])}
    if part.startswith("linear_attn."):
        return _delta_tensors(block, name, part, array, values, fuses_inputs=fuses_inputs)
    is_vector = part == "mlp.shared_expert_gate.weight"
    return {name: array[0] if is_vector else array.reshape(len(array), -1) if part.endswith("conv.weight") else array}


def _delta_tensors(block: str, name: str, part: str, array: Floats, values: Mapping[str, Any], *, fuses_inputs: bool) -> dict[str, Floats]:
    keys, own, dk, dv = (values[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    each, last = own // keys, part.split(".", 1)[1]
    if last == "A_log":
        array = -np.exp(array)
    if last == "conv1d.weight":
        array = array[:, 0]
    if last == "in_proj_qkvz.weight" and not fuses_inputs:
        parts = np.split(array.reshape(keys, 2 * dk + 2 * each * dv, -1), [dk, 2 * dk, 2 * dk + each * dv], axis=1)
        q, k, v, z = (one.reshape(-1, array.shape[-1]) for one in parts)
        return {f"{block}attn_qkv.weight": np.concatenate((q, k, v)), f"{block}attn_gate.weight": z}

    def tiled(rows: Floats, size: int) -> Floats:
        """Heads by turns: first those that are the first of their key head."""
        return rows.reshape(keys, each, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if values["model_type"] != "qwen3_next":
        front = 2 * keys * dk
        if last in ("in_proj_qkv.weight", "conv1d.weight"):
            array = np.concatenate((array[:front], tiled(array[front:], dv)))
        elif last == "out_proj.weight":
            array = tiled(array.T, dv).T
        elif last != "norm.weight":
            array = tiled(array, dv if last == "in_proj_z.weight" else 1)
    return {name: array}


def _granite_tensors(block: str, name: str, part: str, array: Floats, values: Mapping[str, Any]) -> dict[str, Floats]:
    num_heads, suffix = values["num_attention_heads"], "_shexp" if values["num_local_experts"] else ""
    if part == "shared_mlp.input_linear.weight":
        gate, up = np.split(array, 2)
        return {f"{block}ffn_gate{suffix}.weight": gate, f"{block}ffn_up{suffix}.weight": up}
    if part == "shared_mlp.output_linear.weight":
        return {f"{block}ffn_down{suffix}.weight": array}
    if part == "block_sparse_moe.input_linear.weight":
        gate, up = np.split(array, 2, axis=1)
        return {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
    if part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        heads = num_heads if ".q_" in part else values["num_key_value_heads"]
        array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
    return {name: _mamba_values(part, array, values["mamba_n_groups"])}


def _mamba_values(part: str, array: Floats, num_groups: int) -> Floats:
    last = part.split(".", 1)[1] if "." in part else part
    if last == "A_log":
        return -np.exp(array)[:, None]
    if last == "D":
        return array[:, None]
    if last == "conv1d.weight":
        return array[:, 0]
    return array.reshape(num_groups, -1) if last == "norm.weight" else array
