"""Tiny EAGLE heads in the formats they are published in, and a target with heads that must predict it perfectly."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from harness.checkpoint_files import edit_tensors
from harness.checkpoints import write_checkpoint
from harness.gguf_checkpoints import add_tensor, add_values, finish

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
NUM_LAYERS = 4
NEW, CURRENT, EARLIER = slice(0, CODE), slice(HIDDEN, HIDDEN + CODE), slice(HIDDEN + CODE, HIDDEN + 2 * CODE)
"""Columns of the queries, keys and values of an EAGLE-3 head."""
Arrays = dict[str, NDArray[np.float32]]
Edit = Callable[[Arrays], None]


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


def code_embedding() -> NDArray[np.float32]:
    """The codes, one row of the embedding each; only the first token's last value is negative."""
    embedding = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    embedding[:, :CODE] = codes()
    embedding[FIRST_TOKEN, CODE - 1] = -1.0
    return embedding


def attention_of(tensors: Arrays, layer: str) -> list[NDArray[np.float32]]:
    """The matrices of queries, keys, values and outputs of a layer."""
    return [tensors[f"{layer}self_attn.{part}_proj.weight"] for part in "qkvo"]


def look_back(tensors: Arrays, layer: str, offset: int, *, theta: float = 10000.0, size: float = 1.0) -> None:
    """Let head 0 write the code of the token `offset` before the current one after the current one's code.

    Args:
        size: what rows are divided by in front of the layer.
    """
    query, key, value, out = attention_of(tensors, layer)
    shape, mark = aimed(offset, theta)
    query[:HEAD, CODE - 1], key[:HEAD, CODE - 1] = shape * size, mark * size
    value[:HEAD, :CODE], out[CODE : 2 * CODE, :HEAD] = np.eye(CODE) * size, np.eye(CODE)


def hear_all(tensors: Arrays, layer: str, *, size: float = 1.0) -> None:
    """Let head 1 write the mean of all tokens but the first one, whose key is far away: its constant is negative."""
    query, key, value, out = attention_of(tensors, layer)
    slowest = HEAD + HEAD // 2 - 1  # turns least
    query[slowest, CODE - 1], key[slowest, CODE - 1] = size, 100.0 * size
    value[HEAD : 2 * HEAD, :CODE], out[2 * CODE :, HEAD : 2 * HEAD] = mixture() * size, np.eye(CODE)


def write_legible_target(directory: Path, *, reads_mean: bool = True, looks_back: int = 1, hears_current: bool = True) -> Path:
    """A llama whose next token depends on its current token, the one `looks_back` before it and, in a share, the mean of all."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": NUM_LAYERS, "head_dim": HEAD, "rms_norm_eps": 1e-6}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 1024, "bos_token_id": FIRST_TOKEN}
    write_checkpoint(directory, "llama", **sizes, **heads)

    def change(tensors: Arrays) -> None:
        for name, array in tensors.items():
            array[...] = 1.0 if name.endswith("layernorm.weight") else 0.0
        size = np.sqrt(CODE / HIDDEN)  # of a row: what the norm divides by
        look_back(tensors, "model.layers.0.", looks_back, size=size)
        if reads_mean:
            hear_all(tensors, "model.layers.0.", size=size)
        # without the mean all rows are of one size: features are the rows
        tensors["model.norm.weight"][...] = np.sqrt(2 * CODE / HIDDEN)
        tensors["model.embed_tokens.weight"] = code_embedding()
        tensors["lm_head.weight"] = speaking() if hears_current else recalling()

    edit_tensors(directory, change)
    return directory


def mixture() -> NDArray[np.float32]:
    """[CODE, CODE] what a token adds to the mean."""
    return np.random.default_rng(2).normal(0.0, 2.0 * CODE**-0.5, (CODE, CODE)).astype(np.float32)


def legible_config(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "intermediate_size": 8, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, **more,
    }  # fmt: skip


def silent_layer(prefix: str, columns: int, norms: Sequence[str]) -> Arrays:
    """A layer that adds nothing."""
    shapes = {**{f"self_attn.{part}_proj": (HIDDEN, columns) for part in "qkv"}, "self_attn.o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"mlp.gate_proj": (8, HIDDEN), "mlp.up_proj": (8, HIDDEN), "mlp.down_proj": (HIDDEN, 8)}
    tensors = {f"{prefix}{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return tensors | {f"{prefix}{norm}.weight": np.ones(HIDDEN, np.float32) for norm in norms}


def write_listening_eagle1(directory: Path, *, swapped: bool = False) -> Path:
    """For the target that depends on the mean: reads tokens only, all of them through its own cache."""
    tensors = silent_layer("layers.0.", HIDDEN, ["post_attention_layernorm"])
    look_back(tensors, "layers.0.", 1)
    hear_all(tensors, "layers.0.")
    return _write_legible(directory, legible_config(bias=False), tensors | {"fc.weight": code_of_the_token()}, swapped=swapped)


def code_of_the_token() -> NDArray[np.float32]:
    """A matrix [HIDDEN, 2 * HIDDEN] that takes the code from the embedding, and nothing from the feature."""
    fc = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    fc[:CODE, :CODE] = np.eye(CODE)
    return fc


def write_reading_eagle1(directory: Path, *, swapped: bool = False, max_positions: int = 1024, **config: Any) -> Path:
    """For the target without the mean: reads the token before the current one from the feature alone."""
    fc = code_of_the_token()
    fc[CODE : 2 * CODE, HIDDEN : HIDDEN + CODE] = np.eye(CODE)
    tensors = silent_layer("layers.0.", HIDDEN, ["post_attention_layernorm"]) | {"fc.weight": fc}
    values = legible_config(bias=False, max_position_embeddings=max_positions, **config)
    return _write_legible(directory, values, tensors, swapped=swapped)


def write_reading_eagle3(directory: Path, edit: Edit = lambda tensors: None, *, swapped: bool = False, **config: Any) -> Path:
    """For the target without the mean: turns the feature of a position into that of the next one, by its attention to itself.

    Args:
        edit: changes the tensors.
        config: added to config.json; None takes a value away.
    """
    tensors = silent_layer("midlayer.", 2 * HIDDEN, ["post_attention_layernorm"])
    fc = np.zeros((HIDDEN, 3 * HIDDEN), np.float32)
    fc[:, 2 * HIDDEN :] = np.eye(HIDDEN)
    query, key, value, out = attention_of(tensors, "midlayer.")
    for head in (0, 1):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        query[rows, CODE - 1], key[rows, CODE - 1] = aimed(0)
        out[rows, rows] = np.eye(CODE)
    value[:HEAD, NEW], value[:HEAD, CURRENT] = np.eye(CODE), -np.eye(CODE)
    value[HEAD : 2 * HEAD, CURRENT], value[HEAD : 2 * HEAD, EARLIER] = np.eye(CODE), -np.eye(CODE)
    size = np.full(HIDDEN, np.sqrt(2 * CODE / HIDDEN), np.float32)
    tensors |= {
        "fc.weight": fc,
        "midlayer.input_layernorm.weight": np.full(HIDDEN, np.sqrt(CODE / HIDDEN), np.float32),
        "midlayer.hidden_norm.weight": size,
        "norm.weight": size.copy(),
        "lm_head.weight": speaking()[DRAFT_IDS],
    }
    edit(tensors)
    values = legible_config(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(DRAFT_IDS), norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[0, 2, 4],
    )  # fmt: skip
    values = {name: value for name, value in {**values, **config}.items() if value is not None}
    return _write_legible(directory, values, tensors, vocabulary_tables(DRAFT_IDS, VOCAB_SIZE), swapped=swapped)


RECALLED = 5
"""So far back is the token that the next one of a recalling target is said by: five more can be drafted before they are known."""


def write_recalling_target(directory: Path) -> Path:
    """A target whose next token depends only on the token `RECALLED` positions before the current one."""
    return write_legible_target(directory, reads_mean=False, looks_back=RECALLED, hears_current=False)


def write_recalling_peagle(directory: Path, *, is_speculators: bool = False, offset: int = RECALLED) -> Path:
    """A P-EAGLE head for it: masked pairs find the same token in the true ones, and hear nothing else. Two layers, one of which is silent.

    Args:
        offset: how far back it looks; right is `RECALLED`.
    """
    tensors = silent_layer("layers.0.", 2 * HIDDEN, ["post_attention_layernorm"])
    look_back(tensors, "layers.0.", offset)
    tensors |= silent_layer("layers.1.", HIDDEN, ["input_layernorm", "post_attention_layernorm"])
    tensors |= {
        "fc.weight": np.zeros((HIDDEN, 3 * HIDDEN), np.float32),
        "mask_hidden": np.ones((1, 3 * HIDDEN), np.float32),
        "embed_tokens.weight": code_embedding(),
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


def _write_legible(directory: Path, config: Mapping[str, Any], tensors: Arrays, tables: Tensors | None = None, *, swapped: bool) -> Path:
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
    sizes = {
        "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "context_length": "max_position_embeddings", "vocab_size": "vocab_size",
    }  # fmt: skip
    values = {key: spec[name] for key, name in sizes.items()} | {"attention.layer_norm_rms_epsilon": spec["rms_norm_eps"]}
    values |= {"extract_layers": list(boundaries), "target_hidden_size": tensors["fc.weight"].shape[1] // len(boundaries)}
    values |= {"norm_before_residual": bool(spec.get("norm_before_residual", False)), **(metadata or {})}
    add_values(writer, {f"eagle3.{key}": value for key, value in values.items()})
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
        in_file = f"blk.0.{parts[stem]}.weight" if stem in parts else f"{names[stem]}.weight"
        add_tensor(writer, in_file, array, matrix_type if array.ndim == 2 else "F32")
    return finish(writer, path)
