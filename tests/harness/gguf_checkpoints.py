"""GGUF files made from checkpoint directories with the format's own library, for tests."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint_files import read_tensors, read_values, write_tensors, write_values

ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "olmo3": "olmo2",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "cohere": "command-r",
    "phi": "phi2",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "muse_glimmer_text": "muse-glimmer",
}
"""Of families whose architecture has another name."""
INTERLEAVED = ("llama", "mistral", "granite", "smollm3", "ministral3", "mixtral", "arcee", "muse_glimmer_text")
_NAMES_OF = {"muse-glimmer": "afmoe"}
"""For an architecture that the installed gguf package does not know, one whose tensors have the same names."""
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "Q1_0"), (0,)),
    "IQ1_M": (48,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where blocks of a type have their float16 numbers."""
_ROUTER_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
_SHARED_PARTS = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
TypeOf = Callable[[str], str]
NamesInFile = Callable[[str], str | None]


def write_gguf(
    directory: Path, path: Path, types: str | TypeOf = "F32", *, metadata: Mapping[str, Any] | None = None, max_tensors: int = 0
) -> Path:
    """The model of a checkpoint directory as a GGUF file, the way converters write it.

    Args:
        types: the block type of matrices, for all or by the tensor's GGUF name; vectors are F32.
        metadata: integers, floats, strings and lists, in addition to or instead of the others.
        max_tensors: tensors in one part of a split file; 0 = one file.
    """
    import gguf

    values = read_values(directory)
    values |= values.get("text_config", {})
    if "moe_k" in values:
        values |= {"num_experts": values["moe_num_experts"], "num_experts_per_tok": values["moe_k"]}
    architecture = ARCHITECTURES.get(values["model_type"], values["model_type"])
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    tensors = in_stacks(read_tensors(directory), is_interleaved=values["model_type"] == "gpt_oss")
    if architecture == "muse-glimmer":
        tensors = _muse_glimmer_text(tensors, values)
    if architecture == "deepseek2":
        tensors = _with_absorbed_matrices(tensors, values)
    if architecture == "gemma3n":
        tensors = _with_stacked_projections(tensors, values)
    num_mtp_modules = sum(name.endswith(".eh_proj.weight") for name in tensors)
    values["num_hidden_layers"] += num_mtp_modules  # they count as blocks
    write_sizes(writer, values)
    if num_mtp_modules:
        writer.add_nextn_predict_layers(num_mtp_modules)
    for part in ("alpha_p", "alpha_n", "beta", "eps") if architecture == "apertus" else ():
        writer.add_array(f"xielu.{part}", [array.item() for name, array in tensors.items() if name.endswith(f".act_fn.{part}")])
    names = tensor_names(architecture, values["num_hidden_layers"])
    for name, array in tensors.items():
        if ".act_fn." in name:
            continue
        in_file = _ROUTER_SCALES.get(name.split(".", 3)[-1]) and f"blk.{name.split('.')[2]}.{_ROUTER_SCALES[name.split('.', 3)[-1]]}"
        in_file = in_file or names(name)
        assert in_file is not None, name
        in_file += ".weight" if name.endswith((".sinks", ".experts.gate_up_proj", ".experts.down_proj")) else ""
        stored = _as_converted(name, array, values)
        in_file += ".weight" if name.endswith("layer_scalar") else ""
        is_small = stored.ndim == 1 or ".ffn_gate_inp." in in_file or name.endswith(".bias")
        block_type = "F32" if is_small else types if isinstance(types, str) else types(in_file)
        add_tensor(writer, in_file, stored, block_type)
    _write_rope(writer, values)
    add_values(writer, metadata or {})
    return finish(writer, path)


def tensor_names(architecture: str, num_layers: int) -> NamesInFile:
    """From a name in a checkpoint to that in a file, as the gguf package has them; None for what it does not know."""
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == _NAMES_OF.get(architecture, architecture))
    known = gguf.get_tensor_name_map(number, num_layers)
    return lambda name: known.get_name(name, try_suffixes=(".weight", ".bias"))


def add_values(writer: Any, values: Mapping[str, Any]) -> None:
    """Write metadata, each value by its type, in place of what is there; None leaves one out."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kinds[type(value)](key, value)


def add_tensor(writer: Any, name: str, array: NDArray[Any], block_type: str = "F32") -> None:
    """Add a float tensor in blocks of a type that the gguf package can write."""
    import gguf

    kind = gguf.GGMLQuantizationType[block_type]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)


def finish(writer: Any, path: Path) -> Path:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_vocabulary(directory: Path) -> dict[str, Any]:
    """The metadata of a checkpoint's byte-level BPE tokenizer, split into words as GPT-2 does."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    pieces = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if piece in special else 1 for piece in pieces],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]],
    }


def numbered_vocabulary(size: int) -> dict[str, Any]:
    """The metadata of a byte-level BPE tokenizer of so many tokens, most of them a number each."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<|endoftext|>", "w", "1", "w1", *(f"q{number}" for number in range(size - 4))],
        "tokenizer.ggml.token_type": [3, *[1] * (size - 1)],
        "tokenizer.ggml.merges": ["w 1"],
    }


def write_half(blocks: NDArray[np.uint8], block_type: str, start: int, numbers: NDArray[np.float16]) -> None:
    """Write the float16 of every block [rows, blocks] at byte `start`; that of IQ1_M is in the top bits of four words."""
    if block_type == "IQ1_M":
        words = blocks[..., 48:56].copy().view("<u2") & np.uint16(0x0FFF)
        words |= (numbers.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16) & np.uint16(15)) << np.uint16(12)
        blocks[..., 48:56] = words.view(np.uint8)
    else:
        blocks[..., start : start + 2] = numbers[..., None].view(np.uint8)


def random_blocks(rng: np.random.Generator, block_type: str, num_rows: int, columns: int, scale: float = 1.0) -> NDArray[np.uint8]:
    """Rows of random blocks [num_rows, bytes of a row] whose float16 numbers are finite, of size `scale`."""
    import gguf

    num_items, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    blocks = rng.integers(0, 256, (num_rows, columns // num_items, num_bytes), np.uint8)
    for start in HALVES[block_type]:
        write_half(blocks, block_type, start, (rng.normal(size=blocks.shape[:2]) * scale).astype("<f2"))
    if block_type == "MXFP4":
        blocks[:, :, 0] = rng.integers(125, 128, blocks.shape[:2]) + int(np.log2(scale))  # an exponent, and 127
    return blocks.reshape(num_rows, -1)


def dequantize(raw: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """Return the values that the format's own library computes; it lacks Q1_0, whose bits are signs."""
    import gguf

    if name != "Q1_0":
        values: NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
        return values
    blocks = raw.reshape(len(raw), -1, 18)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").astype(np.float32)
    signed: NDArray[np.float32] = np.where(np.unpackbits(blocks[:, :, 2:], axis=2, bitorder="little"), scales, -scales)
    return signed.reshape(len(raw), -1)


def write_rounded(directory: Path, to: Path, block_type: str, is_rounded: Callable[[str, NDArray[np.float32]], bool]) -> Path:
    """A checkpoint in which some tensors have the values of blocks of a type, by the format's own library."""
    import gguf

    kind = gguf.GGMLQuantizationType[block_type]
    to.mkdir()
    write_values(to, read_values(directory))
    tensors = read_tensors(directory)
    for name, array in tensors.items():
        if is_rounded(name, array):
            tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    write_tensors(to, tensors)
    return to


def with_random_blocks(
    plain: Path, path: Path, type_of: Callable[[str], str], rng: np.random.Generator, scale: float = 0.003
) -> dict[str, tuple[str, NDArray[np.uint8]]]:
    """A copy of a llama's file whose matrices are random blocks; returns the type and the blocks of each, by its name in the file."""
    import gguf

    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(path, "llama")
    stored = dict[str, tuple[str, NDArray[np.uint8]]]()
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        array = np.array(tensor.data)
        if array.ndim == 2:
            block_type = type_of(tensor.name)
            array = random_blocks(rng, block_type, *array.shape, scale=scale)
            stored[tensor.name] = block_type, array
            writer.add_tensor(tensor.name, array, raw_dtype=gguf.GGMLQuantizationType[block_type])
        else:
            writer.add_tensor(tensor.name, array)
    finish(writer, path)
    return stored


def in_stacks(tensors: Mapping[str, NDArray[np.float32]], *, is_interleaved: bool = False) -> dict[str, NDArray[np.float32]]:
    """Experts as converters name and stack them: `….experts.gate_proj.weight` [experts, out, in].

    Args:
        is_interleaved: checkpoints have stacks with gate and up by turns, whose weights are [experts, in, out], as gpt-oss does.
    """
    found, lists = dict[str, NDArray[np.float32]](), dict[str, dict[int, NDArray[np.float32]]]()
    for name, array in tensors.items():
        prefix, _, rest = name.partition(".experts.")
        if not rest or (not is_interleaved and "." not in rest):
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = array
        elif is_interleaved:
            part, kind = rest.removesuffix("_bias"), "bias" if rest.endswith("_bias") else "weight"
            rows = array if kind == "bias" else array.swapaxes(1, 2)
            parts = {"gate_proj": rows[:, 0::2], "up_proj": rows[:, 1::2]} if part == "gate_up_proj" else {"down_proj": rows}
            found |= {f"{prefix}.experts.{own}.{kind}": np.ascontiguousarray(values) for own, values in parts.items()}
        else:
            expert, part, _ = rest.split(".")
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
            lists.setdefault(f"{prefix}.experts.{part}.weight".replace("block_sparse_moe.experts", "mlp.experts"), {})[int(expert)] = array
    return found | {name: np.stack([experts[number] for number in sorted(experts)]) for name, experts in lists.items()}


def _with_absorbed_matrices(tensors: Mapping[str, NDArray[np.float32]], values: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Up-projections of latent attention as converters stack them: those of keys transposed, [heads, rank, size], then those of values."""
    found = dict[str, NDArray[np.float32]]()
    for name, array in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = array
            continue
        heads = array.reshape(values["num_attention_heads"], -1, array.shape[1])
        keys, up = np.split(heads, [values["qk_nope_head_dim"]], axis=1)
        found |= {name.replace("kv_b", "k_b"): np.ascontiguousarray(keys.swapaxes(1, 2)), name.replace("kv_b", "v_b"): up}
    return found


def _with_stacked_projections(tensors: Mapping[str, NDArray[np.float32]], values: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Projections of AltUp's streams as converters stack them, and zeros for what checkpoints of transformers do not have.

    These are per-layer embeddings of the last tokens, and keys and values of layers that use those of another.
    """
    found, stacks = dict[str, NDArray[np.float32]](), dict[str, dict[int, NDArray[np.float32]]]()
    for name, array in tensors.items():
        if "projections." in name:
            stack, number, _ = name.rsplit(".", 2)
            stacks.setdefault(stack, {})[int(number)] = array
        elif name.endswith("embed_tokens_per_layer.weight"):
            found[name] = np.pad(array, ((0, values["vocab_size"] - len(array)), (0, 0)))
        else:
            found[name + ".weight" if name.endswith("correct_output_scale") else name] = array
    for layer in range(values["num_hidden_layers"] - values["num_kv_shared_layers"], values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        found |= {f"{prefix}{part}": np.zeros_like(found[f"model.layers.0.self_attn.{part}"]) for part in _SHARED_PARTS}
    return found | {f"{stack}.weight": np.stack([own[number] for number in sorted(own)]) for stack, own in stacks.items()}


def _muse_glimmer_text(tensors: Mapping[str, NDArray[np.float32]], values: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """The language model, with norm weights for queries, all of them the factor of queries, and for keys. Source: llama.cpp's converter."""
    prefix, size = "model.language_model.", values["head_dim"]
    found = {name.replace(prefix, "model."): array for name, array in tensors.items() if name.startswith((prefix, "lm_head."))}
    for layer in range(values["num_hidden_layers"]):
        for part, factor in (("q", values["qk_scale_factor"]), ("k", 1.0)):
            found[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = np.full(size, factor, np.float32)
    return found


def _as_converted(name: str, array: NDArray[np.float32], values: Mapping[str, Any]) -> NDArray[np.float32]:
    if values["model_type"] in INTERLEAVED and ".q_proj." in name:
        return _interleaved(array, values["num_attention_heads"])
    if values["model_type"] in INTERLEAVED and ".k_proj." in name:
        return _interleaved(array, values["num_key_value_heads"])
    if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction.bias")):
        return array[0]
    is_offset = values["model_type"] in ("gemma2", "gemma3_text") and name.endswith("norm.weight")
    is_offset |= values["model_type"] == "muse_glimmer_text" and name.endswith("layernorm.weight")
    return array + np.float32(1) if is_offset else array


def _interleaved(array: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    halves = array.reshape(num_heads, 2, len(array) // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def write_sizes(writer: Any, values: Mapping[str, Any]) -> None:
    head_size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_head_count(values["num_attention_heads"])
    if "per_layer_config" not in values:
        writer.add_feed_forward_length(values["intermediate_size"])
        rank = values.get("kv_lora_rank")
        writer.add_head_count_kv(1 if rank else values["num_key_value_heads"])
        writer.add_key_length(rank + head_size if rank else head_size)
        writer.add_value_length(rank or head_size)
    if "rms_norm_eps" in values:
        writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(values.get("norm_epsilon", values.get("layer_norm_eps")))
    for name in ("bos", "eos"):
        token_id = values.get(f"{name}_token_id")
        token_id = token_id[0] if isinstance(token_id, list) else token_id  # converters find the other ends by their texts
        if token_id is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    if "logit_scale" in values:
        writer.add_logit_scale(values["logit_scale"])
    if values["model_type"] in ("gemma2", "gemma3_text", "phi3", "cohere2"):
        writer.add_sliding_window(values.get("sliding_window") or 0)
    if values["model_type"] == "muse_glimmer_text":
        writer.add_logit_scale(values["output_multiplier"])
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if values["model_type"] in ("olmo3", "exaone4", "muse_glimmer_text") and values.get("sliding_window"):
        writer.add_sliding_window(values["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in values["layer_types"]])
    if "num_experts_per_tok" in values:
        _write_experts(writer, values)
    if "kv_lora_rank" in values:
        _write_latent_attention(writer, values)
    if values["model_type"] == "youtu":
        writer.add_leading_dense_block_count(values["num_hidden_layers"])
        writer.add_expert_feed_forward_length(values["intermediate_size"])
        writer.add_expert_shared_count(0)
    if values["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if values["model_type"] == "gemma3n_text":
        _write_gemma3n(writer, values)
    if values["model_type"] == "granite":
        writer.add_attention_scale(values["attention_multiplier"])
        writer.add_embedding_scale(values["embedding_multiplier"])
        writer.add_residual_scale(values["residual_multiplier"])
        writer.add_logit_scale(values["logits_scaling"])


def _write_experts(writer: Any, values: Mapping[str, Any]) -> None:
    import gguf

    family = values["model_type"]
    writer.add_expert_count(next(values[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in values))
    writer.add_expert_used_count(values["num_experts_per_tok"])
    if family == "ernie4_5_moe":
        writer.add_leading_dense_block_count(values["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(values["moe_layer_interval"])
        if values["moe_num_shared_experts"]:
            writer.add_expert_shared_feed_forward_length(values["moe_num_shared_experts"] * values["moe_intermediate_size"])
    if family in ("qwen2_moe", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(values["shared_expert_intermediate_size"])
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(values["intermediate_size"])
        writer.add_sliding_window(values["sliding_window"])
    if family in ("glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        is_softmax = family == "deepseek_v2"
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if is_softmax else gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(values["routed_scaling_factor"])
        writer.add_expert_weights_norm(values["norm_topk_prob"])
        writer.add_expert_shared_count(values["n_shared_experts"])
        num_dense = values["mlp_layer_types"].count("dense") if family == "glm4_moe_lite" else values["first_k_dense_replace"]
        writer.add_leading_dense_block_count(num_dense)
        if (values["n_group"] or 1) > 1:
            writer.add_expert_group_count(values["n_group"])
            writer.add_expert_group_used_count(values["topk_group"])


def _write_latent_attention(writer: Any, values: Mapping[str, Any]) -> None:
    if values["q_lora_rank"] is not None:
        writer.add_q_lora_rank(values["q_lora_rank"])
    writer.add_kv_lora_rank(values["kv_lora_rank"])
    writer.add_key_length_mla(values["qk_nope_head_dim"] + values["qk_rope_head_dim"])
    writer.add_value_length_mla(values["v_head_dim"])
    if "mscale_all_dim" in values["rope_parameters"]:
        writer.add_rope_scaling_yarn_log_mul(0.1 * values["rope_parameters"]["mscale_all_dim"])


def write_gemma4_sizes(writer: Any, values: Mapping[str, Any]) -> None:
    sizes = {int(layer): sizes for layer, sizes in values["per_layer_config"].items()}
    (head_size,) = {own["head_dim"] for own in sizes.values()}
    num_layers, num_shared = values["num_hidden_layers"], values["num_kv_shared_layers"]
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_key_length_swa(values["head_dim"])
    writer.add_value_length_swa(values["head_dim"])
    writer.add_head_count_kv(
        [sizes.get(layer, {}).get("num_key_value_heads", values["num_key_value_heads"]) for layer in range(num_layers)]
    )
    width, is_double = values["intermediate_size"], values.get("use_double_wide_mlp", False)
    writer.add_feed_forward_length([width] * (num_layers - num_shared) + [width * 2] * num_shared if is_double else width)
    writer.add_sliding_window(values["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in values["layer_types"]])
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(values.get("hidden_size_per_layer_input", 0))
    if values.get("enable_moe_block"):
        writer.add_expert_count(values["num_experts"])
        writer.add_expert_used_count(values["top_k_experts"])
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    if cap := values.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    ropes = [values["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention")]
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_dimension_count_swa(values["head_dim"])
    writer.add_rope_freq_base(ropes[0]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes[1]["rope_theta"])
    turned = int(ropes[0]["partial_rotary_factor"] * head_size // 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (head_size // 2 - turned), np.float32))


def _write_gemma3n(writer: Any, values: Mapping[str, Any]) -> None:
    import torch

    writer.add_altup_active_idx(values["altup_active_idx"])
    writer.add_altup_num_inputs(values["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(values["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(values["num_kv_shared_layers"])
    fractions = torch.tensor(values["activation_sparsity_pattern"], dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.distributions.normal.Normal(0, 1).icdf(fractions).tolist())  # -inf for 0
    writer.add_sliding_window(values["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in values["layer_types"]])
    writer.add_final_logit_softcapping(values["final_logit_softcapping"])


def _write_rope(writer: Any, values: Mapping[str, Any]) -> None:
    import gguf

    if "per_layer_config" in values:
        return write_gemma4_sizes(writer, values)
    rope = values["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    rotated = int(head_size * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("llama_4_scaling_beta"):
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_size))
    if kind == "longrope":
        ratio = values["max_position_embeddings"] / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(rope["original_max_position_embeddings"]))))
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def llama3_divisors(rope: Mapping[str, Any], head_size: int) -> NDArray[np.float32]:
    """What converters store for rope type llama3: by how much each pair's frequency is divided."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    divisors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, head_size, 2, dtype=np.float32) / head_size):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / rope["high_freq_factor"]:
            divisors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
