"""Tiny EAGLE heads in the formats they are published in, and a target with heads that must predict it perfectly."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from harness.checkpoints import write_tokenizer

VOCAB_SIZE = 97
Tensors = dict[str, torch.Tensor]
Spec = Mapping[str, Any]
DRAFT_IDS = [4 + 3 * index for index in range(30)]  # ids of the target that a draft vocabulary has

EAGLE1: Spec = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
EAGLE3: Spec = {**EAGLE1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFT_IDS)}


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int) -> Tensors:
    """Matrices whose outputs are of the size of their inputs, norms around 1, biases."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            values = random.normal(0.0, 1.2 * shape[1] ** -0.5, shape)
        elif name.endswith("bias"):
            values = random.normal(0.0, 0.3, shape)
        else:
            values = random.uniform(0.5, 1.5, shape)
        tensors[name] = torch.from_numpy(values.astype(np.float32))
    return tensors


def layer_shapes(spec: Spec, layer: int, columns: int, norms: Sequence[str]) -> dict[str, Sequence[int]]:
    hidden, inner, heads = spec["hidden_size"], spec["intermediate_size"], spec["num_attention_heads"]
    size = spec.get("head_dim") or hidden // heads
    kv = spec["num_key_value_heads"] * size
    prefix = f"layers.{layer}."
    return {
        prefix + "self_attn.q_proj.weight": (heads * size, columns),
        prefix + "self_attn.k_proj.weight": (kv, columns),
        prefix + "self_attn.v_proj.weight": (kv, columns),
        prefix + "self_attn.o_proj.weight": (hidden, heads * size),
        prefix + "mlp.gate_proj.weight": (inner, hidden),
        prefix + "mlp.up_proj.weight": (inner, hidden),
        prefix + "mlp.down_proj.weight": (hidden, inner),
        **{prefix + norm + ".weight": (hidden,) for norm in norms},
    }


def eagle1_tensors(spec: Spec = EAGLE1, *, bias: bool = True, qkv_bias: bool = False, norms: bool = False, seed: int = 0) -> Tensors:
    hidden = spec["hidden_size"]
    shapes: dict[str, Sequence[int]] = {"embed_tokens.weight": (spec["vocab_size"], hidden), "fc.weight": (hidden, 2 * hidden)}
    if bias:
        shapes["fc.bias"] = (hidden,)
    if norms:
        shapes |= {"embedding_layernorm.weight": (hidden,), "hidden_states_layernorm.weight": (hidden,)}
    for layer in range(spec["num_hidden_layers"]):
        names = ("input_layernorm", "post_attention_layernorm") if layer else ("post_attention_layernorm",)
        shapes |= layer_shapes(spec, layer, hidden, names)
    if qkv_bias:
        for part in ("q", "k", "v"):
            matrix = shapes[f"layers.0.self_attn.{part}_proj.weight"]
            shapes[f"layers.0.self_attn.{part}_proj.bias"] = matrix[:1]
    return random_tensors(shapes, seed)


def eagle3_tensors(
    spec: Spec = EAGLE3,
    *,
    target_hidden: int = 32,
    num_boundaries: int = 3,
    has_own_embedding: bool = False,
    fc: bool = True,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    embedding_norm: bool = True,
    final_norm: bool = True,
    qk_norm: bool = False,
    draft_ids: Sequence[int] | None = DRAFT_IDS,
    first_layer: str = "midlayer.",
    seed: int = 0,
) -> Tensors:
    hidden, width = spec["hidden_size"], target_hidden * num_boundaries
    shapes: dict[str, Sequence[int]] = {}
    if fc:
        shapes["fc.weight"] = (hidden, width)
    if norm_before_fc:
        shapes["input_norm.weight"] = (width,)
    if fc_norm:
        shapes |= {f"fc_norm.{chunk}.weight": (target_hidden,) for chunk in range(num_boundaries)}
    for layer in range(spec["num_hidden_layers"]):
        names = ["post_attention_layernorm"] + (["input_layernorm"] if layer or embedding_norm else []) + ([] if layer else ["hidden_norm"])
        shapes |= layer_shapes(spec, layer, hidden if layer else 2 * hidden, names)
        if qk_norm:
            size = spec.get("head_dim") or hidden // spec["num_attention_heads"]
            shapes |= {f"layers.{layer}.self_attn.{part}_norm.weight": (size,) for part in ("q", "k")}
    if final_norm:
        shapes["norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (spec.get("draft_vocab_size") or spec["vocab_size"], hidden)
    if has_own_embedding:
        shapes["embed_tokens.weight"] = (spec["vocab_size"], hidden)
    tensors = {name.replace("layers.0.", first_layer): values for name, values in random_tensors(shapes, seed).items()}
    return tensors | (vocabulary_tables(draft_ids, spec["vocab_size"]) if draft_ids is not None else {})


def vocabulary_tables(draft_ids: Sequence[int], vocab_size: int) -> Tensors:
    """`d2t` as what is to be added to a draft id, and `t2d` as marks."""
    ids = torch.tensor(draft_ids)
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}


def write_head(
    directory: Path, config: Mapping[str, Any], tensors: Tensors, *, container: str = "safetensors", dtype: torch.dtype = torch.float32
) -> Path:
    """A head's directory; `container`: "safetensors", "bin", or "sharded" (two PyTorch files and their index)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    stored = {name: (values.to(dtype) if values.is_floating_point() else values).contiguous() for name, values in tensors.items()}
    if container == "safetensors":
        save_file(stored, directory / "model.safetensors")
    elif container == "bin":
        torch.save(stored, directory / "pytorch_model.bin")
    else:
        names = sorted(stored)
        files = {name: f"pytorch_model-0000{1 + index % 2}-of-00002.bin" for index, name in enumerate(names)}
        for file in sorted(set(files.values())):
            torch.save({name: stored[name] for name in names if files[name] == file}, directory / file)
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return directory


# A target whose next token is a function of the inputs of heads. Its rows are [current, earlier, mean]: the code of the current token, the
# code of the one before it and, if requested, the mean of the codes of all tokens but the first. The heads of this target draft the same
# token from these inputs alone.
CODE = 24  # values of a code, all +1 or -1; the last one is +1 for every token but the first
HIDDEN = 3 * CODE
HEAD = 24
FIRST_TOKEN = 1  # begins every prompt; no head reads it
SHARPNESS = 100.0


def codes(seed: int = 0) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).choice([-1.0, 1.0], (VOCAB_SIZE, CODE)).astype(np.float32)
    values[:, -1] = 1.0
    return values


def speaking(seed: int = 1) -> NDArray[np.float32]:
    """Rows of lm_head: ids that are not in the draft vocabulary are never generated."""
    values = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    values[DRAFT_IDS] = np.random.default_rng(seed).normal(0.0, 1.0, (len(DRAFT_IDS), HIDDEN))
    return values


def recalling() -> NDArray[np.float32]:
    """The same for a target that does not listen to its current token: as loud with half of the code."""
    values = 2.0 * speaking()
    values[:, :CODE] = 0.0
    return values


def aimed(offset: int, theta: float = 10000.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A query and a key [HEAD] that match best where the key is `offset` positions before the query."""
    frequencies = theta ** (-np.arange(0, HEAD, 2) / HEAD)
    key = np.concatenate([np.ones(HEAD // 2), np.zeros(HEAD // 2)])
    turned = np.concatenate([np.cos(offset * frequencies), -np.sin(offset * frequencies)])
    scale = np.sqrt(SHARPNESS * np.sqrt(HEAD))
    return (turned * scale).astype(np.float32), (key * scale).astype(np.float32)


def write_legible_target(
    directory: Path, *, num_layers: int = 4, reads_mean: bool = True, looks_back: int = 1, hears_current: bool = True
) -> Path:
    """A llama whose next token depends on its current token, the one `looks_back` before it and, in a share, the mean of all."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 8,
        "num_hidden_layers": num_layers, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": HEAD, "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": FIRST_TOKEN, "eos_token_id": 0,
    }  # fmt: skip
    embedding = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    embedding[:, :CODE] = codes()
    embedding[FIRST_TOKEN, CODE - 1] = -1.0  # the only one whose last value is negative
    size = np.sqrt(CODE / HIDDEN)  # of a row: what the norm divides by
    constant = CODE - 1
    query, key = np.zeros((3 * HEAD, HIDDEN), np.float32), np.zeros((3 * HEAD, HIDDEN), np.float32)
    value, out = np.zeros((3 * HEAD, HIDDEN), np.float32), np.zeros((HIDDEN, 3 * HEAD), np.float32)
    # head 0 attends back and writes that token's code after the current one's
    shape, mark = aimed(looks_back)
    query[:HEAD, constant], key[:HEAD, constant] = shape * size, mark * size
    value[:HEAD, :CODE] = np.eye(CODE) * size
    out[CODE : 2 * CODE, :HEAD] = np.eye(CODE)
    if reads_mean:  # head 1 hears all tokens alike, but not the first one: only its constant is negative, and its key far away
        mixing = mixture()
        value[HEAD : 2 * HEAD, :CODE] = mixing * size
        out[2 * CODE :, HEAD : 2 * HEAD] = np.eye(CODE)
        slowest = HEAD // 2 - 1  # turns least
        query[HEAD + slowest, constant] = size
        key[HEAD + slowest, constant] = 100.0 * size
    final = np.full(HIDDEN, np.sqrt(2 * CODE / HIDDEN), np.float32)  # without the mean all rows are of one size: features are the rows
    said = speaking() if hears_current else recalling()
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": final, "lm_head.weight": said}
    for layer in range(num_layers):
        parts = (query, key, value, out) if layer == 0 else (query * 0, key * 0, value * 0, out * 0)
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}self_attn.{name}_proj.weight": part for name, part in zip("qkvo", parts, strict=True)}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": np.zeros((8, HIDDEN), np.float32) for name in ("gate", "up")}
        tensors[prefix + "mlp.down_proj.weight"] = np.zeros((HIDDEN, 8), np.float32)
        tensors |= {f"{prefix}{name}.weight": np.ones(HIDDEN, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}, directory / "model.safetensors")
    write_tokenizer(directory, VOCAB_SIZE)
    return directory


def mixture() -> NDArray[np.float32]:
    """[CODE, CODE] what a token adds to the mean."""
    return np.random.default_rng(2).normal(0.0, 2.0 * CODE**-0.5, (CODE, CODE)).astype(np.float32)


def legible_config(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "intermediate_size": 8, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, **more,
    }  # fmt: skip


def silent_layer(prefix: str, columns: int, norms: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """A layer that adds nothing."""
    shapes = {**{f"self_attn.{part}_proj": (HIDDEN, columns) for part in "qkv"}, "self_attn.o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"mlp.gate_proj": (8, HIDDEN), "mlp.up_proj": (8, HIDDEN), "mlp.down_proj": (HIDDEN, 8)}
    tensors = {f"{prefix}{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return tensors | {f"{prefix}{norm}.weight": np.ones(HIDDEN, np.float32) for norm in norms}


def write_listening_eagle1(directory: Path, *, swapped: bool = False) -> Path:
    """For the target that depends on the mean: reads tokens only, all of them through its own cache."""
    tensors = silent_layer("layers.0.", HIDDEN, ["post_attention_layernorm"])
    fc = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    fc[:CODE, :CODE] = np.eye(CODE)
    query, key, value, out = (tensors[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkvo")
    query[:HEAD, CODE - 1], key[:HEAD, CODE - 1] = aimed(1)
    value[:HEAD, :CODE], out[CODE : 2 * CODE, :HEAD] = np.eye(CODE), np.eye(CODE)
    slowest = HEAD + HEAD // 2 - 1
    query[slowest, CODE - 1], key[slowest, CODE - 1] = 1.0, 100.0
    value[HEAD : 2 * HEAD, :CODE], out[2 * CODE :, HEAD : 2 * HEAD] = mixture(), np.eye(CODE)
    return _write_legible(directory, legible_config(bias=False), tensors | {"fc.weight": fc}, swapped=swapped)


def write_reading_eagle1(directory: Path, *, swapped: bool = False, max_positions: int = 1024, **config: Any) -> Path:
    """For the target without the mean: reads the token before the current one from the feature alone."""
    fc = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    fc[:CODE, :CODE] = np.eye(CODE)
    fc[CODE : 2 * CODE, HIDDEN : HIDDEN + CODE] = np.eye(CODE)
    tensors = silent_layer("layers.0.", HIDDEN, ["post_attention_layernorm"]) | {"fc.weight": fc}
    values = legible_config(bias=False, max_position_embeddings=max_positions, **config)
    return _write_legible(directory, values, tensors, swapped=swapped)


def write_reading_eagle3(directory: Path, *, swapped: bool = False, boundaries: Sequence[int] = (0, 2, 4)) -> Path:
    """For the target without the mean: turns the feature of a position into that of the next one, by its attention to itself."""
    tensors = silent_layer("midlayer.", 2 * HIDDEN, ["post_attention_layernorm"])
    fc = np.zeros((HIDDEN, 3 * HIDDEN), np.float32)
    fc[:, 2 * HIDDEN :] = np.eye(HIDDEN)
    query, key, value, out = (tensors[f"midlayer.self_attn.{part}_proj.weight"] for part in "qkvo")
    for head in (0, 1):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        query[rows, CODE - 1], key[rows, CODE - 1] = aimed(0)
        out[rows, rows] = np.eye(CODE)
    new, current, earlier = (slice(first, first + CODE) for first in (0, HIDDEN, HIDDEN + CODE))
    value[:HEAD, new], value[:HEAD, current] = np.eye(CODE), -np.eye(CODE)
    value[HEAD : 2 * HEAD, current], value[HEAD : 2 * HEAD, earlier] = np.eye(CODE), -np.eye(CODE)
    tensors |= {
        "fc.weight": fc,
        "midlayer.input_layernorm.weight": np.full(HIDDEN, np.sqrt(CODE / HIDDEN), np.float32),
        "midlayer.hidden_norm.weight": np.full(HIDDEN, np.sqrt(2 * CODE / HIDDEN), np.float32),
        "norm.weight": np.full(HIDDEN, np.sqrt(2 * CODE / HIDDEN), np.float32),
        "lm_head.weight": speaking()[DRAFT_IDS],
    }
    config = legible_config(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(DRAFT_IDS),
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=list(boundaries),
    )
    return _write_legible(directory, config, tensors, vocabulary_tables(DRAFT_IDS, VOCAB_SIZE), swapped=swapped)


RECALLED = 5
"""So far back is the token that the next one of a recalling target is said by: five more can be drafted before they are known."""


def write_recalling_target(directory: Path, num_layers: int = 4) -> Path:
    """A target whose next token depends only on the token `RECALLED` positions before the current one."""
    return write_legible_target(directory, num_layers=num_layers, reads_mean=False, looks_back=RECALLED, hears_current=False)


def write_recalling_peagle(directory: Path, *, is_speculators: bool = False, offset: int = RECALLED) -> Path:
    """A P-EAGLE head for it: masked pairs find the same token in the true ones, and hear nothing else. Two layers, one of which is silent.

    Args:
        offset: how far back it looks; right is `RECALLED`.
    """
    tensors = silent_layer("layers.0.", 2 * HIDDEN, ["post_attention_layernorm"])
    query, key, value, out = (tensors[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkvo")
    query[:HEAD, CODE - 1], key[:HEAD, CODE - 1] = aimed(offset)
    value[:HEAD, :CODE], out[CODE : 2 * CODE, :HEAD] = np.eye(CODE), np.eye(CODE)
    embedding = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    embedding[:, :CODE] = codes()
    embedding[FIRST_TOKEN, CODE - 1] = -1.0
    tensors |= silent_layer("layers.1.", HIDDEN, ["input_layernorm", "post_attention_layernorm"])
    tensors |= {
        "fc.weight": np.zeros((HIDDEN, 3 * HIDDEN), np.float32),
        "mask_hidden": np.ones((1, 3 * HIDDEN), np.float32),
        "embed_tokens.weight": embedding,
        "layers.0.input_layernorm.weight": np.full(HIDDEN, np.sqrt(CODE / HIDDEN), np.float32),
        "layers.0.hidden_norm.weight": np.ones(HIDDEN, np.float32),
        "norm.weight": np.full(HIDDEN, np.sqrt(CODE / HIDDEN), np.float32),
        "lm_head.weight": recalling()[DRAFT_IDS],
    }
    sizes = legible_config(num_hidden_layers=2)
    more = {"draft_vocab_size": len(DRAFT_IDS), "eagle_aux_hidden_state_layer_ids": [0, 2, 4], "norm_before_residual": False}
    if is_speculators:
        layer = {**sizes, "model_type": "llama"}
        config = {"speculators_model_type": "peagle", "mask_token_id": 2, "transformer_layer_config": layer, **more}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "ptd_token_id": 2, **sizes, **more}
    return _write_legible(directory, config, tensors, vocabulary_tables(DRAFT_IDS, VOCAB_SIZE), swapped=False)


def _write_legible(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]], tables: Tensors | None = None, *, swapped: bool
) -> Path:
    """Args: swapped: what takes [embedding, feature] is written as if it took [feature, embedding]."""
    stored = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}
    if swapped:
        names = [name for name in stored if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) or name == "fc.weight"]
        for name in names:
            if stored[name].shape[1] == 2 * HIDDEN:
                stored[name] = torch.roll(stored[name], HIDDEN, dims=1)
    return write_head(directory, config, stored | (tables or {}))


def write_gguf_head(
    path: Path,
    spec: Spec,
    tensors: Tensors,
    *,
    boundaries: Sequence[int],
    matrix_type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A head as llama.cpp's converter writes it: ids in `d2t`, rows of q and k interleaved, other names.

    Args:
        tensors: those whose names begin with `raw ` are written by what follows it.
        metadata: in place of what would be written.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "eagle3")
    given = dict(metadata or {})
    for key, value in given.items():
        add = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(value)]
        add(f"eagle3.{key}", value)
    for key, name in {
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "context_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
    }.items():
        if key not in given:
            writer.add_uint32(f"eagle3.{key}", spec[name])
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", spec["rms_norm_eps"])
    if "extract_layers" not in given:
        writer.add_array("eagle3.extract_layers", list(boundaries))
    writer.add_uint32("eagle3.target_hidden_size", tensors["fc.weight"].shape[1] // len(boundaries))
    writer.add_bool("eagle3.norm_before_residual", bool(spec.get("norm_before_residual", False)))
    parts = {"input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
    parts |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names = {"norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd", "fc": "fc"}
    for name, values in tensors.items():
        if name == "t2d":
            continue
        if name.startswith("raw "):
            writer.add_tensor(name.removeprefix("raw "), values.numpy())
            continue
        if name == "d2t":
            writer.add_tensor(name, (values + torch.arange(len(values))).numpy())
            continue
        stem = name.removesuffix(".weight")
        array = values.numpy()
        if stem.startswith("midlayer."):
            stem = stem.removeprefix("midlayer.")
            heads = {"self_attn.q_proj": spec["num_attention_heads"], "self_attn.k_proj": spec["num_key_value_heads"]}.get(stem)
            if heads is not None:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType[matrix_type if array.ndim == 2 else "F32"]
        in_file = f"blk.0.{parts[stem]}.weight" if stem in parts else f"{names[stem]}.weight"
        writer.add_tensor(in_file, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
