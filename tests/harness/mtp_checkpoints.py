"""Tiny MTP modules inside plain dense models, in the layouts that exist, and one that must draft perfectly."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from harness.checkpoint_files import change_config, edit_tensors, read_values, write_values
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.expert_checkpoints import CASES
from harness.medusa_checkpoints import SUCCESSOR_HIDDEN

Arrays = dict[str, NDArray[Any]]
LAYOUTS = ("mtp", "extra_layer", "mtp_layers")
_NAMES = {
    "mtp": {
        "fc": "mtp.fc",
        "norm_e": "mtp.pre_fc_norm_embedding",
        "norm_h": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
        "layer": "mtp.layers.0",
    },
    "extra_layer": {
        "fc": "model.layers.{last}.eh_proj",
        "norm_e": "model.layers.{last}.enorm",
        "norm_h": "model.layers.{last}.hnorm",
        "norm": "model.layers.{last}.shared_head.norm",
        "layer": "model.layers.{last}",
        "lm_head": "model.layers.{last}.shared_head.head",
        "embed": "model.layers.{last}.embed_tokens",
    },
    "mtp_layers": {  # MiMo's
        "fc": "model.mtp_layers.0.input_proj",
        "norm_e": "model.mtp_layers.0.token_layernorm",
        "norm_h": "model.mtp_layers.0.hidden_layernorm",
        "norm": "model.mtp_layers.0.final_layernorm",
        "layer": "model.mtp_layers.0",
    },
}


def write_mimo(directory: Path, **overrides: Any) -> Path:
    """A random MiMo without its module: a qwen2 by another name."""
    write_checkpoint(directory, "qwen2", **overrides)
    return change_config(directory, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)


def write_glm4_moe(directory: Path, case: str = "glm4_moe", *, num_layers: int = 3, has_module: bool = True, **overrides: Any) -> Path:
    """A random GLM-4-MoE with its module, a mixture of experts as all of its layers but the first.

    Args:
        case: of `harness.expert_checkpoints.CASES`.
        overrides: values of its config.
    """
    family, values = CASES[case]
    write_checkpoint(directory, family, num_hidden_layers=num_layers + 1, **{**values, **overrides})
    change_config(directory, num_hidden_layers=num_layers, num_nextn_predict_layers=int(has_module))
    prefix, module = f"model.layers.{num_layers}.", random_module(seed=5)

    def change(tensors: Arrays) -> None:
        if has_module:
            joins = {name: array for name, array in module.items() if not name.startswith("layer.")}
            tensors |= {stored: joins[name] for stored, name in _stored_names("extra_layer", joins, num_layers).items()}
        else:
            for name in [name for name in tensors if name.startswith(prefix)]:
                del tensors[name]

    edit_tensors(directory, change)
    return directory


def write_speculators(directory: Path, arrays: Arrays, target: Path, **layer: Any) -> Path:
    """A module as the speculators library stores it: the mixing matrix takes the embedding's half first.

    Args:
        target: whose config is that of its layer.
        layer: changed in it.
    """
    directory.mkdir(parents=True)
    nested = {name: value for name, value in read_values(target).items() if name not in ("architectures", "dtype")}
    config = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "transformer_layer_config": {**nested, **layer}}
    write_values(directory, config)
    names = _stored_names("mtp_layers", arrays, 0)
    tensors = {stored.removeprefix("model."): np.ascontiguousarray(arrays[name]) for stored, name in names.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def _stored_names(layout: str, arrays: Arrays, num_layers: int) -> dict[str, str]:
    """Stored name -> ours."""
    names = {}
    for name in arrays:
        part, _, rest = name.partition(".")
        stored = _NAMES[layout][part].format(last=num_layers) + (f".{rest}" if rest else "")
        names[stored if name.endswith(".bias") else f"{stored}.weight"] = name
    return names


def random_module(*, hidden: int = 64, family: str = "qwen3", seed: int = 0) -> Arrays:
    """`fc`, `norm_e`, `norm_h`, `norm`, and the tensors of a layer by their names after `layer.`; norm weights as they multiply.

    Args:
        family: qwen3, or mimo, which has biases in place of norms of q and k.
    """
    random, inner, num_heads, num_kv_heads, head_size = np.random.default_rng(seed), 96, 4, 2, 16

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    arrays = {
        "fc": matrix(hidden, 2 * hidden),
        "norm_e": norm(hidden),
        "norm_h": norm(hidden),
        "norm": norm(hidden),
        "layer.input_layernorm": norm(hidden),
        "layer.post_attention_layernorm": norm(hidden),
        "layer.self_attn.q_proj": matrix(num_heads * head_size, hidden),
        "layer.self_attn.k_proj": matrix(num_kv_heads * head_size, hidden),
        "layer.self_attn.v_proj": matrix(num_kv_heads * head_size, hidden),
        "layer.self_attn.o_proj": matrix(hidden, num_heads * head_size),
        "layer.self_attn.q_norm": norm(head_size),
        "layer.self_attn.k_norm": norm(head_size),
        "layer.mlp.gate_proj": matrix(inner, hidden),
        "layer.mlp.up_proj": matrix(inner, hidden),
        "layer.mlp.down_proj": matrix(hidden, inner),
    }
    if family == "mimo":
        rows = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
        arrays = {name: array for name, array in arrays.items() if not name.endswith(("q_norm", "k_norm"))}
        arrays |= {f"layer.self_attn.{part}_proj.bias": matrix(1, count * head_size)[0] for part, count in rows.items()}
    return arrays


def add_module(directory: Path, layout: str, arrays: Arrays, *, num_layers: int, **own: NDArray[np.float32]) -> Path:
    """Store a module in the model in `directory`; `own`: its copies `lm_head` and `embed` ("extra_layer" alone has room)."""

    def change(tensors: Arrays) -> None:
        given = {**arrays, **own}
        for stored, name in _stored_names(layout, given, num_layers).items():
            array = given[name]
            if name == "fc" and layout == "mtp_layers":  # the feature's half comes first
                array = np.roll(array, array.shape[0], axis=1)
            tensors[stored] = array - 1.0 if "norm" in name and layout == "mtp" else array

    edit_tensors(directory, change)
    return directory


def perfect_module() -> Arrays:
    """A module for the successor target: it passes the pair's token on, and the target's matrix reads the successor off."""
    arrays = random_module(hidden=SUCCESSOR_HIDDEN, seed=3)
    arrays["fc"] = np.eye(SUCCESSOR_HIDDEN, 2 * SUCCESSOR_HIDDEN, dtype=np.float32)
    for name in ("norm_e", "norm_h", "norm"):
        arrays[name] = np.ones(SUCCESSOR_HIDDEN, np.float32)
    for name in ("layer.self_attn.o_proj", "layer.mlp.down_proj"):
        arrays[name] = np.zeros_like(arrays[name])
    return arrays


def random_matrix(seed: int) -> NDArray[np.float32]:
    """[V, 64], for a module's own embedding or vocabulary matrix."""
    return np.random.default_rng(seed).normal(0, 0.3, (VOCAB_SIZE, 64)).astype(np.float32)
